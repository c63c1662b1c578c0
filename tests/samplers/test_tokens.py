"""Planned samplers: their laws on the exact world by enumeration and chi-square, and what they ask of the network."""

import itertools

import pytest
import torch

from diladiff.config import from_dict, to_dict
from diladiff.samplers import Ancestral, FirstHitting, Remasking, sample
from diladiff.samplers.tokens import plan_ancestral, plan_first_hitting, plan_remasking, remask_probability

V, L, MASK = 3, 3, 3
NUM = 20_000
STATES = list(itertools.product(range(V + 1), repeat=L))
TABLE = torch.tensor(
    [8, 1, 1, 1, 4, 1, 1, 1, 6, 1, 5, 1, 1, 1, 7, 2, 1, 1, 9, 1, 1, 1, 3, 1, 1, 2, 10], dtype=torch.float64
).reshape(V, V, V)
TABLE = TABLE / TABLE.sum()
SMALLEST_P = 1e-4


def marginals(state):
    """The exact denoiser: for each position the law of its token given what is unmasked, (L, V + 1)."""
    index = tuple(slice(None) if token == MASK else slice(token, token + 1) for token in state)
    joint = TABLE[index] / TABLE[index].sum()
    rows = []
    for position, token in enumerate(state):
        law = torch.zeros(V + 1, dtype=torch.float64)
        if token == MASK:
            law[:V] = joint.sum([other for other in range(L) if other != position])
        else:
            law[token] = 1
        rows.append(law)
    return torch.stack(rows)


LOGITS = torch.stack([marginals(state) for state in STATES]).log().reshape([V + 1] * L + [L, V + 1])


def exact(tokens_AL, time_A, rows_N):
    """The exact denoiser as a sampler's network."""
    assert time_A.shape == tokens_AL.shape[:1]
    return LOGITS[tuple(tokens_AL.unbind(1))].flatten(0, 1)[rows_N]


def step_law(law, reveal, remask=0.0):
    """Push a law of states through one step whose positions change independently given the state."""
    after = torch.zeros([V + 1] * L, dtype=torch.float64)
    for state in STATES:
        if law[state] == 0:
            continue
        kernels = []
        for token, rows in zip(state, marginals(state), strict=True):
            kernel = rows * (reveal if token == MASK else 1 - remask)
            kernel[MASK] = 1 - reveal if token == MASK else remask
            kernels.append(kernel)
        after += law[state] * torch.einsum("i,j,k->ijk", *kernels)
    return after


def chain_law(grid, *, sigma=lambda n: 0.0):
    """The law of the ancestral (or remasking) chain under alpha = 1 - t, by enumeration."""
    law = torch.zeros([V + 1] * L, dtype=torch.float64)
    law[(MASK,) * L] = 1
    for n, (t, s) in enumerate(itertools.pairwise(grid)):
        remask = sigma(n)
        law = step_law(law, ((1 - s) - (1 - remask) * (1 - t)) / t, remask)
    assert float(law[:V, :V, :V].sum()) == pytest.approx(1)
    return law[:V, :V, :V]


def p_value(config, law, canvas=(MASK,) * L, seed=0, num=NUM):
    """The chi-square test's p-value of a sampler's texts against a law of clean texts."""
    canvas_BL = torch.tensor(canvas).expand(num, L)
    state = list(sample(config, exact, canvas_BL, torch.arange(num), mask_id=MASK, seed=seed))[-1]
    counts = torch.bincount(state.tokens_BL @ torch.tensor([V * V, V, 1]), minlength=V**L).double()
    expected = num * law.flatten()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    statistic = ((counts - expected)[possible] ** 2 / expected[possible]).sum()
    return float(torch.special.gammaincc((possible.sum() - 1) / 2, statistic / 2))


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_ancestral_has_the_law_of_the_enumerated_chain(steps):
    grid = [1 - n / steps for n in range(steps + 1)]
    assert p_value(Ancestral(steps=steps), chain_law(grid)) > SMALLEST_P


