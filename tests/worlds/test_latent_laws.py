"""What the latent stages rest on, in the exact mixture: MeanFlow's identity, re-noising's law, the ODE's likelihood."""

import math

import pytest
import torch

from diladiff.processes.latent import (
    angular_from_clean,
    average_velocity,
    meanflow_target,
    phi,
    velocity_from_angular,
    velocity_from_clean,
)
from diladiff.processes.latent_schedules import TanD, TanDAsPrinted
from tests.worlds import mixture
from tests.worlds.mixture import HALF_TURN, normals, runge_kutta

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")  # torch's own

LINE, MODES, PLANE = mixture.line(), mixture.two_modes(), mixture.plane()
TAN_10 = TanD()
TIMES = [(0.3, 0.1), (0.2, 0.05), (0.6, 0.2)]
COUNT = 41


def angle(value, count=COUNT):
    return torch.full((count,), float(value), dtype=torch.float64)


def at(t, schedule=TAN_10):
    return schedule.theta(angle(t))


def points(theta_N, world=LINE):
    """Quantiles of the law at an angle."""
    return world.point((torch.arange(COUNT, dtype=torch.float64) + 0.5) / COUNT, theta_N)


def rms(x):
    return float(x.square().mean().sqrt())


def exact_raw(z_N1, theta_t_N, theta_r_N):
    """What a perfect student puts out: the aim of the jump that is the exact flow."""
    sin_t, sin_r, sin_gap = theta_t_N.sin(), theta_r_N.sin(), (theta_t_N - theta_r_N).sin()
    return (sin_t[:, None] * LINE.flow(z_N1, theta_t_N, theta_r_N) - sin_r[:, None] * z_N1) / sin_gap[:, None]


# MeanFlow's identity.


@pytest.mark.parametrize(("t", "r"), [*TIMES, (1.0, 0.8), (1.0, 0.0), (0.05, 0.04)])
def test_meanflows_identity_in_angle(t, r):
    """u = v - delta du along (v, 1, 0), the coefficients of the angle form inside what is differentiated."""
    theta_t, theta_r = at(t), at(r)
    z = points(theta_t)
    v = LINE.angular(z, theta_t)
    u, du = torch.func.jvp(
        lambda z, a, b: average_velocity(z, exact_raw(z, a, b), a, b),
        (z, theta_t, theta_r),
        (v, torch.ones_like(theta_t), torch.zeros_like(theta_r)),
    )
    torch.testing.assert_close(u, LINE.average(z, theta_t, theta_r), rtol=0, atol=1e-11)
    torch.testing.assert_close(u, meanflow_target(v, du, theta_t - theta_r, 1.0), rtol=0, atol=1e-10)
    assert rms(meanflow_target(v, du, theta_t - theta_r, 0.5) - u) > 1e-4


@pytest.mark.parametrize(("t", "r"), TIMES)
def test_meanflows_identity_in_t(t, r):
    """The literal form: u = theta' (alpha z - raw) / sigma, the average over t."""
    t_N, r_N = angle(t), angle(r)
    z = points(at(t))
    v = velocity_from_angular(LINE.angular(z, at(t)), TAN_10.theta_prime(t_N))

    def average_in_t(z, t_N, r_N):
        true = (z - LINE.flow(z, TAN_10.theta(t_N), TAN_10.theta(r_N))) / (t_N - r_N)[:, None]
        return velocity_from_clean(z, phi(z, true, t_N, TAN_10), t_N, TAN_10)

    u, du = torch.func.jvp(average_in_t, (z, t_N, r_N), (v, torch.ones_like(t_N), torch.zeros_like(r_N)))
    torch.testing.assert_close(u, meanflow_target(v, du, t_N - r_N, 1.0), rtol=0, atol=1e-9)


FROZEN = {("angle", (0.3, 0.1)): 6.4, ("angle", (0.2, 0.05)): 5.6, ("angle", (0.6, 0.2)): 10.1}
FROZEN |= {("time", (0.3, 0.1)): 2.5, ("time", (0.2, 0.05)): 2.1, ("time", (0.6, 0.2)): 4.3}
"""Error of the frozen target over the rms of u, in the world of two modes."""


