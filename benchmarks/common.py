"""What the benchmark scripts share: timing that is warm and synchronised, the machine's ceilings, dated result lines.

A result is one JSON line in benchmarks/results/DATE.jsonl with the fields name, value, unit, batch, steps, spread,
repeats, device, versions, commit, time and settings. Scripts import this file as `common`, so run them by their path.
"""

import datetime
import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch

RESULTS = Path(__file__).resolve().parent / "results"


class Timing(NamedTuple):
    """Seconds of one call: the median of the repeats, half the distance of their quartiles, and how many there were."""

    median_s: float
    spread_s: float
    repeats: int


def pick_device(name: str | None) -> torch.device:
    """The named device, or the GPU where there is one."""
    if name is not None:
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def synchronize(device: torch.device) -> None:
    """Wait until the device has done all it was asked to do."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def measure(call: Callable[[], Any], device: torch.device, *, repeats: int, warmups: int = 3) -> Timing:
    """Time a call: some calls unmeasured, then `repeats` ones, each between two synchronisations."""
    for _ in range(warmups):
        call()
    seconds = []
    for _ in range(repeats):
        synchronize(device)
        started = time.perf_counter()
        call()
        synchronize(device)
        seconds.append(time.perf_counter() - started)
    low, _, high = statistics.quantiles(seconds, n=4) if repeats > 1 else (seconds[0],) * 3
    return Timing(statistics.median(seconds), (high - low) / 2, repeats)


def ceilings(device: torch.device, *, dtype: torch.dtype = torch.bfloat16, repeats: int = 20) -> dict[str, float]:
    """What the device itself reaches: a square matrix product in TFLOP/s and a copy (read plus write) in TB/s.

    The sizes are 8192 and 4 GiB on a GPU, small on a CPU, where float32 is used whatever `dtype` says.
    """
    on_gpu = device.type == "cuda"
    size, count = (8192, 2**31) if on_gpu else (1024, 2**24)
    dtype = dtype if on_gpu else torch.float32
    left, right = (torch.randn(size, size, device=device, dtype=dtype) for _ in range(2))
    product = measure(lambda: left @ right, device, repeats=repeats)
    source = torch.ones(count, device=device, dtype=torch.int16)
    target = torch.empty_like(source)
    copy = measure(lambda: target.copy_(source), device, repeats=repeats)
    return {"matmul_tflops": 2 * size**3 / product.median_s / 1e12, "copy_tbs": 4 * count / copy.median_s / 1e12}


def record_ceilings(device: torch.device, *, results: Path = RESULTS) -> dict[str, float]:
    """Measure the ceilings and record them as `matmul` (TFLOP/s) and `copy` (TB/s); returns `ceilings`' values."""
    values = ceilings(device)
    record("matmul", values["matmul_tflops"], "TFLOP/s", device=device, results=results)
    record("copy", values["copy_tbs"], "TB/s", device=device, results=results)
    return values


def record(
    name: str,
    value: float,
    unit: str,
    *,
    device: torch.device,
    batch: int | None = None,
    steps: int | None = None,
    spread: float | None = None,
    repeats: int | None = None,
    settings: dict[str, Any] | None = None,
    results: Path = RESULTS,
) -> dict[str, Any]:
    """Print a result and append it to today's file; `settings` holds whatever else changes what the number means."""
    now = datetime.datetime.now(datetime.UTC)
    line = {
        "name": name,
        "value": value,
        "unit": unit,
        "batch": batch,
        "steps": steps,
        "spread": spread,
        "repeats": repeats,
        "device": describe(device),
        "versions": versions(),
        "commit": commit(),
        "time": now.isoformat(timespec="seconds"),
        "settings": settings or {},
    }
    results.mkdir(parents=True, exist_ok=True)
    with open(results / f"{now:%Y-%m-%d}.jsonl", "a") as file:
        file.write(json.dumps(line) + "\n")
    where = ", ".join(f"{key} {line[key]}" for key in ("batch", "steps") if line[key] is not None)
    print(f"{name:<16} {value:12.5g} {unit:<10} {where}" + ("" if spread is None else f"  (+- {spread:.2g})"))
    return line


def describe(device: torch.device) -> str:
    """The device in words."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return f"{device.type} {platform.machine()}, {torch.get_num_threads()} threads"


def versions() -> dict[str, str]:
    """The versions that a speed depends on."""
    found = {"python": platform.python_version(), "torch": torch.__version__}
    if torch.version.cuda is not None:
        found["cuda"] = torch.version.cuda
    return found


def commit() -> str | None:
    """The commit of the working tree, with a + where it has changes; None outside a repository."""
    here = Path(__file__).resolve().parent
    try:
        name = subprocess.run(["git", "rev-parse", "HEAD"], cwd=here, capture_output=True, text=True, check=True)
        changes = subprocess.run(
            ["git", "status", "--porcelain", "--untracked-files=no"],
            cwd=here,
            capture_output=True,
            text=True,
            check=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return name.stdout.strip() + ("+" if changes.stdout.strip() else "")
