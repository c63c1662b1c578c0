"""What all samplers of tokens share: the network as a callable, how a token is drawn, the states they yield."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diladiff.samplers import categorical

Denoiser = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(tokens_AL, time_A, rows_N) -> logits_NV: only the sequences that reveal something in this step, at positions
`rows_N`, flat in them (row a * L + l). Guidance, averaged weights and caches are closures of this type."""

ROWS_AT_ONCE = 1024
"""Rows drawn at once: bounds the working memory of wide steps, some float64 tensors of 1024 x 30,522 (250 MB) each."""


@dataclass(frozen=True, kw_only=True)
class DrawConfig:
    """How a token is drawn from logits: divided by a temperature first, then cut to a nucleus; docs/math.md (12).

    The nucleus keeps the token that crosses `top_p` ("keep") or leaves it out ("drop"; at least one token stays).
    """

    temperature: float = 1.0
    top_p: float | None = None
    nucleus: Literal["keep", "drop"] = "keep"

    def __post_init__(self) -> None:
        if not self.temperature >= 0:
            raise ValueError(f"temperature: {self.temperature} must be at least 0 (0: the likeliest token, 1: the law)")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise ValueError(f"top_p: {self.top_p} must be in (0, 1], or None for no nucleus")


Writer = Callable[[Tensor, Tensor, Tensor, Tensor, DrawConfig], Tensor]
"""(tokens_AL, time_A, rows_N, uniform_N, draw) -> ids_N: a denoiser with its draws, to the same law as `pick`'s."""


class TokenState(NamedTuple):
    """Tokens after a step; valid until the next state is asked for, since the next step writes into the same tensor.

    `step` counts from 0 (the canvas) to `steps`; steps in which nothing happens are left out. `changed_N` are the flat
    positions b * L + l that this step revealed or masked again, `evaluated` counts the sequences the network ran on.
    """

    tokens_BL: Tensor
    step: int
    steps: int
    changed_N: Tensor
    evaluated: int


def start(canvas_BL: Int[Tensor, "B L"], steps: int) -> TokenState:
    """The state before the first step: a copy of the canvas."""
    nothing_N = torch.empty(0, dtype=torch.int64, device=canvas_BL.device)
    return TokenState(canvas_BL.clone(), 0, steps, nothing_N, 0)


def pick(logits_NV: Float[Tensor, "N V"], uniform_N: Float[Tensor, " N"], draw: DrawConfig) -> Int[Tensor, " N"]:
    """Draw a token for each row, exactly to the float64 law, some rows at a time; docs/math.md (15)."""
    parts = [
        categorical.draw(logits, uniform, temperature=draw.temperature, top_p=draw.top_p, nucleus=draw.nucleus)
        for logits, uniform in zip(logits_NV.split(ROWS_AT_ONCE), uniform_N.split(ROWS_AT_ONCE), strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def random_device(device: torch.device) -> torch.device:
    """Where uniforms are made: the device itself, or the CPU for one that has no float64."""
    return torch.device("cpu") if device.type == "mps" else device


def check_steps(steps: int | None) -> None:
    """Refuse a number of steps below 1; None leaves the number open."""
    if steps is not None and steps < 1:
        raise ValueError(f"steps: {steps} must be at least 1")
