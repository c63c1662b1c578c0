"""Sources: endings, compressions, rows from any place on, and damage that is noticed."""

import gzip
import lzma
from collections.abc import Callable
from pathlib import Path

import pytest

from diladiff.data.sources import FileSource, open_sources

zstandard = pytest.importorskip("zstandard")

LINES = b"".join(b'{"text": "line %d"}\n' % i for i in range(5000))
PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "": bytes,
    ".gz": gzip.compress,
    ".xz": lzma.compress,
    ".zst": zstandard.compress,
}


@pytest.mark.parametrize("ending", PACKERS)
def test_lines_of_every_compression(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(PACKERS[ending](LINES[:40000]) + PACKERS[ending](LINES[40000:]))  # two frames
    source = FileSource(path, "paragraph")
    assert source.count() == 5000
    assert list(source.rows(4998)) == LINES.splitlines()[4998:]
    assert source.is_json
    stream = source.rows()
    next(stream)
    assert 0 < source.place().done <= source.place().size == path.stat().st_size


@pytest.mark.parametrize("ending", [".gz", ".xz", ".zst"])
def test_a_cut_file_is_noticed(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.jsonl{ending}"
    path.write_bytes(PACKERS[ending](LINES)[:-9])
    with pytest.raises(ValueError, match=r"a\.jsonl.*: damaged or cut after row"):
        FileSource(path, "line").count()


def test_documents_of_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"\n\none\r\ntwo\n \n\nthree")
    assert list(FileSource(path, "paragraph").rows()) == [b"one\ntwo", b"three"]
    assert list(FileSource(path, "line").rows()) == [b"", b"", b"one", b"two", b" ", b"", b"three"]
    assert list(FileSource(path, "file").rows()) == [b"\n\none\r\ntwo\n \n\nthree"]


def test_inputs_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "a.pdf").write_bytes(b"")
    (tmp_path / "a.csv.gz").write_bytes(b"")
    with pytest.raises(ValueError, match=r"nowhere\.txt: no such file"):
        open_sources((str(tmp_path / "nowhere.txt"),), "line")
    with pytest.raises(ValueError, match=r"a\.pdf: unknown ending '\.pdf'; known are \.txt"):
        open_sources((str(tmp_path / "a.pdf"),), "line")
    with pytest.raises(ValueError, match=r"unknown ending '\.csv'"):
        open_sources((str(tmp_path / "a.csv.gz"),), "line")
    with pytest.raises(ValueError, match="holds no text or JSON lines files"):
        open_sources((str(tmp_path),), "line")


def test_a_folder_stands_for_its_files_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a.jsonl.gz", "c.pdf"):
        (tmp_path / name).write_bytes(b"")
    assert [Path(source.name).name for source in open_sources((str(tmp_path),), "line")] == ["a.jsonl.gz", "b.txt"]


def test_hugging_face_data_sets_by_name(tmp_path: Path) -> None:
    """A folder is a data set's name too, so the way through the library is tested without the network."""
    pytest.importorskip("datasets")
    (tmp_path / "train.jsonl").write_bytes(b"\n".join(LINES.splitlines()[:100]))
    (source,) = open_sources((f"hf:{tmp_path}",), "line")
    rows = list(source.rows())
    assert rows[:2] == [{"text": "line 0"}, {"text": "line 1"}]
    assert list(source.rows(3)) == rows[3:]
    assert source.count() == len(rows)
    with pytest.raises(ValueError, match=r"input hf:.*#nosuch: cannot be opened"):
        open_sources((f"hf:{tmp_path}#nosuch",), "line")
