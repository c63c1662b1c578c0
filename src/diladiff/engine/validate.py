"""Measurements on held-out data, added over micro-batches and processes before they are divided."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any

import torch

from diladiff.engine import distributed
from diladiff.objectives.base import Batch, Objective, Step


@torch.no_grad()
def validate(
    objective: Objective,
    batches: Iterator[Any],
    *,
    seed: int,
    autocast: Callable[[], AbstractContextManager[Any]],
    device: torch.device,
) -> dict[str, float]:
    """The objective's measurements over all batches. Every process must bring the same number of batches."""
    step = Step(seed, torch.zeros((), dtype=torch.int64, device=device))
    exact = distributed.exact_dtype(device)
    sums: dict[str, torch.Tensor] = {}
    objective.eval()
    try:
        for raw in batches:
            batch = to_batch(raw, device)
            with autocast():
                measured = objective.validate(batch, step)
            for name, (total, count) in measured.items():
                pair = torch.stack([total.to(exact), count.to(exact)])
                sums[name] = sums[name] + pair if name in sums else pair
    finally:
        objective.train()
    if not sums:
        raise ValueError(
            "validation: no batches; there are fewer held-out blocks than one batch over all processes holds"
        )
    names = sorted(sums)
    reduced = distributed.sum_over_ranks(torch.stack([sums[name] for name in names])).tolist()
    return {name: total / count if count else float("nan") for name, (total, count) in zip(names, reduced, strict=True)}


def to_batch(raw: Any, device: torch.device) -> Batch:
    """A loader's micro-batch as the objective's, on its device."""
    return Batch(raw.tokens_BL.to(device, non_blocking=True), raw.index_B.to(device, non_blocking=True), raw.size)
