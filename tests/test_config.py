"""Configurations: strict JSON both ways, differences, digests."""

import dataclasses
from pathlib import Path
from typing import Literal

import pytest

from diladiff import config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Small:
    """A leaf that is told apart by its name."""

    name: Literal["small"] = "small"
    width: int = 4

    def __post_init__(self) -> None:
        if self.width < 1:
            raise ValueError(f"width must be at least 1, not {self.width}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Large:
    """Another member of the same union."""

    name: Literal["large"] = "large"
    depth: int = 2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Whole:
    """Every kind of field that a recipe uses."""

    part: Small | Large
    rate: float
    betas: tuple[float, float] = (0.9, 0.999)
    horizons: tuple[float, ...] = ()
    place: Path | None = None
    flag: bool = False
    mode: Literal["a", "b"] = "a"


WHOLE = Whole(part=Large(depth=3), rate=1.0, horizons=(0.5, 0.25, 0.125), place=Path("a b/c"), flag=True, mode="b")


def test_json_round_trip_keeps_every_field():
    assert config.from_json(Whole, config.to_json(WHOLE)) == WHOLE
    assert config.from_dict(Whole, {"part": {"name": "small"}, "rate": 1}) == Whole(part=Small(), rate=1.0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rat": 1.0}, r"rat: no such field in Whole; did you mean rate\?"),
        ({"part": {"name": "smal"}}, "part.name: 'smal' is not one of small, large"),
        ({"part": {"name": "small", "width": 0}}, "part: width must be at least 1, not 0"),
        ({"part": {"name": "small", "width": "4"}}, "part.width: expected int, got '4'"),
        ({"part": {"name": "small", "width": True}}, "part.width: expected int, got True"),
        ({"rate": None}, "rate: expected float, got None"),
        ({"betas": [0.9]}, "betas: expected 2 values, got 1"),
        ({"horizons": [0.9, "x"]}, r"horizons\[1\]: expected float, got 'x'"),
        ({"mode": "c"}, "mode: 'c' is not one of 'a', 'b'"),
        ({"place": 3}, "place: expected Path | NoneType, got 3"),
    ],
)
def test_a_wrong_field_is_named(change, message):
    with pytest.raises(ValueError, match=message):
        config.from_dict(Whole, {**config.to_dict(WHOLE), **change})


def test_a_missing_field_is_named():
    with pytest.raises(ValueError, match="rate: missing"):
        config.from_dict(Whole, {"part": {"name": "small"}})


def test_difference_names_every_field_that_changed_and_no_other():
    other = dataclasses.replace(WHOLE, rate=2.0, part=Small(), horizons=())
    assert config.difference(WHOLE, WHOLE) == []
    assert config.difference(WHOLE, other) == [
        "part.name: large -> small",
        "part.depth: 3 -> absent",
        "rate: 1.0 -> 2.0",
        "horizons: [0.5, 0.25, 0.125] -> []",
        "part.width: absent -> 4",
    ]


def test_digest_hangs_on_values_not_on_order():
    assert config.digest({"a": 1, "b": (2, 3)}) == config.digest({"b": [2, 3], "a": 1})
    assert config.digest(WHOLE) != config.digest(dataclasses.replace(WHOLE, flag=False))


def test_closest_suggests_only_what_is_near():
    assert config.closest("mdlm_storys", ["mdlm_stories", "mdlm_owt"]) == "mdlm_stories"
    assert config.closest("xyz", ["mdlm_stories"]) is None
