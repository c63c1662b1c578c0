"""Rows, trackers, the terminal and the picture."""

import io
import json
import sys
import types

import pytest
from rich.console import Console

from diladiff.engine import logging
from diladiff.engine.logging import Log, MetricsFile, Silent, Terminal, draw_losses, read_rows


def test_rows_after_the_resumed_step_and_a_cut_line_are_dropped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.5}\n{"step": 3, "lo')
    MetricsFile(tmp_path, 1).write({"step": 2, "loss": 1.25})
    assert path.read_text() == '{"step": 1, "loss": 2.0}\n{"step": 2, "loss": 1.25}\n'
    assert read_rows(tmp_path) == [{"step": 1, "loss": 2.0}, {"step": 2, "loss": 1.25}]


def test_a_damaged_line_is_named(tmp_path):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n{"st\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl is damaged"):
        read_rows(tmp_path)


def test_wandb_gets_rows_under_the_run_s_name(tmp_path, monkeypatch):
    calls = []

    class Run:
        def log(self, values, step):
            calls.append((step, values))

        def finish(self):
            calls.append("finish")

    def init(**options):
        calls.append(options)
        return Run()

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    log = Log(tmp_path / "tiny", 0, ("wandb",), {"lr": 1}, Silent())
    log.write({"step": 3, "loss": 1.0, "mfu": None})
    log.close()
    assert calls[0]["config"] == {"lr": 1}
    assert calls[0]["name"] == "tiny"
    assert calls[1:] == [(3, {"loss": 1.0}), "finish"]


def test_tensorboard_writes_events(tmp_path):
    pytest.importorskip("tensorboard")
    log = Log(tmp_path, 0, ("tensorboard",), {}, Silent())
    log.write({"step": 3, "loss": 1.0})
    log.close()
    (events,) = (tmp_path / "tensorboard").iterdir()
    assert b"loss" in events.read_bytes()


def test_a_tracker_that_is_not_installed_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ValueError, match=r"track: wandb is not installed; pip install 'diladiff\[track\]'"):
        logging.trackers(("wandb",), tmp_path, {})


@pytest.mark.parametrize("is_terminal", [True, False])
def test_the_terminal_shows_rows_and_notes(is_terminal):
    out = io.StringIO()
    terminal = Terminal(Console(file=out, force_terminal=is_terminal, width=100))
    terminal.begin("tiny", 0, 4)
    terminal.advance(1)
    terminal.row({"step": 1, "loss": 2.34567, "tokens_per_s": 12345.6, "mfu": None})
    terminal.note("stopped [by] me")
    terminal.end()
    assert "step 1  loss 2.346  tokens_per_s 12,346\n" in out.getvalue().replace("\x1b[2K", "").replace("\r", "")
    assert "stopped [by] me" in out.getvalue()
    assert ("tiny" in out.getvalue()) == is_terminal


def test_the_picture_shows_every_loss(tmp_path):
    pytest.importorskip("matplotlib")
    assert draw_losses(tmp_path) is None
    rows = [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}, {"step": 2, "val_loss": 1.5}]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert draw_losses(tmp_path).read_bytes().startswith(b"\x89PNG")
