"""What a network is told beside its tokens: rotary positions and time, both computed in float32 or better.

No table is stored, so a network built on the meta device has nothing to restore but its parameters.
"""

import math

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

Rotary = tuple[Tensor, Tensor]
"""Cosines and sines, each L x E/2."""


def rotary_angles(length: int, head_width: int, device: torch.device, *, base: float = 10_000.0) -> Rotary:
    """Cosines and sines of position times frequency, frequencies base^(-2j/E)."""
    exponents = torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    positions = torch.arange(length, device=device, dtype=torch.float32)
    angles = positions[:, None] * base**-exponents
    return angles.cos(), angles.sin()


def rotate(x_BHLE: Float[Tensor, "B H L E"], rotary: Rotary) -> Float[Tensor, "B H L E"]:
    """Turn the pairs (j, j + E/2) of each head by their position's angles."""
    cos, sin = rotary
    first, second = x_BHLE.chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1).to(x_BHLE.dtype)


def sinusoids(values_B: Float[Tensor, " B"], width: int, *, longest: float = 10_000.0) -> Float[Tensor, "B width"]:
    """Cosines, then sines of the value times width/2 frequencies from 1 towards 1/longest; in float32 or better."""
    half = width // 2
    values_B = values_B.to(torch.promote_types(values_B.dtype, torch.float32))
    exponents = torch.arange(half, device=values_B.device, dtype=values_B.dtype) / half
    angles = values_B[:, None] * torch.exp(-math.log(longest) * exponents)
    return torch.cat((angles.cos(), angles.sin()), dim=-1)


class NoiseLevelEmbedding(nn.Module):
    """The original masked diffusion's time input: -log(1 - .999 t) through 256 sinusoids and a two-layer SiLU MLP."""

    def __init__(self, width: int, *, frequencies: int = 256):
        super().__init__()
        self.frequencies = frequencies
        self.inner = nn.Linear(frequencies, width)
        self.outer = nn.Linear(width, width)

    def forward(self, t_B: Float[Tensor, " B"]) -> Float[Tensor, "B C"]:
        """The condition of each sequence at time t (0 is data)."""
        noise_B = -torch.log1p(-0.999 * t_B.float())
        hidden = sinusoids(noise_B, self.frequencies).to(self.inner.weight.dtype)
        return F.silu(self.outer(F.silu(self.inner(hidden))))
