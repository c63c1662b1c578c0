"""Latent schedules: the paper's figure, derivatives by autodiff, inverses, both ends in float32, the error-rate fit."""

import itertools
import math

import pytest
import torch

from diladiff.config import from_dict, to_dict
from diladiff.processes.latent_schedules import (
    LOG_SNR_BOUND,
    MIN_VELOCITY_VARIANCE,
    ErrorRate,
    TanD,
    TanDAsPrinted,
    fit_error_rate,
)

GRID = torch.linspace(0, 1, 1001, dtype=torch.float64)
INSIDE = GRID[1:-1]
REFERENCE = ErrorRate(w_min=0.29, w_max=1.0, k=12.5, t0=0.835)
"""The fit of the paper's figure."""

SCHEDULES = [TanD(d=2.0), TanD(), TanD(d=15.0), TanDAsPrinted(d=2.0), TanDAsPrinted(), TanDAsPrinted(d=15.0), REFERENCE]


@pytest.fixture(params=SCHEDULES, ids=lambda schedule: f"{schedule.name}-{getattr(schedule, 'd', '')}")
def schedule(request):
    return request.param


@pytest.mark.parametrize(("d", "alpha"), [(2.0, 0.8385), (5.0, 0.524), (10.0, 0.294), (15.0, 0.201)])
def test_tan_d_is_the_papers_figure_and_the_printed_formula_is_not(d, alpha):
    fifth = torch.tensor([0.2], dtype=torch.float64)
    assert float(TanD(d=d).alpha(fifth)) == pytest.approx(alpha, abs=5e-4)
    curve = 1 / torch.sqrt(1 + (d * torch.tan(math.pi / 2 * INSIDE)) ** 2)
    torch.testing.assert_close(TanD(d=d).alpha(INSIDE), curve, rtol=1e-12, atol=0)
    off = float((TanDAsPrinted(d=d).alpha(INSIDE) - curve).abs().max())
    assert off == pytest.approx({2.0: 0.26, 5.0: 0.65, 10.0: 0.84, 15.0: 0.90}[d], abs=0.005)


def test_the_formulas_of_log_snr():
    tan = torch.tan(math.pi / 2 * INSIDE)
    for d in (2.0, 5.0, 10.0):
        for schedule, formula in ((TanD(d=d), -2 * torch.log(d * tan)), (TanDAsPrinted(d=d), -d * torch.log(tan))):
            bounded = formula.clamp(-LOG_SNR_BOUND, LOG_SNR_BOUND)
            torch.testing.assert_close(schedule.log_snr(INSIDE), bounded, rtol=1e-11, atol=1e-11)


def test_angle_and_log_snr_agree_with_the_coefficients(schedule):
    torch.testing.assert_close(schedule.alpha(GRID), torch.cos(schedule.theta(GRID)), rtol=0, atol=1e-15)
    torch.testing.assert_close(schedule.sigma(GRID), torch.sin(schedule.theta(GRID)), rtol=0, atol=1e-15)
    ratio = 2 * torch.log(schedule.alpha(GRID) / schedule.sigma(GRID))
    bounded = ratio.clamp(-LOG_SNR_BOUND, LOG_SNR_BOUND)
    torch.testing.assert_close(schedule.log_snr(GRID), bounded, rtol=1e-10, atol=1e-10)
    assert bool((schedule.theta(GRID).diff() >= 0).all())


def test_theta_prime_is_the_derivative(schedule):
    t = INSIDE.clone().requires_grad_()
    (derivative,) = torch.autograd.grad(schedule.theta(t).sum(), t)
    true = torch.ones_like(INSIDE, dtype=torch.bool)
    if isinstance(schedule, TanDAsPrinted):
        true = schedule.log_snr(INSIDE) > -LOG_SNR_BOUND
    elif isinstance(schedule, ErrorRate):
        variance = schedule.sigma(INSIDE).square()
        true = (variance - 0.5).abs() < 0.5 - MIN_VELOCITY_VARIANCE
    assert float(true.double().mean()) > 0.6
    torch.testing.assert_close(schedule.theta_prime(INSIDE)[true], derivative[true], rtol=1e-12, atol=0)
    assert bool((schedule.theta_prime(GRID) > 0).all())


def test_the_coefficients_derivatives_follow_from_the_angles(schedule):
    """alpha' = -theta' sigma and sigma' = theta' alpha, by autodiff, where theta' is not held off its ends."""
    t = torch.linspace(0.3, 0.7, 41, dtype=torch.float64, requires_grad=True)
    (alpha_prime,) = torch.autograd.grad(schedule.alpha(t).sum(), t)
    (sigma_prime,) = torch.autograd.grad(schedule.sigma(t).sum(), t)
    rate, alpha, sigma = schedule.theta_prime(t), schedule.alpha(t), schedule.sigma(t)
    torch.testing.assert_close(alpha_prime, -rate * sigma, rtol=1e-11, atol=1e-13)
    torch.testing.assert_close(sigma_prime, rate * alpha, rtol=1e-11, atol=1e-13)


