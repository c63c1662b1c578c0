"""What all tests share: one thread each, no network, and the parts that `make parts` downloads."""

import os
from collections.abc import Callable, Generator
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


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    """Turn a skip for want of parts into a failure where DILADIFF_REQUIRE_PARTS=1 (continuous integration)."""
    report = yield
    if report.skipped and item.get_closest_marker("parts") and os.environ.get("DILADIFF_REQUIRE_PARTS") == "1":
        report.outcome = "failed"
        report.longrepr = f"{item.nodeid} was skipped, and DILADIFF_REQUIRE_PARTS=1 forbids it: {report.longrepr}"
    return report


@pytest.fixture(scope="session")
def parts() -> Callable[[str], Path]:
    """Give a function from a part's name to its folder, which skips the test where that part is absent."""
    root = Path(os.environ.get("DILADIFF_PARTS") or Path.home() / ".cache" / "diladiff" / "parts")

    def find(name: str) -> Path:
        folder = root / name
        if folder.is_dir():
            return folder
        pytest.skip(f"the part {name!r} is not in {root}: run `make parts`")

    return find
