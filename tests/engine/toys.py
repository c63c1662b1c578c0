"""Objectives of a few numbers, on which the engine's arithmetic can be checked by hand."""

from collections.abc import Iterator
from typing import final

import torch
from torch import Tensor, nn

from diladiff.objectives.base import Batch, LossTerms, Measured, Objective, ParamGroup, Step, Target


@final
class Regression(Objective):
    """Squared error of a linear map, with a target, a running statistic, a frozen part and two groups."""

    def __init__(self, *, bad_sample: tuple[int, int] | None = None, bad_gradient: bool = False):
        super().__init__()
        self.linear = nn.Linear(4, 1)
        self.slow = nn.Linear(4, 1, bias=False).requires_grad_(False)
        self.still = nn.Linear(4, 4).requires_grad_(False)
        nn.init.constant_(self.linear.weight, 1.0)
        nn.init.constant_(self.linear.bias, 0.5)
        nn.init.zeros_(self.slow.weight)
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("scratch", torch.zeros(()), persistent=False)
        self.bad_sample, self.bad_gradient = bad_sample, bad_gradient
        self.mean: Tensor
        self._seen = torch.zeros(4)

    def forward(self, batch: Batch, step: Step) -> LossTerms:
        """Each row's first four tokens are the input, the fifth the output."""
        x_BD, y_B = batch.tokens_BL[:, :4].float(), batch.tokens_BL[:, 4].float()
        error_B = self.linear(x_BD)[:, 0] - y_B
        if self.bad_sample is not None:
            when, place = self.bad_sample
            bad_B = (batch.index_B == place) & (step.number == when)
            error_B = torch.where(bad_B, torch.nan, error_B)
        if self.bad_gradient:
            # sqrt has an infinite slope at 0, where it is 0 itself.
            error_B = error_B + (self.linear.bias * 0).sqrt()
        self._seen = self._seen + x_BD.sum(0)
        total = error_B.square().sum()
        weight = torch.full_like(total, len(y_B))
        return LossTerms(total, weight, {"error": (error_B.detach().abs().sum(), weight)})

    def blocks(self) -> list[nn.Module]:
        """The linear map."""
        return [self.linear]

    def groups(self) -> list[ParamGroup]:
        """Weight and bias apart."""
        return [
            ParamGroup("weight", [("linear.weight", self.linear.weight)]),
            ParamGroup("bias", [("linear.bias", self.linear.bias)], lr_scale=0.5, warmup_steps=4, decay=False),
        ]

    def frozen(self) -> dict[str, str]:
        """The part that stands still."""
        return {"still": "0123"}

    def targets(self) -> dict[str, Target]:
        """A slow copy of the weight."""
        return {"slow": Target({"w": self.linear.weight}, {"w": self.slow.weight}, 0.9)}

    def after_step(self, step: Step) -> None:
        """Take in the sum of the inputs."""
        self.mean.add_(self._seen)
        self._seen = torch.zeros(4)

    @torch.no_grad()
    def validate(self, batch: Batch, step: Step) -> Measured:
        """The sum of the weights, so that it is seen which are in place."""
        assert not self.training
        return {"val_weights": (self.linear.weight.sum(), torch.ones(()))}

    def flops_per_token(self) -> float:
        """Any number."""
        return 100.0


def batches(start: int, *, size: int = 4, micro: int = 4) -> Iterator[list[Batch]]:
    """Micro-batches of random rows, a function of the step."""
    step = start
    while True:
        rows = torch.randint(0, 5, (size, 5), generator=torch.Generator().manual_seed(step))
        places = torch.arange(size)
        yield [Batch(rows[i : i + micro], places[i : i + micro], size) for i in range(0, size, micro)]
        step += 1
