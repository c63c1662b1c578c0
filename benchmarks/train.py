"""How fast the engine trains: `train_mdlm` (tokens/s), through the loop, the loader and the optimiser as they are used.

The paper's size (12 layers, 768 wide, L=1024, V=30522, untied), bfloat16 and compiled blocks on a GPU. The median of
windows of ten steps after the first two; the machine's ceilings beside, in the same run. `--tiny` rehearses in seconds.
"""

import argparse
import statistics
import tempfile
from pathlib import Path

import common
import numpy as np
import torch

from diladiff.data.loader import Loader
from diladiff.data.shards import Meta, TokenDataset
from diladiff.engine.logging import read_rows
from diladiff.engine.loop import TrainConfig, fit
from diladiff.engine.optim import OptimConfig
from diladiff.models.token_transformer import TokenTransformerConfig
from diladiff.objectives.masked import MaskedConfig

PAPER = TokenTransformerConfig(vocab_size=30_522, mask_id=103, length=1024)
TINY = TokenTransformerConfig(vocab_size=512, mask_id=3, length=64, width=64, layers=2, heads=4)
BLOCKS = 4096
WINDOW_STEPS = 10
WARM_WINDOWS = 2


def main() -> None:
    """Measure and record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small network and few steps")
    parser.add_argument("--batch", type=int, help="global batch (32; 8 with --tiny)")
    parser.add_argument("--micro-batch", type=int, help="the part of it that is computed at once (all)")
    parser.add_argument("--device", help="cuda or cpu")
    parser.add_argument("--precision", choices=("bfloat16", "float32"), help="bfloat16 on cuda, float32 elsewhere")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--windows", type=int, help="windows of ten steps that count (10; 2 with --tiny)")
    parser.add_argument("--results", type=Path, default=common.RESULTS, help="the folder of the dated files")
    asked = parser.parse_args()
    device = common.pick_device(asked.device)
    on_gpu = device.type == "cuda"
    batch = asked.batch or (8 if asked.tiny else 32)
    windows = asked.windows or (2 if asked.tiny else 10)
    train = TrainConfig(
        steps=WINDOW_STEPS * (WARM_WINDOWS + windows),
        global_batch=batch,
        micro_batch=asked.micro_batch or batch,
        precision=asked.precision or ("bfloat16" if on_gpu else "float32"),
        compile="none" if asked.eager or not on_gpu else "blocks",
        log_every_steps=WINDOW_STEPS,
        checkpoint_every_steps=10**9,
    )
    model = TINY if asked.tiny else PAPER
    limits = common.record_ceilings(device, results=asked.results)
    speeds, flops = train_mdlm(model, train, device)
    low, middle, high = statistics.quantiles(speeds, n=4)
    common.record(
        "train_mdlm",
        middle,
        "tokens/s",
        device=device,
        batch=batch,
        spread=(high - low) / 2,
        repeats=len(speeds),
        settings={
            "size": "tiny" if asked.tiny else "paper",
            "micro_batch": train.micro_batch,
            "precision": train.precision,
            "compile": train.compile,
            "flops_per_token": flops,
            "share_of_matmul": middle * flops / 1e12 / limits["matmul_tflops"],
        },
        results=asked.results,
    )


def train_mdlm(model: TokenTransformerConfig, train: TrainConfig, device: torch.device) -> tuple[list[float], float]:
    """Train on random tokens; the speeds of the windows after the warm ones, and the operations a token."""
    dataset = random_tokens(model)
    torch.manual_seed(0)
    objective = MaskedConfig(model=model).build()
    with tempfile.TemporaryDirectory() as folder:
        fit(
            optim=OptimConfig(lr=3e-4, warmup_steps=100),
            train=train,
            objective=objective,
            loader=lambda start: iter(
                Loader(
                    dataset,
                    global_batch=train.global_batch,
                    micro_batch=train.micro_batch,
                    seed=0,
                    start_step=start,
                    device=device,
                )
            ),
            validation=None,
            run=Path(folder),
            identity={},
            export=None,
            device=device,
        )
        speeds = [row["tokens_per_s"] for row in read_rows(Path(folder))]
    return speeds[WARM_WINDOWS:], objective.flops_per_token()


def random_tokens(model: TokenTransformerConfig) -> TokenDataset:
    """A data set in memory: what is read does not change the speed."""
    meta = Meta(
        vocab_size=model.vocab_size,
        mask_id=model.mask_id,
        end_id=0,
        separator_id=0,
        pad_id=0,
        fingerprint="random",
        packing="joined",
        length=None,
    )
    tokens = np.random.default_rng(0).integers(model.vocab_size, size=BLOCKS * model.length, dtype=np.uint16)
    tokens[tokens == model.mask_id] = 0  # data hold no masks
    return TokenDataset(Path("random"), "train", model.length, meta, [tokens])


if __name__ == "__main__":
    main()
