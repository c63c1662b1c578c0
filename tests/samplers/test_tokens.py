"""Planned samplers: their laws on the exact world by enumeration and chi-square, and what they ask of the network."""

import itertools

import pytest
import torch

from diladiff.config import from_dict, to_dict
from diladiff.processes.schedules import mask_schedule
from diladiff.processes.times import uniform_grid
from diladiff.rng import Stream, uniform
from diladiff.samplers import Ancestral, FirstHitting, Remasking, sample
from diladiff.samplers.tokens import plan_ancestral, plan_first_hitting, plan_remasking, remask_probability
from tests.worlds.discrete import (
    CLEAN_STATES,
    LENGTH,
    MASK,
    STATES,
    TEXTS,
    all_masked,
    ancestral_law,
    correlated_world,
    reveal_law,
)

NUM = 10_000
SMALLEST_P = 1e-4
WORLD = correlated_world()
LINEAR = mask_schedule("linear")


def p_value(config, law, canvas=(MASK,) * LENGTH, seed=0):
    """The chi-square test's p-value of a sampler's texts against a law over TEXTS."""
    canvas_BL = torch.tensor(canvas).expand(NUM, LENGTH)
    *_, last = sample(config, WORLD.denoise, canvas_BL, torch.arange(NUM), mask_id=MASK, seed=seed)
    counts = torch.bincount(last.tokens_BL @ torch.tensor([9, 3, 1]), minlength=len(TEXTS)).double()
    expected = NUM * law
    # Rare texts share a cell, since the test's law holds for cells of some counts.
    common, rare = expected >= 5, (expected > 0) & (expected < 5)
    assert counts[expected == 0].sum() == 0
    observed = torch.cat((counts[common], counts[rare].sum()[None]))
    expected = torch.cat((expected[common], expected[rare].sum()[None].clamp(min=1e-9)))
    statistic = ((observed - expected) ** 2 / expected).sum()
    freedom = torch.tensor(float(common.sum() - (0 if rare.any() else 1)), dtype=torch.float64)
    return float(torch.special.gammaincc(freedom / 2, statistic / 2))


def remasking_law(config):
    """The law over TEXTS of the remasking chain under alpha = 1 - t, by enumeration over STATES."""
    marginal_SLV = WORLD.log_denoiser(STATES).exp()
    masked_SL = STATES == MASK
    stay_SLV = torch.nn.functional.one_hot(STATES, MASK + 1).double()
    nothing_V = torch.nn.functional.one_hot(torch.tensor(MASK), MASK + 1).double()
    law_S = all_masked()
    for t, s in itertools.pairwise(uniform_grid(config.steps).tolist()):
        sigma = remask_probability(config, t, 1 - t, 1 - s)
        reveal = ((1 - s) - (1 - sigma) * (1 - t)) / t
        law_SLV = torch.where(
            masked_SL[..., None],
            reveal * marginal_SLV + (1 - reveal) * nothing_V,
            (1 - sigma) * stay_SLV + sigma * nothing_V,
        )
        law_S = law_S @ law_SLV[:, torch.arange(LENGTH), STATES].prod(-1)
    assert float(law_S[CLEAN_STATES].sum()) == pytest.approx(1)
    return law_S[CLEAN_STATES]


@pytest.mark.parametrize("steps", [1, 2, 5])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_ancestral_has_the_law_of_the_enumerated_chain(steps, schedule):
    law = ancestral_law(WORLD.log_denoiser, mask_schedule(schedule), steps)
    assert p_value(Ancestral(steps=steps, schedule=schedule), law) > SMALLEST_P


def test_ancestral_under_a_schedule_that_starts_unmasked_begins_all_masked():
    """log_linear's alpha(1) is .001: what is left of it is spread over the steps as alpha's own increments are."""
    law = ancestral_law(WORLD.log_denoiser, LINEAR, 2)
    assert p_value(Ancestral(steps=2, schedule="log_linear"), law) > SMALLEST_P


def test_ancestral_has_not_the_true_law_in_few_steps():
    assert p_value(Ancestral(steps=2), WORLD.law) < SMALLEST_P


def test_first_hitting_has_the_true_law_one_token_a_forward():
    assert p_value(FirstHitting(), WORLD.law) > SMALLEST_P
    assert p_value(FirstHitting(steps=LENGTH), WORLD.law, seed=1) > SMALLEST_P