def test_tan_10_has_two_decades_of_slope():
    ends = torch.tensor([0.0, 1.0])
    assert TanD().theta_prime(ends).tolist() == pytest.approx([15.71, 0.157], rel=1e-3)


def test_float32_is_finite_and_right_at_both_ends(schedule):
    ends = torch.tensor([0.0, 1.0])
    assert schedule.alpha(ends).tolist() == [1.0, 0.0]
    assert schedule.sigma(ends).tolist() == [0.0, 1.0]
    assert schedule.theta(ends).tolist() == pytest.approx([0.0, math.pi / 2], abs=1e-7)
    assert schedule.time(schedule.theta(ends)).tolist() == pytest.approx([0.0, 1.0], abs=1e-7)
    assert schedule.log_snr(ends).tolist() == [LOG_SNR_BOUND, -LOG_SNR_BOUND]
    near = torch.tensor([0.0, 2.0**-24, 1e-6, 1e-3, 0.5, 0.999, 1 - 2**-24, 1.0])
    for method in (schedule.alpha, schedule.sigma, schedule.theta, schedule.theta_prime, schedule.log_snr):
        assert method(near).dtype == torch.float32
        assert bool(torch.isfinite(method(near)).all())
        exact = method(near.double())
        assert exact.dtype == torch.float64
        torch.testing.assert_close(method(near).double(), exact, rtol=2e-5, atol=2e-6)
    many = torch.linspace(0, 1, 4097)
    assert 0 <= float(schedule.alpha(many).min()) <= float(schedule.alpha(many).max()) <= 1 + 1e-6


def test_time_undoes_theta(schedule):
    flat = isinstance(schedule, TanDAsPrinted) and schedule.d > 2
    within = GRID[200:800] if flat else GRID  # at its ends the printed formula's angle stands still
    tolerance = 1e-10 if flat else 5e-15
    torch.testing.assert_close(schedule.time(schedule.theta(within)), within, rtol=0, atol=tolerance)
    angles = math.pi / 2 * GRID
    torch.testing.assert_close(schedule.theta(schedule.time(angles)), angles, rtol=0, atol=1e-7)
    inner = angles[10:-10]
    torch.testing.assert_close(schedule.theta(schedule.time(inner)), inner, rtol=0, atol=1e-10)


def test_time_has_a_forward_derivative():
    """A student that lives in theta and is told t differentiates through `time`, both ends included."""
    theta = torch.tensor([1e-3, 0.4, 1.2, math.pi / 2])
    slope = torch.autograd.functional.jvp(TanD().time, theta, torch.ones_like(theta))[1]
    torch.testing.assert_close(slope, 1 / TanD().theta_prime(TanD().time(theta)), rtol=1e-5, atol=0)
    theta = theta[1:-1].double()
    slope = torch.autograd.functional.jvp(REFERENCE.time, theta, torch.ones_like(theta))[1]
    torch.testing.assert_close(slope, 1 / REFERENCE.theta_prime(REFERENCE.time(theta)), rtol=1e-12, atol=0)


# The error-rate schedule.


def test_the_error_rises_linearly_along_the_schedule():
    error = REFERENCE.error(REFERENCE.sigma(GRID).square())
    ends = REFERENCE.error(torch.tensor([0.0, 1.0], dtype=torch.float64))
    torch.testing.assert_close(error, ends[0] + (ends[1] - ends[0]) * GRID, rtol=0, atol=1e-13)


def test_the_error_is_the_printed_tanh_and_its_inverse():
    variance = torch.linspace(0.3, 0.99, 50, dtype=torch.float64)
    printed = 0.29 + 0.71 * (1 + torch.tanh(12.5 * (variance - 0.835))) / 2
    torch.testing.assert_close(REFERENCE.error(variance), printed, rtol=1e-13, atol=0)
    inverse = 0.835 + torch.atanh(2 * (printed - 0.29) / 0.71 - 1) / 12.5
    u = REFERENCE.time(torch.asin(torch.sqrt(inverse)))
    torch.testing.assert_close(REFERENCE.sigma(u).square(), variance, rtol=1e-9, atol=0)


def test_the_start_of_the_schedule_is_steep():
    """u = .001 is already sigma = .75: the reason to sample this schedule in theta."""
    assert float(REFERENCE.sigma(torch.tensor([1e-3]))) == pytest.approx(0.75, abs=0.01)


@pytest.mark.parametrize("extreme", [(0.5, 0.1), (40.0, 0.0), (40.0, 1.0), (26.0, 1.5), (80.0, 0.5)])
def test_extreme_fits_stay_finite(extreme):
    k, t0 = extreme
    schedule = ErrorRate(w_min=0.0, w_max=1.0, k=k, t0=t0)
    for method in (schedule.alpha, schedule.sigma, schedule.theta, schedule.log_snr):
        assert bool(torch.isfinite(method(GRID)).all())
    assert bool(torch.isfinite(schedule.theta_prime(GRID.float())).all())
    assert schedule.sigma(GRID[[0, -1]]).tolist() == [0.0, 1.0]
    unit = schedule.sigma(GRID).square() + schedule.alpha(GRID).square()
    torch.testing.assert_close(unit, torch.ones_like(GRID), rtol=0, atol=1e-12)


