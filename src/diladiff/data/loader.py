"""Training batches as a pure function of (seed, step), whatever the number of ranks, fetched ahead by a thread.

Sample j = step * global_batch + i of the one global stream reads block permute(j mod N) of epoch j div N.
"""

import itertools
from collections import deque
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple, final

import numpy as np
import torch
from torch import Tensor

from diladiff.data.shards import TokenDataset
from diladiff.rng import permute

PREFETCH_STEPS = 4
PLANNED_SAMPLES = 1 << 14


class RawBatch(NamedTuple):
    """A micro-batch: tokens, each row's place in the global batch, and the size of that global batch."""

    tokens_BL: Tensor
    index_B: Tensor
    size: int


@final
class Loader:
    """Iterating yields, step after step and without end, this rank's micro-batches.

    A rank takes an aligned contiguous run of the global batch and each micro-batch an aligned run of that.
    """

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        global_batch: int,
        micro_batch: int,
        rank: int = 0,
        world: int = 1,
        seed: int,
        start_step: int = 0,
        device: torch.device | str = "cpu",
    ) -> None:
        _check_split(global_batch, rank, world)
        if not _power_of_two(micro_batch) or micro_batch > global_batch // world:
            raise ValueError(
                f"micro_batch {micro_batch}: must be a power of two, at most global_batch / world "
                f"= {global_batch // world}"
            )
        self.dataset, self.global_batch, self.micro_batch = dataset, global_batch, micro_batch
        self.rank, self.world, self.seed, self.start_step = rank, world, seed, start_step
        self.device = torch.device(device)

    def indices(self, step: int) -> np.ndarray:
        """The blocks that this rank reads at a step, in order."""
        return next(self._orders(step, 1))

    def __iter__(self) -> Iterator[list[RawBatch]]:
        reader = ThreadPoolExecutor(1, "diladiff-loader")  # what fails in it is raised where its batch is wanted
        # A permutation costs 10 ms however few are asked for, so many steps are planned at once, an epoch at most.
        planned = max(1, min(PLANNED_SAMPLES, len(self.dataset)) // self.global_batch)
        orders = self._orders(self.start_step, planned)
        ahead = deque(reader.submit(self._read, orders) for _ in range(PREFETCH_STEPS))
        try:
            while True:
                found = ahead.popleft().result()
                ahead.append(reader.submit(self._read, orders))
                yield [self._to_device(batch) for batch in found]
        finally:
            for future in ahead:
                future.cancel()
            reader.shutdown()

    def _orders(self, start_step: int, planned: int) -> Iterator[np.ndarray]:
        """This rank's blocks, step after step."""
        run = self.global_batch // self.world
        own = np.arange(planned)[:, None] * self.global_batch + np.arange(self.rank * run, (self.rank + 1) * run)
        for step in itertools.count(start_step, planned):
            order = block_order(step * self.global_batch + own.ravel(), len(self.dataset), self.seed)
            yield from order.reshape(planned, run)

    def _read(self, orders: Iterator[np.ndarray]) -> list[RawBatch]:
        tokens_BL = torch.from_numpy(self.dataset.blocks(next(orders)))
        index_B = torch.arange(len(tokens_BL)) + self.rank * len(tokens_BL)
        if self.device.type == "cuda":
            tokens_BL, index_B = tokens_BL.pin_memory(), index_B.pin_memory()
        starts = range(0, len(tokens_BL), self.micro_batch)
        rows = [slice(start, start + self.micro_batch) for start in starts]
        return [RawBatch(tokens_BL[row], index_B[row], self.global_batch) for row in rows]

    def _to_device(self, batch: RawBatch) -> RawBatch:
        if self.device.type == "cpu":
            return batch
        tokens_BL = batch.tokens_BL.to(self.device, non_blocking=True)
        return RawBatch(tokens_BL, batch.index_B.to(self.device, non_blocking=True), batch.size)


def block_order(samples: np.ndarray, blocks: int, seed: int) -> np.ndarray:
    """The blocks that some samples of the global stream read; each epoch of the stream reads every block once."""
    epochs, places = samples // blocks, samples % blocks
    order = np.empty(len(samples), dtype=np.int64)
    for epoch in np.unique(epochs).tolist():
        here = epochs == epoch
        order[here] = permute(torch.from_numpy(places[here]), blocks, seed, epoch).numpy()
    return order


def validation_batches(
    dataset: TokenDataset,
    batch: int,
    rank: int = 0,
    world: int = 1,
    limit_blocks: int | None = None,
    device: torch.device | str = "cpu",
) -> Iterator[RawBatch]:
    """The first blocks of a split in order, `batch` (of all ranks together) at a time; a partial batch is left out.

    A split smaller than a batch is read as one batch of the largest power of two that it fills. Rows are numbered
    through the whole split, so that what is measured does not hang on the batch that it is read in.
    """
    blocks = len(dataset) if limit_blocks is None else min(limit_blocks, len(dataset))
    if blocks < 1:
        raise ValueError(f"limit_blocks {limit_blocks}: must be at least 1")
    while batch > blocks:
        batch //= 2
    _check_split(batch, rank, world)
    run = batch // world
    index_B = torch.arange(rank * run, (rank + 1) * run)
    for start in range(0, blocks - batch + 1, batch):
        tokens_BL = torch.from_numpy(dataset.blocks(start + index_B.numpy()))
        yield RawBatch(tokens_BL.to(device), (start + index_B).to(device), batch)


def _check_split(batch: int, rank: int, world: int) -> None:
    if not _power_of_two(batch):
        raise ValueError(f"global_batch {batch}: must be a power of two (stratified time needs it)")
    if not _power_of_two(world) or world > batch:
        raise ValueError(f"world {world}: the number of ranks must be a power of two, at most the batch {batch}")
    if not 0 <= rank < world:
        raise ValueError(f"rank {rank}: must lie in [0, {world})")


def _power_of_two(number: int) -> bool:
    return number > 0 and number & (number - 1) == 0
