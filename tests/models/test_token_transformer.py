"""The token transformer: size by arithmetic, the mask's logit, its settings, its initial weights."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from diladiff.models.token_transformer import TokenTransformer, TokenTransformerConfig

TINY = TokenTransformerConfig(vocab_size=21, mask_id=3, length=12, width=16, layers=2, heads=2, dropout=0.0)
ORIGINAL = replace(TINY, positions="rotary", qk_norm=False, time_conditioning=True, carry_over=True)


def build(config: TokenTransformerConfig) -> TokenTransformer:
    """A network with every parameter drawn anew, so that nothing hides behind a zero."""
    torch.manual_seed(0)
    model = TokenTransformer(config)
    for name, parameter in model.named_parameters():
        nn.init.normal_(parameter, mean=1.0 if name.endswith("gain") else 0.0, std=0.2)
    return model


def tokens(batch: int = 2, length: int = 12) -> torch.Tensor:
    """Some ids, masks among them."""
    ids = torch.randint(0, 21, (batch, length), generator=torch.Generator().manual_seed(1))
    return ids.index_fill(1, torch.tensor([0, 4]), 3)


@pytest.mark.parametrize(("vocab_size", "millions"), [(30_522, 133), (28_996, 130)])
def test_parameters_of_the_papers_size(vocab_size: int, millions: int) -> None:
    with torch.device("meta"):
        model = TokenTransformer(TokenTransformerConfig(vocab_size=vocab_size, mask_id=103, length=1024))
    width, rows = 768, math.ceil(vocab_size / 64) * 64
    attention = 4 * width**2 + 2 * (width // 12)
    mlp = 2 * 4 * width**2 + 4 * width + width
    block = attention + mlp + 2 * width
    expected = vocab_size * width + 1024 * width + 12 * block + width + rows * width + rows
    count = sum(parameter.numel() for parameter in model.parameters())
    assert count == expected
    assert round(count / 1e6) == millions


def test_parameters_of_the_originals_shape() -> None:
    config = TokenTransformerConfig(
        vocab_size=50_258,
        mask_id=50_257,
        length=1024,
        positions="rotary",
        qk_norm=False,
        time_conditioning=True,
        carry_over=True,
    )
    with torch.device("meta"):
        count = sum(parameter.numel() for parameter in TokenTransformer(config).parameters())
    width, rows = 768, 50_304
    time = 256 * 128 + 128 + 128 * 128 + 128
    block = 12 * width**2 + 5 * width + 2 * width + 129 * 6 * width
    assert count == 50_258 * width + time + 12 * block + width + 129 * 2 * width + rows * width + rows
    assert round(count / 1e6) == 170


def test_the_mask_is_never_predicted() -> None:
    logits = build(TINY)(tokens())
    assert logits.shape == (2, 12, 21)
    assert (logits[..., 3] == -math.inf).all()
    others = torch.cat((logits[..., :3], logits[..., 4:]), dim=-1)
    assert others.isfinite().all()


def test_the_padded_head_has_the_same_softmax() -> None:
    model = build(TINY)
    hidden = torch.randn(5, 16)
    padded = model.padded_head(hidden)
    assert padded.shape == (5, 64)
    assert (padded[:, 21:] == -math.inf).all()
    torch.testing.assert_close(padded.log_softmax(-1)[:, :21], model.head(hidden).log_softmax(-1))


def test_head_of_rows_is_forward_at_those_rows() -> None:
    model, ids = build(TINY), tokens()
    rows = torch.tensor([0, 4, 13, 23])
    logits = model.head(model.trunk(ids).flatten(0, 1)[rows])
    torch.testing.assert_close(logits, model(ids).flatten(0, 1)[rows])


@pytest.mark.parametrize("config", [TINY, ORIGINAL], ids=["paper", "original"])
def test_sequences_do_not_see_each_other_and_shorter_ones_fit(config: TokenTransformerConfig) -> None:
    model, ids, times = build(config), tokens(3), torch.tensor([0.2, 0.5, 1.0])
    together = model(ids, times)
    torch.testing.assert_close(model(ids[1:2], times[1:2]), together[1:2], atol=1e-5, rtol=1e-5)
    assert model(ids[:, :5], times).shape == (3, 5, 21)


@pytest.mark.parametrize("config", [TINY, ORIGINAL], ids=["paper", "original"])
def test_positions_matter_in_both_directions(config: TokenTransformerConfig) -> None:
    model, ids, times = build(config), tokens(1), torch.tensor([0.5])
    before = model(ids, times)[0, 4]
    for place in (2, 9):
        changed = ids.clone()
        changed[0, place] = (changed[0, place] + 1) % 3
        assert not torch.allclose(model(changed, times)[0, 4], before, atol=1e-4)
    moved = ids.roll(1, dims=1)
    assert not torch.allclose(model(moved, times)[0, 5], before, atol=1e-4)


def test_carry_over_copies_what_is_not_masked() -> None:
    ids, times = tokens(), torch.tensor([0.3, 0.9])
    logits = build(ORIGINAL)(ids, times)
    free = build(replace(ORIGINAL, carry_over=False))(ids, times)
    hidden = ids == 3
    torch.testing.assert_close(logits[hidden], free[hidden], atol=0, rtol=0)
    probabilities = logits[~hidden].softmax(-1)
    torch.testing.assert_close(probabilities, nn.functional.one_hot(ids[~hidden], 21).float(), atol=0, rtol=0)


def test_time_is_used_where_conditioned_and_only_there() -> None:
    ids, early, late = tokens(), torch.tensor([0.1, 0.1]), torch.tensor([0.9, 0.9])
    conditioned, plain = build(replace(ORIGINAL, carry_over=False)), build(TINY)
    assert not torch.allclose(conditioned(ids, early), conditioned(ids, late), atol=1e-4)
    torch.testing.assert_close(plain(ids, early), plain(ids), atol=0, rtol=0)
    with pytest.raises(ValueError, match="t_B is None"):
        conditioned(ids)


def test_initial_weights() -> None:
    torch.manual_seed(0)
    config = TokenTransformerConfig(vocab_size=300, mask_id=0, length=64, width=96, layers=3, heads=4)
    state = TokenTransformer(config).state_dict()
    expected = {
        "tokens.weight": 0.02,
        "positions.weight": 0.02,
        "output.weight": 288**-0.5,
        "layers.1.attention.qkv.weight": 288**-0.5,
        "layers.1.attention.out.weight": (288 * 6) ** -0.5,
        "layers.2.mlp.inner.weight": 288**-0.5,
        "layers.2.mlp.outer.weight": (288 * 4 * 6) ** -0.5,
    }
    for name, deviation in expected.items():
        assert state[name].std().item() == pytest.approx(deviation, rel=0.03), name
    for name, value in state.items():
        if name.endswith("gain"):
            assert (value == 1).all(), name
        if name.endswith("bias"):
            assert (value == 0).all(), name


def test_conditioned_blocks_start_as_identities() -> None:
    torch.manual_seed(0)
    model, ids = TokenTransformer(ORIGINAL), tokens()
    torch.testing.assert_close(model.trunk(ids, torch.rand(2)), model.norm(model.tokens(ids)))


def test_initialise_restores_a_network_built_without_storage() -> None:
    with torch.device("meta"):
        model = TokenTransformer(ORIGINAL)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.initialise()
    torch.manual_seed(0)
    straight = TokenTransformer(ORIGINAL).state_dict()
    for name, value in model.state_dict().items():
        assert value.isfinite().all(), name
        assert value.std(correction=0).item() == pytest.approx(straight[name].std(correction=0).item(), rel=0.4), name
    assert not list(model.buffers())


def test_autocast_and_bfloat16_weights_stay_near_float32() -> None:
    model, ids = build(TINY).eval(), tokens()
    exact = model(ids).log_softmax(-1).exp()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = model(ids)
    assert cast.dtype == torch.bfloat16
    assert (cast.float().softmax(-1) - exact).abs().max() < 0.05
    assert (model.bfloat16()(ids).float().softmax(-1) - exact).abs().max() < 0.05


def test_longer_sequences_are_refused() -> None:
    with pytest.raises(ValueError, match="13 tokens: this model takes at most 12"):
        build(TINY)(tokens(1, 13))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"vocab_size": 1, "mask_id": 0}, "vocab_size is 1"),
        ({"mask_id": 21}, "mask_id is 21"),
        ({"mask_id": -1}, "mask_id is -1"),
        ({"length": 0}, "length is 0"),
        ({"layers": 0}, "layers is 0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"width": 17}, "width is 17"),
        ({"positions": "rotary", "width": 18}, "rotary positions need an even width"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)


def test_unknown_positions_are_refused() -> None:
    with pytest.raises((ValueError, TypeError), match="relative"):  # a TypeError where annotations are checked
        replace(TINY, positions="relative")


@pytest.mark.compile
@pytest.mark.parametrize("config", [TINY, ORIGINAL], ids=["paper", "original"])
def test_the_whole_network_is_one_graph(config: TokenTransformerConfig) -> None:
    model, ids, times = build(config), tokens(), torch.tensor([0.2, 0.7])
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(ids, times), model(ids, times), atol=1e-5, rtol=1e-5)


def test_blocks_are_the_layers_in_order() -> None:
    model = build(TINY)
    assert [id(block) for block in model.blocks()] == [id(model.layers[0]), id(model.layers[1])]
