"""Masked (absorbing) diffusion: forward kernel, posterior, loss weights and row counts. t = 0 data, t = 1 all masked.

Paper eqs. mdm-forward, posterior and mdm-post-marginal-approx; numbers refer to docs/math.md.
"""

import functools
import math
from typing import Literal

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from diladiff.processes.schedules import MaskSchedule

LossWeight = Literal["flat", "elbo"]

MIN_ELBO_TIME = 1e-3
"""The ELBO's weight is taken no nearer to t = 0 than this, where it grows as 1/t."""

_DEVIATIONS = 8.0


def corrupt(
    tokens_BL: Int[Tensor, "B L"],
    t_B: Float[Tensor, " B"],
    noise_BL: Float[Tensor, "B L"],
    *,
    schedule: MaskSchedule,
    mask_id: int,
) -> Int[Tensor, "B L"]:
    """Draw from q(x_t | x), docs/math.md (1): a token is masked where its uniform noise is below 1 - alpha_t."""
    return torch.where(noise_BL < schedule.mask_rate(t_B)[:, None], mask_id, tokens_BL)


def reveal_probability(schedule: MaskSchedule, t: Float[Tensor, "*S"], s: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """The probability that a token masked at t is revealed by s < t, docs/math.md (4)."""
    masked_t = schedule.mask_rate(t)
    return (masked_t - schedule.mask_rate(s)) / masked_t


def posterior(
    logprobs_BLV: Float[Tensor, "B L V"],
    tokens_BL: Int[Tensor, "B L"],
    t_B: Float[Tensor, " B"],
    s_B: Float[Tensor, " B"],
    *,
    schedule: MaskSchedule,
    mask_id: int,
) -> Float[Tensor, "B L V"]:
    """Log probabilities of x_s given x_t and a denoiser's log probabilities of x_0, docs/math.md (3)."""
    reveal_B11 = reveal_probability(schedule, t_B, s_B)[:, None, None]
    vocabulary_V = torch.arange(logprobs_BLV.shape[-1], device=logprobs_BLV.device)
    moved_BLV = torch.where(vocabulary_V == mask_id, torch.log1p(-reveal_B11), torch.log(reveal_B11) + logprobs_BLV)
    kept_BLV = torch.where(tokens_BL[..., None] == vocabulary_V, 0.0, -torch.inf).to(moved_BLV.dtype)
    return torch.where((tokens_BL == mask_id)[..., None], moved_BLV, kept_BLV)


def loss_weight(kind: LossWeight, schedule: MaskSchedule, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
    """The weight of a masked position's cross-entropy at time t.

    "flat": 1, the paper's "weight -1" after division by all positions, docs/math.md (7). "elbo": -alpha' / (1 - alpha),
    docs/math.md (5), with t at least MIN_ELBO_TIME.
    """
    if kind == "flat":
        return torch.ones_like(t)
    if kind == "elbo":
        safe = t.clamp(min=MIN_ELBO_TIME)
        return -schedule.alpha_prime(safe) / schedule.mask_rate(safe)
    raise ValueError(f"weight = {kind!r} is not known; use flat or elbo")


@functools.cache
def masked_rows_bound(schedule: MaskSchedule, batch: int, length: int) -> int:
    """Rows that the masked positions of an aligned stratified slice never exceed, docs/math.md (9).

    The mean at the worst offset of the strata plus 8 standard deviations; linear: (B+1)L/2 + 8 sqrt(BL/6). A host
    number, found on the CPU: take it outside compiled code.
    """
    if batch < 1 or length < 1:
        raise ValueError(f"batch = {batch}, length = {length}: both must be at least 1")
    rate_B = schedule.mask_rate(torch.arange(1, batch + 1, dtype=torch.float64, device="cpu") / batch)
    # The variance at the worst offset, or in the mean over offsets where that is more (1/6 a row when linear).
    rate = schedule.mask_rate((torch.arange(4096, dtype=torch.float64, device="cpu") + 0.5) / 4096)
    variance = max(float((rate_B * (1 - rate_B)).sum()), batch * float((rate * (1 - rate)).mean()))
    rows = length * float(rate_B.sum()) + _DEVIATIONS * math.sqrt(length * variance)
    return min(batch * length, math.ceil(rows))


def masked_rows(
    masked_BL: Bool[Tensor, "B L"], rows: int
) -> tuple[Int[Tensor, " {rows}"], Bool[Tensor, " {rows}"], Bool[Tensor, ""]]:
    """The flat positions of the masked tokens in a fixed number of rows: (index, valid, overflow), with no host sync.

    Masked positions come first and in order; the rows left over hold unmasked positions (valid is False there), so that
    all indices differ and a gather's gradient adds nothing twice. `overflow` says that masked positions were left out.
    """
    flat = masked_BL.flatten()
    if not 1 <= rows <= flat.numel():
        raise ValueError(f"rows = {rows} is out of range; give 1 to {flat.numel()} (batch x length)")
    position = torch.arange(flat.numel(), device=flat.device)
    rank = flat.cumsum(0)
    place = torch.where(flat, rank - 1, rank[-1] + position - rank)
    index = torch.empty_like(position).scatter_(0, place, position)[:rows]
    return index, position[:rows] < rank[-1], rank[-1] > rows
