"""Laws and bounds of masked diffusion in the exact discrete world, by enumeration first and chi-square second."""

import itertools
import math

import pytest
import torch
from torch import Tensor

from diladiff.processes.masked import corrupt, posterior, reveal_probability
from diladiff.processes.schedules import MASK_SCHEDULES, mask_schedule
from diladiff.processes.times import uniform_grid
from diladiff.rng import Stream, uniform
from diladiff.samplers.categorical import draw
from tests.worlds import discrete
from tests.worlds.discrete import LENGTH, MASK, STATES, SUBSETS, TEXTS, total_variation

WORLD = discrete.correlated_world()
LATENT = discrete.latent_world()
SAMPLES = 10_000


@pytest.fixture(params=MASK_SCHEDULES)
def schedule(request):
    return mask_schedule(request.param)


def test_the_denoiser_is_the_conditional_law():
    joint = WORLD.law.view(MASK, MASK, MASK)
    logprobs = WORLD.log_denoiser(torch.tensor([[MASK, 1, 2], [MASK, MASK, MASK], [0, MASK, MASK]]))
    torch.testing.assert_close(logprobs[0, 0, :3].exp(), joint[:, 1, 2] / joint[:, 1, 2].sum())
    torch.testing.assert_close(logprobs[1, 2, :3].exp(), joint.sum((0, 1)))
    torch.testing.assert_close(logprobs[2, 1, :3].exp(), joint[0].sum(1) / joint[0].sum())
    assert bool((logprobs[..., MASK] == -math.inf).all())


def test_the_tokens_of_the_world_are_far_from_independent():
    assert total_variation(discrete.ancestral_law(WORLD.log_denoiser, mask_schedule("linear"), 1), WORLD.law) > 0.3


# The N-step chain.


@pytest.mark.parametrize("steps", [1, 2, 3, 4])
def test_planned_positions_keep_the_law_of_the_textbook_step(schedule, steps):
    for denoiser in (WORLD.log_denoiser, discrete.perturbed(WORLD.log_denoiser, 1.0)):
        planned = discrete.planned_law(denoiser, schedule, steps)
        textbook = discrete.ancestral_law(denoiser, schedule, steps)
        torch.testing.assert_close(planned, textbook, rtol=1e-12, atol=1e-15)
        assert float(planned.sum()) == pytest.approx(1, abs=1e-12)


def test_the_chain_is_off_by_one_over_its_steps(schedule):
    distances = [
        total_variation(discrete.ancestral_law(WORLD.log_denoiser, schedule, steps), WORLD.law)
        for steps in (32, 64, 128, 256)
    ]
    orders = [math.log2(coarse / fine) for coarse, fine in itertools.pairwise(distances)]
    assert orders == pytest.approx([1] * 3, abs=0.06)
    assert orders[-1] == pytest.approx(1, abs=0.015)


def test_one_token_a_forward_has_the_true_law():
    torch.testing.assert_close(discrete.first_hitting_law(WORLD.log_denoiser), WORLD.law, rtol=1e-12, atol=0)


def test_one_token_a_forward_is_the_limit_of_many_steps(schedule):
    """With a wrong denoiser too, where the limit is not the true law."""
    denoiser = discrete.perturbed(WORLD.log_denoiser, 1.0)
    limit = discrete.first_hitting_law(denoiser)
    assert total_variation(limit, WORLD.law) > 0.05
    coarse, fine = (discrete.ancestral_law(denoiser, schedule, steps) for steps in (128, 256))
    assert total_variation(fine, limit) < 0.01
    torch.testing.assert_close(2 * fine - coarse, limit, rtol=0, atol=2e-5)  # what is left is O(1/N^2)


def test_drawn_chains_have_the_enumerated_law(schedule):
    steps = 3
    texts = draw_chains(schedule, steps)
    assert discrete.law_deviation(texts, discrete.ancestral_law(WORLD.log_denoiser, schedule, steps)) < 3.5
    assert discrete.law_deviation(texts, WORLD.law) > 20


