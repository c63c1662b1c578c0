"""The models that ship: whole, of the promised size, with a card, and able to write."""

from pathlib import Path

import pytest

from diladiff import MaskedLM

SHIPPED = sorted(path.parent for path in (Path(__file__).parents[2] / "pretrained").glob("*/config.json"))


def test_a_model_ships():
    assert SHIPPED


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda folder: folder.name)
def test_a_shipped_model_has_a_card_and_writes_what_a_prompt_began(folder):
    assert sum(path.stat().st_size for path in folder.iterdir()) <= 40e6
    card = (folder / "README.md").read_text()
    assert all(words in card for words in ("license:", "steps", "tokens", "seed", "held-out bound", "nats a token"))
    lm = MaskedLM.from_pretrained(folder, device="cpu")
    (text,) = lm.generate(prompt="Once upon a time, there was a", steps=8, seed=0).texts
    assert text.startswith("Once upon a time, there was a")
    assert len(set(text.split())) > 20
