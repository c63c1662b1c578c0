"""Checkpoints: folders of safetensors and JSON that are whole or not there, with a pointer to the last one.

A folder is written under a temporary name, flushed, renamed, and only then does LATEST name it, with the sha256 of its
manifest, which in turn holds that of every file. Nothing is ever unpickled. One process writes.
"""

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor

from diladiff import files

LATEST = "LATEST"
LOCK = ".lock"
STATE = "state.json"
FOLDER = "checkpoints"

Tensors = dict[str, dict[str, Tensor]]
"""File name without its suffix -> tensor name -> tensor."""


class Checkpoint(NamedTuple):
    """What a folder holds."""

    folder: Path
    tensors: Tensors
    state: dict[str, Any]


@contextlib.contextmanager
def sole_writer(run: Path) -> Iterator[None]:
    """Hold a run folder for this process; the system lets go of it however the process ends."""
    handle = os.open(run / LOCK, os.O_CREAT | os.O_RDWR)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(handle)
        raise ValueError(f"{run} is in use by another process: wait for it, or train into another folder") from None
    except OSError as error:
        # Some cluster file systems have no locks; training there is as good as before there was one.
        if error.errno not in (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK):
            raise
    try:
        yield
    finally:
        os.close(handle)


def save(run: Path, step: int, tensors: Tensors, state: dict[str, Any]) -> Path:
    """Write a step's checkpoint and let LATEST name it; where that fails, the earlier ones stay as they were."""
    folder = run / FOLDER / f"step_{step:06d}"
    try:
        with files.fresh_folder(folder) as temporary:
            for name, content in tensors.items():
                whole = {key: value.detach().cpu().contiguous() for key, value in content.items()}
                save_file(whole, temporary / f"{name}.safetensors")
            files.write_atomic(temporary / STATE, json.dumps(state, indent=1) + "\n")
        files.write_atomic(run / LATEST, f"{folder.name} {files.sha256(folder / files.MANIFEST)}\n")
    except (OSError, SafetensorError) as error:
        raise OSError(f"cannot write {folder} ({_reason(error)}): {_way_back(run)}") from error
    return folder


def prune(run: Path, *, keep_last: int, keep_every_steps: int | None) -> list[Path]:
    """Remove all but the last checkpoints and those whose step is a multiple; returns what was removed."""
    old = _folders(run)[:-keep_last]
    removed = [f for f in old if keep_every_steps is None or _step_of(f) % keep_every_steps]
    for folder in removed:
        # Renamed first, so that what a kill leaves behind cannot be taken for a checkpoint.
        aside = folder.with_name(f".{folder.name}.tmp-old")
        folder.rename(aside)
        shutil.rmtree(aside)
    return removed


def latest(run: Path) -> Path | None:
    """The folder that LATEST names, after checking that they belong together; None where there is no LATEST."""
    pointer = run / LATEST
    if not pointer.is_file():
        return None
    found = re.fullmatch(r"(step_\d{6,})(?: ([0-9a-f]{64}))?\n?", pointer.read_bytes().decode(errors="replace"))
    if found is None:
        raise ValueError(f"{pointer} is damaged: {_way_back(run)}")
    folder = run / FOLDER / found[1]
    manifest = folder / files.MANIFEST
    if not manifest.is_file():
        raise ValueError(f"{pointer} names {folder}, which is missing or not complete: {_way_back(run)}")
    if found[2] is not None and files.sha256(manifest) != found[2]:
        raise ValueError(f"{pointer} and {manifest} do not belong together, one of them is corrupt: {_way_back(run)}")
    return folder


def check(run: Path, folder: Path) -> None:
    """Raise ValueError, naming the file and the way back, where any bit of a checkpoint changed."""
    try:
        files.verify(folder)
    except ValueError as error:
        raise ValueError(f"{error}; {_way_back(run)}") from None


def load(folder: Path) -> Checkpoint:
    """Read a folder that `check` has passed."""
    tensors = {path.stem: load_file(path) for path in sorted(folder.glob("*.safetensors"))}
    return Checkpoint(folder, tensors, load_state(folder))


def load_state(folder: Path) -> dict[str, Any]:
    """The part of a checkpoint that is not tensors."""
    return files.read_json(folder / STATE)


def _folders(run: Path) -> list[Path]:
    return sorted((f for f in (run / FOLDER).glob("step_*") if f.is_dir()), key=_step_of)


def _step_of(folder: Path) -> int:
    return int(folder.name.removeprefix("step_"))


def _way_back(run: Path) -> str:
    """Which checkpoint can be relied on, and how to go on from it."""
    for folder in reversed(_folders(run)):
        try:
            files.verify(folder)
        except (ValueError, OSError):
            continue
        return f"{folder.name} is whole, `echo {folder.name} > {run / LATEST}` and the same command go on from it"
    return "there is no whole checkpoint, start anew in another folder"


def _reason(error: OSError | SafetensorError) -> str:
    full = "No space left on device"
    text = str(error)
    return full if full in text else text.removeprefix("Error while serializing: ")
