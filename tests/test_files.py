"""Files that are whole or not there: atomic writes, folders with manifests, damage that is named."""

import os

import pytest

from diladiff import files


def fill(folder):
    (folder / "sub").mkdir()
    (folder / "weights.bin").write_bytes(bytes(range(256)) * 8)
    (folder / "sub" / "config.json").write_text('{"a": 1}')


def test_write_atomic_keeps_the_old_file_when_writing_fails(tmp_path, monkeypatch):
    path = tmp_path / "LATEST"
    files.write_atomic(path, "old")

    def full(_handle):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        files.write_atomic(path, "new")
    assert path.read_text() == "old"
    assert os.listdir(tmp_path) == ["LATEST"]


def test_a_folder_appears_whole_and_verifies(tmp_path):
    with files.fresh_folder(tmp_path / "model") as folder:
        fill(folder)
        assert not (tmp_path / "model").exists()
    files.verify(tmp_path / "model")
    assert os.listdir(tmp_path) == ["model"]


def test_a_failed_writer_leaves_the_older_folder_and_no_rubbish(tmp_path):
    with files.fresh_folder(tmp_path / "model") as folder:
        fill(folder)
    with pytest.raises(FileNotFoundError), files.fresh_folder(tmp_path / "model") as folder:
        (folder / "weights.bin").write_bytes((folder / "absent").read_bytes())
    files.verify(tmp_path / "model")
    assert (tmp_path / "model" / "weights.bin").stat().st_size == 2048
    assert os.listdir(tmp_path) == ["model"]


def test_every_file_has_the_mode_that_the_user_s_mask_gives(tmp_path):
    (tmp_path / "usual").touch()
    with files.fresh_folder(tmp_path / "model") as folder:
        fill(folder)
        (folder / "weights.bin").chmod(0o600)  # as safetensors leaves its files
        (folder / "sub" / "config.json").chmod(0o755)
    modes = {path.stat().st_mode for path in (tmp_path / "model").rglob("*") if path.is_file()}
    assert modes == {(tmp_path / "usual").stat().st_mode}


def test_a_new_folder_replaces_the_older_one(tmp_path):
    for text in ("old", "new"):
        with files.fresh_folder(tmp_path / "model") as folder:
            (folder / "note").write_text(text)
    assert (tmp_path / "model" / "note").read_text() == "new"
    assert os.listdir(tmp_path) == ["model"]


@pytest.mark.parametrize("name", ["weights.bin", "sub/config.json", "manifest.json"])
def test_every_flipped_bit_is_caught_and_named(tmp_path, name):
    with files.fresh_folder(tmp_path / "model") as folder:
        fill(folder)
    path = tmp_path / "model" / name
    whole = path.read_bytes()
    for bit in range(0, len(whole) * 8, 97):
        changed = bytearray(whole)
        changed[bit // 8] ^= 1 << bit % 8
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=r"weights.bin|config.json|manifest.json"):
            files.verify(tmp_path / "model")


def test_cut_missing_and_unlisted_files_are_named(tmp_path):
    with files.fresh_folder(tmp_path / "model") as folder:
        fill(folder)
    weights = tmp_path / "model" / "weights.bin"
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(ValueError, match=r"weights.bin has 2047 bytes instead of 2048"):
        files.verify(tmp_path / "model")
    weights.unlink()
    with pytest.raises(ValueError, match=r"weights.bin is missing"):
        files.verify(tmp_path / "model")
    files.verify(tmp_path / "model", only=["sub/config.json"])
    with pytest.raises(ValueError, match=r"does not list other.bin"):
        files.verify(tmp_path / "model", only=["other.bin"])
    with pytest.raises(ValueError, match=r"has no manifest.json"):
        files.verify(tmp_path)


def test_stale_temporaries_are_removed_and_nothing_else(tmp_path):
    (tmp_path / ".step_000010.tmp-0123456789ab").mkdir()
    (tmp_path / "step_000005").mkdir()
    assert [path.name for path in files.remove_stale(tmp_path)] == [".step_000010.tmp-0123456789ab"]
    assert os.listdir(tmp_path) == ["step_000005"]


def test_read_json_names_the_file(tmp_path):
    (tmp_path / "a.json").write_text("{")
    with pytest.raises(ValueError, match=r"a.json is not valid JSON"):
        files.read_json(tmp_path / "a.json")
