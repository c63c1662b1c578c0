"""Typed arguments through tyro, with its boxes of errors turned into one line that main prints."""

import contextlib
import dataclasses
import io
import re
import typing
from collections.abc import Iterator
from typing import Annotated, Any, TypeVar

import tyro

from diladiff.config import closest

Arguments = TypeVar("Arguments")
FRAME = " \u2502\u2570\u256f"
RULES = "-\u2500"


def parse(
    cls: type[Arguments], arguments: list[str], *, prog: str, description: str, default: Arguments | None = None
) -> Arguments:
    """Read a command's arguments into a dataclass; ValueError with one line where they do not fit.

    A field whose name is annotated away (`tyro.conf.arg(name="")`) gives its own fields without a prefix.
    """
    known = list(_flags(cls))
    for argument in arguments:
        if argument.startswith("--") and argument != "--help":
            _check_flag(argument.partition("=")[0], known)
    start: Any = tyro.MISSING_NONPROP if default is None else default
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(cls, args=arguments, prog=prog, default=start, description=description)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ValueError(_one_line(errors.getvalue())) from None


def _flags(cls: Any, prefix: str = "") -> Iterator[str]:
    """Every flag of a dataclass of dataclasses, with dashes."""
    for name, hint in typing.get_type_hints(cls, include_extras=True).items():
        kind, *marks = typing.get_args(hint) if typing.get_origin(hint) is Annotated else (hint,)
        dashed = prefix + name.replace("_", "-")
        if tyro.conf.Suppress in marks or tyro.conf.Positional in marks:
            continue
        if dataclasses.is_dataclass(kind):
            unnamed = any(getattr(mark, "name", None) == "" for mark in marks)
            yield from _flags(kind, prefix if unnamed else f"{dashed}.")
        else:
            yield f"--{dashed}"
            if kind is bool:
                first, dot, last = dashed.rpartition(".")
                yield f"--{first}{dot}no-{last}"


def _check_flag(flag: str, known: list[str]) -> None:
    flag = flag.replace("_", "-")
    if flag in known:
        return
    last = flag.lstrip("-").rpartition(".")[2]
    same_name = [name for name in known if name.lstrip("-").rpartition(".")[2] == last]
    near = closest(flag, known) if not same_name else same_name[0]
    raise ValueError(f"no option {flag}; " + (f"did you mean {near}?" if near else "--help lists them"))


def _one_line(box: str) -> str:
    """What stands between the title of an error that tyro drew, boxed or in ASCII, and the rule that follows."""
    words: list[str] = []
    for line in box.splitlines()[1:]:
        inner = line.strip(FRAME)
        if inner.strip(RULES):
            words.append(inner)
        elif words:
            break
    text = re.sub(r"^Error parsing (recipe\.|[A-Z]\w+: )?", "", " ".join(words))
    return text[:1].lower() + text[1:] if text else "the arguments could not be read; --help lists them"
