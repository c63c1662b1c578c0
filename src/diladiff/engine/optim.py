"""AdamW over an objective's parameter groups, with a rate that is a pure function of the step.

Clipping, the division by the loss's weight and the refusal of a non-finite update all stay on the device.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, final

import torch
from torch import Tensor, nn

from diladiff.engine import distributed
from diladiff.engine.parallelize import full, is_sharded, local, part
from diladiff.objectives.base import ParamGroup

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True, kw_only=True)
class OptimConfig:
    """AdamW, clipping and the rate's course."""

    lr: float
    betas: tuple[float, float] = (0.9, 0.999)
    eps: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float | None = 1.0
    warmup_steps: int = 0
    decay: Literal["cosine", "constant"] = "constant"
    final_lr_ratio: float = 0.0

    def __post_init__(self) -> None:
        if not self.lr > 0:
            raise ValueError(f"lr: must be positive, got {self.lr}")
        if not all(0 <= beta < 1 for beta in self.betas):
            raise ValueError(f"betas: each must be in [0, 1), got {self.betas}")
        if not self.eps > 0:
            raise ValueError(f"eps: must be positive, got {self.eps}")
        if self.weight_decay < 0:
            raise ValueError(f"weight_decay: must not be negative, got {self.weight_decay}")
        if self.clip_norm is not None and not self.clip_norm > 0:
            raise ValueError(f"clip_norm: must be positive, or null for no clipping, got {self.clip_norm}")
        if self.warmup_steps < 0:
            raise ValueError(f"warmup_steps: must not be negative, got {self.warmup_steps}")
        if not 0 <= self.final_lr_ratio <= 1:
            raise ValueError(f"final_lr_ratio: must be in [0, 1], got {self.final_lr_ratio}")


def rate(config: OptimConfig, step: int, steps: int, warmup_steps: int | None = None) -> float:
    """The learning rate of update `step` (from 0) of `steps`: a linear warm-up times the decay."""
    warmup = config.warmup_steps if warmup_steps is None else warmup_steps
    factor = min(1.0, (step + 1) / warmup) if warmup else 1.0
    if config.decay == "cosine":
        progress = max(0, step - config.warmup_steps) / max(1, steps - config.warmup_steps)
        cosine = 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))
        factor *= config.final_lr_ratio + (1 - config.final_lr_ratio) * cosine
    return config.lr * factor


@final
class Optimizer:
    """Fused AdamW over each process's own part of every parameter."""

    def __init__(self, config: OptimConfig, groups: list[ParamGroup], steps: int):
        self.config, self.groups, self.steps = config, groups, steps
        self.params = dict(_named(groups))
        # A shard is updated through a plain tensor on the same memory: no operation has to know of DTensors.
        self._parts = {name: nn.Parameter(local(p)) if is_sharded(p) else p for name, p in self.params.items()}
        self._sharded = any(is_sharded(p) for p in self.params.values())
        self._adamw = torch.optim.AdamW(
            [
                {
                    "params": [self._parts[name] for name, _ in group.params],
                    "weight_decay": config.weight_decay if group.decay else 0.0,
                }
                for group in groups
            ],
            lr=config.lr,
            betas=config.betas,
            eps=config.eps,
            fused=True,
        )
        device = next(iter(self._parts.values())).device
        # Fused AdamW leaves parameters and moments alone where `found_inf` is 1. It stays 1 once it was set.
        self._refused = torch.zeros((), device=device)
        self._adamw.found_inf = self._refused  # type: ignore[attr-defined]

    def rates(self, step: int) -> dict[str, float]:
        """The rate of every group at a step."""
        return {g.name: g.lr_scale * rate(self.config, step, self.steps, g.warmup_steps) for g in self.groups}

    @torch.no_grad()
    def step(self, step: int, total: Tensor, weight: Tensor) -> Tensor:
        """Divide the gradients by the loss's weight, clip, update; returns their norm before clipping.

        Gradients are means over processes of sums over samples; `total` and `weight` are sums over processes. Nothing
        is updated, now or later, once a loss or a norm was not finite.
        """
        for name, piece in self._parts.items():
            gradient = self.params[name].grad
            piece.grad = None if gradient is None else local(gradient)
        gradients = [piece.grad for piece in self._parts.values() if piece.grad is not None]
        scale = distributed.world() / weight.clamp_min(1e-30)
        norm = self._norm(gradients) * scale
        if self.config.clip_norm is not None:
            scale = scale * (self.config.clip_norm / (norm + 1e-6)).clamp_max(1.0)
        torch._foreach_mul_(gradients, scale.float())
        finite = torch.isfinite(total) & torch.isfinite(norm)
        self._refused.copy_(torch.maximum(self._refused, (~finite).float()))
        for group, lr in zip(self._adamw.param_groups, self.rates(step).values(), strict=True):
            group["lr"] = lr
        self._adamw.step()
        for name, piece in self._parts.items():
            piece.grad = None
            self.params[name].grad = None
        return norm

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """The optimiser's state, whole, by name; every process must draw the iterator to its end."""
        for name, piece in self._parts.items():
            state = self._adamw.state[piece]
            if state:
                yield f"step.{name}", state["step"]
                for moment in MOMENTS:
                    yield f"{moment}.{name}", full(state[moment], self.params[name])

    @torch.no_grad()
    def load(self, tensors: dict[str, Tensor]) -> None:
        """Take up the state that `tensors` gave, in any mode and number of processes."""
        for name, piece in self._parts.items():
            if f"step.{name}" not in tensors:
                continue
            self._adamw.state[piece] = {
                "step": tensors[f"step.{name}"].to(piece.device, torch.float32),
                **{m: part(tensors[f"{m}.{name}"].to(piece.device), self.params[name]).clone() for m in MOMENTS},
            }

    def _norm(self, gradients: list[Tensor]) -> Tensor:
        norm = nn.utils.get_total_norm(gradients)
        if self._sharded:
            norm = distributed.sum_over_ranks(norm.square()).sqrt()
        return norm


def _named(groups: list[ParamGroup]) -> Iterator[tuple[str, nn.Parameter]]:
    for group in groups:
        yield from group.params
