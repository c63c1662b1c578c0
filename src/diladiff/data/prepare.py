"""Raw text to a data set of token shards: streaming, parallel, deterministic, and able to go on after a kill.

Work happens in OUT.unfinished, where state.json says how far it is safe; the finished folder gets its name at the end.
"""

import errno
import json
import os
import shutil
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, final

from diladiff import config as configs
from diladiff import files
from diladiff.data import known_law
from diladiff.data.documents import SPLITS, Outcome, Packed, Packer, pack_all
from diladiff.data.feeds import Feeds, training_texts
from diladiff.data.settings import Counts, PrepareConfig, Progress, Summary, identity
from diladiff.data.shards import DATASET, SCHEMA, UNFINISHED, Meta, ShardWriter, read_dataset, shard_name
from diladiff.data.sources import open_sources
from diladiff.data.tokenizer import Tokenizer, from_pretrained
from diladiff.data.vocabulary import reduce_tokenizer, train_tokenizer

SAFE_EVERY_SECONDS = 20.0
SHOWN_BAD = 5
HOPELESS_ROWS = 100
"""Where that many rows at the start are all bad, reading on is of no use."""


@dataclass(kw_only=True)
class _Open:
    """A split while it is written."""

    shards: tuple[dict[str, Any], ...] = ()
    bytes: int = 0
    documents: int = 0
    counts: Counts = field(default_factory=Counts)


@dataclass(kw_only=True)
class _State:
    """All that a killed run needs to go on, as state.json holds it."""

    schema: int = SCHEMA
    identity: dict[str, Any]
    source: int = 0
    row: int = 0
    rows: tuple[int, ...] = ()
    """The rows of each source, where the split goes by number."""
    outcomes: dict[str, int] = field(default_factory=lambda: {outcome.name: 0 for outcome in Outcome})
    bad: tuple[str, ...] = ()
    splits: dict[str, _Open] = field(default_factory=dict)


def prepare(config: PrepareConfig, progress: Callable[[Progress], None] | None = None) -> Summary:
    """Make the data set of a configuration, or go on making it; one that is already there is left alone."""
    tell = progress or _silent
    work = config.out.with_name(config.out.name + UNFINISHED)
    if config.out.exists():
        if work.is_dir() and (config.out / DATASET).is_file():
            shutil.rmtree(work)
        return _already_there(config)
    inputs, valid = config.inputs, config.valid
    try:
        if config.stories:
            drawn = _draw(config, work / "data" / "stories", tell)
            inputs, valid = tuple(drawn["train"]), tuple(drawn["valid"])
        feeds = Feeds(config, open_sources(inputs, config.text_documents), open_sources(valid, config.text_documents))
        job = _Job(config, work, feeds, tell)
        return job.run()
    except OSError as error:
        if error.errno == errno.ENOSPC:
            advice = "no space left; free some and run the same command again, it goes on where it was"
            raise OSError(errno.ENOSPC, advice, str(config.out)) from None
        raise


