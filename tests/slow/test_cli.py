"""The commands as a user runs them: from text to samples, stopped by Ctrl-C and carried on, by two processes."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from diladiff.cli.main import main
from diladiff.engine.logging import read_rows
from diladiff.recipes import RECIPES
from tests.recipes import debug_data

pytestmark = pytest.mark.slow

PROGRAM = [sys.executable, "-c", "import sys; from diladiff.cli.main import main; sys.exit(main())"]


@pytest.fixture(scope="module")
def data(tmp_path_factory) -> Path:
    """The data set of the stories' twin, in a folder with a space."""
    root = tmp_path_factory.mktemp("debug") / "a folder"
    root.mkdir()
    return debug_data.prepare(root, RECIPES["mdlm_stories_debug"]())


def command(data: Path, out: Path, *more: str) -> list[str]:
    return ["train", "mdlm_stories_debug", "--data", str(data), "--out", str(out), "--device", "cpu", *more]


def wait_for_step(run: Path, step: int, process: subprocess.Popen) -> None:
    """Return once a row of that step or a later one is logged."""
    for _ in range(1200):
        rows = read_rows(run)
        if rows and rows[-1]["step"] >= step:
            return
        assert process.poll() is None
        time.sleep(0.1)
    raise AssertionError(f"no step {step} within two minutes")


def test_ctrl_c_saves_and_the_same_command_goes_on(data, tmp_path):
    run = tmp_path / "run"
    arguments = command(data, run, "--train.steps", "1000000", "--train.checkpoint-every-steps", "1000000")
    stopped = [0]
    for sent in (signal.SIGINT, signal.SIGTERM):
        process = subprocess.Popen([*PROGRAM, *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        try:
            wait_for_step(run, stopped[-1] + 5, process)
            process.send_signal(sent)
            out, err = process.communicate(timeout=120)
        finally:
            process.kill()
            process.wait()
        assert (process.returncode, err) == (0, "")
        step = int((run / "LATEST").read_text().split()[0].removeprefix("step_"))
        assert step > stopped[-1]
        stopped.append(step)
        assert f"Stopped and saved at step {step:,} of 1,000,000; the same command goes on." in out
        assert sent.name in out
    assert [row["step"] for row in read_rows(run) if "loss" in row] == list(range(1, stopped[-1] + 1))


def test_two_processes_train_what_one_trains_and_only_one_talks(data, tmp_path):
    more = ("--objective.model.dropout", "0")
    assert main(command(data, tmp_path / "one", *more)) == 0
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = tmp_path / "train.py"
    script.write_text("import sys\nfrom diladiff.cli.main import main\nsys.exit(main())\n")
    arguments = command(data, tmp_path / "two", *more)
    done = subprocess.run(
        [*torchrun, str(script), *arguments],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("Done: 4 steps") == 1
    assert done.stdout.count("step 4  loss") == 1
    one, two = (load_file(tmp_path / run / "model" / "model.safetensors") for run in ("one", "two"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-4, atol=1e-5)


def test_two_processes_refuse_with_one_line_each(data, tmp_path):
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    script = tmp_path / "train.py"
    script.write_text("import sys\nfrom diladiff.cli.main import main\nsys.exit(main())\n")
    arguments = command(data, tmp_path / "run", "--objective.model.vocab-size", "512")
    done = subprocess.run(
        [*torchrun, str(script), *arguments], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode != 0
    lines = [line for line in done.stderr.splitlines() if "has a vocabulary of 320" in line]
    assert any(line.startswith("diladiff: ") for line in lines)
    assert 'File "' not in "".join(line for line in done.stderr.splitlines() if "/diladiff/" in line)


def test_from_text_to_samples(data, tmp_path, capsys):
    run = tmp_path / "run"
    assert main(command(data, run)) == 0
    out = tmp_path / "samples.jsonl"
    assert main(["sample", str(run), "--num", "3", "--steps", "4", "--device", "cpu", "--out", str(out)]) == 0
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["index"] for row in rows[1:]] == [0, 1, 2]
    assert all(row["text"] or row["ids"] for row in rows[1:])
