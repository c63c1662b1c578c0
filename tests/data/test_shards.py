"""Shards and data sets: what is written is read back at any length, and what was damaged is caught and named."""

import random
import shutil
from pathlib import Path

import numpy as np
import pytest

from diladiff.data.shards import (
    HEADER_BYTES,
    Meta,
    ShardWriter,
    TokenDataset,
    check_shard,
    map_shard,
    read_dataset,
    read_header,
)

META = Meta(
    vocab_size=70_000, mask_id=1, end_id=2, separator_id=2, pad_id=0, fingerprint="f", packing="joined", length=None
)


@pytest.mark.parametrize(("dtype", "top"), [("uint16", 1 << 16), ("uint32", 70_000)])
def test_a_shard_is_read_as_it_was_written(tmp_path: Path, dtype: str, top: int) -> None:
    tokens = np.random.default_rng(0).integers(0, top, 1000)
    writer = ShardWriter(tmp_path / "train-00000.bin", dtype)
    writer.add(tokens[:300])
    writer.add(tokens[300:])
    header = writer.close(7, META)
    assert (header.tokens, header.documents, header.dtype, header.fingerprint) == (1000, 7, dtype, "f")
    assert read_header(tmp_path / "train-00000.bin") == header == check_shard(tmp_path / "train-00000.bin")
    np.testing.assert_array_equal(map_shard(tmp_path / "train-00000.bin"), tokens)
    assert list(tmp_path.iterdir()) == [tmp_path / "train-00000.bin"]


@pytest.mark.parametrize("was_closed", [False, True])
def test_a_writer_goes_on_where_its_bytes_were_safe(tmp_path: Path, *, was_closed: bool) -> None:
    """Also where the shard had been closed and renamed before that could be noted."""
    tokens = np.arange(1000)
    for name, kept in (("straight.bin", 1000), ("resumed.bin", 400)):
        writer = ShardWriter(tmp_path / name, "uint16")
        writer.add(tokens[:kept])
        if name == "resumed.bin":
            writer.add(tokens[:77])  # was not safe yet: written again
            if was_closed:
                writer.close(3, META)
            else:
                writer.abandon()
            writer = ShardWriter(tmp_path / name, "uint16", kept_bytes=2 * kept)
            writer.add(tokens[kept:])
        writer.close(3, META)
    assert (tmp_path / "straight.bin").read_bytes() == (tmp_path / "resumed.bin").read_bytes()


def test_joined_blocks_are_one_stream_cut_at_any_length(joined: Path) -> None:
    names = [shard["file"] for shard in read_dataset(joined)["splits"]["train"]["shards"]]
    assert len(names) > 2
    stream = np.concatenate([map_shard(joined / name) for name in names]).astype(np.int64)
    for length in (7, 100, 6000):  # the last is longer than a shard
        dataset = TokenDataset.open(joined, "train", length)
        assert len(dataset) == len(stream) // length
        order = np.random.default_rng(0).permutation(len(dataset))
        np.testing.assert_array_equal(dataset.blocks(order), stream[: len(dataset) * length].reshape(-1, length)[order])
        assert dataset.blocks(order).dtype == np.int64


def test_document_blocks_end_in_padding(document: Path) -> None:
    dataset = TokenDataset.open(document, "train", 48)
    blocks = dataset.blocks(np.arange(len(dataset)))
    ends = (blocks == dataset.meta.end_id).argmax(1)
    assert all((row[end + 1 :] == dataset.meta.pad_id).all() for row, end in zip(blocks, ends, strict=True))
    assert (blocks == dataset.meta.end_id).sum() == len(blocks)
    assert dataset.tokenizer().fingerprint == dataset.meta.fingerprint


def test_what_cannot_be_opened_says_why(joined: Path, document: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no split 'test', only train, valid"):
        TokenDataset.open(joined, "test", 8)
    with pytest.raises(ValueError, match=r"length 64: .* holds one document a block of 48"):
        TokenDataset.open(document, "train", 64)
    with pytest.raises(ValueError, match="fewer tokens than one block of 1000000"):
        TokenDataset.open(joined, "valid", 1_000_000)
    with pytest.raises(ValueError, match="does not exist: make a data set there with `diladiff prepare`"):
        TokenDataset.open(tmp_path / "nothing", "train", 8)
    with pytest.raises(ValueError, match=r"holds no dataset\.json"):
        TokenDataset.open(tmp_path, "train", 8)
    (tmp_path / "half.unfinished").mkdir()
    with pytest.raises(ValueError, match="half is not finished: run the same"):
        TokenDataset.open(tmp_path / "half", "train", 8)
    with pytest.raises(IndexError, match="numbered from 0 to"):
        TokenDataset.open(joined, "train", 8).blocks(np.array([10**6]))


def test_flipped_bits_are_caught_and_named(joined: Path, tmp_path: Path) -> None:
    source = random.Random(0)
    files = [file for file in sorted(joined.rglob("*")) if file.is_file() and not file.name.startswith("valid")]
    for _ in range(60):
        folder = tmp_path / "set"
        shutil.copytree(joined, folder)
        victim = folder / source.choice(files).relative_to(joined)
        data = bytearray(victim.read_bytes())
        data[source.randrange(len(data))] ^= 1 << source.randrange(8)
        victim.write_bytes(data)
        # a flip in the manifest shows as a file that does not fit it, so there the folder is what is named
        named = victim.name if victim.name != "manifest.json" else "set"
        with pytest.raises(ValueError, match=named):
            TokenDataset.open(folder, "train", 8)
        shutil.rmtree(folder)


def test_a_single_shard_checks_itself_and_a_cut_one_is_named(joined: Path, tmp_path: Path) -> None:
    shard = tmp_path / "train-00000.bin"
    data = bytearray((joined / shard.name).read_bytes())
    data[HEADER_BYTES + 99] ^= 4
    shard.write_bytes(data)
    with pytest.raises(ValueError, match=r"train-00000\.bin does not have the sha256"):
        check_shard(shard)
    shard.write_bytes(data[:-2])
    with pytest.raises(ValueError, match=r"train-00000\.bin does not have the \d+ tokens"):
        read_header(shard)
    shard.write_bytes(data[:100])
    with pytest.raises(ValueError, match=r"train-00000\.bin is not a token shard"):
        read_header(shard)


def test_without_verification_headers_are_still_read(joined: Path, tmp_path: Path) -> None:
    shutil.copytree(joined, tmp_path / "set")
    assert len(TokenDataset.open(tmp_path / "set", "train", 8, verify=False)) > 0
    shard = tmp_path / "set" / "train-00000.bin"
    shard.write_bytes(shard.read_bytes()[:-10])
    with pytest.raises(ValueError, match="train-00000"):
        TokenDataset.open(tmp_path / "set", "train", 8, verify=False)
