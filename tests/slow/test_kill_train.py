"""kill -9 at 20 random moments, resume each time: the weights of a straight run, and every row of its log."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diladiff.engine import checkpoint
from diladiff.engine.logging import read_rows
from tests.slow import killer

pytestmark = pytest.mark.slow
KILLS = 20
ROOT = Path(__file__).parents[2]


def run(folder, kills):
    command = [sys.executable, "-m", "tests.slow.killer", str(folder), str(kills), "0"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=240, check=False, env=os.environ)
    assert done.returncode == 0, done.stderr
    return int(done.stdout)


def test_a_run_that_is_killed_20_times_loses_nothing(tmp_path):
    straight, killed = tmp_path / "straight", tmp_path / "killed"
    assert run(straight, 0) == 0
    assert run(killed, KILLS) >= KILLS // 2
    first, second = checkpoint.latest(straight), checkpoint.latest(killed)
    assert first.name == second.name == f"step_{killer.STEPS:06d}"
    for path in sorted(first.glob("*.safetensors")):
        a, b = load_file(path), load_file(second / path.name)
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a), path.name
    skip = ("seconds", "tokens_per_s")
    rows = [[{k: v for k, v in row.items() if k not in skip} for row in read_rows(f)] for f in (straight, killed)]
    assert rows[0] == rows[1]
    exported = [load_file(f / "model" / "weights.safetensors") for f in (straight, killed)]
    assert all(torch.equal(exported[0][name], exported[1][name]) for name in exported[0])
    assert not list(killed.rglob("*.tmp-*"))
