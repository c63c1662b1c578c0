"""Confidence samplers: which positions they choose, how many, and that one token at a time loses nothing."""

import pytest
import torch

from diladiff.config import from_dict
from diladiff.samplers import ConfidenceThreshold, ConfidenceTopK, EntropyBounded, sample
from diladiff.samplers.confidence import entropy

V, MASK = 4, 4


def network_of(probabilities_LV):
    """A network whose logits hang on the position alone."""
    logits_LV = torch.cat((torch.tensor(probabilities_LV), torch.zeros(len(probabilities_LV), 1)), dim=1).log()

    def network(tokens_AL, time_A, rows_N):
        assert time_A.tolist() == pytest.approx((tokens_AL == MASK).double().mean(1).tolist())
        return logits_LV.repeat(len(tokens_AL), 1)[rows_N]

    return network


SHARP = [[0.97, 0.01, 0.01, 0.01], [0.4, 0.3, 0.2, 0.1], [0.5, 0.5, 0.0, 0.0], [0.0, 0.95, 0.05, 0.0]]


def revealed(config, *, rows=1, seed=0):
    """For each step the positions that sample 0 reveals."""
    canvas_BL = torch.full((rows, len(SHARP)), MASK)
    states = sample(config, network_of(SHARP), canvas_BL, torch.arange(rows), mask_id=MASK, seed=seed)
    return [sorted(int(place) for place in state.changed_N if place < len(SHARP)) for state in states]


def test_top_k_reveals_the_likeliest_first_in_even_counts():
    assert revealed(ConfidenceTopK(steps=4, measure="top")) == [[], [0], [3], [2], [1]]
    assert revealed(ConfidenceTopK(steps=2, measure="top")) == [[], [0, 3], [1, 2]]
    assert revealed(ConfidenceTopK(steps=4, measure="margin")) == [[], [0], [3], [1], [2]]
    assert [len(step) for step in revealed(ConfidenceTopK(steps=3), rows=5)] == [0, 1, 1, 2]


def test_threshold_reveals_all_that_reach_it_and_at_least_one():
    assert revealed(ConfidenceThreshold(threshold=0.9, measure="top")) == [[], [0, 3], [2], [1]]
    assert revealed(ConfidenceThreshold(threshold=1.0, measure="top")) == [[], [0], [3], [2], [1]]
    assert revealed(ConfidenceThreshold(threshold=1.0, measure="top", steps=2)) == [[], [0, 3], [1, 2]]
    assert revealed(ConfidenceThreshold(threshold=0.01, measure="top")) == [[], [0, 1, 2, 3]]


def test_entropy_bound_sums_all_but_the_largest():
    nats = entropy(torch.tensor(SHARP).log()).tolist()
    assert nats == pytest.approx([0.1677, 1.2799, 0.6931, 0.1985], abs=1e-3)
    assert revealed(EntropyBounded(bound=0.16)) == [[], [0], [3], [2], [1]]
    assert revealed(EntropyBounded(bound=0.17)) == [[], [0, 3], [2], [1]]
    assert revealed(EntropyBounded(bound=0.37)) == [[], [0, 2, 3], [1]]
    assert revealed(EntropyBounded(bound=2.0)) == [[], [0, 1, 2, 3]]
    assert revealed(EntropyBounded(bound=0.0, steps=2)) == [[], [0, 3], [1, 2]]


def test_entropy_of_certainty_is_zero():
    assert entropy(torch.tensor([[0.0, -torch.inf]])).tolist() == [0.0]


def test_confidence_is_that_of_the_token_drawn():
    """With measure="token" a rare draw is not confident: over many samples both tokens of a position come first."""
    canvas_BL = torch.full((200, 4), MASK)
    config = ConfidenceThreshold(threshold=0.9)
    states = list(sample(config, network_of(SHARP), canvas_BL, torch.arange(200), mask_id=MASK, seed=1))
    first = next(iter(sample(config, network_of(SHARP), canvas_BL, torch.arange(200), mask_id=MASK, seed=1)))
    assert bool((first.tokens_BL == MASK).all())
    tokens_BL = states[-1].tokens_BL
    assert set(tokens_BL[:, 2].tolist()) == {0, 1}
    assert 0.9 < float((tokens_BL[:, 0] == 0).double().mean()) <= 1.0


def test_one_token_at_a_time_by_network_confidence_has_the_true_law():
    """The order then hangs only on what is revealed, so the chain rule holds whatever the order is."""
    joint = torch.tensor([[5.0, 1.0, 2.0], [1.0, 6.0, 1.0], [0.5, 1.0, 9.0]], dtype=torch.float64)
    joint /= joint.sum()

    def exact(tokens_AL, time_A, rows_N):
        logits = torch.full((len(tokens_AL), 2, 4), -torch.inf, dtype=torch.float64)
        for row, (first, second) in enumerate(tokens_AL.tolist()):
            logits[row, 0, :3] = (joint[:, second] if second < 3 else joint.sum(1)).log()
            logits[row, 1, :3] = (joint[first] if first < 3 else joint.sum(0)).log()
        return logits.flatten(0, 1)[rows_N]

    num = 4000
    for config in (ConfidenceTopK(steps=2, measure="margin"), EntropyBounded(bound=0.0)):
        *_, last = sample(config, exact, torch.full((num, 2), 3), torch.arange(num), mask_id=3, seed=0)
        counts = torch.bincount(last.tokens_BL @ torch.tensor([3, 1]), minlength=9).double()
        expected = num * joint.flatten()
        statistic = ((counts - expected) ** 2 / expected).sum()
        assert float(torch.special.gammaincc(torch.tensor(4.0, dtype=torch.float64), statistic / 2)) > 1e-4


@pytest.mark.parametrize("config", [ConfidenceTopK(steps=3), ConfidenceThreshold(), EntropyBounded()])
def test_given_positions_stay_and_finished_sequences_cost_nothing(config):
    canvas_BL = torch.tensor([[MASK, 1, 2, MASK], [3, 3, 3, 3], [MASK, MASK, MASK, MASK]])
    sizes = []
    network = network_of(SHARP)

    def counting(tokens_AL, time_A, rows_N):
        assert bool((tokens_AL == MASK).any(1).all())
        sizes.append(len(tokens_AL))
        return network(tokens_AL, time_A, rows_N)

    *_, last = sample(config, counting, canvas_BL, torch.arange(3), mask_id=MASK, seed=0)
    assert last.tokens_BL[1].tolist() == [3, 3, 3, 3]
    assert last.tokens_BL[0, 1:3].tolist() == [1, 2]
    assert not bool((last.tokens_BL == MASK).any())
    assert max(sizes) == 2


@pytest.mark.parametrize(
    ("config", "values", "words"),
    [
        (ConfidenceTopK, {"steps": 0}, "steps: 0"),
        (ConfidenceTopK, {"measure": "luck"}, "measure"),
        (ConfidenceThreshold, {"threshold": 1.5}, "threshold: 1.5"),
        (EntropyBounded, {"bound": -0.1}, "bound: -0.1"),
    ],
)
def test_wrong_settings_are_refused_by_name(config, values, words):
    with pytest.raises(ValueError, match=words):
        from_dict(config, values)
