"""Conversions of latents there and back, deterministic steps, the student's angle form, re-noising; all by hand."""

import math

import pytest
import torch

from diladiff.processes import latent
from diladiff.processes.latent_schedules import ErrorRate, TanD, TanDAsPrinted

SCHEDULES = [TanD(), TanDAsPrinted(), ErrorRate(w_min=0.29, w_max=1.0, k=12.5, t0=0.835)]
HALF_TURN = math.pi / 2


def double(*values):
    return torch.tensor(values, dtype=torch.float64)


def pair(count=5, seed=0):
    """Clean latents and noises (B, K, D) in float64."""
    made = torch.randn(2, count, 3, 2, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return made[0], made[1]


@pytest.fixture(params=SCHEDULES, ids=lambda schedule: schedule.name)
def schedule(request):
    return request.param


@pytest.fixture
def state(schedule):
    """Everything that is known of five samples at five times."""
    t_B = double(0.05, 0.3, 0.5, 0.7, 0.95)
    z, eps = pair()
    alpha_B, sigma_B, rate_B = schedule.alpha(t_B), schedule.sigma(t_B), schedule.theta_prime(t_B)
    z_t = latent.interpolate(z, eps, alpha_B, sigma_B)
    angular = latent.angular_from_pair(z, eps, alpha_B, sigma_B)
    return t_B, z, eps, z_t, angular, alpha_B, sigma_B, rate_B


def test_every_conversion_and_its_inverse(state):
    _, z, eps, z_t, angular, alpha_B, sigma_B, rate_B = state
    for found, true in (
        (latent.noise_from_clean(z_t, z, alpha_B, sigma_B), eps),
        (latent.clean_from_noise(z_t, eps, alpha_B, sigma_B), z),
        (latent.angular_from_clean(z_t, z, alpha_B, sigma_B), angular),
        (latent.clean_from_angular(z_t, angular, alpha_B, sigma_B), z),
        (latent.angular_from_noise(z_t, eps, alpha_B, sigma_B), angular),
        (latent.noise_from_angular(z_t, angular, alpha_B, sigma_B), eps),
        (latent.angular_from_velocity(latent.velocity_from_angular(angular, rate_B), rate_B), angular),
    ):
        torch.testing.assert_close(found, true, rtol=1e-9, atol=1e-9)


def test_the_velocity_is_the_paths_derivative():
    """d/dt of alpha z + sigma eps, by autodiff, and the angular one d/dtheta of cos z + sin eps."""
    z, eps = pair(1)
    for schedule in SCHEDULES:
        for t in (0.3, 0.5, 0.7):
            path = torch.autograd.functional.jacobian(
                lambda t, of=schedule: latent.interpolate(z, eps, of.alpha(t), of.sigma(t)), double(t)
            )[..., 0]
            z_t = latent.interpolate(z, eps, schedule.alpha(double(t)), schedule.sigma(double(t)))
            velocity = latent.velocity_from_clean(z_t, z, double(t), schedule)
            torch.testing.assert_close(velocity, path, rtol=1e-9, atol=1e-9)
    path = torch.autograd.functional.jacobian(
        lambda theta: latent.interpolate(z, eps, torch.cos(theta), torch.sin(theta)), double(0.8)
    )[..., 0]
    alpha_B, sigma_B = torch.cos(double(0.8)), torch.sin(double(0.8))
    z_t = latent.interpolate(z, eps, alpha_B, sigma_B)
    torch.testing.assert_close(latent.angular_from_clean(z_t, z, alpha_B, sigma_B), path, rtol=1e-12, atol=1e-13)
    torch.testing.assert_close(latent.angular_from_pair(z, eps, alpha_B, sigma_B), path, rtol=1e-12, atol=1e-13)


def test_phi_is_the_papers_and_undoes_the_velocity(state, schedule):
    """(sigma v - sigma' z) / (sigma alpha' - sigma' alpha), with alpha' = -theta' sigma and sigma' = theta' alpha."""
    t_B, z, _, z_t, _, alpha_B, sigma_B, rate_B = state
    velocity = latent.velocity_from_clean(z_t, z, t_B, schedule)
    torch.testing.assert_close(latent.phi(z_t, velocity, t_B, schedule), z, rtol=1e-9, atol=1e-9)
    alpha, sigma, rate = (c_B[:, None, None] for c_B in (alpha_B, sigma_B, rate_B))
    printed = (sigma * velocity - rate * alpha * z_t) / (sigma * (-rate * sigma) - rate * alpha * alpha)
    torch.testing.assert_close(latent.phi(z_t, velocity, t_B, schedule), printed, rtol=1e-9, atol=1e-9)


def test_phi_is_finite_at_both_ends_in_float32(schedule):
    ends_B = torch.tensor([0.0, 1.0])
    z, eps = (x.float() for x in pair(2))
    assert bool(torch.isfinite(latent.phi(z, eps, ends_B, schedule)).all())
    torch.testing.assert_close(latent.phi(z, eps, ends_B, schedule)[0], z[0], rtol=0, atol=1e-6)


def test_the_velocity_is_finite_from_pure_noise_on_in_float32(schedule):
    z, eps = (x.float() for x in pair(2))
    velocity = latent.velocity_from_clean(eps, z, torch.tensor([1.0, 0.5]), schedule)
    assert bool(torch.isfinite(velocity).all())


def test_ddim_is_the_interpolant_of_what_it_believes():
    z, eps = pair()
    t_B, s_B = double(0.3, 0.8, 1.2, 1.5, HALF_TURN), double(0.0, 0.5, 1.2, 0.1, 0.7)
    z_t = latent.interpolate(z, eps, torch.cos(t_B), torch.sin(t_B))
    at_s = latent.interpolate(z, eps, torch.cos(s_B), torch.sin(s_B))
    torch.testing.assert_close(latent.ddim(z_t, z, t_B, s_B), at_s, rtol=0, atol=1e-14)
    guess = z + 0.3
    noise = latent.noise_from_clean(z_t, guess, torch.cos(t_B), torch.sin(t_B))
    formula = latent.interpolate(guess, noise, torch.cos(s_B), torch.sin(s_B))
    torch.testing.assert_close(latent.ddim(z_t, guess, t_B, s_B), formula, rtol=0, atol=1e-13)


def test_ddims_last_step_gives_the_prediction_itself():
    z, eps = (x.float() for x in pair())
    t_B = torch.tensor([1e-3, 0.3, 1.0, 1.5, HALF_TURN])
    assert torch.equal(latent.ddim(eps, z, t_B, torch.zeros(5)), z)


# The angle form of the student.


def test_the_average_velocity_leads_where_the_jump_does():
    z_t, raw = pair()
    t_B, r_B = double(0.3, 0.8, 1.2, 1.5, HALF_TURN), double(0.0, 0.5, 1.19, 0.1, 0.7)
    u = latent.average_velocity(z_t, raw, t_B, r_B)
    landed = z_t - (t_B - r_B)[:, None, None] * u
    torch.testing.assert_close(latent.jump(z_t, raw, t_B, r_B), landed, rtol=0, atol=1e-13)


def test_the_average_velocity_at_r_equal_t_is_the_instantaneous_one():
    z_t, raw = pair()
    t_B = double(1e-3, 0.8, 1.2, 1.5, HALF_TURN)
    u = latent.average_velocity(z_t, raw, t_B, t_B)
    torch.testing.assert_close(u, latent.angular_from_clean(z_t, raw, t_B.cos(), t_B.sin()), rtol=1e-12, atol=1e-12)
    near = latent.average_velocity(z_t, raw, t_B, t_B - 1e-9)
    torch.testing.assert_close(near, u, rtol=1e-5, atol=1e-7)


def test_the_average_velocity_is_accurate_in_float32():
    z_t, raw = pair()
    t_B, gaps = double(0.3, 0.8, 1.2, 1.5, HALF_TURN), (0.0, 1e-7, 1e-4, 1e-2, 0.29)
    for gap in gaps:
        exact = latent.average_velocity(z_t, raw, t_B, (t_B.float() - gap).double())
        single = latent.average_velocity(z_t.float(), raw.float(), t_B.float(), t_B.float() - gap)
        torch.testing.assert_close(single.double(), exact, rtol=3e-6, atol=3e-6)


def test_the_jump_is_a_convex_average_of_predictions():
    """z_r from z_t = cos a + sin b: with raw in [low, high] it stays within, the weights being those of the path."""
    t_B, r_B = double(1.2), double(0.4)
    z_t = torch.zeros(1, 1, 1, dtype=torch.float64)
    one = latent.jump(z_t, torch.ones_like(z_t), t_B, r_B)
    theta = torch.linspace(0.4, 1.2, 100_001, dtype=torch.float64)
    weights = torch.sin(r_B) / torch.sin(theta).square()  # dz / dtheta = cot z - raw / sin, solved
    assert float(one) == pytest.approx(float(torch.trapezoid(weights, theta)), rel=1e-9)


def test_the_target_is_the_velocity_less_the_warmed_up_tangent():
    v, du = pair(3)
    delta_B = double(0.0, 0.5, 1.0)
    target = latent.meanflow_target(v, du, delta_B, 0.3)
    torch.testing.assert_close(target, v - 0.3 * delta_B[:, None, None] * du)
    assert torch.equal(latent.meanflow_target(v, du, delta_B, 0.0), v)
    assert torch.equal(latent.meanflow_target(v, du, delta_B, torch.tensor(1.0))[0], v[0])


# Re-noising.

GAMMAS = [0.0, 0.3, 0.8, 0.99, 1.0]


@pytest.mark.parametrize("gamma", GAMMAS)
def test_the_exact_rule_keeps_signal_and_variance(gamma):
    """Jumping to theta' and adding noise gives cos(theta_s) z and variance sin^2(theta_s), for every angle."""
    theta_B = torch.linspace(0, HALF_TURN, 101, dtype=torch.float64)
    end_B = latent.renoise_angle(theta_B, gamma)
    one, nothing = torch.ones(101, 1, dtype=torch.float64), torch.zeros(101, 1, dtype=torch.float64)
    kept_B = latent.renoise(one, nothing, theta_B, gamma)[:, 0]
    noise_B = latent.renoise(nothing, one, theta_B, gamma)[:, 0]
    torch.testing.assert_close(kept_B, torch.sqrt(1 - (gamma * theta_B.sin()).square()), rtol=0, atol=1e-14)
    torch.testing.assert_close(kept_B * end_B.cos(), theta_B.cos(), rtol=0, atol=1e-15)
    variance_B = (kept_B * end_B.sin()).square() + noise_B.square()
    torch.testing.assert_close(variance_B, theta_B.sin().square(), rtol=0, atol=1e-15)
    torch.testing.assert_close(end_B[1:-1].tan(), math.sqrt(1 - gamma**2) * theta_B[1:-1].tan(), rtol=1e-12, atol=0)


def test_the_exact_rules_ends():
    """gamma = 0 is the ODE, gamma = 1 draws all noise anew; at theta = 0 nothing is added. In float32."""
    z, eps = (x.float() for x in pair(3))
    theta_B = torch.tensor([0.0, 0.7, HALF_TURN])
    torch.testing.assert_close(latent.renoise_angle(theta_B, 0.0), theta_B)
    torch.testing.assert_close(latent.renoise(z, eps, theta_B, 0.0), z)
    assert latent.renoise_angle(theta_B, 1.0).tolist() == [0.0, 0.0, 0.0]
    assert float(latent.renoise_angle(theta_B, 0.8)[-1]) == float(theta_B[-1])
    fresh = latent.interpolate(z, eps, theta_B.cos(), theta_B.sin())
    torch.testing.assert_close(latent.renoise(z, eps, theta_B, 1.0), fresh)
    for gamma in GAMMAS:
        assert torch.equal(latent.renoise(z, eps, theta_B, gamma)[0], z[0])


def test_the_listing_leaves_its_noise_on_data():
    z, eps = pair()
    assert torch.equal(latent.renoise_as_listed(z, eps, 0.0), z)
    assert torch.equal(latent.renoise_as_listed(z, eps, 1.0), eps)
    torch.testing.assert_close(latent.renoise_as_listed(z, eps, 0.8), 0.6 * z + 0.8 * eps)
