"""Recipes: functions that return one complete value each, by name, and their seconds-long twins."""

from collections.abc import Callable

from diladiff.recipes.base import DataSpec, Recipe
from diladiff.recipes.debug import twin
from diladiff.recipes.mdlm import (
    mdlm_original_owt,
    mdlm_owt,
    mdlm_owt_cased,
    mdlm_stories,
    mdlm_stories_cpu,
    mdlm_wiki,
)

FULL_RECIPES: dict[str, Callable[[], Recipe]] = {
    "mdlm_owt": mdlm_owt,
    "mdlm_owt_cased": mdlm_owt_cased,
    "mdlm_original_owt": mdlm_original_owt,
    "mdlm_stories": mdlm_stories,
    "mdlm_stories_cpu": mdlm_stories_cpu,
    "mdlm_wiki": mdlm_wiki,
}

DEBUG_RECIPES: dict[str, Callable[[], Recipe]] = {
    f"{name}_debug": twin(name, recipe) for name, recipe in FULL_RECIPES.items()
}

RECIPES: dict[str, Callable[[], Recipe]] = FULL_RECIPES | DEBUG_RECIPES

__all__ = ["DEBUG_RECIPES", "FULL_RECIPES", "RECIPES", "DataSpec", "Recipe"]
