"""What the tests of commands share, made once: the debug data sets and a tiny model."""

from pathlib import Path

import pytest
import torch

from diladiff import MaskedLM
from diladiff.data.vocabulary import train_tokenizer
from diladiff.models.token_transformer import TokenTransformerConfig
from diladiff.recipes import RECIPES, Recipe
from tests.recipes import debug_data


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Packing -> data set for debug twins."""
    root = tmp_path_factory.mktemp("debug")
    twins: list[Recipe] = [RECIPES["mdlm_owt_debug"](), RECIPES["mdlm_stories_debug"]()]
    return {twin.data.packing: debug_data.prepare(root, twin) for twin in twins}


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny saved model where the demo looks for one."""
    tokenizer = train_tokenizer(["Lily saw a dog and ran home.", "Once upon a time Max had a red ball."] * 4, 290)
    config = TokenTransformerConfig(
        vocab_size=tokenizer.vocab_size, mask_id=tokenizer.mask_id, length=24, width=16, layers=1, heads=2
    )
    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("here") / "pretrained" / "mdlm_stories"
    MaskedLM(config.build(), tokenizer).save_pretrained(folder)
    return folder
