"""The encoder of the auto-encoder: a few learned latents that read a text's features through attention.

Each layer's latents attend to features and latents together, then pass an MLP. A sequence of K latents leaves it, of a
width of its own.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from diladiff.nn.attention import CrossAttention, KeyValueProjection
from diladiff.nn.blocks import MLP
from diladiff.nn.embed import sinusoids
from diladiff.nn.init import initialise
from diladiff.nn.norms import LayerNorm

LITERAL_DEVIATION = 0.02


@dataclass(frozen=True, kw_only=True)
class PerceiverConfig:
    """The shape of a Perceiver: at most `length` features in, `latents` of `latent_width` out.

    Initialisation `literal` is the paper's: latents and matrices of deviation .02, features without positions, latents
    as the last layer leaves them. `unit` is the one under which the encoder learns: matrices that keep the variance,
    positions added to the features, latent k placed over the features of its share of the text, and latents of unit
    variance.
    """

    feature_width: int
    length: int
    latents: int
    width: int = 768
    latent_width: int = 768
    layers: int = 2
    heads: int = 12
    mlp_ratio: int = 4
    dropout: float = 0.1
    initialisation: Literal["unit", "literal"] = "unit"
    name: Literal["perceiver"] = "perceiver"

    def __post_init__(self) -> None:
        sizes = ("feature_width", "length", "latents", "width", "latent_width", "layers", "heads", "mlp_ratio")
        for field in sizes:
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}: give at least 1")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}: give a probability, at least 0 and below 1")
        if self.width % self.heads:
            raise ValueError(f"width is {self.width}: give a multiple of heads ({self.heads})")
        if self.initialisation not in ("unit", "literal"):
            raise ValueError(f"initialisation is {self.initialisation!r}: give 'unit' or 'literal'")
        if self.initialisation == "unit" and self.width % 2:
            raise ValueError(f"width is {self.width}: positions need an even width")

    def build(self) -> "Perceiver":
        """A freshly initialised network on the current default device."""
        return Perceiver(self)


class PerceiverLayer(nn.Module):
    """Latents attend to features and latents together, then pass an MLP, each half normalised first and added."""

    def __init__(self, width: int, heads: int, hidden: int, *, dropout: float):
        super().__init__()
        self.dropout = dropout
        self.features_norm = LayerNorm(width)
        self.latents_norm = LayerNorm(width)
        self.context = KeyValueProjection(width, width, heads, qk_norm=True)
        self.attention = CrossAttention(width, heads, qk_norm=True)
        self.mlp_norm = LayerNorm(width)
        self.mlp = MLP(width, hidden)

    def forward(
        self,
        latents_BKD: Float[Tensor, "B K D"],
        features_BFD: Float[Tensor, "B F D"],
        mask_BN: Bool[Tensor, "B F+K"] | None = None,
    ) -> Float[Tensor, "B K D"]:
        """The latents after both halves; the mask marks what may be read, features first."""
        normed_BKD = self.latents_norm(latents_BKD)
        context = self.context(torch.cat((self.features_norm(features_BFD), normed_BKD), dim=1))
        latents_BKD = latents_BKD + self._drop(self.attention(normed_BKD, context, mask_BN))
        return latents_BKD + self._drop(self.mlp(self.mlp_norm(latents_BKD)))

    def _drop(self, x: Tensor) -> Tensor:
        return F.dropout(x, self.dropout, training=self.training)


class Perceiver(nn.Module):
    """Features in, latents out."""

    def __init__(self, config: PerceiverConfig):
        super().__init__()
        self.config = config
        width = config.width
        self.latents = nn.Parameter(torch.empty(config.latents, width))
        self.enter = nn.Linear(config.feature_width, width, bias=False) if config.feature_width != width else None
        self.layers = nn.ModuleList(
            PerceiverLayer(width, config.heads, config.mlp_ratio * width, dropout=config.dropout)
            for _ in range(config.layers)
        )
        self.leave = nn.Linear(width, config.latent_width, bias=False) if config.latent_width != width else None
        self.initialise()

    @torch.no_grad()
    def initialise(self) -> None:
        """Draw every parameter anew from torch's generator, as the configuration says."""
        initialise(self)
        literal = self.config.initialisation == "literal"
        for module in self.modules():
            if isinstance(module, nn.Linear):
                module.weight.normal_(std=LITERAL_DEVIATION if literal else module.in_features**-0.5)
        if literal:
            self.latents.normal_(std=LITERAL_DEVIATION)
            return
        share = self.config.length / self.config.latents
        centres = (torch.arange(self.config.latents, device=self.latents.device) + 0.5) * share - 0.5
        self.latents.copy_(self._code(centres))

    def blocks(self) -> list[nn.Module]:
        """The units that are compiled and sharded one by one, in the order in which they run."""
        return list(self.layers)

    def forward(
        self, features_BFD: Float[Tensor, "B F D"], mask_BF: Bool[Tensor, "B F"] | None = None
    ) -> Float[Tensor, "B K C"]:
        """The latents of standardised features; the mask, where given, marks the features that are there."""
        batch, length = features_BFD.shape[:2]
        if length > self.config.length:
            raise ValueError(f"a sequence has {length} features: this encoder takes at most {self.config.length}")
        x_BFD = features_BFD if self.enter is None else self.enter(features_BFD)
        unit = self.config.initialisation == "unit"
        if unit:
            x_BFD = x_BFD + self._code(torch.arange(length, device=x_BFD.device)).to(x_BFD.dtype)
        mask_BN = None if mask_BF is None else F.pad(mask_BF, (0, self.config.latents), value=True)
        latents_BKD = self.latents.expand(batch, -1, -1)
        for layer in self.layers:
            latents_BKD = layer(latents_BKD, x_BFD, mask_BN)
        latents_BKC = latents_BKD if self.leave is None else self.leave(latents_BKD)
        return F.layer_norm(latents_BKC, latents_BKC.shape[-1:]) if unit else latents_BKC

    def _code(self, positions: Tensor) -> Tensor:
        """Sinusoids of positions, of which the slowest turns by about one radian over the longest text."""
        return sinusoids(positions.float(), self.config.width, longest=float(self.config.length))
