"""What all tests share: one thread each, no network, and the parts that `make parts` downloads."""

import os
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch: sub-processes started by tests inherit it
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
import torch

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs a GPU where there is none."""
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")


@pytest.fixture(scope="session")
def parts() -> Callable[[str], Path]:
    """Give a function from a part's name to its folder: it skips where the part is absent, or fails if parts are required."""
    root = Path(os.environ.get("DILADIFF_PARTS") or Path.home() / ".cache" / "diladiff" / "parts")

    def find(name: str) -> Path:
        folder = root / name
        if folder.is_dir():
            return folder
        reason = f"the part {name!r} is not in {root}: run `make parts`"
        if os.environ.get("DILADIFF_REQUIRE_PARTS") == "1":
            pytest.fail(reason)
        pytest.skip(reason)

    return find
