"""Samplers that see the logits before they choose positions: top-k, threshold, entropy-bounded; docs/math.md (13).

Law: one position a step, chosen by the network alone (not by the token drawn), keeps the true law under the exact
denoiser; all else trades spread for fewer steps. Every masked position is computed in every step, and a step waits for
the device to learn what is left.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diladiff.rng import Stream, uniform_at
from diladiff.samplers.base import (
    ROWS_AT_ONCE,
    Denoiser,
    DrawConfig,
    TokenState,
    check_steps,
    pick,
    random_device,
    start,
)

Measure = Literal["token", "top", "margin"]
"""Confidence in a position: the probability of the token drawn there, of the likeliest one, or the latter's lead."""


@dataclass(frozen=True, kw_only=True)
class ConfidenceTopK:
    """In each of `steps` steps reveal the most confident positions, the counts of steps differing by at most one.

    A candidate token is drawn anew in every step until its position is revealed. Confidence is the network's own
    probability, before temperature and nucleus.
    """

    steps: int = 64
    measure: Measure = "token"
    draw: DrawConfig = field(default_factory=DrawConfig)
    name: Literal["confidence_topk"] = "confidence_topk"

    def __post_init__(self) -> None:
        check_steps(self.steps)


@dataclass(frozen=True, kw_only=True)
class ConfidenceThreshold:
    """Reveal every position whose confidence reaches `threshold`, and at least one.

    With `steps`, at least so many positions a step that it ends by then; without, it takes as many steps as it needs.
    """

    threshold: float = 0.9
    steps: int | None = None
    measure: Measure = "token"
    draw: DrawConfig = field(default_factory=DrawConfig)
    name: Literal["confidence_threshold"] = "confidence_threshold"

    def __post_init__(self) -> None:
        check_steps(self.steps)
        if not 0 < self.threshold <= 1:
            raise ValueError(f"threshold: {self.threshold} must be in (0, 1]")


@dataclass(frozen=True, kw_only=True)
class EntropyBounded:
    """Reveal positions from the lowest entropy up while the sum of the others' entropies stays within `bound` nats.

    The sum without the largest bounds what independent draws can lose against joint ones. `steps` as for the threshold;
    entropies are the network's own, before temperature and nucleus.
    """

    bound: float = 0.1
    steps: int | None = None
    draw: DrawConfig = field(default_factory=DrawConfig)
    name: Literal["entropy_bounded"] = "entropy_bounded"

    def __post_init__(self) -> None:
        check_steps(self.steps)
        if not self.bound >= 0:
            raise ValueError(f"bound: {self.bound} must be at least 0")


ConfidenceConfig = ConfidenceTopK | ConfidenceThreshold | EntropyBounded


