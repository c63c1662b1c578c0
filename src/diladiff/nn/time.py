"""Time as the latent networks read it: unscaled, through sinusoids and a small MLP, never under autocast.

The sinusoids of t in [0, 1] are smooth, so that a derivative in t is as large as the embedding itself. bfloat16 could
not tell two near times apart: times and what is made of them keep the parameters' own precision.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class TimeEmbedding(nn.Module):
    """A time through width/2 cosines and sines of frequency 1 down to 1/10,000, then an MLP D-2D-D with a SiLU."""

    def __init__(self, width: int, *, longest: float = 10_000.0):
        super().__init__()
        self.width = width
        self.longest = longest
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, t_B: Float[Tensor, " B"]) -> Float[Tensor, "B D"]:
        """The embedding of each sequence's time; a float64 time is not rounded on the way."""
        with torch.autocast(t_B.device.type, enabled=False):
            t_B = t_B.to(torch.promote_types(t_B.dtype, torch.float32))
            half = self.width // 2
            exponents = torch.arange(half, device=t_B.device, dtype=t_B.dtype) / half
            angles = t_B[:, None] * torch.exp(-math.log(self.longest) * exponents)
            waves = torch.cat((angles.cos(), angles.sin()), dim=-1)
            return self.outer(F.silu(self.inner(waves.to(self.inner.weight.dtype))))


class TimeAddition(nn.Module):
    """One linear layer of a time's embedding, added to a stream at every position."""

    def __init__(self, width: int):
        super().__init__()
        self.linear = nn.Linear(width, width)

    def forward(self, x_BKD: Float[Tensor, "B K D"], time_BD: Float[Tensor, "B D"]) -> Float[Tensor, "B K D"]:
        """The stream that knows the time."""
        with torch.autocast(time_BD.device.type, enabled=False):
            added_BD = self.linear(time_BD)
        return x_BKD + added_BD[:, None]
