"""Running a recipe: a broken-off run equals a straight one, what does not fit is refused, the model can be loaded."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from diladiff.engine.logging import read_rows
from diladiff.pipelines.masked_lm import MaskedLM
from diladiff.recipes import DEBUG_RECIPES, Recipe, launch
from tests.recipes import debug_data


class Killed(Exception):
    """Stands for a kill: nothing handles it."""


class KillsAt:
    """A reporter that ends the run in the middle of a step."""

    def __init__(self, step: int):
        self.step = step

    def begin(self, title, done, steps):
        """Do nothing."""

    def advance(self, done):
        """Break off."""
        if done == self.step:
            raise Killed

    def row(self, row):
        """Do nothing."""

    def note(self, text):
        """Do nothing."""

    def end(self):
        """Do nothing."""


def twin(name: str = "mdlm_owt") -> Recipe:
    return DEBUG_RECIPES[f"{name}_debug"]()


def with_model(recipe: Recipe, model) -> Recipe:
    return replace(recipe, objective=replace(recipe.objective, model=model))


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix == ".safetensors"}


FAST = ("mdlm_owt_debug", "mdlm_original_owt_debug", "mdlm_stories_debug")
TWINS = [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in DEBUG_RECIPES]


@pytest.mark.parametrize("name", TWINS)
def test_two_steps_a_resume_and_two_steps_equal_four(name, data, tmp_path):
    recipe = DEBUG_RECIPES[name]()
    where = data[recipe.data.packing]
    straight = launch.run(recipe, data=where, out=tmp_path / "straight", device="cpu")
    assert (straight.stop, straight.step) == ("finished", 4)
    with pytest.raises(Killed):
        launch.run(recipe, data=where, out=tmp_path / "broken", device="cpu", reporter=KillsAt(3))
    assert (tmp_path / "broken" / "LATEST").read_text().startswith("step_000002")
    resumed = launch.run(recipe, data=where, out=tmp_path / "broken", device="cpu")
    assert (resumed.stop, resumed.step) == ("finished", 4)
    last = [files_of(tmp_path / run / "checkpoints" / "step_000004") for run in ("straight", "broken")]
    assert last[0].keys() == {"objective.safetensors", "ema_0.safetensors", "optim.safetensors"}
    assert last[0] == last[1]
    assert files_of(tmp_path / "straight" / "model") == files_of(tmp_path / "broken" / "model")
    losses = [
        [row.get("loss", row.get("val_nll")) for row in read_rows(tmp_path / run)] for run in ("straight", "broken")
    ]
    assert losses[0] == losses[1]
    assert len(losses[0]) == 6


@pytest.fixture(scope="module")
def finished(data, tmp_path_factory) -> Path:
    """The run folder of a finished twin."""
    out = tmp_path_factory.mktemp("runs") / "stories"
    launch.run(twin("mdlm_stories"), data=data["document"], out=out, device="cpu")
    return out


def test_the_model_folder_holds_the_averaged_weights(finished):
    lm = MaskedLM.from_pretrained(finished, device="cpu")
    from safetensors.torch import load_file

    average = load_file(finished / "checkpoints" / "step_000004" / "ema_0.safetensors")
    state = lm.model.state_dict()
    assert len(average) == len(state)
    for name, value in average.items():
        torch.testing.assert_close(state[name.removeprefix("model.")], value, rtol=0, atol=0)


def test_the_card_says_what_was_done(finished):
    card = (finished / "model" / "README.md").read_text()
    rows = {line.split("|")[1].strip(): line.split("|")[2] for line in card.splitlines() if line.count("|") == 3}
    recipe = twin("mdlm_stories")
    assert rows["steps"].strip() == "4 of 8 blocks"
    assert rows["tokens"].strip() == f"{4 * 8 * 64:,}"
    assert rows["seed"].strip() == "0"
    assert "README.md" in rows["data"]
    bound = [row["val_nll"] for row in read_rows(finished) if "val_nll" in row][-1]
    assert f"{bound:.4f} nats a token of the block; {bound * 64:.2f} nats a document" in rows["held-out bound"]
    assert json.loads(card.split("```json")[1].split("```")[0])["name"] == recipe.name


def test_an_unfinished_runs_card_says_so(data, tmp_path):
    with pytest.raises(Killed):
        launch.run(twin(), data=data["joined"], out=tmp_path / "run", device="cpu", reporter=KillsAt(3))
    assert (
        "| steps | 2 of 8 blocks of 4 planned: the run was not finished |"
        in (tmp_path / "run" / "model" / "README.md").read_text()
    )


def test_init_from_starts_at_the_models_weights(data, finished):
    recipe = twin("mdlm_stories")
    lm = MaskedLM.from_pretrained(finished, device="cpu")
    objective = recipe.objective.build()
    said = launch.load_weights(recipe, objective.model, lm.tokenizer, finished)
    assert said["weights_sha256"] == lm.identity["weights_sha256"]
    for name, value in objective.model.state_dict().items():
        torch.testing.assert_close(value, lm.model.state_dict()[name], rtol=0, atol=0)


def test_init_from_is_part_of_a_run(data, finished, tmp_path):
    recipe = twin("mdlm_stories")
    launch.run(recipe, data=data["document"], out=tmp_path / "run", init_from=finished, device="cpu")
    assert f"| started from | {finished.name} |" in (tmp_path / "run" / "model" / "README.md").read_text()
    with pytest.raises(ValueError, match=r"another configuration .*init_from"):
        launch.run(recipe, data=data["document"], out=tmp_path / "run", device="cpu")


def test_init_from_refuses_another_tokenizer(finished, tmp_path):
    recipe = twin("mdlm_stories")
    debug_data.write_text(tmp_path / "README.md", seed=1)
    from diladiff.data.vocabulary import train_tokenizer

    other = train_tokenizer((tmp_path / "README.md").read_text().splitlines(), 320)
    with pytest.raises(ValueError, match=r"another tokenizer .* than the data .*: prepare the data with --tokenizer"):
        launch.load_weights(recipe, recipe.objective.build().model, other, finished)


def test_init_from_refuses_another_length(finished):
    recipe = twin("mdlm_stories")
    recipe = with_model(recipe, replace(recipe.objective.model, length=32))
    lm = MaskedLM.from_pretrained(finished, device="cpu")
    with pytest.raises(ValueError, match=r"another shape \(length: 64 -> 32\)"):
        launch.load_weights(recipe, recipe.objective.build().model, lm.tokenizer, finished)


def refusal(recipe: Recipe, data: Path | None) -> str:
    with pytest.raises(ValueError, match=r".") as error:
        launch.run(recipe, data=data, out=Path("never-written"), device="cpu")
    assert not Path("never-written").exists()
    return str(error.value)


def test_missing_data_tell_the_command(tmp_path):
    recipe = twin()
    assert refusal(recipe, None) == f"--data is not given; make the data with: {recipe.data.prepare}"
    assert refusal(recipe, tmp_path / "no").endswith(f"does not exist; make the data with: {recipe.data.prepare}")
    assert "holds no dataset.json" in refusal(recipe, tmp_path)


def test_data_of_another_kind_are_refused(data):
    recipe = twin()
    assert "train with --data.packing document" in refusal(recipe, data["document"])
    small = with_model(recipe, replace(recipe.objective.model, vocab_size=512, mask_id=2))
    said = refusal(small, data["joined"])
    assert "has a vocabulary of 320 with mask 1, the recipe 512 with mask 2" in said
    assert "--objective.model.vocab-size 320 --objective.model.mask-id 1" in said
    stories = twin("mdlm_stories")
    short = with_model(stories, replace(stories.objective.model, length=32))
    assert "blocks of 64 tokens, the recipe takes 32: add --objective.model.length 64" in refusal(
        short, data["document"]
    )


@pytest.mark.parametrize("name", ["train-00000.bin", "valid-00000.bin", "dataset.json", "tokenizer/tokenizer.json"])
def test_a_flipped_bit_in_the_data_is_named(name, data, tmp_path):
    shutil.copytree(data["joined"], tmp_path / "data")
    path = tmp_path / "data" / name
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    assert str(path) in refusal(twin(), tmp_path / "data")


def test_plan_counts_the_real_model():
    recipe = twin()
    objective = recipe.objective.build()
    plan = launch.plan(recipe)
    assert plan.parameters == sum(parameter.numel() for parameter in objective.parameters())
    assert plan.tokens == 4 * 8 * 64
    assert plan.flops == objective.flops_per_token() * plan.tokens
