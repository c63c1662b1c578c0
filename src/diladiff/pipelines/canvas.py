"""Canvases: given text and masks as token ids, and the text read back with what was given returned word for word."""

import hashlib
import re
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from diladiff.data.tokenizer import Tokenizer

BLANK = re.compile(r"_{3,}")


class Part(NamedTuple):
    """A run of positions up to `stop`: given text, or None where the sampler writes."""

    text: str | None
    stop: int


@dataclass(frozen=True, kw_only=True, eq=False)
class Canvas:
    """What a sampler starts from: ids with masks where it may write, and the parts that its text is read by.

    Positions behind the last part are filled with an end token and padding, given too.
    """

    ids_L: Int[Tensor, " L"]
    parts: tuple[Part, ...]


def blank(tokenizer: Tokenizer, length: int) -> Canvas:
    """Nothing but masks."""
    return Canvas(ids_L=torch.full((length,), tokenizer.mask_id), parts=(Part(None, length),))


def around(tokenizer: Tokenizer, length: int, *, prefix: str = "", suffix: str = "") -> Canvas:
    """A text that begins with a prefix, ends with a suffix, or both, `length` positions in all."""
    given = tokenizer.encode([prefix, suffix])
    room = length - len(given[0]) - len(given[1]) - (1 if suffix and tokenizer.packing == "document" else 0)
    if room < 1:
        count = len(given[0]) + len(given[1])
        raise ValueError(f"prompt: its {count} tokens leave nothing to write in {length}; shorten it or raise length")
    return _join(tokenizer, length, [(prefix, given[0]), (None, room), (suffix, given[1])])


def infill(tokenizer: Tokenizer, length: int, text: str, *, blank_tokens: int) -> Canvas:
    """A text with blanks, each three or more underscores: `blank_tokens` masks, or, at the end, all that is left.

    White space before a blank belongs to the blank, since most tokens begin with their space.
    """
    texts = BLANK.split(text)
    if len(texts) == 1:
        raise ValueError(f"infill: no blank in {text!r}; write ___ where words are wanted")
    if blank_tokens < 1:
        raise ValueError(f"blank_tokens: {blank_tokens} must be at least 1")
    texts = [*(given.rstrip() for given in texts[:-1]), texts[-1]]
    encoded = tokenizer.encode(texts)
    pieces: list[tuple[str | None, list[int] | int]] = []
    for given, ids in zip(texts, encoded, strict=True):
        pieces += [(given, ids), (None, blank_tokens)]
    open_end = not texts[-1]
    pieces = pieces[:-3] if open_end else pieces[:-1]
    used = sum(size if isinstance(size, int) else len(size) for _, size in pieces)
    if used + open_end > length:
        raise ValueError(
            f"infill: {used} tokens, {blank_tokens} for each blank but one at the end, exceed the length of {length}; "
            "shorten the text or the blanks"
        )
    if open_end:
        pieces.append((None, length - used))
    return _join(tokenizer, length, pieces)


def of_ids(tokenizer: Tokenizer, length: int, ids_L: Int[Tensor, " L"]) -> Canvas:
    """Any ids, with the mask's where the sampler may write."""
    if ids_L.dim() != 1 or not 1 <= len(ids_L) <= length:
        raise ValueError(f"canvas: shape {tuple(ids_L.shape)}; give 1 to {length} ids, the length of the model")
    if int(ids_L.min()) < 0 or int(ids_L.max()) >= tokenizer.vocab_size:
        raise ValueError(f"canvas: ids must be in [0, {tokenizer.vocab_size}), the tokenizer's vocabulary")
    return Canvas(ids_L=ids_L.to("cpu", torch.int64), parts=(Part(None, len(ids_L)),))


def read(tokenizer: Tokenizer, canvas: Canvas, ids_L: Int[Tensor, " L"]) -> str:
    """The text of a filled canvas: given parts as they were given, the rest decoded in its context."""
    ids = ids_L.tolist()
    if len(canvas.parts) == 1:
        return tokenizer.decode(ids[: canvas.parts[0].stop])
    text, before, kept, first = "", "", [], 0
    hidden = {tokenizer.mask_id, tokenizer.end_id, tokenizer.pad_id}
    last = len(canvas.parts) - 1
    for number, part in enumerate(canvas.parts):
        fresh = ids[first : part.stop]
        if part.text is None and number < last:
            # An end token inside a blank would cut off the given text behind it.
            fresh = [index for index in fresh if index not in hidden]
        kept += fresh
        whole = tokenizer.decode(kept)
        found = whole[len(before) :] if whole.startswith(before) else tokenizer.decode(fresh)
        text += found if part.text is None else part.text
        before, first = whole, part.stop
    return text


def describe(tokenizer: Tokenizer, canvas: Canvas) -> dict[str, Any]:
    """A canvas for the record: its length, the text it gives with ___ for what is written, and where texts are cut."""
    given = "".join("___" if part.text is None else part.text for part in canvas.parts)
    return {
        "length": len(canvas.ids_L),
        "text": given,
        "ids_sha256": _sha256(canvas.ids_L),
        "packing": tokenizer.packing,
    }


def _sha256(ids_L: Tensor) -> str:
    return hashlib.sha256(ids_L.numpy().astype("<i8").tobytes()).hexdigest()


def _join(tokenizer: Tokenizer, length: int, pieces: list[tuple[str | None, list[int] | int]]) -> Canvas:
    """Lay pieces out one after another: given text with its ids, or None with a number of masks."""
    ids: list[int] = []
    parts = []
    for text, content in pieces:
        ids += [tokenizer.mask_id] * content if isinstance(content, int) else content
        if text != "":
            parts.append(Part(text, len(ids)))
    if tokenizer.packing == "document" and parts[-1].text is not None and len(ids) < length:
        # As in training: one document a block, its end, then padding.
        ids += [tokenizer.end_id] + [tokenizer.pad_id] * (length - len(ids) - 1)
    return Canvas(ids_L=torch.tensor(ids), parts=tuple(parts))
