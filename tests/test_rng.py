"""Counter-based random numbers: known answers, independence of how the work is split, and plain statistics."""

import math

import pytest
import torch
from torch import Tensor

from diladiff.rng import Stream, normal, permute, philox, uniform, uniform_at

# Random123 1.14, tests/kat_vectors, the lines "philox4x32 10": counter, key, answer.
KNOWN_ANSWERS = [
    (
        (0x00000000, 0x00000000, 0x00000000, 0x00000000),
        (0x00000000, 0x00000000),
        (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8),
    ),
    (
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF),
        (0xFFFFFFFF, 0xFFFFFFFF),
        (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD),
    ),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
]
DTYPES = [torch.float32, torch.float64]


@pytest.mark.parametrize(("counter", "key", "answer"), KNOWN_ANSWERS, ids=["zeros", "ones", "pi"])
def test_philox_gives_the_published_answers(counter, key, answer):
    words = philox(tuple(torch.tensor([word]) for word in counter), key)
    assert tuple(int(word) for word in words) == answer


def test_philox_agrees_with_a_plain_integer_implementation():
    generator = torch.Generator().manual_seed(0)
    counters = torch.randint(2**32, (4, 50), generator=generator)
    words = torch.stack(philox(tuple(counters), (123456789, 4000000000)))
    for counter, answer in zip(counters.T.tolist(), words.T.tolist(), strict=True):
        assert answer == _philox_of_integers(counter, [123456789, 4000000000])


def _philox_of_integers(counter: list[int], key: list[int]) -> list[int]:
    for _ in range(10):
        a, b = 0xD2511F53 * counter[0], 0xCD9E8D57 * counter[2]
        counter = [(b >> 32) ^ counter[1] ^ key[0], b % 2**32, (a >> 32) ^ counter[3] ^ key[1], a % 2**32]
        key = [(key[0] + 0x9E3779B9) % 2**32, (key[1] + 0xBB67AE85) % 2**32]
    return counter


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("count", [1, 2, 3, 4, 5, 64])
def test_a_column_does_not_depend_on_how_many_are_asked_for(dtype, count):
    index = torch.arange(5)
    many = uniform(7, Stream.MASK, 3, index, 100, dtype=dtype)
    assert torch.equal(uniform(7, Stream.MASK, 3, index, count, dtype=dtype), many[:, :count])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_does_not_depend_on_the_batch(dtype):
    whole = uniform(7, Stream.TOKEN, 3, torch.arange(8), 33, dtype=dtype)
    split = [uniform(7, Stream.TOKEN, 3, part, 33, dtype=dtype) for part in torch.arange(8).split(2)]
    assert torch.equal(torch.cat(split), whole)
    shuffled = torch.tensor([6, 0, 3])
    assert torch.equal(uniform(7, Stream.TOKEN, 3, shuffled, 33, dtype=dtype), whole[shuffled])


@pytest.mark.parametrize("dtype", DTYPES)
def test_pairs_get_the_same_numbers(dtype):
    whole = uniform(7, Stream.TOKEN, 3, torch.arange(8), 33, dtype=dtype)
    sample, position = torch.tensor([0, 7, 3, 3]), torch.tensor([0, 32, 5, 6])
    assert torch.equal(uniform_at(7, Stream.TOKEN, 3, sample, position, dtype=dtype), whole[sample, position])
    steps = torch.tensor([3, 4, 3, 0])
    each = [
        uniform_at(7, Stream.TOKEN, int(n), s[None], p[None], dtype=dtype)
        for n, s, p in zip(steps, sample, position, strict=True)
    ]
    assert torch.equal(uniform_at(7, Stream.TOKEN, steps, sample, position, dtype=dtype), torch.cat(each))


def test_a_step_may_be_a_tensor():
    index = torch.arange(4)
    as_tensor = uniform(7, Stream.MASK, torch.tensor(12345), index, 9)
    assert torch.equal(as_tensor, uniform(7, Stream.MASK, 12345, index, 9))
    assert torch.equal(
        normal(7, Stream.MASK, torch.tensor(5), index, 9),
        normal(7, Stream.MASK, 5, index, 9),
    )


def test_every_part_of_the_key_matters():
    index = torch.arange(4)
    base = uniform(7, Stream.MASK, 1, index, 16)
    others = {
        "seed": uniform(8, Stream.MASK, 1, index, 16),
        "seed, high word": uniform(7 + 2**32, Stream.MASK, 1, index, 16),
        "stream": uniform(7, Stream.ORDER, 1, index, 16),
        "step": uniform(7, Stream.MASK, 2, index, 16),
        "index": uniform(7, Stream.MASK, 1, index + 4, 16),
    }
    for name, other in others.items():
        assert not (other == base).any(), name


@pytest.mark.parametrize("seed", [-1, 2**64])
def test_a_seed_out_of_range_is_refused(seed):
    with pytest.raises(ValueError, match="seed"):
        uniform(seed, Stream.MASK, 0, torch.arange(1), 1)


def test_another_dtype_is_refused():
    with pytest.raises(ValueError, match="bfloat16"):
        uniform(0, Stream.MASK, 0, torch.arange(1), 1, dtype=torch.bfloat16)