def draw_chains(schedule, steps: int) -> Tensor:
    """SAMPLES runs of the textbook chain: every position of every state drawn from the posterior."""
    tokens = torch.full((SAMPLES, LENGTH), MASK)
    grid = uniform_grid(steps)
    for n in range(steps):
        t, s = grid[n].expand(SAMPLES), grid[n + 1].expand(SAMPLES)
        log_law = posterior(WORLD.log_denoiser(tokens), tokens, t, s, schedule=schedule, mask_id=MASK)
        u = uniform(5, Stream.TOKEN, n, torch.arange(SAMPLES), LENGTH, dtype=torch.float64)
        tokens = draw(log_law.flatten(0, 1), u.flatten()).view(SAMPLES, LENGTH)
    return tokens


def test_drawn_first_hitting_texts_have_the_true_law():
    order = uniform(6, Stream.ORDER, 0, torch.arange(SAMPLES), LENGTH, dtype=torch.float64).argsort(1)
    u = uniform(6, Stream.TOKEN, 0, torch.arange(SAMPLES), LENGTH, dtype=torch.float64)
    tokens = torch.full((SAMPLES, LENGTH), MASK)
    for place in order.T:
        logprobs = WORLD.log_denoiser(tokens)[torch.arange(SAMPLES), place]
        tokens[torch.arange(SAMPLES), place] = draw(logprobs, u.gather(1, place[:, None])[:, 0])
    assert discrete.law_deviation(tokens, WORLD.law) < 3.5


def test_corruption_has_the_enumerated_law(schedule):
    t = torch.tensor(0.6)
    noise = uniform(8, Stream.MASK, 0, torch.arange(SAMPLES), LENGTH)
    noisy = corrupt(TEXTS[:1].expand(SAMPLES, -1), t.expand(SAMPLES), noise, schedule=schedule, mask_id=MASK)
    subset = ((noisy == MASK) * 2 ** torch.arange(LENGTH - 1, -1, -1)).sum(1).bincount(minlength=len(SUBSETS))
    expected = SAMPLES * discrete.subset_law(schedule.mask_rate(t.double()))
    assert float(((subset - expected) ** 2 / expected).sum()) < 30  # 7 degrees of freedom: exceeded once in 10,000


# Bounds on the likelihood.


def test_the_continuous_bound_of_the_exact_denoiser_is_the_likelihood(schedule):
    """For every text. Log-linear ends at alpha = 1e-3, and its bound has the term of that end beside the integral."""
    bound = discrete.continuous_bound(WORLD.log_denoiser, schedule) + discrete.end_term(WORLD, schedule)
    torch.testing.assert_close(bound, -WORLD.law.log(), rtol=0, atol=1e-10)
    if schedule.name != "log_linear":
        assert float(discrete.end_term(WORLD, schedule).abs().max()) < 1e-12


def test_the_discrete_bound_of_the_exact_denoiser_is_the_likelihood():
    torch.testing.assert_close(discrete.discrete_bound(WORLD.log_denoiser), -WORLD.law.log(), rtol=0, atol=1e-10)


def test_both_bounds_agree_for_any_denoiser():
    wrong = discrete.perturbed(WORLD.log_denoiser, 1.0)
    for name in ("linear", "cosine"):
        torch.testing.assert_close(
            discrete.continuous_bound(wrong, mask_schedule(name)), discrete.discrete_bound(wrong), rtol=0, atol=1e-10
        )


@pytest.mark.parametrize("scale", [0.1, 1.0])
def test_the_bounds_of_a_wrong_denoiser_exceed_the_likelihood_in_the_mean(schedule, scale):
    entropy = -float(WORLD.law @ WORLD.law.log())
    for seed in range(5):
        wrong = discrete.perturbed(WORLD.log_denoiser, scale, seed)
        continuous = discrete.continuous_bound(wrong, schedule) + discrete.end_term(WORLD, schedule)
        assert float(WORLD.law @ continuous) > entropy + 0.1 * scale**2
        assert float(WORLD.law @ discrete.discrete_bound(wrong)) > entropy + 0.1 * scale**2


