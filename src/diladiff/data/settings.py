"""What prepare is asked for, how it says how far it is, and what it says in the end."""

import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

import tyro

from diladiff import config as configs
from diladiff.data import known_law
from diladiff.data.documents import Filter
from diladiff.data.shards import Meta
from diladiff.data.sources import Documents
from diladiff.data.tokenizer import Packing


@dataclass(frozen=True, kw_only=True)
class PrepareConfig:
    """What to make a data set of, and how."""

    inputs: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    """A preset, or files, folders and hf:NAME[@SUBSET][#SPLIT]; .txt and .jsonl, also with .gz, .xz or .zst."""
    out: Path
    """The folder to make."""
    valid: tuple[str, ...] = ()
    """Inputs of the validation split."""
    valid_documents: int = 0
    """Without --valid: hold out the last N documents."""
    valid_share: float = 0.01
    """With neither: hold out this share, chosen by a hash of the text (or of --key-field)."""
    test_share: float = 0.0
    """Hold out a test split likewise, disjoint from it."""
    text_field: str = "text"
    """The field of a row that holds the text."""
    key_field: str | None = None
    """The field whose hash chooses the split; None: the text."""
    filter: Filter = "none"
    """wikipedia: only prose and headings, articles of 100 words or more."""
    text_documents: Documents = "paragraph"
    """What a document of a text file is: what stands between blank lines, a line, or the file."""
    packing: Packing = "joined"
    """joined: documents follow each other and are cut to any length when read; document: one a block."""
    length: int | None = None
    """The block length of --packing document; longer documents are left out."""
    tokenizer: str = "bert-base-uncased"
    """A Hugging Face name or a folder."""
    vocab_size: int | None = None
    """Keep only the N tokens of the tokenizer that the training text needs most."""
    train_tokenizer: int | None = None
    """Train a byte-level BPE of N tokens on the training text instead."""
    vocabulary_documents: int = 200_000
    """How many documents, from the start, these two look at."""
    stories: int = 0
    """Draw N training stories from the known law first (preset `stories`); needs `make parts`."""
    stories_valid: int = 2_000
    """Draw as many for validation, with other seeds."""
    stories_weights: Path = field(default_factory=known_law.default_weights)
    """Where the law's weights are."""
    stories_device: str = "cpu"
    """Where the stories are drawn: cpu or cuda."""
    shard_tokens: int = 1 << 26
    """A shard is closed at the first document that fills it."""
    max_bad_share: float = 0.01
    """Refuse inputs of which more than this share cannot be read."""
    workers: int = field(default_factory=lambda: os.cpu_count() or 1)
    """Processes that encode; the result does not depend on it."""

    def __post_init__(self) -> None:
        if not self.inputs and not self.stories:
            raise ValueError("inputs: name a preset, files or hf:NAME")
        if self.inputs and self.stories:
            raise ValueError(f"stories {self.stories}: cannot be mixed with inputs {' '.join(self.inputs)}")
        if (self.length is None) != (self.packing == "joined"):
            needs = "set --length" if self.length is None else "leave it out, joined documents are cut when read"
            raise ValueError(f"length {self.length}: with packing {self.packing}, {needs}")
        if self.length is not None and self.length < 2:
            raise ValueError(f"length {self.length}: must be at least 2")
        if self.vocab_size is not None and self.train_tokenizer is not None:
            raise ValueError(f"vocab_size {self.vocab_size}: --train-tokenizer sets the size itself, give one of them")
        for name in ("valid_share", "test_share", "max_bad_share"):
            if not 0 <= getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must lie in [0, 1)")
        if self.valid_share + self.test_share >= 1:
            raise ValueError(
                f"valid_share {self.valid_share} and test_share {self.test_share}: leave nothing to train on"
            )
        if re.fullmatch(r"cpu|cuda(:\d+)?", self.stories_device) is None:
            raise ValueError(f"stories_device {self.stories_device}: is not known, give cpu, cuda or cuda:1")
        for name in ("workers", "shard_tokens", "vocabulary_documents"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} {getattr(self, name)}: must be at least 1")
        for name in ("valid_documents", "stories", "stories_valid"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} {getattr(self, name)}: must not be negative")


class Progress(NamedTuple):
    """How far prepare is: the stage, documents and tokens so far, and the share of the input read where it is known."""

    stage: Literal["stories", "vocabulary", "tokens"]
    documents: int
    tokens: int
    share: float | None


@dataclass(kw_only=True)
class Counts:
    """What a split holds."""

    documents: int = 0
    tokens: int = 0
    """With one end or separator a document, without padding."""
    words: int = 0
    unknown: int = 0

    @property
    def tokens_per_word(self) -> float:
        """The mean number of tokens a word takes."""
        return self.tokens / max(self.words, 1)

    @property
    def unknown_rate(self) -> float:
        """The share of tokens that stand for something the tokenizer cannot spell."""
        return self.unknown / max(self.tokens, 1)


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What prepare did."""

    folder: Path
    meta: Meta
    splits: dict[str, Counts]
    left_out: dict[str, int]
    """Documents not in the data set, by reason: empty, long, filtered, bad."""
    bad: list[str]
    """The first few bad rows, with the reason."""
    already_there: bool


def identity(config: PrepareConfig) -> dict[str, Any]:
    """The settings that decide the bytes of a data set."""
    chosen = configs.to_dict(config)
    for name in ("out", "workers", "max_bad_share", "stories_weights", "stories_device"):
        del chosen[name]
    if config.stories:  # a GPU draws other stories than a CPU from the same seed
        chosen["stories_device"] = config.stories_device.partition(":")[0]
    return chosen
