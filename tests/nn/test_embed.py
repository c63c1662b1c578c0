"""Rotary positions turn by relative distance; time reaches the network through the stated frequencies."""

import math

import torch

from diladiff.nn.embed import NoiseLevelEmbedding, rotary_angles, rotate, sinusoids

CPU = torch.device("cpu")


def test_rotated_products_depend_on_the_distance_alone() -> None:
    torch.manual_seed(0)
    q, k = torch.randn(8), torch.randn(8)
    rotary = rotary_angles(12, 8, CPU)
    turned_q = rotate(q.expand(1, 1, 12, 8), rotary)[0, 0]
    turned_k = rotate(k.expand(1, 1, 12, 8), rotary)[0, 0]
    scores = turned_q @ turned_k.T
    for distance in range(-11, 12):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[:1].expand_as(diagonal))
    torch.testing.assert_close(scores[0, 0], q @ k)


def test_rotation_is_the_complex_one() -> None:
    torch.manual_seed(0)
    x = torch.randn(1, 1, 5, 6)
    angles = torch.arange(5)[:, None] * 10_000.0 ** (-torch.arange(3) / 3)
    turned = torch.complex(x[..., :3], x[..., 3:]) * torch.polar(torch.ones(5, 3), angles)
    torch.testing.assert_close(rotate(x, rotary_angles(5, 6, CPU)), torch.cat((turned.real, turned.imag), dim=-1))


def test_sinusoids_are_the_formula() -> None:
    values = torch.tensor([0.0, 0.7, 3.0])
    got = sinusoids(values, 8)
    for row, value in zip(got.tolist(), values.tolist(), strict=True):
        frequencies = [10_000.0 ** (-j / 4) for j in range(4)]
        expected = [math.cos(value * f) for f in frequencies] + [math.sin(value * f) for f in frequencies]
        torch.testing.assert_close(torch.tensor(row), torch.tensor(expected))


def test_noise_levels_are_finite_at_both_ends_and_differ() -> None:
    torch.manual_seed(0)
    embedded = NoiseLevelEmbedding(16)(torch.tensor([0.0, 0.5, 1.0]))
    assert embedded.isfinite().all()
    assert (embedded[0] - embedded[1]).abs().max() > 1e-3
    assert (embedded[1] - embedded[2]).abs().max() > 1e-3
