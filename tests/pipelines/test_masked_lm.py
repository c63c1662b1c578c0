"""MaskedLM.generate and stream: the same text in any batch, given text untouched, clear errors."""

import itertools

import pytest
import torch

import diladiff
from diladiff.config import to_dict
from diladiff.pipelines.masked_lm import parse_dtype, pick_device
from diladiff.samplers import SAMPLERS, Ancestral, ConfidenceTopK, DrawConfig

PROMPT = "Once upon a  time"


@pytest.mark.parametrize("sampler", list(SAMPLERS))
def test_a_text_does_not_depend_on_its_batch(lm, sampler):
    settings = {"steps": 6, "seed": 3, "sampler": sampler, "top_p": 0.95}
    together = lm.generate(5, **settings)
    split = lm.generate(5, batch_size=2, **settings)
    alone = lm.generate(1, first_index=3, **settings)
    assert torch.equal(together.ids, split.ids)
    assert together.texts == split.texts
    assert together.texts[3] == alone.texts[0]
    assert torch.equal(together.ids[3], alone.ids[0])
    assert alone.first_index == 3
    assert not bool((together.ids == lm.tokenizer.mask_id).any())
    assert together.tokens == 5 * lm.model.config.length
    assert together.tokens_per_second > 0


def test_another_seed_writes_another_text(lm):
    assert lm.generate(steps=4, seed=1).texts != lm.generate(steps=4, seed=2).texts


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_deterministic_shapes_make_a_text_independent_of_its_batch_bit_by_bit(tokenizer, build, dtype):
    lm = build(tokenizer)
    lm.model.to(parse_dtype(dtype))
    together = lm.generate(4, steps=5, batch_size=4, deterministic=True)
    alone = lm.generate(1, steps=5, batch_size=4, deterministic=True, first_index=2)
    assert torch.equal(together.ids[2], alone.ids[0])


def test_the_settings_say_how_to_make_the_texts_again(lm):
    config = ConfidenceTopK(steps=3, draw=DrawConfig(top_p=0.5))
    samples = lm.generate(2, sampler=config, seed=9, prompt=PROMPT)
    assert samples.settings["sampler"] == to_dict(config)
    assert samples.settings["seed"] == 9
    assert samples.settings["protocol"]["text"] == PROMPT + "___"
    assert samples.settings["dtype"] == "float32"


@pytest.mark.parametrize("sampler", list(SAMPLERS))
def test_a_prompt_comes_back_word_for_word(lm, sampler):
    (prompt_ids,) = lm.tokenizer.encode([PROMPT])
    samples = lm.generate(3, steps=5, prompt=PROMPT, sampler=sampler)
    for ids, text in zip(samples.ids.tolist(), samples.texts, strict=True):
        assert ids[: len(prompt_ids)] == prompt_ids
        assert text.startswith(PROMPT)
        assert text == lm.tokenizer.decode(ids)
    assert samples.tokens == 3 * (lm.model.config.length - len(prompt_ids))


def test_prompt_and_suffix_enclose_the_text(lm):
    suffix = " and ran."
    (suffix_ids,) = lm.tokenizer.encode([suffix])
    samples = lm.generate(3, steps=5, prompt=PROMPT, suffix=suffix)
    for ids, text in zip(samples.ids.tolist(), samples.texts, strict=True):
        assert text.startswith(PROMPT)
        assert text.endswith(suffix)
        assert ids[-len(suffix_ids) - 1 : -1] == suffix_ids
        assert ids[-1] == lm.tokenizer.end_id
    joined = diladiff.MaskedLM(lm.model, lm.tokenizer.with_packing("joined")).generate(1, steps=5, suffix=suffix)
    assert joined.ids[0, -len(suffix_ids) :].tolist() == suffix_ids
    assert joined.texts[0].endswith(suffix)


