"""The masked objective: against a dense reference, split any way, where its gradients go, what it refuses."""

import itertools
import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from diladiff import rng
from diladiff.config import from_json, to_json
from diladiff.models.token_transformer import TokenTransformerConfig
from diladiff.objectives.base import Batch, Step
from diladiff.objectives.masked import MaskedConfig, MaskedObjective
from diladiff.processes.masked import masked_rows_bound
from diladiff.processes.schedules import MASK_SCHEDULES, mask_schedule
from diladiff.processes.times import bit_reverse

MODEL = TokenTransformerConfig(vocab_size=21, mask_id=3, length=12, width=16, layers=2, heads=2, dropout=0.0)
ORIGINAL = replace(MODEL, positions="rotary", qk_norm=False, time_conditioning=True, carry_over=True)
FLAT = MaskedConfig(model=MODEL)


def build(config: MaskedConfig) -> MaskedObjective:
    """An objective with every parameter drawn, so that nothing hides behind a zero."""
    torch.manual_seed(0)
    objective = config.build()
    for name, parameter in objective.named_parameters():
        nn.init.normal_(parameter, mean=1.0 if name.endswith("gain") else 0.0, std=0.2)
    return objective


def batch(size: int = 8, *, length: int = 12, seed: int = 1) -> Batch:
    """A whole global batch of tokens, none of them the mask."""
    ids = torch.randint(4, 21, (size, length), generator=torch.Generator().manual_seed(seed))
    return Batch(ids, torch.arange(size), size)


def step(number: int = 5, *, seed: int = 0) -> Step:
    """A step."""
    return Step(seed, torch.tensor(number))


def rows(whole: Batch, start: int, stop: int) -> Batch:
    """A run of a global batch."""
    return Batch(whole.tokens_BL[start:stop], whole.index_B[start:stop], whole.size)


@torch.no_grad()
def dense(objective: MaskedObjective, whole: Batch, at: Step) -> tuple[float, int, int]:
    """Loss, correct and masked counts from full logits and a boolean mask, in float64."""
    config, schedule = objective.config, mask_schedule(objective.config.schedule)
    tokens, index, size = whole
    u = rng.uniform(at.seed, rng.Stream.TIME, at.number, torch.tensor([0]), 1).item()
    bits = size.bit_length() - 1
    t = torch.tensor([(u + int(bit_reverse(i, bits))) / size for i in index])
    noise = rng.uniform(at.seed, rng.Stream.MASK, at.number, index, tokens.shape[1])
    hidden = noise < 1 - schedule.alpha(t)[:, None]
    logits = objective.model(torch.where(hidden, config.model.mask_id, tokens), t).double()
    losses = -logits.log_softmax(-1).gather(-1, tokens[..., None])[..., 0]
    weight = torch.ones_like(t)
    if config.weight == "elbo":
        safe = t.clamp(min=1e-3)
        weight = -schedule.alpha_prime(safe) / (1 - schedule.alpha(safe))
    correct = (logits.argmax(-1) == tokens) & hidden
    return float((losses * weight[:, None])[hidden].sum()), int(correct.sum()), int(hidden.sum())


@pytest.mark.parametrize("schedule", MASK_SCHEDULES)
@pytest.mark.parametrize("weight", ["flat", "elbo"])
@pytest.mark.parametrize("model", [MODEL, ORIGINAL], ids=["paper", "original"])
def test_loss_is_the_dense_one(model: TokenTransformerConfig, weight: str, schedule: str) -> None:
    config = replace(MaskedConfig(model=model), weight=weight, schedule=schedule)
    objective = build(from_json(MaskedConfig, to_json(config)))
    for seed in range(3):
        whole, at = batch(seed=seed), step(seed, seed=seed)
        total, count, metrics = objective(whole, at)
        expected, correct, hidden = dense(objective, whole, at)
        assert total.item() == pytest.approx(expected, rel=1e-6)
        assert count.item() == whole.tokens_BL.numel()
        assert [value.item() for value in metrics["accuracy"]] == [correct, hidden]
        assert metrics["loss"][0].item() == total.item()
        assert not metrics["loss"][0].requires_grad


