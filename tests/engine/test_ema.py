"""Averages against their closed form, and why their horizon has to grow."""

import contextlib

import pytest
import torch

from diladiff.engine.ema import Average, average, ramped
from diladiff.engine.optim import OptimConfig, Optimizer
from diladiff.objectives.base import Step
from tests.engine.toys import Regression, batches


def test_the_ramp():
    assert [ramped(0.9999, n) for n in (0, 8, 90)] == [0.1, 0.5, 0.91]
    assert ramped(0.9, 10**6) == 0.9


def test_average_equals_its_closed_form():
    """a_n = sum_i (1 - d_i) prod_{j > i} d_j v_i + prod_j d_j v_0."""
    generator = torch.Generator().manual_seed(0)
    values = [torch.randn(5, generator=generator, dtype=torch.float64) for _ in range(31)]
    param = values[0].float()
    ema = Average({"w": param}, 0.8)
    for n, value in enumerate(values[1:]):
        param.copy_(value)
        ema.update(n)
    decays = [min(0.8, (1 + n) / (10 + n)) for n in range(30)]
    weights = [1.0]
    for decay in decays:
        weights = [weight * decay for weight in weights] + [1 - decay]
    assert sum(weights) == pytest.approx(1)
    expected = sum(weight * value.float().double() for weight, value in zip(weights, values, strict=True))
    torch.testing.assert_close(dict(ema.tensors())["w"], expected.float())


def test_averages_are_float32_whatever_the_parameters_are():
    param = torch.zeros(1, dtype=torch.bfloat16)
    ema = Average({"w": param}, 0.999)
    param.fill_(1)
    for n in range(2000):
        ema.update(n)
    found = dict(ema.tensors())["w"]
    assert found.dtype == torch.float32
    assert found.item() == pytest.approx(1, abs=1e-3)


def test_swapping_restores_every_bit_also_after_an_error():
    param = torch.tensor([1.0, float("inf"), -0.0])
    ema = Average({"w": param}, 0.5)
    before = param.clone()
    param.add_(1)
    after = param.clone()
    inside = []
    with contextlib.suppress(RuntimeError), ema.swapped_in():
        inside.append(param.clone())
        raise RuntimeError
    assert torch.equal(inside[0], before)
    assert torch.equal(param.view(torch.int32), after.view(torch.int32))


def test_a_short_run_is_not_ruined_by_its_initial_weights():
    """After 200 steps a horizon of 10,000 gives weights near the trained ones, not near the initial ones."""
    objective = Regression()
    optimizer = Optimizer(OptimConfig(lr=0.05, clip_norm=None), objective.groups(), 200)
    ramp, constant = Average(optimizer.params, 0.9999), dict(Average(optimizer.params, 0.9999).tensors())
    held_out = [next(batches(10_000 + i, size=64, micro=64))[0] for i in range(4)]

    def loss() -> float:
        with torch.no_grad():
            return sum(objective(batch, Step(0, torch.zeros(()).long())).total.item() for batch in held_out) / 256

    untrained = loss()
    for number, micro_batches in zip(range(200), batches(0), strict=False):
        terms = objective(micro_batches[0], Step(0, torch.tensor(number)))
        terms.total.backward()
        optimizer.step(number, terms.total.detach(), terms.weight)
        ramp.update(number)
        average(list(constant.values()), [p.detach() for p in optimizer.params.values()], 0.9999)
    trained = loss()
    with ramp.swapped_in():
        averaged = loss()
    without_ramp = Average(optimizer.params, 0.9999)
    without_ramp.load(constant)
    with without_ramp.swapped_in():
        ruined = loss()
    assert trained < 0.2 * untrained
    assert averaged < trained + 0.1 * (untrained - trained)
    assert ruined > trained + 0.9 * (untrained - trained)


def test_mixed_types_are_averaged_in_the_average_s():
    averages, values = [torch.zeros(2)], [torch.ones(2, dtype=torch.bfloat16)]
    average(averages, values, 0.75)
    assert torch.equal(averages[0], torch.full((2,), 0.25))
