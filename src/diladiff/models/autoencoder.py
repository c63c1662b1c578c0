"""The decoder of the auto-encoder: a trained masked language model that is also told a latent.

Blocks of one's choice read the latent: through cross-attention of their own behind self-attention (the paper's), or in
one softmax with the sequence (joint). The latent's keys and values are computed once a sample (`read`), not once a
step. t = 0 is data, t = 1 is all masked.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from diladiff.config import difference
from diladiff.models.token_transformer import Context, TokenTransformer, TokenTransformerConfig
from diladiff.nn.attention import KeysValues, KeyValueProjection
from diladiff.nn.blocks import Block, Reading
from diladiff.nn.init import initialise, zero
from diladiff.nn.norms import LayerNorm


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """A masked language model and how it reads a latent; a negative layer counts from the last.

    Initialisation `literal` is the paper's: the latent is read as it is, and both convolutions around cross-attention
    are zero, so that they learn one after the other. Under `unit` the latent is normalised, the outer convolution alone
    is zero and the inner the identity. Joint attention has no convolutions.
    """

    model: TokenTransformerConfig
    latent_width: int = 768
    reading_layers: tuple[int, ...] = (0, -1)
    attention: Literal["cross", "joint"] = "cross"
    initialisation: Literal["unit", "literal"] = "unit"
    name: Literal["latent_decoder"] = "latent_decoder"

    def __post_init__(self) -> None:
        layers = self.model.layers
        if self.latent_width < 1:
            raise ValueError(f"latent_width is {self.latent_width}: give at least 1")
        if not self.reading_layers:
            raise ValueError("reading_layers is empty: give at least one layer that reads the latent")
        for layer in self.reading_layers:
            if not -layers <= layer < layers:
                raise ValueError(f"reading_layers has {layer}: the model has layers 0 to {layers - 1}")
        if self.attention not in ("cross", "joint"):
            raise ValueError(f"attention is {self.attention!r}: give 'cross' or 'joint'")
        if self.initialisation not in ("unit", "literal"):
            raise ValueError(f"initialisation is {self.initialisation!r}: give 'unit' or 'literal'")

    @property
    def readers(self) -> tuple[int, ...]:
        """The layers that read, each once, in the order in which they run."""
        return tuple(sorted({layer % self.model.layers for layer in self.reading_layers}))

    def build(self) -> "LatentDecoder":
        """A freshly initialised network on the current default device."""
        return LatentDecoder(self)


class LatentProjection(nn.Module):
    """What one block reads of a latent: keys and values, by default of the normalised latent."""

    def __init__(self, latent_width: int, width: int, heads: int, *, normalise: bool, qk_norm: bool):
        super().__init__()
        self.norm = LayerNorm(latent_width) if normalise else None
        self.project = KeyValueProjection(latent_width, width, heads, qk_norm=qk_norm)

    def forward(self, latents_BKC: Float[Tensor, "B K C"]) -> KeysValues:
        """Keys and values, cut into heads; not views, so that they may be kept over steps and sharded layers."""
        k_BHKE, v_BHKE = self.project(latents_BKC if self.norm is None else self.norm(latents_BKC))
        return KeysValues(k_BHKE.contiguous(), v_BHKE.contiguous())


class LatentDecoder(nn.Module):
    """Tokens with masks and a latent in, logits of the clean tokens out."""

    def __init__(self, config: DecoderConfig):
        super().__init__()
        self.config = config
        model = config.model
        self.model = TokenTransformer(model)
        cross = config.attention == "cross"
        self.projections = nn.ModuleList(
            LatentProjection(
                config.latent_width,
                model.width,
                model.heads,
                normalise=config.initialisation == "unit",
                # Keys that share a softmax with the model's own are normalised if those are.
                qk_norm=cross or model.qk_norm,
            )
            for _ in config.readers
        )
        for block in self._readers() if cross else ():
            block.reading = Reading(model.width, model.heads, dropout=model.dropout)
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw every parameter anew from torch's generator; cross-attention adds nothing yet."""
        self.model.initialise()
        initialise(self.projections)
        for block in self._readers():
            if block.reading is not None:
                zero(block.reading.outer)
                zero(block.reading.inner)
                if self.config.initialisation == "unit":
                    nn.init.eye_(block.reading.inner.weight)

    def adopt(self, trained: TokenTransformer) -> None:
        """Take over the weights of a trained masked language model of the same shape; its dropout may differ."""
        lines = difference(replace(trained.config, dropout=self.config.model.dropout), self.config.model)
        if lines:
            raise ValueError(f"the trained model is another than the decoder's ({', '.join(lines)}): give one of both")
        rest = self.model.load_state_dict(trained.state_dict(), strict=False)
        assert not rest.unexpected_keys
        assert all(".reading." in name for name in rest.missing_keys)

    def blocks(self) -> list[nn.Module]:
        """The units that are compiled and sharded one by one, in the order in which they run."""
        return [*self.projections, *self.model.blocks()]

    def read(self, latents_BKC: Float[Tensor, "B K C"]) -> Context:
        """The latents' keys and values for each block: computed once, used at every step."""
        told: list[KeysValues | None] = [None] * self.config.model.layers
        for layer, projection in zip(self.config.readers, self.projections, strict=True):
            told[layer] = projection(latents_BKC)
        return tuple(told)

    def forward(
        self,
        tokens_BL: Int[Tensor, "B L"],
        latents_BKC: Float[Tensor, "B K C"],
        t_B: Float[Tensor, " B"] | None = None,
    ) -> Float[Tensor, "B L V"]:
        """Logits at every position; what is read of the latents is computed anew."""
        return self.model(tokens_BL, t_B, self.read(latents_BKC))

    def trunk(
        self, tokens_BL: Int[Tensor, "B L"], t_B: Float[Tensor, " B"] | None, context: Context
    ) -> Float[Tensor, "B L D"]:
        """Normalised hidden states, ready for the head, of tokens under what was read of their latents."""
        return self.model.trunk(tokens_BL, t_B, context)

    def head(self, hidden_ND: Float[Tensor, "N D"]) -> Float[Tensor, "N V"]:
        """Logits of the trunk's rows; the mask token's is -inf."""
        return self.model.head(hidden_ND)

    def padded_head(self, hidden_ND: Float[Tensor, "N D"]) -> Float[Tensor, "N P"]:
        """The head's logits with -inf columns behind the vocabulary, up to an aligned width."""
        return self.model.padded_head(hidden_ND)

    def _readers(self) -> list[Block]:
        blocks = [self.model.layers[layer] for layer in self.config.readers]
        return [block for block in blocks if isinstance(block, Block)]
