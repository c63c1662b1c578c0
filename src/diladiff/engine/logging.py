"""What a run tells: metrics.jsonl, TensorBoard and wandb, the terminal, and a picture of the loss.

The engine speaks through a Reporter and never prints; only the main process has one that is not silent.
"""

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, final, runtime_checkable

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from diladiff import files

METRICS = "metrics.jsonl"
PICTURE = "loss.png"

Track = Literal["tensorboard", "wandb"]
Row = dict[str, Any]


@runtime_checkable
class Reporter(Protocol):
    """Who is told how a run goes."""

    def begin(self, title: str, done: int, steps: int) -> None:
        """Training starts at step `done` of `steps`."""

    def advance(self, done: int) -> None:
        """A step was finished."""

    def row(self, row: Row) -> None:
        """A row was logged."""

    def note(self, text: str) -> None:
        """Something worth a line happened."""

    def end(self) -> None:
        """Training is over, well or not."""


@final
class Silent:
    """Tells nobody."""

    def begin(self, title: str, done: int, steps: int) -> None:
        """Do nothing."""

    def advance(self, done: int) -> None:
        """Do nothing."""

    def row(self, row: Row) -> None:
        """Do nothing."""

    def note(self, text: str) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""


@final
class Terminal:
    """A progress bar with the time that is left where there is a terminal, and a line for every row."""

    def __init__(self, console: Console):
        self._console = console
        columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.completed}/{task.total}"))
        self._progress = Progress(
            *columns, TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn(), console=console, transient=True
        )
        self._task = self._progress.add_task("", total=None)

    def begin(self, title: str, done: int, steps: int) -> None:
        """Show the bar."""
        self._progress.reset(self._task, total=steps, completed=done, description=title)
        if self._console.is_terminal:
            self._progress.start()

    def advance(self, done: int) -> None:
        """Move the bar."""
        self._progress.update(self._task, completed=done)

    def row(self, row: Row) -> None:
        """Print a row's numbers."""
        self._console.print(_line(row), highlight=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a line."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def end(self) -> None:
        """Take the bar away."""
        self._progress.stop()


@final
class MetricsFile:
    """The run's rows as JSON lines; rows after the step that a run resumes from are dropped, to be made again."""

    def __init__(self, run: Path, step: int):
        self._path = run / METRICS
        kept = [json.dumps(row) + "\n" for row in read_rows(run) if row["step"] <= step]
        files.write_atomic(self._path, "".join(kept))

    def write(self, row: Row) -> None:
        """Add a row; it is in the file when this returns."""
        line = json.dumps(row) + "\n"
        handle = os.open(self._path, os.O_WRONLY | os.O_APPEND)
        try:
            os.write(handle, line.encode())
        except OSError as error:
            raise OSError(
                f"cannot write {self._path} ({error.strerror}): make room and run the same command"
            ) from error
        finally:
            os.close(handle)


def read_rows(run: Path) -> list[Row]:
    """The rows of a run's metrics.jsonl; a last line that a kill cut short is left out."""
    path = run / METRICS
    if not path.is_file():
        return []
    lines = path.read_text().split("\n")
    # What follows the last newline was never finished.
    try:
        return [json.loads(line) for line in lines[:-1]]
    except ValueError as error:
        raise ValueError(f"{path} is damaged ({error}): remove the line or the file") from None


@runtime_checkable
class Tracker(Protocol):
    """A service that draws curves."""

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point to each curve."""

    def close(self) -> None:
        """Flush and stop."""


@final
class TensorBoard:
    """Event files under the run folder."""

    def __init__(self, run: Path):
        try:
            from torch.utils.tensorboard import SummaryWriter
        except ImportError:
            raise ValueError("track: tensorboard is not installed; pip install 'diladiff[track]'") from None
        self._writer = SummaryWriter(str(run / "tensorboard"))

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point to each curve."""
        for name, value in values.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and stop."""
        self._writer.close()


@final
class Wandb:
    """A run at wandb, resumed under the name of the run folder."""

    def __init__(self, run: Path, config: dict[str, Any]):
        try:
            import wandb
        except ImportError:
            raise ValueError("track: wandb is not installed; pip install 'diladiff[track]'") from None
        self._run = wandb.init(project="diladiff", name=run.name, dir=str(run), config=config, resume="allow")

    def write(self, step: int, values: Mapping[str, float]) -> None:
        """Add one point to each curve."""
        self._run.log(dict(values), step=step)

    def close(self) -> None:
        """Flush and stop."""
        self._run.finish()


def trackers(names: Sequence[Track], run: Path, config: dict[str, Any]) -> list[Tracker]:
    """The services that a configuration names."""
    made: list[Tracker] = []
    for name in names:
        made.append(TensorBoard(run) if name == "tensorboard" else Wandb(run, config))
    return made


@final
class Log:
    """Where rows go: the file, the trackers and the reporter. The main process has one."""

    def __init__(self, run: Path, step: int, track: Sequence[Track], config: dict[str, Any], reporter: Reporter):
        self._file, self._reporter = MetricsFile(run, step), reporter
        self._trackers = trackers(track, run, config)

    def write(self, row: Row) -> None:
        """Log a row."""
        self._file.write(row)
        self._reporter.row(row)
        values = {name: value for name, value in row.items() if name != "step" and value is not None}
        for tracker in self._trackers:
            tracker.write(row["step"], values)

    def close(self) -> None:
        """Close the trackers."""
        for tracker in self._trackers:
            tracker.close()


def draw_losses(run: Path) -> Path | None:
    """Draw every loss in metrics.jsonl against the step; None where there is no matplotlib or nothing was logged."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return None
    rows = read_rows(run)
    names = sorted({name for row in rows for name in row if name.endswith("loss")})
    if not names:
        return None
    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.add_subplot(xlabel="step", ylabel="nats", title=run.name)
    for name in names:
        points = [(row["step"], row[name]) for row in rows if row.get(name) is not None]
        axes.plot(*zip(*points, strict=True), label=name)
    axes.legend()
    figure.savefig(run / PICTURE, dpi=120)
    return run / PICTURE


def _line(row: Row) -> str:
    words = [f"step {row['step']}"]
    for name, value in row.items():
        if name != "step" and isinstance(value, (int, float)):
            words.append(f"{name} {value:,.0f}" if abs(value) >= 1000 else f"{name} {value:.4g}")
    return "  ".join(words)
