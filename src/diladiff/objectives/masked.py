"""Masked diffusion: cross-entropy of the clean tokens where they are masked (docs/math.md (5), (7)).

t = 0 is data, t = 1 is all masked. Every random number is keyed by the run's seed, the step and the sample's place in
the global batch, so that ranks and micro-batches see what one process would see.
"""

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from diladiff import rng
from diladiff.models.token_transformer import TokenTransformerConfig
from diladiff.objectives.base import Batch, LossTerms, Measured, Objective, ParamGroup, Step, Target
from diladiff.processes import masked, times
from diladiff.processes.schedules import MASK_SCHEDULES, MaskSchedule, mask_schedule

VALIDATION_SEED = 0
VALIDATION_STRATA = 64


@dataclass(frozen=True, kw_only=True)
class MaskedConfig:
    """A masked diffusion loss and its network."""

    model: TokenTransformerConfig
    weight: Literal["flat", "elbo"] = "flat"
    schedule: Literal["linear", "cosine", "log_linear"] = "linear"
    name: Literal["masked"] = "masked"

    def __post_init__(self) -> None:
        if self.weight not in ("flat", "elbo"):
            raise ValueError(f"weight is {self.weight!r}: give 'flat' or 'elbo'")
        if self.schedule not in MASK_SCHEDULES:
            raise ValueError(f"schedule is {self.schedule!r}: give one of {', '.join(MASK_SCHEDULES)}")

    def build(self) -> "MaskedObjective":
        """The objective with a freshly initialised network, on the current default device."""
        return MaskedObjective(self)


class Corrupted(NamedTuple):
    """Tokens with masks, their times, and the masked positions in a fixed number of rows."""

    noisy_BL: Tensor
    t_B: Tensor
    index_N: Tensor
    valid_N: Tensor
    overflow: Tensor


class Corruption(nn.Module):
    """What is drawn in a step. A block without parameters, so that, compiled, the generator is a few kernels."""

    def __init__(self, schedule: MaskSchedule, mask_id: int):
        super().__init__()
        self.schedule = schedule
        self.mask_id = mask_id

    def forward(
        self,
        tokens_BL: Int[Tensor, "B L"],
        index_B: Int[Tensor, " B"],
        number: Int[Tensor, ""],
        *,
        seed: int,
        size: int,
        rows: int,
    ) -> Corrupted:
        """Corrupt each sample at its stratified time and find what is masked."""
        length = tokens_BL.shape[1]
        first = torch.zeros(1, dtype=torch.int64, device=tokens_BL.device)
        u = rng.uniform(seed, rng.Stream.TIME, number, first, 1)[0, 0]
        t_B = times.stratified(u, index_B, size)
        noise_BL = rng.uniform(seed, rng.Stream.MASK, number, index_B, length)
        noisy_BL = masked.corrupt(tokens_BL, t_B, noise_BL, schedule=self.schedule, mask_id=self.mask_id)
        return Corrupted(noisy_BL, t_B, *masked.masked_rows(noisy_BL == self.mask_id, rows))


def row_loss(
    logits_NV: Float[Tensor, "N V"], targets_N: Int[Tensor, " N"]
) -> tuple[Float[Tensor, " N"], Bool[Tensor, " N"]]:
    """Cross-entropy in at least float32 and whether the largest logit is right, row by row."""
    precision = torch.promote_types(logits_NV.dtype, torch.float32)
    losses_N = F.cross_entropy(logits_NV.to(precision), targets_N, reduction="none")
    return losses_N, logits_NV.detach().argmax(dim=-1) == targets_N


class RowLoss(nn.Module):
    """row_loss without parameters, declared as a block so that, compiled, float32 logits are never stored."""

    def forward(self, logits_NV: Tensor, targets_N: Tensor) -> tuple[Tensor, Tensor]:
        """Loss and correctness of each row."""
        return row_loss(logits_NV, targets_N)