def test_first_hitting_in_groups_has_the_law_of_random_groups():
    lasts = torch.eye(LENGTH, dtype=torch.bool)
    law = sum(reveal_law(WORLD.log_denoiser, [~last_L, last_L]) for last_L in lasts) / LENGTH
    assert p_value(FirstHitting(steps=2), law) > SMALLEST_P
    assert p_value(FirstHitting(steps=2), WORLD.law) < SMALLEST_P


@pytest.mark.parametrize("rule", ["cap", "rescale"])
def test_remasking_has_the_law_of_its_enumerated_chain(rule):
    config = Remasking(steps=4, rule=rule, eta=0.5)
    assert p_value(config, remasking_law(config)) > SMALLEST_P
    assert p_value(config, ancestral_law(WORLD.log_denoiser, LINEAR, 4)) < SMALLEST_P


def test_remasking_without_remasking_is_ancestral():
    law = ancestral_law(WORLD.log_denoiser, LINEAR, 4)
    torch.testing.assert_close(remasking_law(Remasking(steps=4, eta=0.0)), law)
    assert p_value(Remasking(steps=4, eta=0.0), law) > SMALLEST_P
    assert p_value(Remasking(steps=4, eta=0.5, start_time=0.2, end_time=0.1), law) > SMALLEST_P


@pytest.mark.parametrize("config", [FirstHitting(), Ancestral(steps=1), Remasking(steps=1)])
def test_given_positions_condition_the_law(config):
    """With one position left even one step has the true conditional law."""
    fits = (TEXTS[:, 0] == 1) & (TEXTS[:, 2] == 2)
    conditional = torch.where(fits, WORLD.law, 0.0) / WORLD.law[fits].sum()
    assert p_value(config, conditional, canvas=(1, MASK, 2)) > SMALLEST_P


CONFIGS = [Ancestral(steps=6), FirstHitting(), FirstHitting(steps=4), Remasking(steps=6, rule="rescale", eta=0.3)]