def test_ancestral_has_not_the_true_law_in_few_steps():
    assert p_value(Ancestral(steps=2), TABLE) < SMALLEST_P


@pytest.mark.parametrize("schedule", ["cosine", "log_linear"])
def test_a_schedule_moves_the_chain_to_other_times(schedule):
    alpha = [0.0, 0.5**0.5, 1.0] if schedule == "cosine" else [0.0, 0.5, 1.0]
    law = chain_law([1 - a for a in alpha])
    assert p_value(Ancestral(steps=2, schedule=schedule), law) > SMALLEST_P


def test_first_hitting_has_the_true_law_one_token_a_forward():
    assert p_value(FirstHitting(), TABLE) > SMALLEST_P
    assert p_value(FirstHitting(steps=L), TABLE, seed=1) > SMALLEST_P


def test_first_hitting_in_groups_has_the_law_of_random_groups():
    law = torch.zeros([V] * L, dtype=torch.float64)
    for last in range(L):
        first_two = TABLE.sum(last, keepdim=True)
        pair = [TABLE.sum([other for other in range(L) if other != one], keepdim=True) for one in range(L)]
        del pair[last]
        law += pair[0] * pair[1] * (TABLE / first_two) / L
    assert p_value(FirstHitting(steps=2), law) > SMALLEST_P
    assert p_value(FirstHitting(steps=2), TABLE) < SMALLEST_P


@pytest.mark.parametrize("rule", ["cap", "rescale"])
def test_remasking_has_the_law_of_its_enumerated_chain(rule):
    config = Remasking(steps=4, rule=rule, eta=0.5)
    grid = [1 - n / 4 for n in range(5)]

    def sigma(n):
        return remask_probability(config, grid[n], 1 - grid[n], 1 - grid[n + 1])

    assert p_value(config, chain_law(grid, sigma=sigma)) > SMALLEST_P
    assert p_value(config, chain_law(grid)) < SMALLEST_P


def test_remasking_without_remasking_is_ancestral():
    law = chain_law([1 - n / 4 for n in range(5)])
    assert p_value(Remasking(steps=4, eta=0.0), law) > SMALLEST_P
    assert p_value(Remasking(steps=4, eta=0.5, start_time=0.2, end_time=0.1), law) > SMALLEST_P


@pytest.mark.parametrize("config", [FirstHitting(), Ancestral(steps=1), Remasking(steps=1)])
def test_given_positions_condition_the_law(config):
    """With one position left even one step has the true conditional law."""
    conditional = torch.zeros_like(TABLE)
    conditional[1, :, 2] = TABLE[1, :, 2] / TABLE[1, :, 2].sum()
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
    from diladiff.rng import Stream, uniform

    u_BL = uniform(1, Stream.ORDER, 0, torch.arange(len(canvas_BL)), canvas_BL.shape[1], dtype=torch.float64)
    return u_BL.flatten()[move.places_N].tolist()


@pytest.mark.parametrize(
    ("plan", "config"),
    [(plan_ancestral, Ancestral(steps=5)), (plan_first_hitting, FirstHitting()), (plan_remasking, Remasking(steps=5))],
)
def test_a_samples_plan_is_its_own(plan, config):
    """Step, position and uniform of everything sample 11 does, alone and among others."""

    def moves(index):
        canvas_BL = torch.full((len(index), 8), 7)
        made = plan(config, canvas_BL, torch.tensor(index), mask_id=7, seed=4)
        row = index.index(11)
        return [
            (move.step, int(place) % 8, float(u))
            for move in made.moves
            for place, u in zip(move.places_N, move.uniform_N, strict=True)
            if int(place) // 8 == row
        ]

    assert moves([11]) == moves([3, 11, 5]) != moves([11 + 1, 11])[:1]
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
