"""The README's moving picture: every token is drawn once, in its place, and its animation belongs to its step."""

import importlib.util
import json
import xml.dom.minidom
from pathlib import Path

import pytest

SCRIPT = Path(__file__).resolve().parents[2] / "docs" / "make_demo_picture.py"


@pytest.fixture(scope="module")
def script():
    """docs/make_demo_picture.py as a module."""
    spec = importlib.util.spec_from_file_location("make_demo_picture", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


ROW = [["Once", 0], [" upon a", 0], [" ti", 3], ["me\n\n", 1], ["<Li", 2], ["ly> \x1b", 2], ["!", 3]]


def test_tokens_stand_where_their_characters_end_up(script):
    assert [tuple(fragment) for fragment in script.lay_out(ROW)] == [
        (0, 0, "Once", 0),
        (0, 5, "upon", 0),
        (0, 10, "a", 0),
        (0, 12, "ti", 3),
        (0, 14, "me", 1),
        (2, 0, "<Li", 2),
        (2, 3, "ly>", 2),
        (2, 7, "!", 3),
    ]


def test_long_lines_break_between_words_and_never_overflow(script):
    row = [[f" {'x' * (number % 11 + 1)}", number] for number in range(100)]
    fragments = script.lay_out(row)
    assert len(fragments) == 100
    assert all(fragment.column + len(fragment.text) <= script.COLUMNS for fragment in fragments)
    assert max(fragment.line for fragment in fragments) > 5


def test_the_picture_is_well_formed_and_animates_each_step(script, tmp_path, monkeypatch):
    recording = tmp_path / "run.json"
    recording.write_text(json.dumps({"schema": 1, "steps": 4, "seconds": 0.5, "rows": [ROW]}))
    out = tmp_path / "demo.svg"
    monkeypatch.setattr("sys.argv", ["make", "--recording", str(recording), "--out", str(out)])
    script.main()
    document = xml.dom.minidom.parse(str(out))
    texts = [node.firstChild.data for node in document.getElementsByTagName("text")]
    assert texts[:-1] == ["Once", "upon", "a", "ti", "me", "<Li", "ly>", "!"]
    assert texts[-1] == "7 tokens, 4 steps, 0.50 s"
    assert len(document.getElementsByTagName("rect")) == 1 + 5
    style = document.getElementsByTagName("style")[0].firstChild.data
    assert [f"@keyframes w{step}{{" in style for step in range(5)] == [False, True, True, True, False]