def test_steps_and_seeds_draw_differently() -> None:
    objective, whole = build(FLAT), batch()
    losses = {objective(whole, step(number, seed=seed)).total.item() for number in range(3) for seed in range(3)}
    assert len(losses) == 9


@pytest.mark.parametrize("config", [FLAT, MaskedConfig(model=ORIGINAL, weight="elbo")], ids=["paper", "original"])
@pytest.mark.parametrize("cuts", [(8, 8), (2,) * 8, (1,) * 16, (8, 4, 2, 2)], ids=["halves", "2s", "1s", "unequal"])
def test_a_global_batch_is_the_sum_of_its_parts(config: MaskedConfig, cuts: tuple[int, ...]) -> None:
    objective, whole = build(config).double(), batch(16)
    one = objective(whole, step())
    one.total.backward()
    gradients = {name: parameter.grad for name, parameter in objective.named_parameters()}
    objective.zero_grad(set_to_none=True)
    ends = list(itertools.accumulate(cuts))
    parts = [objective(rows(whole, end - cut, end), step()) for end, cut in zip(ends, cuts, strict=True)]
    total = sum(part.total for part in parts)
    assert isinstance(total, Tensor)
    total.backward()
    torch.testing.assert_close(total, one.total, rtol=1e-12, atol=0)
    assert sum(part.weight.item() for part in parts) == one.weight.item()
    assert sum(part.metrics["accuracy"][1].item() for part in parts) == one.metrics["accuracy"][1].item()
    for name, parameter in objective.named_parameters():
        expected = gradients[name]
        assert parameter.grad is not None
        assert expected is not None
        assert (parameter.grad - expected).norm() <= 1e-12 * expected.norm(), name


@pytest.mark.parametrize("config", [FLAT, MaskedConfig(model=ORIGINAL)], ids=["paper", "original"])
def test_gradients_are_exactly_where_they_belong(config: MaskedConfig) -> None:
    objective = build(config)
    tokens = torch.randint(4, 15, (8, 12), generator=torch.Generator().manual_seed(0))
    objective(Batch(tokens, torch.arange(8), 8), step()).total.backward()
    for name, parameter in objective.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all(), name
        assert parameter.grad.abs().max() > 0, name
    embedding, head = objective.model.tokens.weight.grad, objective.model.output
    assert embedding is not None
    assert embedding[3].abs().max() > 0
    assert embedding[:3].abs().max() == 0
    assert embedding[15:].abs().max() == 0
    assert head.weight.grad is not None
    assert head.bias.grad is not None
    never = [3, *range(21, 64)]
    assert head.weight.grad[never].abs().max() == 0
    assert head.bias.grad[never].abs().max() == 0
    assert head.bias.grad[[0, 4, 20]].abs().min() > 0


def test_the_heads_row_of_the_mask_does_not_matter() -> None:
    objective = build(FLAT)
    before = objective(batch(), step()).total
    with torch.no_grad():
        objective.model.output.weight[3] += 10
        objective.model.output.bias[3] += 10
    torch.testing.assert_close(objective(batch(), step()).total, before, rtol=0, atol=0)


def test_more_masks_than_rows_make_the_loss_infinite() -> None:
    objective = build(replace(FLAT, model=replace(MODEL, length=64)))
    whole = batch(64, length=64)
    late = (bit_reverse(torch.arange(64), 6) >= 56).nonzero()[:, 0]
    overflowing = objective(Batch(whole.tokens_BL[late], late, 64), step())
    assert overflowing.total.item() == math.inf
    assert overflowing.metrics["loss"][0].item() == math.inf
    assert objective(whole, step()).total.isfinite()


