"""The table lists every recipe, and one recipe is shown with what it takes to run it."""

import json

import pytest

from diladiff.cli.main import main
from diladiff.config import to_dict
from diladiff.recipes import FULL_RECIPES, RECIPES


def test_the_table_has_every_recipe(capsys):
    assert main(["recipes"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [name for name in FULL_RECIPES if any(line.split()[:1] == [name] for line in lines)] == list(FULL_RECIPES)


@pytest.mark.parametrize("name", ["mdlm_owt", "mdlm_stories_debug"])
def test_one_recipe_in_full(name, capsys):
    assert main(["recipes", name]) == 0
    said = capsys.readouterr().out
    recipe = RECIPES[name]()
    for part in ("Command: ", "Cost: ", "Result: ", f"Data: {recipe.data.prepare}\n"):
        assert part in said
    assert json.loads(said[said.index("\n{") :]) == to_dict(recipe)


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (["mdlm_storis"], "no recipe 'mdlm_storis'; did you mean mdlm_stories?"),
        (["xyzzy"], "no recipe 'xyzzy'; `diladiff recipes` lists them"),
        (["a", "b"], "recipes takes one name at most, got a b"),
    ],
)
def test_a_wrong_name(arguments, line, capsys):
    assert main(["recipes", *arguments]) == 2
    assert capsys.readouterr().err == f"diladiff: {line}\n"
