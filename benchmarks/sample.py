"""How fast the network runs and the sampler writes: `forward` (ms, the trunk without the head), `sample_mdlm` (s).

Warm and synchronised; the median of the repeats with half the distance of their quartiles; the machine's ceilings
beside. Weights are random, which changes no shape: positions are planned without the network. Without options the
paper's size in the cases of the targets; `--batch 32 --steps 64` for one case, `--tiny` for a rehearsal in seconds.
"""

import argparse
from pathlib import Path

import common
import torch

from diladiff.models.token_transformer import TokenTransformer, TokenTransformerConfig
from diladiff.pipelines.denoise import ModelDenoiser
from diladiff.samplers import Ancestral, DrawConfig, sample

PAPER = TokenTransformerConfig(vocab_size=30_522, mask_id=103, length=1024)
TINY = TokenTransformerConfig(vocab_size=512, mask_id=3, length=64, width=64, layers=2, heads=4)
CASES = ((32, 64), (1, 64), (1, 256))
"""(batch, steps) of sample_mdlm."""


def main() -> None:
    """Measure the asked cases and record them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a small network and few repeats")
    parser.add_argument("--batch", type=int, help="one batch size (with --steps)")
    parser.add_argument("--steps", type=int, help="one number of steps (with --batch)")
    parser.add_argument("--top-p", type=float, default=0.9, help="the nucleus; 1 for none")
    parser.add_argument("--device", help="cuda or cpu")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), help="bfloat16 on cuda, float32 elsewhere")
    parser.add_argument("--eager", action="store_true", help="do not compile")
    parser.add_argument("--repeats", type=int, default=None, help="timed calls (20; 3 with --tiny)")
    parser.add_argument("--results", type=Path, default=common.RESULTS, help="the folder of the dated files")
    asked = parser.parse_args()
    if (asked.batch is None) != (asked.steps is None):
        parser.error("give --batch and --steps together")
    device = common.pick_device(asked.device)
    name = asked.dtype or ("bfloat16" if device.type == "cuda" else "float32")
    repeats = asked.repeats or (3 if asked.tiny else 20)
    torch.manual_seed(0)
    with device:
        model = TokenTransformer(TINY if asked.tiny else PAPER).to(getattr(torch, name)).eval().requires_grad_(False)
    # On a CPU the compiler's wait would be longer than the measurement.
    denoise = ModelDenoiser(model, compile=device.type == "cuda" and not asked.eager)
    common.record_ceilings(device, results=asked.results)
    cases = CASES if asked.batch is None else ((asked.batch, asked.steps),)
    settings = {"dtype": name, "compile": denoise.compile, "size": "tiny" if asked.tiny else "paper"}
    for batch in sorted({batch for batch, _ in cases}, reverse=True):
        forward(denoise, batch, device, repeats, settings, asked.results)
    for batch, steps in cases:
        write(denoise, batch, steps, asked.top_p, device, repeats, settings, asked.results)


def forward(
    denoise: ModelDenoiser, batch: int, device: torch.device, repeats: int, settings: dict, results: Path
) -> None:
    """Time the trunk on a batch."""
    config = denoise.model.config
    tokens_BL = torch.randint(config.vocab_size, (batch, config.length), device=device)
    t_B = torch.ones(batch, device=device)

    @torch.no_grad()
    def call() -> None:
        denoise.hidden(tokens_BL, t_B)

    timing = common.measure(call, device, repeats=repeats)
    common.record(
        "forward",
        timing.median_s * 1e3,
        "ms",
        device=device,
        batch=batch,
        spread=timing.spread_s * 1e3,
        repeats=repeats,
        settings=settings,
        results=results,
    )


def write(
    denoise: ModelDenoiser,
    batch: int,
    steps: int,
    top_p: float,
    device: torch.device,
    repeats: int,
    settings: dict,
    results: Path,
) -> None:
    """Time whole runs of the ancestral sampler, from the canvas to tokens on the host."""
    config = denoise.model.config
    sampler = Ancestral(steps=steps, draw=DrawConfig(top_p=top_p if top_p < 1 else None))
    canvas_BL = torch.full((batch, config.length), config.mask_id, device=device)
    seeds = iter(range(10**6))

    def call() -> None:
        index_B = torch.arange(batch, device=device)
        states = sample(
            sampler, denoise, canvas_BL, index_B, mask_id=config.mask_id, seed=next(seeds), write=denoise.writer
        )
        *_, last = states
        last.tokens_BL.cpu()

    timing = common.measure(call, device, repeats=repeats, warmups=2)
    common.record(
        "sample_mdlm",
        timing.median_s,
        "s",
        device=device,
        batch=batch,
        steps=steps,
        spread=timing.spread_s,
        repeats=repeats,
        settings={**settings, "top_p": top_p, "sampler": "ancestral"},
        results=results,
    )


if __name__ == "__main__":
    main()
