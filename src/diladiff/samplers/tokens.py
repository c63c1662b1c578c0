"""Samplers whose positions are planned before the network runs: ancestral, first-hitting, remasking.

Whether a token is revealed in a step does not depend on logits or tokens under these laws, so a plan holds every step's
rows on the host. A step computes only sequences and rows that reveal something, and nothing waits for the device.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diladiff.processes.schedules import MaskSchedule, mask_schedule
from diladiff.processes.times import uniform_grid
from diladiff.rng import Stream, uniform, uniform_at
from diladiff.samplers.base import Denoiser, DrawConfig, TokenState, Writer, check_steps, pick, random_device, start

CLAMPED = -1
"""The reveal step of a position that is given."""


@dataclass(frozen=True, kw_only=True)
class Ancestral:
    """The reverse chain on a uniform grid of `steps` times; docs/math.md (10).

    Law: that of the N-step chain whose steps draw their tokens independently; it is O(1 / N) from the network's own.
    """

    steps: int = 64
    schedule: Literal["linear", "cosine", "log_linear"] = "linear"
    draw: DrawConfig = field(default_factory=DrawConfig)
    name: Literal["ancestral"] = "ancestral"

    def __post_init__(self) -> None:
        check_steps(self.steps)


@dataclass(frozen=True, kw_only=True)
class FirstHitting:
    """Positions in the order in which the continuous chain reveals them, each sequence its own; docs/math.md (11).

    Law: with one token a forward (`steps` None, or at least the number of masked positions) that of the chain in the
    limit of many steps, which is the true law under the exact denoiser. With fewer steps the order is cut into groups
    whose sizes differ by at most one; a group's tokens are drawn independently given what was there before it.
    """

    steps: int | None = None
    schedule: Literal["linear", "cosine", "log_linear"] = "linear"
    draw: DrawConfig = field(default_factory=DrawConfig)
    name: Literal["first_hitting"] = "first_hitting"

    def __post_init__(self) -> None:
        check_steps(self.steps)


@dataclass(frozen=True, kw_only=True)
class Remasking:
    """Ancestral steps that also mask revealed tokens again, so that early mistakes can be mended; docs/math.md (14).

    A revealed token is masked again with probability sigma, a masked one revealed with probability
    (alpha_s - (1 - sigma) alpha_t) / (1 - alpha_t): given x_0, the marginals of the process are those of the ancestral
    chain for any sigma in [0, sigma_max], sigma_max = min(1, (1 - alpha_s) / alpha_t). `rule` sets sigma to
    min(eta, sigma_max) ("cap") or eta sigma_max ("rescale"), 0 outside `end_time <= t <= start_time`. eta = 0 is the
    ancestral law. Law: that of the N-step chain with these transitions, its tokens drawn independently in a step.
    """

    steps: int = 64
    rule: Literal["cap", "rescale"] = "cap"
    eta: float = 0.02
    start_time: float = 1.0
    end_time: float = 0.0
    schedule: Literal["linear", "cosine", "log_linear"] = "linear"
    draw: DrawConfig = field(default_factory=DrawConfig)
    name: Literal["remasking"] = "remasking"

    def __post_init__(self) -> None:
        check_steps(self.steps)
        if not 0 <= self.eta <= 1:
            raise ValueError(f"eta: {self.eta} must be in [0, 1]")
        if not 0 <= self.end_time <= self.start_time <= 1:
            raise ValueError(f"end_time: {self.end_time}, start_time: {self.start_time}; need 0 <= end <= start <= 1")


class Move(NamedTuple):
    """One step of a plan that does something: which sequences run (None: all), which rows are wanted, where they go."""

    step: int
    active_A: Tensor | None
    time_A: Tensor
    rows_N: Tensor
    places_N: Tensor
    uniform_N: Tensor
    remasked_M: Tensor | None


class Plan(NamedTuple):
    """All that a sampler decides without the network."""

    steps: int
    moves: list[Move]


class Reveal(NamedTuple):
    """One step's decisions on the host: flat places to reveal, their times, flat places to mask again."""

    step: int
    places_N: Tensor
    time_N: Tensor
    remasked_M: Tensor | None


