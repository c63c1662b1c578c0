"""An exact continuous world: a mixture of isotropic Gaussians whose law at every angle is a mixture again.

z_theta = cos(theta) z + sin(theta) eps. Denoiser, velocity and density are sums over components; in one dimension the
probability-flow ODE keeps each point's quantile, so its flow and the average velocity are known to rounding, with
derivatives. All in float64; points are (N, E), angles (N,).
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

HALF_TURN = math.pi / 2

KOLMOGOROV = 1.95
"""The .1 % point of `distance` for draws of the law itself."""


@dataclass(frozen=True)
class Mixture:
    """Weights (J,), means (J, E) and standard deviations (J,)."""

    weight_J: Tensor
    mean_JE: Tensor
    std_J: Tensor

    def log_density(self, z_NE: Tensor, theta_N: Tensor) -> Tensor:
        """log p_theta(z)."""
        return self._log_joint(z_NE, theta_N).logsumexp(1)

    def denoise(self, z_NE: Tensor, theta_N: Tensor) -> Tensor:
        """E[z | z_theta]."""
        clean_NJE, _ = self._given_component(z_NE, theta_N)
        return (self._log_joint(z_NE, theta_N).softmax(1)[..., None] * clean_NJE).sum(1)

    def angular(self, z_NE: Tensor, theta_N: Tensor) -> Tensor:
        """dz/dtheta = E[cos(theta) eps - sin(theta) z | z_theta], regular at both ends."""
        clean_NJE, eps_NJE = self._given_component(z_NE, theta_N)
        mean_NJE = theta_N.cos()[:, None, None] * eps_NJE - theta_N.sin()[:, None, None] * clean_NJE
        return (self._log_joint(z_NE, theta_N).softmax(1)[..., None] * mean_NJE).sum(1)

    def draw(self, uniform_N: Tensor, normal_NE: Tensor) -> Tensor:
        """Points of the data's law."""
        component_N = torch.searchsorted(self.weight_J.cumsum(0), uniform_N).clamp(max=len(self.weight_J) - 1)
        return self.mean_JE[component_N] + self.std_J[component_N, None] * normal_NE

    def quantile(self, z_NE: Tensor, theta_N: Tensor) -> Tensor:
        """The distribution function at z, in one dimension."""
        return (self.weight_J * torch.special.ndtr(self._standardised(z_NE, theta_N)[..., 0])).sum(1)

    def point(self, quantile_N: Tensor, theta_N: Tensor) -> Tensor:
        """The z of a quantile, in one dimension; derivatives by one Newton step from the bisection's end."""
        fixed_N, at_N = quantile_N.detach(), theta_N.detach()

        def above(z_N1: Tensor) -> Tensor:
            return self.quantile(z_N1, at_N) > fixed_N

        z_N1 = _bisect(above, len(quantile_N))
        slope_N = self.log_density(z_N1, at_N).exp()
        return z_N1 - ((self.quantile(z_N1, theta_N) - quantile_N) / slope_N)[:, None]

    def flow(self, z_NE: Tensor, theta_t_N: Tensor, theta_r_N: Tensor) -> Tensor:
        """Where the ODE leads z from one angle to another, in one dimension."""
        return self.point(self.quantile(z_NE, theta_t_N), theta_r_N)

    def average(self, z_NE: Tensor, theta_t_N: Tensor, theta_r_N: Tensor) -> Tensor:
        """The average velocity in angle, in one dimension; the instantaneous one at r = t."""
        delta_N1 = (theta_t_N - theta_r_N)[:, None]
        far_N1 = delta_N1.abs() > 1e-12
        moved_NE = z_NE - self.flow(z_NE, theta_t_N, theta_r_N)
        return torch.where(far_N1, moved_NE / torch.where(far_N1, delta_N1, 1.0), self.angular(z_NE, theta_t_N))

    def undo_denoise(self, clean_NE: Tensor, theta_N: Tensor) -> Tensor:
        """The z_theta of this E[z | z_theta], in one dimension, where it is increasing; with derivatives."""
        fixed_N1, at_N = clean_NE.detach(), theta_N.detach()
        z_N1 = _bisect(lambda z_N1: (self.denoise(z_N1, at_N) > fixed_N1)[:, 0], len(clean_NE))
        _, slope_N1 = torch.func.jvp(lambda z: self.denoise(z, at_N), (z_N1,), (torch.ones_like(z_N1),))
        return z_N1 - (self.denoise(z_N1, theta_N) - clean_NE) / slope_N1

    def _variance(self, theta_N: Tensor) -> Tensor:
        return (theta_N.cos()[:, None] * self.std_J).square() + theta_N.sin()[:, None].square()

    def _offset(self, z_NE: Tensor, theta_N: Tensor) -> Tensor:
        return z_NE[:, None] - theta_N.cos()[:, None, None] * self.mean_JE

    def _standardised(self, z_NE: Tensor, theta_N: Tensor) -> Tensor:
        return self._offset(z_NE, theta_N) / self._variance(theta_N).sqrt()[..., None]

    def _log_joint(self, z_NE: Tensor, theta_N: Tensor) -> Tensor:
        """log of weight times density, (N, J)."""
        square_NJ = self._standardised(z_NE, theta_N).square().sum(-1)
        width = self.mean_JE.shape[1]
        return self.weight_J.log() - 0.5 * (square_NJ + width * (2 * math.pi * self._variance(theta_N)).log())

    def _given_component(self, z_NE: Tensor, theta_N: Tensor) -> tuple[Tensor, Tensor]:
        """E[z | z_theta, j] and E[eps | z_theta, j], each (N, J, E)."""
        scaled_NJE = self._offset(z_NE, theta_N) / self._variance(theta_N)[..., None]
        clean_NJE = self.mean_JE + theta_N.cos()[:, None, None] * self.std_J.square()[:, None] * scaled_NJE
        return clean_NJE, theta_N.sin()[:, None, None] * scaled_NJE


