"""A finished torchrun exits 0, five times out of five; an interrupted one saves in all its processes."""

import pytest

from diladiff.engine import checkpoint
from tests.distributed.conftest import torchrun  # noqa: F401

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("attempt", range(5))
def test_a_finished_launch_exits_0(torchrun, tmp_path, attempt):  # noqa: F811
    parallel = ("ddp", "fsdp2")[attempt % 2]
    done = torchrun({"run": str(tmp_path / "run"), "steps": 2, "parallel": parallel})
    assert done.returncode == 0, done.stderr
    assert sorted(done.stdout.splitlines()) == ["0 finished 2", "1 finished 2"]
    assert checkpoint.latest(tmp_path / "run").name == "step_000002"