def plan_ancestral(
    config: Ancestral, canvas_BL: Int[Tensor, "B L"], index_B: Int[Tensor, " B"], *, mask_id: int, seed: int
) -> Plan:
    """Draw the step that reveals each masked position, the inverse of its distribution function; docs/math.md (10)."""
    schedule, grid = mask_schedule(config.schedule), uniform_grid(config.steps)
    u_BL = _coins(seed, Stream.ORDER, 0, canvas_BL, index_B)
    step_BL = torch.searchsorted(revealed_share(schedule, grid[1:]), u_BL, right=True).clamp(max=config.steps - 1)
    step_BL = step_BL.masked_fill((canvas_BL != mask_id).cpu(), CLAMPED)
    reveals = _reveals(step_BL, grid[step_BL.clamp(min=0)])
    return _finish(config.steps, reveals, canvas_BL, index_B, seed=seed, redraws=False)


def plan_first_hitting(
    config: FirstHitting, canvas_BL: Int[Tensor, "B L"], index_B: Int[Tensor, " B"], *, mask_id: int, seed: int
) -> Plan:
    """Draw each sequence's hitting times (those of `plan_ancestral` with infinitely many steps); docs/math.md (11)."""
    schedule, masked_BL = mask_schedule(config.schedule), (canvas_BL == mask_id).cpu()
    u_BL = _coins(seed, Stream.ORDER, 0, canvas_BL, index_B).masked_fill(~masked_BL, torch.inf)
    rank_BL = u_BL.argsort(dim=1, stable=True).argsort(dim=1)
    count_B1 = masked_BL.sum(1, keepdim=True)
    steps_B1 = count_B1 if config.steps is None else count_B1.clamp(max=config.steps)
    step_BL = (rank_BL * steps_B1 // count_B1.clamp(min=1)).masked_fill(~masked_BL, CLAMPED)
    start_alpha = schedule.alpha(torch.ones((), dtype=torch.float64))
    time_BL = schedule.inverse(start_alpha + (1 - start_alpha) * u_BL.masked_fill(~masked_BL, 0.0))
    steps = int(steps_B1.max()) if len(step_BL) else 0
    reveals = _reveals(step_BL, time_BL)
    return _finish(steps, reveals, canvas_BL, index_B, seed=seed, redraws=False)


def plan_remasking(
    config: Remasking, canvas_BL: Int[Tensor, "B L"], index_B: Int[Tensor, " B"], *, mask_id: int, seed: int
) -> Plan:
    """Follow every position through masked and revealed, two states that no logit touches; docs/math.md (14)."""
    schedule, grid = mask_schedule(config.schedule), uniform_grid(config.steps)
    alpha = revealed_share(schedule, grid)
    free_BL = (canvas_BL == mask_id).cpu()
    masked_BL = free_BL.clone()
    reveals = []
    for n in range(config.steps):
        sigma = remask_probability(config, float(grid[n]), float(alpha[n]), float(alpha[n + 1]))
        probability = (alpha[n + 1] - (1 - sigma) * alpha[n]) / (1 - alpha[n])
        u_BL = _coins(seed, Stream.REMASK, n, canvas_BL, index_B)
        reveal_BL = masked_BL & ((u_BL < probability) | (n == config.steps - 1))
        remask_BL = free_BL & ~masked_BL & (u_BL < sigma)
        masked_BL = (masked_BL & ~reveal_BL) | remask_BL
        places_N, remasked_M = (flags.flatten().nonzero().squeeze(1) for flags in (reveal_BL, remask_BL))
        if len(places_N) or len(remasked_M):
            reveals.append(Reveal(n, places_N, grid[n].expand(len(places_N)), remasked_M if len(remasked_M) else None))
    return _finish(config.steps, reveals, canvas_BL, index_B, seed=seed, redraws=True)


def remask_probability(config: Remasking, t: float, alpha_t: float, alpha_s: float) -> float:
    """sigma of the step from t to s; docs/math.md (14)."""
    if not config.end_time <= t <= config.start_time:
        return 0.0
    bound = min(1.0, (1 - alpha_s) / alpha_t) if alpha_t > 0 else 1.0
    return min(config.eta, bound) if config.rule == "cap" else config.eta * bound


def revealed_share(schedule: MaskSchedule, t_N: Float[Tensor, " N"]) -> Float[Tensor, " N"]:
    """The share of positions revealed by time t when all are masked at t = 1 (alpha, where alpha(1) = 0)."""
    start_alpha = schedule.alpha(torch.ones((), dtype=torch.float64))
    return (schedule.alpha(t_N) - start_alpha) / (1 - start_alpha)


def run(
    plan: Plan, write: Writer, canvas_BL: Int[Tensor, "B L"], draw: DrawConfig, mask_id: int
) -> Iterator[TokenState]:
    """Carry out a plan; yields the canvas and then the state after each step that does something."""
    state = start(canvas_BL, plan.steps)
    tokens_BL = state.tokens_BL
    flat = tokens_BL.view(-1)
    yield state
    for move in plan.moves:
        if len(move.places_N):
            tokens_AL = tokens_BL if move.active_A is None else tokens_BL[move.active_A]
            ids_N = write(tokens_AL, move.time_A, move.rows_N, move.uniform_N, draw)
            flat.index_copy_(0, move.places_N, ids_N)
        changed_N = move.places_N
        if move.remasked_M is not None:
            flat.index_fill_(0, move.remasked_M, mask_id)
            changed_N = torch.cat((move.places_N, move.remasked_M))
        yield TokenState(tokens_BL, move.step + 1, plan.steps, changed_N, len(move.time_A))


def picking(denoise: Denoiser) -> Writer:
    """The writer that draws from a denoiser's logits."""

    def write(tokens_AL: Tensor, time_A: Tensor, rows_N: Tensor, uniform_N: Tensor, draw: DrawConfig) -> Tensor:
        return pick(denoise(tokens_AL, time_A, rows_N), uniform_N, draw)

    return write


def _coins(seed: int, stream: Stream, step: int, canvas_BL: Tensor, index_B: Tensor) -> Tensor:
    """The uniforms that decide when positions are revealed: made on the device, read on the host."""
    index_B = index_B.to(random_device(canvas_BL.device))
    return uniform(seed, stream, step, index_B, canvas_BL.shape[1], dtype=torch.float64).cpu().contiguous()


def _reveals(step_BL: Tensor, time_BL: Tensor) -> list[Reveal]:
    """Positions grouped by the step that reveals them, places ascending within a step."""
    step_N, time_N = step_BL.flatten(), time_BL.flatten()
    places_N = step_N.argsort(stable=True)[int((step_N == CLAMPED).sum()) :]
    numbers, counts = step_N[places_N].unique_consecutive(return_counts=True)
    groups = places_N.split(counts.tolist())
    return [Reveal(n, group, time_N[group], None) for n, group in zip(numbers.tolist(), groups, strict=True)]


def _finish(steps: int, reveals: list[Reveal], canvas_BL: Tensor, index_B: Tensor, *, seed: int, redraws: bool) -> Plan:
    """Work out every step's sequences and rows and their uniforms, all steps at once, and move them to the device."""
    if not reveals:
        return Plan(steps, [])
    (batch, length), device = canvas_BL.shape, canvas_BL.device
    counts = [len(reveal.places_N) for reveal in reveals]
    places_N = torch.cat([reveal.places_N for reveal in reveals])
    time_N = torch.cat([reveal.time_N for reveal in reveals])
    move_N = torch.arange(len(reveals)).repeat_interleave(torch.tensor(counts))
    # A step's places ascend, so what a sequence reveals in it stands together.
    run_R, inverse_N = (move_N * batch + places_N // length).unique_consecutive(return_inverse=True)
    time_R = torch.zeros(len(run_R), dtype=torch.float64).scatter_reduce(0, inverse_N, time_N, "amax").float()
    widths_M = (run_R // batch).bincount(minlength=len(reveals))
    rows_N = (inverse_N - (widths_M.cumsum(0) - widths_M)[move_N]) * length + places_N % length
    number_N = torch.tensor([reveal.step for reveal in reveals])[move_N] if redraws else torch.zeros_like(move_N)
    where = random_device(device)
    number_N, sample_N, position_N = (_ship(x, where) for x in (number_N, places_N // length, places_N % length))
    index_N = index_B.to(where)[sample_N]
    uniform_N = uniform_at(seed, Stream.TOKEN, number_N, index_N, position_N, dtype=torch.float64)
    widths = widths_M.tolist()
    rows, places, uniforms = (x.split(counts) for x in (_ship(rows_N, device), _ship(places_N, device), uniform_N))
    active, times = (x.split(widths) for x in (_ship(run_R % batch, device), _ship(time_R, device)))
    masked = [None if reveal.remasked_M is None else _ship(reveal.remasked_M, device) for reveal in reveals]
    moves = []
    for i, reveal in enumerate(reveals):
        active_A = None if widths[i] == batch else active[i]
        moves.append(Move(reveal.step, active_A, times[i], rows[i], places[i], uniforms[i], masked[i]))
    return Plan(steps, moves)


def _ship(x: Tensor, device: torch.device) -> Tensor:
    """Move a tensor of the host to the device without waiting for it."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
