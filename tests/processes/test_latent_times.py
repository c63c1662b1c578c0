"""Times of latent objectives: logit-normal draws, pairs, uniform angles; laws by quantiles."""

import math

import pytest
import torch

from diladiff.processes.latent import velocity_from_clean
from diladiff.processes.latent_schedules import ErrorRate, TanD, TanDAsPrinted
from diladiff.processes.times import angle_grid, logit_normal, pairs, sorted_pair, uniform_in_angle

COUNT = 10_000
EVEN = (torch.arange(COUNT, dtype=torch.float64) + 0.5) / COUNT
NORMAL = torch.special.ndtri(EVEN)
REFERENCE = ErrorRate(w_min=0.29, w_max=1.0, k=12.5, t0=0.835)


def uniforms(*columns, count=4000, seed=0):
    return torch.rand(len(columns), count, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def test_logit_normal_has_its_logits_law():
    logits = torch.logit(logit_normal(NORMAL, -1.0, 2.0))
    assert float(logits.mean()) == pytest.approx(-1, abs=1e-9)
    assert float(logits.std()) == pytest.approx(2, abs=2e-3)
    assert float(logit_normal(NORMAL, -1.0, 1.0).median()) == pytest.approx(1 / (1 + math.e), abs=1e-4)


def test_one_percent_of_the_papers_draws_lie_above_four_fifths():
    """The reason to give a share of the draws t = 1, where sampling starts."""
    assert float((logit_normal(NORMAL, -1.0, 1.0) > 0.79).double().mean()) == pytest.approx(0.01, abs=2e-4)


def test_a_sorted_pair():
    t, r = sorted_pair(torch.tensor([0.2, 0.9, 0.4]), torch.tensor([0.7, 0.1, 0.4]))
    assert torch.equal(t, torch.tensor([0.7, 0.9, 0.4]))
    assert torch.equal(r, torch.tensor([0.2, 0.1, 0.4]))


@pytest.mark.parametrize("schedule", [TanD(), TanD(d=2.0), REFERENCE], ids=lambda schedule: schedule.name)
def test_uniform_in_angle_is(schedule):
    angles = schedule.theta(uniform_in_angle(EVEN, schedule))
    torch.testing.assert_close(angles, math.pi / 2 * (1 - EVEN), rtol=0, atol=1e-7)


@pytest.mark.parametrize("schedule", [TanD(), TanDAsPrinted(), REFERENCE], ids=lambda schedule: schedule.name)
def test_uniform_in_angle_never_draws_data(schedule):
    """The ends of rng's 24-bit uniforms: at t = 0 a velocity is 0/0, and long trainings draw u = 0."""
    first, last = uniform_in_angle(torch.tensor([0.0, 1 - 2**-24]), schedule)
    assert float(first) == 1
    assert 0 < float(last) < 0.1
    ones_BE = torch.ones(1, 1)
    assert bool(torch.isfinite(velocity_from_clean(ones_BE, ones_BE, last[None], schedule)).all())


def test_pairs_are_sorted_and_hold_their_shares():
    first, second, equal_u, start_u = uniforms("first", "second", "equal", "start")
    t, r = pairs(first, second, equal_u, start_u, equal_share=0.25, start_share=0.1)
    assert bool((t >= r).all())
    equal, start = equal_u < 0.25, start_u < 0.1
    assert torch.equal(t == r, equal)
    assert torch.equal(t == 1, start)
    assert torch.equal(t[equal & ~start], first[equal & ~start])
    assert torch.equal(r[start & ~equal], second[start & ~equal])
    assert torch.equal((t + r)[~start & ~equal], (first + second)[~start & ~equal])


def test_pairs_shares_of_nothing_and_all():
    first, second, equal_u, start_u = uniforms("first", "second", "equal", "start")
    assert torch.equal(
        torch.stack(pairs(first, second, equal_u, start_u, equal_share=0.0, start_share=0.0)),
        torch.stack(sorted_pair(first, second)),
    )
    t, r = pairs(first, second, equal_u, start_u, equal_share=1.0, start_share=1.0)
    assert bool(((t == 1) & (r == 1)).all())


def test_the_single_draw_keeps_its_law_where_r_is_t():
    """Not the larger of two draws: Algorithm 4 draws one there."""
    first, second, equal_u, start_u = uniforms("first", "second", "equal", "start", count=40_000)
    t, r = pairs(first, second, equal_u, start_u, equal_share=0.25, start_share=0.0)
    assert float(t[t == r].mean()) == pytest.approx(0.5, abs=0.01)
    assert float(t[t > r].mean()) == pytest.approx(2 / 3, abs=0.01)


def test_the_angle_grid():
    grid = angle_grid(5, TanD())
    assert (float(grid[0]), float(grid[-1])) == (1.0, 0.0)
    assert grid.dtype == torch.float64
    assert grid[1:-1].tolist() == pytest.approx([0.19, 0.087, 0.046, 0.02], abs=1.5e-3)
    torch.testing.assert_close(TanD().theta(grid).diff(), torch.full((5,), -math.pi / 10, dtype=torch.float64))


def test_where_five_even_steps_of_tan_10_turn():
    """The jump 1 -> .8 turns 1.9 of 90 degrees, the last one 73."""
    degrees = torch.rad2deg(TanD().theta(torch.tensor([1.0, 0.8, 0.2, 0.0], dtype=torch.float64)))
    assert float(degrees[0] - degrees[1]) == pytest.approx(1.9, abs=0.05)
    assert float(degrees[2] - degrees[3]) == pytest.approx(73, abs=0.2)
