"""Samples files: what is written is read, and a damaged file is refused with the place."""

import json

import pytest

from diladiff.pipelines.samples import read_samples, write_samples


@pytest.fixture
def path(lm, tmp_path):
    """A file of three samples that begin with number 4."""
    samples = lm.generate(3, steps=3, first_index=4, prompt="Lily \u2028 ran")
    write_samples(tmp_path / "samples.jsonl", samples, model=lm.identity)
    return tmp_path / "samples.jsonl"


def test_a_file_gives_back_samples_and_settings(lm, path):
    header, rows = read_samples(path)
    samples = lm.generate(3, steps=3, first_index=4, prompt="Lily \u2028 ran")
    assert [row["index"] for row in rows] == [4, 5, 6]
    assert [row["text"] for row in rows] == samples.texts
    assert [row["ids"] for row in rows] == samples.ids.tolist()
    assert header["settings"] == json.loads(json.dumps(samples.settings))
    assert header["model"]["weights_sha256"] == lm.identity["weights_sha256"]
    assert header["num"] == 3
    assert {"diladiff", "torch", "python"} <= header["versions"].keys()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda lines: lines[1:], "does not begin with the header"),
        (lambda lines: lines[:-1], "holds 2 samples where its header says 3"),
        (lambda lines: [*lines[:2], lines[2][:-5], *lines[3:]], "line 3: not valid JSON"),
        (lambda lines: [*lines[:3], "{}"], "line 4: not a sample"),
        (lambda lines: [lines[0].replace('"schema": 1', '"schema": 9'), *lines[1:]], "schema 9"),
        (lambda lines: [], "does not begin with the header"),
    ],
)
def test_damage_is_refused_with_the_place(path, damage, words):
    lines = path.read_text().splitlines()
    path.write_text("\n".join(damage(lines)))
    with pytest.raises(ValueError, match=words):
        read_samples(path)
