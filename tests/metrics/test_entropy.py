"""Entropy, distinct n-grams and standard errors against closed forms."""

import math

import numpy as np
import pytest

from diladiff.metrics import entropy


def test_entropy_of_uniform_constant_and_empty_samples():
    assert entropy.unigram_entropy(list(range(8)) * 3) == pytest.approx(math.log(8))
    assert entropy.unigram_entropy([5] * 10) == 0.0
    assert entropy.unigram_entropy([]) == 0.0


def test_entropy_agrees_with_numpy():
    ids = np.random.default_rng(0).integers(0, 20, 300)
    share = np.bincount(ids) / len(ids)
    assert entropy.unigram_entropy(ids.tolist()) == pytest.approx(-(share * np.log(share)).sum())


def test_distinct_ngrams_counts_repeats():
    assert entropy.distinct_ngrams([1, 2, 1, 2, 1], 2) == 2 / 4
    assert entropy.distinct_ngrams([1, 2, 3], 2) == 1.0
    assert entropy.distinct_ngrams([1], 4) == 1.0
    with pytest.raises(ValueError, match="n: 0"):
        entropy.distinct_ngrams([1], 0)


def test_the_mean_has_the_textbook_error():
    values = np.random.default_rng(1).normal(size=50)
    found = entropy.mean(values.tolist())
    assert found.value == pytest.approx(values.mean())
    assert found.error == pytest.approx(values.std(ddof=1) / math.sqrt(50))
    assert found.n == 50


def test_the_error_of_a_ratio_is_its_spread_over_repetitions():
    generator = np.random.default_rng(2)
    tokens = generator.integers(50, 300, size=(2000, 64)).astype(float)
    nats = 0.6 * tokens + generator.normal(size=tokens.shape) * 9
    found = [entropy.ratio(a.tolist(), b.tolist()) for a, b in zip(nats, tokens, strict=True)]
    spread = np.std([one.value for one in found])
    assert np.mean([one.error for one in found]) == pytest.approx(spread, rel=0.05)
    assert np.mean([one.value for one in found]) == pytest.approx(0.6, abs=4 * spread / math.sqrt(2000))


@pytest.mark.parametrize(
    ("numerators", "denominators"), [([1.0], [1.0]), ([1.0, 2.0], [1.0]), ([0.0, 0.0], [0.0, 0.0])]
)
def test_too_little_to_measure_is_refused(numerators, denominators):
    with pytest.raises(ValueError, match=r"at least 2 samples|no text"):
        entropy.ratio(numerators, denominators)
