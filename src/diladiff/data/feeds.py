"""The rows of all inputs in one fixed order, as tasks for the workers, each with the split of its rows."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, final

from diladiff.data.documents import SPLITS, Document, Reader, Rules, Task
from diladiff.data.settings import PrepareConfig, Progress
from diladiff.data.sources import FileSource, Source

TASK_ROWS = 256
TASK_BYTES = 1 << 20


@final
class Feeds:
    """The rows of all sources in order, as tasks."""

    def __init__(self, config: PrepareConfig, train: list[Source], valid: list[Source]) -> None:
        self.config, self.sources, self.first_valid = config, [*train, *valid], len(train)
        self.rules = Rules(
            text_field=config.text_field,
            key_field=config.key_field,
            filter=config.filter,
            valid_share=0.0 if valid else config.valid_share,
            test_share=config.test_share,
        )

    def names(self) -> list[list[Any]]:
        """What the sources are, so that a resumed run can see that they have changed."""
        return [[Path(source.name).name, source.size] for source in self.sources]

    def count_rows(self) -> tuple[int, ...]:
        """The rows of each training source, where the split needs them."""
        by_number = self.config.valid_documents and self.first_valid == len(self.sources)
        return tuple(source.count() for source in self.sources) if by_number else ()

    def tasks(self, source: int, row: int, rows: tuple[int, ...]) -> Iterator[Task]:
        """Tasks from a row of a source on; none mixes two splits chosen by number."""
        first_held_out = sum(rows) - self.config.valid_documents
        for index in range(source, len(self.sources)):
            edge = first_held_out - sum(rows[:index]) if rows else None
            yield from self._tasks(index, row, edge)
            row = 0

    def share(self, at: int) -> float | None:
        """The share of the input read, while source number `at` is being read."""
        places = [source.place() for source in self.sources]
        if any(place.size == 0 for place in places) or len({type(source) for source in self.sources}) > 1:
            return None
        total = sum(place.size for place in places)
        return min(1.0, (sum(place.size for place in places[:at]) + places[at].done) / total)

    def _tasks(self, index: int, row: int, edge: int | None) -> Iterator[Task]:
        source = self.sources[index]
        is_json = isinstance(source, FileSource) and source.is_json
        raws: list[Any] = []
        size, first = 0, row
        for number, raw in enumerate(source.rows(row), row):
            if raws and (len(raws) >= TASK_ROWS or size >= TASK_BYTES or number == edge):
                yield Task(index, source.name, first, raws, is_json, self._fixed_split(index, first, edge))
                raws, size, first = [], 0, number
            raws.append(raw)
            size += len(raw) if isinstance(raw, bytes) else len(str(raw.get(self.config.text_field, "")))
        if raws:
            yield Task(index, source.name, first, raws, is_json, self._fixed_split(index, first, edge))

    def _fixed_split(self, index: int, row: int, edge: int | None) -> int | None:
        if index >= self.first_valid:
            return SPLITS.index("valid")
        if edge is not None:
            return SPLITS.index("train" if row < edge else "valid")
        return None if self.rules.valid_share or self.rules.test_share else SPLITS.index("train")


def training_texts(
    config: PrepareConfig, feeds: Feeds, rows: tuple[int, ...], tell: Callable[[Progress], None]
) -> Iterator[str]:
    """The first training documents; bad rows are skipped here and counted later."""
    reader, found = Reader(feeds.rules), 0
    for task in feeds.tasks(0, 0, rows):
        for raw in task.raws:
            try:
                document = reader.read(raw, task.is_json, task.split)
            except ValueError:
                continue
            if isinstance(document, Document) and SPLITS[document.split] == "train":
                found += 1
                yield document.text
                if found == config.vocabulary_documents:
                    return
        tell(Progress("vocabulary", found, 0, min(1.0, found / config.vocabulary_documents)))
