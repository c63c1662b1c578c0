"""Draws from a categorical law, exact in float64, with temperature and nucleus (docs/math.md (12), (15)).

A float32 draw cannot reach tokens rarer than about 2^-24: it lowers entropy, so there is no flag for it. Devices
without float64 are served on the CPU. In nucleus order tokens stand by falling logit, equal ones by rising id.
"""

from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

Nucleus = Literal["keep", "drop"]

_CHUNK = 128


def draw(
    logits_NV: Float[Tensor, "N V"],
    uniform_N: Float[Tensor, " N"],
    *,
    temperature: float = 1.0,
    top_p: float | None = None,
    nucleus: Nucleus = "keep",
) -> Int[Tensor, " N"]:
    """A token for each row by inverse CDF from a float64 uniform in [0, 1), docs/math.md (15).

    Temperature divides the logits before the nucleus is cut; 0 is its limit, the largest logit (the lowest id of equal
    ones). A token with logit -inf is never drawn; each row needs one finite logit. The host never waits for the device.
    """
    _check(temperature, top_p, nucleus)
    if uniform_N.dtype != torch.float64:
        raise ValueError(f"uniform: dtype {uniform_N.dtype} cannot reach the tail of the law; give float64")
    device = logits_NV.device
    logits_NV, uniform_N = _with_float64(logits_NV), _with_float64(uniform_N)
    if temperature == 0:
        return _largest(logits_NV).to(device)
    return _inverse_cdf(_cut(logits_NV, temperature, top_p, nucleus), uniform_N).to(device)


def probabilities(
    logits_NV: Float[Tensor, "N V"],
    temperature: float = 1.0,
    top_p: float | None = None,
    nucleus: Nucleus = "keep",
) -> Float[Tensor, "N V"]:
    """The law that `draw` draws from, in float64 (on the CPU for devices without it), docs/math.md (12)."""
    _check(temperature, top_p, nucleus)
    logits_NV = _with_float64(logits_NV)
    if temperature == 0:
        one_hot_NV = torch.zeros_like(logits_NV, dtype=torch.float64)
        return one_hot_NV.scatter_(1, _largest(logits_NV)[:, None], 1.0)
    weights_NV = _cut(logits_NV, temperature, top_p, nucleus)
    return weights_NV / weights_NV.sum(1, keepdim=True)


def _check(temperature: float, top_p: float | None, nucleus: Nucleus) -> None:
    if not temperature >= 0:
        raise ValueError(f"temperature = {temperature} is negative; give 0 (largest logit) or more")
    if top_p is not None and not 0 < top_p <= 1:
        raise ValueError(f"top_p = {top_p} is out of range; give 0 < top_p <= 1, or None for no nucleus")
    if nucleus not in ("keep", "drop"):
        raise ValueError(f"nucleus = {nucleus!r} is not known; use keep or drop")


def _with_float64(x: Tensor) -> Tensor:
    return x.cpu() if x.device.type == "mps" else x


def _largest(logits_NV: Tensor) -> Tensor:
    """The lowest id that has the largest logit; argmax leaves open which it returns."""
    ids_V = torch.arange(logits_NV.shape[1], device=logits_NV.device)
    is_largest_NV = logits_NV == logits_NV.amax(1, keepdim=True)
    return torch.where(is_largest_NV, ids_V, logits_NV.shape[1]).amin(1)


def _weights(logits_NV: Tensor, temperature: float) -> Tensor:
    """Unnormalised float64 probabilities; the largest is 1."""
    wide_NV = logits_NV.double()
    return torch.exp((wide_NV - wide_NV.amax(1, keepdim=True)) / temperature)


def _cut(logits_NV: Tensor, temperature: float, top_p: float | None, nucleus: Nucleus) -> Tensor:
    """Unnormalised float64 probabilities, 0 outside the nucleus."""
    weights_NV = _weights(logits_NV, temperature)
    if top_p is None or top_p == 1:
        return weights_NV
    return torch.where(_inside(logits_NV, weights_NV, top_p, nucleus), weights_NV, 0.0)