@final
class _Job:
    """One run of prepare, from the state that the last one left."""

    def __init__(self, config: PrepareConfig, work: Path, feeds: Feeds, tell: Callable[[Progress], None]) -> None:
        self.config, self.work, self.feeds, self.tell = config, work, feeds, tell
        self.data = work / "data"
        self.state = self._load_or_begin()
        self.tokenizer = Tokenizer.load(self.data / "tokenizer")
        self.meta = _meta(config, self.tokenizer)
        self.dtype = "uint16" if self.meta.vocab_size <= 1 << 16 else "uint32"
        self.writers: dict[str, ShardWriter] = {}

    def run(self) -> Summary:
        """Write what is missing and give the folder its name."""
        packer = Packer(self.feeds.rules, self.tokenizer, self.config.packing, self.config.length, self.dtype)
        tasks = self.feeds.tasks(self.state.source, self.state.row, self.state.rows)
        for split, part in self.state.splits.items():
            if part.bytes:
                self.writers[split] = self._writer(split, part)
        safe = time.monotonic()
        try:
            for packed in pack_all(packer, tasks, self.config.workers):
                closed = self._take(packed)
                if closed or time.monotonic() - safe > SAFE_EVERY_SECONDS:
                    self._save()
                    safe = time.monotonic()
            self._save()
            return self._finish()
        finally:
            for writer in self.writers.values():
                writer.abandon()

    def _load_or_begin(self) -> _State:
        path = self.work / "state.json"
        wanted = {**identity(self.config), "sources": self.feeds.names()}
        if path.is_file():
            state = configs.from_dict(_State, files.read_json(path), str(path))
            changed = configs.difference(state.identity, wanted)
            if changed:
                raise ValueError(
                    f"{self.work} holds unfinished work of other settings ({'; '.join(changed)}): "
                    "use the same ones, another --out, or remove that folder"
                )
            return state
        (self.data / "tokenizer").mkdir(parents=True, exist_ok=True)
        rows = self.feeds.count_rows()
        _make_tokenizer(self.config, self.feeds, rows, self.tell).save(self.data / "tokenizer")
        state = _State(identity=wanted, rows=rows)
        files.write_atomic(path, json.dumps(asdict(state), indent=1) + "\n")
        return state

    def _take(self, packed: Packed) -> bool:
        """Add what a task gave; whether a shard was closed."""
        at, closed = 0, False
        for i, outcome in enumerate(packed.outcomes):
            self.state.outcomes[Outcome(outcome).name] += 1
            if outcome != Outcome.KEPT:
                continue
            split = SPLITS[packed.splits[i]]
            part = self.state.splits.setdefault(split, _Open())
            if split not in self.writers:
                self.writers[split] = self._writer(split, part)
            self.writers[split].add(packed.data[at : at + packed.stored[i]])
            at += packed.stored[i]
            part.documents += 1
            part.counts.documents += 1
            part.counts.tokens += packed.tokens[i]
            part.counts.words += packed.words[i]
            part.counts.unknown += packed.unknown[i]
            if self.writers[split].tokens >= self.config.shard_tokens:
                self._close(split)
                closed = True
        self.state.bad = (*self.state.bad, *packed.reasons)[:SHOWN_BAD]
        if packed.source != self.state.source:
            self.state.source, self.state.row = packed.source, 0
        self.state.row += len(packed.outcomes)
        self._tell(packed.source)
        bad = self.state.outcomes[Outcome.BAD.name]
        if bad >= HOPELESS_ROWS and bad == sum(self.state.outcomes.values()):
            self._forget()
            raise ValueError(f"all of the first {bad} rows are bad, such as: {self.state.bad[0]}")
        return closed

    def _writer(self, split: str, part: _Open) -> ShardWriter:
        return ShardWriter(self.data / shard_name(split, len(part.shards)), self.dtype, kept_bytes=part.bytes)

    def _close(self, split: str) -> None:
        part, writer = self.state.splits[split], self.writers.pop(split)
        header = writer.close(part.documents, self.meta)
        row = {"file": writer.path.name, "tokens": header.tokens, "documents": header.documents}
        part.shards += ({**row, "sha256": files.sha256(writer.path)},)
        part.bytes = part.documents = 0

    def _save(self) -> None:
        """Bring the shards to the disk first, and then what is known of them."""
        for split, writer in self.writers.items():
            writer.sync()
            self.state.splits[split].bytes = writer.bytes
        files.write_atomic(self.work / "state.json", json.dumps(asdict(self.state), indent=1) + "\n")

    def _forget(self) -> None:
        """Let the next run begin anew, also with other settings; stories that were drawn stay."""
        (self.work / "state.json").unlink()
        for split in SPLITS:
            for path in self.data.glob(f"{split}-*"):
                path.unlink()

    def _tell(self, source: int) -> None:
        counts = [part.counts for part in self.state.splits.values()]
        documents, tokens = sum(count.documents for count in counts), sum(count.tokens for count in counts)
        self.tell(Progress("tokens", documents, tokens, self.feeds.share(source)))

    def _finish(self) -> Summary:
        rows, bad = sum(self.state.outcomes.values()), self.state.outcomes[Outcome.BAD.name]
        if bad > self.config.max_bad_share * rows:
            raise ValueError(
                f"{bad} of {rows} rows are bad, more than max_bad_share {self.config.max_bad_share}: repair the input "
                f"or raise --max-bad-share; such as: {'; '.join(self.state.bad)}"
            )
        if "train" not in self.state.splits:
            self._forget()
            found = {split: part.counts.documents for split, part in self.state.splits.items()} | _left_out(self.state)
            where = ", ".join(f"{count:,} {name}" for name, count in found.items() if count)
            raise ValueError(f"no training document was found in {rows:,} rows ({where or 'the input is empty'})")
        for split in list(self.writers):
            self._close(split)
        order = [split for split in SPLITS if split in self.state.splits]
        dataset = {
            "schema": SCHEMA,
            "meta": asdict(self.meta),
            "splits": {
                split: {**asdict(self.state.splits[split].counts), "shards": self.state.splits[split].shards}
                for split in order
            },
            "left_out": _left_out(self.state),
            "bad": self.state.bad,
            "made_by": self.state.identity,
        }
        files.write_atomic(self.data / DATASET, json.dumps(dataset, indent=1) + "\n")
        files.write_manifest(self.data)
        os.rename(self.data, self.config.out)
        shutil.rmtree(self.work)
        return summary(self.config.out, already_there=False)


