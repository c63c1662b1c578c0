"""`diladiff train RECIPE --data PATH`: a recipe with typed overrides of any field, trained or only shown."""

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import torch
import tyro
from rich.console import Console

from diladiff.cli.arguments import parse
from diladiff.cli.recipes import unknown_recipe
from diladiff.config import difference, digest, to_dict
from diladiff.engine import checkpoint
from diladiff.engine.logging import Terminal
from diladiff.engine.loop import MODEL
from diladiff.recipes import FULL_RECIPES, RECIPES, Recipe, launch

HELP = """usage: diladiff train RECIPE --data PATH [--out DIR] [--init-from MODEL] [--device NAME] [--dry-run] [FIELDS]

Trains a recipe and writes a run folder (outputs/RECIPE unless --out says otherwise) with the resolved configuration,
metrics, checkpoints, and the model for `diladiff sample`. The same command again carries the run on from its last
checkpoint. Ctrl-C finishes the step, saves, and exits 0.

  --data PATH          a folder that `diladiff prepare` wrote; `diladiff recipes RECIPE` prints the command for it
  --out DIR            the run folder
  --init-from MODEL    start from the weights of a model folder with the same shape and tokenizer
  --device NAME        cuda, cuda:1, mps or cpu; the best there is unless given
  --dry-run            print the resolved configuration, parameters, tokens and operations as JSON, and stop
  --optim.lr 3e-4      any field of the configuration, typed: --train.steps 10, --objective.model.layers 4, ...

`diladiff train RECIPE --help` lists every field. Several processes: torchrun --nproc-per-node 8 --no-python diladiff
train RECIPE --data PATH (see --train.parallel ddp | fsdp2).
"""


@dataclass(frozen=True, kw_only=True)
class TrainArguments:
    """What a training is asked for: a recipe's fields and where things are."""

    recipe: Annotated[Recipe, tyro.conf.arg(name=""), tyro.conf.FlagConversionOff]
    data: Path | None = None
    """A folder that `diladiff prepare` wrote."""
    out: Path | None = None
    """The run folder; outputs/RECIPE unless given."""
    init_from: str | None = None
    """A model folder (or a run folder) whose weights the training starts from."""
    device: str | None = None
    """cuda, cuda:1, mps or cpu; the best there is unless given."""
    dry_run: bool = False
    """Print the resolved configuration and what it costs as JSON, and stop."""


def main(arguments: list[str]) -> int:
    """Train, or show what would be trained."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(HELP + f"\nrecipes: {', '.join(FULL_RECIPES)}\n", end="")
        return 0
    name = arguments[0]
    if name.startswith("-"):
        raise ValueError(f"the recipe comes first: diladiff train RECIPE {name} ...; `diladiff recipes` lists them")
    if name not in RECIPES:
        raise unknown_recipe(name)
    default = TrainArguments(recipe=RECIPES[name]())
    asked = parse(
        TrainArguments,
        arguments[1:],
        prog=f"diladiff train {name}",
        default=default,
        description=f"Train {name} with any of its fields changed.",
    )
    _check_device(asked.device)
    if asked.dry_run:
        print(json.dumps(_dry_run(asked.recipe), indent=1))
        return 0
    _train(asked, difference(default.recipe, asked.recipe))
    return 0


def _check_device(name: str | None) -> None:
    if name is not None and re.fullmatch(r"cpu|mps|cuda(:\d+)?", name) is None:
        raise ValueError(f"--device {name} is not known: give cuda, cuda:1, mps or cpu")
    if name == "mps" and not torch.backends.mps.is_available():
        raise ValueError("--device mps was asked for, but torch sees no such device; use cpu")


def _dry_run(recipe: Recipe) -> dict[str, object]:
    plan = launch.plan(recipe)
    return {"recipe": to_dict(recipe), "digest": digest(recipe), **plan._asdict()}


def _train(asked: TrainArguments, overrides: list[str]) -> None:
    recipe = asked.recipe
    out = Path("outputs") / recipe.name if asked.out is None else asked.out
    talks = os.environ.get("RANK", "0") == "0"
    console = Console(quiet=not talks)
    launch.find_data(recipe, asked.data)
    _announce(console, asked, out, overrides)
    try:
        result = launch.run(
            recipe,
            data=asked.data,
            out=out,
            init_from=asked.init_from,
            device=asked.device,
            reporter=Terminal(console),
        )
    except torch.OutOfMemoryError as error:
        reason = str(error).partition(". ")[0]
        raise ValueError(f"{reason}: lower --train.micro-batch (now {recipe.train.micro_batch})") from None
    if result.stop == "finished":
        line = f"Done: {result.step:,} steps; the model is in {out / MODEL}: diladiff sample {out}"
    else:
        line = f"Stopped and saved at step {result.step:,} of {recipe.train.steps:,}; the same command goes on."
    console.print(line, highlight=False, soft_wrap=True)


def _announce(console: Console, asked: TrainArguments, out: Path, overrides: list[str]) -> None:
    """Say what will be done before it is."""
    recipe, plan = asked.recipe, launch.plan(asked.recipe)
    resumed = (out / checkpoint.LATEST).is_file()
    lines = [
        f"{recipe.name}: {plan.parameters:,} parameters, {recipe.train.steps:,} steps of "
        f"{recipe.tokens_per_step:,} tokens ({plan.tokens:,} in all, {plan.flops:.2g} operations)",
        *(f"  {line}" for line in overrides),
        f"data {asked.data}",
        f"{'going on in' if resumed else 'writing to'} {out}",
    ]
    if asked.init_from is not None:
        lines.append(f"starting from the weights of {asked.init_from}")
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
