"""A real full disk in the middle of a run: one clear line, and the earlier checkpoint carries on."""

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from diladiff.engine import checkpoint
from tests.engine import driver

pytestmark = pytest.mark.slow


@pytest.fixture
def small_disk(tmp_path) -> Iterator[Path]:
    """A file system of four megabytes; only the superuser may make one."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=4M", "tmpfs", str(folder)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system of our own: {mounted.stderr.strip()}")
    yield folder
    # Lazily: a checkpoint that was loaded stays mapped until the collector comes by.
    subprocess.run(["umount", "--lazy", str(folder)], check=True)


def test_the_checkpoint_before_stays_whole(small_disk):
    run, filler = small_disk / "run", small_disk / "filler"
    driver.train(run, steps=8, stop_after=2)
    with open(filler, "wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(4096))
    with open(filler, "r+b") as file:
        file.truncate(filler.stat().st_size - 30_000)  # rows fit, a checkpoint does not
    with pytest.raises(OSError, match=r"step_000004 .*No space left on device.*step_000002 is whole"):
        driver.train(run, steps=8)
    assert checkpoint.latest(run).name == "step_000002"
    checkpoint.check(run, checkpoint.latest(run))
    filler.unlink()
    assert driver.train(run, steps=8).stop == "finished"