def test_infilling_writes_only_the_blanks(lm):
    samples = lm.generate(4, steps=5, canvas="Lily saw a ___ and ran ____ home.", blank_tokens=2)
    pieces = [lm.tokenizer.encode([text])[0] for text in ("Lily saw a", " and ran", " home.")]
    for ids, text in zip(samples.ids.tolist(), samples.texts, strict=True):
        at = len(pieces[0]) + 2
        assert ids[: len(pieces[0])] == pieces[0]
        assert ids[at : at + len(pieces[1])] == pieces[1]
        end = at + len(pieces[1]) + 2 + len(pieces[2])
        assert ids[end - len(pieces[2]) : end] == pieces[2]
        assert ids[end] == lm.tokenizer.end_id
        assert set(ids[end + 1 :]) == {lm.tokenizer.pad_id}
        assert text.startswith("Lily saw a")
        assert " and ran" in text
        assert text.endswith(" home.")
    assert samples.tokens == 4 * 4


def test_a_blank_at_the_end_takes_what_is_left(lm):
    canvas = lm.canvas(canvas="Lily saw ___", blank_tokens=2)
    assert len(canvas.ids_L) == lm.model.config.length
    assert canvas.ids_L[-1] == lm.tokenizer.mask_id
    assert lm.canvas(canvas="Lily ___", length=9).ids_L.shape == (9,)


def test_a_canvas_of_ids_keeps_every_id_that_is_no_mask(lm):
    canvas = torch.full((12,), lm.tokenizer.mask_id)
    canvas[[0, 5, 11]] = torch.tensor([40, 50, 60])
    samples = lm.generate(2, steps=3, canvas=canvas)
    assert samples.ids[:, [0, 5, 11]].tolist() == [[40, 50, 60]] * 2
    assert samples.ids.shape == (2, 12)


def test_a_shorter_length_writes_fewer_positions(lm):
    assert lm.generate(2, steps=3, length=7).ids.shape == (2, 7)


def test_the_stream_ends_in_the_text_of_generate(lm):
    frames = list(lm.stream(2, steps=6, seed=4, prompt=PROMPT))
    samples = lm.generate(2, steps=6, seed=4, prompt=PROMPT)
    assert torch.equal(frames[-1].ids, samples.ids)
    assert frames[0].step == 0
    assert frames[-1].step == frames[-1].steps == 6
    assert all(earlier.seconds <= later.seconds for earlier, later in itertools.pairwise(frames))
    assert bool((frames[0].ids == lm.tokenizer.mask_id).any())


def test_progress_is_told_of_every_state(lm):
    seen = []
    lm.generate(3, steps=4, batch_size=2, observe=lambda done, state: seen.append((done, len(state.tokens_BL))))
    assert set(seen) == {(0, 2), (2, 1)}
    assert len(seen) == 10


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"length": 41}, "length: 41 must be between 1 and 40"),
        ({"num": 0}, "num: 0"),
        ({"batch_size": 0}, "batch_size: 0"),
        ({"first_index": -1}, "first_index: -1"),
        ({"sampler": "ancestrl"}, "did you mean ancestral"),
        ({"sampler": Ancestral(), "temperature": 0.5}, "own configuration"),
        ({"prompt": "Lily ran and ran. " * 20}, "leave nothing to write in 40"),
        ({"canvas": "no blank"}, "no blank"),
        ({"canvas": "a ___", "prompt": "b"}, "give it alone"),
        ({"canvas": "a ___ b", "blank_tokens": 0}, "blank_tokens: 0"),
        ({"canvas": "a ___ b ___ c", "blank_tokens": 30}, "exceed the length of 40"),
        ({"canvas": torch.zeros(41, dtype=torch.int64)}, "canvas: shape"),
        ({"canvas": torch.tensor([1, 300])}, "canvas: ids must be in"),
        ({"steps": 0}, "steps: 0"),
    ],
)
def test_what_cannot_be_done_is_refused(lm, settings, words):
    with pytest.raises(ValueError, match=words):
        lm.generate(**{"num": 1, "steps": 3, **settings})


def test_devices_and_types_are_checked():
    assert pick_device().type in ("cuda", "mps", "cpu")
    with pytest.raises(ValueError, match="device: 'gpu'"):
        pick_device("gpu")
    with pytest.raises(ValueError, match="dtype: 'half'"):
        parse_dtype("half")
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="device: cuda was asked for"):
            pick_device("cuda")


def test_the_package_gives_masked_lm_on_demand():
    from diladiff.pipelines.masked_lm import MaskedLM

    assert diladiff.MaskedLM is MaskedLM
    with pytest.raises(AttributeError, match="no attribute 'Masked'"):
        _ = diladiff.Masked
