"""The denoiser of latents: a U-ViT from noisy latents and a time to the clean ones, as TEncDM's and the paper's.

t = 0 is data, t = 1 is pure noise. The second half of the blocks gets the inputs of the first half's once more, in
mirror order (long skips, added). Each block's input also gets the time and the self-conditioning, each through a linear
layer of its own. A student has a second time embedding, of t - r, and may have a second head. Under a forward-mode
derivative the caller chooses SDPA's math kernel: the others have none.
"""

from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from diladiff.nn.attention import KeysValues, SelfAttention
from diladiff.nn.blocks import MLP
from diladiff.nn.init import initialise, shrink_residuals, zero
from diladiff.nn.norms import LayerNorm
from diladiff.nn.time import TimeAddition, TimeEmbedding

Norm = Literal["pre", "post"]
Extra = tuple[KeysValues | None, ...]
"""Keys and values that each block's attention reads beside its own, None for a block that has none; () for no block."""


@dataclass(frozen=True, kw_only=True)
class LatentTransformerConfig:
    """The shape of a LatentTransformer; `latents` is the largest number of latents a sequence may have."""

    latents: int
    latent_width: int
    width: int = 768
    layers: int = 12
    heads: int = 12
    mlp_ratio: int = 4
    dropout: float = 0.1
    norm: Norm = "pre"
    """post is the printed network's: BERT's blocks, and no projection in or out where the two widths agree."""
    qk_norm: bool = False
    self_conditioning: bool = True
    span: bool = False
    """A second time embedding, of t - r: the network is a flow map's."""
    second_head: bool = False
    """The last block's MLP and what follows it a second time, for a second prediction from the same attention."""
    name: Literal["latent_transformer"] = "latent_transformer"

    def __post_init__(self) -> None:
        for field in ("latents", "latent_width", "width", "layers", "heads", "mlp_ratio"):
            if getattr(self, field) < 1:
                raise ValueError(f"{field} is {getattr(self, field)}: give at least 1")
        if self.layers % 2:
            raise ValueError(f"layers is {self.layers}: give an even number, half of them mirror the other half")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout is {self.dropout}: give a probability, at least 0 and below 1")
        if self.width % self.heads:
            raise ValueError(f"width is {self.width}: give a multiple of heads ({self.heads})")
        if self.width % 2:
            raise ValueError(f"width is {self.width}: give an even number, a time has as many cosines as sines")
        if self.norm not in ("pre", "post"):
            raise ValueError(f"norm is {self.norm!r}: give 'pre' or 'post'")

    @property
    def projected(self) -> bool:
        """Whether linear layers lead from the latents' width to the network's and back."""
        return self.norm == "pre" or self.latent_width != self.width

    def build(self) -> "LatentTransformer":
        """A freshly initialised network on the current default device."""
        return LatentTransformer(self)


class Feed(nn.Module):
    """The second half of a block: an MLP on the normalised stream and added to it, or normalised after the sum."""

    def __init__(self, width: int, hidden: int, *, dropout: float, norm: Norm):
        super().__init__()
        self.dropout = dropout
        self.post = norm == "post"
        self.norm = LayerNorm(width)
        self.mlp = MLP(width, hidden)

    def forward(self, x_BKD: Float[Tensor, "B K D"]) -> Float[Tensor, "B K D"]:
        """The stream after the MLP."""
        fed_BKD = self.mlp(x_BKD if self.post else self.norm(x_BKD))
        x_BKD = x_BKD + F.dropout(fed_BKD, self.dropout, training=self.training)
        return self.norm(x_BKD) if self.post else x_BKD


