"""tyro's boxes become one line that names the option and the value."""

import io
import sys
from dataclasses import dataclass, field
from typing import Annotated, Literal

import pytest
import tyro

from diladiff.cli.arguments import parse


@dataclass(frozen=True, kw_only=True)
class Inner:
    """Something inside."""

    size: int = 1
    kind: Literal["red", "blue"] = "red"
    hidden: Annotated[str, tyro.conf.Suppress] = ""

    def __post_init__(self) -> None:
        if self.size < 0:
            raise ValueError(f"size: must not be negative, got {self.size}")


@dataclass(frozen=True, kw_only=True)
class Outer:
    """A command."""

    names: Annotated[tuple[str, ...], tyro.conf.Positional] = ()
    inner: Inner = field(default_factory=Inner)
    warmup_steps: int
    pair: tuple[float, float] = (0.0, 1.0)
    quick: bool = False


def read(*arguments: str, default: Outer | None = None) -> Outer:
    return parse(Outer, list(arguments), prog="x", description="A command.", default=default)


def test_values_are_typed():
    asked = read("a", "b", "--warmup-steps", "3", "--inner.kind", "blue", "--pair", "2", "3e-1", "--quick")
    assert asked == Outer(names=("a", "b"), warmup_steps=3, inner=Inner(kind="blue"), pair=(2.0, 0.3), quick=True)


def test_a_default_is_changed_field_by_field():
    assert read("--inner.size=4", default=Outer(warmup_steps=7)) == Outer(warmup_steps=7, inner=Inner(size=4))
    assert read("--no-quick", default=Outer(warmup_steps=7, quick=True)).quick is False


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("--warmup-stps 3", "no option --warmup-stps; did you mean --warmup-steps?"),
        ("--size 3", "no option --size; did you mean --inner.size?"),
        ("--inner.hidden x", "no option --inner.hidden; "),
        ("--zzz", "no option --zzz; --help lists them"),
        ("--warmup-steps 1.5", "--warmup-steps: invalid literal for int() with base 10: '1.5'"),
        ("--warmup-steps 3 --inner.kind green", "invalid choice 'green' for argument '--inner.kind'. Expected one of"),
        ("--warmup-steps 3 --inner.size -2", "inner: size: must not be negative, got -2"),
        ("--warmup-steps", "missing value for argument '--warmup-steps'."),
        ("--inner.size 3", "missing from x: --warmup-steps"),
        ("--pair 1 --warmup-steps 3", "missing value for argument '--pair'."),
    ],
)
@pytest.mark.parametrize("encoding", ["utf-8", "ascii"])
def test_what_does_not_fit_is_one_line(encoding, arguments, line, capsys, monkeypatch):
    # tyro draws its frames by what stdout can show.
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding=encoding))
    with pytest.raises(ValueError, match=r".") as error:
        read(*arguments.split())
    assert str(error.value).startswith(line)
    assert "\n" not in str(error.value)
    assert not set(str(error.value)) & set("\u2500\u2502\u256d\u2570")
    assert "  " not in str(error.value)
    assert capsys.readouterr().err == ""
