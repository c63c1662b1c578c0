"""Stories of a known law, drawn by examples/stories_law.py into JSON lines, one file a seed."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

PER_SEED = 8192
TRAIN_SEED = 100
VALID_SEED = 800
LAST_SEED = 899


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


def plan(train: int, valid: int) -> list[tuple[str, int, int]]:
    """(file name, stories, seed) of every file; the seeds of the two splits have nothing in common."""
    last = TRAIN_SEED + -(-train // PER_SEED) - 1
    if last >= VALID_SEED or VALID_SEED + -(-valid // PER_SEED) - 1 > LAST_SEED:
        raise ValueError(f"stories {train} and {valid}: at most {(VALID_SEED - TRAIN_SEED) * PER_SEED} have own seeds")
    return [*_files("train", train, TRAIN_SEED), *_files("valid", valid, VALID_SEED)]


def draw(
    folder: Path, train: int, valid: int, *, weights: Path, device: str, progress: Callable[[int], None]
) -> dict[str, list[str]]:
    """Draw what is not there yet and give each split's files; `progress` hears how many stories there are."""
    if not weights.is_file():
        raise ValueError(f"stories: no weights at {weights}; run `make parts`, or name them with --stories-weights")
    script = law_script()
    folder.mkdir(parents=True, exist_ok=True)
    found: dict[str, list[str]] = {"train": [], "valid": []}
    done = 0
    for name, count, seed in plan(train, valid):
        path = folder / name
        if not path.is_file():
            temporary = path.with_suffix(".part")
            command = [sys.executable, str(script), "sample", str(weights), "--stories", str(count)]
            command += [
                "--seed",
                str(seed),
                "--device",
                device,
                "--out",
                str(temporary),
                "--wave",
                str(_wave(device, count)),
            ]
            result = subprocess.run(command, capture_output=True, text=True, check=False)
            if result.returncode:
                reason = (result.stderr.strip().splitlines() or ["no message"])[-1]
                raise ValueError(f"stories: {script.name} failed ({reason})")
            os.replace(temporary, path)
        done += count
        progress(done)
        found[name.split("-")[0]].append(str(path))
    return found


def _files(split: str, count: int, first_seed: int) -> Iterator[tuple[str, int, int]]:
    for number, start in enumerate(range(0, count, PER_SEED)):
        seed = first_seed + number
        yield f"{split}-{seed:05d}.jsonl", min(PER_SEED, count - start), seed


def _wave(device: str, count: int) -> int:
    """Stories drawn side by side: one in ten does not end and is left out."""
    return min(2048 if device.startswith("cuda") else 128, count + count // 8 + 4)