class LatentBlock(nn.Module):
    """Time and self-conditioning added to the stream, then self-attention, then an MLP, or two side by side."""

    def __init__(self, config: LatentTransformerConfig, *, twin: bool):
        super().__init__()
        width, hidden = config.width, config.mlp_ratio * config.width
        self.dropout = config.dropout
        self.post = config.norm == "post"
        self.time = TimeAddition(width)
        # Without a bias (the time's does for both), zeros add exactly nothing.
        self.selfcond = nn.Linear(config.latent_width, width, bias=False) if config.self_conditioning else None
        self.norm = LayerNorm(width)
        self.attention = SelfAttention(width, config.heads, qk_norm=config.qk_norm)
        self.feed = Feed(width, hidden, dropout=config.dropout, norm=config.norm)
        self.twin = Feed(width, hidden, dropout=config.dropout, norm=config.norm) if twin else None

    def forward(
        self,
        x_BKD: Float[Tensor, "B K D"],
        time_BD: Float[Tensor, "B D"],
        selfcond_BKZ: Float[Tensor, "B K Z"] | None,
        extra: KeysValues | None,
    ) -> tuple[Float[Tensor, "B K D"], Float[Tensor, "B K D"] | None]:
        """The stream after both halves, and what the twin, where there is one, makes of the same attention."""
        x_BKD = self.time(x_BKD, time_BD)
        if self.selfcond is not None and selfcond_BKZ is not None:
            x_BKD = x_BKD + self.selfcond(selfcond_BKZ)
        read_BKD = self.attention(x_BKD if self.post else self.norm(x_BKD), None, extra)
        x_BKD = x_BKD + F.dropout(read_BKD, self.dropout, training=self.training)
        if self.post:
            x_BKD = self.norm(x_BKD)
        return self.feed(x_BKD), None if self.twin is None else self.twin(x_BKD)


class Readout(nn.Module):
    """From the stream to latents: a norm where the blocks have none after them, and a linear layer."""

    def __init__(self, config: LatentTransformerConfig):
        super().__init__()
        self.norm = LayerNorm(config.width) if config.norm == "pre" else None
        self.output = nn.Linear(config.width, config.latent_width) if config.projected else None

    def forward(self, x_BKD: Float[Tensor, "B K D"]) -> Float[Tensor, "B K Z"]:
        """The prediction at each latent."""
        if self.norm is not None:
            x_BKD = self.norm(x_BKD)
        return x_BKD if self.output is None else self.output(x_BKD)


