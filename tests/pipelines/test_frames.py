"""Frames: pieces cover every position, joined they are the text, and a recording tells when each token came."""

import json

import pytest
import torch

from diladiff import MaskedLM
from diladiff.pipelines.frames import FrameMaker, record, spell
from diladiff.samplers.base import TokenState


def state(ids, changed):
    """A state of one sample."""
    return TokenState(torch.tensor([ids]), 1, 2, torch.tensor(changed, dtype=torch.int64), 1)


def test_pieces_tell_given_known_new_and_masked(tokenizer):
    once, lily, ran = (tokenizer.encode([text])[0] for text in ("Once", " Lily", " ran"))
    mask = tokenizer.mask_id
    ids = [*once, mask, mask, *lily, *ran, tokenizer.end_id, tokenizer.pad_id, mask]
    canvas = torch.tensor([*once, *[mask] * (len(ids) - len(once))])
    at = len(once) + 2
    frame = FrameMaker(tokenizer, canvas).make(state(ids, range(at, at + len(lily))), 0.5)
    assert [(piece.kind, piece.text) for piece in frame.rows[0]] == [
        ("given", "Once"),
        ("mask", ""),
        ("new", " Lily"),
        ("known", " ran"),
    ]
    assert sum(piece.positions for piece in frame.rows[0]) == len(ids) - 3
    assert frame.seconds == 0.5
    joined = FrameMaker(tokenizer.with_packing("joined"), canvas).make(state(ids, []), 0.0)
    assert sum(piece.positions for piece in joined.rows[0]) == len(ids)


@pytest.mark.parametrize("sampler", ["ancestral", "remasking"])
def test_a_frames_pieces_join_to_the_text(lm, sampler):
    """Exactly so where no character is spread over two tokens, which the last frame drops and the text marks."""
    frames = list(lm.stream(2, steps=8, prompt="Once upon", sampler=sampler))
    texts = lm.generate(2, steps=8, prompt="Once upon", sampler=sampler).texts
    for row, text in zip(frames[-1].rows, texts, strict=True):
        shown = "".join(piece.text for piece in row)
        assert shown.isascii() is not None
        assert [c for c in shown if c.isascii()] == [c for c in text if c.isascii()]
        assert row[0].text == "Once upon"


def test_a_recording_spells_the_text_and_when_each_token_came(lm):
    recording = json.loads(json.dumps(record(lm.tokenizer, lm.stream(1, steps=8, prompt="Once upon", seed=2))))
    samples = lm.generate(1, steps=8, prompt="Once upon", seed=2)
    (row,) = recording["rows"]
    (prompt_ids,) = lm.tokenizer.encode(["Once upon"])
    assert "".join(text for text, _ in row) == samples.texts[0].rstrip("\ufffd")
    assert [step for _, step in row[: len(prompt_ids)]] == [0] * len(prompt_ids)
    assert {step for _, step in row[len(prompt_ids) :]} <= set(range(1, 9))
    assert recording["steps"] == 8


def test_a_character_in_several_tokens_comes_with_its_last(tokenizer):
    (ids,) = tokenizer.encode(["a\u00e9b"])
    assert spell(tokenizer, [*ids, tokenizer.end_id, *ids]) == ["a", "", "\u00e9", "b"]


def test_joined_documents_are_shown_apart(lm):
    tokenizer = lm.tokenizer.with_packing("joined")
    joined = MaskedLM(lm.model, tokenizer)
    (ids,) = tokenizer.encode(["Lily ran"])
    canvas = torch.tensor([*ids, tokenizer.separator_id, *ids])
    (frame,) = joined.stream(1, canvas=canvas)
    assert "".join(piece.text for piece in frame.rows[0]) == "Lily ran\n\nLily ran"
