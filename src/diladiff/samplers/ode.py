"""Samplers of the latent prior: Euler in t (the paper's), DDIM in theta, Heun; docs/math.md (23) to (25), (29).

t = 1 is noise, t = 0 is data. The network predicts the clean latent. Law: with the exact denoiser that of the data up
to the solver's error: O(1 / steps) for Euler and DDIM, O(1 / steps^2) for Heun. With gamma a step jumps further than it
is long before noise is added, so that a solver's error no longer vanishes with more steps; see docs/math.md (29).
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor

from diladiff.processes.latent import angular_from_clean, ddim, velocity_from_clean
from diladiff.processes.latent_schedules import LatentSchedule
from diladiff.samplers.latents import GammaRule, Grid, LatentState, Leg, add_noise, check, everywhere, plan

LatentDenoiser = Callable[[Tensor, Tensor, Tensor | None], Tensor]
"""(z_BKD, t_B, selfcond_BKD or None) -> clean_BKD."""


@dataclass(frozen=True, kw_only=True)
class Euler:
    """Straight steps in t along the probability-flow ODE's velocity: the paper's sampler; docs/math.md (23).

    Each step feeds the network the previous step's prediction, if `self_conditioning`: one evaluation a step. With few
    steps it leaves noise on the latent even when every prediction is perfect (std .89 at 5 steps of tan-10). Under the
    error-rate schedule it does not converge, docs/math.md (19).
    """

    steps: int = 200
    grid: Grid = "time"
    gamma: float = 0.0
    gamma_rule: GammaRule = "exact"
    self_conditioning: bool = True
    name: Literal["euler"] = "euler"

    def __post_init__(self) -> None:
        check(self.steps, self.gamma, self.gamma_rule)


@dataclass(frozen=True, kw_only=True)
class Ddim:
    """Steps in theta that are exact for a constant prediction, docs/math.md (22): the default.

    Each step feeds the network the previous step's prediction, if `self_conditioning`: one evaluation a step. The
    error-rate schedule wants the grid "angle": in "time" its order is about .1, docs/math.md (19).
    """

    steps: int = 100
    grid: Grid = "time"
    gamma: float = 0.0
    gamma_rule: GammaRule = "exact"
    self_conditioning: bool = True
    name: Literal["ddim"] = "ddim"

    def __post_init__(self) -> None:
        check(self.steps, self.gamma, self.gamma_rule)


@dataclass(frozen=True, kw_only=True)
class Heun:
    """The mean of the velocities at both ends of a step in theta, docs/math.md (25); a step to t = 0 is DDIM's.

    A prediction that is carried from the step before makes no ODE, so with `self_conditioning` it is computed on the
    spot: four evaluations a step, or two without.
    """

    steps: int = 50
    grid: Grid = "angle"
    gamma: float = 0.0
    self_conditioning: bool = True
    name: Literal["heun"] = "heun"

    def __post_init__(self) -> None:
        check(self.steps, self.gamma, "exact")


LatentSamplerConfig = Euler | Ddim | Heun
"""The settings of any sampler of the prior; told apart by `name`."""


def run(
    config: LatentSamplerConfig,
    denoise: LatentDenoiser,
    schedule: LatentSchedule,
    start_BKD: Float[Tensor, "B K D"],
    index_B: Int[Tensor, " B"],
    *,
    seed: int,
) -> Iterator[LatentState]:
    """Lead latents from t = 1 (`start_BKD`, see `draw_noise`) to t = 0; yields the start and the state of each step.

    `index_B` are the samples' own numbers: they and the seed key the noise that gamma asks for.
    """
    rule: GammaRule = "exact" if isinstance(config, Heun) else config.gamma_rule
    z_BKD, clean_BKD = start_BKD, None
    yield LatentState(z_BKD, None, 0, config.steps, 1.0)
    for leg in plan(config.steps, config.grid, config.gamma, rule, schedule):
        if isinstance(config, Heun):
            z_BKD, clean_BKD = _heun_step(config, denoise, schedule, z_BKD, leg)
        else:
            carried_BKD = clean_BKD if config.self_conditioning else None
            clean_BKD = denoise(z_BKD, everywhere(leg.t, z_BKD), carried_BKD)
            if isinstance(config, Ddim):
                z_BKD = _ddim_step(z_BKD, clean_BKD, leg)
            else:
                velocity_BKD = velocity_from_clean(z_BKD, clean_BKD, everywhere(leg.t, z_BKD), schedule)
                z_BKD = z_BKD - (leg.t - leg.end) * velocity_BKD
        z_BKD = add_noise(z_BKD, leg, config.gamma, rule, index_B, seed=seed)
        yield LatentState(z_BKD, clean_BKD, leg.step + 1, config.steps, leg.after)


def self_conditioned(denoise: LatentDenoiser, z_BKD: Float[Tensor, "B K D"], t_B: Float[Tensor, " B"]) -> Tensor:
    """The prediction that is fed a prediction of the same state: a function of (z, t) alone, in two evaluations."""
    return denoise(z_BKD, t_B, denoise(z_BKD, t_B, None))


def _ddim_step(z_BKD: Tensor, clean_BKD: Tensor, leg: Leg) -> Tensor:
    return ddim(z_BKD, clean_BKD, everywhere(leg.theta_t, z_BKD), everywhere(leg.theta_end, z_BKD))


def _heun_step(
    config: Heun, denoise: LatentDenoiser, schedule: LatentSchedule, z_BKD: Tensor, leg: Leg
) -> tuple[Tensor, Tensor]:
    """The state at the end of a leg, and the prediction at its start."""

    def predict(z_BKD: Tensor, t: float) -> Tensor:
        t_B = everywhere(t, z_BKD)
        return self_conditioned(denoise, z_BKD, t_B) if config.self_conditioning else denoise(z_BKD, t_B, None)

    def angular(z_BKD: Tensor, clean_BKD: Tensor, theta: float) -> Tensor:
        alpha_B, sigma_B = everywhere(math.cos(theta), z_BKD), everywhere(math.sin(theta), z_BKD)
        return angular_from_clean(z_BKD, clean_BKD, alpha_B, sigma_B)

    clean_BKD = predict(z_BKD, leg.t)
    if leg.theta_end == 0:
        return _ddim_step(z_BKD, clean_BKD, leg), clean_BKD
    delta, slope_BKD = leg.theta_t - leg.theta_end, angular(z_BKD, clean_BKD, leg.theta_t)
    guess_BKD = z_BKD - delta * slope_BKD
    other_BKD = angular(guess_BKD, predict(guess_BKD, leg.end), leg.theta_end)
    return z_BKD - delta / 2 * (slope_BKD + other_BKD), clean_BKD