@pytest.mark.parametrize("config", CONFIGS)
def test_the_network_sees_only_what_reveals_and_no_given_position_changes(config):
    length, batch, mask_id = 9, 7, 5
    canvas_BL = torch.full((batch, length), mask_id)
    canvas_BL[:, 2:4], canvas_BL[3] = 1, 2
    asked = []

    def network(tokens_AL, time_A, rows_N):
        assert bool((tokens_AL.flatten()[rows_N] == mask_id).all())
        assert len((rows_N // length).unique()) == len(tokens_AL) == len(time_A)
        assert bool(((time_A > 0) & (time_A <= 1)).all())
        asked.append((len(tokens_AL), len(rows_N)))
        return torch.zeros(len(rows_N), 5)

    before = canvas_BL.clone()
    for state in sample(config, network, canvas_BL, torch.arange(batch), mask_id=mask_id, seed=2):
        changed = (state.tokens_BL != before).flatten().nonzero().squeeze(1)
        assert set(changed.tolist()) <= set(state.changed_N.tolist())
        before = state.tokens_BL.clone()
    assert bool((before[canvas_BL != mask_id] == canvas_BL[canvas_BL != mask_id]).all())
    assert not bool((before == mask_id).any())
    if not isinstance(config, Remasking):
        assert sum(rows for _, rows in asked) == int((canvas_BL == mask_id).sum())
    assert bool((canvas_BL[:, 0] == torch.tensor([5, 5, 5, 2, 5, 5, 5])).all())


def test_steps_that_reveal_nothing_cost_nothing():
    calls = []

    def network(tokens_AL, time_A, rows_N):
        calls.append(len(tokens_AL))
        return torch.zeros(len(rows_N), 2)

    canvas_BL = torch.full((2, 3), 2)
    states = list(sample(Ancestral(steps=5000), network, canvas_BL, torch.arange(2), mask_id=2, seed=0))
    assert sum(calls) == 6
    assert len(states) == len(calls) + 1
    assert all(earlier.step < later.step for earlier, later in itertools.pairwise(states))


@pytest.mark.parametrize("config", CONFIGS)
def test_nothing_masked_needs_no_network(config):
    def network(tokens_AL, time_A, rows_N):
        raise AssertionError

    states = list(sample(config, network, torch.zeros(2, 3, dtype=torch.int64), torch.arange(2), mask_id=2, seed=0))
    assert len(states) == 1
    assert states[0].step == 0


def test_first_hitting_reveals_in_ancestrals_order_in_even_groups():
    canvas_BL = torch.full((4, 16), 9)
    canvas_BL[1, 5:] = 0
    many = plan_ancestral(Ancestral(steps=10**6), canvas_BL, torch.arange(4), mask_id=9, seed=1)
    single = plan_first_hitting(FirstHitting(), canvas_BL, torch.arange(4), mask_id=9, seed=1)
    for row in range(4):
        orders = [
            [int(p) for move in plan.moves for p in move.places_N if int(p) // 16 == row] for plan in (many, single)
        ]
        assert orders[0] == orders[1]
        assert len(orders[0]) == (5 if row == 1 else 16)
    assert len(single.moves) == single.steps == 16
    for move in single.moves:
        assert move.time_A.tolist() == pytest.approx([1 - u for u in _order_uniforms(canvas_BL, move)], abs=1e-6)
    grouped = plan_first_hitting(FirstHitting(steps=5), canvas_BL, torch.arange(4), mask_id=9, seed=1)
    sizes = [torch.bincount(move.places_N // 16, minlength=4).tolist() for move in grouped.moves]
    assert [row[0] for row in sizes] == [4, 3, 3, 3, 3]
    assert [row[1] for row in sizes] == [1, 1, 1, 1, 1]


def _order_uniforms(canvas_BL, move):
    u_BL = uniform(1, Stream.ORDER, 0, torch.arange(len(canvas_BL)), canvas_BL.shape[1], dtype=torch.float64)
    return u_BL.flatten()[move.places_N].tolist()


@pytest.mark.parametrize(
    ("plan", "config"),
    [(plan_ancestral, Ancestral(steps=5)), (plan_first_hitting, FirstHitting()), (plan_remasking, Remasking(steps=5))],
)
def test_a_samples_plan_is_its_own(plan, config):
    """Step, position and uniform of everything sample 11 does, alone and among others; another sample's are others."""

    def moves(index, sample=11):
        canvas_BL = torch.full((len(index), 8), 7)
        made = plan(config, canvas_BL, torch.tensor(index), mask_id=7, seed=4)
        row = index.index(sample)
        return [
            (move.step, int(place) % 8, float(u))
            for move in made.moves
            for place, u in zip(move.places_N, move.uniform_N, strict=True)
            if int(place) // 8 == row
        ]

    assert moves([11]) == moves([3, 11, 5])
    assert {u for *_, u in moves([11])}.isdisjoint(u for *_, u in moves([3, 11, 5], sample=5))
    assert len(moves([11])) >= 8


def test_remasking_marks_what_it_masks_again():
    config = Remasking(steps=20, rule="rescale", eta=0.4)
    canvas_BL = torch.full((3, 10), 4)
    remasked = 0
    before = canvas_BL
    for state in sample(config, lambda t, _, r: torch.zeros(len(r), 4), canvas_BL, torch.arange(3), mask_id=4, seed=0):
        again = (before != 4) & (state.tokens_BL == 4)
        remasked += int(again.sum())
        assert set(again.flatten().nonzero().squeeze(1).tolist()) <= set(state.changed_N.tolist())
        before = state.tokens_BL.clone()
    assert remasked > 10


@pytest.mark.parametrize(
    ("config", "values", "words"),
    [
        (Ancestral, {"steps": 0}, "steps: 0"),
        (Ancestral, {"draw": {"temperature": -1.0}}, "temperature: -1.0"),
        (Ancestral, {"draw": {"top_p": 0.0}}, "top_p: 0.0"),
        (Ancestral, {"schedule": "square"}, "schedule"),
        (Remasking, {"eta": 1.5}, "eta: 1.5"),
        (Remasking, {"start_time": 0.1, "end_time": 0.5}, "end_time: 0.5"),
        (FirstHitting, {"steps": -3}, "steps: -3"),
    ],
)
def test_wrong_settings_are_refused_by_name(config, values, words):
    with pytest.raises(ValueError, match=words):
        from_dict(config, values)


@pytest.mark.parametrize("config", CONFIGS)
def test_settings_survive_json(config):
    assert from_dict(type(config), to_dict(config)) == config