class LatentTransformer(nn.Module):
    """Noisy latents in, clean latents out (a flow map's: the average of clean ones that its jump makes use of)."""

    def __init__(self, config: LatentTransformerConfig):
        super().__init__()
        self.config = config
        self.input = nn.Linear(config.latent_width, config.width) if config.projected else None
        self.positions = nn.Embedding(config.latents, config.width)
        self.time = TimeEmbedding(config.width)
        self.span = TimeEmbedding(config.width) if config.span else None
        last = config.layers - 1
        self.layers = nn.ModuleList(
            LatentBlock(config, twin=config.second_head and number == last) for number in range(config.layers)
        )
        self.readout = Readout(config)
        self.second_readout = Readout(config) if config.second_head else None
        self.initialise()

    def initialise(self) -> None:
        """Draw every parameter anew from torch's generator; the span's embedding starts at zero."""
        initialise(self)
        if self.config.norm == "pre":
            # Each prediction is the sum of as many branches as the network without a twin has.
            blocks = self._blocks()
            outputs = [linear for block in blocks for linear in (block.attention.out, block.feed.mlp.outer)]
            shrink_residuals(outputs)
            if (twin := blocks[-1].twin) is not None:
                twin.mlp.outer.weight.data.div_(len(outputs) ** 0.5)
        if self.span is not None:
            zero(self.span.outer)

    def blocks(self) -> list[nn.Module]:
        """The units that are compiled and sharded one by one, in the order in which they run."""
        return list(self.layers)

    def forward(
        self,
        z_BKD: Float[Tensor, "B K D"],
        t_B: Float[Tensor, " B"],
        selfcond_BKD: Float[Tensor, "B K D"] | None = None,
        r_B: Float[Tensor, " B"] | None = None,
        extra: Extra = (),
    ) -> Float[Tensor, "B K D"]:
        """The clean latents that z at time t came from; with a span what the jump from t to r needs.

        Without self-conditioning its layers are skipped, which is what zeros do; a loss that is taken over several
        processes gives zeros, so that every parameter has a gradient.
        """
        return self.readout(self._streams(z_BKD, t_B, selfcond_BKD, r_B, extra)[0])

    def both(
        self,
        z_BKD: Float[Tensor, "B K D"],
        t_B: Float[Tensor, " B"],
        selfcond_BKD: Float[Tensor, "B K D"] | None = None,
        r_B: Float[Tensor, " B"] | None = None,
        extra: Extra = (),
    ) -> tuple[Float[Tensor, "B K D"], Float[Tensor, "B K D"]]:
        """What forward gives, and the second head's prediction."""
        if self.second_readout is None:
            raise ValueError("second_head is False: this model has one prediction, set it to have another")
        stream_BKD, twin_BKD = self._streams(z_BKD, t_B, selfcond_BKD, r_B, extra)
        return self.readout(stream_BKD), self.second_readout(twin_BKD)

    def _streams(
        self, z_BKD: Tensor, t_B: Tensor, selfcond_BKD: Tensor | None, r_B: Tensor | None, extra: Extra
    ) -> tuple[Tensor, Tensor | None]:
        count = z_BKD.shape[1]
        if count > self.config.latents:
            raise ValueError(f"a sequence has {count} latents: this model takes at most {self.config.latents}")
        if selfcond_BKD is not None and not self.config.self_conditioning:
            raise ValueError("selfcond_BKD is given: this model was built without self-conditioning, leave it out")
        time_BD = self._time(t_B, r_B)
        x_BKD = z_BKD if self.input is None else self.input(z_BKD)
        x_BKD = x_BKD + self.positions.weight[:count]
        told = extra or (None,) * len(self.layers)
        inputs: list[Tensor] = []
        twin_BKD = None
        for number, (block, beside) in enumerate(zip(self.layers, told, strict=True)):
            if number < len(self.layers) // 2:
                inputs.append(x_BKD)
            else:
                x_BKD = x_BKD + inputs.pop()
            x_BKD, twin_BKD = block(x_BKD, time_BD, selfcond_BKD, beside)
        return x_BKD, twin_BKD

    def _time(self, t_B: Tensor, r_B: Tensor | None) -> Tensor:
        if (self.span is None) != (r_B is None):
            what = "given: this model knows no other time than t" if self.span is None else "None: this model needs it"
            raise ValueError(f"r_B is {what}, see span")
        time_BD = self.time(t_B)
        return time_BD if self.span is None or r_B is None else time_BD + self.span(t_B - r_B)

    def _blocks(self) -> list[LatentBlock]:
        return [block for block in self.layers if isinstance(block, LatentBlock)]


def student(teacher: LatentTransformer, *, second_head: bool = False, literal: bool = False) -> LatentTransformer:
    """A flow map's network with the teacher's weights and without dropout: for every r it starts as the teacher.

    A second head starts as a copy of the first. The literal student's embedding of t - r is random, so that it starts
    elsewhere. The weights are copied; device and dtype are the teacher's.
    """
    if teacher.config.span:
        raise ValueError("teacher: it is a flow map's network itself (span), give the denoiser it was distilled from")
    positions = teacher.positions.weight
    with torch.device(positions.device):
        model = LatentTransformer(replace(teacher.config, span=True, second_head=second_head, dropout=0.0))
    if literal and model.span is not None:
        initialise(model.span)
    state = teacher.state_dict()
    if second_head:
        last = f"layers.{teacher.config.layers - 1}."
        state |= {name.replace("feed", "twin", 1): state[name] for name in state if name.startswith(f"{last}feed.")}
        state |= {f"second_{name}": state[name] for name in state if name.startswith("readout.")}
    rest = model.load_state_dict(state, strict=False)
    assert not rest.unexpected_keys
    assert all(name.startswith("span.") for name in rest.missing_keys)
    return model.to(positions.dtype)
