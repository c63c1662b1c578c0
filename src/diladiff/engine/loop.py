"""The one training loop: every objective is trained by it, and it knows nothing of any.

A step: micro-batches forward and backward, one reduction, one update, averages. A GPU's numbers are read a step later.
"""

import contextlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, final

import torch

from diladiff import config, files
from diladiff.engine import checkpoint, distributed, provenance
from diladiff.engine.logging import Log, Reporter, Silent, Track, draw_losses, read_rows
from diladiff.engine.optim import OptimConfig, Optimizer
from diladiff.engine.parallelize import Parallel, accumulating, gathered, parallelize, reseed
from diladiff.engine.records import TOTAL, WEIGHT, Ledger, Record, pack, peak_flops
from diladiff.engine.state import TrainState
from diladiff.engine.stopping import StopRequest
from diladiff.engine.validate import to_batch, validate
from diladiff.objectives.base import LossTerms, Objective, Step

STATE_SCHEMA = 1
MODEL = "model"


@dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """How long and over what to train, in what precision, and what to write when."""

    steps: int
    global_batch: int
    micro_batch: int
    seed: int = 0
    ema: tuple[float, ...] = (0.9999,)
    precision: Literal["float32", "bfloat16"] = "float32"
    compile: Literal["none", "blocks"] = "none"
    parallel: Parallel = "ddp"
    log_every_steps: int = 10
    validate_every_steps: int = 1000
    validate_blocks: int = 1024
    checkpoint_every_steps: int = 1000
    keep_last: int = 2
    keep_every_steps: int | None = None
    track: tuple[Track, ...] = ()
    deterministic: bool = False

    def __post_init__(self) -> None:
        for name in (
            "steps",
            "global_batch",
            "micro_batch",
            "log_every_steps",
            "validate_every_steps",
            "validate_blocks",
            "checkpoint_every_steps",
            "keep_last",
        ):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}: must be at least 1, got {getattr(self, name)}")
        if self.keep_every_steps is not None and self.keep_every_steps < 1:
            raise ValueError(f"keep_every_steps: must be at least 1, or null, got {self.keep_every_steps}")
        if self.global_batch % self.micro_batch:
            raise ValueError(f"micro_batch: must divide global_batch {self.global_batch}, got {self.micro_batch}")
        if not all(0 <= decay < 1 for decay in self.ema):
            raise ValueError(f"ema: each decay must be in [0, 1), got {self.ema}")
        if not 0 <= self.seed < 2**63:
            raise ValueError(f"seed: must be in [0, 2^63), got {self.seed}")


class FitResult(NamedTuple):
    """How training ended: why, after how many steps, and the last of every measurement (main process only)."""

    stop: Literal["finished", "stopped"]
    step: int
    metrics: dict[str, Any]


def fit(
    *,
    optim: OptimConfig,
    train: TrainConfig,
    objective: Objective,
    loader: Callable[[int], Iterator[Any]],
    validation: Callable[[], Iterator[Any]] | None,
    run: Path,
    identity: dict[str, Any],
    export: Callable[[Path], None] | None,
    device: torch.device,
    reporter: Reporter | None = None,
) -> FitResult:
    """Train an objective in a run folder, from where the folder's last checkpoint left off if it has one.

    `loader(step)` yields each step's micro-batches from that step on, for this process; `validation()` the held-out
    ones, as many in every process. `identity` is the resolved configuration, which a resumed run must share.
    `export(folder)` writes the model; it is called in the main process with the averaged weights in place.
    """
    run = Path(run)
    voice = reporter if reporter is not None and distributed.is_main() else Silent()
    training = _Training(optim, train, objective, device)
    identity = {**identity, "frozen": objective.frozen()}
    with contextlib.ExitStack() as stack:
        distributed.on_main(lambda: _claim(run, stack), device)
        start, window = _begin(run, identity, training.state, device)
        request = stack.enter_context(StopRequest())
        emit = _open_log(stack, run, start, train, identity, voice)
        ledger = Ledger(
            global_batch=train.global_batch,
            steps=train.steps,
            log_every_steps=train.log_every_steps,
            flops_per_token=objective.flops_per_token(),
            peak_flops=peak_flops(device, bfloat16=train.precision == "bfloat16"),
            emit=emit,
        )
        if window is not None:
            ledger.load(window)
        voice.begin(run.name, start, train.steps)
        stack.callback(voice.end)

        batches = loader(start)
        # A GPU is left one step ahead of the host, so that it never waits to be told what is next.
        lag = 1 if device.type == "cuda" else 0
        done, stop = start, False
        while done < train.steps and not stop:
            ledger.add(training.step(done, next(batches), request))
            done += 1
            voice.advance(done)
            validating = validation is not None and _due(done, train.validate_every_steps, train)
            saving = _due(done, train.checkpoint_every_steps, train)
            stop = ledger.settle(keep=0 if validating or saving else lag)
            if stop:
                ledger.settle()
            with ledger.paused():
                if validating and validation is not None:
                    emit({"step": done, **training.validate(validation())})
                if saving or stop:
                    _save(run, done, training, identity, ledger.state())
                    _export(run, training, export)
        if start == train.steps:
            # A run that was killed between its last checkpoint and its last export has nothing else left to do.
            _export(run, training, export)
        if done < train.steps:
            voice.note(
                f"stopped by {request.asked_by or 'another process'} at step {done}: saved, the same command resumes"
            )
    return _result(run, done, train)


