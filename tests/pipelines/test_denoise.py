"""The denoiser's shapes: buckets and fixed shapes change no logit, and few graphs serve all batches."""

import functools

import pytest
import torch

from diladiff.pipelines import denoise as denoising
from diladiff.pipelines.denoise import ModelDenoiser
from diladiff.samplers import DrawConfig
from diladiff.samplers.base import pick


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


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method`:DeprecationWarning")
def test_compiled_in_buckets_it_writes_the_same_tokens(tokenizer, build, monkeypatch):
    """Head and draw in one graph for a number of rows and a draw, however many of them there are."""
    lm = build(tokenizer)
    shapes = []

    def backend(graph, inputs):
        shapes.append([tuple(x.shape) for x in inputs if x.dtype == torch.float64])
        return graph

    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend=backend))
    monkeypatch.setattr(denoising, "ROWS_AT_ONCE", 32)
    denoise, plain = ModelDenoiser(lm.model, compile=True), ModelDenoiser(lm.model)
    draws = [DrawConfig(), DrawConfig(temperature=0.7, top_p=0.9), DrawConfig(top_p=0.5, nucleus="drop")]
    for _ in range(2):
        for draw in draws:
            for count in (1, 16, 17, 40, 80):
                tokens, time, _ = asked(lm, 8)
                rows, uniform = torch.randperm(80)[:count], torch.rand(count, dtype=torch.float64)
                expected = pick(plain(tokens, time, rows), uniform, draw)
                assert torch.equal(denoise.write(tokens, time, rows, uniform, draw), expected)
    assert sorted(shape for shape in shapes if shape) == [[(16,)]] * 3 + [[(32,)]] * 3
    assert len(shapes) == 6 + 1


def test_a_writer_is_for_recorded_graphs_alone(lm):
    assert ModelDenoiser(lm.model).writer is None
    assert ModelDenoiser(lm.model, fixed_batch=2).writer is None


@pytest.mark.gpu
@pytest.mark.compile
def test_recorded_steps_write_what_eager_ones_do(tokenizer, build):
    """On a GPU, where trunk and tail are recorded: the third call of a bucket replays it."""
    lm = build(tokenizer)
    lm.model.cuda()
    denoise, plain = ModelDenoiser(lm.model, compile=True), ModelDenoiser(lm.model)
    assert denoise.writer is not None
    draw = DrawConfig(top_p=0.9)
    same = []
    for call in range(12):
        tokens, time, rows = (x.cuda() for x in asked(lm, 8))
        chance = torch.Generator().manual_seed(call)
        uniform = torch.rand(len(rows), dtype=torch.float64, generator=chance).cuda()
        ids = denoise.writer(tokens, time, rows, uniform, draw)
        same.append((ids == pick(plain(tokens, time, rows), uniform, draw)).double().mean().item())
        assert call == 0 or len(ids.unique()) > 1
    assert sum(same) / len(same) > 0.97  # compiled float32 rounds otherwise, which may move a near-tie
