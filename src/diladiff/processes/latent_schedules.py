"""Schedules of the latent's Gaussian process: z_t = cos(theta) z + sin(theta) eps (docs/math.md (17) to (19)).

t = 0 is data (theta = 0), t = 1 is noise (theta = pi / 2). Closed forms that are finite at both ends in float32;
float64 in, float64 out. Call them outside autocast.
"""

import abc
import math
from dataclasses import dataclass
from typing import Literal, final

import torch
from jaxtyping import Float
from torch import Tensor

LOG_SNR_BOUND = 20.0
"""Log signal-to-noise ratios are clamped to this: beyond it alpha or sigma is below 5e-5."""

MIN_VELOCITY_VARIANCE = 1e-3
"""The error-rate schedule's theta' is taken no nearer to sigma^2 = 0 or 1 than this, where it is infinite."""


class VariancePreserving(abc.ABC):
    """An angle that rises from 0 at t = 0 to pi / 2 at t = 1, docs/math.md (17)."""

    @abc.abstractmethod
    def alpha(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """cos(theta): how much of the data is left at time t."""

    @abc.abstractmethod
    def sigma(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """sin(theta): the noise's standard deviation at time t."""

    @abc.abstractmethod
    def theta(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """The angle at time t, in [0, pi / 2]."""

    @abc.abstractmethod
    def theta_prime(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """The derivative of theta in t (positive, finite)."""

    @abc.abstractmethod
    def log_snr(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """log(alpha^2 / sigma^2), clamped to +-LOG_SNR_BOUND."""

    @abc.abstractmethod
    def time(self, theta: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """The time at which theta has this value."""


@final
@dataclass(frozen=True, kw_only=True)
class TanD(VariancePreserving):
    """tan(theta) = d tan(pi t / 2), the paper's figure and our default; docs/math.md (17)."""

    d: float = 10.0
    name: Literal["tan_d"] = "tan_d"

    def __post_init__(self) -> None:
        if not 0 < self.d <= 1000:
            raise ValueError(f"d: {self.d} must be in (0, 1000]; the paper searches 2, 5, 10, 15")

    def alpha(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See VariancePreserving."""
        return _cos(t) / torch.sqrt(self._norm(t))

    def sigma(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See VariancePreserving."""
        return self.d * _sin(t) / torch.sqrt(self._norm(t))

    def theta(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See VariancePreserving."""
        return torch.atan2(self.d * _sin(t), _cos(t))

    def theta_prime(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See VariancePreserving."""
        return math.pi / 2 * self.d / self._norm(t)

    def log_snr(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See VariancePreserving."""
        return _clamp_log_snr(2 * (torch.log(_cos(t)) - torch.log(self.d * _sin(t))))

    def time(self, theta: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See VariancePreserving."""
        return _to_time(torch.sin(theta), self.d * _cos_of(theta))

    def _norm(self, t: Tensor) -> Tensor:
        return _cos(t).square() + (self.d * _sin(t)).square()


@final
@dataclass(frozen=True, kw_only=True)
class TanDAsPrinted(VariancePreserving):
    """log SNR = -d log tan(pi t / 2), that is tan(theta) = tan(pi t / 2)^(d/2): the paper's text; docs/math.md (18).

    theta' vanishes at both ends when d > 2, and `phi` divides by it. Near data sigma vanishes faster, so that theta'
    need only not be 0; near noise it is taken where log SNR is -LOG_SNR_BOUND.
    """

    d: float = 10.0
    name: Literal["tan_d_as_printed"] = "tan_d_as_printed"

    def __post_init__(self) -> None:
        if not 2 <= self.d <= 100:
            raise ValueError(f"d: {self.d} must be in [2, 100]; below 2 theta' is infinite at both ends")

    def alpha(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See VariancePreserving."""
        cos, sin = self._powers(t)
        return cos / torch.sqrt(cos.square() + sin.square())

    def sigma(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See VariancePreserving."""
        cos, sin = self._powers(t)
        return sin / torch.sqrt(cos.square() + sin.square())

    def theta(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See VariancePreserving."""
        cos, sin = self._powers(t)
        return torch.atan2(sin, cos)

    def theta_prime(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See VariancePreserving."""
        t = t.clamp(max=1 - 2 / math.pi * math.atan(math.exp(-LOG_SNR_BOUND / self.d)))
        cos, sin = self._powers(t)
        slope = torch.pow(_sin(t) * _cos(t), self.d / 2 - 1)
        return (math.pi / 4 * self.d * slope / (cos.square() + sin.square())).clamp(min=torch.finfo(t.dtype).tiny)

    def log_snr(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See VariancePreserving."""
        return _clamp_log_snr(self.d * (torch.log(_cos(t)) - torch.log(_sin(t))))

    def time(self, theta: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See VariancePreserving. Its slope is infinite at both ends when d > 2."""
        power = 2 / self.d
        return _to_time(torch.sin(theta).clamp(min=0) ** power, _cos_of(theta).clamp(min=0) ** power)

    def _powers(self, t: Tensor) -> tuple[Tensor, Tensor]:
        return torch.pow(_cos(t), self.d / 2), torch.pow(_sin(t), self.d / 2)


@final
@dataclass(frozen=True, kw_only=True)
class ErrorRate(VariancePreserving):
    """The schedule along which a fitted decoding error rises linearly in t; docs/math.md (19).

    The fit is w_min + (w_max - w_min) (1 + tanh(k (sigma^2 - t0))) / 2, rescaled so that t = 0 and t = 1 are exactly
    clean and noise. theta has infinite slope at both ends: sample in theta, not by Euler in t.
    """

    w_min: float
    w_max: float
    k: float
    t0: float
    name: Literal["error_rate"] = "error_rate"

    def __post_init__(self) -> None:
        if not self.w_min < self.w_max:
            raise ValueError(f"w_min: {self.w_min} must be below w_max = {self.w_max}: errors rise with the noise")
        if not 0 <= self.t0 <= 1.5:
            raise ValueError(f"t0: {self.t0} must be in [0, 1.5]; the paper's figure has .835")
        if not 0 < self.k * max(self.t0, 1 - self.t0) <= 40:
            raise ValueError(f"k: {self.k} must be above 0, with k t0 and k (1 - t0) up to 40; the paper's is 12 to 13")

    def alpha(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See VariancePreserving."""
        return torch.sqrt(self._variances(t)[0]).to(t.dtype)

    def sigma(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See VariancePreserving."""
        return torch.sqrt(self._variances(t)[1]).to(t.dtype)

    def theta(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See VariancePreserving."""
        kept, noise = self._variances(t)
        return torch.atan2(torch.sqrt(noise), torch.sqrt(kept)).to(t.dtype)

    def theta_prime(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See VariancePreserving. sigma^2 is kept MIN_VELOCITY_VARIANCE away from 0 and 1."""
        noise = self._variances(t)[1].clamp(MIN_VELOCITY_VARIANCE, 1 - MIN_VELOCITY_VARIANCE)
        (low, high), (rate, left) = self._ends(), self._rates(t)
        return ((high - low) / (4 * self.k * rate * left * torch.sqrt(noise * (1 - noise)))).to(t.dtype)

    def log_snr(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See VariancePreserving."""
        kept, noise = self._variances(t)
        return _clamp_log_snr(torch.log(kept) - torch.log(noise)).to(t.dtype)

    def time(self, theta: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See VariancePreserving."""
        low, high = self._ends()
        rate = torch.sigmoid(2 * self.k * (torch.sin(theta.double()).square() - self.t0))
        return ((rate - low) / (high - low)).clamp(0, 1).to(theta.dtype)

    def error(self, sigma2: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """The fitted decoding error at a noise variance."""
        return self.w_min + (self.w_max - self.w_min) * torch.sigmoid(2 * self.k * (sigma2 - self.t0))

    def _ends(self) -> tuple[float, float]:
        """The logistic at sigma^2 = 0 and 1."""
        return _logistic(-2 * self.k * self.t0), _logistic(2 * self.k * (1 - self.t0))

    def _lefts(self) -> tuple[float, float]:
        """One minus these, to full relative precision."""
        return _logistic(2 * self.k * self.t0), _logistic(-2 * self.k * (1 - self.t0))

    def _rates(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """The logistic at time t, linear in it, and one minus that; float64."""
        u, (low, high), (low_left, high_left) = t.double(), self._ends(), self._lefts()
        return (1 - u) * low + u * high, (1 - u) * low_left + u * high_left

    def _variances(self, t: Tensor) -> tuple[Tensor, Tensor]:
        """alpha^2 and sigma^2 in float64, each exactly 0 at its end: differences of logits, taken from that end."""
        u, (low, high), (low_left, high_left) = t.double(), self._ends(), self._lefts()
        rate, left = self._rates(t)
        noise = torch.log1p(u * ((high - low) / low)) - torch.log(left / low_left)
        kept = torch.log1p((1 - u) * ((high - low) / high_left)) - torch.log(rate / high)
        return (kept / (2 * self.k)).clamp(0, 1), (noise / (2 * self.k)).clamp(0, 1)


LatentSchedule = TanD | TanDAsPrinted | ErrorRate
"""The schedule of a latent process; told apart by `name`."""


def fit_error_rate(sigma2_N: Float[Tensor, " N"], error_N: Float[Tensor, " N"]) -> ErrorRate:
    """Least squares of the four-parameter tanh of docs/math.md (19) to decoding errors at noise variances.

    A grid over k and t0, where w_min and w_max follow by linear regression, then Levenberg-Marquardt on all four.
    """
    sigma2_N, error_N = sigma2_N.double().cpu(), error_N.double().cpu()
    if len(sigma2_N) < 5 or not bool(torch.isfinite(torch.stack((sigma2_N, error_N))).all()):
        raise ValueError(f"error_N: {len(error_N)} points, some perhaps not finite; give at least 5 finite ones")
    parameters_P = _first_fit(sigma2_N, error_N)
    damping, (loss, gradient_P, curvature_PP) = 1e-3, _normal_equations(parameters_P, sigma2_N, error_N)
    for _ in range(200):
        damped_PP = curvature_PP + damping * torch.diag(curvature_PP.diagonal() + 1e-12)
        moved_P = parameters_P - torch.linalg.solve(damped_PP, gradient_P)
        moved = _normal_equations(moved_P, sigma2_N, error_N)
        if moved[0] < loss:
            parameters_P, (loss, gradient_P, curvature_PP), damping = moved_P, moved, damping / 5
        else:
            damping *= 5
        if damping > 1e12:
            break
    w_min, w_max, log_k, t0 = parameters_P.tolist()
    try:
        return ErrorRate(w_min=w_min, w_max=w_max, k=math.exp(log_k), t0=t0)
    except ValueError as error:
        raise ValueError(f"error_N: no usable fit ({error}); measure more noise levels where it rises") from None


def _first_fit(sigma2_N: Tensor, error_N: Tensor) -> Tensor:
    """(w_min, w_max, log k, t0) of the grid's best cell."""
    log_k_G1, t0_G1 = (
        cells.reshape(-1, 1)
        for cells in torch.meshgrid(
            torch.linspace(0.0, math.log(64.0), 25, dtype=torch.float64),
            torch.linspace(0.0, 1.0, 41, dtype=torch.float64),
            indexing="ij",
        )
    )
    rate_GN = torch.sigmoid(2 * log_k_G1.exp() * (sigma2_N - t0_G1))
    mean_G = rate_GN.mean(1)
    centred_GN = rate_GN - mean_G[:, None]
    spread_G = centred_GN.square().sum(1) + 1e-12
    common_G = (centred_GN * (error_N - error_N.mean())).sum(1)
    best = int((common_G.clamp(min=0).square() / spread_G).argmax())
    slope = float(common_G[best] / spread_G[best])
    if not slope > 0:
        raise ValueError("error_N: the error does not rise with sigma2_N; measure both ends, 0 and 1, and between")
    w_min = float(error_N.mean()) - slope * float(mean_G[best])
    return torch.tensor([w_min, w_min + slope, float(log_k_G1[best, 0]), float(t0_G1[best, 0])], dtype=torch.float64)


def _normal_equations(parameters_P: Tensor, sigma2_N: Tensor, error_N: Tensor) -> tuple[float, Tensor, Tensor]:
    """The squared error of the fit, its gradient and its Gauss-Newton curvature."""
    w_min, w_max, log_k, t0 = parameters_P
    rate_N = torch.sigmoid(2 * log_k.exp() * (sigma2_N - t0))
    residual_N = w_min + (w_max - w_min) * rate_N - error_N
    slope_N = (w_max - w_min) * rate_N * (1 - rate_N) * 2 * log_k.exp()
    jacobian_NP = torch.stack((1 - rate_N, rate_N, slope_N * (sigma2_N - t0), -slope_N), dim=1)
    loss = float(residual_N.square().sum())
    return loss, jacobian_NP.T @ residual_N, jacobian_NP.T @ jacobian_NP


def _sin(t: Tensor) -> Tensor:
    return torch.sin(math.pi / 2 * t)


def _cos(t: Tensor) -> Tensor:
    """cos(pi t / 2), exactly 0 at t = 1 (float32's cos(pi / 2) is negative)."""
    return torch.sin(math.pi / 2 * (1 - t))


def _cos_of(theta: Tensor) -> Tensor:
    """cos(theta), exactly 0 at this dtype's pi / 2."""
    return torch.sin(math.pi / 2 - theta)


def _to_time(sin: Tensor, cos: Tensor) -> Tensor:
    return (2 / math.pi * torch.atan2(sin, cos)).clamp(0, 1)


def _clamp_log_snr(value: Tensor) -> Tensor:
    return value.clamp(-LOG_SNR_BOUND, LOG_SNR_BOUND)


def _logistic(x: float) -> float:
    """1 / (1 + exp(-x)) to full relative precision; |x| is at most 80 here."""
    return 1 / (1 + math.exp(-x))