def run(
    config: ConfidenceConfig,
    denoise: Denoiser,
    canvas_BL: Int[Tensor, "B L"],
    index_B: Int[Tensor, " B"],
    *,
    mask_id: int,
    seed: int,
) -> Iterator[TokenState]:
    """Reveal until nothing is masked. A network told the time gets the masked share (that of alpha = 1 - t)."""
    length, where = canvas_BL.shape[1], random_device(canvas_BL.device)
    count_B = (canvas_BL == mask_id).sum(1).cpu()
    steps_B = count_B if config.steps is None else count_B.clamp(max=config.steps)
    steps = int(steps_B.max()) if len(steps_B) else 0
    state = start(canvas_BL, steps)
    tokens_BL, left_B = state.tokens_BL, count_B
    yield state
    for step in range(steps):
        active_A = left_B.nonzero().squeeze(1)
        if not len(active_A):
            return
        least_A = _least(config, step, count_B[active_A], steps_B[active_A], left_B[active_A])
        time_A = (left_B[active_A].double() / length).float().to(canvas_BL.device)
        active_A = active_A.to(canvas_BL.device)
        masked_AL = tokens_BL[active_A] == mask_id
        rows_N = masked_AL.flatten().nonzero().squeeze(1)
        places_N = active_A[rows_N // length] * length + rows_N % length
        logits_NV = denoise(tokens_BL[active_A], time_A, rows_N)
        at_N, position_N = (places_N // length).to(where), (places_N % length).to(where)
        uniform_N = uniform_at(seed, Stream.TOKEN, step, index_B.to(where)[at_N], position_N, dtype=torch.float64)
        drawn_N = pick(logits_NV, uniform_N, config.draw) if _needs_tokens(config) else None
        chosen_N = _choose(config, _scores(config, logits_NV, drawn_N), masked_AL, least_A.to(canvas_BL.device))
        kept_K = chosen_N.nonzero().squeeze(1)
        if drawn_N is None:
            ids_K = pick(logits_NV[kept_K], uniform_N[kept_K.to(where)], config.draw)
        else:
            ids_K = drawn_N[kept_K]
        tokens_BL.view(-1).index_copy_(0, places_N[kept_K], ids_K)
        left_B = (tokens_BL == mask_id).sum(1).cpu()
        yield TokenState(tokens_BL, step + 1, steps, places_N[kept_K], len(active_A))


def _needs_tokens(config: ConfidenceConfig) -> bool:
    return not isinstance(config, EntropyBounded) and config.measure == "token"


def _least(config: ConfidenceConfig, step: int, count_A: Tensor, steps_A: Tensor, left_A: Tensor) -> Tensor:
    """How many positions each sequence must reveal in this step (for top-k: exactly that many)."""
    if isinstance(config, ConfidenceTopK):
        return (step + 1) * count_A // steps_A - step * count_A // steps_A
    if config.steps is None:
        return torch.ones_like(left_A)
    ahead_A = (steps_A - step).clamp(min=1)
    return (left_A + ahead_A - 1) // ahead_A


def _scores(config: ConfidenceConfig, logits_NV: Float[Tensor, "N V"], drawn_N: Tensor | None) -> Float[Tensor, " N"]:
    """Higher is revealed earlier: a confidence, or minus an entropy. Some rows at a time, in float32."""
    parts = []
    for first in range(0, len(logits_NV), ROWS_AT_ONCE):
        rows_NV = logits_NV[first : first + ROWS_AT_ONCE].float()
        if isinstance(config, EntropyBounded):
            parts.append(-entropy(rows_NV))
        elif drawn_N is not None:
            picked_N1 = drawn_N[first : first + ROWS_AT_ONCE, None]
            parts.append(rows_NV.softmax(1).gather(1, picked_N1).squeeze(1))
        else:
            top_N2 = rows_NV.softmax(1).topk(2, dim=1).values
            parts.append(top_N2[:, 0] - (top_N2[:, 1] if config.measure == "margin" else 0.0))
    return torch.cat(parts)


def entropy(logits_NV: Float[Tensor, "N V"]) -> Float[Tensor, " N"]:
    """The entropy of each row in nats; a token at -inf adds nothing."""
    return torch.special.entr(logits_NV.softmax(1)).sum(1)


def _choose(
    config: ConfidenceConfig, score_N: Float[Tensor, " N"], masked_AL: Bool[Tensor, "A L"], least_A: Int[Tensor, " A"]
) -> Bool[Tensor, " N"]:
    """Which of the masked positions (in the order of `masked_AL`) are revealed; ties go to the earlier position."""
    score_AL = torch.full(masked_AL.shape, -torch.inf, dtype=score_N.dtype, device=score_N.device)
    score_AL[masked_AL] = score_N
    order_AL = score_AL.argsort(dim=1, descending=True, stable=True)
    rank_AL = order_AL.argsort(dim=1)
    chosen_AL = rank_AL < least_A[:, None]
    if isinstance(config, ConfidenceThreshold):
        chosen_AL |= score_AL >= config.threshold
    elif isinstance(config, EntropyBounded):
        sorted_AL = -score_AL.gather(1, order_AL)
        others_AL = sorted_AL.cumsum(1) - sorted_AL
        chosen_AL |= (others_AL <= config.bound).gather(1, rank_AL)
    return (chosen_AL & masked_AL)[masked_AL]
