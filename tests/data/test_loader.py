"""The loader: one global stream for any number of ranks, each block once an epoch, resumable at any step, fast."""

import itertools
import threading
import time
from pathlib import Path

import numpy as np
import pytest
import torch

from diladiff.data.loader import Loader, RawBatch, block_order, validation_batches
from diladiff.data.shards import Meta, ShardWriter, TokenDataset, map_shard

META = Meta(
    vocab_size=4096, mask_id=1, end_id=2, separator_id=2, pad_id=0, fingerprint="f", packing="joined", length=None
)


def numbered(blocks: int, length: int = 4) -> TokenDataset:
    """A data set whose block i holds nothing but i."""
    tokens = np.repeat(np.arange(blocks, dtype=np.uint16), length)
    return TokenDataset(Path("memory"), "train", length, META, [tokens])


def read(loader: Loader, steps: int) -> list[list[RawBatch]]:
    return list(itertools.islice(loader, steps))


@pytest.mark.parametrize("blocks", [5, 64, 100])
def test_an_epoch_reads_every_block_once(blocks: int) -> None:
    order = block_order(np.arange(3 * blocks), blocks, seed=3)
    epochs = [order[e * blocks : (e + 1) * blocks].tolist() for e in range(3)]
    assert all(sorted(epoch) == list(range(blocks)) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2]
    assert block_order(np.arange(blocks), blocks, seed=4).tolist() != epochs[0]


@pytest.mark.parametrize(("world", "micro_batch"), [(1, 8), (2, 1), (2, 2), (4, 2), (8, 1)])
def test_ranks_share_one_stream(world: int, micro_batch: int) -> None:
    """Whatever the split, step s reads samples 8 s .. 8 s + 7 of the stream, and each row knows its place."""
    dataset, steps = numbered(37), 7
    seen = np.full((steps, 8), -1)
    for rank in range(world):
        loader = Loader(dataset, global_batch=8, micro_batch=micro_batch, rank=rank, world=world, seed=1)
        for step, batches in enumerate(read(loader, steps)):
            assert len(batches) == 8 // world // micro_batch
            for batch in batches:
                assert batch.size == 8
                assert (seen[step, batch.index_B.numpy()] == -1).all()
                seen[step, batch.index_B.numpy()] = batch.tokens_BL[:, 0].numpy()
    np.testing.assert_array_equal(seen.ravel(), block_order(np.arange(8 * steps), 37, seed=1))


def test_a_resumed_stream_goes_on_exactly() -> None:
    dataset = numbered(37)
    straight = read(Loader(dataset, global_batch=8, micro_batch=4, seed=1), 9)
    resumed = read(Loader(dataset, global_batch=8, micro_batch=4, seed=1, start_step=6), 3)
    for left, right in zip(itertools.chain(*straight[6:]), itertools.chain(*resumed), strict=True):
        torch.testing.assert_close(left.tokens_BL, right.tokens_BL, rtol=0, atol=0)
        torch.testing.assert_close(left.index_B, right.index_B, rtol=0, atol=0)


def test_a_batch_may_span_several_epochs() -> None:
    (batch,) = read(Loader(numbered(3), global_batch=8, micro_batch=8, seed=0), 1)[0]
    assert sorted(batch.tokens_BL[:6, 0].tolist()) == [0, 0, 1, 1, 2, 2]


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("diladiff-loader")]


def test_no_thread_outlives_its_reader() -> None:
    stream = iter(Loader(numbered(9), global_batch=4, micro_batch=4, seed=0))
    next(stream)
    assert len(threads()) == 1
    stream.close()  # type: ignore[attr-defined]
    assert threads() == []
    for _ in Loader(numbered(9), global_batch=4, micro_batch=4, seed=0):
        break
    assert threads() == []


def test_an_error_in_the_thread_reaches_the_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    def blocks(self: TokenDataset, indices: np.ndarray) -> np.ndarray:
        raise OSError("the disk is gone")

    monkeypatch.setattr(TokenDataset, "blocks", blocks)
    with pytest.raises(OSError, match="the disk is gone"):
        read(Loader(numbered(9), global_batch=4, micro_batch=4, seed=0), 1)
    assert threads() == []


def test_bad_splits_are_refused() -> None:
    dataset = numbered(9)
    with pytest.raises(ValueError, match="global_batch 12: must be a power of two"):
        Loader(dataset, global_batch=12, micro_batch=4, seed=0)
    with pytest.raises(ValueError, match=r"micro_batch 8: must be a power of two, at most global_batch / world = 4"):
        Loader(dataset, global_batch=8, micro_batch=8, world=2, seed=0)
    with pytest.raises(ValueError, match="world 3"):
        Loader(dataset, global_batch=8, micro_batch=1, world=3, seed=0)
    with pytest.raises(ValueError, match=r"rank 2: must lie in \[0, 2\)"):
        Loader(dataset, global_batch=8, micro_batch=1, rank=2, world=2, seed=0)


@pytest.mark.parametrize("world", [1, 2, 4])
def test_validation_reads_the_first_blocks_in_order(world: int) -> None:
    dataset = numbered(23)
    found: dict[tuple[int, int], int] = {}
    for rank in range(world):
        for number, batch in enumerate(validation_batches(dataset, 4, rank, world, limit_blocks=18)):
            assert (len(batch.index_B), batch.size) == (4 // world, 4)
            for index, token in zip(batch.index_B.tolist(), batch.tokens_BL[:, 0].tolist(), strict=True):
                found[number, index] = token
    assert [found[key] for key in sorted(found)] == list(range(16))


@pytest.mark.parametrize("size", [1, 4, 16])
def test_rows_of_a_validation_split_have_one_number_whatever_the_batch(size: int) -> None:
    """Times are stratified over the numbers: rows that began at 0 in each batch would only see the first strata."""
    pairs = [
        (index, token)
        for batch in validation_batches(numbered(16), size)
        for index, token in zip(batch.index_B.tolist(), batch.tokens_BL[:, 0].tolist(), strict=True)
    ]
    assert pairs == [(i, i) for i in range(16)]


def test_a_small_validation_split_is_one_batch() -> None:
    (batch,) = validation_batches(numbered(5), 64)
    assert (batch.size, batch.tokens_BL[:, 0].tolist()) == (4, [0, 1, 2, 3])


def tokens_per_second(dataset: TokenDataset, batch: int, steps: int) -> float:
    """How fast a loader delivers, with nothing else to do."""
    stream = iter(Loader(dataset, global_batch=batch, micro_batch=batch, seed=0))
    next(stream)
    start = time.perf_counter()
    for _ in range(steps):
        next(stream)
    return steps * batch * dataset.length / (time.perf_counter() - start)


def test_the_loader_is_no_bottleneck(tmp_path: Path) -> None:
    """The floor is what one GPU can train on, 2 million tokens a second, with L=1024 from a mapped file."""
    writer = ShardWriter(tmp_path / "train-00000.bin", "uint16")
    writer.add(np.arange(1 << 22) % 4096)
    writer.close(1, META)
    dataset = TokenDataset(tmp_path, "train", 1024, META, [map_shard(tmp_path / "train-00000.bin")])
    assert max(tokens_per_second(dataset, 32, steps=200) for _ in range(3)) > 2e6
