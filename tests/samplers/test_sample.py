"""Every sampler alike: a sample depends on seed and index alone, and wrong names and shapes are refused."""

import pytest
import torch

from diladiff.models.token_transformer import TokenTransformerConfig
from diladiff.samplers import SAMPLERS, base, sample, sampler_config
from diladiff.samplers.base import DrawConfig, pick

MASK, LENGTH = 1, 12


@pytest.fixture(scope="module")
def network():
    torch.manual_seed(0)
    config = TokenTransformerConfig(
        vocab_size=30, mask_id=MASK, length=LENGTH, width=16, layers=1, heads=2, time_conditioning=True
    )
    model = config.build().eval().requires_grad_(False)
    for parameter in model.parameters():  # far from its initial values, which hardly see the context
        parameter.mul_(2).add_(torch.randn_like(parameter), alpha=0.05)

    def denoise(tokens_AL, time_A, rows_N):
        return model.head(model.trunk(tokens_AL, time_A).flatten(0, 1)[rows_N])

    return denoise


def tokens(config, network, index, *, seed=5):
    """The texts of samples, the first three positions given."""
    canvas_BL = torch.full((len(index), LENGTH), MASK)
    canvas_BL[:, :3] = torch.tensor([9, 8, 7])
    *_, last = sample(config, network, canvas_BL, torch.tensor(index), mask_id=MASK, seed=seed)
    return last.tokens_BL


@pytest.mark.parametrize("name", list(SAMPLERS))
def test_a_sample_is_the_same_alone_and_in_any_batch(name, network):
    config = sampler_config(name, steps=7, top_p=0.9, temperature=1.5)
    alone = tokens(config, network, [4])
    batch = tokens(config, network, [0, 1, 2, 3, 4, 5])
    other = tokens(config, network, [9, 4, 3])
    assert batch[4].tolist() == other[1].tolist() == alone[0].tolist()
    assert other[2].tolist() == batch[3].tolist()
    assert len({tuple(row) for row in batch.tolist()}) > 1
    assert tokens(config, network, [4], seed=6).tolist() != alone.tolist()
    assert bool((batch[:, :3] == torch.tensor([9, 8, 7])).all())
    assert not bool((batch == MASK).any())


@pytest.mark.parametrize("name", list(SAMPLERS))
def test_an_empty_batch_is_no_work(name, network):
    assert [state.step for state in sample_empty(name, network)] == [0]


def sample_empty(name, network):
    canvas_BL = torch.empty(0, LENGTH, dtype=torch.int64)
    index_B = torch.empty(0, dtype=torch.int64)
    return sample(sampler_config(name, steps=3), network, canvas_BL, index_B, mask_id=MASK, seed=0)


def test_zero_temperature_writes_the_likeliest_tokens(network):
    config = sampler_config("first_hitting", steps=None, temperature=0.0)
    wanted = []

    def watched(tokens_AL, time_A, rows_N):
        logits_NV = network(tokens_AL, time_A, rows_N)
        wanted.append((int(rows_N), int(logits_NV.argmax(1))))
        return logits_NV

    canvas_BL = torch.full((1, LENGTH), MASK)
    *_, last = sample(config, watched, canvas_BL, torch.tensor([0]), mask_id=MASK, seed=0)
    assert [int(last.tokens_BL[0, place]) for place, _ in wanted] == [token for _, token in wanted]
    assert len(wanted) == LENGTH


def test_rows_drawn_in_pieces_are_the_same(monkeypatch):
    monkeypatch.setattr(base, "ROWS_AT_ONCE", 8)
    torch.manual_seed(0)
    logits, uniform = torch.randn(21, 3), torch.rand(21, dtype=torch.float64)
    draw = DrawConfig(temperature=0.7, top_p=0.8)
    whole = pick(logits, uniform, draw)
    assert whole.tolist() == [int(pick(a[None], u[None], draw)) for a, u in zip(logits, uniform, strict=True)]


def test_an_unknown_sampler_is_refused_with_the_closest_name():
    with pytest.raises(ValueError, match="did you mean first_hitting"):
        sampler_config("firsthitting", steps=3)
