"""Time as the latent networks read it: unscaled, through sinusoids and a small MLP, never under autocast.

The sinusoids of t in [0, 1] are smooth, so that a derivative in t is as large as the embedding itself. bfloat16 could
not tell two near times apart: times and what is made of them keep the parameters' own precision.
"""

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from diladiff.nn.embed import sinusoids


class TimeEmbedding(nn.Module):
    """A time through width/2 cosines and sines of frequency 1 towards 1/10,000, then an MLP D-2D-D with a SiLU."""

    def __init__(self, width: int):
        super().__init__()
        self.width = width
        self.inner = nn.Linear(width, 2 * width)
        self.outer = nn.Linear(2 * width, width)

    def forward(self, t_B: Float[Tensor, " B"]) -> Float[Tensor, "B D"]:
        """The embedding of each sequence's time; a float64 time is not rounded on the way."""
        with torch.autocast(t_B.device.type, enabled=False):
            waves = sinusoids(t_B, self.width).to(self.inner.weight.dtype)
            return self.outer(F.silu(self.inner(waves)))


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
