"""A twin keeps every choice of kind and is tiny."""

import pytest

from diladiff.config import difference
from diladiff.recipes import DEBUG_RECIPES, FULL_RECIPES, launch

SIZES = {
    *(f"objective.model.{name}" for name in ("vocab_size", "mask_id", "length", "width", "layers", "heads")),
    *(f"train.{name}" for name in ("steps", "global_batch", "micro_batch", "precision", "compile")),
    *(f"train.{name}_every_steps" for name in ("log", "validate", "checkpoint", "keep")),
    *("name", "optim.warmup_steps", "train.validate_blocks", "data.tokenizer", "data.prepare"),
}


def test_every_recipe_has_a_twin():
    assert list(DEBUG_RECIPES) == [f"{name}_debug" for name in FULL_RECIPES]


@pytest.mark.parametrize("name", FULL_RECIPES)
def test_a_twin_differs_in_sizes_only(name):
    full, twin = FULL_RECIPES[name](), DEBUG_RECIPES[f"{name}_debug"]()
    assert {line.split(":")[0] for line in difference(full, twin)} <= SIZES
    assert twin.name == f"{name}_debug"
    assert launch.plan(twin).parameters < 200_000
    assert twin.train.steps == 4