class MaskedObjective(Objective):
    """Stratified times over the global batch, one corruption a sample, the head on the masked rows alone."""

    def __init__(self, config: MaskedConfig):
        super().__init__()
        self.config = config
        self.model = config.model.build()
        self.schedule = mask_schedule(config.schedule)
        self.corruption = Corruption(self.schedule, config.model.mask_id)
        self.row_loss = RowLoss()

    def forward(self, batch: Batch, step: Step) -> LossTerms:
        """The loss, summed over masked positions, with the count of all positions as its weight.

        The masked rows are padded to a fixed count, so nothing waits for the device. A batch that is no aligned run
        of the global one can exceed it: its loss is then infinite.
        """
        _check_power_of_two(batch)
        tokens_BL, index_B, size = batch
        length = tokens_BL.shape[1]
        rows = masked.masked_rows_bound(self.schedule, len(tokens_BL), length)
        drawn = self.corruption(tokens_BL, index_B, step.number, seed=step.seed, size=size, rows=rows)
        noisy_BL, t_B, index_N, valid_N, overflow = drawn
        losses_N, correct_N = self.row_loss(self._logits(noisy_BL, t_B, index_N), tokens_BL.flatten()[index_N])
        weight_B = masked.loss_weight(self.config.weight, self.schedule, t_B)
        total = torch.where(valid_N, losses_N * weight_B[index_N // length], 0.0).sum()
        total = torch.where(overflow, math.inf, total)
        weight = torch.full_like(total, tokens_BL.numel())
        accuracy = ((correct_N & valid_N).sum().float(), valid_N.sum().float())
        return LossTerms(total, weight, {"loss": (total.detach(), weight), "accuracy": accuracy})

    @torch.no_grad()
    def validate(self, batch: Batch, step: Step) -> Measured:
        """The same measurement at every step and of any number of samples; the caller has put the module in eval mode.

        Masking rates m are stratified over each 64 neighbours and exactly k = 1 + floor(m L) positions are masked. With
        c_k the mean cross-entropy there, val_nll is the discrete bound E_k[c_k] (docs/math.md (6)), nats a token under
        any schedule, and val_loss the flat loss E_t[m c_k] (docs/math.md (7), to O(1/L): there k is random given m).
        """
        tokens_BL, index_B, _ = batch
        length = tokens_BL.shape[1]
        zero = torch.zeros_like(step.number)
        jitter_B = rng.uniform(VALIDATION_SEED, rng.Stream.TIME, zero, index_B, 1)[:, 0]
        stratum_B = times.bit_reverse(index_B % VALIDATION_STRATA, VALIDATION_STRATA.bit_length() - 1)
        rate_B = ((stratum_B + jitter_B) / VALIDATION_STRATA).clamp(min=1e-4)
        t_B = self.schedule.inverse(1 - rate_B)
        k_B = (1 + (rate_B * length).long()).clamp(max=length)
        noise_BL = rng.uniform(VALIDATION_SEED, rng.Stream.MASK, zero, index_B, length)
        masked_BL = noise_BL.argsort(dim=1, stable=True).argsort(dim=1) < k_B[:, None]
        noisy_BL = tokens_BL.masked_fill(masked_BL, self.config.model.mask_id)
        index_N = masked_BL.flatten().nonzero()[:, 0]
        losses_N, correct_N = row_loss(self._logits(noisy_BL, t_B, index_N), tokens_BL.flatten()[index_N])
        mean_B = losses_N.new_zeros(len(tokens_BL)).index_add(0, index_N // length, losses_N) / k_B
        count = torch.full_like(mean_B[0], tokens_BL.numel())
        return {
            "val_loss": (length * (mean_B * rate_B / -self.schedule.alpha_prime(t_B)).sum(), count),
            "val_nll": (length * mean_B.sum(), count),
            "val_accuracy": (correct_N.sum().float(), k_B.sum().float()),
        }

    def _logits(self, noisy_BL: Tensor, t_B: Tensor, index_N: Tensor) -> Tensor:
        return self.model.padded_head(self.model.trunk(noisy_BL, t_B).flatten(0, 1)[index_N])

    def blocks(self) -> list[nn.Module]:
        """The corruption, the network's blocks, the loss of the rows."""
        return [self.corruption, *self.model.blocks(), self.row_loss]

    def groups(self) -> list[ParamGroup]:
        """Matrices decay; embeddings, norms and biases don't."""
        matrices = {f"{name}.weight" for name, module in self.named_modules() if isinstance(module, nn.Linear)}
        params = list(self.named_parameters())
        return [
            ParamGroup("matrices", [(name, p) for name, p in params if name in matrices], decay=True),
            ParamGroup("others", [(name, p) for name, p in params if name not in matrices], decay=False),
        ]

    def frozen(self) -> dict[str, str]:
        """Nothing."""
        return {}

    def targets(self) -> dict[str, Target]:
        """None."""
        return {}

    def after_step(self, step: Step) -> None:
        """Nothing changes."""

    def flops_per_token(self) -> float:
        """Six a weight that multiplies every position, 12 L D a layer for attention, the head at the mean masking rate.

        What is computed once a sequence (time conditioning) is not counted.
        """
        model = self.config.model
        weights = model.layers * (4 + 2 * model.mlp_ratio) * model.width**2
        attention = model.layers * 12 * model.length * model.width
        midpoints = (torch.arange(1024, dtype=torch.float64, device="cpu") + 0.5) / 1024
        rate = float(self.schedule.mask_rate(midpoints).mean())
        return 6 * weights + attention + 6 * rate * model.width * model.vocab_size


def _check_power_of_two(batch: Batch) -> None:
    for name, number in (("a micro-batch", len(batch.tokens_BL)), ("the global batch", batch.size)):
        if number < 1 or number & (number - 1):
            raise ValueError(f"{name} has {number} samples: give a power of two, times are stratified by bit reversal")
