"""Token shards: a data set is a folder of plain arrays with headers, checked when it is opened, mapped when it is read.

A shard is 4,096 bytes of header (magic, JSON, spaces) and then the tokens as little-endian uint16 or uint32.
"""

import hashlib
import json
import os
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, final

import numpy as np
from jaxtyping import Int, Int64

from diladiff import config, files
from diladiff.data.tokenizer import Packing, Tokenizer

SCHEMA = 1
MAGIC = b"DILADIFF"
HEADER_BYTES = 4096
DATASET = "dataset.json"
UNFINISHED = ".unfinished"
"""What the folder of a data set that is still being prepared adds to its name."""


@dataclass(frozen=True, kw_only=True)
class Meta:
    """What every reader of a data set has to know about it."""

    vocab_size: int
    mask_id: int
    end_id: int
    separator_id: int
    pad_id: int
    fingerprint: str
    packing: Packing
    length: int | None
    """The block length of packing `document`; None where any length can be read."""


@dataclass(frozen=True, kw_only=True)
class Header:
    """The first bytes of a shard."""

    schema: int
    dtype: str
    tokens: int
    documents: int
    fingerprint: str
    packing: Packing
    length: int | None
    sha256: str
    """Of the tokens, so that a shard can be checked without its folder."""


@final
class ShardWriter:
    """Appends tokens to a shard that gets its header and its name when it is closed; can go on after a kill."""

    def __init__(self, path: Path, dtype: str, *, kept_bytes: int = 0) -> None:
        self.path = path
        self.part = path.with_name(path.name + ".part")
        self.dtype = np.dtype(dtype).newbyteorder("<")
        self._hash = hashlib.sha256()
        if kept_bytes and not self.part.exists() and path.exists():  # closed, but nobody had noted it yet
            os.replace(path, self.part)
        self._file = open(self.part, "r+b" if kept_bytes else "w+b")  # noqa: SIM115
        if kept_bytes:
            self._file.seek(HEADER_BYTES)
            for chunk in iter(
                lambda: self._file.read(min(1 << 20, HEADER_BYTES + kept_bytes - self._file.tell())), b""
            ):
                self._hash.update(chunk)
            if self._file.tell() != HEADER_BYTES + kept_bytes:
                raise ValueError(f"{self.part} is shorter than when work on it stopped: remove the folder, start again")
            self._file.truncate()
        else:
            self._file.write(bytes(HEADER_BYTES))
        self.bytes = kept_bytes

    @property
    def tokens(self) -> int:
        """How many tokens have been added."""
        return self.bytes // self.dtype.itemsize

    def add(self, tokens: np.ndarray) -> None:
        """Append tokens."""
        data = tokens.astype(self.dtype, copy=False).tobytes()
        self._file.write(data)
        self._hash.update(data)
        self.bytes += len(data)

    def sync(self) -> None:
        """Make what was added safe on the disk."""
        self._file.flush()
        os.fsync(self._file.fileno())

    def close(self, documents: int, meta: Meta) -> Header:
        """Write the header, give the shard its name and return the header."""
        header = Header(
            schema=SCHEMA,
            dtype=self.dtype.name,
            tokens=self.tokens,
            documents=documents,
            fingerprint=meta.fingerprint,
            packing=meta.packing,
            length=meta.length,
            sha256=self._hash.hexdigest(),
        )
        text = MAGIC + json.dumps(asdict(header)).encode()
        self._file.seek(0)
        self._file.write(text.ljust(HEADER_BYTES - 1) + b"\n")
        self.sync()
        self._file.close()
        os.replace(self.part, self.path)
        return header

    def abandon(self) -> None:
        """Close the file and leave it as it is."""
        self._file.close()


def read_header(path: Path | str) -> Header:
    """The header of a shard; a ValueError names the file where it is not one or not whole."""
    with open(path, "rb") as file:
        raw = file.read(HEADER_BYTES)
    if len(raw) < HEADER_BYTES or not raw.startswith(MAGIC):
        raise ValueError(f"{path} is not a token shard, or was cut: prepare the data set again")
    try:
        header = config.from_dict(Header, json.loads(raw[len(MAGIC) :]))
    except ValueError as error:
        raise ValueError(f"{path} has a damaged header ({error}): prepare the data set again") from None
    if header.schema != SCHEMA or header.dtype not in ("uint16", "uint32"):
        raise ValueError(f"{path} has schema {header.schema} and dtype {header.dtype}, not {SCHEMA} and uint16 or 32")
    if Path(path).stat().st_size != HEADER_BYTES + header.tokens * np.dtype(header.dtype).itemsize:
        raise ValueError(f"{path} does not have the {header.tokens} tokens of its header: prepare the data set again")
    return header


def map_shard(path: Path | str) -> np.ndarray:
    """The tokens of a shard, read from the disk where they are touched."""
    header = read_header(path)
    dtype = np.dtype(header.dtype).newbyteorder("<")
    mapped = np.memmap(path, dtype=dtype, mode="r", offset=HEADER_BYTES, shape=(header.tokens,))
    return mapped.view(np.ndarray)  # plain arrays slice three times as fast as memmap objects


