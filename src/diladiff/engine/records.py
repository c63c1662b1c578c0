"""What each step measured: packed on the device, added over processes once, and read by the host without stopping it.

On a GPU the host reads a step's record after it has queued the next step, so the device never waits. Stopping, on
request or on a non-finite loss, is decided from the record, which is the same in every process.
"""

import collections
import contextlib
import math
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple, final

import torch
from torch import Tensor

from diladiff.engine import distributed
from diladiff.objectives.base import LossTerms

STOP, TOTAL, WEIGHT, FIRST_METRIC = 0, 1, 2, 3


class NonFiniteError(ValueError):
    """A loss or a gradient was not finite; the parameters are as they were before that step."""


class Record(NamedTuple):
    """One step's numbers on their way to the host: stop, total, weight, sum and count of each metric, faults, norm."""

    step: int
    names: list[str]
    values: Tensor
    ready: torch.cuda.Event | None
    rates: dict[str, float]
    tokens: int

    @classmethod
    def queue(cls, step: int, names: list[str], values: Tensor, rates: dict[str, float], tokens: int) -> "Record":
        """Send a step's numbers to the host without waiting for them."""
        if values.device.type != "cuda":
            return cls(step, names, values, None, rates, tokens)
        host = values.to("cpu", non_blocking=True)
        ready = torch.cuda.Event()
        ready.record()
        return cls(step, names, host, ready, rates, tokens)


def pack(terms: list[LossTerms], *, stop: bool) -> tuple[list[str], Tensor]:
    """The micro-batches of a step as one vector, added over processes.

    It ends in one number for each (process, micro-batch), which is 0 where its loss was finite.
    """
    device = terms[0].total.device
    exact = distributed.exact_dtype(device)
    names = sorted(terms[0].metrics)
    rows = []
    for term in terms:
        pairs = [value for name in names for value in term.metrics[name]]
        rows.append(torch.stack([value.detach().to(exact) for value in (term.total, term.weight, *pairs)]))
    each = torch.stack(rows)
    faults = torch.zeros(distributed.world(), len(terms), dtype=exact, device=device)
    faults[distributed.rank()] = (~torch.isfinite(each[:, 0])).to(exact)
    asked = torch.full((1,), float(stop), dtype=exact, device=device)
    return names, distributed.sum_over_ranks(torch.cat([asked, each.sum(0), faults.flatten()]))


@final
class Ledger:
    """Reads records in order and gives out a row of means every so many steps."""

    def __init__(
        self,
        *,
        global_batch: int,
        steps: int,
        log_every_steps: int,
        flops_per_token: float,
        peak_flops: float | None,
        emit: Callable[[dict[str, Any]], None],
    ):
        self._global_batch, self._steps, self._every, self._emit = global_batch, steps, log_every_steps, emit
        self._flops, self._peak = flops_per_token, peak_flops
        self._waiting: collections.deque[Record] = collections.deque()
        self._sums: dict[str, list[float]] = {}
        self._seconds, self._tokens = 0.0, 0
        self._started = self._since = time.monotonic()

    def add(self, record: Record) -> None:
        """Take a record whose numbers may still be on their way."""
        self._waiting.append(record)

    def settle(self, *, keep: int = 0) -> bool:
        """Read all but the last `keep` records; returns whether some process was asked to stop."""
        stop = False
        while len(self._waiting) > keep:
            record = self._waiting.popleft()
            if record.ready is not None:
                record.ready.synchronize()
            values = record.values.tolist()
            self._refuse_faults(record, values)
            stop |= values[STOP] > 0
            self._count(record, values)
            done = record.step + 1
            if done % self._every == 0 or done == self._steps:
                self._emit(self._row(record))
        return stop

    def state(self) -> dict[str, Any]:
        """What the next row needs of the steps since the last one, as JSON values."""
        return {"sums": self._sums, "seconds": self._elapsed()}

    def load(self, state: dict[str, Any]) -> None:
        """Go on from `state`."""
        self._sums, self._seconds = state["sums"], state["seconds"]

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Leave what happens meanwhile (validation, checkpoints) out of the speed."""
        begun = time.monotonic()
        yield
        self._since += time.monotonic() - begun

    def _refuse_faults(self, record: Record, values: list[float]) -> None:
        norm, total = values[-1], values[TOTAL]
        if math.isfinite(total) and math.isfinite(norm):
            return
        faults = values[FIRST_METRIC + 2 * len(record.names) : -1]
        where = [i for i, fault in enumerate(faults) if fault] or range(len(faults))
        run = self._global_batch // len(faults)
        first = record.step * self._global_batch
        samples = ", ".join(f"{first + i * run} to {first + (i + 1) * run - 1}" for i in where)
        what = f"the gradient is not finite (norm {norm})" if math.isfinite(total) else f"the loss is {total}"
        raise NonFiniteError(
            f"step {record.step}: {what} over samples {samples} of the run (sample = step x global_batch + place "
            "in the batch); nothing was updated, the last checkpoint is whole: lower the rate or look at these samples"
        )

    def _count(self, record: Record, values: list[float]) -> None:
        measured = {"loss": values[TOTAL : WEIGHT + 1], "grad_norm": [values[-1], 1.0]}
        for i, name in enumerate(record.names):
            measured[name] = values[FIRST_METRIC + 2 * i : FIRST_METRIC + 2 * i + 2]
        for name, (total, count) in measured.items():
            sums = self._sums.setdefault(name, [0.0, 0.0])
            sums[0] += total
            sums[1] += count
        self._tokens += record.tokens

    def _row(self, record: Record) -> dict[str, Any]:
        now = time.monotonic()
        speed = self._tokens / max(now - self._since, 1e-9)
        row: dict[str, Any] = {"step": record.step + 1}
        row.update({name: total / count if count else None for name, (total, count) in self._sums.items()})
        distinct = set(record.rates.values())
        row.update({"lr": distinct.pop()} if len(distinct) == 1 else {f"lr.{k}": v for k, v in record.rates.items()})
        row["tokens_per_s"] = speed
        row["mfu"] = None if self._peak is None else self._flops * speed / self._peak
        row["seconds"] = self._elapsed()
        self._sums, self._tokens, self._since = {}, 0, now
        return row

    def _elapsed(self) -> float:
        return self._seconds + time.monotonic() - self._started


def peak_flops(device: torch.device, *, bfloat16: bool) -> float | None:
    """The dense peak of all devices together in FLOP/s, where it is known."""
    if device.type != "cuda" or not bfloat16:
        return None
    name = torch.cuda.get_device_name(device)
    known = {"H100": 989e12, "H200": 989e12}
    return next((peak * distributed.world() for model, peak in known.items() if model in name), None)
