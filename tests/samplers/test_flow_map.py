"""The few-step sampler: the data's law with the exact average velocity, the listing's order, what is asked and told."""

import itertools

import pytest
import torch

from diladiff.config import from_dict, to_dict
from diladiff.processes.latent import average_velocity, jump, phi, renoise_as_listed, velocity_from_clean
from diladiff.processes.latent_schedules import ErrorRate, TanD, TanDAsPrinted
from diladiff.samplers.flow_map import LITERAL, FewStep, run
from diladiff.samplers.latents import draw_noise
from tests.worlds import mixture
from tests.worlds.mixture import HALF_TURN, KOLMOGOROV, distance, normals

WORLD = mixture.line()
TAN_10 = TanD()
NUM = 2000


def aim(z, theta_t, theta_r):
    """A perfect student's raw output in the angle form: the aim of the exact flow's jump."""
    sin_gap = (theta_t - theta_r).sin()[:, None]
    flow = WORLD.flow(z, theta_t, theta_r)
    raw = (theta_t.sin()[:, None] * flow - theta_r.sin()[:, None] * z) / torch.where(sin_gap > 0, sin_gap, 1.0)
    return torch.where(sin_gap > 0, raw, WORLD.denoise(z, theta_t))


def exact_map(schedule, form="angle"):
    def flow_map(z, t_B, r_B, selfcond):
        theta_t, theta_r = schedule.theta(t_B), schedule.theta(r_B)
        if form == "angle":
            return aim(z.flatten(1), theta_t, theta_r).view_as(z)
        gap = (t_B - r_B).view(-1, 1, 1)
        moved = z - WORLD.flow(z.flatten(1), theta_t, theta_r).view_as(z)
        return phi(z, moved / gap, t_B, schedule)

    return flow_map


def last_state(config, flow_map, schedule, start, seed=0, headed=None):
    index_B = torch.arange(len(start))
    *_, last = run(config, flow_map, schedule, start, index_B, seed=seed, headed=headed)
    return last


# The law.


@pytest.mark.parametrize("form", ["angle", "time"])
@pytest.mark.parametrize("schedule", [TAN_10, TanDAsPrinted(d=2.0)], ids=lambda schedule: schedule.name)
def test_one_jump_along_the_exact_average_velocity_lands_on_the_data(schedule, form):
    """Every quantile of the noise on the data's same quantile."""
    start = normals(401)[..., None]
    config = FewStep(steps=1, form=form, self_conditioning=False)
    end = last_state(config, exact_map(schedule, form), schedule, start).z_BKD[..., 0]
    reached = WORLD.quantile(end, torch.zeros(401).double())
    torch.testing.assert_close(reached, torch.special.ndtr(start[:, 0, 0]), rtol=0, atol=1e-9)


def test_the_jump_is_made_of_the_average_velocity():
    z = normals(41)
    theta_t, theta_r = torch.full((41,), HALF_TURN).double(), torch.full((41,), 0.3).double()
    raw = aim(z, theta_t, theta_r)
    torch.testing.assert_close(
        average_velocity(z, raw, theta_t, theta_r), WORLD.average(z, theta_t, theta_r), rtol=0, atol=1e-12
    )
    torch.testing.assert_close(jump(z, raw, theta_t, theta_r), WORLD.flow(z, theta_t, theta_r), rtol=0, atol=1e-12)


@pytest.mark.parametrize(
    ("gamma", "grid"), [(0.0, "time"), (0.5, "time"), (0.8, "time"), (1.0, "time"), (0.8, "angle")]
)
def test_the_exact_rule_keeps_the_law(gamma, grid):
    """Fresh noise at every step but the last, within what 2,000 draws can show."""
    start = draw_noise(1, 0, torch.arange(NUM), 1, 1).double()
    config = FewStep(steps=4, grid=grid, gamma=gamma)
    states = list(run(config, exact_map(TAN_10), TAN_10, start, torch.arange(NUM), seed=1))
    for state in states:
        theta_N = torch.full((NUM,), float(TAN_10.theta(torch.tensor(state.t)))).double()
        flat = WORLD.flow(state.z_BKD.flatten(1), theta_N, torch.zeros(NUM).double())
        assert distance(WORLD, flat) < KOLMOGOROV
    if gamma == 0:
        reached = WORLD.flow(start.flatten(1), torch.full((NUM,), HALF_TURN).double(), torch.zeros(NUM).double())
        torch.testing.assert_close(states[-1].z_BKD.flatten(1), reached, rtol=0, atol=1e-6)


