"""The denoiser of masked diffusion: a bidirectional transformer from partly masked tokens to logits of the clean ones.

t = 0 is data, t = 1 is all masked. The defaults are the paper's model: learned absolute positions, q and k normalised,
no time input, an untied head, the mask token's logit at -inf. Rotary positions, time conditioning, carry-over and no
QK norm give the shape of the original masked diffusion language model.
"""

import math
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from diladiff.nn.attention import KeysValues
from diladiff.nn.blocks import Block, modulate
from diladiff.nn.embed import NoiseLevelEmbedding, rotary_angles
from diladiff.nn.init import initialise, shrink_residuals, zero
from diladiff.nn.norms import LayerNorm

CONDITION_WIDTH = 128
HEAD_MULTIPLE = 64

Context = tuple[KeysValues | None, ...]
"""Keys and values for each block, None for one that is told nothing; () for none at all."""


@dataclass(frozen=True, kw_only=True)
class TokenTransformerConfig:
    """The shape of a TokenTransformer."""

    vocab_size: int
    mask_id: int
    length: int
    width: int = 768
    layers: int = 12
    heads: int = 12
    mlp_ratio: int = 4
    dropout: float = 0.1
    positions: Literal["learned", "rotary"] = "learned"
    qk_norm: bool = True
    time_conditioning: bool = False
    carry_over: bool = False
    name: Literal["token_transformer"] = "token_transformer"

    def __post_init__(self) -> None:
        for field in ("length", "width", "layers", "heads", "mlp_ratio"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}: give at least 1")
        if self.vocab_size < 2:
            raise ValueError(f"vocab_size is {self.vocab_size}: give at least 2, one of them the mask")
        if not 0 <= self.mask_id < self.vocab_size:
            raise ValueError(f"mask_id is {self.mask_id}: give a token of the vocabulary, 0 to {self.vocab_size - 1}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}: give a probability, at least 0 and below 1")
        if self.width % self.heads:
            raise ValueError(f"width is {self.width}: give a multiple of heads ({self.heads})")
        if self.positions not in ("learned", "rotary"):
            raise ValueError(f"positions is {self.positions!r}: give 'learned' or 'rotary'")
        if self.positions == "rotary" and self.width // self.heads % 2:
            raise ValueError(
                f"width is {self.width}: rotary positions need an even width of each of {self.heads} heads"
            )

    @property
    def padded_vocab_size(self) -> int:
        """Rows of the head: vocab_size rounded up, since 16-byte aligned logits multiply several times faster."""
        return math.ceil(self.vocab_size / HEAD_MULTIPLE) * HEAD_MULTIPLE

    def build(self) -> "TokenTransformer":
        """A freshly initialised network on the current default device."""
        return TokenTransformer(self)


class TokenTransformer(nn.Module):
    """Tokens with masks in, logits of the clean tokens out."""

    def __init__(self, config: TokenTransformerConfig):
        super().__init__()
        self.config = config
        width = config.width
        condition_width = CONDITION_WIDTH if config.time_conditioning else None
        self.tokens = nn.Embedding(config.vocab_size, width)
        self.positions = nn.Embedding(config.length, width) if config.positions == "learned" else None
        self.time = NoiseLevelEmbedding(CONDITION_WIDTH) if config.time_conditioning else None
        self.layers = nn.ModuleList(
            Block(
                width,
                config.heads,
                config.mlp_ratio * width,
                dropout=config.dropout,
                qk_norm=config.qk_norm,
                condition_width=condition_width,
            )
            for _ in range(config.layers)
        )
        self.norm = LayerNorm(width)
        self.modulation = nn.Linear(CONDITION_WIDTH, 2 * width) if config.time_conditioning else None
        self.output = nn.Linear(width, config.padded_vocab_size)
        self.initialise()

    def initialise(self) -> None:
        """Draw every parameter anew from torch's generator; with time conditioning blocks start as identities."""
        initialise(self)
        shrink_residuals([linear for block in self._blocks() for linear in (block.attention.out, block.mlp.outer)])
        for modulation in [self.modulation, *(block.modulation for block in self._blocks())]:
            if modulation is not None:
                zero(modulation)

    def blocks(self) -> list[nn.Module]:
        """The units that are compiled and sharded one by one, in the order in which they run."""
        return list(self.layers)

    def forward(
        self, tokens_BL: Int[Tensor, "B L"], t_B: Float[Tensor, " B"] | None = None, context: Context = ()
    ) -> Float[Tensor, "B L V"]:
        """Logits at every position; with carry_over an unmasked position has all its mass on its own token."""
        logits_BLV = self.head(self.trunk(tokens_BL, t_B, context).flatten(0, 1)).unflatten(0, tokens_BL.shape)
        if not self.config.carry_over:
            return logits_BLV
        own_BLV = tokens_BL[..., None] == torch.arange(self.config.vocab_size, device=tokens_BL.device)
        copied_BLV = torch.zeros_like(logits_BLV).masked_fill(~own_BLV, -math.inf)
        return torch.where((tokens_BL == self.config.mask_id)[..., None], logits_BLV, copied_BLV)

    def trunk(
        self, tokens_BL: Int[Tensor, "B L"], t_B: Float[Tensor, " B"] | None = None, context: Context = ()
    ) -> Float[Tensor, "B L D"]:
        """Normalised hidden states, ready for the head. A model without time conditioning does not look at t.

        A context tells each block something beside the tokens; it is empty in masked diffusion alone.
        """
        length = tokens_BL.shape[1]
        if length > self.config.length:
            raise ValueError(f"a sequence has {length} tokens: this model takes at most {self.config.length}")
        x_BLD = self.tokens(tokens_BL)
        rotary = None
        if self.positions is None:
            rotary = rotary_angles(length, self.config.width // self.config.heads, tokens_BL.device)
        else:
            x_BLD = x_BLD + self.positions.weight[:length]
        condition_BC = self._condition(t_B)
        for block, told in zip(self.layers, context or (None,) * len(self.layers), strict=True):
            x_BLD = block(x_BLD, rotary, condition_BC, told)
        x_BLD = self.norm(x_BLD)
        if self.modulation is not None:
            x_BLD = modulate(x_BLD, *self.modulation(condition_BC).chunk(2, dim=-1))
        return x_BLD

    def head(self, hidden_ND: Float[Tensor, "N D"]) -> Float[Tensor, "N V"]:
        """Logits of the trunk's rows; the mask token's is -inf."""
        return self.padded_head(hidden_ND)[:, : self.config.vocab_size]

    def padded_head(self, hidden_ND: Float[Tensor, "N D"]) -> Float[Tensor, "N P"]:
        """Logits with -inf columns behind the vocabulary up to the aligned width: the same softmax, without a slice."""
        ids = torch.arange(self.config.padded_vocab_size, device=hidden_ND.device)
        never = (ids == self.config.mask_id) | (ids >= self.config.vocab_size)
        # -inf enters through the bias, so that no pass over the logits is needed.
        return F.linear(hidden_ND, self.output.weight, self.output.bias.masked_fill(never, -math.inf))

    def _condition(self, t_B: Tensor | None) -> Tensor | None:
        if self.time is None:
            return None
        if t_B is None:
            raise ValueError("t_B is None: this model is conditioned on time, give the time of each sequence")
        return self.time(t_B)

    def _blocks(self) -> list[Block]:
        return [block for block in self.layers if isinstance(block, Block)]
