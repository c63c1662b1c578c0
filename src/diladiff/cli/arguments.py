"""Typed arguments through tyro, with its boxes of errors turned into one line that main prints."""

import contextlib
import dataclasses
import io
import re
import typing
from collections.abc import Iterator
from typing import Any, TypeVar

import tyro

from diladiff.config import closest

Arguments = TypeVar("Arguments")
RULE = "\u2500"
FRAME = "\u256d\u256e\u2570\u256f\u2502"


def parse(cls: type[Arguments], arguments: list[str], *, prog: str, default: Arguments, description: str) -> Arguments:
    """Read a command's arguments into a dataclass; ValueError with one line where they do not fit.

    A field whose name is annotated away (`tyro.conf.arg(name="")`) gives its own fields without a prefix.
    """
    known = list(_flags(default))
    for argument in arguments:
        if argument.startswith("--") and argument != "--help":
            _check_flag(argument.partition("=")[0], known)
    errors = io.StringIO()
    try:
        with contextlib.redirect_stderr(errors):
            return tyro.cli(cls, args=arguments, prog=prog, default=default, description=description)
    except SystemExit as stop:
        if not stop.code:
            raise
        raise ValueError(_one_line(errors.getvalue())) from None


def _flags(value: Any, prefix: str = "") -> Iterator[str]:
    """Every flag of a dataclass of dataclasses, with dashes."""
    hints = typing.get_type_hints(type(value), include_extras=True)
    for field in dataclasses.fields(value):
        marks = getattr(hints[field.name], "__metadata__", ())
        if tyro.conf.Suppress in marks:
            continue
        item = getattr(value, field.name)
        name = prefix + field.name.replace("_", "-")
        if dataclasses.is_dataclass(item):
            unnamed = any(getattr(mark, "name", None) == "" for mark in marks)
            yield from _flags(item, prefix if unnamed else f"{name}.")
        else:
            yield f"--{name}"


def _check_flag(flag: str, known: list[str]) -> None:
    flag = flag.replace("_", "-")
    if flag in known:
        return
    last = flag.lstrip("-").rpartition(".")[2]
    same_name = [name for name in known if name.lstrip("-").rpartition(".")[2] == last]
    near = closest(flag, known) if not same_name else same_name[0]
    raise ValueError(f"no option {flag}; " + (f"did you mean {near}?" if near else "--help lists them"))


def _one_line(box: str) -> str:
    """What stands between the frame and the first rule of an error that tyro drew."""
    lines = [line.strip(FRAME + " ") for line in box.splitlines()]
    words: list[str] = []
    for line in lines:
        if line.startswith(RULE) or line.endswith(RULE):
            if words:
                break
        elif line:
            words.append(line)
    text = re.sub(r"^Error parsing (recipe\.)?", "", " ".join(words))
    return text[:1].lower() + text[1:] if text else "the arguments could not be read; --help lists them"
