"""How varied ids are: the unigram entropy of a sample, and the share of its n-grams that are different.

Both are read beside a likelihood: text that repeats itself is likely and worthless.
"""

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple


class Estimate(NamedTuple):
    """A mean over samples, its standard error, and the number of samples."""

    value: float
    error: float
    n: int


def unigram_entropy(ids: Sequence[int]) -> float:
    """Entropy, in nats, of the distribution of tokens inside one sample; 0 for an empty one."""
    total = len(ids)
    return -math.fsum(count / total * math.log(count / total) for count in Counter(ids).values())


def distinct_ngrams(ids: Sequence[int], n: int) -> float:
    """Different n-grams of one sample over all its n-grams; 1 where it is shorter than n."""
    if n < 1:
        raise ValueError(f"n: {n} must be at least 1")
    grams = [tuple(ids[i : i + n]) for i in range(len(ids) - n + 1)]
    return len(set(grams)) / len(grams) if grams else 1.0


def mean(values: Sequence[float]) -> Estimate:
    """The mean of one value a sample."""
    return ratio(values, [1.0] * len(values))


def ratio(numerators: Sequence[float], denominators: Sequence[float]) -> Estimate:
    """Sum over sum, such as nats over tokens, with the standard error of a ratio of means over samples."""
    n = len(numerators)
    if n < 2 or n != len(denominators):
        raise ValueError(f"an error needs at least 2 samples with both values, got {n} and {len(denominators)}")
    whole = sum(denominators)
    if whole <= 0:
        raise ValueError("the denominators add up to nothing: there is no text to measure")
    value = sum(numerators) / whole
    squares = sum((a - value * b) ** 2 for a, b in zip(numerators, denominators, strict=True))
    return Estimate(value, math.sqrt(squares * n / (n - 1)) / whole, n)
