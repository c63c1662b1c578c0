"""What made a run: its resolved configuration with a hash, the source's commit, the versions of what it ran on."""

import importlib.metadata
import json
import platform
import subprocess
from pathlib import Path
from typing import Any

from diladiff import config, files

CONFIG = "config.json"
SCHEMA = 1
PACKAGES = ("diladiff", "torch", "numpy", "safetensors", "tokenizers", "transformers")


def versions() -> dict[str, str | None]:
    """The versions of Python and of the packages that can change a number."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    return found


def git_state() -> dict[str, Any]:
    """The commit of this source tree and whether it was changed since; nulls where it is not under git."""
    here = Path(__file__).resolve()
    if _git(here.parent, "ls-files", "--error-unmatch", here.name) is None:
        return {"commit": None, "dirty": None}
    changed = _git(here.parent, "status", "--porcelain", "--untracked-files=no")
    return {"commit": _git(here.parent, "rev-parse", "HEAD"), "dirty": None if changed is None else bool(changed)}


def write_config(run: Path, identity: dict[str, Any]) -> None:
    """Write the run's config.json."""
    held = {
        "schema": SCHEMA,
        "config": config.to_dict(identity),
        "hash": config.digest(identity),
        "git": git_state(),
        "versions": versions(),
    }
    files.write_atomic(run / CONFIG, _text(held))


def read_config(run: Path) -> dict[str, Any]:
    """The configuration in a run's config.json, in which every bit is checked."""
    path = run / CONFIG
    if not path.is_file():
        raise ValueError(f"{path} is missing: {run} is not a run folder")
    held = files.read_json(path)
    if not isinstance(held, dict) or held.get("schema") != SCHEMA or "config" not in held:
        raise ValueError(f"{path} is damaged or of another schema than {SCHEMA}: restore it")
    held.pop("digest", None)
    if path.read_bytes() != _text(held).encode():
        raise ValueError(f"{path} is not what was written: it is corrupt or was edited, restore it")
    return held["config"]


def refuse_another(run: Path, identity: dict[str, Any], held: dict[str, Any]) -> None:
    """Raise ValueError with the fields that differ where a run was begun with another configuration."""
    lines = config.difference(held, config.to_dict(identity))
    if lines:
        raise ValueError(
            f"{run} was begun with another configuration ({'; '.join(lines)}): give these fields their old values, "
            "or train into another folder"
        )


def _text(held: dict[str, Any]) -> str:
    """The one way to write a config.json, with a digest of all that is in it."""
    return json.dumps({**held, "digest": config.digest(held)}, indent=1) + "\n"


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=False, timeout=20)
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout.strip() if done.returncode == 0 else None
