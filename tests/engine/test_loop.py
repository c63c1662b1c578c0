"""The loop as a whole: resuming, stopping, accumulating, and what it leaves in the run folder."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch._subclasses.fake_tensor import FakeTensorMode

from diladiff.config import digest
from diladiff.data.loader import RawBatch
from diladiff.engine import checkpoint
from diladiff.engine.logging import read_rows
from diladiff.engine.loop import TrainConfig, _Training, fit
from diladiff.engine.optim import OptimConfig
from diladiff.engine.records import NonFiniteError
from diladiff.engine.stopping import StopRequest
from diladiff.processes.masked import masked_rows_bound
from tests.engine import driver, toys


class Stopper:
    """A reporter that asks the run to stop once a step is done."""

    def __init__(self, *, at: int):
        self.at, self.notes = at, []

    def begin(self, title, done, steps):
        pass

    def advance(self, done):
        if done == self.at:
            os.kill(os.getpid(), signal.SIGTERM)

    def row(self, row):
        pass

    def note(self, text):
        self.notes.append(text)

    def end(self):
        pass


def toy_fit(run: Path, *, objective=None, micro=4, steps=6, reporter=None, **changes):
    settings = {"ema": (0.9,), "log_every_steps": 2, "checkpoint_every_steps": 2, "validate_every_steps": 3}
    objective = objective or toys.Regression()
    return fit(
        optim=OptimConfig(lr=0.1),
        train=TrainConfig(steps=steps, global_batch=4, micro_batch=micro, **{**settings, **changes}),
        objective=objective,
        loader=lambda start: toys.batches(start, micro=micro),
        validation=lambda: iter(next(toys.batches(99))),
        run=run,
        identity={"steps": steps},
        export=lambda folder: (
            folder.mkdir(exist_ok=True) or save_file({"w": objective.linear.weight.clone()}, folder / "w.safetensors")
        ),
        device=torch.device("cpu"),
        reporter=reporter,
    )


def final(run: Path) -> dict[str, torch.Tensor]:
    folder = checkpoint.latest(run)
    return {f"{path.stem}/{k}": v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def assert_same(a: Path, b: Path) -> None:
    first, second = final(a), final(b)
    assert first.keys() == second.keys()
    for name in first:
        assert torch.equal(first[name], second[name]), name


def numbers(run: Path) -> list[dict[str, float]]:
    return [{k: v for k, v in row.items() if k not in ("seconds", "tokens_per_s")} for row in read_rows(run)]


def test_two_steps_resume_two_equal_four_bitwise(tmp_path):
    """With dropout, two micro-batches, and a log window that the stop cuts."""
    settings = {"steps": 4, "log_every_steps": 4}
    straight = driver.train(tmp_path / "straight", **settings)
    halfway = driver.train(tmp_path / "halves", **settings, stop_after=2)
    assert (halfway.stop, halfway.step) == ("stopped", 2)
    resumed = driver.train(tmp_path / "halves", **settings)
    assert (straight.stop, straight.step) == (resumed.stop, resumed.step) == ("finished", 4)
    assert_same(tmp_path / "straight", tmp_path / "halves")
    assert numbers(tmp_path / "straight") == numbers(tmp_path / "halves")
    assert len({value.sum() for name, value in final(tmp_path / "halves").items() if "attention.qkv" in name}) > 4


def test_every_state_of_an_objective_resumes(tmp_path):
    """Targets, running statistics, groups with a warm-up of their own."""
    toy_fit(tmp_path / "straight")
    reporter = Stopper(at=3)
    assert toy_fit(tmp_path / "halves", reporter=reporter).stop == "stopped"
    assert reporter.notes == ["stopped by SIGTERM at step 4: saved, the same command resumes"]
    toy_fit(tmp_path / "halves")
    assert_same(tmp_path / "straight", tmp_path / "halves")
    assert {"objective/target.slow.w", "objective/mean"} <= final(tmp_path / "halves").keys()
    assert not [name for name in final(tmp_path / "halves") if "still" in name or "scratch" in name]


def test_a_finished_run_has_nothing_left_to_do_but_the_export(tmp_path):
    first = toy_fit(tmp_path)
    (tmp_path / "model" / "w.safetensors").unlink()
    before = numbers(tmp_path)
    again = toy_fit(tmp_path)
    assert again == first
    assert numbers(tmp_path) == before
    assert (tmp_path / "model" / "w.safetensors").is_file()


def test_accumulation_changes_nothing_but_rounding(tmp_path):
    toy_fit(tmp_path / "one", micro=4)
    toy_fit(tmp_path / "four", micro=1)
    one, four = final(tmp_path / "one"), final(tmp_path / "four")
    for name in one:
        torch.testing.assert_close(one[name], four[name], rtol=1e-5, atol=1e-6, msg=name)
    (a, *_), (b, *_) = numbers(tmp_path / "one"), numbers(tmp_path / "four")
    assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
    assert a["error"] == pytest.approx(b["error"], rel=1e-6)


def test_validation_and_export_see_the_average(tmp_path):
    metrics = toy_fit(tmp_path, steps=3).metrics
    average = final(tmp_path)["ema_0/linear.weight"]
    assert metrics["val_weights"] == pytest.approx(average.sum().item())
    assert torch.equal(load_file(tmp_path / "model" / "w.safetensors")["w"], average)
    assert not torch.equal(final(tmp_path)["objective/linear.weight"], average)


def test_targets_follow_the_parameters(tmp_path):
    toy_fit(tmp_path, steps=1)
    found = final(tmp_path)
    torch.testing.assert_close(found["objective/target.slow.w"], 0.1 * found["objective/linear.weight"])


def test_another_configuration_is_refused_field_by_field(tmp_path):
    toy_fit(tmp_path, steps=2)
    with pytest.raises(ValueError, match=r"another configuration \(steps: 2 -> 3\)"):
        toy_fit(tmp_path, steps=3)
    other = toys.Regression()
    other.frozen = lambda: {"still": "4567"}
    with pytest.raises(ValueError, match=r"\(frozen\.still: 0123 -> 4567\)"):
        toy_fit(tmp_path, steps=2, objective=other)


def test_the_run_folder_says_what_made_it(tmp_path):
    toy_fit(tmp_path, steps=2)
    held = json.loads((tmp_path / "config.json").read_text())
    assert held["config"] == {"steps": 2, "frozen": {"still": "0123"}}
    assert held["hash"] == digest(held["config"])
    assert held["versions"]["torch"] == torch.__version__
    assert held["git"].keys() == {"commit", "dirty"}
    assert {path.name for path in tmp_path.iterdir()} >= {"metrics.jsonl", "checkpoints", "LATEST", "model"}
    text = (tmp_path / "config.json").read_text()
    (tmp_path / "config.json").write_text(text.replace('"steps": 2', '"steps": 3'))
    with pytest.raises(ValueError, match=r"config\.json is not what was written"):
        toy_fit(tmp_path, steps=2)


@pytest.mark.parametrize("kind", ["loss", "gradient"])
def test_what_is_not_finite_stops_before_the_update(tmp_path, kind):
    toy_fit(tmp_path, steps=6, reporter=Stopper(at=2))
    before = final(tmp_path)
    objective = toys.Regression(bad_sample=(4, 3)) if kind == "loss" else toys.Regression(bad_gradient=True)
    samples = "step 4.*samples 19 to 19" if kind == "loss" else "step 3.*samples 12 to 12, 13 to 13"
    with pytest.raises(NonFiniteError, match=samples):
        toy_fit(tmp_path, steps=6, micro=1, objective=objective)
    after = final(tmp_path)
    if kind == "gradient":
        assert all(torch.equal(before[name], after[name]) for name in before)
        for name, param in objective.named_parameters():
            if name.startswith("linear"):
                assert torch.equal(param, before[f"objective/{name}"])
    assert all(torch.isfinite(value).all() for value in after.values())


def test_a_step_never_waits_for_the_device():
    """Loss, gradients, clipping, update and averages, with accumulation and autocast."""
    loss = driver.objective()
    masked_rows_bound(loss.schedule, 4, driver.LENGTH)  # a number of the host, found once
    with FakeTensorMode():  # it raises where a value or a data-dependent shape is asked for
        loss = driver.objective()
        loss.to = lambda device: loss  # fake weights cannot be moved
        settings = TrainConfig(steps=4, global_batch=8, micro_batch=4, ema=(0.9, 0.99), precision="bfloat16")
        training = _Training(OptimConfig(lr=1e-3), settings, loss, torch.device("cpu"))
        tokens_BL = torch.zeros(4, driver.LENGTH, dtype=torch.int64)
        micro_batches = [RawBatch(tokens_BL, torch.arange(4) + first, 8) for first in (0, 4)]
        records = [training.step(number, micro_batches, StopRequest()) for number in range(2)]
    assert [record.step for record in records] == [0, 1]
    assert all(record.values.shape == (10,) for record in records)


def test_a_stop_request_is_kept_until_the_end_of_the_step():
    before = signal.getsignal(signal.SIGINT)  # ignored where the tests run in the background
    with StopRequest() as request:
        os.kill(os.getpid(), signal.SIGINT)
        assert request.asked_by == "SIGINT"
        os.kill(os.getpid(), signal.SIGTERM)
    assert signal.getsignal(signal.SIGINT) is before


def test_stale_folders_are_removed(tmp_path):
    (tmp_path / "checkpoints" / ".step_000002.tmp-0123").mkdir(parents=True)
    (tmp_path / ".LATEST.tmp-0123").touch()
    toy_fit(tmp_path, steps=2)
    assert not list(tmp_path.rglob("*.tmp-*"))


def test_bfloat16_trains(tmp_path):
    metrics = driver.train(tmp_path, steps=2, precision="bfloat16").metrics
    full = driver.train(tmp_path / "full", steps=2).metrics
    assert metrics["loss"] == pytest.approx(full["loss"], rel=0.05)
    assert metrics["loss"] != full["loss"]
    assert {value.dtype for value in final(tmp_path).values()} == {torch.float32}


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")  # torch's own
def test_compiled_blocks_train_alike(tmp_path):
    toy_fit(tmp_path / "plain")
    toy_fit(tmp_path / "compiled", compile="blocks")
    plain, compiled = final(tmp_path / "plain"), final(tmp_path / "compiled")
    for name in plain:
        torch.testing.assert_close(plain[name], compiled[name], rtol=1e-4, atol=1e-5, msg=name)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("steps", 0),
        ("micro_batch", 3),
        ("ema", (1.0,)),
        ("seed", -1),
        ("keep_every_steps", 0),
        ("keep_last", 0),
        ("log_every_steps", 0),
    ],
)
def test_config_refuses(field, value):
    with pytest.raises(ValueError, match=f"^{field}: "):
        TrainConfig(**{"steps": 1, "global_batch": 4, "micro_batch": 2, field: value})
