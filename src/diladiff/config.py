"""Frozen dataclasses as configurations: strict JSON both ways, field-by-field difference, digest.

Every field is written out and must be read back: an unknown, missing or ill-typed field is a ValueError that names it.
Members of a union of dataclasses are told apart by their field `name: Literal[...]`.
"""

import dataclasses
import difflib
import enum
import hashlib
import json
import types
import typing
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal, TypeVar, Union, get_args, get_origin

Config = TypeVar("Config")


def to_dict(config: Any) -> Any:
    """A configuration as values that JSON knows."""
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return {field.name: to_dict(getattr(config, field.name)) for field in dataclasses.fields(config)}
    if isinstance(config, (list, tuple)):
        return [to_dict(item) for item in config]
    if isinstance(config, dict):
        return {key: to_dict(value) for key, value in config.items()}
    if isinstance(config, Path):
        return str(config)
    if isinstance(config, enum.Enum):
        return config.value
    return config


def from_dict(cls: type[Config], data: Any, where: str = "") -> Config:
    """Build a configuration from `to_dict`'s values; `where` is the path of fields that errors begin with."""
    if not isinstance(data, dict):
        raise ValueError(f"{where or cls.__name__}: expected an object of fields, got {data!r}")
    hints = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    for name in data:
        if name not in fields:
            raise ValueError(f"{_join(where, name)}: no such field in {cls.__name__}{_suggestion(name, fields)}")
    for name, field in fields.items():
        required = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        if required and name not in data:
            raise ValueError(f"{_join(where, name)}: missing, and {cls.__name__} has no default for it")
    values = {name: _read(hints[name], value, _join(where, name)) for name, value in data.items()}
    try:
        return cls(**values)
    except ValueError as error:
        raise ValueError(f"{where}: {error}" if where else str(error)) from None


def to_json(config: Any) -> str:
    """A configuration as indented JSON text."""
    return json.dumps(to_dict(config), indent=1, ensure_ascii=True)


def from_json(cls: type[Config], text: str) -> Config:
    """Build a configuration from JSON text."""
    return from_dict(cls, json.loads(text))


def digest(config: Any) -> str:
    """The first 16 characters of the sha256 of a configuration's canonical JSON."""
    canonical = json.dumps(to_dict(config), sort_keys=True, separators=(",", ":"), ensure_ascii=True)
    return hashlib.sha256(canonical.encode()).hexdigest()[:16]


def difference(old: Any, new: Any) -> list[str]:
    """One line for each field that differs, such as `optim.lr: 0.0003 -> 0.001`."""
    before, after = dict(_leaves(to_dict(old))), dict(_leaves(to_dict(new)))
    lines = []
    for path in [*before, *(path for path in after if path not in before)]:
        left, right = before.get(path, "absent"), after.get(path, "absent")
        if json.dumps(left) != json.dumps(right):
            lines.append(f"{path}: {left} -> {right}")
    return lines


def closest(word: str, words: Iterable[str]) -> str | None:
    """The most similar of some words, or None where none is near."""
    near = difflib.get_close_matches(word, list(words), n=1, cutoff=0.5)
    return near[0] if near else None


def _read(hint: Any, value: Any, where: str) -> Any:
    origin = get_origin(hint)
    if origin is typing.Annotated:
        return _read(get_args(hint)[0], value, where)
    if origin in (Union, types.UnionType):
        return _read_union(get_args(hint), value, where)
    if origin is Literal:
        if value in get_args(hint):
            return value
        raise ValueError(f"{where}: {value!r} is not one of {', '.join(map(repr, get_args(hint)))}")
    if origin is tuple:
        return _read_tuple(get_args(hint), value, where)
    if origin is dict:
        key_hint, value_hint = get_args(hint)
        if isinstance(value, dict):
            return {_read(key_hint, k, where): _read(value_hint, v, _join(where, str(k))) for k, v in value.items()}
    elif dataclasses.is_dataclass(hint):
        return from_dict(hint, value, where)  # type: ignore[arg-type]
    elif isinstance(hint, type) and issubclass(hint, enum.Enum):
        if value in [member.value for member in hint]:
            return hint(value)
    elif hint is Path and isinstance(value, str):
        return Path(value)
    elif hint is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    elif hint is Any or (isinstance(hint, type) and type(value) is hint) or (hint is type(None) and value is None):
        return value
    raise ValueError(f"{where}: expected {getattr(hint, '__name__', hint)}, got {value!r}")


def _read_union(hints: tuple[Any, ...], value: Any, where: str) -> Any:
    if value is None and type(None) in hints:
        return None
    members = [hint for hint in hints if dataclasses.is_dataclass(hint)]
    if isinstance(value, dict) and members:
        by_name = {name: member for member in members for name in _names(member)}
        if len(members) == 1 and not by_name:
            return _read(members[0], value, where)
        if value.get("name") not in by_name:
            raise ValueError(f"{_join(where, 'name')}: {value.get('name')!r} is not one of {', '.join(by_name)}")
        return _read(by_name[value["name"]], value, where)
    for hint in hints:
        try:
            return _read(hint, value, where)
        except ValueError:
            continue
    raise ValueError(f"{where}: expected {' | '.join(getattr(h, '__name__', str(h)) for h in hints)}, got {value!r}")


def _read_tuple(hints: tuple[Any, ...], value: Any, where: str) -> tuple[Any, ...]:
    if not isinstance(value, (list, tuple)):
        raise ValueError(f"{where}: expected a list, got {value!r}")
    if len(hints) == 2 and hints[1] is Ellipsis:
        hints = (hints[0],) * len(value)
    if len(hints) != len(value):
        raise ValueError(f"{where}: expected {len(hints)} values, got {len(value)}")
    return tuple(_read(hint, item, f"{where}[{i}]") for i, (hint, item) in enumerate(zip(hints, value, strict=True)))


def _names(cls: Any) -> tuple[str, ...]:
    hint = typing.get_type_hints(cls).get("name")
    return get_args(hint) if get_origin(hint) is Literal else ()


def _leaves(value: Any, where: str = "") -> Iterable[tuple[str, Any]]:
    if isinstance(value, dict) and value:
        for key, item in value.items():
            yield from _leaves(item, _join(where, str(key)))
    else:
        yield where, value


def _join(where: str, name: str) -> str:
    return f"{where}.{name}" if where else name


def _suggestion(name: str, names: Iterable[str]) -> str:
    near = closest(name, names)
    return f"; did you mean {near}?" if near else ""
