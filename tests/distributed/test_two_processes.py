"""Two gloo processes against one: the same losses and weights to rounding, one decision in both."""

import pytest
import torch
from safetensors.torch import load_file

from diladiff.engine import checkpoint
from diladiff.engine.logging import read_rows
from tests.engine import driver

pytestmark = pytest.mark.slow
SETTINGS = {"steps": 4, "dropout": 0.0}


@pytest.fixture(scope="module")
def runs(torchrun, tmp_path_factory):
    """Every job that these tests look at, in one launch, beside the same trainings in this process."""
    folder = tmp_path_factory.mktemp("runs")
    jobs = [
        {"run": str(folder / "ddp"), "parallel": "ddp", "micro_batch": 4, **SETTINGS},
        {"run": str(folder / "fsdp2"), "parallel": "fsdp2", "micro_batch": 4, **SETTINGS},
        {"run": str(folder / "ddp_accumulated"), "parallel": "ddp", "micro_batch": 2, **SETTINGS},
        {"run": str(folder / "fsdp2_accumulated"), "parallel": "fsdp2", "micro_batch": 1, **SETTINGS},
        {"run": str(folder / "narrow"), "parallel": "fsdp2", "micro_batch": 4, **SETTINGS, "width": 2},
        {"run": str(folder / "stopped"), "parallel": "ddp", **SETTINGS, "stop_after": 3},
        {"run": str(folder / "crossing"), "parallel": "fsdp2", "micro_batch": 4, **SETTINGS, "stop_after": 2},
        {"run": str(folder / "poisoned"), "parallel": "ddp", **SETTINGS, "poison": [3, 1]},
    ]
    launched = torchrun(*jobs)
    assert launched.returncode == 0, launched.stderr
    driver.train(folder / "one", micro_batch=8, **SETTINGS)
    return folder, launched.stdout


def assert_close(first, second):
    one, two = checkpoint.latest(first), checkpoint.latest(second)
    assert one.name == two.name
    for path in sorted(one.glob("*.safetensors")):
        a, b = load_file(path), load_file(two / path.name)
        assert a.keys() == b.keys()
        for name in a:
            torch.testing.assert_close(a[name], b[name], rtol=1e-4, atol=2e-5, msg=f"{path.name}: {name}")


@pytest.mark.parametrize("name", ["ddp", "fsdp2", "ddp_accumulated", "fsdp2_accumulated"])
def test_two_equal_one(runs, name):
    folder, _ = runs
    assert_close(folder / "one", folder / name)
    for a, b in zip(read_rows(folder / "one"), read_rows(folder / name), strict=True):
        assert a.keys() == b.keys()
        for key in a.keys() - {"seconds", "tokens_per_s", "mfu"}:
            assert a[key] == pytest.approx(b[key], rel=1e-5), key
    weights = [load_file(folder / run / "model" / "weights.safetensors") for run in ("one", name)]
    for key in weights[0]:
        torch.testing.assert_close(weights[0][key], weights[1][key], rtol=1e-4, atol=2e-5)


def test_parameters_smaller_than_the_processes_are_sharded_too(runs):
    folder, _ = runs
    driver.train(folder / "narrow_one", micro_batch=8, **SETTINGS, width=2)
    assert_close(folder / "narrow_one", folder / "narrow")


def test_a_signal_to_one_process_stops_both(runs):
    folder, out = runs
    assert {"0 stopped 3", "1 stopped 3"} <= set(out.splitlines())
    assert checkpoint.latest(folder / "stopped").name == "step_000003"


def test_one_process_goes_on_from_two(runs, tmp_path):
    """What FSDP2 saved in two processes, a single one resumes; the configuration is the same, the launch is not."""
    folder, _ = runs
    result = driver.train(folder / "crossing", parallel="fsdp2", micro_batch=4, **SETTINGS)
    assert (result.stop, result.step) == ("finished", 4)
    assert_close(folder / "one", folder / "crossing")


def test_a_loss_that_is_not_finite_in_one_process_stops_both(runs):
    folder, out = runs
    lines = [line for line in out.splitlines() if "step 3: the loss is nan" in line]
    assert sorted(line[:7] for line in lines) == ["0 error", "1 error"]
    assert all("samples 28 to 31 of the run" in line for line in lines)
    folder = checkpoint.latest(folder / "poisoned")
    assert folder.name == "step_000002"
    assert all(value.isfinite().all() for value in load_file(folder / "objective.safetensors").values())
