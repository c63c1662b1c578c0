"""Raw rows to token arrays: parsing, filtering, choice of the split, encoding and packing, in one process or several.

What becomes of a row depends on the row and on its number alone, so any number of workers gives the same bytes.
"""

import enum
import hashlib
import json
import multiprocessing
import os
import re
import threading
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, final

import numpy as np

from diladiff.data.sources import Raw
from diladiff.data.tokenizer import Packing, Tokenizer

SPLITS = ("train", "valid", "test")
Filter = Literal["none", "wikipedia"]
QUEUE_PER_WORKER = 4
SHOWN_REASONS = 5


class Outcome(enum.IntEnum):
    """What became of a row."""

    KEPT = 0
    EMPTY = 1
    LONG = 2
    FILTERED = 3
    BAD = 4


@dataclass(frozen=True, kw_only=True)
class Rules:
    """How rows of a set of inputs become documents."""

    text_field: str
    key_field: str | None
    filter: Filter
    valid_share: float
    test_share: float


class Task(NamedTuple):
    """Rows of one source to work on."""

    source: int
    name: str
    first: int
    raws: list[Raw]
    is_json: bool
    split: int | None
    """The one split of all rows; None where a hash decides."""


class Packed(NamedTuple):
    """What became of a task's rows, one entry a row, and the tokens of those kept, one after another."""

    source: int
    outcomes: list[int]
    splits: list[int]
    stored: list[int]
    tokens: list[int]
    words: list[int]
    unknown: list[int]
    data: np.ndarray
    reasons: list[str]


class Document(NamedTuple):
    """A row that was read: its text and its split."""

    text: str
    split: int


@final
class Reader:
    """Turns a raw row into a document, or says why not."""

    def __init__(self, rules: Rules) -> None:
        self.rules = rules

    def read(self, raw: Raw, is_json: bool, split: int | None) -> Document | Outcome:  # noqa: FBT001
        """A document, or EMPTY or FILTERED; a ValueError says what is bad about the row."""
        row: Any = raw
        if isinstance(raw, bytes) and not raw.strip():
            return Outcome.EMPTY
        if isinstance(raw, bytes):
            row = _parse(raw) if is_json else {self.rules.text_field: raw.decode("utf-8-sig")}
        if not isinstance(row, dict):
            raise ValueError(f"not an object of fields but {str(row)[:40]!r}")
        text = _field(row, self.rules.text_field)
        if not isinstance(text, str):
            raise ValueError(f"field {self.rules.text_field!r} holds {type(text).__name__}, not text")
        text.encode()  # a lone surrogate cannot be stored or encoded: a UnicodeEncodeError is a ValueError
        if split is None:
            key = text if self.rules.key_field is None else str(_field(row, self.rules.key_field))
            split = self._split(key)
        if self.rules.filter == "wikipedia":
            text = wikipedia_text(text)
            if not text:
                return Outcome.FILTERED
        return Document(text, split) if text.strip() else Outcome.EMPTY

    def _split(self, key: str) -> int:
        """Valid, test or train, by the first 8 bytes of the key's sha256 as a fraction of 1."""
        place = int.from_bytes(hashlib.sha256(key.encode()).digest()[:8], "big") / 2**64
        if place < self.rules.valid_share:
            return SPLITS.index("valid")
        return SPLITS.index("test" if place < self.rules.valid_share + self.rules.test_share else "train")


