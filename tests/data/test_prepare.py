"""Prepare: every document in its place, the same bytes for any number of workers and after any stop, clear refusals."""

import errno
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from diladiff.data import feeds
from diladiff.data import prepare as work
from diladiff.data.documents import wikipedia_text
from diladiff.data.prepare import prepare
from diladiff.data.presets import PRESETS
from diladiff.data.settings import PrepareConfig, Progress
from diladiff.data.shards import ShardWriter, TokenDataset, map_shard, read_dataset
from tests.data.corpora import texts, write_jsonl


def settings(source: Path, out: Path, **changes: Any) -> PrepareConfig:
    return replace(
        PrepareConfig(inputs=(str(source),), out=out, train_tokenizer=280, shard_tokens=4000, workers=1), **changes
    )


def decoded(folder: Path, split: str) -> list[str]:
    """A split's documents, read back."""
    names = [shard["file"] for shard in read_dataset(folder)["splits"][split]["shards"]]
    ids = np.concatenate([map_shard(folder / name) for name in names])
    dataset = TokenDataset.open(folder, split, len(ids) if read_dataset(folder)["meta"]["length"] is None else 48)
    tokenizer = dataset.tokenizer()
    if dataset.meta.packing == "document":
        return [tokenizer.decode(row) for row in dataset.blocks(np.arange(len(dataset)))]
    return tokenizer.decode(ids).split("\n\n")


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_joined_documents_keep_their_order_and_splits(tmp_path: Path) -> None:
    rows = texts(300)
    summary = prepare(settings(write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "set", valid_documents=30))
    assert decoded(summary.folder, "train") == rows[:270]
    assert decoded(summary.folder, "valid") == rows[270:]
    assert summary.splits["train"].documents == 270
    assert summary.splits["train"].words == sum(len(row.split()) for row in rows[:270])
    assert summary.splits["train"].tokens == sum(
        shard["tokens"] for shard in read_dataset(summary.folder)["splits"]["train"]["shards"]
    )
    assert not list(tmp_path.glob("*.unfinished"))


def test_one_document_a_block(tmp_path: Path) -> None:
    rows = [*texts(100), "long " * 60]
    summary = prepare(
        settings(
            write_jsonl(tmp_path / "a.jsonl", rows), tmp_path / "set", packing="document", length=48, valid_documents=20
        )
    )
    tokenizer = TokenDataset.open(summary.folder, "train", 48).tokenizer()
    short = [row for row, ids in zip(rows, tokenizer.encode(rows), strict=True) if len(ids) < 48]
    assert 0 < summary.left_out["long"] == len(rows) - len(short)
    assert decoded(summary.folder, "train") + decoded(summary.folder, "valid") == short
    tokens = sum(len(ids) + 1 for ids in tokenizer.encode(short))
    assert sum(split.tokens for split in summary.splits.values()) == tokens


def test_a_hash_splits_and_other_files_validate(tmp_path: Path) -> None:
    rows = texts(400)
    source = write_jsonl(tmp_path / "a.jsonl", rows)
    by_hash = prepare(settings(source, tmp_path / "hash", valid_share=0.2, test_share=0.1))
    parts = {split: decoded(by_hash.folder, split) for split in ("train", "valid", "test")}
    assert sorted([*parts["train"], *parts["valid"], *parts["test"]]) == sorted(rows)
    assert not set(parts["train"]) & (set(parts["valid"]) | set(parts["test"]))
    assert 50 < len(parts["valid"]) < 110
    assert 20 < len(parts["test"]) < 65
    other = write_jsonl(tmp_path / "b.jsonl", texts(20, seed=1))
    by_file = prepare(settings(source, tmp_path / "file", valid=(str(other),)))
    assert decoded(by_file.folder, "train") == rows
    assert decoded(by_file.folder, "valid") == texts(20, seed=1)
    by_key = prepare(settings(source, tmp_path / "key", key_field="id", valid_share=0.2))
    assert decoded(by_key.folder, "valid") != parts["valid"]


