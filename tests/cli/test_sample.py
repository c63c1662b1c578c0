"""`diladiff sample`: what it shows and writes, the same over several processes, and one clear line on bad input."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diladiff import MaskedLM
from diladiff.cli.main import main
from diladiff.cli.sample import share
from diladiff.pipelines.samples import read_samples


def run(capsys, *arguments):
    """The exit code and both outputs of a command."""
    code = main(["sample", *map(str, arguments)])
    out, err = capsys.readouterr()
    return code, out, err


def test_it_says_what_it_does_and_shows_the_texts(capsys, model):
    code, out, err = run(
        capsys, model, "--num", 3, "--steps", 4, "--prompt", "Lily saw", "--device", "cpu", "--show", 2
    )
    assert (code, err) == (0, "")
    assert "1 layers, 16 wide" in out
    assert "float32 on cpu" in out
    assert "3 texts of 24 tokens: ancestral, 4 steps, temperature 1, seed 0" in out
    assert out.count("Lily saw") == 2
    assert "1 more, not shown" in out
    assert "tokens/s" in out
    assert not set(out) & {chr(code) for code in range(32) if chr(code) != "\n"}


def test_it_writes_what_the_library_writes(capsys, model, tmp_path):
    path = tmp_path / "new" / "samples.jsonl"
    options = ("--num", 5, "--steps", 0, "--sampler", "first_hitting", "--top-p", 0.9, "--seed", 7, "--batch-size", 2)
    code, out, _ = run(capsys, model, *options, "--device", "cpu", "--out", path)
    assert code == 0
    assert f"{path}: 5 samples" in out
    header, rows = read_samples(path)
    lm = MaskedLM.from_pretrained(model, device="cpu")
    samples = lm.generate(5, steps=None, sampler="first_hitting", top_p=0.9, seed=7)
    assert [row["text"] for row in rows] == samples.texts
    assert header["settings"]["sampler"]["name"] == "first_hitting"
    assert header["model"] == lm.identity


def test_infilling_keeps_the_given_text(capsys, model):
    code, out, _ = run(capsys, model, "--num", 1, "--infill", "Lily ___ home.", "--blank-tokens", 3, "--device", "cpu")
    assert code == 0
    assert " home." in out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "model: name a model folder"),
        (["nowhere"], "nowhere does not exist: give a model folder"),
        (["MODEL", "--nmu", "4"], "did you mean --num"),
        (["MODEL", "--num", "0"], "--num: 0"),
        (["MODEL", "--num", "x"], "num"),
        (["MODEL", "--sampler", "ancestrel"], "ancestral"),
        (["MODEL", "--length", "99"], "length: 99 must be between 1 and 24"),
        (["MODEL", "--infill", "a ___", "--prompt", "b"], "--infill: give it alone"),
        (["MODEL", "--top-p", "0"], "top_p: 0.0"),
        (["MODEL", "--device", "warp"], "warp"),
    ],
)
def test_bad_input_is_one_line(capsys, model, arguments, words):
    code, out, err = run(capsys, *[str(model) if argument == "MODEL" else argument for argument in arguments])
    assert code == 2
    assert words in err
    assert err.count("\n") == 1
    assert "Traceback" not in out + err


def test_a_flipped_bit_in_the_weights_is_one_line(capsys, model, tmp_path):
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in model.iterdir():
        (copy / path.name).write_bytes(path.read_bytes())
    data = bytearray((copy / "model.safetensors").read_bytes())
    data[-7] ^= 16
    (copy / "model.safetensors").write_bytes(data)
    code, _, err = run(capsys, copy)
    assert code == 2
    assert "model.safetensors does not have the sha256" in err


def test_where_the_file_cannot_go_is_said_before_anything_is_written(capsys, model, tmp_path):
    (tmp_path / "file").write_text("")
    code, out, err = run(capsys, model, "--out", tmp_path)
    assert (code, out) == (2, "")
    assert err == f"diladiff: --out {tmp_path}: is a folder; name a file in it, such as {tmp_path / 'samples.jsonl'}\n"
    code, out, err = run(capsys, model, "--out", tmp_path / "file" / "samples.jsonl")
    assert (code, out) == (2, "")
    assert err.startswith(f"diladiff: {tmp_path / 'file'}: ")


def test_shares_are_contiguous_and_the_first_process_has_one():
    for num in (1, 2, 5, 8, 31):
        for processes in (1, 2, 3, 8):
            shares = [share(num, number, processes) for number in range(processes)]
            assert [index for first, stop in shares for index in range(first, stop)] == list(range(num))
            assert shares[0][1] >= 1
            assert max(stop - first for first, stop in shares) - min(stop - first for first, stop in shares) <= 1


@pytest.mark.slow
@pytest.mark.parametrize(("num", "processes"), [(5, 2), (1, 2)])
def test_several_processes_write_the_same_file(capsys, model, tmp_path, num, processes):
    options = ["sample", str(model), "--num", str(num), "--steps", "4", "--device", "cpu", "--out"]
    assert main([*options, str(tmp_path / "one")]) == 0
    # Without the dashes torchrun takes --num for an abbreviation of its own --numa-binding.
    starter = ["torch.distributed.run", "--standalone", f"--nproc-per-node={processes}", "--no-python", "--"]
    script = str(Path(sys.executable).parent / "diladiff")
    command = [sys.executable, "-m", *starter, script, *options, str(tmp_path / "many")]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (one, rows), (many, same) = read_samples(tmp_path / "one"), read_samples(tmp_path / "many")
    assert rows == same
    assert json.dumps(one["settings"]) == json.dumps(many["settings"])
    assert one["tokens"] == many["tokens"]
