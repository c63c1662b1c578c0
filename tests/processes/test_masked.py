"""Masked diffusion: forward kernel, posterior, weights, and the fixed number of masked rows."""

import math

import jaxtyping
import pytest
import torch

from diladiff.processes.masked import (
    corrupt,
    loss_weight,
    masked_rows,
    masked_rows_bound,
    posterior,
    reveal_probability,
)
from diladiff.processes.schedules import MASK_SCHEDULES, mask_schedule
from diladiff.processes.times import stratified
from diladiff.rng import Stream, uniform

MASK = 3


@pytest.fixture(params=MASK_SCHEDULES)
def schedule(request):
    return mask_schedule(request.param)


def test_corrupt_masks_where_the_noise_is_low(schedule):
    tokens_BL = torch.tensor([[0, 1, 2, 0]]).expand(3, 4)
    t_B = torch.tensor([0.0, 0.5, 1.0])
    rate = float(schedule.mask_rate(t_B)[1])
    noise_BL = torch.tensor([[0.0, rate - 1e-3, rate, 0.9985]]).expand(3, 4)
    out = corrupt(tokens_BL, t_B, noise_BL, schedule=schedule, mask_id=MASK)
    assert out[0].tolist() == [0, 1, 2, 0]  # t = 0 is data, even where the noise is 0
    assert out[1].tolist() == [MASK, MASK, 2, 0]
    assert out[2].tolist() == [MASK] * 4
    assert tokens_BL[1].tolist() == [0, 1, 2, 0]


def test_corrupt_masks_at_the_stated_rate(schedule):
    t_B = torch.linspace(0.05, 1, 8)
    length = 20_000
    noise_BL = uniform(3, Stream.MASK, 0, torch.arange(8), length)
    out = corrupt(torch.zeros(8, length, dtype=torch.int64), t_B, noise_BL, schedule=schedule, mask_id=MASK)
    rate_B = schedule.mask_rate(t_B)
    error_B = (out == MASK).double().mean(1) - rate_B
    assert bool((error_B.abs() <= 4 * (rate_B * (1 - rate_B) / length).sqrt() + 1e-7).all())


def test_reveal_probability_is_the_textbook_one(schedule):
    t = torch.tensor([1.0, 0.8, 0.5, 0.1, 1e-3], dtype=torch.float64)
    s = torch.tensor([0.9, 0.2, 0.0, 0.09, 5e-4], dtype=torch.float64)
    expected = (schedule.alpha(s) - schedule.alpha(t)) / (1 - schedule.alpha(t))
    torch.testing.assert_close(reveal_probability(schedule, t, s), expected, rtol=1e-9, atol=0)
    single = reveal_probability(schedule, t.float(), s.float()).double()
    torch.testing.assert_close(
        single, reveal_probability(schedule, t.float().double(), s.float().double()), rtol=1e-5, atol=0
    )


def test_everything_is_revealed_by_time_zero(schedule):
    t = torch.tensor([1.0, 0.3, 1e-6])
    assert reveal_probability(schedule, t, torch.zeros(3)).tolist() == [1.0, 1.0, 1.0]


def test_steps_of_revealing_compose(schedule):
    t, s, r = (torch.tensor([value], dtype=torch.float64) for value in (0.9, 0.6, 0.2))
    hidden = (1 - reveal_probability(schedule, t, s)) * (1 - reveal_probability(schedule, s, r))
    torch.testing.assert_close(1 - hidden, reveal_probability(schedule, t, r), rtol=1e-12, atol=0)


def test_posterior_is_bayes_rule(schedule):
    """With a denoiser that knows the clean token, q(x_s | x_t, x_0) = q(x_t | x_s) q(x_s | x_0) / q(x_t | x_0)."""
    t, s = torch.tensor([0.7], dtype=torch.float64), torch.tensor([0.4], dtype=torch.float64)
    alpha_t, alpha_s = schedule.alpha(t), schedule.alpha(s)
    clean = 1
    logprobs = torch.full((1, 1, 4), -math.inf, dtype=torch.float64)
    logprobs[..., clean] = 0.0
    for noisy in (clean, MASK):
        ours = posterior(logprobs, torch.tensor([[noisy]]), t, s, schedule=schedule, mask_id=MASK).exp()[0, 0]
        at_s = torch.zeros(4, dtype=torch.float64)
        at_s[clean], at_s[MASK] = alpha_s, 1 - alpha_s
        keep = alpha_t / alpha_s
        onwards = torch.zeros(4, dtype=torch.float64)  # q(x_t = noisy | x_s), over x_s
        onwards[MASK] = float(noisy == MASK)
        onwards[clean] = keep if noisy == clean else 1 - keep
        joint = at_s * onwards
        torch.testing.assert_close(ours, joint / joint.sum(), rtol=1e-12, atol=0)


