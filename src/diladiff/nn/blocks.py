"""The pre-norm transformer block and its parts."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from diladiff.nn.attention import SelfAttention
from diladiff.nn.embed import Rotary
from diladiff.nn.norms import LayerNorm


class MLP(nn.Module):
    """Two linear layers with biases around a tanh-GELU."""

    def __init__(self, width: int, hidden: int):
        super().__init__()
        self.inner = nn.Linear(width, hidden)
        self.outer = nn.Linear(hidden, width)

    def forward(self, x: Float[Tensor, "... D"]) -> Float[Tensor, "... D"]:
        """The same function at every position."""
        return self.outer(F.gelu(self.inner(x), approximate="tanh"))


def modulate(
    x_BLD: Float[Tensor, "B L D"], shift_BD: Float[Tensor, "B D"], scale_BD: Float[Tensor, "B D"]
) -> Float[Tensor, "B L D"]:
    """AdaLN: scale by 1 + scale and shift, both functions of the sequence's condition."""
    return x_BLD * (1 + scale_BD[:, None]) + shift_BD[:, None]


class Block(nn.Module):
    """Self-attention, then an MLP, each on the normalised stream and added to it after dropout.

    With a condition each half is modulated and gated by it (AdaLN). `attend` and `feed` are the halves, so that a
    network may put another layer between them.
    """

    def __init__(
        self, width: int, heads: int, hidden: int, *, dropout: float, qk_norm: bool, condition_width: int | None
    ):
        super().__init__()
        self.dropout = dropout
        self.attention_norm = LayerNorm(width)
        self.attention = SelfAttention(width, heads, qk_norm=qk_norm)
        self.mlp_norm = LayerNorm(width)
        self.mlp = MLP(width, hidden)
        self.modulation = nn.Linear(condition_width, 6 * width) if condition_width is not None else None

    def forward(
        self,
        x_BLD: Float[Tensor, "B L D"],
        rotary: Rotary | None = None,
        condition_BC: Float[Tensor, "B C"] | None = None,
    ) -> Float[Tensor, "B L D"]:
        """The stream after both halves."""
        if self.modulation is None:
            return self.feed(self.attend(x_BLD, rotary))
        parts = self.modulation(condition_BC).chunk(6, dim=-1)
        return self.feed(self.attend(x_BLD, rotary, parts[:3]), parts[3:])

    def attend(
        self, x_BLD: Float[Tensor, "B L D"], rotary: Rotary | None = None, modulation: tuple[Tensor, ...] = ()
    ) -> Float[Tensor, "B L D"]:
        """The stream plus self-attention; modulation is (shift, scale, gate), or empty."""
        normed_BLD = self.attention_norm(x_BLD)
        if not modulation:
            return x_BLD + self._drop(self.attention(normed_BLD, rotary))
        shift_BD, scale_BD, gate_BD = modulation
        return x_BLD + gate_BD[:, None] * self._drop(self.attention(modulate(normed_BLD, shift_BD, scale_BD), rotary))

    def feed(self, x_BLD: Float[Tensor, "B L D"], modulation: tuple[Tensor, ...] = ()) -> Float[Tensor, "B L D"]:
        """The stream plus the MLP; modulation as in attend."""
        normed_BLD = self.mlp_norm(x_BLD)
        if not modulation:
            return x_BLD + self._drop(self.mlp(normed_BLD))
        shift_BD, scale_BD, gate_BD = modulation
        return x_BLD + gate_BD[:, None] * self._drop(self.mlp(modulate(normed_BLD, shift_BD, scale_BD)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, training=self.training)
