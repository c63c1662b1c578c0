"""Tiny corpora made on the spot."""

import json
import random
from pathlib import Path

WORDS = "the cat saw a dog and ran to its small house near big old trees where birds sing all day long".split()  # noqa: SIM905


def texts(count: int, seed: int = 0, longest: int = 30) -> list[str]:
    """Sentences of random words."""
    source = random.Random(seed)
    return [" ".join(source.choices(WORDS, k=source.randint(1, longest))).capitalize() + "." for _ in range(count)]


def write_jsonl(path: Path, rows: list[str]) -> Path:
    """Texts as JSON lines."""
    path.write_text("".join(json.dumps({"text": text, "id": i}) + "\n" for i, text in enumerate(rows)))
    return path
