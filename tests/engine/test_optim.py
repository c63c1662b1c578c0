"""The rate as a function of the step, and updates equal to torch's own."""

import math

import pytest
import torch
from torch import nn

from diladiff.engine.optim import OptimConfig, Optimizer, rate
from diladiff.objectives.base import ParamGroup


def test_rate_warms_up_and_stays():
    config = OptimConfig(lr=2.0, warmup_steps=4)
    assert [rate(config, step, 100) for step in (0, 1, 3, 4, 99)] == [0.5, 1.0, 2.0, 2.0, 2.0]


def test_rate_follows_the_cosine_to_its_floor():
    config = OptimConfig(lr=1.0, warmup_steps=10, decay="cosine", final_lr_ratio=0.1)
    assert rate(config, 10, 110) == 1.0
    assert rate(config, 60, 110) == pytest.approx(0.55)
    assert rate(config, 110, 110) == pytest.approx(0.1)
    assert rate(config, 35, 110) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi / 4)) / 2)


def test_a_group_has_its_own_warm_up_and_multiple():
    groups = [
        ParamGroup("fast", [("a", nn.Parameter(torch.ones(2)))]),
        ParamGroup("slow", [("b", nn.Parameter(torch.ones(2)))], lr_scale=0.1, warmup_steps=5),
    ]
    optimizer = Optimizer(OptimConfig(lr=1.0, warmup_steps=2), groups, 10)
    assert optimizer.rates(1) == {"fast": 1.0, "slow": pytest.approx(0.04)}


@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_updates_equal_torch_over_a_mean_loss(clip_norm):
    torch.manual_seed(0)
    model, reference = nn.Linear(3, 2), nn.Linear(3, 2)
    reference.load_state_dict(model.state_dict())
    config = OptimConfig(lr=0.1, weight_decay=0.5, clip_norm=clip_norm, betas=(0.8, 0.9))
    groups = [
        ParamGroup("matrix", [("w", model.weight)]),
        ParamGroup("bias", [("b", model.bias)], decay=False),
    ]
    ours = Optimizer(config, groups, 10)
    theirs = torch.optim.AdamW(
        [{"params": [reference.weight], "weight_decay": 0.5}, {"params": [reference.bias], "weight_decay": 0.0}],
        lr=0.1,
        betas=(0.8, 0.9),
        eps=1e-8,
    )
    for step in range(5):
        x, weight = torch.randn(6, 3), torch.tensor(6.0, dtype=torch.float64)
        total = model(x).square().sum()
        total.backward()
        norm = ours.step(step, total.detach(), weight)
        theirs.zero_grad()
        (reference(x).square().sum() / 6).backward()
        expected = nn.utils.clip_grad_norm_(reference.parameters(), clip_norm or math.inf)
        theirs.step()
        torch.testing.assert_close(norm.float(), expected)
        torch.testing.assert_close(model.weight, reference.weight, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(model.bias, reference.bias, rtol=1e-5, atol=1e-6)
        assert model.weight.grad is None


@pytest.mark.parametrize("where", ["total", "gradient"])
def test_what_is_not_finite_is_never_applied(where):
    weight = nn.Parameter(torch.ones(3))
    optimizer = Optimizer(OptimConfig(lr=0.1), [ParamGroup("all", [("w", weight)])], 10)

    def update(total: float, gradient: float) -> None:
        weight.grad = torch.full((3,), gradient)
        optimizer.step(0, torch.tensor(total), torch.tensor(1.0))

    update(1.0, 1.0)
    weights, moments = weight.detach().clone(), {name: value.clone() for name, value in optimizer.tensors()}
    assert not torch.equal(weights, torch.ones(3))
    update(math.nan if where == "total" else 1.0, math.inf if where == "gradient" else 1.0)
    update(1.0, 1.0)  # the host may learn of it a step late
    assert torch.equal(weight, weights)
    for name, value in optimizer.tensors():
        assert torch.equal(value, moments[name]), name


def test_state_comes_back():
    weight = nn.Parameter(torch.ones(3))
    group = [ParamGroup("all", [("w", weight)])]
    first, second = (Optimizer(OptimConfig(lr=0.1), group, 10) for _ in range(2))
    weight.grad = torch.tensor([1.0, -2.0, 3.0])
    first.step(0, torch.tensor(1.0), torch.tensor(1.0))
    state = {name: value.clone() for name, value in first.tensors()}
    assert state.keys() == {"step.w", "exp_avg.w", "exp_avg_sq.w"}
    second.load(state)
    for (name, a), (_, b) in zip(first.tensors(), second.tensors(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("lr", 0.0),
        ("betas", (0.9, 1.0)),
        ("eps", 0.0),
        ("weight_decay", -0.1),
        ("clip_norm", 0.0),
        ("warmup_steps", -1),
        ("final_lr_ratio", 1.5),
    ],
)
def test_config_refuses(field, value):
    with pytest.raises(ValueError, match=f"{field}.*{value}".replace("(", r"\(").replace(")", r"\)")):
        OptimConfig(**{"lr": 1.0, field: value})
