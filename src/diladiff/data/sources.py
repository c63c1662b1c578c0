"""Where documents come from: text files, JSON lines (plain or compressed) and Hugging Face data sets, read as streams.

A source yields raw rows in a fixed order and can start at any row, so that a killed run goes on where it was.
"""

import gzip
import io
import lzma
import sys
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

TEXT = (".txt", ".text", ".md")
JSON_LINES = (".jsonl", ".ndjson", ".json")
COMPRESSIONS = (".gz", ".xz", ".zst")
DAMAGE: tuple[type[Exception], ...] = (EOFError, lzma.LZMAError, zlib.error, gzip.BadGzipFile)
HUB = "hf:"

Documents = Literal["paragraph", "line", "file"]
Raw = bytes | dict[str, Any]
"""A line of JSON, the bytes of a text, or a row of a Hugging Face data set."""


class Place(NamedTuple):
    """How far a source has been read, in the unit in which its size is known."""

    done: int
    size: int


@final
class FileSource:
    """One file; a row is a line of JSON, or a document of a text file."""

    def __init__(self, path: Path, documents: Documents) -> None:
        if not path.is_file():
            raise ValueError(f"input {path}: no such file")
        self.name, self.path, self.documents = str(path), path, documents
        self.compression = path.suffix if path.suffix in COMPRESSIONS else ""
        ending = Path(path.stem).suffix if self.compression else path.suffix
        if ending not in TEXT + JSON_LINES:
            known = ", ".join(TEXT + JSON_LINES)
            raise ValueError(f"input {path}: unknown ending {ending!r}; known are {known}, also with .gz, .xz or .zst")
        self.is_json = ending in JSON_LINES
        self.size = path.stat().st_size
        self._handle: io.BufferedReader | None = None

    def place(self) -> Place:
        """The bytes read so far, of the file's."""
        if self._handle is None:
            return Place(0, self.size)
        return Place(self.size if self._handle.closed else self._handle.tell(), self.size)

    def count(self) -> int:
        """The number of rows; reads the whole file."""
        return sum(1 for _ in self.rows())

    def rows(self, start: int = 0) -> Iterator[Raw]:
        """The rows from a number on."""
        number = 0
        with open(self.path, "rb") as self._handle:
            try:
                for number, row in enumerate(self._split(_decompress(self._handle, self.compression))):
                    if number >= start:
                        yield row
            except (*DAMAGE, *_zstd_errors()) as error:
                raise ValueError(f"input {self.path}: damaged or cut after row {number} ({error})") from None

    def _split(self, lines: io.BufferedIOBase) -> Iterator[bytes]:
        if self.is_json or self.documents == "line":
            for line in lines:
                yield line.rstrip(b"\r\n")
        elif self.documents == "file":
            yield lines.read()
        else:
            paragraph: list[bytes] = []
            for line in lines:
                if line.strip():
                    paragraph.append(line.rstrip(b"\r\n"))
                elif paragraph:
                    yield b"\n".join(paragraph)
                    paragraph = []
            if paragraph:
                yield b"\n".join(paragraph)


@final
class HubSource:
    """A Hugging Face data set, `hf:NAME[@SUBSET][#SPLIT]`, streamed; NAME may be a local folder."""

    def __init__(self, name: str) -> None:
        self.name = name
        rest, _, split = name.removeprefix(HUB).partition("#")
        path, _, subset = rest.partition("@")
        if not path:
            raise ValueError(f"input {name}: names no data set; write hf:NAME[@SUBSET][#SPLIT]")
        try:
            from datasets import load_dataset
        except ImportError:
            raise ValueError(f"input {name}: needs the extra `data`: pip install 'diladiff[data]'") from None
        try:
            self._data: Any = load_dataset(path, subset or None, split=split or "train", streaming=True)
        except (OSError, ValueError) as error:
            reason = str(error).strip().splitlines()[0]
            raise ValueError(f"input {name}: cannot be opened ({reason})") from None
        known = (self._data.info.splits or {}).get(split or "train")
        self.size = known.num_examples if known else 0
        self._done = 0

    def place(self) -> Place:
        """The rows read so far, of all (0 where their number is not published)."""
        return Place(self._done, self.size)

    def count(self) -> int:
        """The number of rows, as published; counted where it is not."""
        return self.size or sum(1 for _ in self._data)

    def rows(self, start: int = 0) -> Iterator[Raw]:
        """The rows from a number on."""
        self._done = start
        for row in self._data.skip(start) if start else self._data:
            self._done += 1
            yield row


Source = FileSource | HubSource


def open_sources(names: tuple[str, ...], documents: Documents) -> list[Source]:
    """The sources of some inputs, in order; a folder stands for the known files in it, by name."""
    found: list[Source] = []
    for name in names:
        path = Path(name)
        if name.startswith(HUB):
            found.append(HubSource(name))
        elif path.is_dir():
            inside = [file for file in sorted(path.rglob("*")) if file.is_file() and _known(file)]
            if not inside:
                raise ValueError(f"input {name}: the folder holds no text or JSON lines files")
            found += [FileSource(file, documents) for file in inside]
        else:
            found.append(FileSource(path, documents))
    return found


def _known(path: Path) -> bool:
    ending = Path(path.stem).suffix if path.suffix in COMPRESSIONS else path.suffix
    return ending in TEXT + JSON_LINES


def _decompress(handle: io.BufferedReader, compression: str) -> io.BufferedIOBase:
    if compression == ".gz":
        return gzip.GzipFile(fileobj=handle)
    if compression == ".xz":
        return lzma.LZMAFile(handle)
    if compression == ".zst":
        return _zstd(handle)
    return handle


if sys.version_info >= (3, 14):

    def _zstd(handle: io.BufferedReader) -> io.BufferedIOBase:
        from compression import zstd

        return zstd.ZstdFile(handle)

    def _zstd_errors() -> tuple[type[Exception], ...]:
        from compression import zstd

        return (zstd.ZstdError,)

else:

    def _zstd(handle: io.BufferedReader) -> io.BufferedIOBase:
        return io.BufferedReader(_ZstdStream(handle), 1 << 20)

    @final
    class _ZstdStream(io.RawIOBase):
        """Frames of zstandard as bytes; unlike the package's own stream it notices where the last frame is cut."""

        def __init__(self, handle: io.BufferedIOBase) -> None:
            self._handle, self._left, self._ready = handle, b"", b""
            self._frame: Any = None

        def readable(self) -> bool:
            return True

        def readinto(self, buffer: Any) -> int:
            while not self._ready and self._fill():
                pass
            count = min(len(buffer), len(self._ready))
            buffer[:count], self._ready = self._ready[:count], self._ready[count:]
            return count

        def _fill(self) -> bool:
            import zstandard

            data = self._left or self._handle.read(1 << 16)
            if not data:
                if self._frame is not None:
                    raise EOFError("the last frame has no end")
                return False
            if self._frame is None:
                self._frame = zstandard.ZstdDecompressor().decompressobj()
            self._ready, self._left = self._frame.decompress(data), b""
            if self._frame.eof:
                self._left, self._frame = self._frame.unused_data, None
            return True

    def _zstd_errors() -> tuple[type[Exception], ...]:
        import zstandard

        return (zstandard.ZstdError,)