def test_the_listing_does_not_keep_the_law():
    start = draw_noise(1, 0, torch.arange(NUM), 1, 1).double()
    config = FewStep(steps=4, gamma=0.8, gamma_rule="listing")
    end = last_state(config, exact_map(TAN_10), TAN_10, start, seed=1).z_BKD
    assert distance(WORLD, end.flatten(1)) > 2 * KOLMOGOROV


def test_both_forms_land_together():
    start = normals(41)[..., None]
    ends = [
        last_state(FewStep(steps=3, form=form, self_conditioning=False), exact_map(TAN_10, form), TAN_10, start).z_BKD
        for form in ("angle", "time")
    ]
    torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-8)


# What the network is asked.


def recorder(calls):
    def flow_map(z, t_B, r_B, selfcond):
        assert t_B.shape == r_B.shape == (len(z),)
        calls.append((float(t_B[0]), float(r_B[0]), selfcond, z))
        return torch.full_like(z, float(len(calls)))

    return flow_map


def asked(calls):
    """(t, r, the value fed)."""
    return [(t, r, None if fed is None else float(fed[0, 0, 0])) for t, r, fed, _ in calls]


def test_a_step_predicts_then_jumps_from_the_same_state():
    calls = []
    states = list(run(FewStep(steps=2), recorder(calls), TAN_10, torch.ones(1, 1, 1), torch.arange(1), seed=0))
    assert asked(calls) == [(1.0, 1.0, None), (1.0, 0.5, 1.0), (0.5, 0.5, None), (0.5, 0.0, 3.0)]
    assert calls[0][3] is calls[1][3]
    assert calls[2][3] is calls[3][3]
    assert float(states[-1].z_BKD) == 4
    assert [state.t for state in states] == [1.0, 0.5, 0.0]
    assert float(states[1].clean_BKD) == 1
    calls.clear()
    last_state(FewStep(steps=2, self_conditioning=False), recorder(calls), TAN_10, torch.ones(1, 1, 1))
    assert asked(calls) == [(1.0, 0.5, None), (0.5, 0.0, None)]


def test_with_gamma_the_network_is_told_where_it_jumps_to():
    calls = []
    config = FewStep(steps=2, gamma=0.6, self_conditioning=False)
    last_state(config, recorder(calls), TAN_10, torch.ones(1, 1, 1))
    half = torch.tensor([0.5], dtype=torch.float64)
    further = TAN_10.time(torch.atan(0.8 * torch.tan(TAN_10.theta(half))))
    assert asked(calls)[0][:2] == pytest.approx((1.0, float(further)))
    assert asked(calls)[1][:2] == pytest.approx((0.5, 0.0))


def test_above_its_threshold_the_extra_head_stands_in_for_the_prediction():
    calls, heads = [], []

    def headed(z, t_B, r_B, selfcond):
        heads.append((float(t_B[0]), float(r_B[0]), None if selfcond is None else float(selfcond[0, 0, 0])))
        return torch.zeros_like(z), torch.full_like(z, 100.0 + len(heads))

    config = FewStep(steps=4, head_threshold=0.75)
    last_state(config, recorder(calls), TAN_10, torch.ones(1, 1, 1), headed=headed)
    assert heads == [(1.0, 0.75, None), (0.75, 0.5, 101.0)]
    assert asked(calls) == [(0.5, 0.5, None), (0.5, 0.25, 1.0), (0.25, 0.25, None), (0.25, 0.0, 3.0)]
    with pytest.raises(ValueError, match=r"head_threshold: 0\.75"):
        last_state(config, recorder(calls), TAN_10, torch.ones(1, 1, 1))


