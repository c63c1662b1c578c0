"""What all samplers of latents share: the states they yield, their noise, and the plan of times and re-noising.

t = 1 is noise, t = 0 is data. A plan is made in float64 on the host before the network runs; docs/math.md (24), (29).
"""

import itertools
import math
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diladiff.processes.latent import renoise, renoise_angle, renoise_as_listed
from diladiff.processes.latent_schedules import LatentSchedule
from diladiff.processes.times import angle_grid, uniform_grid
from diladiff.rng import Stream, normal
from diladiff.samplers.base import check_steps, random_device

Grid = Literal["time", "angle"]
"""Steps equally long in t, or in the schedule's angle."""

GammaRule = Literal["exact", "listing"]
"""Re-noise so that the marginal is kept, docs/math.md (29), or as the paper's listing prints it, (30)."""


class LatentState(NamedTuple):
    """The latents after a step; `clean_BKD` is the step's prediction of the clean ones, None where there is none.

    `step` counts from 0 (pure noise) to `steps`, and `t` is the time that the next step is told.
    """

    z_BKD: Tensor
    clean_BKD: Tensor | None
    step: int
    steps: int
    t: float


class Leg(NamedTuple):
    """One step of a plan: from `t` straight to `end`, then noise, which leads to `after` (`end` without noise)."""

    step: int
    t: float
    end: float
    after: float
    theta_t: float
    theta_end: float
    theta_after: float


def check(steps: int, gamma: float, rule: GammaRule) -> None:
    """Refuse what no sampler of latents can do."""
    check_steps(steps)
    if not 0 <= gamma <= 1:
        raise ValueError(f"gamma: {gamma} must be in [0, 1] (0: the ODE, 1: all noise is fresh)")
    if rule == "listing" and gamma == 1:
        raise ValueError(f"gamma: {gamma} under the listing returns pure noise; give less, or the exact rule")


def plan(steps: int, grid: Grid, gamma: float, rule: GammaRule, schedule: LatentSchedule) -> list[Leg]:
    """The times and angles of every step."""
    times = uniform_grid(steps) if grid == "time" else angle_grid(steps, schedule)
    if rule == "listing":
        times[1:] *= math.sqrt(1 - gamma**2)
    angles = schedule.theta(times)
    end_angles = renoise_angle(angles, gamma) if rule == "exact" else angles
    ends = schedule.time(end_angles) if rule == "exact" and gamma > 0 else times
    legs = []
    for step, (i, j) in enumerate(itertools.pairwise(range(steps + 1))):
        places = (times[i], ends[j], times[j], angles[i], end_angles[j], angles[j])
        legs.append(Leg(step, *(float(place) for place in places)))
    return legs


def draw_noise(seed: int, step: int, index_B: Int[Tensor, " B"], latents: int, width: int) -> Float[Tensor, "B K D"]:
    """Standard normals of these samples: step 0 is where sampling starts, step n what the n-th step adds."""
    where = random_device(index_B.device)
    return normal(seed, Stream.NOISE, step, index_B.to(where), latents * width).unflatten(1, (latents, width))


def add_noise(
    z_BKD: Float[Tensor, "B K D"], leg: Leg, gamma: float, rule: GammaRule, index_B: Int[Tensor, " B"], *, seed: int
) -> Float[Tensor, "B K D"]:
    """The second half of a step; nothing where gamma = 0, nor after the exact rule's last step."""
    if gamma == 0 or (rule == "exact" and leg.theta_after == 0):
        return z_BKD
    eps_BKD = draw_noise(seed, leg.step + 1, index_B, *z_BKD.shape[1:]).to(z_BKD)
    if rule == "listing":
        return renoise_as_listed(z_BKD, eps_BKD, gamma)
    return renoise(z_BKD, eps_BKD, everywhere(leg.theta_after, z_BKD), gamma)


def everywhere(value: float, z_BKD: Float[Tensor, "B K D"]) -> Float[Tensor, " B"]:
    """A time or an angle for each sample, in float32 or better whatever the latent's dtype."""
    dtype = torch.promote_types(z_BKD.dtype, torch.float32)
    return torch.full((len(z_BKD),), value, dtype=dtype, device=z_BKD.device)
