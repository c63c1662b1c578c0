"""What a recipe is: one complete, typed, frozen value; and what its docstring must say."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated, Literal, NamedTuple

import tyro

from diladiff.engine.loop import TrainConfig
from diladiff.engine.optim import OptimConfig
from diladiff.objectives.masked import MaskedConfig

SECTIONS = ("Command", "Cost", "Result")


@dataclass(frozen=True, kw_only=True)
class DataSpec:
    """What a recipe expects of a data set; the vocabulary, mask id and length are those of the objective's model."""

    packing: Literal["joined", "document"]
    """Documents joined and cut into blocks, or one document a block, padded."""
    tokenizer: str
    """Which tokenizer the data are made with, in words."""
    prepare: Annotated[str, tyro.conf.Suppress]
    """The command that makes the data, printed where they are missing."""


@dataclass(frozen=True, kw_only=True)
class Recipe:
    """Everything that decides a run but its data, its folder and its machine."""

    name: Annotated[str, tyro.conf.Suppress]
    objective: MaskedConfig
    optim: OptimConfig
    train: TrainConfig
    data: DataSpec

    @property
    def tokens_per_step(self) -> int:
        """Tokens that one update reads on all ranks together."""
        return self.train.global_batch * self.objective.model.length

    @property
    def total_tokens(self) -> int:
        """Tokens that the whole run reads."""
        return self.train.steps * self.tokens_per_step


class About(NamedTuple):
    """What a recipe's docstring says, section by section."""

    summary: str
    command: str
    cost: str
    result: str


def about(name: str, function: Callable[[], Recipe]) -> About:
    """Read a recipe's docstring; a ValueError names the line that it lacks."""
    text = " ".join((function.__doc__ or "").split())
    parts = re.split(rf"\b({'|'.join(SECTIONS)}): ", text)
    sections = dict(zip(parts[1::2], (part.strip() for part in parts[2::2]), strict=True))
    for section in SECTIONS:
        if not sections.get(section):
            raise ValueError(f"recipe {name}: its docstring has no line `{section}: ...`; write one")
    return About(parts[0].strip(), *(sections[section] for section in SECTIONS))
