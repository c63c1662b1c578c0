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
_CANDIDATES = (512, 8192)
"""How many of the largest logits are ranked first; rows whose nucleus may reach beyond them are ranked anew."""


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
    ones). A token with logit -inf is never drawn; each row needs one finite logit. With a nucleus the host waits for
    the device, at most three times: only rows whose nucleus is wide are ranked further.
    """
    _check(temperature, top_p, nucleus)
    if uniform_N.dtype != torch.float64:
        raise ValueError(f"uniform: dtype {uniform_N.dtype} cannot reach the tail of the law; give float64")
    device = logits_NV.device
    logits_NV, uniform_N = _with_float64(logits_NV), _with_float64(uniform_N)
    if temperature == 0:
        ids_N = _largest(logits_NV)
    elif top_p is None or top_p == 1:
        ids_N = _inverse_cdf(_weights(logits_NV, temperature), uniform_N)
    else:
        ids_N = torch.empty_like(uniform_N, dtype=torch.int64)
        for rows, ids_nK, mass_nK, size_n in _nuclei(logits_NV, temperature, top_p, nucleus):
            total_n1 = mass_nK.gather(1, size_n[:, None] - 1)
            rank_n = torch.searchsorted(mass_nK, uniform_N[rows, None] * total_n1, right=True)[:, 0]
            # Rounding may carry the product up to the total, one rank too far.
            rank_n = torch.minimum(rank_n, size_n - 1)
            ids_N[rows] = ids_nK.gather(1, rank_n[:, None])[:, 0]
    return ids_N.to(device)


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
    weights_NV = _weights(logits_NV, temperature)
    if top_p is not None and top_p < 1:
        inside_NV = torch.zeros_like(weights_NV, dtype=torch.bool)
        for rows, ids_nK, _, size_n in _nuclei(logits_NV, temperature, top_p, nucleus):
            kept_nK = torch.arange(ids_nK.shape[1], device=ids_nK.device) < size_n[:, None]
            inside_NV[rows] = inside_NV[rows].scatter(1, ids_nK, kept_nK)
        weights_NV = torch.where(inside_NV, weights_NV, 0.0)
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


def _nuclei(
    logits_NV: Tensor, temperature: float, top_p: float, nucleus: Nucleus
) -> list[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Groups of rows as (rows, ids in nucleus order, running weight in that order, size of the nucleus).

    Only the largest logits are ranked, and a row is accepted when its nucleus ends strictly above the smallest ranked
    one: then it is the nucleus that a full sort finds. The total it is measured against is always the full sum.
    """
    vocabulary = logits_NV.shape[1]
    limit_N = top_p * _weights(logits_NV, temperature).sum(1)
    rows = torch.arange(len(logits_NV), device=logits_NV.device)
    groups = []
    for width in [*(k for k in _CANDIDATES if k < vocabulary), vocabulary]:
        values_nK, ids_nK = _ranked(logits_NV[rows], width)
        mass_nK = _weights(values_nK, temperature).cumsum(1)
        # Rank of the token that crosses: the first whose mass reaches top_p ("keep") or exceeds it ("drop").
        cross_n = torch.searchsorted(mass_nK, limit_N[rows, None], right=nucleus == "drop")[:, 0]
        last_n1 = values_nK.gather(1, cross_n.clamp(max=width - 1)[:, None])
        done_n = (cross_n < width) & (last_n1 > values_nK[:, -1:])[:, 0]
        if width == vocabulary:
            done_n = torch.ones_like(done_n)
        size_n = (cross_n + 1 if nucleus == "keep" else cross_n).clamp(1, width)
        groups.append((rows[done_n], ids_nK[done_n], mass_nK[done_n], size_n[done_n]))
        rows = rows[~done_n]
        if not len(rows):
            break
    return groups


def _ranked(logits_nV: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """The `width` largest logits in nucleus order, with their ids."""
    wide_nV = logits_nV if logits_nV.dtype == torch.float64 else logits_nV.float()
    if width == wide_nV.shape[1]:
        values_nK, ids_nK = wide_nV.sort(dim=1, descending=True, stable=True)
        return values_nK, ids_nK
    ids_nK = wide_nV.topk(width, dim=1, sorted=False).indices.sort(dim=1).values
    values_nK, order_nK = wide_nV.gather(1, ids_nK).sort(dim=1, descending=True, stable=True)
    return values_nK, ids_nK.gather(1, order_nK)
