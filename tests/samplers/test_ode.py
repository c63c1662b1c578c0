"""Samplers of the prior: measured order on an exact mixture, laws under gamma, what the network is asked and told."""

import math

import pytest
import torch

from diladiff.config import from_dict, to_dict
from diladiff.processes.latent_schedules import ErrorRate, TanD, TanDAsPrinted
from diladiff.rng import Stream, normal
from diladiff.samplers.latents import draw_noise
from diladiff.samplers.ode import Ddim, Euler, Heun, run, self_conditioned
from tests.worlds import mixture
from tests.worlds.mixture import HALF_TURN, normals

WORLD = mixture.line()
TAN_2, TAN_10, PRINTED_2 = TanD(d=2.0), TanD(), TanDAsPrinted(d=2.0)
STARTS = normals(65)[1:-1]
REACHED = WORLD.flow(STARTS, torch.full((63,), HALF_TURN).double(), torch.zeros(63).double())


def exact_denoiser(schedule):
    def denoise(z, t_B, selfcond):
        return WORLD.denoise(z.flatten(1), schedule.theta(t_B)).view_as(z)

    return denoise


def last_state(config, denoise, schedule, start, seed=0):
    *_, last = run(config, denoise, schedule, start, torch.arange(len(start)), seed=seed)
    return last


ORDERS = [
    (Euler, TAN_2, "time", 1, 64),
    (Euler, TAN_2, "angle", 1, 64),
    (Euler, PRINTED_2, "time", 1, 64),
    (Ddim, TAN_2, "time", 1, 64),
    (Ddim, TAN_10, "angle", 1, 64),
    (Ddim, TAN_10, "time", 1, 64),
    (Heun, TAN_2, "time", 2, 64),
    (Heun, TAN_10, "angle", 2, 32),
]


@pytest.mark.parametrize(("config", "schedule", "grid", "order", "steps"), ORDERS)
def test_the_order_of_the_solver(config, schedule, grid, order, steps):
    """log2 of the error's ratio when steps double, all the way from t = 1 to t = 0."""
    errors = []
    for count in (steps, 2 * steps):
        settings = config(steps=count, grid=grid, self_conditioning=False)
        reached = last_state(settings, exact_denoiser(schedule), schedule, STARTS[..., None]).z_BKD[..., 0]
        errors.append(float((reached - REACHED).square().mean().sqrt()))
    assert math.log2(errors[0] / errors[1]) == pytest.approx(order, abs=0.008 if order == 1 else 0.025)
    assert errors[1] < {Euler: 2e-3, Ddim: 4e-2, Heun: 6e-4}[config]


def test_a_step_in_angle_is_the_same_for_every_schedule():
    """DDIM and Heun on the angle's grid know the schedule only by the times they tell the network."""
    for config in (Ddim(steps=4, grid="angle"), Heun(steps=4, grid="angle")):
        ends = [
            last_state(config, exact_denoiser(schedule), schedule, STARTS[..., None]).z_BKD
            for schedule in (TAN_2, TAN_10, ErrorRate(w_min=0.29, w_max=1.0, k=12.5, t0=0.835))
        ]
        torch.testing.assert_close(ends[0], ends[1], rtol=0, atol=1e-12)
        torch.testing.assert_close(ends[0], ends[2], rtol=0, atol=1e-6)


def test_euler_under_the_printed_schedule_forgives_a_small_error():
    """The paper's own 200 steps; near data theta' / sigma multiplies the prediction's error, here .1 % of the state."""
    printed = TanDAsPrinted()

    def nearly(z, t_B, selfcond):
        return exact_denoiser(printed)(z, t_B, selfcond) + 1e-3 * z

    reached = last_state(Euler(self_conditioning=False), nearly, printed, STARTS[..., None]).z_BKD[..., 0]
    assert float((reached - REACHED).square().mean().sqrt()) < 0.05


LEFT_OVER = {5: 0.89, 10: 0.66, 20: 0.29, 50: 0.035, 100: 0.004, 200: 0.0005}


