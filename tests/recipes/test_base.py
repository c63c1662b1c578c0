"""Docstrings are read section by section; every recipe survives JSON."""

import pytest

from diladiff.config import from_json, to_json
from diladiff.recipes import RECIPES, Recipe
from diladiff.recipes.base import about


@pytest.mark.parametrize("name", RECIPES)
def test_json_round_trip(name):
    recipe = RECIPES[name]()
    assert from_json(Recipe, to_json(recipe)) == recipe


def test_sections_may_run_over_lines():
    def recipe():
        """What it is,
        in words.

        Command: diladiff train x
        Cost: an hour
            of one GPU
        Result: not yet run
        """

    said = about("x", recipe)
    assert said == ("What it is, in words.", "diladiff train x", "an hour of one GPU", "not yet run")


@pytest.mark.parametrize("section", ["Command", "Cost", "Result"])
def test_a_missing_section_is_named(section):
    def recipe():
        pass

    recipe.__doc__ = "It. Command: a\n Cost: b\n Result: c".replace(f"{section}: ", "")
    with pytest.raises(ValueError, match=f"recipe x: .*`{section}: "):
        about("x", recipe)


def test_tokens():
    recipe = RECIPES["mdlm_owt"]()
    assert recipe.tokens_per_step == 512 * 1024
    assert recipe.total_tokens == 1_000_000 * 512 * 1024
