"""What commands that show texts share: a model in words, text that cannot steer a terminal, a text that forms."""

from rich.text import Text

from diladiff.pipelines.frames import Piece
from diladiff.pipelines.masked_lm import MaskedLM

MASK = "\u2592\u2592\u2592 "
STYLES = {"given": "bold", "known": "", "new": "bold black on bright_green", "mask": "bright_black"}


def describe(lm: MaskedLM) -> str:
    """The model in one line."""
    config = lm.model.config
    count = sum(parameter.numel() for parameter in lm.model.parameters())
    dtype = str(lm.dtype).removeprefix("torch.")
    return f"{config.layers} layers, {config.width} wide, {count / 1e6:.1f}M parameters, {dtype} on {lm.device}"


def printable(text: str) -> str:
    """A text without control characters but line feeds: bytes that a model wrote must not steer the terminal."""
    return "".join(character for character in text if character == "\n" or character.isprintable())


def paint(row: list[Piece]) -> Text:
    """A row of a frame in colours: masks dim, what this step revealed bright."""
    text = Text()
    for piece in row:
        shown = MASK * piece.positions if piece.kind == "mask" else printable(piece.text)
        text.append(shown, style=STYLES[piece.kind])
    return text


def plain(row: list[Piece]) -> str:
    """A row of a frame in one line without colours, an underscore for each mask."""
    return "".join(
        " _" * piece.positions if piece.kind == "mask" else printable(piece.text).replace("\n", " ") for piece in row
    ).strip()