def check_shard(path: Path | str) -> Header:
    """Read a whole shard and compare it with the sha256 in its own header."""
    header = read_header(path)
    if hashlib.sha256(map_shard(path).tobytes()).hexdigest() != header.sha256:
        raise ValueError(f"{path} does not have the sha256 it was written with: it is corrupt, prepare it again")
    return header


def shard_name(split: str, number: int) -> str:
    """The file name of a split's shard."""
    return f"{split}-{number:05d}.bin"


def read_dataset(folder: Path | str) -> dict[str, Any]:
    """The content of dataset.json; a ValueError says what is missing and what to do."""
    folder = Path(folder)
    if not folder.is_dir() and folder.with_name(folder.name + UNFINISHED).is_dir():
        raise ValueError(f"{folder} is not finished: run the same `diladiff prepare` command again, it goes on")
    if not folder.is_dir():
        raise ValueError(f"{folder} does not exist: make a data set there with `diladiff prepare`")
    if not (folder / DATASET).is_file():
        raise ValueError(f"{folder} holds no {DATASET}: make a data set there with `diladiff prepare`")
    found = files.read_json(folder / DATASET)
    if not isinstance(found, dict) or found.get("schema") != SCHEMA:
        raise ValueError(f"{folder / DATASET} is damaged or of another schema than {SCHEMA}: prepare it again")
    return found


@final
class TokenDataset:
    """One split of a data set, as blocks of one length."""

    def __init__(self, folder: Path, split: str, length: int, meta: Meta, shards: Sequence[np.ndarray]) -> None:
        self.folder, self.split, self.length, self.meta = folder, split, length, meta
        self._shards = list(shards)
        self._bounds = np.cumsum([0, *(len(shard) for shard in self._shards)])

    @classmethod
    def open(cls, folder: Path | str, split: str, length: int, *, verify: bool = True) -> "TokenDataset":
        """Open a split and, unless another process has just done so, compare every byte with its sha256."""
        folder = Path(folder)
        if length < 1:
            raise ValueError(f"length {length}: a block holds at least one token")
        if verify and (folder / DATASET).is_file():
            files.verify(folder, only=[DATASET])
        found = read_dataset(folder)
        if split not in found["splits"]:
            raise ValueError(
                f"{folder} has no split {split!r}, only {', '.join(found['splits'])}: prepare more text, or with a "
                f"larger --{split}-share"
            )
        names = [shard["file"] for shard in found["splits"][split]["shards"]]
        if verify:
            files.verify(folder, only=["tokenizer/tokenizer.json", "tokenizer/tokenizer_config.json", *names])
        meta = config.from_dict(Meta, found["meta"], f"{folder / DATASET}: meta")
        if meta.length not in (None, length):
            raise ValueError(
                f"length {length}: {folder} holds one document a block of {meta.length}; "
                f"use length {meta.length} or prepare the data with --length {length}"
            )
        for name in names:
            if read_header(folder / name).fingerprint != meta.fingerprint:
                raise ValueError(f"{folder / name} was made with another tokenizer than {DATASET} says: remove it")
        dataset = cls(folder, split, length, meta, [map_shard(folder / name) for name in names])
        if len(dataset) == 0:
            raise ValueError(f"{folder}: split {split} has fewer tokens than one block of {length}: prepare more text")
        return dataset

    def __len__(self) -> int:
        return int(self._bounds[-1]) // self.length

    def blocks(self, indices: Int[np.ndarray, " n"]) -> Int64[np.ndarray, "n {self.length}"]:
        """The blocks of some indices, in their order."""
        starts = indices.astype(np.int64) * self.length
        if len(starts) and (starts.min() < 0 or starts.max() > self._bounds[-1] - self.length):
            raise IndexError(f"blocks of {self.folder}/{self.split} are numbered from 0 to {len(self) - 1}")
        out = np.empty((len(starts), self.length), dtype=np.int64)
        shards = np.searchsorted(self._bounds, starts, side="right") - 1
        offsets = starts - self._bounds[shards]
        for row, shard, offset in zip(out, shards.tolist(), offsets.tolist(), strict=True):
            piece = self._shards[shard][offset : offset + self.length]
            if len(piece) == self.length:
                row[:] = piece
            else:
                self._read_across(row, shard, offset)
        return out

    def tokenizer(self) -> Tokenizer:
        """The tokenizer that made the data."""
        return Tokenizer.load(self.folder / "tokenizer")

    def _read_across(self, row: np.ndarray, shard: int, offset: int) -> None:
        """Fill a block that begins in one shard and ends in a later one."""
        filled = 0
        while filled < self.length:
            piece = self._shards[shard][offset : offset + self.length - filled]
            row[filled : filled + len(piece)] = piece
            filled, shard, offset = filled + len(piece), shard + 1, 0
