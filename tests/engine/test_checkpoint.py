"""Checkpoints are whole or not there, and every changed bit is seen."""

import errno
import os
import random

import pytest
import torch

from diladiff import files
from diladiff.engine import checkpoint

TENSORS = {"objective": {"w": torch.arange(6.0).view(2, 3)}, "optim": {"step.w": torch.tensor(3.0)}}


def save(run, step, **state):
    return checkpoint.save(run, step, TENSORS, {"step": step, **state})


def test_what_is_saved_comes_back(tmp_path):
    folder = save(tmp_path, 7, config={"lr": 0.1})
    assert folder == tmp_path / "checkpoints" / "step_000007" == checkpoint.latest(tmp_path)
    assert {path.name for path in folder.iterdir()} == {
        "objective.safetensors",
        "optim.safetensors",
        "state.json",
        "manifest.json",
    }
    checkpoint.check(tmp_path, folder)
    found = checkpoint.load(folder)
    assert found.state == {"step": 7, "config": {"lr": 0.1}}
    assert found.tensors.keys() == TENSORS.keys()
    assert torch.equal(found.tensors["objective"]["w"], TENSORS["objective"]["w"])


def test_without_a_pointer_there_is_nothing(tmp_path):
    assert checkpoint.latest(tmp_path) is None


def test_the_last_ones_and_every_nth_are_kept(tmp_path):
    for step in range(1, 9):
        save(tmp_path, step)
        checkpoint.prune(tmp_path, keep_last=2, keep_every_steps=3)
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == [
        f"step_{step:06d}" for step in (3, 6, 7, 8)
    ]


@pytest.mark.parametrize("name", ["objective.safetensors", "optim.safetensors", "state.json", "manifest.json"])
def test_a_flipped_bit_is_named_with_the_way_back(tmp_path, name):
    save(tmp_path, 1)
    path = save(tmp_path, 2) / name
    data = bytearray(path.read_bytes())
    data[random.Random(0).randrange(len(data))] ^= 4
    path.write_bytes(data)
    with pytest.raises(ValueError, match=f"{name}.*step_000001 is whole, `echo step_000001 > .*LATEST`"):
        checkpoint.check(tmp_path, checkpoint.latest(tmp_path))
    (tmp_path / "LATEST").write_text("step_000001\n")
    checkpoint.check(tmp_path, checkpoint.latest(tmp_path))


def test_every_bit_of_the_pointer_matters(tmp_path):
    save(tmp_path, 10)
    save(tmp_path, 11)  # one bit away
    pointer = tmp_path / "LATEST"
    whole = pointer.read_bytes()
    for place in range(len(whole)):
        for bit in (0, 3, 5):
            flipped = bytearray(whole)
            flipped[place] ^= 1 << bit
            pointer.write_bytes(flipped)
            with pytest.raises(ValueError, match="LATEST"):
                checkpoint.latest(tmp_path)


def test_a_missing_folder_is_named(tmp_path):
    folder = save(tmp_path, 1)
    folder.rename(tmp_path / "elsewhere")
    with pytest.raises(ValueError, match=r"step_000001, which is missing.*start anew"):
        checkpoint.latest(tmp_path)


@pytest.mark.parametrize("where", ["fsync", "replace", "rename"])
def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path, monkeypatch, where):
    before = save(tmp_path, 1)

    def full(*arguments, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, where, full)
    with pytest.raises(OSError, match=r"step_000002 \(No space left on device\): step_000001 is whole"):
        save(tmp_path, 2)
    monkeypatch.undo()
    assert checkpoint.latest(tmp_path) == before
    checkpoint.check(tmp_path, before)
    files.remove_stale(tmp_path / "checkpoints")
    assert list((tmp_path / "checkpoints").iterdir()) == [before]


def test_a_kill_between_write_and_pointer_leaves_the_previous_one(tmp_path, monkeypatch):
    before = save(tmp_path, 1)
    write = files.write_atomic

    def killed(path, data):
        if path.name == "LATEST":
            raise KeyboardInterrupt
        write(path, data)

    monkeypatch.setattr(files, "write_atomic", killed)
    with pytest.raises(KeyboardInterrupt):
        save(tmp_path, 2)
    assert checkpoint.latest(tmp_path) == before
    monkeypatch.undo()
    save(tmp_path, 2)  # over the folder that no pointer names
    assert checkpoint.latest(tmp_path).name == "step_000002"


def test_a_run_has_one_writer(tmp_path):
    with checkpoint.sole_writer(tmp_path), pytest.raises(ValueError, match="in use by another process"):
        checkpoint.sole_writer(tmp_path).__enter__()
    with checkpoint.sole_writer(tmp_path):
        pass


def test_nothing_is_unpickled(tmp_path):
    """A pickle where weights should be is refused, not run."""
    folder = save(tmp_path, 1)
    torch.save({"w": torch.ones(1)}, folder / "objective.safetensors")
    files.write_manifest(folder)
    with pytest.raises(Exception, match="header"):
        checkpoint.load(folder)
