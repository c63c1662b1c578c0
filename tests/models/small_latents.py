"""Small latent transformers, and a naive one to hold them against."""

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diladiff.models.latent_transformer import LatentTransformer, LatentTransformerConfig

TINY = LatentTransformerConfig(latents=5, latent_width=6, width=16, layers=4, heads=2, dropout=0.0)
POST = replace(TINY, norm="post")
PRINTED = replace(POST, latent_width=16)
FLOW = replace(TINY, span=True)
SHAPES = {"pre": TINY, "post": POST, "printed": PRINTED, "qk_norm": replace(TINY, qk_norm=True)}


def build(config: LatentTransformerConfig) -> LatentTransformer:
    """A network with every parameter drawn anew, so that nothing hides behind a zero."""
    torch.manual_seed(0)
    model = LatentTransformer(config)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=1.0 if name.endswith("gain") else 0.0, std=0.2)
    return model


def latents(config: LatentTransformerConfig, *, batch: int = 3, seed: int = 1) -> Tensor:
    """Some noise of the right shape."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(batch, config.latents, config.latent_width, generator=generator)


TIMES = torch.tensor([0.2, 0.5, 1.0])


def layer_norm(x: Tensor, gain: Tensor) -> Tensor:
    """Over the last axis, spelt out."""
    centred = x - x.mean(-1, keepdim=True)
    return centred / (centred.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain


def naive(model: LatentTransformer, z: Tensor, t: Tensor, selfcond: Tensor | None) -> Tensor:
    """The network spelt out: every block's input kept, that of block n added to block N - 1 - n's."""
    state, config = model.state_dict(), model.config
    post = config.norm == "post"

    def linear(name: str, x: Tensor) -> Tensor:
        return F.linear(x, state[f"{name}.weight"], state.get(f"{name}.bias"))

    def attend(name: str, x: Tensor) -> Tensor:
        q, k, v = (y.unflatten(-1, (config.heads, -1)) for y in linear(f"{name}.qkv", x).chunk(3, -1))
        scores = torch.einsum("bqhe,bkhe->bhqk", q, k) / q.shape[-1] ** 0.5
        return linear(f"{name}.out", torch.einsum("bhqk,bkhe->bqhe", scores.softmax(-1), v).flatten(2))

    def feed(name: str, x: Tensor) -> Tensor:
        return linear(f"{name}.outer", F.gelu(linear(f"{name}.inner", x), approximate="tanh"))

    x = linear("input", z) if config.projected else z
    x = x + state["positions.weight"][: z.shape[1]]
    time = model.time(t)
    inputs: dict[int, Tensor] = {}
    for number in range(config.layers):
        name = f"layers.{number}"
        inputs[number] = x
        if number >= config.layers // 2:
            x = x + inputs[config.layers - 1 - number]
        x = x + linear(f"{name}.time.linear", time)[:, None]
        if selfcond is not None:
            x = x + linear(f"{name}.selfcond", selfcond)
        gains = state[f"{name}.norm.gain"], state[f"{name}.feed.norm.gain"]
        if post:
            x = layer_norm(x + attend(f"{name}.attention", x), gains[0])
            x = layer_norm(x + feed(f"{name}.feed.mlp", x), gains[1])
        else:
            x = x + attend(f"{name}.attention", layer_norm(x, gains[0]))
            x = x + feed(f"{name}.feed.mlp", layer_norm(x, gains[1]))
    if not post:
        x = layer_norm(x, state["readout.norm.gain"])
    return linear("readout.output", x) if config.projected else x
