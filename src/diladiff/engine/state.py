"""All that changes while an objective is trained, and how it becomes a checkpoint's tensors and comes back."""

import contextlib
from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor

from diladiff.engine import distributed
from diladiff.engine.checkpoint import Tensors
from diladiff.engine.ema import Average, average
from diladiff.engine.optim import Optimizer
from diladiff.engine.parallelize import changeable, full, local, part
from diladiff.objectives.base import Objective, Step


@final
class TrainState:
    """Parameters, statistics, targets, the optimiser's moments and the averages over every horizon."""

    def __init__(self, objective: Objective, optimizer: Optimizer, ema: tuple[float, ...]):
        self.objective, self.optimizer = objective, optimizer
        self.averages = [Average(optimizer.params, decay) for decay in ema]
        saved = objective.state_dict()
        self._buffers = [name for name, _ in objective.named_buffers() if name in saved]

    @torch.no_grad()
    def after_update(self, step: Step, number: int) -> None:
        """What follows update `number` (from 0): averages, targets, and the objective's own statistics."""
        for one in self.averages:
            one.update(number)
        for target in self.objective.targets().values():
            names = list(target.average)
            average([local(target.average[n]) for n in names], [local(target.params[n]) for n in names], target.decay)
        self.objective.after_step(step)
        if distributed.world() > 1:
            self._agree_on_statistics()

    @contextlib.contextmanager
    def averaged(self) -> Iterator[None]:
        """While it lasts the parameters hold the first average."""
        with changeable(self.objective), contextlib.ExitStack() as stack:
            if self.averages:
                stack.enter_context(self.averages[0].swapped_in())
            yield

    def tensors(self) -> Tensors:
        """Everything as whole tensors, by file and name; all processes call it together."""
        found = {"objective": {name: full(piece, like) for name, (piece, like) in self._pieces().items()}}
        for i, one in enumerate(self.averages):
            found[f"ema_{i}"] = dict(one.tensors())
        found["optim"] = dict(self.optimizer.tensors())
        return found

    @torch.no_grad()
    def load(self, tensors: Tensors) -> None:
        """Take up what `tensors` gave, in any mode and number of processes."""
        for name, (piece, like) in self._pieces().items():
            piece.copy_(part(_of(tensors, "objective", name).to(piece.device), like))
        for i, one in enumerate(self.averages):
            one.load(tensors[f"ema_{i}"])
        self.optimizer.load(tensors["optim"])

    def _pieces(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Name -> (this process's part, the tensor that it is a part of). What is frozen is not saved: its hash is."""
        found: dict[str, Tensor] = {**self.optimizer.params, **self._statistics()}
        for key, target in self.objective.targets().items():
            found.update({f"target.{key}.{name}": tensor for name, tensor in target.average.items()})
        return {name: (local(tensor), tensor) for name, tensor in found.items()}

    def _statistics(self) -> dict[str, Tensor]:
        return {name: self.objective.get_buffer(name) for name in self._buffers}

    def _agree_on_statistics(self) -> None:
        """Every process updated its statistics by its own data; their mean is the whole batch's."""
        averages = {id(tensor) for target in self.objective.targets().values() for tensor in target.average.values()}
        for tensor in self._statistics().values():
            if tensor.is_floating_point() and id(tensor) not in averages:
                # Exact where all hold the same, since the number of processes is a power of two.
                distributed.sum_over_ranks(tensor).div_(distributed.world())


def _of(tensors: Tensors, file: str, name: str) -> Tensor:
    if name not in tensors.get(file, {}):
        raise ValueError(f"{file}.safetensors does not hold {name}: the checkpoint is of another objective")
    return tensors[file][name]
