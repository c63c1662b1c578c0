"""The recipes are what they say: the paper's numbers, declared differences, data that fit."""

import shlex

import pytest

from diladiff.cli.prepare import read
from diladiff.config import difference, to_dict
from diladiff.recipes import FULL_RECIPES, RECIPES, launch


def changed(old: str, new: str) -> set[str]:
    """The fields in which two recipes differ."""
    return {line.split(":")[0] for line in difference(RECIPES[old](), RECIPES[new]())}


def test_the_papers_numbers():
    recipe = RECIPES["mdlm_owt"]()
    model = to_dict(recipe.objective.model)
    assert (model["layers"], model["width"], model["heads"], model["length"]) == (12, 768, 12, 1024)
    assert (model["vocab_size"], model["mask_id"], model["dropout"]) == (30_522, 103, 0.1)
    assert (model["positions"], model["qk_norm"], model["time_conditioning"]) == ("learned", True, False)
    assert (recipe.objective.weight, recipe.objective.schedule) == ("flat", "linear")
    assert (recipe.optim.lr, recipe.optim.warmup_steps, recipe.optim.decay) == (3e-4, 1_000, "cosine")
    assert (recipe.optim.clip_norm, recipe.train.ema) == (1.0, (0.9999,))
    assert (recipe.train.steps, recipe.train.global_batch, recipe.train.precision) == (1_000_000, 512, "bfloat16")
    assert launch.plan(recipe).parameters == pytest.approx(133e6, rel=0.01)


def test_variants_change_what_they_declare():
    cased = {"name", "objective.model.vocab_size", "data.tokenizer", "data.prepare"}
    assert changed("mdlm_owt", "mdlm_owt_cased") == cased
    assert launch.plan(RECIPES["mdlm_owt_cased"]()).parameters == pytest.approx(130e6, rel=0.01)
    column = {f"objective.model.{field}" for field in ("mask_id", "positions", "qk_norm")}
    column |= {"objective.model.time_conditioning", "objective.model.carry_over"}
    trained = {"objective.weight", "objective.schedule", "optim.warmup_steps", "optim.decay"}
    assert changed("mdlm_owt", "mdlm_original_owt") == cased | column | trained
    # The set-up table: 170M in all.
    assert launch.plan(RECIPES["mdlm_original_owt"]()).parameters == pytest.approx(170e6, rel=0.02)


@pytest.mark.parametrize("name", RECIPES)
def test_the_prepare_command_makes_what_the_recipe_reads(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "README.md").touch()
    recipe = RECIPES[name]()
    program, command, *arguments = shlex.split(recipe.data.prepare)
    prepared = read(arguments)
    assert (program, command) == ("diladiff", "prepare")
    assert prepared.packing == recipe.data.packing
    assert prepared.length in (None, recipe.objective.model.length)
    size = prepared.train_tokenizer or prepared.vocab_size
    known = {"bert-base-uncased": (30_522, 103), "bert-base-cased": (28_996, 103), "gpt2": (50_257 + 2, 50_257)}
    if prepared.train_tokenizer:
        expected = (size, 1)
    elif size:
        assert prepared.tokenizer == "bert-base-uncased"
        expected = (size, 4)  # [PAD] [UNK] [CLS] [SEP] [MASK] stay first when a BERT vocabulary is reduced
    else:
        expected = known[prepared.tokenizer]
    assert (recipe.objective.model.vocab_size, recipe.objective.model.mask_id) == expected


@pytest.mark.parametrize("name", [name for name in FULL_RECIPES if "stories" in name])
def test_no_story_is_seen_more_than_thirty_times(name):
    recipe = RECIPES[name]()
    stories = read(shlex.split(recipe.data.prepare)[2:]).stories
    assert 0 < recipe.train.steps * recipe.train.global_batch <= 30 * stories
