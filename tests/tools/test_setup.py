"""The set-up script says what is wrong before it downloads anything, and leaves a finished environment alone."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

OURS = ("PYTHON", "TORCH", "TORCH_INDEX", "XDG_CACHE_HOME")
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def clone(tmp_path):
    """A folder with a space in its name that holds what the set-up reads, and a folder of commands that come first."""
    folder = tmp_path / "a clone"
    (folder / "tools").mkdir(parents=True)
    shutil.copy(ROOT / "tools/setup.sh", folder / "tools")
    shutil.copy(ROOT / "pyproject.toml", folder)
    (tmp_path / "bin").mkdir()
    return folder


def command(clone: Path, name: str, script: str) -> None:
    """Put a command of our own before the real ones."""
    path = clone.parent / "bin" / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)


def setup(clone: Path, **environment: str) -> subprocess.CompletedProcess:
    """Run the set-up there."""
    paths = f"{clone.parent / 'bin'}{os.pathsep}{os.environ['PATH']}"
    clean = {name: value for name, value in os.environ.items() if name not in OURS}
    return subprocess.run(
        ["bash", str(clone / "tools/setup.sh"), "run"],
        env={**clean, "PATH": paths, "HOME": str(clone.parent), **environment},
        capture_output=True,
        text=True,
        check=False,
    )


def bare(clone: Path) -> str:
    """A Python that is new enough and has neither torch nor venv."""
    command(clone, "bare", 'case "$2" in *ensurepip*) exit 1 ;; *torch*) exit 1 ;; esac; echo "Python 3.11.2"')
    return "bare"


def test_an_old_python_is_refused(clone):
    command(clone, "old", 'if [ "$1" = --version ]; then echo "Python 3.9.2"; else exit 1; fi')
    done = setup(clone, PYTHON="old")
    assert done.returncode == 1
    assert done.stderr.strip().endswith(
        "old is Python 3.9.2: too old or too new; name a Python 3.11 to 3.14 by PYTHON=..."
    )
    assert not (clone / ".venv").exists()


def test_a_python_that_is_not_there_is_named(clone):
    done = setup(clone, PYTHON="python-of-nowhere")
    assert done.returncode == 1
    assert "PYTHON=python-of-nowhere is not a command" in done.stderr


def test_a_full_disk_is_seen_beforehand(clone):
    command(clone, "df", "echo header; echo disk 1000 990 10 99% /")
    done = setup(clone, TORCH="torch==2.13.0")  # or else the Python on hand is asked for its own
    assert done.returncode == 1
    assert "the disk is too full" in done.stderr
    assert "has 10 MB free" in done.stderr
    assert not (clone / ".venv").exists()


def test_a_missing_venv_module_is_named(clone):
    done = setup(clone, PYTHON=bare(clone))
    assert done.returncode == 1
    assert "bare has no venv module" in done.stderr


def test_in_a_path_with_a_space_the_environment_stands_elsewhere(clone):
    """torch.compile does not quote the folder that it hands to a C++ compiler."""
    makes = 'for last; do :; done; mkdir -p "$last/bin"; cp "$0" "$last/bin/python"'
    command(clone, "fake", f'case "$*" in "-m venv"*) {makes} ;; *torch*) exit 1 ;; esac; [ $# != 0 ]')
    done = setup(clone, PYTHON="fake")
    assert "the package index has no torch==" in done.stderr
    target = (clone / ".venv").readlink()
    assert (target / "bin/python").is_file()
    assert " " not in str(target.relative_to(clone.parent))


def test_a_finished_environment_is_left_alone(clone):
    clone = clone.rename(clone.parent / "clone")
    python = clone / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\n[ "$*" = "-c " ] || { echo "touched: $*" >&2; exit 1; }\n')
    python.chmod(0o755)
    project = (clone / "pyproject.toml").read_bytes()
    checksum = subprocess.run(["cksum"], input=project, capture_output=True, check=True).stdout.decode().strip()
    stamp = f"{clone}\nPYTHON= TORCH= TORCH_INDEX=\n{checksum}\ndev\n"
    (clone / ".venv/diladiff-setup").write_text(stamp)
    done = setup(clone)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")

    (clone / ".venv/diladiff-setup").write_text(stamp.replace("/clone", "/another"))
    assert "making .venv" in setup(clone, PYTHON=bare(clone)).stdout


@pytest.mark.parametrize(("version", "lent"), [("2.12.1", True), ("2.10.0", False)])
def test_a_torch_that_is_installed_is_lent(clone, version, lent):
    pretends = f'case "$*" in "-m venv"*) echo "$@" >&2; exit 1 ;; *torch*) [ {version} = 2.12.1 ] ;; *) true ;; esac'
    command(clone, "lender", pretends)
    done = setup(clone, PYTHON="lender")
    assert ("which brings its own torch" in done.stdout) is lent
    assert ("--system-site-packages" in done.stderr) is lent
    assert "--system-site-packages" not in setup(clone, PYTHON="lender", TORCH="torch==2.13.0").stderr
