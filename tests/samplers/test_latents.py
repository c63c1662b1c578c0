"""The plan that samplers of latents share: times, angles, re-noising rules, and noise that belongs to its sample."""

import itertools
import math

import pytest
import torch

from diladiff.processes.latent_schedules import ErrorRate, TanD, TanDAsPrinted
from diladiff.samplers.latents import Leg, add_noise, draw_noise, everywhere, plan

SCHEDULES = [TanD(), TanDAsPrinted(), ErrorRate(w_min=0.29, w_max=1.0, k=12.5, t0=0.835)]


@pytest.fixture(params=SCHEDULES, ids=lambda schedule: schedule.name)
def schedule(request):
    return request.param


@pytest.mark.parametrize("grid", ["time", "angle"])
@pytest.mark.parametrize("gamma", [0.0, 0.8, 1.0])
def test_the_exact_rules_plan_keeps_the_grid_and_jumps_further(schedule, grid, gamma):
    legs = plan(5, grid, gamma, "exact", schedule)
    assert [leg.step for leg in legs] == [0, 1, 2, 3, 4]
    assert (legs[0].t, legs[-1].end, legs[-1].after) == (1.0, 0.0, 0.0)
    assert (legs[0].theta_t, legs[-1].theta_end) == (math.pi / 2, 0.0)
    for before, leg in itertools.pairwise(legs):
        assert (leg.t, leg.theta_t) == (before.after, before.theta_after)
    for leg in legs:
        assert leg.end <= leg.after < leg.t
        assert leg.theta_end <= leg.theta_after < leg.theta_t
        assert math.tan(leg.theta_end) == pytest.approx(math.sqrt(1 - gamma**2) * math.tan(leg.theta_after))
        end = torch.tensor([leg.end], dtype=torch.float64)
        assert float(schedule.theta(end)) == pytest.approx(leg.theta_end, abs=1e-6)
    evenly = [leg.t if grid == "time" else leg.theta_t * 2 / math.pi for leg in legs]
    assert evenly == pytest.approx([1.0, 0.8, 0.6, 0.4, 0.2])


def test_the_listings_plan_warps_the_time_for_good():
    """At gamma = .8 the network is told .48 / .36 / .24 / .12 / 0 where the grid says .8 / .6 / .4 / .2 / 0."""
    legs = plan(5, "time", 0.8, "listing", TanD())
    assert [leg.t for leg in legs] == pytest.approx([1.0, 0.48, 0.36, 0.24, 0.12])
    assert [leg.end for leg in legs] == pytest.approx([0.48, 0.36, 0.24, 0.12, 0.0])
    assert all(leg.end == leg.after and leg.theta_end == leg.theta_after for leg in legs)


def test_the_listings_states_are_noisier_than_the_network_is_told():
    """What is really left of the data after mixing: the states are at t = .64 / .52 / .38 / .21 / .084."""
    one, index_B = torch.ones(1, 1, 1, dtype=torch.float64), torch.arange(1)
    true = []
    for leg in plan(5, "time", 0.8, "listing", TanD()):
        quiet = add_noise(0 * one, leg, 0.8, "listing", index_B, seed=0)
        kept = float(add_noise(one, leg, 0.8, "listing", index_B, seed=0) - quiet)
        true.append(float(TanD().time(torch.acos(torch.tensor(kept * math.cos(leg.theta_end), dtype=torch.float64)))))
    assert true == pytest.approx([0.64, 0.52, 0.38, 0.21, 0.084], abs=5e-3)


def test_without_gamma_both_rules_are_the_grid(schedule):
    assert plan(4, "time", 0.0, "listing", schedule) == plan(4, "time", 0.0, "exact", schedule)


def test_noise_is_added_by_rule():
    z = torch.zeros(20_000, 1, 1)
    index_B = torch.arange(20_000)
    middle = Leg(1, 0.6, 0.3, 0.4, 1.5, 1.2, 1.3)
    last = Leg(4, 0.2, 0.0, 0.0, 1.0, 0.0, 0.0)
    assert add_noise(z, middle, 0.0, "exact", index_B, seed=0) is z
    assert add_noise(z, last, 1.0, "exact", index_B, seed=0) is z
    exact, listed = (add_noise(z, middle, 0.5, rule, index_B, seed=0) for rule in ("exact", "listing"))
    assert float(exact.std()) == pytest.approx(0.5 * math.sin(1.3), rel=0.02)
    assert float(listed.std()) == pytest.approx(0.5, rel=0.02)
    assert float(add_noise(z, last, 0.5, "listing", index_B, seed=0).std()) == pytest.approx(0.5, rel=0.02)


def test_noise_belongs_to_seed_step_and_sample():
    noise = draw_noise(3, 1, torch.arange(6), 4, 5)
    assert noise.shape == (6, 4, 5)
    assert torch.equal(draw_noise(3, 1, torch.tensor([4, 1]), 4, 5), noise[[4, 1]])
    for other in (draw_noise(4, 1, torch.arange(6), 4, 5), draw_noise(3, 2, torch.arange(6), 4, 5)):
        assert float((other - noise).abs().min()) > 0
    assert float(noise.mean()) == pytest.approx(0, abs=0.3)


@pytest.mark.parametrize(
    ("latent", "number"), [(torch.bfloat16, torch.float32), (torch.float32, torch.float32), (torch.float64,) * 2]
)
def test_times_are_float32_or_better(latent, number):
    made = everywhere(0.3, torch.zeros(3, 2, 2, dtype=latent))
    assert made.dtype == number
    assert made.shape == (3,)
