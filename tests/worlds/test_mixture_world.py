"""The mixture's own formulas against each other: without this no test against them says anything."""

import math

import pytest
import torch

from tests.worlds import mixture
from tests.worlds.mixture import HALF_TURN, normals, runge_kutta

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")  # torch's own

LINE, PLANE = mixture.line(), mixture.plane()
ANGLES = [0.0, 0.3, 1.0, 1.5, HALF_TURN]


def points(width, count=7):
    generator = torch.Generator().manual_seed(1)
    return 1.2 * torch.randn(count, width, generator=generator, dtype=torch.float64)


def angle(value, count=7):
    return torch.full((count,), value, dtype=torch.float64)


@pytest.mark.parametrize("theta", ANGLES)
@pytest.mark.parametrize("world", [LINE, PLANE], ids=["line", "plane"])
def test_the_denoiser_and_the_velocity_follow_from_the_density(world, theta):
    """Tweedie: the score is grad log p; dz/dtheta = -tan(theta)(z + score), E[z] = (z + sin^2 score) / cos."""
    z_NE = points(world.mean_JE.shape[1]).requires_grad_()
    theta_N = angle(theta)
    (score_NE,) = torch.autograd.grad(world.log_density(z_NE, theta_N).sum(), z_NE)
    cos, sin = math.cos(theta), math.sin(theta)
    torch.testing.assert_close(cos * world.denoise(z_NE, theta_N), z_NE + sin**2 * score_NE, rtol=0, atol=1e-13)
    torch.testing.assert_close(cos * world.angular(z_NE, theta_N), -sin * (z_NE + score_NE), rtol=0, atol=1e-13)


def test_the_density_solves_the_continuity_equation():
    """d log p / dtheta + dz/dtheta . score + div = 0, by automatic derivatives."""
    z_NE = points(2)
    for theta in ANGLES[:-1]:
        theta_N = angle(theta)
        _, rate_N = torch.func.jvp(
            PLANE.log_density, (z_NE, theta_N), (PLANE.angular(z_NE, theta_N), torch.ones_like(theta_N))
        )
        divergence_N = sum(
            torch.func.jvp(lambda z, at=theta_N: PLANE.angular(z, at), (z_NE,), (axis.expand_as(z_NE),))[1] @ axis
            for axis in torch.eye(2, dtype=torch.float64)
        )
        torch.testing.assert_close(rate_N, -divergence_N, rtol=1e-12, atol=1e-12)


def test_draws_have_the_density():
    generator = torch.Generator().manual_seed(2)
    uniform_N = torch.rand(40_000, generator=generator, dtype=torch.float64)
    data_N1 = LINE.draw(uniform_N, torch.randn(40_000, 1, generator=generator, dtype=torch.float64))
    assert mixture.distance(LINE, data_N1) < mixture.KOLMOGOROV
    assert mixture.distance(LINE, 1.02 * data_N1) > mixture.KOLMOGOROV


def test_the_quantile_is_the_density_integrated():
    z_N1 = points(1).requires_grad_()
    theta_N = angle(0.4)
    (slope_N1,) = torch.autograd.grad(LINE.quantile(z_N1, theta_N).sum(), z_N1)
    torch.testing.assert_close(slope_N1[:, 0], LINE.log_density(z_N1, theta_N).exp(), rtol=1e-12, atol=1e-14)
    torch.testing.assert_close(LINE.point(LINE.quantile(z_N1, theta_N), theta_N), z_N1, rtol=0, atol=1e-12)


@pytest.mark.parametrize(("start", "end"), [(HALF_TURN, 0.0), (1.3, 0.7), (0.5, 1.2)])
def test_the_flow_solves_the_ode(start, end):
    z_N1 = normals(9)

    def slope(theta, z):
        return LINE.angular(z, theta.expand(len(z)))

    solved_N1 = runge_kutta(slope, z_N1, start, end, 200)
    flow_N1 = LINE.flow(z_N1, angle(start, 9), angle(end, 9))
    torch.testing.assert_close(flow_N1, solved_N1, rtol=0, atol=1e-8)


def test_the_derivatives_of_the_flow_are_right():
    """By automatic differentiation through its one Newton step, against central differences."""
    z_N1, t_N, r_N = points(1), angle(1.1), angle(0.6)
    tangents = (torch.ones_like(z_N1), 0.7 * torch.ones_like(t_N), -0.4 * torch.ones_like(r_N))
    for function in (LINE.flow, LINE.average):
        _, derivative_N1 = torch.func.jvp(function, (z_N1, t_N, r_N), tangents)
        step = 1e-5
        ahead, behind = (
            function(*(x + sign * step * dx for x, dx in zip((z_N1, t_N, r_N), tangents, strict=True)))
            for sign in (1, -1)
        )
        torch.testing.assert_close(derivative_N1, (ahead - behind) / (2 * step), rtol=1e-7, atol=1e-7)


def test_the_denoiser_is_undone():
    z_N1, theta_N = points(1), angle(0.8)
    clean_N1 = LINE.denoise(z_N1, theta_N)
    torch.testing.assert_close(LINE.undo_denoise(clean_N1, theta_N), z_N1, rtol=0, atol=1e-11)
    tangents = (torch.ones_like(clean_N1), torch.full_like(theta_N, 0.5))
    _, derivative_N1 = torch.func.jvp(LINE.undo_denoise, (clean_N1, theta_N), tangents)
    step = 1e-6
    ahead, behind = (LINE.undo_denoise(clean_N1 + sign * step, theta_N + sign * 0.5 * step) for sign in (1, -1))
    torch.testing.assert_close(derivative_N1, (ahead - behind) / (2 * step), rtol=1e-6, atol=1e-6)
