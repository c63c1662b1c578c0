"""`diladiff sample MODEL`: texts from a model, from nothing or around given text, shown and written to a file."""

import dataclasses
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import torch
import torch.distributed as dist
import tyro
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from diladiff.cli.arguments import parse
from diladiff.cli.terminal import describe, printable
from diladiff.engine.distributed import is_main, rank, session, world
from diladiff.pipelines.canvas import Canvas
from diladiff.pipelines.masked_lm import MaskedLM, Observer, pick_device
from diladiff.pipelines.samples import Samples, write_samples
from diladiff.samplers import TokenState

ABOUT = """Write texts with a model: a model folder, a run folder (outputs/NAME) or a name on the Hugging Face hub.

  diladiff sample pretrained/mdlm_stories_cpu --num 4 --steps 64
  diladiff sample outputs/mdlm_stories --prompt "Once upon a time" --top-p 0.9
  diladiff sample outputs/mdlm_stories --infill "Lily saw a ___ in the garden. ___"
  torchrun --nproc-per-node 8 --no-python -- diladiff sample MODEL --num 5000 --out samples.jsonl

Text number i depends on the model, the settings, the seed and i, not on batch size or processes.
"""


@dataclass(frozen=True, kw_only=True)
class SampleArguments:
    """What texts are asked for."""

    model: Annotated[str, tyro.conf.Positional] = ""
    """A model folder, a run folder or a name on the Hugging Face hub."""
    num: int = 4
    """How many texts."""
    steps: int = 64
    """Steps of the sampler (0: as many as it likes, for first_hitting one token each)."""
    sampler: Literal[
        "ancestral", "first_hitting", "remasking", "confidence_topk", "confidence_threshold", "entropy_bounded"
    ] = "ancestral"
    """How positions are chosen."""
    temperature: float = 1.0
    """Divides the logits; 0 takes the likeliest token."""
    top_p: float | None = None
    """Draw from the likeliest tokens that make up this probability."""
    nucleus: Literal["keep", "drop"] = "keep"
    """Keep or drop the token that crosses top-p."""
    seed: int = 0
    """The seed of all random numbers."""
    prompt: str | None = None
    """Text that every sample begins with."""
    suffix: str | None = None
    """Text that every sample ends with."""
    infill: str | None = None
    """A text with ___ where words are wanted."""
    blank_tokens: int = 16
    """Tokens of each ___ of --infill (one at the end takes all that is left)."""
    length: int | None = None
    """Positions of a text; the model's unless given."""
    device: str | None = None
    """cuda, cuda:1, mps or cpu; the best there is unless given."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Type of the weights; as stored on cuda and float32 elsewhere unless given."""
    batch_size: int | None = None
    """Texts at once; 32 on cuda and 8 elsewhere unless given."""
    compile: bool = False
    """Compile the network (worth it for many texts)."""
    deterministic: bool = False
    """Pad every call to one shape, so that in bfloat16 too a text does not depend on its batch."""
    out: Path | None = None
    """Write a samples file (JSON lines)."""
    show: int = 8
    """Print at most so many of the texts."""


def main(arguments: list[str]) -> int:
    """Write texts as the arguments say."""
    asked = parse(SampleArguments, arguments, prog="diladiff sample", default=SampleArguments(), description=ABOUT)
    if not asked.model:
        raise ValueError("model: name a model folder, a run folder or a repository of the hub; see --help")
    if asked.infill is not None and (asked.prompt is not None or asked.suffix is not None):
        raise ValueError("--infill: give it alone, with the prompt and the suffix written into it")
    if asked.num < 1:
        raise ValueError(f"--num: {asked.num} must be at least 1")
    if asked.device is not None:
        pick_device(asked.device)
    if asked.out is not None:
        _check_out(asked.out)
    console = Console()
    with session(asked.device) as device:
        lm = MaskedLM.from_pretrained(asked.model, device=device, dtype=asked.dtype)
        if is_main():
            _announce(asked, lm, console)
        samples = _generate(asked, lm, console)
        if is_main():
            _show(asked, samples, console)
            if asked.out is not None:
                write_samples(asked.out, samples, model=lm.identity)
                console.print(
                    f"{asked.out}: {len(samples.texts)} samples", markup=False, highlight=False, soft_wrap=True
                )
    return 0


def _check_out(path: Path) -> None:
    """Raise, before hours are spent on texts, where the file that they go to cannot be written."""
    if path.is_dir():
        raise ValueError(f"--out {path}: is a folder; name a file in it, such as {path / 'samples.jsonl'}")
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=path.parent):
        pass


