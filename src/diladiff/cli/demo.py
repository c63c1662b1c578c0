"""`diladiff demo [MODEL]`: watch a text form out of masks, live in the terminal."""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import tyro
from rich.console import Console
from rich.live import Live

from diladiff import __file__ as package
from diladiff.cli.arguments import parse

if TYPE_CHECKING:
    from collections.abc import Iterator

    from diladiff.pipelines.frames import Frame

ABOUT = """Watch a text form out of masks.

Without a model it takes the newest pretrained/mdlm_stories* here or in the repository.
"""
PLAIN_STATES = 8
"""States that are printed where the output is no terminal."""


@dataclass(frozen=True, kw_only=True)
class DemoArguments:
    """What is shown."""

    model: Annotated[str, tyro.conf.Positional] = ""
    """A model folder, a run folder or a name on the Hugging Face hub."""
    num: int = 1
    """How many texts, one after another."""
    steps: int = 64
    """Steps of the sampler."""
    seed: int = 0
    """The seed of all random numbers."""
    temperature: float = 1.0
    """Divides the logits."""
    top_p: float | None = None
    """Draw from the likeliest tokens that make up this probability."""
    prompt: str | None = None
    """Text that the story begins with."""
    device: str | None = None
    """cuda, cuda:1, mps or cpu; the best there is unless given."""
    pace: float = 4.0
    """A text takes at least so many seconds to form on the screen; the time at the end is the computing alone."""


def main(arguments: list[str]) -> int:
    """Show texts forming as the arguments say."""
    asked = parse(DemoArguments, arguments, prog="diladiff demo", default=DemoArguments(), description=ABOUT)
    if asked.num < 1:
        raise ValueError(f"--num: {asked.num} must be at least 1")
    console = Console()
    model = asked.model or str(find_model())
    console.print(f"loading {model} ...", markup=False, highlight=False)
    # torch takes seconds to import: what is loaded and what is wrong with the arguments is said before.
    from diladiff.cli.terminal import describe
    from diladiff.pipelines.masked_lm import MaskedLM

    lm = MaskedLM.from_pretrained(model, device=asked.device)
    console.print(f"{describe(lm)}; {asked.steps} steps, seed {asked.seed}", markup=False, highlight=False)
    free = int((lm.canvas(prompt=asked.prompt).ids_L == lm.tokenizer.mask_id).sum())
    seconds = 0.0
    for number in range(asked.num):
        frames = lm.stream(
            steps=asked.steps,
            seed=asked.seed,
            temperature=asked.temperature,
            top_p=asked.top_p,
            prompt=asked.prompt,
            first_index=number,
        )
        console.print()
        seconds += _live(frames, console, asked.pace) if console.is_terminal else _lines(frames, console)
    console.print(
        f"\n{asked.num * free:,} tokens in {seconds:.2f} s of computing: {asked.num * free / seconds:,.0f} tokens/s",
        markup=False,
        highlight=False,
    )
    return 0


def find_model() -> Path:
    """The newest pretrained/mdlm_stories* of the current folder or of the repository that holds the package."""
    places = [Path.cwd(), Path(package).resolve().parents[2]]
    for place in places:
        found = [path.parent for path in (place / "pretrained").glob("mdlm_stories*/config.json")]
        if found:
            return max(found, key=lambda folder: ((folder / "config.json").stat().st_mtime, folder.name))
    raise ValueError(
        "no model: pretrained/mdlm_stories* is neither here nor beside the package; run this in the repository "
        "or name a model folder"
    )


def _live(frames: "Iterator[Frame]", console: Console, pace: float) -> float:
    """Draw frames in place, what a step revealed highlighted; returns the seconds of computing."""
    from diladiff.cli.terminal import paint

    started = time.monotonic()
    with Live(console=console, auto_refresh=False, vertical_overflow="crop") as live:
        for frame in frames:
            live.update(paint(frame.rows[0]), refresh=True)
            ahead = pace * frame.step / max(frame.steps, 1) - (time.monotonic() - started)
            time.sleep(max(ahead, 0.0))
        live.update(paint([piece._replace(kind="known") for piece in frame.rows[0]]), refresh=True)
    return frame.seconds


def _lines(frames: "Iterator[Frame]", console: Console) -> float:
    """Print some of the frames as lines, and the last one as text; returns the seconds of computing."""
    from diladiff.cli.terminal import plain, printable

    shown = -1
    for frame in frames:
        part = frame.step * PLAIN_STATES // max(frame.steps, 1)
        if part != shown and any(piece.kind == "mask" for piece in frame.rows[0]):
            shown = part
            console.print(f"step {frame.step}: {plain(frame.rows[0])}", markup=False, highlight=False, soft_wrap=True)
    text = printable("".join(piece.text for piece in frame.rows[0]))
    console.print(f"step {frame.step}: {text}", markup=False, highlight=False, soft_wrap=True)
    return frame.seconds
