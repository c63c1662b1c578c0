"""The encoder: its formula, what it may read, its size by arithmetic and its two initialisations."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from diladiff.models.perceiver import Perceiver, PerceiverConfig

TINY = PerceiverConfig(feature_width=16, length=12, latents=4, width=16, latent_width=16, heads=2, dropout=0.0)
LITERAL = replace(TINY, initialisation="literal")
OTHER_WIDTHS = replace(TINY, feature_width=10, latent_width=6)


def build(config: PerceiverConfig) -> Perceiver:
    """A network with every parameter drawn anew, so that nothing hides behind a small start."""
    torch.manual_seed(0)
    network = Perceiver(config)
    for name, parameter in network.named_parameters():
        nn.init.normal_(parameter, mean=1.0 if name.endswith("gain") else 0.0, std=0.3)
    return network


def norm(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """LayerNorm without a bias."""
    return F.layer_norm(x, x.shape[-1:], eps=1e-5) * gain


def rms(x: torch.Tensor, gain: torch.Tensor) -> torch.Tensor:
    """RMSNorm of each head."""
    return x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain


def test_the_literal_encoder_is_the_formula() -> None:
    network = build(replace(LITERAL, layers=2)).double()
    features = torch.randn(2, 9, 16).double()
    state = network.state_dict()
    latents = state["latents"].expand(2, -1, -1)
    for index in range(2):
        weights = {name.removeprefix(f"layers.{index}."): value for name, value in state.items()}
        own = norm(latents, weights["latents_norm.gain"])
        read = torch.cat((norm(features, weights["features_norm.gain"]), own), dim=1)
        keys, values = (
            torch.einsum("bnd,ed->bne", read, weights["context.kv.weight"]).unflatten(-1, (2, 2, 8)).unbind(2)
        )
        queries = torch.einsum("bkd,ed->bke", own, weights["attention.q.weight"]).unflatten(-1, (2, 8))
        queries = rms(queries, weights["attention.q_norm.gain"])
        keys = rms(keys, weights["context.k_norm.gain"])
        weight = (torch.einsum("bkhe,bnhe->bhkn", queries, keys) / math.sqrt(8)).softmax(-1)
        mixed = torch.einsum("bhkn,bnhe->bkhe", weight, values).flatten(2)
        latents = latents + mixed @ weights["attention.out.weight"].T
        hidden = norm(latents, weights["mlp_norm.gain"]) @ weights["mlp.inner.weight"].T + weights["mlp.inner.bias"]
        hidden = F.gelu(hidden, approximate="tanh") @ weights["mlp.outer.weight"].T + weights["mlp.outer.bias"]
        latents = latents + hidden
    torch.testing.assert_close(network(features), latents, atol=1e-12, rtol=1e-12)


def test_the_default_adds_positions_and_ends_at_unit_variance() -> None:
    features = torch.randn(2, 9, 16)
    literal = build(LITERAL)
    network = Perceiver(TINY)
    network.load_state_dict(literal.state_dict())
    frequencies = 12.0 ** (-torch.arange(8) / 8)
    angles = torch.arange(9)[:, None] * frequencies
    code = torch.cat((angles.cos(), angles.sin()), dim=-1)
    expected = F.layer_norm(literal(features + code), (16,))
    torch.testing.assert_close(network(features), expected)
    torch.testing.assert_close(expected.square().mean(-1), torch.ones(2, 4), atol=1e-3, rtol=0)


@pytest.mark.parametrize("config", [TINY, LITERAL, OTHER_WIDTHS], ids=["unit", "literal", "other_widths"])
def test_masked_features_are_not_read(config: PerceiverConfig) -> None:
    network, features = build(config), torch.randn(2, 12, config.feature_width)
    mask = torch.arange(12) < torch.tensor([[7], [12]])
    latents = network(features, mask)
    assert latents.shape == (2, 4, config.latent_width)
    torch.testing.assert_close(latents[:1], network(features[:1, :7]), atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(latents[1:], network(features[1:]), atol=1e-5, rtol=1e-5)
    assert not torch.allclose(latents[:1], network(features[:1]), atol=1e-3)
    assert network(features, torch.zeros_like(mask)).isfinite().all()


@pytest.mark.parametrize("config", [TINY, OTHER_WIDTHS], ids=["unit", "other_widths"])
def test_gradients_reach_every_parameter_and_feature(config: PerceiverConfig) -> None:
    torch.manual_seed(0)
    network, features = Perceiver(config), torch.randn(2, 12, config.feature_width, requires_grad=True)
    (network(features) * torch.randn(2, 4, config.latent_width)).sum().backward()
    assert all(parameter.grad.abs().max() > 0 for parameter in network.parameters())
    assert (features.grad.abs().sum(-1) > 0).all()


def test_more_features_than_the_encoder_takes_are_refused() -> None:
    with pytest.raises(ValueError, match="13 features: this encoder takes at most 12"):
        build(TINY)(torch.randn(1, 13, 16))


@pytest.mark.parametrize(
    ("layers", "compression", "millions"), [(2, 2, 14.6), (6, 2, 42.9), (2, 32, 14.2), (2, 1, 15.0)]
)
def test_parameters_of_the_papers_sizes(layers: int, compression: int, millions: float) -> None:
    latents, width = 1024 // compression, 768
    with torch.device("meta"):
        network = PerceiverConfig(feature_width=width, length=1024, latents=latents, layers=layers).build()
    attention = 4 * width**2 + 2 * (width // 12)
    mlp = 2 * 4 * width**2 + 4 * width + width
    count = sum(parameter.numel() for parameter in network.parameters())
    assert count == latents * width + layers * (attention + mlp + 3 * width)
    assert round(count / 1e6, 1) == millions
    assert len(network.blocks()) == layers


def test_a_bottleneck_costs_one_matrix() -> None:
    counts = [sum(p.numel() for p in Perceiver(config).parameters()) for config in (TINY, OTHER_WIDTHS)]
    assert counts[1] - counts[0] == 10 * 16 + 16 * 6


def test_literal_weights() -> None:
    torch.manual_seed(0)
    config = PerceiverConfig(feature_width=96, length=64, latents=64, width=96, latent_width=96, heads=4)
    state = Perceiver(replace(config, initialisation="literal")).state_dict()
    for name, value in state.items():
        if name == "latents" or (name.endswith("weight")):
            assert value.std().item() == pytest.approx(0.02, rel=0.03), name


def test_default_weights_keep_the_variance_and_place_the_latents() -> None:
    torch.manual_seed(0)
    config = PerceiverConfig(feature_width=96, length=64, latents=16, width=96, latent_width=96, heads=4)
    network = Perceiver(config)
    for name, value in network.state_dict().items():
        if name.endswith("weight"):
            assert value.std().item() == pytest.approx(value.shape[1] ** -0.5, rel=0.03), name
    shape_of_one_each = Perceiver(replace(config, latents=64)).latents
    likeness = network.latents @ shape_of_one_each.T
    # Latent k stands between the second and the third of the four features of its share.
    nearest = likeness.topk(2).indices.sort().values
    torch.testing.assert_close(nearest, torch.arange(16)[:, None] * 4 + torch.tensor([1, 2]))


@pytest.mark.parametrize("config", [TINY, LITERAL], ids=["unit", "literal"])
def test_initialise_restores_a_network_built_without_storage(config: PerceiverConfig) -> None:
    with torch.device("meta"):
        network = Perceiver(config)
    network.to_empty(device="cpu")
    torch.manual_seed(0)
    network.initialise()
    torch.manual_seed(0)
    straight = Perceiver(config).state_dict()
    for name, value in network.state_dict().items():
        assert value.isfinite().all(), name
        assert value.std(correction=0).item() == pytest.approx(straight[name].std(correction=0).item(), rel=0.4), name
    assert not list(network.buffers())


def test_dropout_acts_in_training_alone() -> None:
    network, features = build(replace(TINY, dropout=0.5)), torch.randn(2, 12, 16)
    assert not torch.equal(network(features), network(features))
    network.eval()
    torch.testing.assert_close(network(features), network(features), atol=0, rtol=0)


def test_autocast_and_bfloat16_weights_stay_near_float32() -> None:
    torch.manual_seed(0)
    network, features = Perceiver(TINY).eval(), torch.randn(2, 12, 16)
    exact = network(features)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert (network(features).float() - exact).abs().max() < 0.1
    low = network.bfloat16()(features.bfloat16())
    assert low.dtype == torch.bfloat16
    assert (low.float() - exact).abs().max() < 0.1


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latents": 0}, "latents is 0"),
        ({"latent_width": 0}, "latent_width is 0"),
        ({"length": 0}, "length is 0"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"width": 18, "heads": 4}, "width is 18: give a multiple of heads"),
        ({"width": 15, "heads": 5}, "positions need an even width"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)


def test_unknown_initialisations_are_refused() -> None:
    with pytest.raises((ValueError, TypeError), match="orthogonal"):  # a TypeError where annotations are checked
        replace(TINY, initialisation="orthogonal")


@pytest.mark.compile
def test_the_encoder_is_one_graph() -> None:
    network, features = build(replace(TINY, layers=1)), torch.randn(2, 12, 16)
    mask = torch.arange(12) < torch.tensor([[7], [12]])
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(features, mask), network(features, mask), atol=1e-5, rtol=1e-5)