@pytest.mark.parametrize("form", ["angle", "time"])
@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("world", [LINE, MODES], ids=["line", "modes"])
def test_the_identity_wants_the_self_conditionings_tangent(world, times, form):
    """A student that reads its state off its self-conditioning: the frozen target is far off, the total one exact."""

    def theta(time_N):
        return time_N if form == "angle" else TAN_10.theta(time_N)

    def student(clean, t_N, r_N):
        z = world.undo_denoise(clean, theta(t_N))
        return (z - world.flow(z, theta(t_N), theta(r_N))) / (t_N - r_N)[:, None]

    t_N, r_N = (at(time) if form == "angle" else angle(time) for time in times)
    z, one, zero = points(theta(t_N), world), torch.ones_like(t_N), torch.zeros_like(r_N)
    v = world.angular(z, theta(t_N))
    if form == "time":
        v = velocity_from_angular(v, TAN_10.theta_prime(t_N))
    clean, moved = torch.func.jvp(lambda z, t_N: world.denoise(z, theta(t_N)), (z, t_N), (v, one))
    errors = {}
    for name, tangent in (("total", moved), ("frozen", torch.zeros_like(moved))):
        u, du = torch.func.jvp(student, (clean, t_N, r_N), (tangent, one, zero))
        errors[name] = rms(meanflow_target(v, du, t_N - r_N, 1.0) - u) / rms(u)
    assert errors["total"] < 1e-12
    if world is MODES:
        assert errors["frozen"] == pytest.approx(FROZEN[form, times], abs=0.05)
    else:
        assert errors["frozen"] > 0.1


# Derivatives.


def network(z, theta_t, theta_r):
    """A smooth network of two layers on (z, theta_t, theta_r)."""
    generator = torch.Generator().manual_seed(5)
    first = torch.randn(4, 16, generator=generator, dtype=torch.float64).to(z)
    second = torch.randn(16, 2, generator=generator, dtype=torch.float64).to(z) / 4
    return torch.tanh(torch.cat((z, theta_t[:, None], theta_r[:, None]), dim=1) @ first) @ second


def student_u(z, theta_t, theta_r):
    return average_velocity(z, network(z, theta_t, theta_r), theta_t, theta_r)