def test_posterior_is_a_law_that_copies_what_is_not_masked(schedule):
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(2, 3, 4, generator=generator)
    logits[..., MASK] = -math.inf
    tokens = torch.tensor([[MASK, 0, 2], [1, MASK, MASK]])
    t, s = torch.tensor([1.0, 0.5]), torch.tensor([0.5, 0.0])
    law = posterior(logits.log_softmax(-1), tokens, t, s, schedule=schedule, mask_id=MASK).exp()
    torch.testing.assert_close(law.sum(-1), torch.ones(2, 3))
    assert law[0, 1].tolist() == [1, 0, 0, 0]
    reveal = reveal_probability(schedule, t, s)
    torch.testing.assert_close(law[0, 0, :3], reveal[0] * logits.softmax(-1)[0, 0, :3])
    assert law[1, 1, MASK] == 0  # nothing is masked at s = 0


def test_the_flat_weight_is_one(schedule):
    assert loss_weight("flat", schedule, torch.tensor([0.0, 0.5, 1.0])).tolist() == [1.0, 1.0, 1.0]


def test_the_elbo_weight_is_minus_alpha_prime_over_the_mask_rate():
    t = torch.tensor([0.0, 1e-3, 0.25, 1.0], dtype=torch.float64)
    assert loss_weight("elbo", mask_schedule("linear"), t).tolist() == pytest.approx([1000, 1000, 4, 1])
    assert loss_weight("elbo", mask_schedule("log_linear"), t).tolist() == pytest.approx([1000, 1000, 4, 1])
    safe = t.clamp(min=1e-3)
    cosine = math.pi / 2 * torch.sin(math.pi / 2 * safe) / (1 - torch.cos(math.pi / 2 * safe))
    torch.testing.assert_close(loss_weight("elbo", mask_schedule("cosine"), t), cosine, rtol=1e-9, atol=0)


def test_an_unknown_weight_is_refused():
    with pytest.raises((ValueError, jaxtyping.TypeCheckError), match="snr"):
        loss_weight("snr", mask_schedule("linear"), torch.ones(1))


def test_the_bound_is_the_printed_formula_when_linear():
    for batch, length in ((32, 1024), (64, 256), (8, 128)):
        printed = (batch + 1) * length / 2 + 8 * math.sqrt(batch * length / 6)
        assert masked_rows_bound(mask_schedule("linear"), batch, length) == pytest.approx(printed, abs=1.01)
    assert masked_rows_bound(mask_schedule("linear"), 1, 128) == 128
    assert masked_rows_bound(mask_schedule("cosine"), 2, 4) <= 8


@pytest.mark.parametrize("batch", [1, 2, 4, 32, 512])
@pytest.mark.parametrize("length", [4, 64, 1024])
def test_the_bound_covers_eight_deviations_at_every_offset(schedule, batch, length):
    bound = masked_rows_bound(schedule, batch, length)
    for offset in torch.linspace(0, 1, 101, dtype=torch.float64):
        rate = schedule.mask_rate((torch.arange(batch) + offset) / batch)
        mean, deviation = length * float(rate.sum()), math.sqrt(length * float((rate * (1 - rate)).sum()))
        assert bound == batch * length or bound >= mean + 8 * deviation - 1e-6


# global batch, slice, length, seeds
SIZES = [(512, 32, 1024, 3), (64, 16, 128, 60), (64, 1, 32, 20), (32, 32, 64, 100), (8, 4, 256, 100), (128, 2, 64, 30)]


