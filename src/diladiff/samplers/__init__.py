"""Samplers: from a network and a canvas of masks and given tokens to states of tokens. One function, `sample`."""

from collections.abc import Iterator
from typing import Literal

from jaxtyping import Int
from torch import Tensor

from diladiff.config import closest
from diladiff.samplers import confidence, tokens
from diladiff.samplers.base import Denoiser, DrawConfig, TokenState, Writer
from diladiff.samplers.confidence import ConfidenceThreshold, ConfidenceTopK, EntropyBounded
from diladiff.samplers.tokens import Ancestral, FirstHitting, Remasking

__all__ = [
    "SAMPLERS",
    "Ancestral",
    "ConfidenceThreshold",
    "ConfidenceTopK",
    "Denoiser",
    "DrawConfig",
    "EntropyBounded",
    "FirstHitting",
    "Remasking",
    "SamplerConfig",
    "TokenState",
    "Writer",
    "sample",
    "sampler_config",
]

SamplerConfig = Ancestral | FirstHitting | Remasking | ConfidenceTopK | ConfidenceThreshold | EntropyBounded
"""The settings of any sampler; told apart by `name`."""

SAMPLERS = {
    "ancestral": Ancestral,
    "first_hitting": FirstHitting,
    "remasking": Remasking,
    "confidence_topk": ConfidenceTopK,
    "confidence_threshold": ConfidenceThreshold,
    "entropy_bounded": EntropyBounded,
}


def sampler_config(
    name: str,
    *,
    steps: int | None,
    temperature: float = 1.0,
    top_p: float | None = None,
    nucleus: Literal["keep", "drop"] = "keep",
) -> SamplerConfig:
    """A sampler's settings by its name, all else by default; steps None leaves their number to the sampler."""
    if name not in SAMPLERS:
        near = closest(name, SAMPLERS)
        hint = f"; did you mean {near}?" if near else ""
        raise ValueError(f"sampler: {name!r} is not one of {', '.join(SAMPLERS)}{hint}")
    draw = DrawConfig(temperature=temperature, top_p=top_p, nucleus=nucleus)
    if steps is None:
        return SAMPLERS[name](draw=draw)
    return SAMPLERS[name](steps=steps, draw=draw)


def sample(
    config: SamplerConfig,
    denoise: Denoiser,
    canvas_BL: Int[Tensor, "B L"],
    index_B: Int[Tensor, " B"],
    *,
    mask_id: int,
    seed: int,
    write: Writer | None = None,
) -> Iterator[TokenState]:
    """Fill a canvas: positions that hold `mask_id` are drawn, all others stay as they are.

    `index_B` are the samples' own numbers: they and the seed key every random number, so a sample does not depend on
    the batch or the process it is drawn in. `write` takes the place of `denoise` and the draw from its logits where a
    sampler does not look at logits to choose positions.
    """
    if isinstance(config, Ancestral):
        plan = tokens.plan_ancestral(config, canvas_BL, index_B, mask_id=mask_id, seed=seed)
    elif isinstance(config, FirstHitting):
        plan = tokens.plan_first_hitting(config, canvas_BL, index_B, mask_id=mask_id, seed=seed)
    elif isinstance(config, Remasking):
        plan = tokens.plan_remasking(config, canvas_BL, index_B, mask_id=mask_id, seed=seed)
    else:
        return confidence.run(config, denoise, canvas_BL, index_B, mask_id=mask_id, seed=seed)
    return tokens.run(plan, write or tokens.picking(denoise), canvas_BL, config.draw, mask_id)