@final
class Packer:
    """Encodes the documents of a task and packs them."""

    def __init__(self, rules: Rules, tokenizer: Tokenizer, packing: Packing, length: int | None, dtype: str) -> None:
        self.reader = Reader(rules)
        self.tokenizer, self.packing, self.length, self.dtype = tokenizer, packing, length, np.dtype(dtype)

    def pack(self, task: Task) -> Packed:
        """What becomes of each row of a task."""
        outcomes: list[int] = []
        splits: list[int] = []
        texts: list[str] = []
        reasons: list[str] = []
        for number, raw in enumerate(task.raws, task.first):
            found: Document | Outcome
            try:
                found = self.reader.read(raw, task.is_json, task.split)
            except ValueError as error:
                found = Outcome.BAD
                if len(reasons) < SHOWN_REASONS:
                    reasons.append(f"{task.name}, row {number + 1}: {error}")
            outcomes.append(int(Outcome.KEPT if isinstance(found, Document) else found))
            splits.append(found.split if isinstance(found, Document) else 0)
            texts.append(found.text if isinstance(found, Document) else "")
        return self._encode(task.source, outcomes, splits, texts, reasons)

    def _encode(
        self, source: int, outcomes: list[int], splits: list[int], texts: list[str], reasons: list[str]
    ) -> Packed:
        count = len(texts)
        stored, tokens, words, unknown = [0] * count, [0] * count, [0] * count, [0] * count
        pieces: list[np.ndarray] = []
        for i, ids in enumerate(self.tokenizer.encode(texts)):
            if outcomes[i] != Outcome.KEPT:
                continue
            if self.length is not None and self.packing == "document" and len(ids) >= self.length:
                outcomes[i] = int(Outcome.LONG)
                continue
            row = self._block(ids)
            stored[i], tokens[i], words[i] = len(row), len(ids) + 1, len(texts[i].split())
            unknown[i] = ids.count(self.tokenizer.unknown_id) if self.tokenizer.unknown_id is not None else 0
            pieces.append(row)
        data = np.concatenate(pieces) if pieces else np.empty(0, self.dtype)
        return Packed(source, outcomes, splits, stored, tokens, words, unknown, data, reasons)

    def _block(self, ids: list[int]) -> np.ndarray:
        """A document as it is stored: with a separator behind it, or with an end token and padding."""
        if self.packing == "joined" or self.length is None:
            return np.array([*ids, self.tokenizer.separator_id], dtype=self.dtype)
        row = np.full(self.length, self.tokenizer.pad_id, dtype=self.dtype)
        row[: len(ids)] = ids
        row[len(ids)] = self.tokenizer.end_id
        return row


def pack_all(packer: Packer, tasks: Iterator[Task], workers: int) -> Iterator[Packed]:
    """Pack tasks in their order with some worker processes, never holding more than a few of them."""
    if workers == 1:
        yield from map(packer.pack, tasks)
        return
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start_worker, _recipe(packer)) as pool:
        ahead: deque[Future[Packed]] = deque()
        try:
            for task in tasks:
                ahead.append(pool.submit(_pack_in_worker, task))
                if len(ahead) >= QUEUE_PER_WORKER * workers:
                    yield ahead.popleft().result()
            while ahead:
                yield ahead.popleft().result()
        except BrokenProcessPool:
            raise OSError("a worker process of prepare was killed (out of memory?): run it again, it goes on") from None
        finally:
            for future in ahead:
                future.cancel()


HEADINGS_AT_THE_END = frozenset(
    [
        "references",
        "external links",
        "see also",
        "further reading",
        "notes",
        "bibliography",
        "sources",
        "citations",
        "gallery",
    ]
)


def wikipedia_text(text: str) -> str:
    """An article as paragraphs and `Heading.` lines: no lists, tables, markup or end matter; empty below 100 words."""
    lines: list[str] = []
    heading = ""
    for line in (re.sub(r"\s+", " ", raw).strip() for raw in text.split("\n")):
        if line.lower() in HEADINGS_AT_THE_END:
            break
        words = line.count(" ") + 1
        is_prose = re.search(r"[.!?][\"')\]]*$", line) is not None and words >= 5 and line[0] not in "*#|{!"
        if is_prose and not re.search(r"[{}|<>]", line):
            lines += [f"{heading}.", line] if heading else [line]
            heading = ""
        elif line:
            heading = line if words <= 8 and not re.search(r"[.:;,!?*#|{}<>=]", line) else ""
    clean = "\n".join(lines)
    return clean if len(clean.split()) >= 100 else ""


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except RecursionError:
        raise ValueError("nested too deeply to be a row") from None


def _field(row: dict[str, Any], name: str) -> Any:
    if name not in row:
        raise ValueError(f"no field {name!r}, only {', '.join(map(str, list(row)[:8])) or 'none at all'}")
    return row[name]


def _recipe(packer: Packer) -> tuple[Any, ...]:
    tokenizer = packer.tokenizer
    return (
        packer.reader.rules,
        (tokenizer.backend_json, tokenizer.specials, tokenizer.packing),
        packer.packing,
        packer.length,
        packer.dtype.name,
    )


_packers: list[Packer] = []


def _start_worker(rules: Rules, tokenizer: tuple[Any, ...], packing: Packing, length: int | None, dtype: str) -> None:
    """Give a worker process its packer, and end the process where its parent is killed."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    _packers.append(Packer(rules, Tokenizer(*tokenizer), packing, length, dtype))
    threading.Thread(target=_follow_parent, daemon=True).start()


def _follow_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


def _pack_in_worker(task: Task) -> Packed:
    return _packers[0].pack(task)