@pytest.mark.parametrize(("size", "width", "length", "seeds"), SIZES)
def test_no_aligned_slice_exceeds_the_bound(schedule, size, width, length, seeds):
    bound = masked_rows_bound(schedule, width, length)
    worst = max(
        int(_masked_a_sample(schedule, seed, size, length).unflatten(0, (-1, width)).sum(1).max())
        for seed in range(seeds)
    )
    assert worst <= bound
    # Not idle either: a slice of many samples comes near it (the bound is 8 deviations off).
    if width >= 16:
        assert worst > 0.8 * bound


def _masked_a_sample(schedule, seed: int, size: int, length: int) -> torch.Tensor:
    """The number of masked positions of every sample of a global batch, as training draws them."""
    index_B = torch.arange(size)
    u = uniform(seed, Stream.TIME, 0, torch.zeros(1, dtype=torch.int64), 1)[0, 0]
    t_B = stratified(u, index_B, size)
    noise_BL = uniform(seed, Stream.MASK, 0, index_B, length)
    clean_BL = torch.zeros(size, length, dtype=torch.int64)
    return (corrupt(clean_BL, t_B, noise_BL, schedule=schedule, mask_id=MASK) == MASK).sum(1)


def test_plain_order_would_overflow(schedule):
    size, width, length = 64, 16, 128
    t_B = (torch.arange(size) + 0.5) / size
    noise_BL = uniform(0, Stream.MASK, 0, torch.arange(size), length)
    clean_BL = torch.zeros(size, length, dtype=torch.int64)
    masked_BL = corrupt(clean_BL, t_B, noise_BL, schedule=schedule, mask_id=MASK) == MASK
    bound = masked_rows_bound(schedule, width, length)
    assert int(masked_BL.unflatten(0, (-1, width)).sum((1, 2)).max()) > bound
    _, _, overflow = masked_rows(masked_BL[-width:], bound)
    assert bool(overflow)


@pytest.mark.parametrize("count", [0, 1, 5, 6])
def test_masked_rows_come_first_and_in_order(count):
    masked_BL = torch.zeros(3, 4, dtype=torch.bool)
    places = [1, 2, 5, 7, 10, 11][:count]
    masked_BL.view(-1)[places] = True
    index, valid, overflow = masked_rows(masked_BL, 6)
    assert index[:count].tolist() == places
    assert valid.tolist() == [True] * count + [False] * (6 - count)
    assert not bool(overflow)
    assert len(set(index.tolist())) == 6
    assert not masked_BL.flatten()[index[count:]].any()


def test_masked_rows_of_a_full_batch():
    index, valid, overflow = masked_rows(torch.ones(2, 3, dtype=torch.bool), 6)
    assert index.tolist() == [0, 1, 2, 3, 4, 5]
    assert bool(valid.all())
    assert not bool(overflow)


def test_masked_rows_say_when_they_overflow():
    index, valid, overflow = masked_rows(torch.tensor([[True, False, True], [True, True, False]]), 3)
    assert index.tolist() == [0, 2, 3]
    assert bool(valid.all())
    assert bool(overflow)


@pytest.mark.parametrize("rows", [0, 7])
def test_masked_rows_refuse_a_count_out_of_range(rows):
    with pytest.raises(ValueError, match="rows"):
        masked_rows(torch.ones(2, 3, dtype=torch.bool), rows)


@pytest.mark.compile
def test_corruption_compiles_to_one_graph():
    schedule = mask_schedule("cosine")
    bound = masked_rows_bound(schedule, 4, 16)

    def rows(step: torch.Tensor, tokens_BL: torch.Tensor, index_B: torch.Tensor) -> tuple[torch.Tensor, ...]:
        u = uniform(0, Stream.TIME, step, torch.zeros_like(index_B[:1]), 1)[0, 0]
        t_B = stratified(u, index_B, 8)
        noise_BL = uniform(0, Stream.MASK, step, index_B, 16)
        noisy_BL = corrupt(tokens_BL, t_B, noise_BL, schedule=schedule, mask_id=MASK)
        return (noisy_BL, *masked_rows(noisy_BL == MASK, bound), loss_weight("elbo", schedule, t_B))

    arguments = (torch.tensor(5), torch.arange(64).view(4, 16) % 3, torch.arange(4, 8))
    compiled = torch.compile(rows, backend="eager", fullgraph=True)
    for ours, eager in zip(compiled(*arguments), rows(*arguments), strict=True):
        assert torch.equal(ours, eager)
