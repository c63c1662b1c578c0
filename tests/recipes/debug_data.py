"""Data for debug twins, made by the very command that the recipe prints."""

import contextlib
import random
import shlex
import string
from pathlib import Path

from diladiff.cli.main import main
from diladiff.recipes import Recipe


def write_text(path: Path, lines: int = 600, seed: int = 0) -> None:
    """A file of short lines, for a vocabulary and blocks of any packing."""
    draw = random.Random(seed)
    words = ["".join(draw.choices(string.ascii_lowercase, k=draw.randint(2, 6))) for _ in range(100)]
    path.write_text("".join(" ".join(draw.choices(words, k=draw.randint(3, 9))) + ".\n" for _ in range(lines)))


def prepare(root: Path, recipe: Recipe) -> Path:
    """Run a recipe's prepare command in a folder; returns the data set's."""
    write_text(root / "README.md")
    arguments = [*shlex.split(recipe.data.prepare)[1:], "--workers", "1"]
    with contextlib.chdir(root):
        assert main(arguments) == 0
    return root / arguments[arguments.index("--out") + 1]