def test_a_bound_of_a_wrong_denoiser_bounds_its_own_law(schedule):
    """-log p <= bound for every text, p being the law of the chain in the limit of many steps."""
    wrong = discrete.perturbed(WORLD.log_denoiser, 1.0)
    slack = discrete.discrete_bound(wrong) + discrete.first_hitting_law(wrong).log()
    assert float(slack.min()) >= -1e-12
    assert float(slack.max()) > 0.01


def test_the_flat_loss_is_the_expected_cross_entropy():
    """Weight -1 under the linear schedule: E[t CE] over all positions, the sum over k of (E_k CE) / (L + 1)."""
    losses, size = discrete.subset_losses(WORLD.log_denoiser), SUBSETS.sum(1)
    by_size = torch.stack([losses[:, size == k].mean(1) for k in range(LENGTH + 1)]).sum(0) / (LENGTH + 1)
    by_time = sum(width * (losses @ discrete.subset_law(t)) for t, width in discrete.gauss_legendre(8))
    torch.testing.assert_close(by_time, by_size, rtol=1e-12, atol=0)
    assert float((by_time / LENGTH < -WORLD.law.log() / LENGTH).double().mean()) > 0.9  # not a bound: far below


# A latent that makes the tokens independent.


@pytest.mark.parametrize("steps", [1, 2, 5])
def test_with_the_latent_held_any_number_of_steps_has_the_true_law(schedule, steps):
    law = sum(
        p * discrete.ancestral_law(LATENT.given(z).log_denoiser, schedule, steps) for z, p in enumerate(LATENT.prior_Z)
    )
    torch.testing.assert_close(law, LATENT.mixture().law, rtol=1e-12, atol=0)


def test_without_the_latent_one_step_does_not():
    law = discrete.ancestral_law(LATENT.mixture().log_denoiser, mask_schedule("linear"), 1)
    assert total_variation(law, LATENT.mixture().law) > 0.1


def test_a_latent_redrawn_from_its_prior_at_every_step_has_another_law(schedule):
    """It forgets what x_t says about it. Redrawn from p(z | x_t), it would do; holding it draws from just that."""
    grid, worlds = uniform_grid(2), [LATENT.given(z) for z in range(len(LATENT.prior_Z))]
    from_prior, from_posterior = discrete.all_masked(), discrete.all_masked()
    for t, s in itertools.pairwise(grid):
        steps_Z = torch.stack([discrete.step_matrix(world.log_denoiser(STATES), schedule, t, s) for world in worlds])
        from_prior = from_prior @ torch.einsum("z,zij->ij", LATENT.prior_Z, steps_Z)
        from_posterior = from_posterior @ torch.einsum("iz,zij->ij", latent_posterior(), steps_Z)
    law = LATENT.mixture().law
    assert total_variation(from_prior[discrete.CLEAN_STATES], law) > 0.1
    torch.testing.assert_close(from_posterior[discrete.CLEAN_STATES], law, rtol=1e-12, atol=0)


def latent_posterior() -> Tensor:
    """p(z | x_t) for every state."""
    agrees = ((STATES[:, None] == MASK) | (STATES[:, None] == TEXTS)).all(-1).double()
    joint = torch.stack([p * (agrees @ LATENT.given(z).law) for z, p in enumerate(LATENT.prior_Z)], dim=1)
    return joint / joint.sum(1, keepdim=True)


def test_reveal_probabilities_multiply_up_to_the_planned_law(schedule):
    """The chance to be hidden so far times the chance to be revealed now is (alpha_s - alpha_t) / (1 - alpha_1)."""
    grid = uniform_grid(7)
    reveal = reveal_probability(schedule, grid[:-1], grid[1:])
    hidden = torch.cat((torch.ones(1, dtype=torch.float64), (1 - reveal).cumprod(0)[:-1]))
    alpha = schedule.alpha(grid)
    torch.testing.assert_close(hidden * reveal, (alpha[1:] - alpha[:-1]) / (1 - alpha[0]), rtol=1e-12, atol=1e-15)
