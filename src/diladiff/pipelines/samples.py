"""Samples and their file: JSON lines, the first a header that says how they were made, then one text a line."""

import importlib.metadata
import json
import platform
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from diladiff import files

SCHEMA = 1
KIND = "samples"


@dataclass(frozen=True, kw_only=True, eq=False)
class Samples:
    """Generated texts with their ids, the settings that make them again, and what they took.

    `tokens` counts the positions that were drawn, padding included; sample i has the index `first_index + i`.
    """

    ids: Int[Tensor, "B L"]
    texts: list[str]
    settings: dict[str, Any]
    seconds: float
    tokens: int
    first_index: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Drawn positions a second."""
        return self.tokens / self.seconds if self.seconds > 0 else 0.0


class SamplesFile(NamedTuple):
    """A samples file as read: its header, and a row `{"index", "ids", "text"}` for each sample."""

    header: dict[str, Any]
    rows: list[dict[str, Any]]


def write_samples(path: Path | str, samples: Samples, *, model: dict[str, Any]) -> None:
    """Write a samples file in one step. `model` says which model it was: its path and the sha256 of its weights."""
    header = {
        "kind": KIND,
        "schema": SCHEMA,
        "num": len(samples.texts),
        "model": model,
        "settings": samples.settings,
        "seconds": samples.seconds,
        "tokens": samples.tokens,
        "versions": versions(),
    }
    lines = [json.dumps(header)]
    for i, (ids_L, text) in enumerate(zip(samples.ids.tolist(), samples.texts, strict=True)):
        lines.append(json.dumps({"index": samples.first_index + i, "ids": ids_L, "text": text}))
    files.write_atomic(path, "\n".join(lines) + "\n")


def read_samples(path: Path | str) -> SamplesFile:
    """Read a samples file; a ValueError names what is not right."""
    lines = Path(path).read_text(encoding="utf-8").splitlines()
    values = [_value(path, number, line) for number, line in enumerate(lines, start=1)]
    header = values[0] if values else None
    if not isinstance(header, dict) or header.get("kind") != KIND:
        raise ValueError(f"{path} does not begin with the header of a samples file: give what `sample --out` wrote")
    if header.get("schema") != SCHEMA:
        raise ValueError(f"{path} has schema {header.get('schema')!r}; this version reads {SCHEMA}")
    rows = values[1:]
    for number, row in enumerate(rows, start=2):
        if not isinstance(row, dict) or not {"index", "ids", "text"} <= row.keys():
            raise ValueError(f"{path}, line {number}: not a sample with index, ids and text")
    if len(rows) != header.get("num"):
        raise ValueError(f"{path} holds {len(rows)} samples where its header says {header.get('num')}: it was cut")
    return SamplesFile(header, rows)


def versions() -> dict[str, str]:
    """The versions that samples may depend on."""
    return {
        "diladiff": importlib.metadata.version("diladiff"),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def _value(path: Path | str, number: int, line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        raise ValueError(f"{path}, line {number}: not valid JSON ({error})") from None
