"""Processes: who they are (from torchrun's environment), what device each has, and how they agree.

Every function here works in a single process too, where it costs nothing.
"""

import contextlib
import os
from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor


def rank() -> int:
    """This process's number among all of them."""
    return dist.get_rank() if dist.is_initialized() else 0


def world() -> int:
    """How many processes train together."""
    return dist.get_world_size() if dist.is_initialized() else 1


def is_main() -> bool:
    """Whether this process is the one that writes files."""
    return rank() == 0


def choose_device(name: str | None = None) -> torch.device:
    """The device that was named, else the best there is; under torchrun each local process has its own GPU."""
    kind = name
    if kind is None:
        kind = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"
    device = torch.device(kind)
    if device.type == "cuda":
        if not torch.cuda.is_available():
            raise ValueError(f"device: {name} was asked for, but torch sees no CUDA device; use cpu")
        if device.index is None:
            device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        if device.index >= torch.cuda.device_count():
            raise ValueError(f"device: {device} does not exist, torch sees {torch.cuda.device_count()} CUDA device(s)")
    return device


@contextlib.contextmanager
def session(device_name: str | None = None) -> Iterator[torch.device]:
    """Join the processes that torchrun started, if it did, and leave them cleanly; yields this process's device."""
    device = choose_device(device_name)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    if "TORCHELASTIC_RUN_ID" not in os.environ:
        yield device
        return
    if device.type == "cuda":
        dist.init_process_group("nccl", device_id=device)
    else:
        dist.init_process_group("gloo")
    yield device
    # Only a finished process waits for the others: after an error they may never come, and torchrun ends them.
    barrier(device)
    dist.destroy_process_group()


def exact_dtype(device: torch.device) -> torch.dtype:
    """The widest floating-point type of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def barrier(device: torch.device) -> None:
    """Wait until every process is here."""
    if world() > 1:
        sum_over_ranks(torch.zeros((), device=device)).item()


def sum_over_ranks(tensor: Tensor) -> Tensor:
    """Add a tensor over all processes, in place."""
    if world() > 1:
        dist.all_reduce(tensor)
    return tensor


def on_main(task: Callable[[], None], device: torch.device) -> None:
    """Run a task in the main process alone; its ValueError or OSError is raised in every process."""
    failure: ValueError | OSError | None = None
    if is_main():
        try:
            task()
        except (ValueError, OSError) as error:
            failure = error
    if world() > 1:
        code = 0 if failure is None else 1 if isinstance(failure, ValueError) else 2
        message = _broadcast_text(str(failure or ""), device)
        code = int(_broadcast(torch.tensor(code, device=device)).item())
        if code and not is_main():
            failure = ValueError(message) if code == 1 else OSError(message)
    if failure is not None:
        raise failure


def _broadcast(tensor: Tensor) -> Tensor:
    dist.broadcast(tensor, src=0)
    return tensor


def _broadcast_text(text: str, device: torch.device) -> str:
    data = text.encode()
    size = int(_broadcast(torch.tensor(len(data), device=device)).item())
    if size == 0:
        return ""
    values = list(data) if is_main() else [0] * size
    return bytes(_broadcast(torch.tensor(values, dtype=torch.uint8, device=device)).tolist()).decode()