def _inside(logits_NV: Tensor, weights_NV: Tensor, top_p: float, nucleus: Nucleus) -> Tensor:
    """Which tokens a full sort would keep, found without one: by bisection for the logit at which the nucleus ends.

    The bits of a logit are settled from the highest down, which is exact for its type. Above that logit all tokens
    stay, below it none, and of those that have it the first by id.
    """
    key_NV, bits = _order_keys(logits_NV)
    limit_N1 = top_p * weights_NV.sum(1, keepdim=True)
    # The largest key with too much mass above it; the lowest of all is no logit's and has all mass above it.
    below_N1 = torch.full_like(limit_N1, -(2 ** (bits - 1)), dtype=key_NV.dtype)
    for bit in reversed(range(bits)):
        tried_N1 = below_N1 ^ (1 << bit if bit < bits - 1 else -(1 << bit))
        mass_N1 = _mass_above(weights_NV, key_NV, tried_N1)
        too_much_N1 = mass_N1 >= limit_N1 if nucleus == "keep" else mass_N1 > limit_N1
        below_N1 = torch.where(too_much_N1, tried_N1, below_N1)
    end_N1 = below_N1 + 1
    before_N1, at_end_NV = _mass_above(weights_NV, key_NV, end_N1), key_NV == end_N1
    rank_NV = at_end_NV.cumsum(1) - 1
    if nucleus == "keep":
        kept_NV = before_N1 + rank_NV * weights_NV < limit_N1
    else:
        first_NV = (rank_NV == 0) & (before_N1 == 0)
        kept_NV = (before_N1 + (rank_NV + 1) * weights_NV <= limit_N1) | first_NV
    return (key_NV > end_N1) | (at_end_NV & kept_NV)


def _order_keys(logits_NV: Tensor) -> tuple[Tensor, int]:
    """Integers in the order of the logits, and how many bits they have."""
    if logits_NV.dtype == torch.float64:
        bits_NV, mask = logits_NV.view(torch.int64), 2**63 - 1
    else:
        bits_NV, mask = logits_NV.float().view(torch.int32), 2**31 - 1
    # Negative numbers stand in falling order of their bits; -0 equals 0.
    key_NV = torch.where(bits_NV < 0, bits_NV ^ mask, bits_NV).masked_fill(logits_NV == 0, 0)
    if logits_NV.dtype == torch.bfloat16:
        return key_NV >> 16, 16
    return key_NV, 64 if logits_NV.dtype == torch.float64 else 32


def _mass_above(weights_NV: Tensor, key_NV: Tensor, key_N1: Tensor) -> Tensor:
    # A product takes a third of the time of torch.where on a CPU; compiled, the two are one.
    return (weights_NV * (key_NV > key_N1)).sum(1, keepdim=True)


def _inverse_cdf(weights_NV: Tensor, uniform_N: Tensor) -> Tensor:
    """The first token at which the running weight exceeds u times the total, found in two levels, without a host sync.

    A parallel scan's rounding can lend weight to a token that has none; asking for weight > 0 rules that out.
    """
    pad = -weights_NV.shape[1] % _CHUNK
    chunks_NCW = torch.nn.functional.pad(weights_NV, (0, pad)).unflatten(1, (-1, _CHUNK))
    sums_NC = chunks_NCW.sum(2)
    upto_NC = sums_NC.cumsum(1)
    aim_N1 = uniform_N[:, None] * upto_NC[:, -1:]
    chunk_N1 = _first((upto_NC > aim_N1) & (sums_NC > 0), sums_NC > 0)
    inside_NW = chunks_NCW.gather(1, chunk_N1[..., None].expand(-1, 1, _CHUNK))[:, 0]
    before_N1 = torch.where(chunk_N1 > 0, upto_NC.gather(1, (chunk_N1 - 1).clamp(min=0)), 0.0)
    token_N1 = _first((inside_NW.cumsum(1) > aim_N1 - before_N1) & (inside_NW > 0), inside_NW > 0)
    return (chunk_N1 * _CHUNK + token_N1)[:, 0]


def _first(wanted_NC: Tensor, allowed_NC: Tensor) -> Tensor:
    """The first place that is wanted; where rounding leaves none, the last that is allowed."""
    count = wanted_NC.shape[1]
    place_C = torch.arange(count, device=wanted_NC.device)
    first_N1 = torch.where(wanted_NC, place_C, count).amin(1, keepdim=True)
    last_N1 = torch.where(allowed_NC, place_C, 0).amax(1, keepdim=True)
    return torch.where(first_N1 < count, first_N1, last_N1)
