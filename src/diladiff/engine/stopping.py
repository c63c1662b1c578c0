"""SIGTERM and Ctrl-C as a request to finish the step, save and leave."""

import signal
import threading
from types import FrameType, TracebackType
from typing import final

SIGNALS = (signal.SIGTERM, signal.SIGINT)


@final
class StopRequest:
    """While it is entered, a signal is remembered instead of ending the process. Ctrl-backslash still ends it at once.

    Repeated signals are ignored: a launcher passes on what the terminal has sent already.
    """

    def __init__(self) -> None:
        self.asked_by: str | None = None
        self._before: dict[signal.Signals, object] = {}

    def __enter__(self) -> "StopRequest":
        # Only the main thread may set handlers; elsewhere signals stay its business.
        if threading.current_thread() is threading.main_thread():
            self._before = {number: signal.signal(number, self._remember) for number in SIGNALS}
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _remember(self, number: int, frame: FrameType | None) -> None:
        self.asked_by = signal.Signals(number).name