def test_a_mask_in_the_data_makes_the_loss_infinite() -> None:
    objective, whole = build(FLAT), batch()
    whole.tokens_BL[0, 0] = 3
    assert objective(whole, step()).total.item() == math.inf


def test_sizes_that_are_no_powers_of_two_are_refused() -> None:
    objective = build(FLAT)
    with pytest.raises(ValueError, match="a micro-batch has 3 samples"):
        objective(rows(batch(), 0, 3), step())
    with pytest.raises(ValueError, match="the global batch has 6 samples"):
        objective(Batch(batch(2).tokens_BL, torch.arange(2), 6), step())


def test_a_step_never_waits_for_the_device() -> None:
    masked_rows_bound(mask_schedule("linear"), 8, 12)  # a number of the host, found once
    with FakeTensorMode():  # it raises where a value or a data-dependent shape is asked for
        objective = MaskedObjective(FLAT)
        whole = Batch(torch.zeros(8, 12, dtype=torch.int64), torch.arange(8), 8)
        terms = objective(whole, Step(0, torch.zeros((), dtype=torch.int64)))
        terms.total.backward()
    assert terms.total.shape == ()


def test_autocast_stays_near_float32() -> None:
    objective, whole = build(FLAT), batch()
    exact = objective(whole, step()).total
    with torch.autocast("cpu", dtype=torch.bfloat16):
        total = objective(whole, step()).total
    assert total.dtype == torch.float32
    torch.testing.assert_close(total, exact, rtol=0.02, atol=0)


def exact_bound(objective: MaskedObjective, x: Tensor) -> float:
    """E_k of the mean cross-entropy on the masked, over all subsets of each size, in nats a token."""
    length = len(x)
    mean = 0.0
    for k in range(1, length + 1):
        subsets = list(itertools.combinations(range(length), k))
        for subset in subsets:
            noisy = x.clone()
            noisy[list(subset)] = objective.config.model.mask_id
            logprobs = objective.model(noisy[None])[0].log_softmax(-1)
            mean -= logprobs[list(subset), x[list(subset)]].mean().item() / (length * len(subsets))
    return mean


@pytest.mark.parametrize("schedule", MASK_SCHEDULES)
def test_validation_and_the_elbo_loss_estimate_the_exact_bound(schedule: str) -> None:
    config = MaskedConfig(model=replace(MODEL, length=3), weight="elbo", schedule=schedule)
    objective = build(config).eval()
    x = torch.tensor([5, 9, 20])
    whole = Batch(x.expand(4096, 3), torch.arange(4096), 4096)
    expected = exact_bound(objective, x)
    total, count = objective.validate(whole, step())["val_nll"]
    assert total.item() / count.item() == pytest.approx(expected, rel=0.02)
    total, count, _ = objective(whole, step())
    assert total.item() / count.item() == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize(("schedule", "rate"), [("linear", 0.5), ("cosine", 1 - 2 / math.pi), ("log_linear", 0.4995)])
def test_validation_of_a_model_that_knows_nothing(schedule: str, rate: float) -> None:
    objective = build(replace(FLAT, schedule=schedule)).eval()
    nn.init.zeros_(objective.model.output.weight)
    nn.init.zeros_(objective.model.output.bias)
    measured = objective.validate(batch(256), step())
    values = {name: total.item() / count.item() for name, (total, count) in measured.items()}
    assert values["val_nll"] == pytest.approx(math.log(20), rel=1e-5)
    assert values["val_loss"] == pytest.approx(rate * math.log(20), rel=2e-3)


@pytest.mark.parametrize("model", [MODEL, ORIGINAL], ids=["paper", "original"])
def test_validation_does_not_change_with_step_seed_or_split(model: TokenTransformerConfig) -> None:
    objective, whole = build(MaskedConfig(model=model)).eval(), batch(16)
    one = objective.validate(whole, step())
    other = objective.validate(whole, step(9, seed=4))
    parts = [objective.validate(rows(whole, start, stop), step()) for start, stop in ((0, 3), (3, 4), (4, 16))]
    for name, (total, count) in one.items():
        assert other[name][0].item() == total.item()
        assert sum(part[name][0].item() for part in parts) == pytest.approx(total.item(), rel=1e-5)
        assert sum(part[name][1].item() for part in parts) == count.item()
        assert not total.requires_grad