TRUTHS = [(0.29, 1.0, 12.5, 0.835), (0.05, 0.93, 4.0, 0.5), (0.0, 0.8, 25.0, 0.7), (0.1, 1.3, 3.0, 0.95)]


@pytest.mark.parametrize("truth", TRUTHS)
def test_the_fit_recovers_its_parameters(truth):
    schedule = ErrorRate(**dict(zip(("w_min", "w_max", "k", "t0"), truth, strict=True)))
    sigma2 = torch.linspace(0, 1, 21)
    found = fit_error_rate(sigma2, schedule.error(sigma2.double()))
    assert (found.w_min, found.w_max, found.k, found.t0) == pytest.approx(truth, abs=1e-6, rel=1e-6)


def test_the_fit_is_least_squares_under_noise():
    """No nearby parameters fit noisy errors better, and the noise moves them little."""
    sigma2 = torch.linspace(0, 1, 50, dtype=torch.float64)
    noise = 0.01 * torch.randn(50, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    error = REFERENCE.error(sigma2) + noise
    found = fit_error_rate(sigma2, error)
    assert (found.w_min, found.w_max, found.t0) == pytest.approx((0.29, 1.0, 0.835), abs=0.02)
    assert found.k == pytest.approx(12.5, rel=0.1)

    def loss(**changes):
        return float((ErrorRate(**{**to_dict(found), **changes}).error(sigma2) - error).square().sum())

    for name in ("w_min", "w_max", "k", "t0"):
        for factor in (0.999, 1.001):
            assert loss(**{name: getattr(found, name) * factor}) > loss()


def test_the_two_ways_to_write_the_error_give_one_schedule():
    """1 - recovery, as the figure plots it, or 1 - recovery / recovery(0), as the text defines it."""
    sigma2 = torch.linspace(0, 1, 21, dtype=torch.float64)
    recovery = 1 - REFERENCE.error(sigma2)
    plotted, defined = fit_error_rate(sigma2, 1 - recovery), fit_error_rate(sigma2, 1 - recovery / recovery[0])
    torch.testing.assert_close(plotted.theta(GRID), defined.theta(GRID), rtol=0, atol=1e-6)


def test_the_fit_reads_the_papers_figure():
    """Its points of the fully masked decoding error, by eye."""
    found = fit_error_rate(
        torch.tensor([0.0, 0.5, 0.65, 0.8, 0.9, 1.0]), torch.tensor([0.27, 0.29, 0.32, 0.50, 0.88, 0.963])
    )
    assert (found.w_min, found.t0) == pytest.approx((0.28, 0.835), abs=0.02)
    assert 11 < found.k < 20


@pytest.mark.parametrize(
    ("sigma2", "error", "words"),
    [
        ([0.0, 0.5, 0.7, 1.0], [0.1, 0.2, 0.3, 0.9], "4 points"),
        ([0.0, 0.2, 0.5, 0.7, 1.0], [0.1, 0.2, math.nan, 0.3, 0.9], "finite"),
        ([0.0, 0.2, 0.5, 0.7, 1.0], [0.9, 0.8, 0.5, 0.3, 0.1], "does not rise"),
        ([0.0, 0.2, 0.5, 0.7, 1.0], [0.3, 0.3, 0.3, 0.9, 0.9], "measure more noise levels"),
    ],
)
def test_what_cannot_be_fitted_is_refused(sigma2, error, words):
    with pytest.raises(ValueError, match=words):
        fit_error_rate(torch.tensor(sigma2), torch.tensor(error))


@pytest.mark.parametrize(
    ("cls", "values", "words"),
    [
        (TanD, {"d": 0.0}, "d: 0.0"),
        (TanDAsPrinted, {"d": 1.5}, "d: 1.5"),
        (ErrorRate, {"w_min": 1.0, "w_max": 1.0, "k": 1.0, "t0": 0.5}, "w_min: 1.0"),
        (ErrorRate, {"w_min": 0.0, "w_max": 1.0, "k": 0.0, "t0": 0.5}, "k: 0.0"),
        (ErrorRate, {"w_min": 0.0, "w_max": 1.0, "k": 90.0, "t0": 0.5}, "k: 90.0"),
        (ErrorRate, {"w_min": 0.0, "w_max": 1.0, "k": 1.0, "t0": 3.0}, "t0: 3.0"),
        (TanD, {"name": "tan"}, "name"),
    ],
)
def test_wrong_settings_are_refused_by_name(cls, values, words):
    with pytest.raises(ValueError, match=words):
        from_dict(cls, values)


def test_settings_survive_json_and_differ(schedule):
    assert from_dict(type(schedule), to_dict(schedule)) == schedule
    assert all(one != other for one, other in itertools.pairwise(SCHEDULES))
