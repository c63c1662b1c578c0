"""`diladiff prepare`: what it says of a data set, presets with options, and one line for whatever does not fit."""

import gzip
import json
from pathlib import Path

import numpy as np
import pytest

from diladiff.cli import prepare as command
from diladiff.cli.main import main
from diladiff.data.documents import wikipedia_text
from diladiff.data.presets import PRESETS
from diladiff.data.shards import TokenDataset
from tests.data.corpora import texts, write_jsonl


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a space in its name to work in, with a small corpus."""
    folder = tmp_path / "a folder"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("COLUMNS", "200")
    write_jsonl(folder / "a.jsonl", texts(300))
    return folder


def run(*arguments: str) -> int:
    return main(["prepare", *arguments])


def complaint(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The one line with which the command ends."""
    assert run(*arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith("diladiff: ")
    assert err.count("\n") == 1
    return err.removeprefix("diladiff: ").rstrip("\n")


SMALL = ("--train-tokenizer", "280", "--workers", "1")


def test_it_says_what_the_data_set_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("a.jsonl", *SMALL, "--valid-documents", "30", "--out", "set") == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert out.startswith("a.jsonl -> set\n")
    rows = [line.split() for line in out.replace("\u2502", " ").splitlines() if line.strip("\u2502 ")]
    (train,) = [row for row in rows if row[0] == "train"]
    assert train[1] == "270"
    assert any(row[:2] == ["valid", "30"] for row in rows)
    assert "vocabulary 280, tokenizer " in out
    assert "left out: nothing" in out
    assert run("a.jsonl", *SMALL, "--valid-documents", "30", "--out", "set") == 0
    assert "(already there, checked)" in capsys.readouterr().out


def test_bad_rows_and_a_small_vocabulary_are_told(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with (here / "a.jsonl").open("a") as file:
        file.write("[" * 100_000 + '\n{"text": [1]}\n')
    assert run("a.jsonl", "--train-tokenizer", "5000", "--workers", "1", "--out", "set") == 0
    out = capsys.readouterr().out
    assert "left out: 2 bad" in out
    assert "bad: a.jsonl, row 301: nested too deeply to be a row" in out
    assert "bad: a.jsonl, row 302: field 'text' holds list, not text" in out
    assert " of the 5,000 tokens asked for" in out


def test_a_mark_of_the_byte_order_is_no_text(here: Path) -> None:
    (here / "b.txt").write_bytes(b"\xef\xbb\xbf" + b"The first words.\n\nThe next.\n\n" * 20)
    assert run("b.txt", *SMALL, "--valid-share", "0", "--out", "set") == 0
    dataset = TokenDataset.open("set", "train", 8)
    assert "\ufeff" not in dataset.tokenizer().decode(dataset.blocks(np.arange(len(dataset))).ravel())


def test_a_preset_is_a_set_of_defaults() -> None:
    config = command.read(["wikipedia", "--vocab-size", "8192", "--out", "data/wiki"])
    wikipedia = PRESETS["wikipedia"]()
    assert (config.inputs, config.key_field, config.filter) == (wikipedia.inputs, "id", "wikipedia")
    assert (config.vocab_size, config.out) == (8192, Path("data/wiki"))


def test_the_preset_tells_where_reading_an_article_stops() -> None:
    told = (PRESETS["wikipedia"].__doc__ or "").split("reading stops at ")[1].split(";")[0]
    headings = " ".join(told.replace(" or ", ", ").split()).split(", ")
    assert len(headings) == 9
    prose = "A sentence of some length that counts as prose here. " * 15
    for heading in headings:
        assert wikipedia_text(f"{prose}\n{heading}\n{prose}") == prose.strip()


def test_help_shows_presets_and_options(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("--help") == 0
    out = capsys.readouterr().out
    assert all(f"  {name}: " in out for name in PRESETS)
    assert "--train-tokenizer" in out
    assert "diladiff prepare stories --stories 20000 --out data/stories" in out


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("", "inputs: name a preset (openwebtext, wikipedia, tinystories, stories), files or hf:NAME"),
        ("nowhere.txt", "input nowhere.txt: no such file"),
        ("storys", "input storys: neither a file nor a preset; did you mean stories, as the first word?"),
        ("hf:", "input hf:: names no data set; write hf:NAME[@SUBSET][#SPLIT]"),
        ("a.jsonl --vocab-sise 9", "no option --vocab-sise; did you mean --vocab-size?"),
        ("a.jsonl --vocab-size many", "--vocab-size: "),
        ("a.jsonl --packing document", "length None: with packing document, set --length"),
        ("a.jsonl --valid-share 0.7 --test-share 0.7", "valid_share 0.7 and test_share 0.7: leave nothing to train on"),
        ("a.jsonl --train-tokenizer 20", "train_tokenizer 20: the bytes and special tokens alone need 259"),
        ("a.jsonl --tokenizer no/such", "tokenizer 'no/such': neither a folder nor a name that can be fetched"),
        ("a.jsonl --train-tokenizer 280 --out a.jsonl", "out a.jsonl: exists and is not a data set"),
        ("a.jsonl --train-tokenizer 280 --valid nowhere.jsonl", "input nowhere.jsonl: no such file"),
        ("stories --stories-weights none", "stories: no weights at none; run `make parts`"),
        ("stories --stories-device gpu", "stories_device gpu: is not known, give cpu, cuda or cuda:1"),
    ],
)
def test_a_wrong_command(arguments: str, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert complaint(capsys, *arguments.split()).startswith(line)


def test_a_damaged_file(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = bytearray(gzip.compress((here / "a.jsonl").read_bytes()))
    raw[len(raw) // 2] ^= 4
    (here / "b.jsonl.gz").write_bytes(raw)
    said = complaint(capsys, "b.jsonl.gz", *SMALL, "--out", "set")
    assert said.startswith("input b.jsonl.gz: damaged or cut after row ")


def test_after_a_wrong_field_the_right_one_may_follow(capsys: pytest.CaptureFixture[str]) -> None:
    said = complaint(capsys, "a.jsonl", *SMALL, "--text-field", "body", "--out", "set")
    assert said == "all of the first 256 rows are bad, such as: a.jsonl, row 1: no field 'body', only text, id"
    assert run("a.jsonl", *SMALL, "--out", "set") == 0


def test_where_nothing_is_left_to_train_on(here: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = complaint(capsys, "a.jsonl", *SMALL, "--valid-documents", "400", "--out", "set")
    assert said == "no training document was found in 300 rows (300 valid)"
    assert run("a.jsonl", *SMALL, "--valid-share", "0", "--out", "set") == 0
    assert "valid" not in json.loads((here / "set/dataset.json").read_text())["splits"]
    assert not list((here / "set").glob("valid-*"))
    (here / "empty.txt").write_text("")
    assert complaint(capsys, "empty.txt", *SMALL, "--out", "other").endswith("in 0 rows (the input is empty)")