@pytest.mark.parametrize(("steps", "left"), LEFT_OVER.items())
def test_euler_leaves_noise_even_with_a_perfect_denoiser(steps, left):
    """The latent is 0 and the network knows it: what remains of noise 1 at tan-10. DDIM leaves none."""
    noise = torch.ones(1, 1, 1, dtype=torch.float64)
    remains = float(last_state(Euler(steps=steps), lambda z, t, s: 0 * z, TAN_10, noise).z_BKD)
    assert remains == pytest.approx(left, rel=0.012 if left > 0.01 else 0.13)
    assert float(last_state(Ddim(steps=steps), lambda z, t, s: 0 * z, TAN_10, noise).z_BKD) == 0


def test_euler_in_five_steps_reaches_half_of_the_latent():
    start = torch.zeros(1, 1, 1, dtype=torch.float64)
    assert float(last_state(Euler(steps=5), lambda z, t, s: 0 * z + 1, TAN_10, start).z_BKD) == pytest.approx(
        0.50, abs=5e-3
    )
    assert float(last_state(Ddim(steps=5), lambda z, t, s: 0 * z + 1, TAN_10, start).z_BKD) == 1


# Re-noising.


def spreads(config):
    """The standard deviation of 5,000 states after each step, of data that is 0 and known to be."""
    start = draw_noise(11, 0, torch.arange(5000), 1, 1)
    states = run(config, lambda z, t, s: torch.zeros_like(z), TAN_2, start, torch.arange(5000), seed=11)
    return [(state.t, float(state.z_BKD.std())) for state in states]


