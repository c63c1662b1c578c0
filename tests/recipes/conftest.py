"""The debug data sets, made once."""

from pathlib import Path

import pytest

from diladiff.recipes import RECIPES, Recipe
from tests.recipes import debug_data


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Packing -> data set for debug twins."""
    root = tmp_path_factory.mktemp("debug")
    twins: list[Recipe] = [RECIPES["mdlm_owt_debug"](), RECIPES["mdlm_stories_debug"]()]
    return {twin.data.packing: debug_data.prepare(root, twin) for twin in twins}
