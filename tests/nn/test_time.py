"""Time's embedding: its formula, its precision, and what it adds to a stream."""

import math

import torch

from diladiff.nn.time import TimeAddition, TimeEmbedding


def test_the_embedding_is_the_formula() -> None:
    torch.manual_seed(0)
    embedding, times = TimeEmbedding(6).double(), torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64)
    frequencies = [10_000.0 ** (-j / 3) for j in range(3)]
    for row, t in zip(embedding(times), times.tolist(), strict=True):
        waves = [f(t * w) for f in (math.cos, math.sin) for w in frequencies]
        inner = embedding.inner.weight @ torch.tensor(waves, dtype=torch.float64) + embedding.inner.bias
        expected = embedding.outer.weight @ (inner * inner.sigmoid()) + embedding.outer.bias
        torch.testing.assert_close(row, expected, atol=1e-12, rtol=1e-12)


def test_autocast_does_not_round_a_time() -> None:
    torch.manual_seed(0)
    embedding, addition, stream = TimeEmbedding(16), TimeAddition(16), torch.zeros(2, 3, 16)
    near = torch.tensor([0.5, 0.5001])
    exact = addition(stream, embedding(near))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = addition(stream, embedding(near))
    torch.testing.assert_close(cast, exact, atol=0, rtol=0)
    assert exact.dtype == torch.float32
    assert (exact[0] != exact[1]).any()


def test_parameters_of_other_types_decide_the_result() -> None:
    times = torch.tensor([0.5])
    assert TimeEmbedding(4).bfloat16()(times).dtype == torch.bfloat16
    assert TimeEmbedding(4).double()(times.double()).dtype == torch.float64


def test_the_addition_is_the_same_at_every_position() -> None:
    torch.manual_seed(0)
    addition, stream, time = TimeAddition(4), torch.randn(2, 3, 4), torch.randn(2, 4)
    added = addition(stream, time) - stream
    torch.testing.assert_close(added, addition.linear(time)[:, None].expand(2, 3, 4), atol=1e-6, rtol=0)
