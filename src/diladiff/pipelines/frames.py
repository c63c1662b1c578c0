"""What a text looks like while it forms: runs of given, known, new and masked positions, for terminals and pictures."""

from collections.abc import Iterable
from itertools import groupby, pairwise
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


def record(tokenizer: Tokenizer, frames: Iterable[Frame]) -> dict[str, Any]:
    """A run as values that JSON knows, for pictures of it.

    `rows` holds for each sample its positions up to the end as `[text, step]`: their texts joined are the sample's, and
    `step` is the one that revealed it for good (0: given). `seconds` are those of computing.
    """
    kept = list(frames)
    last = kept[-1]
    rows = []
    for number, ids_L in enumerate(last.ids):
        revealed_L = torch.zeros_like(ids_L)
        for before, frame in pairwise(kept):
            revealed_L[before.ids[number] != frame.ids[number]] = frame.step
        texts = spell(tokenizer, ids_L.tolist())
        rows.append([[text, step] for text, step in zip(texts, revealed_L.tolist(), strict=False)])
    return {"schema": 1, "steps": last.steps, "seconds": last.seconds, "rows": rows}


def spell(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    """The text that each token adds, up to the end; a character in several tokens comes with its last one."""
    if tokenizer.packing == "document" and tokenizer.end_id in ids:
        ids = ids[: ids.index(tokenizer.end_id)]
    texts, before = [], ""
    for stop in range(1, len(ids) + 1):
        whole = tokenizer.decode(ids[:stop])
        complete = whole.startswith(before) and not whole.endswith(HALF_A_CHARACTER)
        texts.append(whole[len(before) :] if complete else "")
        before = whole if complete else before
    return texts
