"""Self-attention over the whole sequence, without a mask, since every position sees every other; and cross-attention.

What a sequence reads beside itself comes as keys and values, so that they are computed once however often they are
read.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from diladiff.nn.embed import Rotary, rotate
from diladiff.nn.norms import RMSNorm


class KeysValues(NamedTuple):
    """Keys, normalised where they are normalised, and values of K positions, both B x H x K x E."""

    k_BHKE: Tensor
    v_BHKE: Tensor


class SelfAttention(nn.Module):
    """Multi-head attention, no bias; optionally q and k RMS-normalised per head with a learned gain."""

    def __init__(self, width: int, heads: int, *, qk_norm: bool):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.q_norm = RMSNorm(width // heads) if qk_norm else None
        self.k_norm = RMSNorm(width // heads) if qk_norm else None

    def forward(
        self, x_BLD: Float[Tensor, "B L D"], rotary: Rotary | None = None, extra: KeysValues | None = None
    ) -> Float[Tensor, "B L D"]:
        """Attend; rotary, where given, turns q and k by their positions.

        Extra keys and values join the sequence's own in one softmax; they have no position.
        """
        qkv = self.qkv(x_BLD).unflatten(-1, (3, self.heads, -1))
        q_BHLE, k_BHLE, v_BHLE = qkv.permute(2, 0, 3, 1, 4).unbind(0)
        if self.q_norm is not None and self.k_norm is not None:
            q_BHLE, k_BHLE = self.q_norm(q_BHLE), self.k_norm(k_BHLE)
        if rotary is not None:
            q_BHLE, k_BHLE = rotate(q_BHLE, rotary), rotate(k_BHLE, rotary)
        if extra is not None:
            k_BHLE = torch.cat((k_BHLE, extra.k_BHKE.to(k_BHLE.dtype)), dim=2)
            v_BHLE = torch.cat((v_BHLE, extra.v_BHKE.to(v_BHLE.dtype)), dim=2)
        mixed_BHLE = F.scaled_dot_product_attention(q_BHLE, k_BHLE, v_BHLE)
        return self.out(mixed_BHLE.transpose(1, 2).flatten(2))


class KeyValueProjection(nn.Module):
    """Keys and values of what cross-attention reads: one projection, no bias; keys optionally RMS-normalised."""

    def __init__(self, context_width: int, width: int, heads: int, *, qk_norm: bool):
        super().__init__()
        self.heads = heads
        self.kv = nn.Linear(context_width, 2 * width, bias=False)
        self.k_norm = RMSNorm(width // heads) if qk_norm else None

    def forward(self, context_BKC: Float[Tensor, "B K C"]) -> KeysValues:
        """The keys and values of K positions, cut into heads."""
        kv = self.kv(context_BKC).unflatten(-1, (2, self.heads, -1))
        k_BHKE, v_BHKE = kv.permute(2, 0, 3, 1, 4).unbind(0)
        return KeysValues(k_BHKE if self.k_norm is None else self.k_norm(k_BHKE), v_BHKE)


class CrossAttention(nn.Module):
    """The other half: queries of a sequence against given keys and values, no bias."""

    def __init__(self, width: int, heads: int, *, qk_norm: bool):
        super().__init__()
        self.heads = heads
        self.q = nn.Linear(width, width, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.q_norm = RMSNorm(width // heads) if qk_norm else None

    def forward(
        self, x_BLD: Float[Tensor, "B L D"], context: KeysValues, mask_BK: Bool[Tensor, "B K"] | None = None
    ) -> Float[Tensor, "B L D"]:
        """Attend to the context; where there is a mask, to the positions that it marks alone."""
        q_BHLE = self.q(x_BLD).unflatten(-1, (self.heads, -1)).transpose(1, 2)
        if self.q_norm is not None:
            q_BHLE = self.q_norm(q_BHLE)
        k_BHKE, v_BHKE = (part.to(q_BHLE.dtype) for part in context)
        mask_B11K = None if mask_BK is None else mask_BK[:, None, None]
        mixed_BHLE = F.scaled_dot_product_attention(q_BHLE, k_BHKE, v_BHKE, attn_mask=mask_B11K)
        return self.out(mixed_BHLE.transpose(1, 2).flatten(2))
