"""Stories of a known law, drawn by examples/stories_law.py into JSON lines, one file a seed."""

import contextlib
import functools
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

PER_SEED = 8192
TRAIN_SEED = 100
VALID_SEED = 800
LAST_SEED = 899
LOOK_SECONDS = 1.0


def default_weights() -> Path:
    """Where `make parts` puts the weights."""
    root = Path(os.environ.get("DILADIFF_PARTS") or Path.home() / ".cache" / "diladiff" / "parts")
    return root / "stories-llama" / "llama2.data"


def law_script() -> Path:
    """The example that knows the law; it is part of a checkout, not of an installed package."""
    path = Path(__file__).resolve().parents[3] / "examples" / "stories_law.py"
    if not path.is_file():
        raise ValueError(f"stories: {path} is missing; the preset works in a checkout of the project")
    return path


def plan(train: int, valid: int, device: str = "cpu") -> list[tuple[str, int, int]]:
    """(file name, stories, seed) of every file; the seeds of the two splits have nothing in common."""
    last = TRAIN_SEED + -(-train // PER_SEED) - 1
    if last >= VALID_SEED or VALID_SEED + -(-valid // PER_SEED) - 1 > LAST_SEED:
        raise ValueError(f"stories {train} and {valid}: at most {(VALID_SEED - TRAIN_SEED) * PER_SEED} have own seeds")
    return [*_files("train", train, TRAIN_SEED, device), *_files("valid", valid, VALID_SEED, device)]


def draw(
    folder: Path, train: int, valid: int, *, weights: Path, device: str, progress: Callable[[int], None]
) -> dict[str, list[str]]:
    """Draw what is not there yet and give each split's files; `progress` hears how many stories there are."""
    if not weights.is_file():
        raise ValueError(f"stories: no weights at {weights}; run `make parts`, or name them with --stories-weights")
    files = plan(train, valid, device)
    folder.mkdir(parents=True, exist_ok=True)
    for old in {path.name for path in folder.iterdir()} - {name for name, _, _ in files}:
        (folder / old).unlink()
    found: dict[str, list[str]] = {"train": [], "valid": []}
    done = 0
    for name, count, seed in files:
        path = folder / name
        if not path.is_file():
            temporary = path.with_suffix(".part")
            options = {"stories": count, "seed": seed, "device": device, "wave": _wave(device, count), "out": temporary}
            command = [sys.executable, str(law_script()), "sample", str(weights)]
            command += [word for option, value in options.items() for word in (f"--{option}", str(value))]
            _run(command, functools.partial(_look, temporary, done, progress))
            os.replace(temporary, path)
        done += count
        progress(done)
        found[name.split("-")[0]].append(str(path))
    return found


def _files(split: str, count: int, first_seed: int, device: str) -> Iterator[tuple[str, int, int]]:
    """The name says all that decides a file's stories, so that a killed run of other settings leaves nothing to mix."""
    for number, start in enumerate(range(0, count, PER_SEED)):
        seed, size = first_seed + number, min(PER_SEED, count - start)
        yield f"{split}-{seed:05d}-{device.partition(':')[0]}-{size}.jsonl", size, seed


def _run(command: list[str], look: Callable[[], None]) -> None:
    """Run a command to its end, with a look at what it has written now and then; it does not outlive this call."""
    with tempfile.TemporaryFile("w+") as errors:
        process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            while process.poll() is None:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(LOOK_SECONDS)
                look()
        finally:
            process.kill()
            process.wait()
        errors.seek(0)
        if process.returncode:
            reason = (errors.read().strip().splitlines() or ["no message"])[-1]
            raise ValueError(f"stories: {Path(command[1]).name} failed ({reason})")


def _look(path: Path, before: int, progress: Callable[[int], None]) -> None:
    """Tell how many stories there are, with those of the file that is being written."""
    progress(before + (path.read_bytes().count(b"\n") if path.is_file() else 0))


def _wave(device: str, count: int) -> int:
    """Stories drawn side by side: one in ten does not end and is left out."""
    return min(2048 if device.startswith("cuda") else 128, count + count // 8 + 4)
