"""Times: stratified, logit-normal, in pairs for training; uniform grids for sampling. t = 0 is data, t = 1 is noise."""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diladiff.processes.latent_schedules import LatentSchedule


def bit_reverse(i: Int[Tensor, "*S"], bits: int) -> Int[Tensor, "*S"]:
    """The lowest `bits` bits of i in reverse order."""
    out = torch.zeros_like(i)
    for bit in range(bits):
        out = out | (((i >> bit) & 1) << (bits - 1 - bit))
    return out


def stratified(u: Float[Tensor, ""], index_B: Int[Tensor, " B"], size: int) -> Float[Tensor, " B"]:
    """Times of these samples of a global batch, one a stratum: (u + bitreverse(i)) / size, docs/math.md (8).

    Bit reversal makes every aligned power-of-two slice of the batch stratified itself.
    """
    if size < 1 or size & (size - 1):
        raise ValueError(f"size = {size} is not a power of two; choose a global batch of 1, 2, 4, 8, ...")
    return (u + bit_reverse(index_B, size.bit_length() - 1)) / size


def uniform_grid(steps: int) -> Float[Tensor, " {steps}+1"]:
    """Times from exactly 1 to exactly 0 in `steps` equal steps, float64 on the CPU."""
    if steps < 1:
        raise ValueError(f"steps = {steps} is too few; give at least 1")
    return torch.arange(steps, -1, -1, dtype=torch.float64, device="cpu") / steps


def angle_grid(steps: int, schedule: LatentSchedule) -> Float[Tensor, " {steps}+1"]:
    """Times from exactly 1 to exactly 0 whose angles are equally spaced, float64 on the CPU; docs/math.md (24)."""
    return schedule.time(math.pi / 2 * uniform_grid(steps))


def logit_normal(normal_B: Float[Tensor, " B"], mean: float, std: float) -> Float[Tensor, " B"]:
    """Times whose logits have this mean and standard deviation, from standard normals; docs/math.md (28)."""
    return torch.sigmoid(mean + std * normal_B)


def uniform_in_angle(u_B: Float[Tensor, " B"], schedule: LatentSchedule) -> Float[Tensor, " B"]:
    """Times whose angle is uniform in (0, pi / 2], from uniforms in [0, 1); docs/math.md (28)."""
    return schedule.time(math.pi / 2 * (1 - u_B))


def sorted_pair(
    first_B: Float[Tensor, " B"], second_B: Float[Tensor, " B"]
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """(t, r) with t >= r."""
    return torch.maximum(first_B, second_B), torch.minimum(first_B, second_B)


def pairs(
    first_B: Float[Tensor, " B"],
    second_B: Float[Tensor, " B"],
    equal_u_B: Float[Tensor, " B"],
    start_u_B: Float[Tensor, " B"],
    *,
    equal_share: float,
    start_share: float,
) -> tuple[Float[Tensor, " B"], Float[Tensor, " B"]]:
    """(t, r), t >= r, from two draws of times and two uniforms; docs/math.md (28).

    A share of the first draws is t = 1, where sampling starts; then, for a share of the examples, r = t is that draw.
    """
    first_B = torch.where(start_u_B < start_share, 1.0, first_B)
    second_B = torch.where(equal_u_B < equal_share, first_B, second_B)
    return sorted_pair(first_B, second_B)
