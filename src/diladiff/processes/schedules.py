"""Masking schedules: alpha_t, the probability that a token is still there at time t (docs/math.md (2)).

t = 0 is data (alpha = 1), t = 1 is noise. `mask_rate` is 1 - alpha without float32's cancellation near t = 0.
"""

import abc
import math
from typing import Literal, final

import torch
from jaxtyping import Float
from torch import Tensor

MaskScheduleName = Literal["linear", "cosine", "log_linear"]


class MaskSchedule(abc.ABC):
    """A decreasing alpha on [0, 1] with its derivative and inverse, docs/math.md (2)."""

    name: MaskScheduleName

    @abc.abstractmethod
    def alpha(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """The probability that a token is still unmasked at time t."""

    @abc.abstractmethod
    def alpha_prime(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """The derivative of alpha in t (negative)."""

    @abc.abstractmethod
    def mask_rate(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """1 - alpha(t), to full relative precision."""

    @abc.abstractmethod
    def inverse(self, alpha: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """The time at which alpha has this value."""


@final
class Linear(MaskSchedule):
    """alpha = 1 - t: the paper's."""

    name: MaskScheduleName = "linear"

    def alpha(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See MaskSchedule."""
        return 1 - t

    def alpha_prime(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See MaskSchedule."""
        return torch.full_like(t, -1.0)

    def mask_rate(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See MaskSchedule."""
        return t.clone()

    def inverse(self, alpha: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See MaskSchedule."""
        return 1 - alpha


@final
class Cosine(MaskSchedule):
    """alpha = cos(pi t / 2): MDLM's cosine noise without its epsilon."""

    name: MaskScheduleName = "cosine"

    def alpha(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See MaskSchedule. As sin(pi (1 - t) / 2): float32's cos(pi / 2) is negative, and alpha(1) must be 0."""
        return torch.sin(math.pi / 2 * (1 - t))

    def alpha_prime(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See MaskSchedule."""
        return -math.pi / 2 * torch.sin(math.pi / 2 * t)

    def mask_rate(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See MaskSchedule. 1 - cos x = 2 sin^2(x / 2), at most 1 after rounding."""
        return (2 * torch.sin(math.pi / 4 * t).square()).clamp(max=1.0)

    def inverse(self, alpha: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See MaskSchedule. x = 2 asin(sqrt((1 - cos x) / 2)) keeps its precision at small x, as acos does not."""
        return 4 / math.pi * torch.asin(torch.sqrt((1 - alpha) / 2))


@final
class LogLinear(MaskSchedule):
    """alpha = 1 - (1 - 1e-3) t: SEDD's and MDLM's log-linear noise, which leaves a thousandth unmasked at t = 1."""

    name: MaskScheduleName = "log_linear"
    epsilon = 1e-3

    def alpha(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See MaskSchedule. As (1 - t) + epsilon t, exact at both ends."""
        return (1 - t) + self.epsilon * t

    def alpha_prime(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See MaskSchedule."""
        return torch.full_like(t, self.epsilon - 1)

    def mask_rate(self, t: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See MaskSchedule."""
        return (1 - self.epsilon) * t

    def inverse(self, alpha: Float[Tensor, "*S"]) -> Float[Tensor, "*S"]:
        """See MaskSchedule. Clamped to 1: a process that starts all masked begins below this alpha's range."""
        return ((1 - alpha) / (1 - self.epsilon)).clamp(max=1.0)


_SCHEDULES: dict[str, MaskSchedule] = {"linear": Linear(), "cosine": Cosine(), "log_linear": LogLinear()}

MASK_SCHEDULES: tuple[MaskScheduleName, ...] = ("linear", "cosine", "log_linear")


def mask_schedule(name: str) -> MaskSchedule:
    """The schedule of this name, docs/math.md (2)."""
    if name not in _SCHEDULES:
        raise ValueError(f"schedule = {name!r} is not known; use one of {', '.join(MASK_SCHEDULES)}")
    return _SCHEDULES[name]
