"""`diladiff demo`: the text forms, in place on a terminal and in lines elsewhere; the model that ships is found."""

import io
import json
import os
import subprocess
import sys

import pytest
from rich.console import Console

from diladiff import MaskedLM
from diladiff.cli import demo
from diladiff.cli.main import main
from diladiff.cli.terminal import paint, printable
from diladiff.pipelines.frames import Piece


def test_without_a_terminal_it_prints_lines(capsys, model, monkeypatch):
    monkeypatch.chdir(model.parents[1])
    assert main(["demo", "--steps", "12", "--num", "2", "--seed", "3", "--device", "cpu", "--prompt", "Lily saw"]) == 0
    out = capsys.readouterr().out
    assert "mdlm_stories" in out
    assert out.count("step 0: Lily saw _ _") == 2
    finished = [line for line in out.splitlines() if line.startswith("step ") and " _" not in line]
    assert len(finished) == 2
    assert all("Lily saw" in line for line in finished)
    assert 2 * 3 < out.count("step ") <= 2 * (demo.PLAIN_STATES + 1)
    assert "of computing" in out
    assert "tokens/s" in out


def test_on_a_terminal_masks_turn_into_words_in_place(model):
    lm = MaskedLM.from_pretrained(model, device="cpu")
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system="standard", legacy_windows=False)
    seconds = demo._live(lm.stream(steps=6, prompt="Lily saw"), console, pace=0.0)
    out = console.file.getvalue()
    assert seconds > 0
    assert out.count("Lily saw") >= 5
    assert "\u2592" in out
    assert "\x1b[1;30;102m" in out  # what a step revealed
    assert "\u2592" not in out.rpartition("Lily saw")[2]


def test_pieces_have_their_colours_and_cannot_steer_the_terminal():
    text = paint([Piece("given", "Lily\x1b[2J", 2), Piece("mask", "", 2), Piece("new", " ran\n", 1)])
    assert text.plain == "Lily[2J" + 2 * "\u2592\u2592\u2592 " + " ran\n"
    assert [str(span.style) for span in text.spans] == ["bold", "bright_black", "bold black on bright_green"]
    assert printable("a\r\x07b\tc\n\u00e9") == "abc\n\u00e9"


def test_the_newest_model_is_found_here_first(tmp_path, monkeypatch):
    for place in ("here", "package"):
        for number, name in enumerate(("mdlm_stories_b", "mdlm_stories_a", "mdlm_other_c")):
            folder = tmp_path / place / "pretrained" / name
            folder.mkdir(parents=True)
            (folder / "config.json").write_text("{}")
            os.utime(folder / "config.json", (1000 + number, 1000 + number))
    monkeypatch.setattr(demo, "package", str(tmp_path / "package" / "src" / "diladiff" / "__init__.py"))
    monkeypatch.chdir(tmp_path / "here")
    assert demo.find_model() == tmp_path / "here" / "pretrained" / "mdlm_stories_a"
    monkeypatch.chdir(tmp_path)
    assert demo.find_model() == tmp_path / "package" / "pretrained" / "mdlm_stories_a"


def test_without_a_model_it_says_what_to_do(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(demo, "package", str(tmp_path / "a" / "b" / "c" / "__init__.py"))
    monkeypatch.chdir(tmp_path)
    assert main(["demo"]) == 2
    assert "no model: pretrained/mdlm_stories*" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [(["--num", "0"], "--num: 0"), (["--step", "3"], "--steps"), (["--prompt", "Lily ran. " * 30], "leave nothing")],
)
def test_bad_input_is_one_line(capsys, model, monkeypatch, arguments, words):
    monkeypatch.chdir(model.parents[1])
    assert main(["demo", *arguments]) == 2
    err = capsys.readouterr().err
    assert words in err
    assert err.count("\n") == 1


def test_importing_it_needs_neither_transformers_nor_the_hub():
    """The first frame waits for torch alone."""
    script = (
        "import sys, json, diladiff; early = 'torch' in sys.modules\n"
        "import diladiff.cli.main, diladiff.cli.demo; command = 'torch' in sys.modules\n"
        "import diladiff.cli.terminal, diladiff.pipelines.masked_lm\n"
        "heavy = [n for n in ('transformers', 'huggingface_hub', 'torch._dynamo', 'datasets') if n in sys.modules]\n"
        "print(json.dumps([early, command, heavy]))"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == [False, False, []]
