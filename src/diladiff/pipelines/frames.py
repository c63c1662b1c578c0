"""What a text looks like while it forms: runs of given, known, new and masked positions, for terminals and pictures."""

from collections.abc import Iterable
from itertools import groupby
from typing import Any, Literal, NamedTuple, final

import torch
from jaxtyping import Int
from torch import Tensor

from diladiff.data.tokenizer import BREAK, Tokenizer
from diladiff.samplers import TokenState

Kind = Literal["given", "known", "new", "mask"]

HALF_A_CHARACTER = "\ufffd"
"""What decoding gives for a token that holds only some of a character's bytes."""


class Piece(NamedTuple):
    """A run of positions of one kind: its text, and how many positions it covers (a mask's text is empty)."""

    kind: Kind
    text: str
    positions: int


class Frame(NamedTuple):
    """A state of the sampler to look at: `seconds` is the time computed so far, `rows` the pieces of each sample."""

    step: int
    steps: int
    seconds: float
    ids: Tensor
    rows: list[list[Piece]]


@final
class FrameMaker:
    """Turns states of tokens into frames."""

    def __init__(self, tokenizer: Tokenizer, canvas_L: Int[Tensor, " L"]) -> None:
        self._tokenizer = tokenizer
        self._given = (canvas_L != tokenizer.mask_id).tolist()
        # Some decoders join a token to what stands before it, so every run is decoded behind a letter.
        self._anchor = tokenizer.encode(["a"])[0]
        self._anchor_text = tokenizer.decode(self._anchor)

    def make(self, state: TokenState, seconds: float) -> Frame:
        """A frame of a state; it stays valid when the sampler goes on."""
        ids_BL = state.tokens_BL.cpu().clone()
        new_BL = torch.zeros_like(ids_BL, dtype=torch.bool)
        new_BL.view(-1)[state.changed_N.cpu()] = True
        rows = [self._row(ids, new) for ids, new in zip(ids_BL.tolist(), new_BL.tolist(), strict=True)]
        return Frame(state.step, state.steps, seconds, ids_BL, rows)

    def _row(self, ids: list[int], new: list[bool]) -> list[Piece]:
        if self._tokenizer.packing == "document" and self._tokenizer.end_id in ids:
            ids = ids[: ids.index(self._tokenizer.end_id)]
        kinds: list[Kind] = ["new" if is_new else "known" for is_new in new[: len(ids)]]
        kinds = ["given" if given else kind for given, kind in zip(self._given, kinds, strict=False)]
        kinds = ["mask" if index == self._tokenizer.mask_id else kind for index, kind in zip(ids, kinds, strict=True)]
        row, first = [], 0
        for kind, group in groupby(kinds):
            count = len(list(group))
            text = "" if kind == "mask" else self._text(ids[first : first + count])
            row.append(Piece(kind, text.lstrip() if first == 0 and kind != "given" else text, count))
            first += count
        return row

    def _text(self, ids: list[int]) -> str:
        whole = self._tokenizer.decode([*self._anchor, *ids]).replace(HALF_A_CHARACTER, "")
        if self._tokenizer.packing == "joined" and ids and ids[0] == self._tokenizer.separator_id:
            return BREAK + whole.removeprefix(self._anchor_text + BREAK).removeprefix(self._anchor_text)
        return whole[len(self._anchor_text) :]


def record(frames: Iterable[Frame]) -> list[dict[str, Any]]:
    """A run's frames as values that JSON knows: `rows` holds lists of `[kind, text, positions]`."""
    return [
        {
            "step": frame.step,
            "steps": frame.steps,
            "seconds": frame.seconds,
            "rows": [[list(piece) for piece in row] for row in frame.rows],
        }
        for frame in frames
    ]
