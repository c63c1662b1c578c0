"""Twenty training steps give the losses on record: a change that moves them is no refactor.

Float32 on the CPU, relative tolerance 2e-4 for other processors' rounding. `UPDATE_GOLDEN=1 pytest` writes them anew.
"""

import json
import os
from pathlib import Path

import pytest
import torch

from diladiff.models.token_transformer import TokenTransformerConfig
from diladiff.objectives.base import Batch, Step
from diladiff.objectives.masked import MaskedConfig

GOLDEN = Path(__file__).parents[1] / "golden" / "masked_losses.json"
MODEL = {"vocab_size": 40, "mask_id": 0, "length": 16, "width": 32, "layers": 2, "heads": 2, "dropout": 0.0}
CONFIGS = {
    "paper": MaskedConfig(model=TokenTransformerConfig(**MODEL)),
    "original": MaskedConfig(
        model=TokenTransformerConfig(
            **MODEL, positions="rotary", qk_norm=False, time_conditioning=True, carry_over=True
        ),
        weight="elbo",
        schedule="log_linear",
    ),
    "cosine": MaskedConfig(model=TokenTransformerConfig(**MODEL), schedule="cosine"),
}


def losses(config: MaskedConfig) -> list[float]:
    """The losses of 20 AdamW steps on a fixed random walk through the vocabulary."""
    torch.manual_seed(0)
    objective = config.build()
    optimiser = torch.optim.AdamW(objective.parameters(), lr=3e-3, weight_decay=0.01)
    walks = torch.randint(-1, 2, (20, 8, 16), generator=torch.Generator().manual_seed(0)).cumsum(-1) % 39 + 1
    record = []
    for number, tokens in enumerate(walks):
        total, weight, _ = objective(Batch(tokens, torch.arange(8), 8), Step(0, torch.tensor(number)))
        (total / weight).backward()
        optimiser.step()
        optimiser.zero_grad()
        record.append(total.item() / weight.item())
    return record


@pytest.mark.parametrize("name", CONFIGS)
def test_losses_are_those_on_record(name: str) -> None:
    got = losses(CONFIGS[name])
    if os.environ.get("UPDATE_GOLDEN") == "1":
        recorded = json.loads(GOLDEN.read_text()) if GOLDEN.exists() else {}
        GOLDEN.write_text(json.dumps(recorded | {name: got}, indent=1) + "\n")
    assert got == pytest.approx(json.loads(GOLDEN.read_text())[name], rel=2e-4)
    assert min(got[-3:]) < got[0]
