"""The decoder: the masked language model until the latent speaks, what is read once, and where gradients go."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from diladiff.models.autoencoder import DecoderConfig, LatentDecoder
from diladiff.models.perceiver import Perceiver, PerceiverConfig
from diladiff.models.token_transformer import TokenTransformer, TokenTransformerConfig

PAPER = TokenTransformerConfig(vocab_size=21, mask_id=3, length=12, width=16, layers=3, heads=2, dropout=0.0)
ORIGINAL = replace(PAPER, positions="rotary", qk_norm=False, time_conditioning=True, carry_over=True)
MODELS = {"paper": PAPER, "original": ORIGINAL}
CROSS = DecoderConfig(model=PAPER, latent_width=6)
JOINT = replace(CROSS, attention="joint")
LITERAL = replace(CROSS, initialisation="literal")
ENCODER = PerceiverConfig(feature_width=10, length=12, latents=4, width=8, latent_width=6, heads=2, dropout=0.0)


def drawn(network: nn.Module) -> nn.Module:
    """The network with every parameter drawn anew, so that nothing hides behind a zero."""
    torch.manual_seed(1)
    for name, parameter in network.named_parameters():
        nn.init.normal_(parameter, mean=1.0 if name.endswith("gain") else 0.0, std=0.2)
    return network


def tokens(batch: int = 2) -> Tensor:
    """Some ids, masks among them."""
    ids = torch.randint(0, 21, (batch, 12), generator=torch.Generator().manual_seed(1))
    return ids.index_fill(1, torch.tensor([0, 4]), 3)


def latents(batch: int = 2) -> Tensor:
    """A latent for each sequence."""
    return torch.randn(batch, 4, 6, generator=torch.Generator().manual_seed(2))


@pytest.mark.parametrize("layers", [(0, -1), (0, 1, 2)], ids=["two", "three"])
@pytest.mark.parametrize("initialisation", ["unit", "literal"])
@pytest.mark.parametrize("shape", MODELS)
def test_untouched_it_is_the_masked_language_model_bit_for_bit(shape: str, initialisation: str, layers: tuple) -> None:
    trained = drawn(TokenTransformer(MODELS[shape]))
    config = replace(CROSS, model=MODELS[shape], initialisation=initialisation, reading_layers=layers)
    decoder, times = LatentDecoder(config), torch.tensor([0.3, 0.9])
    decoder.adopt(trained)
    expected = trained(tokens(), times)
    assert torch.equal(decoder(tokens(), latents(), times), expected)
    context = decoder.read(latents())
    assert torch.equal(decoder.trunk(tokens(), times, context), trained.trunk(tokens(), times))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert torch.equal(decoder(tokens(), latents(), times), trained(tokens(), times))
    drawn(decoder.model.layers[0].reading)
    assert not torch.allclose(decoder(tokens(), latents(), times)[0, 0, 0], expected[0, 0, 0], atol=1e-4)


@pytest.mark.parametrize("config", [CROSS, JOINT], ids=["cross", "joint"])
def test_names_of_the_masked_language_model_stay(config: DecoderConfig) -> None:
    own, names = TokenTransformer(PAPER).state_dict(), LatentDecoder(config).state_dict()
    assert {f"model.{name}" for name in own} <= set(names)
    others = {name for name in names if name.removeprefix("model.") not in own}
    assert all(name.startswith("projections.") or ".reading." in name for name in others)
    assert any(".reading." in name for name in others) == (config is CROSS)


def test_another_models_weights_are_refused_and_another_dropout_is_not() -> None:
    decoder = LatentDecoder(CROSS)
    with pytest.raises(ValueError, match="layers: 2 -> 3"):
        decoder.adopt(TokenTransformer(replace(PAPER, layers=2)))
    decoder.adopt(TokenTransformer(replace(PAPER, dropout=0.3)))


@pytest.mark.parametrize("config", [CROSS, JOINT], ids=["cross", "joint"])
def test_the_latent_is_read_once_and_used_at_every_step(config: DecoderConfig) -> None:
    decoder, calls = drawn(LatentDecoder(config)), []
    for projection in decoder.projections:
        projection.register_forward_hook(lambda *_: calls.append(1))
    context = decoder.read(latents())
    assert [told is not None for told in context] == [True, False, True]
    for shift in range(3):
        ids = tokens().roll(shift, dims=1)
        hidden = decoder.trunk(ids, None, context)
        assert len(calls) == 2
        logits = decoder.head(hidden.flatten(0, 1)).unflatten(0, ids.shape)
        torch.testing.assert_close(logits, decoder(ids, latents()), atol=0, rtol=0)
        del calls[2:]
    padded = decoder.padded_head(hidden.flatten(0, 1))
    assert torch.equal(padded[:, :21], decoder.head(hidden.flatten(0, 1)))


@pytest.mark.parametrize("shape", MODELS)
@pytest.mark.parametrize("config", [CROSS, JOINT], ids=["cross", "joint"])
def test_a_sequence_reads_its_own_latent(config: DecoderConfig, shape: str) -> None:
    decoder, times = drawn(LatentDecoder(replace(config, model=MODELS[shape]))), torch.tensor([0.3, 0.3])
    logits = decoder.trunk(tokens(), times, decoder.read(latents()))
    moved = decoder.trunk(tokens(), times, decoder.read(latents() * torch.tensor([1.0, -1.0])[:, None, None]))
    torch.testing.assert_close(moved[0], logits[0], atol=1e-6, rtol=1e-6)
    assert (moved[1] - logits[1]).abs().max() > 1e-2


def test_a_joint_decoder_told_nothing_is_the_masked_language_model() -> None:
    decoder = drawn(LatentDecoder(JOINT))
    assert torch.equal(decoder.trunk(tokens(), None, ()), decoder.model.trunk(tokens()))
    empty = decoder.read(latents()[:, :0])
    torch.testing.assert_close(decoder.trunk(tokens(), None, empty), decoder.model.trunk(tokens()), atol=0, rtol=0)


@pytest.mark.parametrize(
    ("given", "layers", "readers"),
    [((0, -1), 12, (0, 11)), ((0, 5, 11), 12, (0, 5, 11)), ((-1, 0), 1, (0,)), (tuple(range(3)), 3, (0, 1, 2))],
)
def test_layers_that_read(given: tuple, layers: int, readers: tuple) -> None:
    decoder = LatentDecoder(DecoderConfig(model=replace(PAPER, layers=layers), reading_layers=given))
    assert decoder.config.readers == readers
    assert tuple(i for i, block in enumerate(decoder.model.layers) if block.reading is not None) == readers
    assert len(decoder.blocks()) == len(readers) + layers


def received(encoder: Perceiver, decoder: LatentDecoder) -> set[str]:
    """The parameters that a loss gives a gradient other than zero, MDLM's left out."""
    ids, generator = tokens(), torch.Generator().manual_seed(3)
    logits = decoder(ids, encoder(torch.randn(2, 12, 10, generator=generator)))
    F.cross_entropy(logits.flatten(0, 1), torch.zeros(24, dtype=torch.int64)).backward()
    model = {f"decoder.model.{name}" for name, _ in TokenTransformer(PAPER).named_parameters()}
    both = nn.ModuleDict({"encoder": encoder, "decoder": decoder})
    found = {name for name, p in both.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert model <= found
    return found - model


@pytest.mark.parametrize("config", [CROSS, LITERAL], ids=["unit", "literal"])
def test_gradients_at_the_start_and_once_the_outer_convolution_has_moved(config: DecoderConfig) -> None:
    torch.manual_seed(0)
    encoder, decoder = Perceiver(ENCODER), LatentDecoder(config)
    readings = [f"decoder.model.layers.{layer}.reading." for layer in (0, 2)]
    outer = {f"{reading}outer.{part}" for reading in readings for part in ("weight", "bias")}
    assert received(encoder, decoder) == outer
    for layer in (0, 2):
        nn.init.normal_(decoder.model.layers[layer].reading.outer.weight)
    decoder.zero_grad()
    later = received(encoder, decoder)
    new = {f"encoder.{name}" for name, _ in encoder.named_parameters()} | {
        f"decoder.{name}"
        for name, _ in decoder.named_parameters()
        if name.startswith("projections.") or ".reading." in name
    }
    if config is CROSS:
        assert later == new
        return
    # A query of zero asks all latents alike: values learn, and the inner convolution, but nothing that shapes queries
    # and keys.
    blind = {f"{reading}{part}" for reading in readings for part in ("norm.gain", "attention.q.weight")}
    blind |= {f"{reading}attention.q_norm.gain" for reading in readings}
    blind |= {f"decoder.projections.{i}.project.k_norm.gain" for i in (0, 1)}
    assert later == new - blind
    for projection in decoder.projections:
        k_grad, v_grad = projection.project.kv.weight.grad.chunk(2)
        assert (k_grad == 0).all()
        assert (v_grad != 0).any()


def test_joint_attention_gives_the_encoder_gradients_from_the_start() -> None:
    torch.manual_seed(0)
    encoder, decoder = Perceiver(ENCODER), LatentDecoder(JOINT)
    names = {f"encoder.{name}" for name, _ in encoder.named_parameters()}
    assert received(encoder, decoder) == names | {
        f"decoder.projections.{name}" for name, _ in decoder.projections.named_parameters()
    }


def test_parameters_of_the_papers_sizes() -> None:
    model = TokenTransformerConfig(vocab_size=30_522, mask_id=103, length=1024)
    counts = {}
    with torch.device("meta"):
        bare = sum(parameter.numel() for parameter in TokenTransformer(model).parameters())
        for layers, attention in (((0, -1), "cross"), ((0, 5, 11), "cross"), (tuple(range(12)), "joint")):
            decoder = DecoderConfig(model=model, reading_layers=layers, attention=attention).build()
            counts[len(layers)] = sum(parameter.numel() for parameter in decoder.parameters()) - bare
    width = 768
    projection = 2 * width**2 + width + width // 12
    reading = 4 * width**2 + 2 * width + width + width // 12
    assert counts == {2: 2 * (projection + reading), 3: 3 * (projection + reading), 12: 12 * projection}
    assert [round(count / 1e6, 1) for count in counts.values()] == [7.1, 10.6, 14.2]


@pytest.mark.parametrize("config", [CROSS, LITERAL, JOINT], ids=["unit", "literal", "joint"])
def test_initialise_restores_a_network_built_without_storage(config: DecoderConfig) -> None:
    with torch.device("meta"):
        decoder = LatentDecoder(config)
    decoder.to_empty(device="cpu")
    torch.manual_seed(0)
    decoder.initialise()
    for name, value in decoder.state_dict().items():
        assert value.isfinite().all(), name
        if ".reading.inner.weight" in name:
            assert torch.equal(value, torch.eye(16) if config is CROSS else torch.zeros(16, 16))
        elif name.endswith("bias") or ".reading.outer" in name:
            assert (value == 0).all(), name
        elif name.endswith("gain"):
            assert (value == 1).all(), name
        else:
            assert value.std() > 0.01, name
    assert not list(decoder.buffers())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latent_width": 0}, "latent_width is 0"),
        ({"reading_layers": ()}, "reading_layers is empty"),
        ({"reading_layers": (3,)}, "reading_layers has 3: the model has layers 0 to 2"),
        ({"reading_layers": (-4,)}, "reading_layers has -4"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(CROSS, **changes)


@pytest.mark.parametrize("field", ["attention", "initialisation"])
def test_unknown_choices_are_refused(field: str) -> None:
    with pytest.raises((ValueError, TypeError), match="sideways"):  # a TypeError where annotations are checked
        replace(CROSS, **{field: "sideways"})