@pytest.mark.parametrize("dtype", DTYPES)
def test_uniforms_are_uniform(dtype):
    sample = uniform(11, Stream.MASK, 0, torch.arange(200), 1000, dtype=dtype)
    assert sample.dtype == dtype
    assert 0 <= float(sample.min()) < float(sample.max()) < 1
    assert _kolmogorov_smirnov(sample.double().flatten()) < 1.95  # passed by 999 of 1000 uniform samples
    # Neighbouring columns and neighbouring rows: 16 x 16 cells, chi-square with 255 degrees of freedom.
    for x, y in ((sample[:, :-1], sample[:, 1:]), (sample[:-1], sample[1:])):
        cells = ((x * 16).long() * 16 + (y * 16).long()).flatten()
        expected = cells.numel() / 256
        chi_square = float(((cells.bincount(minlength=256) - expected) ** 2 / expected).sum())
        assert abs(chi_square - 255) < 4 * math.sqrt(2 * 255)


def test_normals_are_normal():
    sample = normal(11, Stream.MASK, 0, torch.arange(200), 1001)
    assert sample.dtype == torch.float32
    assert _kolmogorov_smirnov(torch.special.ndtr(sample.double().flatten())) < 1.95
    even, odd = sample[:, 0:1000:2].flatten(), sample[:, 1:1000:2].flatten()
    # Both halves of a Box-Muller pair, and their squares, are uncorrelated.
    for x, y in ((even, odd), (even.square(), odd.square())):
        assert abs(float(torch.corrcoef(torch.stack((x, y)))[0, 1])) < 4 / math.sqrt(even.numel())
    assert torch.equal(normal(11, Stream.MASK, 0, torch.arange(200), 7), sample[:, :7])


def _kolmogorov_smirnov(sample: Tensor) -> float:
    """sqrt(n) times the largest gap between the sample's distribution and the uniform one."""
    ordered = sample.sort().values
    below = torch.arange(len(ordered), dtype=torch.float64) / len(ordered)
    gap = torch.maximum((ordered - below).abs(), (ordered - below - 1 / len(ordered)).abs()).max()
    return float(gap) * math.sqrt(len(ordered))


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 10, 16, 97, 100, 256, 1000, 1021, 1024, 1025, 4097])
def test_permute_is_a_bijection(n):
    for epoch in range(3):
        assert torch.equal(permute(torch.arange(n), n, 5, epoch).sort().values, torch.arange(n))


def test_permute_gives_the_same_place_in_any_call():
    whole = permute(torch.arange(1000), 1000, 5, 2)
    some = torch.tensor([999, 0, 17, 17])
    assert torch.equal(permute(some, 1000, 5, 2), whole[some])
    assert some.tolist() == [999, 0, 17, 17]


def test_epochs_and_seeds_are_permuted_differently():
    orders = [permute(torch.arange(1000), 1000, seed, epoch) for seed, epoch in ((5, 0), (5, 1), (6, 0))]
    for i in range(3):
        for j in range(i):
            assert int((orders[i] == orders[j]).sum()) < 10  # one fixed point expected
    assert int((orders[0] == torch.arange(1000)).sum()) < 10


def test_permute_sends_every_element_everywhere_alike():
    n, epochs = 6, 200
    places = torch.stack([permute(torch.arange(n), n, 9, epoch) for epoch in range(epochs)])
    expected = epochs / n
    for i in range(n):
        chi_square = float(((places[:, i].bincount(minlength=n) - expected) ** 2 / expected).sum())
        assert chi_square < 25  # 5 degrees of freedom: exceeded once in 7,000


def test_permute_reaches_large_ranges():
    n = 10**12 + 39
    out = permute(torch.arange(2000), n, 5, 0)
    assert len(out.unique()) == 2000
    assert int(out.min()) >= 0
    assert int(out.max()) < n
    assert _kolmogorov_smirnov(out.double() / n) < 1.95


@pytest.mark.parametrize("n", [0, 2**48 + 1])
def test_permute_refuses_a_range_it_cannot_serve(n):
    with pytest.raises(ValueError, match="n = "):
        permute(torch.arange(1), n, 0, 0)


@pytest.mark.compile
def test_uniforms_compile_to_one_graph():
    def both(step: Tensor, index: Tensor) -> tuple[Tensor, Tensor]:
        return uniform(7, Stream.MASK, step, index, 10), normal(7, Stream.ORDER, step, index, 5)

    compiled = torch.compile(both, backend="eager", fullgraph=True)
    for step in (0, 1, 2**31):
        arguments = (torch.tensor(step), torch.arange(4))
        for ours, eager in zip(compiled(*arguments), both(*arguments), strict=True):
            assert torch.equal(ours, eager)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_gpu_gives_the_same_numbers(dtype):
    index = torch.arange(64)
    on_gpu = uniform(7, Stream.MASK, 3, index.cuda(), 1000, dtype=dtype)
    assert torch.equal(on_gpu.cpu(), uniform(7, Stream.MASK, 3, index, 1000, dtype=dtype))
    assert (
        int((normal(7, Stream.MASK, 3, index.cuda(), 1000).cpu() != normal(7, Stream.MASK, 3, index, 1000)).sum()) < 5
    )