def line() -> Mixture:
    """Three components on a line."""
    return Mixture(_double(0.3, 0.5, 0.2), _double(-1.2, 0.4, 1.6)[:, None], _double(0.3, 0.4, 0.25))


def two_modes() -> Mixture:
    """Two narrow components on a line, far apart: predictions hang steeply on the state."""
    return Mixture(_double(0.5, 0.5), _double(-1.0, 1.0)[:, None], _double(0.1, 0.1))


def plane() -> Mixture:
    """Three components in a plane."""
    means_JE = torch.stack((_double(-1.0, 0.5, 0.8), _double(0.3, 1.1, -1.2)), dim=1)
    return Mixture(_double(0.3, 0.5, 0.2), means_JE, _double(0.4, 0.5, 0.6))


def normals(count: int) -> Tensor:
    """A standard normal's quantiles at the middles of `count` equal cells, (N, 1)."""
    return torch.special.ndtri((torch.arange(count, dtype=torch.float64) + 0.5) / count)[:, None]


def distance(world: Mixture, z_N1: Tensor) -> float:
    """Kolmogorov's distance of points on a line from the world's law, times the root of their number."""
    quantile_N = world.quantile(z_N1.double(), torch.zeros(len(z_N1), dtype=torch.float64)).sort().values
    even_N = (torch.arange(len(z_N1), dtype=torch.float64) + 0.5) / len(z_N1)
    return float((quantile_N - even_N).abs().max()) * math.sqrt(len(z_N1))


def runge_kutta(slope: Callable[[Tensor, Tensor], Tensor], y: Tensor, start: float, end: float, steps: int) -> Tensor:
    """Integrate dy/dx = slope(x, y) by the classical method of order 4; x is handed on as a tensor without axes."""
    width = (end - start) / steps
    for i in range(steps):
        x = torch.tensor(start + i * width, dtype=torch.float64)
        first = slope(x, y)
        second = slope(x + width / 2, y + width / 2 * first)
        third = slope(x + width / 2, y + width / 2 * second)
        fourth = slope(x + width, y + width * third)
        y = y + width / 6 * (first + 2 * second + 2 * third + fourth)
    return y


def _bisect(above: Callable[[Tensor], Tensor], count: int) -> Tensor:
    """Where an increasing function of points on a line crosses, between -64 and 64 to the last bit, (N, 1)."""
    low_N1, high_N1 = torch.full((count, 1), -64.0).double(), torch.full((count, 1), 64.0).double()
    for _ in range(64):
        middle_N1 = (low_N1 + high_N1) / 2
        above_N1 = above(middle_N1)[:, None]
        low_N1, high_N1 = torch.where(above_N1, low_N1, middle_N1), torch.where(above_N1, middle_N1, high_N1)
    return (low_N1 + high_N1) / 2


def _double(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)
