"""The latents' denoiser: size, long skips, self-conditioning, the student's additions, derivatives, compilation."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from diladiff.config import from_dict, to_dict
from diladiff.models.latent_transformer import LatentTransformer, LatentTransformerConfig, student
from diladiff.nn.attention import KeysValues
from tests.models.small_latents import FLOW, POST, PRINTED, SHAPES, TIMES, TINY, build, latents, naive

# torch's own forward-mode rules are still scripted.
forward_mode = pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")

shapes = pytest.mark.parametrize("config", SHAPES.values(), ids=SHAPES.keys())


def test_parameters_of_the_papers_size() -> None:
    config = LatentTransformerConfig(latents=512, latent_width=768)
    with torch.device("meta"):
        printed = LatentTransformer(replace(config, norm="post"))
        flow = LatentTransformer(replace(config, span=True))
    width = 768
    block = 12 * width**2 + 5 * width + 2 * width + 2 * width**2 + width  # attention, MLP, norms, time and self-cond.
    time = 4 * width**2 + 3 * width
    expected = 12 * block + time + 512 * width
    projections = 2 * (width**2 + width) + width
    assert sum(parameter.numel() for parameter in printed.parameters()) == expected
    assert sum(parameter.numel() for parameter in flow.parameters()) == expected + projections + time
    assert expected == pytest.approx(101.6e6, rel=0.005)  # the cited network's size


@shapes
def test_shapes_and_independence_of_sequences(config: LatentTransformerConfig) -> None:
    model, z = build(config), latents(config)
    together = model(z, TIMES)
    assert together.shape == z.shape
    torch.testing.assert_close(model(z[1:2], TIMES[1:2]), together[1:2], atol=1e-5, rtol=1e-5)
    assert model(z[:, :3], TIMES).shape == (3, 3, config.latent_width)


@pytest.mark.parametrize("config", [TINY, POST, PRINTED, replace(TINY, layers=2)], ids=["pre", "post", "printed", "2"])
@pytest.mark.parametrize("told", [True, False])
def test_the_network_is_the_naive_one(config: LatentTransformerConfig, *, told: bool) -> None:
    model, z = build(config).double(), latents(config).double()
    selfcond = latents(config, seed=2).double() if told else None
    expected = naive(model, z, TIMES.double(), selfcond)
    torch.testing.assert_close(model(z, TIMES.double(), selfcond), expected, atol=1e-11, rtol=1e-11)


@shapes
def test_positions_and_every_other_latent_matter(config: LatentTransformerConfig) -> None:
    model, z = build(config), latents(config, batch=1)
    before = model(z, TIMES[:1])[0, 2]
    for place in (0, 4):
        changed = z.clone()
        changed[0, place] += 1
        assert not torch.allclose(model(changed, TIMES[:1])[0, 2], before, atol=1e-4)
    assert not torch.allclose(model(z.roll(1, dims=1), TIMES[:1])[0, 3], before, atol=1e-4)
    assert not torch.allclose(model(z, TIMES[1:2])[0, 2], before, atol=1e-4)


@shapes
def test_zero_self_conditioning_is_none(config: LatentTransformerConfig) -> None:
    model, z = build(config), latents(config)
    none = model(z, TIMES)
    torch.testing.assert_close(model(z, TIMES, torch.zeros_like(z)), none, atol=0, rtol=0)
    assert not torch.allclose(model(z, TIMES, latents(config, seed=2)), none, atol=1e-3)


def test_zeros_leave_no_parameter_without_a_gradient() -> None:
    model, z = build(TINY), latents(TINY)
    model(z, TIMES).square().sum().backward()
    bare = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert bare == {f"layers.{number}.selfcond.weight" for number in range(4)}
    model.zero_grad()
    model(z, TIMES, torch.zeros_like(z)).square().sum().backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


def test_a_network_without_self_conditioning() -> None:
    config = replace(TINY, self_conditioning=False)
    model, z = build(config), latents(config)
    assert not [name for name in model.state_dict() if "selfcond" in name]
    with pytest.raises(ValueError, match="without self-conditioning"):
        model(z, TIMES, z)


@pytest.mark.parametrize("config", [TINY, PRINTED], ids=["pre", "printed"])
@pytest.mark.parametrize("second_head", [True, False])
def test_the_student_starts_at_the_teacher(config: LatentTransformerConfig, *, second_head: bool) -> None:
    teacher = build(replace(config, dropout=0.3))
    pupil, z, selfcond = student(teacher, second_head=second_head), latents(config), latents(config, seed=2)
    teacher.eval()
    assert pupil.training  # and yet without dropout
    for r in (TIMES, torch.tensor([0.0, 0.4, 0.1])):
        raw = pupil(z, TIMES, selfcond, r)
        torch.testing.assert_close(raw, teacher(z, TIMES, selfcond), atol=0, rtol=0)
        if second_head:
            torch.testing.assert_close(pupil.both(z, TIMES, selfcond, r), (raw, raw), atol=0, rtol=0)
    assert {id(p) for p in pupil.parameters()}.isdisjoint({id(p) for p in teacher.parameters()})


def test_the_literal_student_starts_elsewhere() -> None:
    teacher, z = build(TINY), latents(TINY)
    pupil = student(teacher, literal=True)
    r = torch.zeros(3)
    assert not torch.allclose(pupil(z, TIMES, r_B=r), teacher(z, TIMES), atol=1e-3)
    assert pupil.span is not None
    assert pupil.span.outer.weight.std().item() == pytest.approx(96**-0.5, rel=0.1)


def test_the_student_learns_to_read_the_span() -> None:
    teacher = build(TINY).double()
    pupil, z, r = student(teacher), latents(TINY).double(), torch.zeros(3, dtype=torch.float64)
    assert next(pupil.parameters()).dtype == torch.float64
    pupil(z, TIMES.double(), r_B=r).square().sum().backward()
    assert pupil.span is not None
    assert pupil.span.outer.weight.grad is not None
    assert pupil.span.outer.weight.grad.abs().max() > 0
    with torch.no_grad():
        pupil.span.outer.weight.sub_(0.1 * pupil.span.outer.weight.grad.sign())
    assert not torch.allclose(pupil(z, TIMES.double(), r_B=r), pupil(z, TIMES.double(), r_B=r + 0.1), atol=1e-4)


def test_the_span_is_t_minus_r() -> None:
    model, z = build(FLOW).double(), latents(FLOW).double()
    assert model.span is not None
    t, r = TIMES.double(), torch.tensor([0.2, 0.1, 0.4], dtype=torch.float64)
    plain = build(replace(FLOW, span=False)).double()
    plain.load_state_dict({name: value for name, value in model.state_dict().items() if not name.startswith("span.")})
    spans = model.span(t - r)
    plain.time.register_forward_hook(lambda module, inputs, output: output + spans)
    torch.testing.assert_close(model(z, t, r_B=r), plain(z, t), atol=1e-12, rtol=1e-12)


def test_the_second_head_is_the_last_mlp_and_readout_again() -> None:
    model, z = build(replace(TINY, second_head=True)), latents(TINY)
    first, second = model.both(z, TIMES)
    torch.testing.assert_close(first, model(z, TIMES), atol=0, rtol=0)
    assert not torch.allclose(first, second, atol=1e-3)
    names = {name for name in model.state_dict() if ".twin." in name or name.startswith("second_readout.")}
    assert {name.split(".")[1] for name in names if ".twin." in name} == {"3"}
    second.square().sum().backward()
    without = {name for name, parameter in model.named_parameters() if parameter.grad is None}
    assert not without & names
    assert "layers.3.feed.mlp.inner.weight" in without
    assert "layers.3.attention.qkv.weight" not in without


def keys_values(config: LatentTransformerConfig, count: int, *, seed: int) -> KeysValues:
    generator = torch.Generator().manual_seed(seed)
    shape = (3, config.heads, count, config.width // config.heads)
    return KeysValues(*(torch.randn(shape, generator=generator, requires_grad=True) for _ in range(2)))


@shapes
def test_no_extra_keys_and_values_are_empty_ones(config: LatentTransformerConfig) -> None:
    model, z = build(config), latents(config)
    none = model(z, TIMES)
    empty = tuple(keys_values(config, 0, seed=0) for _ in range(config.layers))
    torch.testing.assert_close(model(z, TIMES, extra=empty), none, atol=0, rtol=0)
    torch.testing.assert_close(model(z, TIMES, extra=(None,) * config.layers), none, atol=0, rtol=0)
    with pytest.raises(ValueError, match="argument"):
        model(z, TIMES, extra=(None,))


@shapes
def test_extra_keys_and_values_are_read_and_get_gradients(config: LatentTransformerConfig) -> None:
    model, z = build(config), latents(config)
    given = keys_values(config, 2, seed=3)
    extra = (None, given, None, keys_values(config, 1, seed=4))
    told = model(z, TIMES, extra=extra)
    assert not torch.allclose(told, model(z, TIMES), atol=1e-3)
    told.square().sum().backward()
    for part in (*given, *extra[3]):
        assert part.grad is not None
        assert (part.grad.abs().amax(dim=(1, 3)) > 0).all()  # every sequence's and every position's


def velocity(config: LatentTransformerConfig, model: LatentTransformer) -> Callable[..., Tensor]:
    """The network as a function of (z, t, r), or of (z, t) where it knows no r."""
    selfcond = latents(config, seed=2).to(model.positions.weight.dtype)
    if config.span:
        return lambda z, t, r: model(z, t, selfcond, r)
    return lambda z, t: model(z, t, selfcond)


@forward_mode
@pytest.mark.parametrize("config", [PRINTED, FLOW, replace(FLOW, norm="post")], ids=["printed", "flow", "flow post"])
def test_forward_mode_derivatives_are_finite_differences(config: LatentTransformerConfig) -> None:
    model = build(config).double()
    network = velocity(config, model)
    names = ("z", "t", "r") if config.span else ("z", "t")
    t, r = TIMES.double(), torch.tensor([0.2, 0.1, 0.4], dtype=torch.float64)  # the first pair has r = t
    point = (latents(config).double(), t, r)[: len(names)]
    directions = (latents(config, seed=5).double(), torch.ones_like(t), torch.ones_like(r))
    single = build(config)
    for number, name in enumerate(names):
        tangents = tuple(d if i == number else torch.zeros_like(d) for i, d in enumerate(directions[: len(names)]))
        with sdpa_kernel(SDPBackend.MATH):
            _, derivative = torch.func.jvp(network, point, tangents)
            lower = [tuple(part.float() for part in parts) for parts in (point, tangents)]
            _, float32 = torch.func.jvp(velocity(config, single), *lower)
        step = 1e-5
        ahead, behind = (network(*(p + s * d for p, d in zip(point, tangents, strict=True))) for s in (step, -step))
        torch.testing.assert_close(derivative, (ahead - behind) / (2 * step), atol=1e-8, rtol=1e-7, msg=name)
        assert (float32 - derivative).norm() < 2e-5 * derivative.norm(), name
        assert derivative.norm() > 1e-2, name


@forward_mode
@pytest.mark.compile
def test_a_compiled_derivative_with_its_tangent_detached() -> None:
    model, z, r = build(replace(FLOW, layers=2)), latents(FLOW), torch.tensor([0.2, 0.1, 0.4])
    direction, ones, zeros = latents(FLOW, seed=5), torch.ones(3), torch.zeros(3)
    network = velocity(FLOW, model)

    def derive(z: Tensor, t: Tensor, r: Tensor) -> tuple[Tensor, Tensor]:
        value, tangent = torch.func.jvp(network, (z, t, r), (direction, ones, zeros))
        return value, tangent.detach()  # a live one crashes the compiler

    def gradients(function: Callable[..., tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor, list[Tensor]]:
        model.zero_grad()
        with sdpa_kernel(SDPBackend.MATH):
            value, tangent = function(z, TIMES, r)
            (value + 0.1 * tangent).square().sum().backward()
        return value, tangent, [p.grad.clone() for p in model.parameters() if p.grad is not None]

    expected = gradients(derive)
    found = gradients(torch.compile(derive, fullgraph=True, backend="aot_eager"))
    assert len(found[2]) == len(list(model.parameters()))
    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)


@pytest.mark.compile
@pytest.mark.parametrize("config", [replace(FLOW, layers=2), replace(PRINTED, layers=2)], ids=["flow", "printed"])
def test_the_whole_network_is_one_graph(config: LatentTransformerConfig) -> None:
    model, z = build(config), latents(config)
    r = torch.tensor([0.2, 0.1, 0.4]) if config.span else None
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=config.span):
        found, expected = compiled(z, TIMES, z, r), model(z, TIMES, z, r)
    torch.testing.assert_close(found, expected, atol=0.05 if config.span else 1e-5, rtol=0.05 if config.span else 1e-5)


@shapes
def test_autocast_and_bfloat16_weights_stay_near_float32(config: LatentTransformerConfig) -> None:
    torch.manual_seed(0)
    model, z = LatentTransformer(config), latents(config)
    exact = model(z, TIMES, z)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = model(z, TIMES, z)
    assert (cast.float() - exact).norm() < 0.02 * exact.norm()
    rounded = model.bfloat16()(z.bfloat16(), TIMES, z.bfloat16())
    assert rounded.dtype == torch.bfloat16
    assert (rounded.float() - exact).norm() < 0.05 * exact.norm()


def test_initial_weights() -> None:
    torch.manual_seed(0)
    config = LatentTransformerConfig(latents=64, latent_width=32, width=96, layers=4, heads=4, span=True)
    expected = {
        "input.weight": 96**-0.5,
        "positions.weight": 0.02,
        "time.inner.weight": 288**-0.5,
        "span.inner.weight": 288**-0.5,
        "span.outer.weight": 0.0,
        "layers.1.selfcond.weight": 96**-0.5,
        "layers.2.time.linear.weight": 288**-0.5,
        "layers.3.attention.out.weight": (288 * 8) ** -0.5,
        "layers.3.feed.mlp.outer.weight": (288 * 4 * 8) ** -0.5,
        "readout.output.weight": 288**-0.5,
    }
    state = LatentTransformer(config).state_dict()
    for name, deviation in expected.items():
        assert state[name].std().item() == pytest.approx(deviation, rel=0.04), name
    post = LatentTransformer(replace(config, norm="post", second_head=True)).state_dict()
    assert post["layers.3.feed.mlp.outer.weight"].std().item() == pytest.approx((288 * 4) ** -0.5, rel=0.04)
    twin = LatentTransformer(replace(config, second_head=True)).state_dict()["layers.3.twin.mlp.outer.weight"]
    assert twin.std().item() == pytest.approx((288 * 4 * 8) ** -0.5, rel=0.04)
    for name, value in state.items():
        if name.endswith("gain"):
            assert (value == 1).all(), name
        if name.endswith("bias"):
            assert (value == 0).all(), name


def test_initialise_restores_a_network_built_without_storage() -> None:
    config = replace(FLOW, second_head=True)
    with torch.device("meta"):
        model = LatentTransformer(config)
    model.to_empty(device="cpu")
    torch.manual_seed(0)
    model.initialise()
    straight = LatentTransformer(config)
    torch.manual_seed(0)
    straight.initialise()
    for name, value in straight.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value, atol=0, rtol=0, msg=name)
    assert not list(model.buffers())


def test_dropout_is_for_training_alone() -> None:
    model, z = build(replace(TINY, dropout=0.5, second_head=True)), latents(TINY)
    assert not torch.allclose(model(z, TIMES), model(z, TIMES), atol=1e-3)
    model.eval()
    torch.testing.assert_close(model(z, TIMES), model(z, TIMES), atol=0, rtol=0)


def test_wrong_calls_are_refused() -> None:
    model, flow, z = build(TINY), build(FLOW), latents(TINY)
    with pytest.raises(ValueError, match="6 latents: this model takes at most 5"):
        model(torch.zeros(3, 6, 6), TIMES)
    with pytest.raises(ValueError, match="r_B is given"):
        model(z, TIMES, r_B=TIMES)
    with pytest.raises(ValueError, match="r_B is None"):
        flow(z, TIMES)
    with pytest.raises(ValueError, match="second_head is False"):
        model.both(z, TIMES)
    with pytest.raises(ValueError, match="a flow map's network itself"):
        student(flow)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"latents": 0}, "latents is 0"),
        ({"latent_width": 0}, "latent_width is 0"),
        ({"layers": 3}, "layers is 3: give an even number"),
        ({"dropout": 1.0}, "dropout is 1.0"),
        ({"width": 15}, "width is 15: give a multiple of heads"),
        ({"width": 15, "heads": 3}, "width is 15: give an even number"),
    ],
)
def test_impossible_shapes_are_refused(changes: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        replace(TINY, **changes)


def test_unknown_norms_are_refused() -> None:
    with pytest.raises((ValueError, TypeError), match="sandwich"):  # a TypeError where annotations are checked
        replace(TINY, norm="sandwich")


def test_the_configuration_survives_json_and_builds() -> None:
    config = replace(POST, span=True, second_head=True)
    assert from_dict(LatentTransformerConfig, to_dict(config)) == config
    model = config.build()
    assert [id(block) for block in model.blocks()] == [id(block) for block in model.layers]
