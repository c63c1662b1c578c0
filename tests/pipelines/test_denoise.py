"""The denoiser's shapes: buckets and fixed shapes change no logit, and few graphs serve all batches."""

import functools

import pytest
import torch

from diladiff.pipelines import denoise as denoising
from diladiff.pipelines.denoise import ModelDenoiser


def asked(lm, batch):
    """A batch, its times and some of its rows."""
    torch.manual_seed(1)
    tokens = torch.randint(300, (batch, 10))
    return tokens, torch.rand(batch), torch.randperm(batch * 10)[: 2 * batch]


@pytest.mark.parametrize("batch", [1, 3, 5])
@pytest.mark.parametrize("conditioned", [False, True])
def test_fixed_shapes_change_no_logit(tokenizer, build, batch, conditioned, monkeypatch):
    monkeypatch.setattr(denoising, "FIXED_ROWS", 4)
    lm = build(tokenizer, time_conditioning=conditioned)
    shapes = []
    trunk = lm.model.trunk
    monkeypatch.setattr(lm.model, "trunk", lambda tokens, t: shapes.append(tuple(tokens.shape)) or trunk(tokens, t))
    tokens, time, rows = asked(lm, batch)
    exact = ModelDenoiser(lm.model)(tokens, time, rows)
    assert not exact.requires_grad
    fixed = ModelDenoiser(lm.model, fixed_batch=2)(tokens, time, rows)
    assert set(shapes[1:]) == {(2, 10)}
    torch.testing.assert_close(fixed, exact)


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_compiled_in_buckets_it_gives_the_same_logits(tokenizer, build, monkeypatch):
    lm = build(tokenizer)
    shapes = []

    def backend(graph, inputs):
        shapes.append([tuple(x.shape) for x in inputs if isinstance(x, torch.Tensor) and x.dtype == torch.int64])
        return graph

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(denoising, "SEQUENCES_AT_ONCE", 4)
    denoise = ModelDenoiser(lm.model, compile=True)
    for batch in (1, 2, 3, 4, 5, 7):
        tokens, time, rows = asked(lm, batch)
        torch.testing.assert_close(denoise(tokens, time, rows), ModelDenoiser(lm.model)(tokens, time, rows))
    assert len(shapes) == 3
