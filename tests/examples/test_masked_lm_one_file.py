"""The one-file example is the package: same weights, same logits; same draws, same loss; same plan, same tokens."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest
import torch

from diladiff import rng
from diladiff.models.token_transformer import TokenTransformer, TokenTransformerConfig
from diladiff.objectives.base import Batch, Step
from diladiff.objectives.masked import MaskedConfig
from diladiff.processes.times import stratified
from diladiff.samplers import tokens as samplers

FILE = Path(__file__).parents[2] / "examples" / "masked_lm_one_file.py"
RENAMED = {"attention_norm.gain": "norm1.weight", "mlp_norm.gain": "norm2.weight", "norm.gain": "norm.weight"}
RENAMED |= {"mlp.inner": "mlp.0", "mlp.outer": "mlp.2", "layers": "blocks", "output": "head", "attention.": ""}
RENAMED |= {"gain": "weight"}


def load() -> ModuleType:
    """The example as a module."""
    spec = importlib.util.spec_from_file_location("masked_lm_one_file", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


example = load()
CONFIG = TokenTransformerConfig(vocab_size=11, mask_id=example.MASK, length=8, width=32, layers=2, heads=4, dropout=0.0)


def twins() -> tuple[torch.nn.Module, torch.nn.Module]:
    """The package's model with every parameter drawn, and the example's with the same weights."""
    torch.manual_seed(0)
    ours = MaskedConfig(model=CONFIG).build()
    for name, parameter in ours.named_parameters():
        torch.nn.init.normal_(parameter, mean=1.0 if name.endswith("gain") else 0.0, std=0.2)
    state = {}
    for name, value in ours.model.state_dict().items():
        for old, new in RENAMED.items():
            name = name.replace(old, new)
        state[name] = value[: CONFIG.vocab_size] if name.startswith("head") else value
    theirs = example.Denoiser(CONFIG.vocab_size, CONFIG.length, width=32, layers=2, heads=4)
    theirs.load_state_dict(state)
    return ours, theirs


def tokens(batch: int) -> torch.Tensor:
    """Some ids, none of them the mask."""
    return torch.randint(1, 11, (batch, 8), generator=torch.Generator().manual_seed(batch))


def test_same_weights_give_the_same_logits() -> None:
    ours, theirs = twins()
    ids = tokens(3).index_fill(1, torch.tensor([1, 6]), example.MASK)
    logits = theirs.logits(theirs.trunk(ids).flatten(0, 1)).unflatten(0, (3, 8))
    assert isinstance(ours.model, TokenTransformer)
    torch.testing.assert_close(logits, ours.model(ids), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("seed", [0, 1])
def test_same_times_and_noise_give_the_same_loss_and_gradients(seed: int) -> None:
    ours, theirs = twins()
    ids, index, number = tokens(16), torch.arange(16), torch.tensor(7)
    u = rng.uniform(seed, rng.Stream.TIME, number, torch.tensor([0]), 1)[0, 0]
    times = stratified(u, index, 16)
    noise = rng.uniform(seed, rng.Stream.MASK, number, index, 8)
    loss = example.masked_loss(theirs, ids, times, noise)
    total, weight, _ = ours(Batch(ids, index, 16), Step(seed, number))
    torch.testing.assert_close(loss, total / weight, rtol=1e-6, atol=0)
    loss.backward()
    (total / weight).backward()
    torch.testing.assert_close(theirs.tokens.weight.grad, ours.model.tokens.weight.grad, atol=1e-6, rtol=1e-4)
    torch.testing.assert_close(times.sort().values, example.stratified_times(u, 16))


@pytest.mark.parametrize("steps", [1, 5, 64])
def test_same_plan_and_uniforms_give_the_same_tokens(steps: int) -> None:
    ours, theirs = twins()
    index = torch.arange(6)
    canvas = torch.full((6, 8), example.MASK)
    canvas[:3, :2] = 5
    order = rng.uniform(3, rng.Stream.ORDER, 0, index, 8, dtype=torch.float64)
    uniforms = rng.uniform(3, rng.Stream.TOKEN, 0, index, 8, dtype=torch.float64)
    written = example.sample(theirs, canvas, order, uniforms, steps=steps)
    assert isinstance(ours.model, TokenTransformer)
    model, config = ours.model, samplers.Ancestral(steps=steps)

    def denoise(tokens_AL: torch.Tensor, time_A: torch.Tensor, rows_N: torch.Tensor) -> torch.Tensor:
        return model.head(model.trunk(tokens_AL, time_A).flatten(0, 1)[rows_N])

    with torch.no_grad():
        planned = samplers.plan_ancestral(config, canvas, index, mask_id=example.MASK, seed=3)
        *_, last = samplers.run(planned, samplers.picking(denoise), canvas, config.draw, example.MASK)
    assert torch.equal(written, last.tokens_BL)
    assert (written != example.MASK).all()
    assert (written[:3, :2] == 5).all()


def test_text_comes_back_and_a_short_run_prints_samples(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert all(example.decode(example.encode(sentence)) == sentence for sentence in example.SENTENCES)
    assert max(len(sentence.split()) for sentence in example.SENTENCES) < example.LENGTH
    monkeypatch.setattr("sys.argv", ["example", "--train-steps", "3", "--num", "4", "--sample-steps", "8"])
    example.main()
    printed = capsys.readouterr().out
    assert "of 4 samples belong to the language" in printed
    assert printed.count("my old owl") >= 4