def test_the_literal_preset_is_the_papers_listing():
    """Written out for three steps: times warped, first jump without input, Phi at the wrong time, noise at the end."""
    gamma, calls = 0.8, []
    config = from_dict(FewStep, to_dict(LITERAL) | {"steps": 3})
    start = draw_noise(4, 0, torch.arange(2), 1, 2)
    end = last_state(config, recorder(calls), TAN_10, start, seed=4).z_BKD

    def at(t):
        return torch.full((2,), t)

    grid, z, fed, count = [1.0, 0.6 * 2 / 3, 0.6 / 3, 0.0], start, None, 0
    expected = []
    for m, (t, s) in enumerate(itertools.pairwise(grid), 1):
        expected.append((t, s, None if fed is None else float(fed[0, 0, 0])))
        count += 1
        z = z - (t - s) * velocity_from_clean(z, torch.full_like(z, float(count)), at(t), TAN_10)
        if s > 0:
            expected.append((s, s, None if fed is None else float(fed[0, 0, 0])))
            count += 1
            velocity = velocity_from_clean(z, torch.full_like(z, float(count)), at(s), TAN_10)
            fed = phi(z, velocity, at(t), TAN_10)
        z = renoise_as_listed(z, draw_noise(4, m, torch.arange(2), 1, 2), gamma)
    torch.testing.assert_close(end, z)
    for found, wanted in zip(asked(calls), expected, strict=True):
        assert found[:2] == pytest.approx(wanted[:2])
        assert found[2] == (None if wanted[2] is None else pytest.approx(wanted[2], rel=1e-5))


CONFIGS = [FewStep(), FewStep(steps=3, gamma=0.8, grid="angle"), FewStep(form="time", gamma=1.0), LITERAL]
SCHEDULES = [TAN_10, TanDAsPrinted(), ErrorRate(w_min=0.29, w_max=1.0, k=12.5, t0=0.835)]


@pytest.mark.parametrize("config", CONFIGS)
@pytest.mark.parametrize("schedule", SCHEDULES, ids=lambda schedule: schedule.name)
def test_a_sample_is_its_own_in_float32(config, schedule):
    """Alone or among others, the same numbers; float32 in and out; finite under every schedule."""

    def flow_map(z, t_B, r_B, selfcond):
        assert t_B.dtype == r_B.dtype == torch.float32
        return 0.5 * z + (0.1 if selfcond is None else 0.2 * selfcond) + (t_B - r_B)[:, None, None]

    def end(index):
        index_B = torch.tensor(index)
        *_, last = run(config, flow_map, schedule, draw_noise(5, 0, index_B, 3, 2), index_B, seed=5)
        return last.z_BKD

    assert end([7]).dtype == torch.float32
    assert bool(torch.isfinite(end([7, 3])).all())
    assert torch.equal(end([7])[0], end([3, 7, 1])[1])
    assert not torch.equal(end([7])[0], end([8])[0])


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"steps": 0}, "steps: 0"),
        ({"gamma": -0.5}, "gamma: -0.5"),
        ({"gamma": 1.0, "gamma_rule": "listing"}, "gamma: 1.0"),
        ({"head_threshold": 1.5}, "head_threshold: 1.5"),
        ({"head_threshold": 0.5, "self_conditioning": False}, "head_threshold: 0.5"),
        ({"head_threshold": 0.5, "literal": True}, "head_threshold: 0.5"),
        ({"form": "velocity"}, "form"),
    ],
)
def test_wrong_settings_are_refused_by_name(values, words):
    with pytest.raises(ValueError, match=words):
        from_dict(FewStep, values)


@pytest.mark.parametrize("config", CONFIGS)
def test_settings_survive_json(config):
    assert from_dict(FewStep, to_dict(config)) == config