@pytest.mark.parametrize("gamma", [0.0, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("config", [Ddim, Heun])
def test_the_exact_rule_keeps_every_marginal(config, gamma):
    """Every state has the noise of its time. Heun's own error is below the noise's at 24 steps."""
    found = spreads(config(steps=5 if config is Ddim else 24, grid="angle", gamma=gamma, self_conditioning=False))
    for t, spread in found[:-1]:
        assert spread == pytest.approx(float(TAN_2.sigma(torch.tensor([t]))), rel=0.04)
    assert found[-1][1] < 1e-5


def test_with_gamma_a_solvers_error_stays():
    """At gamma = 1 every step is a jump to t = 0: with more of them DDIM still draws from another law."""
    start = draw_noise(11, 0, torch.arange(2000), 1, 1).double()
    for steps in (16, 48):
        settings = Ddim(steps=steps, grid="angle", gamma=1.0, self_conditioning=False)
        end = last_state(settings, exact_denoiser(TAN_2), TAN_2, start, seed=11).z_BKD
        assert mixture.distance(WORLD, end.flatten(1)) > 2 * mixture.KOLMOGOROV


def test_the_listing_leaves_gamma_on_the_last_state():
    found = spreads(Ddim(steps=5, grid="angle", gamma=0.5, gamma_rule="listing"))
    assert found[-1][1] == pytest.approx(0.5, rel=0.04)
    assert found[2][1] > 1.05 * float(TAN_2.sigma(torch.tensor([found[2][0]])))


# What the network is asked, and what comes out.


def recorder(calls):
    def denoise(z, t_B, selfcond):
        assert t_B.shape == (len(z),)
        assert len(set(t_B.tolist())) == 1
        calls.append((float(t_B[0]), None if selfcond is None else selfcond.clone()))
        return torch.full_like(z, float(len(calls)))

    return denoise


@pytest.mark.parametrize("config", [Euler, Ddim])
def test_each_step_is_fed_the_prediction_of_the_step_before(config):
    calls = []
    states = list(
        run(config(steps=4), recorder(calls), TAN_10, torch.zeros(2, 1, 3), torch.arange(2), seed=0),
    )
    assert [t for t, _ in calls] == pytest.approx([1.0, 0.75, 0.5, 0.25])
    assert calls[0][1] is None
    for number, (_, selfcond) in enumerate(calls[1:], 1):
        assert torch.equal(selfcond, torch.full((2, 1, 3), float(number)))
    assert [state.step for state in states] == [0, 1, 2, 3, 4]
    assert [state.t for state in states] == pytest.approx([1.0, 0.75, 0.5, 0.25, 0.0])
    assert states[0].clean_BKD is None
    assert float(states[3].clean_BKD[0, 0, 0]) == 3
    calls.clear()
    last_state(config(steps=4, self_conditioning=False), recorder(calls), TAN_10, torch.zeros(2, 1, 3))
    assert [selfcond for _, selfcond in calls] == [None] * 4


def test_heun_computes_its_self_conditioning_on_the_spot():
    calls = []
    last_state(Heun(steps=3, grid="time"), recorder(calls), TAN_10, torch.zeros(1, 1, 1))
    third = [1.0, 1.0, 2 / 3, 2 / 3]  # each evaluation twice: alone, then fed with it
    assert [t for t, _ in calls] == pytest.approx([*third, *[t - 1 / 3 for t in third], 1 / 3, 1 / 3])
    assert [selfcond is None for _, selfcond in calls] == [True, False] * 5
    assert float(calls[1][1]) == 1
    calls.clear()
    last_state(Heun(steps=3, grid="time", self_conditioning=False), recorder(calls), TAN_10, torch.zeros(1, 1, 1))
    assert [t for t, _ in calls] == pytest.approx([1.0, 2 / 3, 2 / 3, 1 / 3, 1 / 3])


def test_heun_at_gamma_one_jumps_to_data_by_ddim():
    """Its corrector would sit at t = 0, which is 0/0."""
    calls = []
    last_state(Heun(steps=2, gamma=1.0, self_conditioning=False), recorder(calls), TAN_10, torch.zeros(1, 1, 1))
    assert len(calls) == 2


def test_self_conditioned_feeds_a_prediction_to_itself():
    def denoise(z, t_B, selfcond):
        return z + 1 if selfcond is None else selfcond * 10

    assert float(self_conditioned(denoise, torch.zeros(1, 1, 1), torch.ones(1))) == 10


CONFIGS = [Euler(steps=6, gamma=0.7), Ddim(steps=6, gamma=0.4), Ddim(steps=3, gamma=0.4, gamma_rule="listing")]
CONFIGS += [Heun(steps=4, gamma=0.5), Heun(steps=4, grid="time")]


@pytest.mark.parametrize("config", CONFIGS, ids=lambda config: config.name)
@pytest.mark.parametrize("schedule", [TAN_10, TanDAsPrinted(), ErrorRate(w_min=0.29, w_max=1.0, k=12.5, t0=0.835)])
def test_a_sample_is_its_own_in_float32(config, schedule):
    """Alone or among others, the same numbers; float32 in and out; finite under every schedule."""

    def denoise(z, t_B, selfcond):
        assert t_B.dtype == torch.float32
        return 0.5 * z + (0.1 if selfcond is None else 0.2 * selfcond) + t_B[:, None, None]

    def end(index):
        index_B = torch.tensor(index)
        start = draw_noise(5, 0, index_B, 3, 2)
        *_, last = run(config, denoise, schedule, start, index_B, seed=5)
        return last.z_BKD

    assert end([7]).dtype == torch.float32
    assert bool(torch.isfinite(end([7, 3])).all())
    assert torch.equal(end([7])[0], end([3, 7, 1])[1])
    assert not torch.equal(end([7])[0], end([8])[0])


def test_the_start_is_the_keyed_normal():
    index_B = torch.tensor([4, 2])
    made = draw_noise(9, 0, index_B, 3, 5)
    assert torch.equal(made, normal(9, Stream.NOISE, 0, index_B, 15).view(2, 3, 5))


@pytest.mark.parametrize(
    ("config", "values", "words"),
    [
        (Euler, {"steps": 0}, "steps: 0"),
        (Ddim, {"gamma": 1.2}, "gamma: 1.2"),
        (Heun, {"gamma": -0.1}, "gamma: -0.1"),
        (Heun, {"gamma_rule": "listing"}, "gamma_rule"),
        (Ddim, {"gamma_rule": "listing", "gamma": 1.0}, "gamma: 1.0"),
        (Ddim, {"gamma_rule": "printed"}, "gamma_rule"),
        (Euler, {"grid": "snr"}, "grid"),
    ],
)
def test_wrong_settings_are_refused_by_name(config, values, words):
    with pytest.raises(ValueError, match=words):
        from_dict(config, values)


@pytest.mark.parametrize("config", CONFIGS)
def test_settings_survive_json(config):
    assert from_dict(type(config), to_dict(config)) == config
