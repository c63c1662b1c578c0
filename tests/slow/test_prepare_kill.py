"""Killed with SIGKILL at random moments, prepare goes on to the bytes of an uninterrupted run, and leaves nobody."""

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.data.corpora import texts, write_jsonl

SCRIPT = """
import sys
from pathlib import Path
from diladiff.data import feeds, prepare
from diladiff.data.settings import PrepareConfig

if __name__ == "__main__":
    feeds.TASK_ROWS, prepare.SAFE_EVERY_SECONDS = 16, 0.02
    inputs, out, workers = (sys.argv[1], sys.argv[2]), Path(sys.argv[3]), int(sys.argv[4])
    config = PrepareConfig(
        inputs=inputs, out=out, train_tokenizer=300, valid_share=0.1, shard_tokens=15_000, workers=workers
    )
    prepare.prepare(config)
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def group_is_gone(group: int) -> bool:
    try:
        os.killpg(group, 0)
    except ProcessLookupError:
        return True
    return False


@pytest.mark.slow
@pytest.mark.parametrize("workers", [1, 2])
def test_killed_at_random_moments(tmp_path: Path, workers: int) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    sources = [str(write_jsonl(tmp_path / f"{n}.jsonl", texts(3000, seed=n))) for n in range(2)]

    def start(out: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, str(script), *sources, str(tmp_path / out), str(workers)]
        return subprocess.Popen(command, start_new_session=True)

    begin = time.monotonic()
    straight = start("straight")
    assert straight.wait() == 0
    whole = time.monotonic() - begin

    chance, kills = random.Random(workers), 0
    for _ in range(40):
        process = start("killed")
        try:
            process.wait(timeout=whole * chance.uniform(0.3, 1.0))
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGKILL)  # the parent alone: its workers have to notice
            kills += 1
        assert process.wait() in (0, -signal.SIGKILL)
        deadline = time.monotonic() + 30
        while not group_is_gone(process.pid) and time.monotonic() < deadline:
            time.sleep(0.05)
        assert group_is_gone(process.pid), "a worker outlived its parent"
        if (tmp_path / "killed").exists():
            break
    assert kills >= 1
    assert contents(tmp_path / "straight") == contents(tmp_path / "killed")
    assert not (tmp_path / "killed.unfinished").exists()
