"""LayerNorm and RMSNorm with a learned gain and no bias.

The gain is multiplied by hand: torch's affine layer_norm cannot be compiled under a forward-mode derivative, and its
fused rms_norm wants input and weight in one dtype, which bf16 autocast does not give it.
"""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn, ones


class LayerNorm(nn.Module):
    """Zero mean and unit variance over the last axis, then a gain."""

    def __init__(self, width: int, *, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(ones(width))

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        """The normalised x; float32 under autocast."""
        return F.layer_norm(x, x.shape[-1:], eps=self.eps) * self.gain


class RMSNorm(nn.Module):
    """Unit root mean square over the last axis, then a gain, in the dtype of x."""

    def __init__(self, width: int, *, eps: float = 1e-5):
        super().__init__()
        self.eps = eps
        self.gain = nn.Parameter(ones(width))

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        """The normalised x."""
        return (F.rms_norm(x, x.shape[-1:], eps=self.eps) * self.gain).to(x.dtype)