def jvp_inputs(gap):
    theta_t = torch.tensor([0.05, 0.3, 0.9, 1.4, HALF_TURN], dtype=torch.float64)
    z = torch.randn(5, 2, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    v = angular_from_clean(z, network(z, theta_t, theta_t), theta_t.cos(), theta_t.sin())
    return (z, theta_t, theta_t - gap * theta_t), (v, torch.ones_like(theta_t), torch.zeros_like(theta_t))


@pytest.mark.parametrize("gap", [0.0, 1e-9, 1e-4, 0.01, 0.5, 1.0])
def test_the_jvp_is_the_finite_difference(gap):
    """Central differences in float64 along (v, 1, 0), at r = t as elsewhere."""
    inputs, tangents = jvp_inputs(gap)
    u, du = torch.func.jvp(student_u, inputs, tangents)
    step = 1e-6
    ahead, behind = (
        student_u(*(x + sign * step * dx for x, dx in zip(inputs, tangents, strict=True))) for sign in (1, -1)
    )
    torch.testing.assert_close((ahead - behind) / (2 * step), du, rtol=2e-6, atol=2e-6)
    torch.testing.assert_close(u, student_u(*inputs))
    (grad,) = torch.autograd.grad(student_u(inputs[0].requires_grad_(), *inputs[1:]).sum(), inputs[0])
    assert bool(torch.isfinite(grad).all())


@pytest.mark.parametrize("gap", [0.0, 1e-7, 1e-4, 0.01, 0.5, 1.0])
def test_the_target_is_right_in_float32(gap):
    """The tangent alone loses digits as r nears t, the target does not: there it is multiplied by delta."""
    inputs, tangents = jvp_inputs(gap)
    targets = []
    for dtype in (torch.float32, torch.float64):
        single = tuple(x.float().to(dtype) for x in inputs)
        along = tuple(x.to(dtype) for x in tangents)
        _, du = torch.func.jvp(student_u, single, along)
        assert bool(torch.isfinite(du).all())
        targets.append(meanflow_target(along[0], du, single[1] - single[2], 1.0).double())
    torch.testing.assert_close(targets[0], targets[1], rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("schedule", [TAN_10, TanD(d=2.0)])
def test_a_network_that_is_told_t_has_the_same_derivative(schedule):
    """dt/dtheta enters through `time`, so the network may be fed t."""
    inputs, tangents = jvp_inputs(0.5)

    def told(z, theta_t, theta_r):
        return average_velocity(z, network(z, schedule.time(theta_t), schedule.time(theta_r)), theta_t, theta_r)

    _, du = torch.func.jvp(told, inputs, tangents)
    step = 1e-6
    ahead, behind = (told(*(x + sign * step * dx for x, dx in zip(inputs, tangents, strict=True))) for sign in (1, -1))
    # The last angle is pi / 2, beyond which there is no time: one-sided there.
    torch.testing.assert_close(((ahead - behind) / (2 * step))[:-1], du[:-1], rtol=1e-6, atol=1e-6)
    onesided = (told(*inputs) - behind) / step
    torch.testing.assert_close(onesided[-1], du[-1], rtol=1e-4, atol=1e-4)


# Likelihood.


def with_divergence(function, z):
    """A field and its exact divergence at each point."""
    z = z.detach().requires_grad_()
    field = function(z)
    columns = [torch.autograd.grad(field[:, i].sum(), z, retain_graph=True)[0][:, i] for i in range(z.shape[1])]
    return field.detach(), sum(columns)


def log_likelihood(slope, z, start, end, steps):
    """log p of the prior where the ODE leads plus the integral of the divergence on the way."""

    def joint(x, y):
        at_x = x.expand(len(y))
        field, spread_N = with_divergence(lambda z: slope(z, at_x), y[:, :-1])
        return torch.cat((field, spread_N[:, None]), dim=1)

    end_NF = runge_kutta(joint, torch.cat((z, torch.zeros(len(z), 1).double()), dim=1), start, end, steps)
    normal_N = -0.5 * (end_NF[:, :-1].square() + math.log(2 * math.pi)).sum(1)
    return normal_N + end_NF[:, -1]


@pytest.mark.parametrize("world", [LINE, PLANE], ids=["line", "plane"])
def test_the_likelihood_of_the_ode_is_the_density_in_angle(world):
    width = world.mean_JE.shape[1]
    z = 1.3 * torch.randn(16, width, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    found = log_likelihood(world.angular, z, 0.0, HALF_TURN, 40)
    torch.testing.assert_close(found, world.log_density(z, angle(0, 16)), rtol=0, atol=1e-5)


@pytest.mark.parametrize("schedule", [TanD(d=2.0), TanDAsPrinted(d=2.0)], ids=lambda schedule: schedule.name)
def test_the_likelihood_of_the_ode_is_the_density_in_t(schedule):
    """With the velocity in t, from a latent noised a little: t = 0 itself is 0/0 for a network that predicts clean."""
    z = 1.3 * torch.randn(16, 2, generator=torch.Generator().manual_seed(4), dtype=torch.float64)

    def slope(z, t_N):
        return velocity_from_clean(z, PLANE.denoise(z, schedule.theta(t_N)), t_N, schedule)

    found = log_likelihood(slope, z, 0.02, 1.0, 40)
    true = PLANE.log_density(z, schedule.theta(angle(0.02, 16)))
    torch.testing.assert_close(found, true, rtol=0, atol=1e-4)
    assert rms(found - PLANE.log_density(z, angle(0, 16))) > 1e-3


def test_the_angular_velocity_of_the_world_is_that_of_its_denoiser():
    z, theta = normals(COUNT), at(0.3)
    converted = angular_from_clean(z, LINE.denoise(z, theta), theta.cos(), theta.sin())
    torch.testing.assert_close(LINE.angular(z, theta), converted, rtol=0, atol=1e-13)
