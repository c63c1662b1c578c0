"""Every recipe builds, is named as it is listed, and says what it costs."""

import re

import pytest
import torch

from diladiff.recipes import DEBUG_RECIPES, FULL_RECIPES, RECIPES
from diladiff.recipes.base import about


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_builds_and_tells(name):
    recipe = RECIPES[name]()
    assert recipe.name == name
    with torch.device("meta"):
        objective = recipe.objective.build()
    assert all(parameter.is_meta for parameter in objective.parameters())
    said = about(name, RECIPES[name])
    assert re.search(rf"diladiff train {name} --data \S+$", said.command)
    # The folder that the printed command makes is the one that the training reads.
    assert recipe.data.prepare.split()[-1] == said.command.split()[-1]


def test_the_list_is_explicit(sources):
    """A recipe that a module defines and nobody lists would never be tested."""
    defined = set()
    for source in sources:
        if source.module == "diladiff.recipes.mdlm":
            defined |= {node.name for node in source.tree.body if type(node).__name__ == "FunctionDef"}
    assert defined == set(FULL_RECIPES)
    assert set(RECIPES) == set(FULL_RECIPES) | set(DEBUG_RECIPES)
