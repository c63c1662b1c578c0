"""Running the driver of tests/engine under torchrun."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

DRIVER = Path(__file__).parents[1] / "engine" / "driver.py"


@pytest.fixture(scope="session")
def torchrun() -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Give a function that runs jobs in two processes, which meet on a port of their own choice."""

    def run(*jobs: dict[str, Any], script: Path = DRIVER) -> "subprocess.CompletedProcess[str]":
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
        return subprocess.run(
            [*command, str(script), json.dumps(jobs)], capture_output=True, text=True, timeout=240, check=False
        )

    return run
