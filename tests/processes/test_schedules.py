"""Masking schedules: derivatives by autodiff, inverses by round trips, float32 at both ends."""

import math

import pytest
import torch

from diladiff.processes.schedules import MASK_SCHEDULES, mask_schedule

GRID = torch.linspace(0, 1, 1001, dtype=torch.float64)
FORMULAS = {
    "linear": lambda t: 1 - t,
    "cosine": lambda t: torch.cos(math.pi / 2 * t),
    "log_linear": lambda t: 1 - (1 - 1e-3) * t,
}


@pytest.fixture(params=MASK_SCHEDULES)
def schedule(request):
    return mask_schedule(request.param)


def test_alpha_is_the_printed_formula(schedule):
    torch.testing.assert_close(schedule.alpha(GRID), FORMULAS[schedule.name](GRID), rtol=0, atol=1e-15)


def test_alpha_prime_is_the_derivative(schedule):
    t = GRID.clone().requires_grad_()
    (derivative,) = torch.autograd.grad(schedule.alpha(t).sum(), t)
    torch.testing.assert_close(schedule.alpha_prime(GRID), derivative, rtol=1e-13, atol=1e-15)
    assert float(derivative.max()) <= 0


def test_mask_rate_is_one_minus_alpha(schedule):
    torch.testing.assert_close(schedule.mask_rate(GRID), 1 - schedule.alpha(GRID), rtol=0, atol=1e-15)


def test_inverse_undoes_alpha(schedule):
    torch.testing.assert_close(schedule.inverse(schedule.alpha(GRID)), GRID, rtol=0, atol=1e-7)
    within = GRID[1:] if schedule.name == "cosine" else GRID  # d alpha / dt is 0 at t = 0
    torch.testing.assert_close(schedule.inverse(schedule.alpha(within)), within, rtol=0, atol=1e-12)
    alpha = schedule.alpha(GRID)
    torch.testing.assert_close(schedule.alpha(schedule.inverse(alpha)), alpha, rtol=0, atol=1e-15)


def test_inverse_stays_within_time():
    for name in MASK_SCHEDULES:
        times = mask_schedule(name).inverse(torch.linspace(0, 1, 101))
        assert float(times.min()) >= 0
        assert float(times.max()) <= 1


def test_float32_is_right_at_both_ends(schedule):
    ends = torch.tensor([0.0, 1.0])
    last = 1e-3 if schedule.name == "log_linear" else 0.0
    assert schedule.alpha(ends).tolist() == pytest.approx([1.0, last], abs=0, rel=1e-6)
    assert schedule.mask_rate(ends).tolist() == pytest.approx([0.0, 1 - last], abs=0, rel=1e-6)
    tiny = torch.tensor([1e-7, 1e-5, 1e-3, 0.1, 0.5, 0.999, 1 - 2**-24])
    exact = schedule.mask_rate(tiny.double())
    torch.testing.assert_close(schedule.mask_rate(tiny).double(), exact, rtol=4e-7, atol=0)
    assert float(exact[0]) > 0
    torch.testing.assert_close(schedule.alpha(tiny).double(), schedule.alpha(tiny.double()), rtol=4e-7, atol=0)
    assert float(schedule.alpha(torch.linspace(0, 1, 4097)).min()) >= 0
    assert float(schedule.mask_rate(torch.linspace(0, 1, 4097)).max()) <= 1


def test_an_unknown_schedule_is_refused():
    with pytest.raises(ValueError, match="linear, cosine, log_linear"):
        mask_schedule("sine")
