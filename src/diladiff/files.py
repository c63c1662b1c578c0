"""Files that are whole or not there at all, and checked when they are read.

Nothing is written onto its final path: a temporary neighbour is filled, flushed to the disk and renamed. A folder
carries a manifest with the size and sha256 of every file in it, because no weight format notices a flipped bit.
"""

import contextlib
import hashlib
import json
import os
import shutil
import uuid
from collections.abc import Container, Iterable, Iterator
from pathlib import Path
from typing import Any

MANIFEST = "manifest.json"
MANIFEST_SCHEMA = 1


def sha256(path: Path | str) -> str:
    """The sha256 of a file's bytes, in hexadecimal."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(path: Path | str) -> Any:
    """The JSON value in a file; a ValueError names the file that does not hold one."""
    try:
        return json.loads(Path(path).read_bytes())
    except ValueError as error:  # UnicodeDecodeError is one too
        raise ValueError(f"{path} is not valid JSON ({error}): restore the file or remove it") from None


def write_atomic(path: Path | str, data: bytes | str) -> None:
    """Replace a file in one step: whoever reads it sees the old bytes or the new ones, also after a crash."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_name(path)
    try:
        with open(temporary, "wb") as file:
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    _sync_folder(path.parent)


@contextlib.contextmanager
def fresh_folder(path: Path | str) -> Iterator[Path]:
    """Fill a folder under a temporary name; when all went well it gets its manifest and its real name.

    An older folder of that name is moved aside first and removed last, so that a crash leaves one of the two whole.
    """
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = _temporary_name(path)
    temporary.mkdir()
    try:
        yield temporary
        write_manifest(temporary)
        for file in temporary.rglob("*"):
            # Some libraries let only the owner read what they write; all files get the user's usual mode.
            if file.is_file():
                shutil.copymode(temporary / MANIFEST, file)
        _sync_tree(temporary)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    if path.exists():
        aside = _temporary_name(path)
        os.rename(path, aside)
        os.rename(temporary, path)
        shutil.rmtree(aside)
    else:
        os.rename(temporary, path)
    _sync_folder(path.parent)


def remove_stale(folder: Path | str) -> list[Path]:
    """Remove what interrupted writers left in a folder, and say what that was; only for the folder's one writer."""
    removed = []
    for path in sorted(Path(folder).glob(".*.tmp-*")):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
        removed.append(path)
    return removed


def write_manifest(folder: Path | str) -> None:
    """Write the size and sha256 of every file below a folder into its manifest."""
    folder = Path(folder)
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != MANIFEST
    }
    write_atomic(folder / MANIFEST, _manifest_text(files))


def verify(folder: Path | str, *, only: Iterable[str] | None = None, ignore: Container[str] = ()) -> None:
    """Raise ValueError, naming the file, where a file of the manifest is missing, cut or changed."""
    folder = Path(folder)
    if not (folder / MANIFEST).is_file():
        raise ValueError(f"{folder} has no {MANIFEST}: it is not a complete folder written by diladiff")
    manifest = read_json(folder / MANIFEST)
    files = manifest.get("files") if isinstance(manifest, dict) else None
    if not isinstance(files, dict) or (folder / MANIFEST).read_bytes() != _manifest_text(files).encode():
        raise ValueError(f"{folder / MANIFEST} is damaged or of another schema than {MANIFEST_SCHEMA}: restore it")
    for name in files if only is None else only:
        if name not in files:
            raise ValueError(f"{folder / MANIFEST} does not list {name}: the folder is not complete")
        if name not in ignore:
            _verify_file(folder / name, files[name])


def _manifest_text(files: dict[str, Any]) -> str:
    """The one way to write a manifest, with a digest of its own, so that damage to it shows too."""
    own = hashlib.sha256(json.dumps(files, sort_keys=True).encode()).hexdigest()
    return json.dumps({"schema": MANIFEST_SCHEMA, "files": files, "sha256": own}, indent=1) + "\n"


def _verify_file(path: Path, expected: dict[str, Any]) -> None:
    if not path.is_file():
        raise ValueError(f"{path} is missing: restore the folder from its source")
    size = path.stat().st_size
    if size != expected["bytes"]:
        raise ValueError(f"{path} has {size} bytes instead of {expected['bytes']}: it was cut or changed, restore it")
    if sha256(path) != expected["sha256"]:
        raise ValueError(f"{path} does not have the sha256 it was written with: it is corrupt, restore it")


def _temporary_name(path: Path) -> Path:
    return path.parent / f".{path.name}.tmp-{uuid.uuid4().hex[:12]}"


def _sync_tree(folder: Path) -> None:
    for path in [folder, *folder.rglob("*")]:
        _sync_folder(path)


def _sync_folder(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