@pytest.fixture
def small_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tasks of a few rows, so that a small corpus has many."""
    monkeypatch.setattr(feeds, "TASK_ROWS", 7)


@pytest.mark.usefixtures("small_tasks")
def test_workers_do_not_change_a_byte(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(200))
    one = prepare(settings(source, tmp_path / "one"))
    two = prepare(settings(source, tmp_path / "two", workers=2))
    assert contents(one.folder) == contents(two.folder)


@pytest.mark.usefixtures("small_tasks")
@pytest.mark.parametrize("how", [{"valid_share": 0.2}, {"valid_documents": 25}, {"packing": "document", "length": 48}])
def test_a_stopped_run_goes_on_to_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, how: dict[str, Any]
) -> None:
    """Stopped again and again, at shard ends, between them and while the folder is finished."""
    monkeypatch.setattr(work, "SAFE_EVERY_SECONDS", 0.0)
    sources = tuple(str(write_jsonl(tmp_path / f"{n}.jsonl", texts(100, seed=n))) for n in range(2))
    config = settings(Path(sources[0]), tmp_path / "straight", inputs=sources, shard_tokens=1500, **how)
    prepare(config)
    broken, stops = replace(config, out=tmp_path / "broken"), 0
    for calls in (3, 5, 2, 9, 30, 60, 10_000):
        count = 0

        def tell(now: Progress, limit: int = calls) -> None:
            nonlocal count
            count += 1
            if count == limit:
                raise KeyboardInterrupt

        try:
            prepare(broken, tell)
        except KeyboardInterrupt:
            stops += 1
            with pytest.raises(ValueError, match="is not finished: run the same"):
                TokenDataset.open(broken.out, "train", 48)
    assert stops >= 4
    assert contents(tmp_path / "straight") == contents(tmp_path / "broken")


def test_a_stop_while_shards_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(100))
    prepare(settings(source, tmp_path / "straight"))
    with monkeypatch.context() as patch:
        patch.setattr(work.files, "write_manifest", lambda folder: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            prepare(settings(source, tmp_path / "broken"))
    prepare(settings(source, tmp_path / "broken"))
    assert contents(tmp_path / "straight") == contents(tmp_path / "broken")


def test_a_finished_set_is_left_alone_and_other_settings_are_refused(tmp_path: Path) -> None:
    config = settings(write_jsonl(tmp_path / "a.jsonl", texts(100)), tmp_path / "set")
    first = prepare(config)
    before = contents(first.folder)
    again = prepare(replace(config, workers=2))
    assert again.already_there
    assert (again.splits, contents(first.folder)) == (first.splits, before)
    with pytest.raises(ValueError, match=r"made with other settings \(train_tokenizer: 280 -> 290\)"):
        prepare(replace(config, train_tokenizer=290))
    (tmp_path / "mine").mkdir()
    with pytest.raises(ValueError, match="exists and is not a data set"):
        prepare(replace(config, out=tmp_path / "mine"))


def test_unfinished_work_of_other_settings_is_refused(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", [*texts(50), *["x"] * 5])
    source.write_text(source.read_text() + "{\n" * 5)
    config = settings(source, tmp_path / "set")
    with pytest.raises(ValueError, match=r"5 of 60 rows are bad, more than max_bad_share 0\.01.*row 56"):
        prepare(config)
    with pytest.raises(ValueError, match=r"unfinished work of other settings \(valid_share: 0\.01 -> 0\.5\)"):
        prepare(replace(config, valid_share=0.5))
    summary = prepare(replace(config, max_bad_share=0.2))
    assert summary.left_out["bad"] == 5


def test_bad_rows_are_counted_and_shown(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(100))
    bad = [b'{"text": 3}', b'{"txt": "a"}', b"[1]", b'{"text": "\xff"}', b"", b'{"text": "  "}', b'{"text": "\\ud800"}']
    source.write_bytes(source.read_bytes() + b"\n".join(bad) + b"\n")
    summary = prepare(settings(source, tmp_path / "set", max_bad_share=0.1))
    assert (summary.left_out["bad"], summary.left_out["empty"]) == (5, 2)
    assert [line.split("a.jsonl, ")[1].split(":")[0] for line in summary.bad] == [
        "row 101",
        "row 102",
        "row 103",
        "row 104",
        "row 107",
    ]
    assert "field 'text' holds int, not text" in summary.bad[0]
    assert "no field 'text', only txt" in summary.bad[1]


def test_a_wrong_field_is_seen_at_once(tmp_path: Path) -> None:
    source = write_jsonl(tmp_path / "a.jsonl", texts(2000))
    with pytest.raises(ValueError, match=r"all of the first 256 rows are bad.*no field 'body', only text, id"):
        prepare(settings(source, tmp_path / "set", text_field="body", valid=(str(source),)))


def test_a_full_disk_is_one_clear_line_and_can_be_resumed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = settings(write_jsonl(tmp_path / "a.jsonl", texts(300)), tmp_path / "set")
    add, room = ShardWriter.add, [100]

    def full(self: ShardWriter, tokens: np.ndarray) -> None:
        room[0] -= 1
        if room[0] < 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        add(self, tokens)

    with monkeypatch.context() as patch:
        patch.setattr(ShardWriter, "add", full)
        with pytest.raises(OSError, match="no space left; free some and run the same command again"):
            prepare(config)
    prepare(replace(config, out=tmp_path / "straight"))
    assert contents(prepare(config).folder) == contents(tmp_path / "straight")


def test_progress_never_falls_and_ends_at_one(tmp_path: Path) -> None:
    seen: list[Progress] = []
    prepare(settings(write_jsonl(tmp_path / "a.jsonl", texts(2000)), tmp_path / "set"), seen.append)
    tokens = [now for now in seen if now.stage == "tokens"]
    assert [now.documents for now in tokens] == sorted(now.documents for now in tokens)
    assert tokens[-1].share == 1.0
    assert tokens[-1].documents == 2000


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"packing": "document"}, "length None: with packing document, set --length"),
        ({"length": 5}, "length 5: with packing joined, leave it out"),
        ({"vocab_size": 300}, "vocab_size 300: --train-tokenizer sets the size itself"),
        ({"valid_share": 1.5}, r"valid_share 1\.5: must lie in \[0, 1\)"),
        ({"workers": 0}, "workers 0: must be at least 1"),
        ({"stories": 5}, "stories 5: cannot be mixed with inputs"),
        ({"inputs": ()}, "inputs: name a preset"),
    ],
)
def test_settings_are_checked(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        settings(tmp_path / "a.jsonl", tmp_path / "set", **changes)


def test_presets_are_complete() -> None:
    assert list(PRESETS) == ["openwebtext", "wikipedia", "tinystories", "stories"]
    for build in PRESETS.values():
        assert build().out.parts[0] == "data"
    assert PRESETS["openwebtext"]().valid_documents == 100_000


def test_stories_need_their_weights(tmp_path: Path) -> None:
    config = replace(PRESETS["stories"](), out=tmp_path / "set", stories_weights=tmp_path / "none")
    with pytest.raises(ValueError, match=r"no weights at .*; run `make parts`"):
        prepare(config)


def test_wikipedia_keeps_prose_and_headings() -> None:
    prose = "This is a sentence about a thing that was built in the nineteenth century by somebody. " * 8
    rubbish = "Some list\n* one\n* two\nThe Band (1998)\n{| table |}\n"
    article = f"{prose}\n\nHistory\n\n{prose}\n\n{rubbish}\nReferences\n{prose}"
    assert wikipedia_text(article) == f"{prose.strip()}\nHistory.\n{prose.strip()}"
    assert wikipedia_text("A short article of one sentence.") == ""
