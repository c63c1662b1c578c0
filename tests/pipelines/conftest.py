"""A tiny model with a tokenizer of its own, which writes nonsense reproducibly."""

import pytest
import torch

from diladiff import MaskedLM
from diladiff.data.tokenizer import Tokenizer
from diladiff.data.vocabulary import train_tokenizer
from diladiff.models.token_transformer import TokenTransformerConfig

TEXTS = [
    "Once upon a time there was a little girl named Lily. She liked to play with her red ball.",
    "One day, a big dog named Max saw a cat. They ran and ran until the sun went down.",
]
LENGTH = 40


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """Byte-level, 300 tokens, one document a block."""
    return train_tokenizer(TEXTS * 5, 300)


@pytest.fixture(scope="session")
def build():
    """The function that makes a tiny model for a tokenizer."""

    def make(tokenizer: Tokenizer, **changes) -> MaskedLM:
        shape = {"length": LENGTH, "width": 16, "layers": 2, "heads": 2, **changes}
        torch.manual_seed(0)
        config = TokenTransformerConfig(vocab_size=tokenizer.vocab_size, mask_id=tokenizer.mask_id, **shape)
        model = config.build()
        for parameter in model.parameters():
            parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
        return MaskedLM(model, tokenizer)

    return make


@pytest.fixture(scope="session")
def lm(tokenizer, build) -> MaskedLM:
    """A tiny model in float32."""
    return build(tokenizer)