@pytest.mark.parametrize("config", [FLAT, MaskedConfig(model=ORIGINAL)], ids=["paper", "original"])
def test_every_parameter_is_in_one_group_and_matrices_alone_decay(config: MaskedConfig) -> None:
    objective = config.build()
    groups = objective.groups()
    names = [name for group in groups for name, _ in group.params]
    assert sorted(names) == sorted(name for name, _ in objective.named_parameters())
    decaying = {name for group in groups if group.decay for name, _ in group.params}
    embeddings = {"model.tokens.weight", "model.positions.weight"}
    for name, parameter in objective.named_parameters():
        assert (name in decaying) == (parameter.dim() == 2 and name not in embeddings), name


def test_flops_are_those_that_torch_counts() -> None:
    model = replace(MODEL, vocab_size=128, length=64, width=32, heads=2)
    objective = build(MaskedConfig(model=model))
    whole = Batch(torch.randint(4, 128, (64, 64)), torch.arange(64), 64)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        objective(whole, step()).total.backward()
    rows_computed = math.ceil(65 * 64 / 2 + 8 * math.sqrt(64 * 64 / 6))
    padding = 6 * (rows_computed - 64 * 64 / 2) * model.width * model.vocab_size
    counted = counter.get_total_flops() - padding
    assert objective.flops_per_token() * 64 * 64 == pytest.approx(counted, rel=1e-3)


def test_flops_of_the_papers_size() -> None:
    with torch.device("meta"):
        objective = MaskedConfig(model=TokenTransformerConfig(vocab_size=30_522, mask_id=103, length=1024)).build()
    assert objective.flops_per_token() == pytest.approx(6 * 12 * 12 * 768**2 + 12 * 12 * 1024 * 768 + 3 * 768 * 30_522)


@pytest.mark.parametrize(("field", "value"), [("weight", "heavy"), ("schedule", "quadratic")])
def test_unknown_choices_are_refused(field: str, value: str) -> None:
    with pytest.raises((ValueError, TypeError), match=value):  # a TypeError where annotations are checked
        replace(FLAT, **{field: value})


def test_it_learns_a_tiny_language() -> None:
    torch.manual_seed(0)
    model = replace(MODEL, vocab_size=8, mask_id=0, length=8, width=32)
    objective = MaskedConfig(model=model).build()
    optimiser = torch.optim.AdamW(objective.parameters(), lr=6e-3)
    starts = torch.arange(5)[:, None] + torch.arange(8)
    language = starts % 5 + 1
    for number in range(200):
        chosen = torch.randint(0, 5, (32,), generator=torch.Generator().manual_seed(number))
        total, count, _ = objective(Batch(language[chosen], torch.arange(32), 32), step(number))
        (total / count).backward()
        optimiser.step()
        optimiser.zero_grad()
    objective.eval()
    measured = objective.validate(Batch(language.repeat(64, 1), torch.arange(320), 320), step())
    total, count = measured["val_nll"]
    entropy = math.log(5) / 8
    assert entropy - 0.01 < total.item() / count.item() < entropy + 0.08


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")  # torch's own
def test_compiled_blocks_give_the_eager_loss_and_never_recompile() -> None:
    objective, whole = build(FLAT), batch()
    expected = [objective(whole, step(number)).total.item() for number in range(4)]
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for block in objective.blocks():
        block.compile(fullgraph=True, backend="aot_eager")
    first = objective(whole, step(0)).total.item()
    graphs = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    got = [first, *(objective(whole, step(number)).total.item() for number in range(1, 4))]
    assert got == pytest.approx(expected, rel=1e-6)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == graphs
