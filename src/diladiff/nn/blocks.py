"""The pre-norm transformer block and its parts."""

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from diladiff.nn.attention import CrossAttention, KeysValues, SelfAttention
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


class Reading(nn.Module):
    """Cross-attention to a context between two pointwise convolutions, on the normalised stream and added to it.

    A pointwise convolution is a linear layer with a bias, the same at every position. While `outer` is zero the stream
    stays bit for bit what it was.
    """

    def __init__(self, width: int, heads: int, *, dropout: float):
        super().__init__()
        self.dropout = dropout
        self.norm = LayerNorm(width)
        self.inner = nn.Linear(width, width)
        self.attention = CrossAttention(width, heads, qk_norm=True)
        self.outer = nn.Linear(width, width)

    def forward(self, x_BLD: Float[Tensor, "B L D"], context: KeysValues) -> Float[Tensor, "B L D"]:
        """The stream plus what was read."""
        read_BLD = self.outer(self.attention(self.inner(self.norm(x_BLD)), context))
        return x_BLD + F.dropout(read_BLD, self.dropout, training=self.training)


class Block(nn.Module):
    """Self-attention, then an MLP, each on the normalised stream and added to it after dropout.

    With a condition each half is modulated and gated by it (AdaLN). A network that is also told something else sets
    `reading`, which then stands between the halves; without it self-attention takes the context in.
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
        self.reading: Reading | None = None

    def forward(
        self,
        x_BLD: Float[Tensor, "B L D"],
        rotary: Rotary | None = None,
        condition_BC: Float[Tensor, "B C"] | None = None,
        context: KeysValues | None = None,
    ) -> Float[Tensor, "B L D"]:
        """The stream after both halves and, given a context, what was read of it; without one as if never told."""
        parts = () if self.modulation is None else self.modulation(condition_BC).chunk(6, dim=-1)
        if self.reading is None or context is None:
            return self.feed(self.attend(x_BLD, rotary, parts[:3], context), parts[3:])
        return self.feed(self.reading(self.attend(x_BLD, rotary, parts[:3]), context), parts[3:])

    def attend(
        self,
        x_BLD: Float[Tensor, "B L D"],
        rotary: Rotary | None = None,
        modulation: tuple[Tensor, ...] = (),
        extra: KeysValues | None = None,
    ) -> Float[Tensor, "B L D"]:
        """The stream plus self-attention, over extra keys too; modulation is (shift, scale, gate), or empty."""
        normed_BLD = self.attention_norm(x_BLD)
        if not modulation:
            return x_BLD + self._drop(self.attention(normed_BLD, rotary, extra))
        shift_BD, scale_BD, gate_BD = modulation
        modulated_BLD = modulate(normed_BLD, shift_BD, scale_BD)
        return x_BLD + gate_BD[:, None] * self._drop(self.attention(modulated_BLD, rotary, extra))

    def feed(self, x_BLD: Float[Tensor, "B L D"], modulation: tuple[Tensor, ...] = ()) -> Float[Tensor, "B L D"]:
        """The stream plus the MLP; modulation as in attend."""
        normed_BLD = self.mlp_norm(x_BLD)
        if not modulation:
            return x_BLD + self._drop(self.mlp(normed_BLD))
        shift_BD, scale_BD, gate_BD = modulation
        return x_BLD + gate_BD[:, None] * self._drop(self.mlp(modulate(normed_BLD, shift_BD, scale_BD)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, training=self.training)
