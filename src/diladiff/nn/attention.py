"""Self-attention over the whole sequence; no mask, since every position sees every other."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from diladiff.nn.embed import Rotary, rotate
from diladiff.nn.norms import RMSNorm


class SelfAttention(nn.Module):
    """Multi-head attention, no bias; optionally q and k RMS-normalised per head with a learned gain."""

    def __init__(self, width: int, heads: int, *, qk_norm: bool):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.q_norm = RMSNorm(width // heads) if qk_norm else None
        self.k_norm = RMSNorm(width // heads) if qk_norm else None

    def forward(self, x_BLD: Float[Tensor, "B L D"], rotary: Rotary | None = None) -> Float[Tensor, "B L D"]:
        """Attend; rotary, where given, turns q and k by their positions."""
        qkv = self.qkv(x_BLD).unflatten(-1, (3, self.heads, -1))
        q_BHLE, k_BHLE, v_BHLE = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if self.q_norm is not None and self.k_norm is not None:
            q_BHLE, k_BHLE = self.q_norm(q_BHLE), self.k_norm(k_BHLE)
        if rotary is not None:
            q_BHLE, k_BHLE = rotate(q_BHLE, rotary), rotate(k_BHLE, rotary)
        mixed_BHLE = F.scaled_dot_product_attention(q_BHLE, k_BHLE, v_BHLE)
        return self.out(mixed_BHLE.transpose(1, 2).flatten(2))