def summary(folder: Path, *, already_there: bool) -> Summary:
    """What dataset.json says of a finished data set."""
    found = read_dataset(folder)
    fields = Counts.__dataclass_fields__
    return Summary(
        folder=folder,
        meta=configs.from_dict(Meta, found["meta"]),
        splits={name: Counts(**{key: split[key] for key in fields}) for name, split in found["splits"].items()},
        left_out=found["left_out"],
        bad=found["bad"],
        already_there=already_there,
    )


def _already_there(config: PrepareConfig) -> Summary:
    try:
        made_by = read_dataset(config.out)["made_by"]
    except ValueError:
        raise ValueError(f"out {config.out}: exists and is not a data set; choose another folder") from None
    changed = configs.difference({k: v for k, v in made_by.items() if k != "sources"}, identity(config))
    if changed:
        raise ValueError(
            f"out {config.out}: holds a data set made with other settings ({'; '.join(changed)}); "
            "choose another folder or remove that one"
        )
    files.verify(config.out)
    return summary(config.out, already_there=True)


def _draw(config: PrepareConfig, folder: Path, tell: Callable[[Progress], None]) -> dict[str, list[str]]:
    wanted = config.stories + config.stories_valid
    return known_law.draw(
        folder,
        config.stories,
        config.stories_valid,
        weights=config.stories_weights,
        device=config.stories_device,
        progress=lambda done: tell(Progress("stories", done, 0, done / wanted)),
    )


def _make_tokenizer(
    config: PrepareConfig, feeds: Feeds, rows: tuple[int, ...], tell: Callable[[Progress], None]
) -> Tokenizer:
    """The tokenizer of a configuration, fitted to the training documents where it asks for that."""
    if config.train_tokenizer is not None:
        found = train_tokenizer(training_texts(config, feeds, rows, tell), config.train_tokenizer)
    else:
        found = from_pretrained(config.tokenizer)
        if config.vocab_size is not None:
            found = reduce_tokenizer(found, training_texts(config, feeds, rows, tell), config.vocab_size)
    return found.with_packing(config.packing)


def _meta(config: PrepareConfig, tokenizer: Tokenizer) -> Meta:
    return Meta(
        vocab_size=tokenizer.vocab_size,
        mask_id=tokenizer.mask_id,
        end_id=tokenizer.end_id,
        separator_id=tokenizer.separator_id,
        pad_id=tokenizer.pad_id,
        fingerprint=tokenizer.fingerprint,
        packing=config.packing,
        length=config.length,
    )


def _left_out(state: _State) -> dict[str, int]:
    return {outcome.name.lower(): state.outcomes[outcome.name] for outcome in Outcome if outcome != Outcome.KEPT}


def _silent(_: Progress) -> None:
    pass
