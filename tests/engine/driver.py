"""Small trainings of the real objective over the real loader, for tests; as a script, under torchrun or alone.

driver.py '[{"run": "folder", "steps": 4}, ...]'     each job is `train`'s keywords
"""

import json
import math
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from diladiff.data.loader import Loader, validation_batches
from diladiff.data.shards import Meta, TokenDataset
from diladiff.engine import distributed
from diladiff.engine.logging import Reporter
from diladiff.engine.loop import FitResult, TrainConfig, fit
from diladiff.engine.optim import OptimConfig
from diladiff.models.token_transformer import TokenTransformerConfig
from diladiff.objectives.masked import MaskedConfig, MaskedObjective

VOCABULARY, LENGTH = 32, 16


def dataset(blocks: int = 40) -> TokenDataset:
    """Blocks whose tokens have a pattern to learn."""
    meta = Meta(
        vocab_size=VOCABULARY,
        mask_id=1,
        end_id=0,
        separator_id=0,
        pad_id=0,
        fingerprint="none",
        packing="joined",
        length=None,
    )
    steps = np.random.default_rng(0).integers(1, 4, size=blocks * LENGTH)
    tokens = (2 + np.cumsum(steps) % (VOCABULARY - 2)).astype(np.uint16)
    return TokenDataset(Path("nowhere"), "train", LENGTH, meta, [tokens])


def objective(*, dropout: float = 0.1, width: int = 16) -> MaskedObjective:
    """A two-layer masked diffusion model, always with the same initial weights."""
    torch.manual_seed(0)
    model = TokenTransformerConfig(
        vocab_size=VOCABULARY, mask_id=1, length=LENGTH, width=width, layers=2, heads=2, dropout=dropout
    )
    return MaskedConfig(model=model).build()


def train(
    run: Path | str,
    *,
    steps: int,
    stop_after: int | None = None,
    dropout: float = 0.1,
    width: int = 16,
    poison: tuple[int, int] | None = None,
    optim: dict[str, Any] | None = None,
    reporter: Reporter | None = None,
    device: torch.device | None = None,
    **changes: Any,
) -> FitResult:
    """Train, with SIGTERM sent to the last rank during step `stop_after`, and NaN weights on a rank before a step."""
    place = device or torch.device("cpu")
    settings = {
        "steps": steps,
        "global_batch": 8,
        "micro_batch": 4,
        "ema": (0.9, 0.99),
        "log_every_steps": 1,
        "validate_every_steps": 2,
        "checkpoint_every_steps": 2,
        **{name: tuple(value) if isinstance(value, list) else value for name, value in changes.items()},
    }
    config = TrainConfig(**settings)
    loss = objective(dropout=dropout, width=width)
    data, held_out = dataset(), dataset(16)
    rank, world = distributed.rank(), distributed.world()

    def batches(start: int) -> Iterator[Any]:
        loader = Loader(
            data,
            global_batch=config.global_batch,
            micro_batch=config.micro_batch,
            rank=rank,
            world=world,
            seed=config.seed,
            start_step=start,
        )
        for step, found in enumerate(loader, start):
            if step + 1 == stop_after and rank == world - 1:
                os.kill(os.getpid(), signal.SIGTERM)
            if poison is not None and tuple(poison) == (step, rank):
                torch.nn.init.constant_(next(loss.model.norm.parameters()), math.nan)
            yield found

    def export(folder: Path) -> None:
        folder.mkdir(exist_ok=True)
        weights = {name: value.detach().clone() for name, value in loss.model.state_dict().items()}
        save_file(weights, folder / "weights.safetensors")

    return fit(
        optim=OptimConfig(
            **{"lr": 1e-2, "weight_decay": 0.1, "warmup_steps": 2, "decay": "cosine", **(optim or {})},
        ),
        train=config,
        objective=loss,
        loader=batches,
        validation=lambda: validation_batches(held_out, 8, rank, world),
        run=Path(run),
        identity={"train": {**settings, "ema": list(config.ema)}, "dropout": dropout, "width": width},
        export=export,
        device=place,
        reporter=reporter,
    )


def main() -> None:
    """Run the jobs of the first argument one after the other, printing how each ended."""
    torch.set_num_threads(1)
    with distributed.session("cpu") as device:
        for job in json.loads(sys.argv[1]):
            try:
                result = train(device=device, **job)
                sys.stdout.write(f"{distributed.rank()} {result.stop} {result.step}\n")
            except ValueError as error:
                sys.stdout.write(f"{distributed.rank()} error {error}\n")


if __name__ == "__main__":
    main()
