"""An objective over several processes: its blocks compiled, then the whole of it wrapped (DDP) or sharded (FSDP2).

Networks know nothing of this. Parameters that FSDP2 sharded are DTensors; `local` and `full` are the only ways in which
the rest of the engine looks at them.
"""

import contextlib
import inspect
from collections.abc import Iterator
from typing import Literal

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, fully_shard, register_fsdp_forward_method
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

from diladiff.engine import distributed
from diladiff.objectives.base import Objective

Parallel = Literal["ddp", "fsdp2"]

# torch 2.13 warns of the name that torch 2.11 knows.
_DDP_OPTIONS = inspect.signature(DistributedDataParallel).parameters
_BUFFER_SYNC = "forward_sync_buffers" if "forward_sync_buffers" in _DDP_OPTIONS else "broadcast_buffers"


def parallelize(objective: Objective, *, mode: Parallel, compile_blocks: bool, device: torch.device) -> nn.Module:
    """The module to call for the loss. The objective itself stays what it was, but for its parameters under FSDP2."""
    if compile_blocks:
        for block in objective.blocks():
            block.compile()
    if distributed.world() == 1:
        return objective
    for tensor in [*objective.parameters(), *objective.buffers()]:
        dist.broadcast(tensor.detach(), src=0)
    if mode == "fsdp2":
        mesh = init_device_mesh(device.type, (distributed.world(),))
        for block in objective.blocks():
            if next(block.parameters(), None) is not None:
                fully_shard(block, mesh=mesh)
        fully_shard(objective, mesh=mesh)
        register_fsdp_forward_method(objective, "validate")
        return objective
    # Statistics are averaged over processes by the engine itself, so that DDP and FSDP2 do the same.
    options = {_BUFFER_SYNC: False, "gradient_as_bucket_view": True}
    return DistributedDataParallel(objective, **options)  # type: ignore[arg-type]


@contextlib.contextmanager
def accumulating(module: nn.Module, *, last: bool) -> Iterator[None]:
    """Forward and backward of one micro-batch: gradients are reduced over processes after the last one only."""
    if isinstance(module, DistributedDataParallel) and not last:
        with module.no_sync():
            yield
        return
    if isinstance(module, FSDPModule):
        module.set_requires_gradient_sync(last)
    yield


@contextlib.contextmanager
def changeable(objective: Objective) -> Iterator[None]:
    """While it lasts parameters may be replaced; no copy that FSDP2 gathered is used across the change."""
    _reshard(objective)
    try:
        yield
    finally:
        _reshard(objective)


@contextlib.contextmanager
def gathered(objective: Objective) -> Iterator[None]:
    """While it lasts the main process's parameters are plain whole tensors, copies of what they were."""
    wholes: dict[DTensor, nn.Parameter] = {}
    places = []
    for module in objective.modules():
        for name, param in module.named_parameters(recurse=False):
            if isinstance(param, DTensor):
                if param not in wholes:
                    whole = full(local(param), param)
                    wholes[param] = nn.Parameter(whole, requires_grad=param.requires_grad)
                places.append((module, name, param))
    if not distributed.is_main():
        wholes.clear()
    try:
        for module, name, param in places:
            setattr(module, name, wholes.get(param, param))
        yield
    finally:
        for module, name, param in places:
            setattr(module, name, param)


def _reshard(objective: Objective) -> None:
    for module in objective.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def is_sharded(tensor: Tensor) -> bool:
    """Whether each process holds a part of this tensor only."""
    return isinstance(tensor, DTensor)


def local(tensor: Tensor) -> Tensor:
    """This process's part of a tensor, sharing its memory."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def full(part: Tensor, like: Tensor) -> Tensor:
    """The whole of a tensor of which every process holds the part that it holds of `like`."""
    if not isinstance(like, DTensor):
        return part
    whole = DTensor.from_local(
        part, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )
    return whole.full_tensor()


def part(whole: Tensor, like: Tensor) -> Tensor:
    """This process's part of a whole tensor, cut as `like` is."""
    if not isinstance(like, DTensor):
        return whole
    return distribute_tensor(whole, like.device_mesh, like.placements, src_data_rank=None).to_local()


def reseed(seed: int, step: int) -> None:
    """Key torch's own generator, which dropout alone uses, by (seed, step, rank): resuming needs no stored state."""
    mixed = (seed * 0x9E3779B97F4A7C15 + step * 0xBF58476D1CE4E5B9 + distributed.rank() * 0x94D049BB133111EB) % 2**64
    mixed = ((mixed ^ (mixed >> 31)) * 0xD6E8FEB86659FD93) % 2**64
    torch.manual_seed(mixed ^ (mixed >> 32))