def _announce(asked: SampleArguments, lm: MaskedLM, console: Console) -> None:
    console.print(f"{asked.model}: {describe(lm)}", markup=False, highlight=False)
    length = len(_canvas(asked, lm).ids_L)
    steps = f"{asked.steps} steps" if asked.steps else "open steps"
    nucleus = "" if asked.top_p is None else f", top-p {asked.top_p:g}"
    processes = f", {world()} processes" if world() > 1 else ""
    console.print(
        f"{asked.num} texts of {length} tokens: {asked.sampler}, {steps}, temperature {asked.temperature:g}{nucleus}, "
        f"seed {asked.seed}{processes}",
        markup=False,
        highlight=False,
    )


def _generate(asked: SampleArguments, lm: MaskedLM, console: Console) -> Samples:
    """This process's share of the texts, joined with the others' in the main process."""
    first, stop = share(asked.num, rank(), world())
    columns = (TextColumn("writing"), BarColumn(), TextColumn("{task.percentage:3.0f}%"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not is_main()) as bar:
        task = bar.add_task("writing", total=1.0)
        size = stop - first
        started = time.perf_counter()

        def observe(done: int, state: TokenState) -> None:
            bar.update(task, completed=(done + len(state.tokens_BL) * state.step / state.steps) / size)

        samples = _share(asked, lm, first, size, observe)
        seconds = time.perf_counter() - started
    return samples if world() == 1 else _merge(asked, lm, samples, seconds)


def _share(asked: SampleArguments, lm: MaskedLM, first: int, size: int, observe: Observer) -> Samples:
    """`size` texts from number `first` on; a process without a share writes one that is thrown away."""
    return lm.generate(
        max(size, 1),
        steps=asked.steps or None,
        seed=asked.seed,
        sampler=asked.sampler,
        temperature=asked.temperature,
        top_p=asked.top_p,
        nucleus=asked.nucleus,
        prompt=asked.prompt,
        suffix=asked.suffix,
        canvas=asked.infill,
        blank_tokens=asked.blank_tokens,
        length=asked.length,
        batch_size=asked.batch_size,
        first_index=first,
        compile=asked.compile,
        deterministic=asked.deterministic,
        observe=observe if size else None,
    )


def share(num: int, number: int, processes: int) -> tuple[int, int]:
    """The contiguous run of texts that a process writes; the first process always has one."""
    return -(-number * num // processes), -(-(number + 1) * num // processes)


def _merge(asked: SampleArguments, lm: MaskedLM, samples: Samples, seconds: float) -> Samples:
    """All processes' samples in the order of their index."""
    shares = [share(asked.num, number, world()) for number in range(world())]
    most = max(stop - first for first, stop in shares)
    own_BL = torch.zeros(most, samples.ids.shape[1], dtype=torch.int64)
    own_BL[: len(samples.ids)] = samples.ids
    own_BL = own_BL.to(lm.device)
    parts = [torch.empty_like(own_BL) for _ in shares]
    dist.all_gather(parts, own_BL)
    slowest = torch.tensor(seconds, device=lm.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    ids_BL = torch.cat([part[: stop - first].cpu() for part, (first, stop) in zip(parts, shares, strict=True)])
    canvas = _canvas(asked, lm)
    return dataclasses.replace(
        samples,
        ids=ids_BL,
        texts=[lm.text(canvas, ids_L) for ids_L in ids_BL],
        seconds=float(slowest),
        tokens=samples.tokens // len(samples.texts) * asked.num,
        first_index=0,
    )


def _canvas(asked: SampleArguments, lm: MaskedLM) -> Canvas:
    return lm.canvas(
        prompt=asked.prompt,
        suffix=asked.suffix,
        canvas=asked.infill,
        blank_tokens=asked.blank_tokens,
        length=asked.length,
    )


def _show(asked: SampleArguments, samples: Samples, console: Console) -> None:
    for number, text in enumerate(samples.texts[: asked.show]):
        console.rule(f"{samples.first_index + number}", align="left")
        console.print(printable(text), markup=False, highlight=False)
    console.rule()
    left = len(samples.texts) - asked.show
    if left > 0:
        console.print(f"{left} more, not shown")
    console.print(
        f"{len(samples.texts)} texts, {samples.tokens:,} tokens in {samples.seconds:.2f} s: "
        f"{samples.tokens_per_second:,.0f} tokens/s",
        markup=False,
        highlight=False,
    )
