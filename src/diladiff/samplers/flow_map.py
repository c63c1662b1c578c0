"""Few-step sampler of the distilled prior: jumps along the average velocity, re-noised; docs/math.md (26), (29).

t = 1 is noise, t = 0 is data. Law: with the exact average velocity that of the data, at any number of steps and any
gamma of the exact rule. The paper's listing is the preset LITERAL.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float, Int
from torch import Tensor

from diladiff.processes.latent import jump, phi, velocity_from_clean
from diladiff.processes.latent_schedules import LatentSchedule
from diladiff.samplers.latents import GammaRule, Grid, LatentState, Leg, add_noise, check, everywhere, plan

FlowMap = Callable[[Tensor, Tensor, Tensor, Tensor | None], Tensor]
"""(z_BKD, t_B, r_B, selfcond_BKD or None) -> raw_BKD: where the jump from t to r aims; at r = t the clean latent."""

HeadedFlowMap = Callable[[Tensor, Tensor, Tensor, Tensor | None], tuple[Tensor, Tensor]]
"""A FlowMap whose extra head gives the clean latent at t beside the raw output."""


@dataclass(frozen=True, kw_only=True)
class FewStep:
    """Jumps from time to time, each fed the network's own clean prediction at (z_t, t, r = t): two evaluations a step.

    `form` is the student's: its raw output enters the average velocity in "angle", docs/math.md (26), or in "time",
    (31). With `head_threshold` the extra head's prediction of the step before is fed instead while t is at least the
    threshold (0: always): one evaluation a step. `literal` follows the paper's listing: the prediction is made at a
    step's end, before re-noising, with the one before as input, and read at the wrong time; (30).
    """

    steps: int = 5
    grid: Grid = "time"
    form: Literal["angle", "time"] = "angle"
    gamma: float = 0.0
    gamma_rule: GammaRule = "exact"
    self_conditioning: bool = True
    head_threshold: float | None = None
    literal: bool = False
    name: Literal["few_step"] = "few_step"

    def __post_init__(self) -> None:
        check(self.steps, self.gamma, self.gamma_rule)
        if self.head_threshold is not None:
            if not 0 <= self.head_threshold <= 1:
                raise ValueError(f"head_threshold: {self.head_threshold} must be in [0, 1], or None without a head")
            if self.literal or not self.self_conditioning:
                raise ValueError(
                    f"head_threshold: {self.head_threshold} needs self_conditioning, and not literal; drop one"
                )


LITERAL = FewStep(gamma=0.8, gamma_rule="listing", form="time", literal=True)
"""The paper's Algorithm 5 as printed, with the gamma of all its few-step rows."""


def run(
    config: FewStep,
    flow_map: FlowMap,
    schedule: LatentSchedule,
    start_BKD: Float[Tensor, "B K D"],
    index_B: Int[Tensor, " B"],
    *,
    seed: int,
    headed: HeadedFlowMap | None = None,
) -> Iterator[LatentState]:
    """Lead latents from t = 1 (`start_BKD`, see `draw_noise`) to t = 0; yields the start and the state of each step.

    `index_B` are the samples' own numbers: they and the seed key the noise that gamma asks for. `headed` is the network
    with its extra head, wanted where `head_threshold` is set.
    """
    if config.head_threshold is not None and headed is None:
        raise ValueError(f"head_threshold: {config.head_threshold} needs a student with an extra head; use None")
    z_BKD, clean_BKD = start_BKD, None
    yield LatentState(z_BKD, None, 0, config.steps, 1.0)
    for leg in plan(config.steps, config.grid, config.gamma, config.gamma_rule, schedule):
        t_B, r_B = everywhere(leg.t, z_BKD), everywhere(leg.end, z_BKD)
        if headed is not None and config.head_threshold is not None and leg.t >= config.head_threshold:
            raw_BKD, clean_BKD = headed(z_BKD, t_B, r_B, clean_BKD)
        else:
            if config.self_conditioning and not config.literal:
                clean_BKD = flow_map(z_BKD, t_B, t_B, None)
            raw_BKD = flow_map(z_BKD, t_B, r_B, clean_BKD)
        z_BKD = _land(config, schedule, z_BKD, raw_BKD, leg)
        if config.literal and config.self_conditioning and leg.end > 0:
            clean_BKD = _listed_clean(flow_map, schedule, z_BKD, clean_BKD, leg)
        z_BKD = add_noise(z_BKD, leg, config.gamma, config.gamma_rule, index_B, seed=seed)
        yield LatentState(z_BKD, clean_BKD, leg.step + 1, config.steps, leg.after)


def _land(config: FewStep, schedule: LatentSchedule, z_BKD: Tensor, raw_BKD: Tensor, leg: Leg) -> Tensor:
    """Where a raw output leads, by the student's form."""
    if config.form == "angle":
        return jump(z_BKD, raw_BKD, everywhere(leg.theta_t, z_BKD), everywhere(leg.theta_end, z_BKD))
    average_BKD = velocity_from_clean(z_BKD, raw_BKD, everywhere(leg.t, z_BKD), schedule)
    return z_BKD - (leg.t - leg.end) * average_BKD


def _listed_clean(
    flow_map: FlowMap, schedule: LatentSchedule, z_BKD: Tensor, clean_BKD: Tensor | None, leg: Leg
) -> Tensor:
    """Phi(u(z, tau_{m-1}, tau_{m-1}), tau_m): the velocity at the step's end, read as if at its start.

    The listing's last such evaluation, at t = 0, is left out: nothing uses it, and it is 0/0.
    """
    end_B = everywhere(leg.end, z_BKD)
    velocity_BKD = velocity_from_clean(z_BKD, flow_map(z_BKD, end_B, end_B, clean_BKD), end_B, schedule)
    return phi(z_BKD, velocity_BKD, everywhere(leg.t, z_BKD), schedule)
