"""`diladiff train`: the dry run, the overrides, a run, and one line for everything that does not fit."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diladiff.cli.main import main
from diladiff.config import from_dict
from diladiff.recipes import RECIPES, Recipe, launch


def dry_run(capsys, *arguments: str) -> dict:
    assert main(["train", *arguments, "--dry-run"]) == 0
    out, err = capsys.readouterr()
    assert err == ""
    return json.loads(out)


def complaint(capsys, *arguments: str) -> str:
    """The one line with which a command ends that cannot be done."""
    assert main(["train", *arguments]) == 2
    err = capsys.readouterr().err
    assert err.startswith("diladiff: ")
    assert err.count("\n") == 1
    return err.removeprefix("diladiff: ").rstrip("\n")


def test_a_dry_run_shows_what_would_be_run(capsys):
    said = dry_run(capsys, "mdlm_stories")
    recipe = RECIPES["mdlm_stories"]()
    assert from_dict(Recipe, said["recipe"]) == recipe
    assert said["tokens"] == 24_000 * 512 * 256
    assert said["parameters"] == launch.plan(recipe).parameters
    assert said["flops"] > 6 * 14e6 * said["tokens"]


def test_overrides_are_typed(capsys):
    changes = "--optim.lr 3e-4 --train.ema .9 .99 --objective.model.qk-norm False --train.keep-every-steps 10"
    said = dry_run(capsys, "mdlm_stories", *changes.split(), "--objective.model.layers=4", "--optim.clip-norm", "None")
    recipe = RECIPES["mdlm_stories"]()
    model = replace(recipe.objective.model, qk_norm=False, layers=4)
    assert from_dict(Recipe, said["recipe"]) == replace(
        recipe,
        objective=replace(recipe.objective, model=model),
        optim=replace(recipe.optim, lr=3e-4, clip_norm=None),
        train=replace(recipe.train, ema=(0.9, 0.99), keep_every_steps=10),
    )
    assert said["digest"] != dry_run(capsys, "mdlm_stories")["digest"]


def test_help_lists_the_fields(capsys):
    assert main(["train", "mdlm_stories", "--help"]) == 0
    said = capsys.readouterr().out
    assert "--objective.model.layers INT" in said
    assert "--dry-run" in said
    assert "--name" not in said


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        ("mdlm_storis", "no recipe 'mdlm_storis'; did you mean mdlm_stories?"),
        ("--data x mdlm_owt", "the recipe comes first: diladiff train RECIPE --data ..."),
        ("mdlm_owt --optim.lrr 1", "no option --optim.lrr; did you mean --optim.lr?"),
        ("mdlm_owt --lr 1", "no option --lr; did you mean --optim.lr?"),
        ("mdlm_owt --optim.lr fast", "--optim.lr: could not convert string to float: 'fast'"),
        ("mdlm_owt --optim.lr -1", "optim: lr: must be positive, got -1.0"),
        ("mdlm_owt --objective.weight heavy", "invalid choice 'heavy' for argument '--objective.weight'."),
        ("mdlm_owt --device gpu", "--device gpu is not known: give cuda, cuda:1, mps or cpu"),
        ("mdlm_owt", "--data is not given; make the data with: diladiff prepare openwebtext --out data/owt"),
        ("mdlm_owt --data nowhere", "--data nowhere does not exist; make the data with: diladiff prepare openwebtext"),
    ],
)
def test_a_wrong_command(arguments, line, capsys):
    assert complaint(capsys, *arguments.split()).startswith(line)


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory) -> Path:
    """The run folder of a finished twin."""
    out = tmp_path_factory.mktemp("runs") / "stories"
    assert main(["train", "mdlm_stories_debug", "--data", str(data["document"]), "--out", str(out)]) == 0
    return out


def test_a_run_says_what_it_does_and_where_the_model_is(data, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    arguments = ["train", "mdlm_stories_debug", "--data", str(data["document"]), "--optim.lr", "5e-4"]
    assert main(arguments) == 0
    out, err = capsys.readouterr()
    assert err == ""
    assert "4 steps of 512 tokens (2,048 in all, " in out.splitlines()[0]
    assert "  optim.lr: 0.001 -> 0.0005\n" in out
    assert "writing to outputs/mdlm_stories_debug\n" in out
    assert out.endswith(
        "Done: 4 steps; the model is in outputs/mdlm_stories_debug/model: diladiff sample outputs/mdlm_stories_debug\n"
    )
    assert (tmp_path / "outputs/mdlm_stories_debug/model/model.safetensors").is_file()
    assert main(arguments) == 0
    assert "going on in outputs/mdlm_stories_debug\n" in capsys.readouterr().out


def test_only_rank_zero_talks(data, tmp_path, monkeypatch, capsys):
    monkeypatch.setenv("RANK", "1")
    where = str(tmp_path / "run")
    assert main(["train", "mdlm_stories_debug", "--data", str(data["document"]), "--out", where]) == 0
    assert capsys.readouterr() == ("", "")


def test_another_configuration_in_the_same_folder_is_refused_with_the_difference(data, finished, capsys):
    where = ["--data", str(data["document"]), "--out", str(finished)]
    said = complaint(capsys, "mdlm_stories_debug", *where, "--optim.lr", "5e-4", "--train.seed", "3")
    assert "optim.lr: 0.001 -> 0.0005; train.seed: 0 -> 3" in said
    said = complaint(capsys, "mdlm_owt_debug", "--data", str(data["joined"]), "--out", str(finished))
    assert "name: mdlm_stories_debug -> mdlm_owt_debug" in said


def test_data_of_another_kind(data, tmp_path, capsys):
    out = ["--out", str(tmp_path / "run")]
    said = complaint(capsys, "mdlm_stories_debug", "--data", str(data["joined"]), *out)
    assert "is packed 'joined', the recipe wants 'document'" in said
    said = complaint(capsys, "mdlm_owt", "--data", str(data["joined"]), *out)
    assert "add --objective.model.vocab-size 320 --objective.model.mask-id 1" in said
    assert not (tmp_path / "run").exists()


def flip(path: Path) -> Path:
    """Change one bit in the middle of a file."""
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 16
    path.write_bytes(raw)
    return path


def test_a_corrupt_shard(data, tmp_path, capsys):
    where = shutil.copytree(data["document"], tmp_path / "data")
    path = flip(where / "train-00000.bin")
    said = complaint(capsys, "mdlm_stories_debug", "--data", str(where), "--out", str(tmp_path / "run"))
    assert said.startswith(f"{path} ")
    assert "corrupt" in said


def test_a_flipped_bit_in_the_weights_to_start_from(data, finished, tmp_path, capsys):
    model = shutil.copytree(finished / "model", tmp_path / "model")
    path = flip(model / "model.safetensors")
    where = ["--data", str(data["document"]), "--out", str(tmp_path / "run")]
    said = complaint(capsys, "mdlm_stories_debug", *where, "--init-from", str(model))
    assert said.startswith(f"{path} ")


def test_a_flipped_bit_in_a_checkpoint(data, finished, tmp_path, capsys):
    run = shutil.copytree(finished, tmp_path / "run")
    path = flip(run / "checkpoints" / "step_000004" / "optim.safetensors")
    said = complaint(capsys, "mdlm_stories_debug", "--data", str(data["document"]), "--out", str(run))
    assert said.startswith(f"{path} ")
    assert "step_000002 is whole" in said


def test_init_from_another_tokenizer_length_or_nothing(data, finished, tmp_path, capsys):
    joined = ["mdlm_owt_debug", "--data", str(data["joined"]), "--out", str(tmp_path / "run")]
    said = complaint(capsys, *joined, "--init-from", str(finished), "--objective.model.length", "32")
    assert "another shape (length: 64 -> 32)" in said or "another tokenizer" in said
    said = complaint(capsys, *joined, "--init-from", str(tmp_path / "nothing"))
    assert "nothing does not exist" in said


def test_a_folder_that_cannot_be_written(data, tmp_path, capsys):
    (tmp_path / "run").write_text("a file")
    said = complaint(capsys, "mdlm_stories_debug", "--data", str(data["document"]), "--out", str(tmp_path / "run"))
    assert said == f"{tmp_path / 'run' / 'checkpoints'}: Not a directory"


def test_too_little_memory_says_what_to_lower(data, tmp_path, monkeypatch, capsys):
    def fails(*arguments, **settings):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB. More words.")

    monkeypatch.setattr(launch, "run", fails)
    said = complaint(capsys, "mdlm_stories_debug", "--data", str(data["document"]), "--out", str(tmp_path / "run"))
    assert said == "CUDA out of memory: lower --train.micro-batch (now 4)"
