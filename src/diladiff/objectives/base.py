"""What the engine asks of anything that can be trained.

An objective is a module whose `forward` is the loss; the engine wraps it (DDP) or shards its blocks (FSDP2),
accumulates, clips, averages and checkpoints it without knowing what it is.
"""

import abc
from typing import NamedTuple

from torch import Tensor, nn


class Batch(NamedTuple):
    """A micro-batch: tokens, each row's place in the global batch, and the size of that global batch."""

    tokens_BL: Tensor
    index_B: Tensor
    size: int


class Step(NamedTuple):
    """When a loss is taken: the run's seed and the step's number (a 0-dim int64 tensor, so graphs are reused)."""

    seed: int
    number: Tensor


Measured = dict[str, tuple[Tensor, Tensor]]
"""Name -> (sum, count): what can be added over micro-batches and ranks before it is divided."""


class LossTerms(NamedTuple):
    """A loss as a sum and its count, so that the engine can reduce first and divide once."""

    total: Tensor
    weight: Tensor
    metrics: Measured


class ParamGroup(NamedTuple):
    """Parameters that share a rate (times the optimiser's), a warm-up (None: the optimiser's) and weight decay."""

    name: str
    params: list[tuple[str, nn.Parameter]]
    lr_scale: float = 1.0
    warmup_steps: int | None = None
    decay: bool = True


class Target(NamedTuple):
    """An exponential average of parameters, by name, that the engine updates after each step and checkpoints."""

    params: dict[str, nn.Parameter]
    average: dict[str, Tensor]
    decay: float


class Objective(nn.Module, abc.ABC):
    """A loss with its networks. Sub-classes are final; all of these methods are theirs to write."""

    @abc.abstractmethod
    def forward(self, batch: Batch, step: Step) -> LossTerms:
        """The loss of a micro-batch, a function of the parameters, the batch and the step alone."""

    @abc.abstractmethod
    def blocks(self) -> list[nn.Module]:
        """The units that are compiled and sharded one by one, in the order in which they run."""

    @abc.abstractmethod
    def groups(self) -> list[ParamGroup]:
        """The trainable parameters, each in exactly one group."""

    @abc.abstractmethod
    def frozen(self) -> dict[str, str]:
        """What is used but not trained: name -> hash of its weights; part of a run's identity."""

    @abc.abstractmethod
    def targets(self) -> dict[str, Target]:
        """Averages of the parameters that the loss itself reads."""

    @abc.abstractmethod
    def after_step(self, step: Step) -> None:
        """What changes after an update, without a gradient (running statistics, rounds)."""

    @abc.abstractmethod
    def validate(self, batch: Batch, step: Step) -> Measured:
        """Measurements on held-out data, on a fixed grid of times, without a gradient."""

    @abc.abstractmethod
    def flops_per_token(self) -> float:
        """Floating-point operations of one training step a token, forward and backward."""