@final
class _Training:
    """An objective with all that trains it, on one device of possibly many."""

    def __init__(self, optim: OptimConfig, train: TrainConfig, objective: Objective, device: torch.device):
        if train.deterministic:
            os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
            torch.use_deterministic_algorithms(True)
        objective.to(device).train()
        self.train, self.objective, self.device = train, objective, device
        self.module = parallelize(
            objective, mode=train.parallel, compile_blocks=train.compile == "blocks", device=device
        )
        # Groups are asked for now, because sharding replaced the parameters.
        self.state = TrainState(objective, Optimizer(optim, objective.groups(), train.steps), train.ema)

    def step(self, number: int, micro_batches: list[Any], request: StopRequest) -> Record:
        """Take step `number` (from 0); nothing in it makes the host wait for the device."""
        reseed(self.train.seed, number)
        step = Step(self.train.seed, torch.full((), number, dtype=torch.int64, device=self.device))
        terms = []
        for i, raw in enumerate(micro_batches):
            with accumulating(self.module, last=i == len(micro_batches) - 1):
                with self._autocast():
                    loss: LossTerms = self.module(to_batch(raw, self.device), step)
                loss.total.backward()
            terms.append(loss)
        names, values = pack(terms, stop=request.asked_by is not None)
        norm = self.state.optimizer.step(number, values[TOTAL], values[WEIGHT])
        self.state.after_update(step, number)
        tokens = distributed.world() * sum(raw.tokens_BL.numel() for raw in micro_batches)
        return Record.queue(number, names, torch.cat([values, norm[None]]), self.state.optimizer.rates(number), tokens)

    def validate(self, batches: Iterator[Any]) -> dict[str, float]:
        """Measure the averaged weights on held-out data."""
        with self.state.averaged():
            return validate(self.objective, batches, seed=self.train.seed, autocast=self._autocast, device=self.device)

    def _autocast(self) -> contextlib.AbstractContextManager[Any]:
        enabled = self.train.precision == "bfloat16"
        return torch.autocast(self.device.type, torch.bfloat16, enabled=enabled)


def _due(done: int, every: int, train: TrainConfig) -> bool:
    return done % every == 0 or done == train.steps


def _claim(run: Path, stack: contextlib.ExitStack) -> None:
    (run / checkpoint.FOLDER).mkdir(parents=True, exist_ok=True)
    stack.enter_context(checkpoint.sole_writer(run))


def _begin(
    run: Path, identity: dict[str, Any], state: TrainState, device: torch.device
) -> tuple[int, dict[str, Any] | None]:
    """Make a run folder, or take up its last checkpoint; returns the steps done and the log's open window."""

    def prepare() -> None:
        for folder in (run, run / checkpoint.FOLDER):
            files.remove_stale(folder)
        last = checkpoint.latest(run)
        if last is None:
            provenance.write_config(run, identity)
            return
        checkpoint.check(run, last)
        provenance.read_config(run)
        provenance.refuse_another(run, identity, checkpoint.load_state(last)["config"])

    distributed.on_main(prepare, device)
    last = checkpoint.latest(run)
    held = None if last is None else checkpoint.load(last)
    start = 0 if held is None else held.state["step"]
    if distributed.sum_over_ranks(torch.tensor(start, device=device)).item() != start * distributed.world():
        raise ValueError(f"{run}: the processes see different files; the run folder must be on storage that all share")
    if held is None:
        return 0, None
    state.load(held.tensors)
    return start, held.state["window"]


def _open_log(
    stack: contextlib.ExitStack, run: Path, start: int, train: TrainConfig, identity: dict[str, Any], voice: Reporter
) -> Callable[[dict[str, Any]], None]:
    if not distributed.is_main():
        return lambda row: None
    log = Log(run, start, train.track, identity, voice)
    stack.callback(log.close)
    return log.write


def _save(run: Path, done: int, training: _Training, identity: dict[str, Any], window: dict[str, Any]) -> None:
    train, tensors = training.train, training.state.tensors()
    state = {
        "schema": STATE_SCHEMA,
        "step": done,
        "ema": list(train.ema),
        "world": distributed.world(),
        "config": config.to_dict(identity),
        "window": window,
    }

    def write() -> None:
        checkpoint.save(run, done, tensors, state)
        checkpoint.prune(run, keep_last=train.keep_last, keep_every_steps=train.keep_every_steps)

    distributed.on_main(write, training.device)


def _export(run: Path, training: _Training, export: Callable[[Path], None] | None) -> None:
    if export is not None:
        with training.state.averaged(), gathered(training.objective):
            distributed.on_main(lambda: export(run / MODEL), training.device)


def _result(run: Path, done: int, train: TrainConfig) -> FitResult:
    metrics: dict[str, Any] = {}
    if distributed.is_main():
        for row in read_rows(run):
            metrics.update(row)
        draw_losses(run)
    return FitResult("finished" if done == train.steps else "stopped", done, metrics)
