"""Exponential averages of parameters, in float32, whose horizon grows with the run: docs/math.md (16)."""

import contextlib
from collections.abc import Iterator, Mapping
from typing import final

import torch
from torch import Tensor

from diladiff.engine.parallelize import full, local, part


def ramped(decay: float, updates: int) -> float:
    """The decay of update number `updates` (from 0), small at first so that the initial weights are soon forgotten."""
    return min(decay, (1 + updates) / (10 + updates))


@torch.no_grad()
def average(averages: list[Tensor], values: list[Tensor], decay: float) -> None:
    """Move each average towards its value, in place: a <- d a + (1 - d) v."""
    same = [v if v.dtype == a.dtype else v.to(a.dtype) for a, v in zip(averages, values, strict=True)]
    torch._foreach_lerp_(averages, same, 1 - decay)


@final
class Average:
    """The average of some parameters over one horizon; each process averages its own part of them."""

    def __init__(self, params: Mapping[str, Tensor], decay: float):
        self.decay, self._params = decay, params
        self._averages = {name: local(param).float().clone() for name, param in params.items()}

    def update(self, updates: int) -> None:
        """Take in the parameters after update number `updates` (from 0)."""
        values = [local(param) for param in self._params.values()]
        average(list(self._averages.values()), values, ramped(self.decay, updates))

    @contextlib.contextmanager
    def swapped_in(self) -> Iterator[None]:
        """While it lasts, the parameters hold their averages; afterwards every bit is what it was."""
        params = [local(param) for param in self._params.values()]
        kept = [param.clone() for param in params]
        torch._foreach_copy_(params, list(self._averages.values()))
        try:
            yield
        finally:
            torch._foreach_copy_(params, kept)

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The averages, whole, by name; every process must draw the iterator to its end."""
        for name, value in self._averages.items():
            yield name, full(value, self._params[name])

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        """Take up the averages that `tensors` gave."""
        for name, value in self._averages.items():
            value.copy_(part(tensors[name].to(value.device), self._params[name]))
