"""`diladiff prepare`: text, JSON lines or Hugging Face data sets to a folder of token shards.

Shows the stages as they run and ends with what the data set holds and what was left out.
"""

from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.table import Table

from diladiff import config as configs
from diladiff.cli.arguments import parse
from diladiff.data import prepare as work
from diladiff.data.presets import PRESETS
from diladiff.data.settings import PrepareConfig, Summary
from diladiff.data.sources import HUB

ABOUT = """Make a data set of token shards: a preset, or files, folders and hf:NAME[@SUBSET][#SPLIT].

  diladiff prepare stories --stories 20000 --out data/stories
  diladiff prepare wikipedia --vocab-size 8192 --out data/wiki
  diladiff prepare corpus/*.jsonl.zst --valid held_out.jsonl --train-tokenizer 8192 --out data/mine

Killed or stopped, the same command goes on where it was; any number of workers writes the same bytes.
Presets (their settings are defaults, and any option changes them):
"""

NOTHING = ("TEXT",)
"""What stands for the inputs in the help."""

STAGES = {"stories": "drawing stories", "vocabulary": "reading for the vocabulary", "tokens": "encoding"}


def main(arguments: list[str]) -> int:
    """Prepare a data set as the arguments say."""
    config = read(arguments)
    console = Console()
    console.print(f"{' '.join(config.inputs) or 'stories of the known law'} -> {config.out}", markup=False)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[counts]}"))
    with Progress(*columns, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as bar:
        task = bar.add_task("starting", total=None, counts="")
        stage = ""

        def tell(now: work.Progress) -> None:
            nonlocal stage
            if now.stage != stage:
                stage = now.stage
                bar.reset(task, total=1.0)
            counts = f"{now.documents:,} documents" + (f", {now.tokens:,} tokens" if now.tokens else "")
            total = None if now.share is None else 1.0
            bar.update(task, description=STAGES[now.stage], total=total, completed=now.share or 0.0, counts=counts)

        summary = work.prepare(config, tell)
    _show(summary, console)
    asked = config.train_tokenizer or config.vocab_size
    if asked is not None and summary.meta.vocab_size < asked:
        line = f"the text gave no more than {summary.meta.vocab_size:,} of the {asked:,} tokens asked for"
        console.print(line, highlight=False)
    return 0


def read(arguments: list[str]) -> PrepareConfig:
    """The configuration that arguments ask for; a preset's name stands for its settings."""
    base = PrepareConfig(inputs=NOTHING, out=Path("data/own"))
    if arguments and arguments[0] in PRESETS:
        base, arguments = PRESETS[arguments[0]](), arguments[1:]
    presets = "".join(f"  {name}: {(build.__doc__ or '').splitlines()[0]}\n" for name, build in PRESETS.items())
    config = parse(PrepareConfig, arguments, prog="diladiff prepare", default=base, description=ABOUT + presets)
    if config.inputs == NOTHING:
        raise ValueError(f"inputs: name a preset ({', '.join(PRESETS)}), files or hf:NAME")
    for name in config.inputs:
        near = configs.closest(name, PRESETS)
        if near and not Path(name).exists() and not Path(name).suffix and not name.startswith(HUB):
            raise ValueError(f"input {name}: neither a file nor a preset; did you mean {near}, as the first word?")
    return config


def _show(summary: Summary, console: Console) -> None:
    table = Table(title=f"{summary.folder}" + (" (already there, checked)" if summary.already_there else ""))
    for name in ("split", "documents", "tokens", "words", "tokens per word", "unknown"):
        table.add_column(name, justify="left" if name == "split" else "right")
    for name, counts in summary.splits.items():
        row = (f"{counts.documents:,}", f"{counts.tokens:,}", f"{counts.words:,}", f"{counts.tokens_per_word:.3f}")
        table.add_row(name, *row, f"{counts.unknown_rate:.3%}")
    console.print(table)
    meta = summary.meta
    length = "any length" if meta.length is None else f"blocks of {meta.length}"
    console.print(
        f"vocabulary {meta.vocab_size:,}, tokenizer {meta.fingerprint}, packing {meta.packing}, {length}",
        highlight=False,
    )
    left_out = ", ".join(f"{count:,} {reason}" for reason, count in summary.left_out.items() if count)
    console.print(f"left out: {left_out or 'nothing'}", highlight=False)
    for line in summary.bad:
        console.print(f"  bad: {line}", markup=False, highlight=False)
