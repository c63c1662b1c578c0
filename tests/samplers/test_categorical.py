"""Categorical draws: the float64 law with temperature and nucleus, its tail, and what float32 would miss."""

import math

import jaxtyping
import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from diladiff.rng import Stream, uniform
from diladiff.samplers.categorical import draw, probabilities

SETTINGS = [
    {},
    {"temperature": 0.7},
    {"temperature": 3.0},
    {"top_p": 0.9},
    {"top_p": 0.9, "nucleus": "drop"},
    {"temperature": 1.5, "top_p": 0.6, "nucleus": "drop"},
    {"temperature": 0.5, "top_p": 0.05},
    {"temperature": 0.5, "top_p": 0.05, "nucleus": "drop"},
    {"top_p": 1.0},
]
INF = math.inf


def uniforms(count: int, seed: int = 0) -> Tensor:
    return uniform(seed, Stream.TOKEN, 0, torch.zeros(1, dtype=torch.int64), count, dtype=torch.float64)[0]


def random_logits(rows: int, vocabulary: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def law(logits: list[float], temperature: float = 1.0, top_p: float | None = None, nucleus: str = "keep") -> Tensor:
    """The definition in plain Python, one row: divide, sort, add up, cut, renormalise."""
    largest = max(logits)
    weights = [math.exp((logit - largest) / temperature) for logit in logits]
    if top_p is not None and top_p < 1:
        total, before = sum(weights), 0.0
        for place, token in enumerate(sorted(range(len(logits)), key=lambda i: (-logits[i], i))):
            upto = before + weights[token] / total
            inside = before < top_p if nucleus == "keep" else upto <= top_p or place == 0
            weights[token] = weights[token] if inside else 0.0
            before = upto
    return torch.tensor(weights, dtype=torch.float64) / sum(weights)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_probabilities_are_the_definition(settings):
    logits = random_logits(20, 37)
    logits[:, 5] = -INF
    expected = torch.stack([law(row, **settings) for row in logits.double().tolist()])
    torch.testing.assert_close(probabilities(logits, **settings), expected, rtol=1e-12, atol=0)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_each_token_owns_its_share_of_the_unit_interval(settings):
    """Inverse CDF on a fine grid: a token's count may differ from its share by its two ends only."""
    points = 20_000
    u = (torch.arange(points, dtype=torch.float64) + 0.5) / points
    logits = random_logits(1, 37)
    logits[:, 0] = -INF
    counts = draw(logits.expand(points, -1), u, **settings).bincount(minlength=37)
    expected = law(logits[0].double().tolist(), **settings)
    assert float((counts - points * expected).abs().max()) <= 1
    assert int(counts[expected == 0].sum()) == 0


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_random_draws_pass_a_chi_square(settings):
    count = 20_000
    logits = random_logits(1, 12, seed=3)
    expected = count * law(logits[0].double().tolist(), **settings)
    observed = draw(logits.expand(count, -1), uniforms(count), **settings).bincount(minlength=12)
    assert int(observed[expected == 0].sum()) == 0
    used = expected > 0
    chi_square = float(((observed - expected)[used] ** 2 / expected[used]).sum())
    assert chi_square < 40  # 11 degrees of freedom at most: exceeded once in 30,000


@pytest.mark.parametrize("vocabulary", [1, 2, 127, 128, 129, 1000])
def test_any_vocabulary_size(vocabulary):
    logits = random_logits(50, vocabulary)
    u = uniforms(50)
    cdf = probabilities(logits).cumsum(1)
    expected = torch.searchsorted(cdf, u[:, None], right=True)[:, 0].clamp(max=vocabulary - 1)
    assert torch.equal(draw(logits, u), expected)


def test_the_ends_of_the_unit_interval_give_possible_tokens():
    logits = torch.full((2, 300), -INF)
    logits[:, 7], logits[:, 200] = 0.0, -30.0
    u = torch.tensor([0.0, 1 - 2.0**-53], dtype=torch.float64)
    assert draw(logits, u).tolist() == [7, 200]
    assert draw(logits, u, top_p=0.5).tolist() == [7, 7]
    assert draw(logits[:, :201].flip(1), u).tolist() == [0, 193]


@pytest.mark.parametrize("settings", [{}, {"top_p": 0.999}], ids=str)
def test_a_token_owns_the_lower_end_of_its_interval(settings):
    u = torch.tensor([0.0, 0.25, 0.5, 0.75], dtype=torch.float64)
    assert draw(torch.zeros(4, 4), u, **settings).tolist() == [0, 1, 2, 3]


def test_a_row_does_not_depend_on_its_batch():
    logits, u = random_logits(30, 700), uniforms(30)
    for settings in SETTINGS:
        whole = draw(logits, u, **settings)
        alone = [draw(logits[i : i + 1], u[i : i + 1], **settings) for i in range(30)]
        assert torch.equal(torch.cat(alone), whole)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("nucleus", ["keep", "drop"])
def test_bisection_finds_the_nucleus_of_a_full_sort(nucleus, dtype):
    """Wide and narrow rows, ties, zeros of both signs, tokens that are impossible or underflow."""
    logits = random_logits(120, 60).to(dtype)
    logits[::3] *= 0.1
    logits[1::3] = logits[1::3].round()
    logits[:, 7], logits[::5, 20] = -INF, -1000.0
    assert bool(((logits == 0) & logits.signbit()).any())
    for top_p in (1e-6, 0.3, 0.8, 0.9999):
        expected = torch.stack([law(row, top_p=top_p, nucleus=nucleus) for row in logits.double().tolist()])
        torch.testing.assert_close(probabilities(logits, top_p=top_p, nucleus=nucleus), expected, rtol=1e-11, atol=0)


@pytest.mark.parametrize("nucleus", ["keep", "drop"])
def test_neighbouring_numbers_are_told_apart(nucleus):
    """Logits one bit apart at the edge of the nucleus: the last bit is settled too."""
    for dtype in (torch.float64, torch.float32, torch.bfloat16):
        for start in (3.0, -3.0, 0.0):
            logits = [torch.tensor(start, dtype=dtype)]
            for _ in range(5):
                logits.append(torch.nextafter(logits[-1], torch.tensor(-INF, dtype=dtype)))
            rising = torch.stack(logits).flip(0)
            assert len(rising.unique()) == 6
            for top_p in (0.1, 0.4, 0.6, 0.9):
                expected = law(rising.double().tolist(), top_p=top_p, nucleus=nucleus) > 0
                assert torch.equal(probabilities(rising[None], top_p=top_p, nucleus=nucleus)[0] > 0, expected)


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_draw_never_waits_for_the_device(settings):
    with FakeTensorMode():  # it raises where a value or a data-dependent shape is asked for
        assert draw(torch.zeros(3, 300), torch.zeros(3, dtype=torch.float64), **settings).shape == (3,)


@pytest.mark.gpu
@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_a_gpu_draws_the_same_tokens_without_waiting(settings):
    logits, u = random_logits(64, 5_000), uniforms(64)
    on_gpu = logits.cuda(), u.cuda()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ids = draw(*on_gpu, **settings)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert torch.equal(ids.cpu(), draw(logits, u, **settings))


def test_a_large_vocabulary_and_nuclei_of_every_width():
    logits = random_logits(3, 12_000) * torch.tensor([[5.0], [0.9], [0.01]])
    law_NV = probabilities(logits, top_p=0.9)
    sizes = (law_NV > 0).sum(1).tolist()
    assert sizes[0] < 512 < sizes[1] < 8192 < sizes[2]
    for row, expected in zip(law_NV, logits.double().tolist(), strict=True):
        torch.testing.assert_close(row, law(expected, top_p=0.9), rtol=1e-11, atol=0)


def test_equal_logits_enter_the_nucleus_by_id():
    logits = torch.zeros(1, 4)
    assert probabilities(logits, top_p=0.5).tolist() == [[0.5, 0.5, 0, 0]]
    assert probabilities(logits, top_p=0.6).tolist() == [pytest.approx([1 / 3, 1 / 3, 1 / 3, 0])]
    assert probabilities(logits, top_p=0.6, nucleus="drop").tolist() == [[0.5, 0.5, 0, 0]]
    assert probabilities(logits, top_p=0.1, nucleus="drop").tolist() == [[1, 0, 0, 0]]


@pytest.mark.parametrize("settings", [{"temperature": 0.0}, {"temperature": 1e-300}, {"top_p": 1e-9}], ids=str)
def test_the_limits_are_the_largest_logit(settings):
    logits = random_logits(40, 50)
    assert torch.equal(draw(logits, uniforms(40), **settings), logits.argmax(1))
    assert torch.equal(probabilities(logits, **settings).argmax(1), logits.argmax(1))


def test_temperature_zero_takes_the_lowest_id_of_equal_logits():
    logits = torch.tensor([[-INF, 2.0, 2.0, 1.0]])
    assert draw(logits, uniforms(1), temperature=0.0).tolist() == [1]
    assert probabilities(logits, temperature=0.0).tolist() == [[0, 1, 0, 0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_other_dtypes_have_the_law_of_their_values(dtype):
    logits, u = random_logits(50, 600).to(dtype), uniforms(50)
    for settings in SETTINGS:
        assert torch.equal(draw(logits, u, **settings), draw(logits.double(), u, **settings))


def test_no_rows_give_no_tokens():
    for settings in SETTINGS:
        assert draw(torch.zeros(0, 5), uniforms(0), **settings).tolist() == []


@pytest.mark.parametrize(
    ("settings", "word"),
    [({"temperature": -1.0}, "temperature"), ({"top_p": 0.0}, "top_p"), ({"top_p": 1.1}, "top_p")],
)
def test_settings_out_of_range_are_refused(settings, word):
    with pytest.raises(ValueError, match=word):
        draw(torch.zeros(1, 2), uniforms(1), **settings)
    with pytest.raises(ValueError, match=word):
        probabilities(torch.zeros(1, 2), **settings)


def test_an_unknown_nucleus_is_refused():
    with pytest.raises((ValueError, jaxtyping.TypeCheckError), match="top"):
        draw(torch.zeros(1, 2), uniforms(1), nucleus="top")


def test_float32_uniforms_are_refused():
    with pytest.raises(ValueError, match="float64"):
        draw(torch.zeros(1, 2), uniforms(1).float())


# The tail: one token has all but TAIL, which the others share evenly, each less than 2^-24.
VOCABULARY, TAIL, DRAWS = 50_258, 1e-3, 240_000


def field_draw_hits_the_tail(generator: torch.Generator) -> Tensor:
    """Whether each of DRAWS draws as the field does it in float32, argmax of p / -log u, leaves the first token.

    All tail tokens have one p, so only the largest of their 24-bit uniforms matters: floor(2^24 W^(1/n)) / 2^24.
    """
    head_u = torch.rand(DRAWS, generator=generator)
    widest = torch.rand(DRAWS, generator=generator, dtype=torch.float64) ** (1 / (VOCABULARY - 1))
    tail_u = ((widest * 2**24).floor() / 2**24).float()
    head = torch.tensor(1 - TAIL) / (1e-10 - (head_u + 1e-10).log())
    tail = torch.tensor(TAIL / (VOCABULARY - 1)) / (1e-10 - (tail_u + 1e-10).log())
    return tail > head


def our_draw_in_the_tail(u: Tensor, dtype: torch.dtype = torch.float64, **settings) -> Tensor:
    p = torch.full((VOCABULARY,), TAIL / (VOCABULARY - 1), dtype=torch.float64)
    p[0] = 1 - TAIL
    logits = p.log().to(dtype)[None]
    return torch.cat([draw(logits.expand(len(part), -1), part, **settings) for part in u.split(64)])


def passes_the_tail_test(hits: int) -> bool:
    """Within 4.5 standard deviations of the hits that the law expects."""
    return abs(hits - DRAWS * TAIL) < 4.5 * math.sqrt(DRAWS * TAIL)


def test_a_float32_draw_misses_the_tail():
    hits = int(field_draw_hits_the_tail(torch.Generator().manual_seed(0)).sum())
    assert not passes_the_tail_test(hits)
    assert hits < DRAWS * TAIL / 4


@pytest.mark.parametrize("settings", [{}, {"top_p": 1 - 1e-9, "dtype": torch.float32}], ids=str)
def test_our_draw_reaches_the_tail(settings):
    u = uniforms(DRAWS)
    # Inverse CDF with the first token in front: only uniforms above 1 - 1.05 TAIL can leave it.
    assert our_draw_in_the_tail(torch.tensor([0.0, 1 - 1.05 * TAIL], dtype=torch.float64), **settings).tolist() == [
        0,
        0,
    ]
    ids = our_draw_in_the_tail(u[u > 1 - 1.05 * TAIL], **settings)
    tail = ids[ids > 0]
    assert passes_the_tail_test(len(tail))
    # Evenly over the tail, not on the few values that coarse uniforms can reach.
    assert len(tail.unique()) > 0.98 * len(tail)
    assert int(tail.min()) < 0.05 * VOCABULARY < 0.95 * VOCABULARY < int(tail.max())


def test_every_tail_token_owns_exactly_its_probability():
    share = TAIL / (VOCABULARY - 1)
    token = torch.randint(1, VOCABULARY, (200,), generator=torch.Generator().manual_seed(1))
    start = 1 - TAIL + (token - 1).double() * share
    assert torch.equal(our_draw_in_the_tail(start + 1e-4 * share), token)
    assert torch.equal(our_draw_in_the_tail(start + (1 - 1e-4) * share), token)
