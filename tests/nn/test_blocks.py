"""Blocks against their formula, with and without a condition, eager and compiled."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from diladiff.nn.blocks import Block


def randomised(block: Block) -> Block:
    """The block with every parameter drawn, gains near one."""
    for name, parameter in block.named_parameters():
        nn.init.normal_(parameter, mean=1.0 if name.endswith("gain") else 0.0, std=0.2)
    return block


def make(*, condition_width: int | None = None, dropout: float = 0.0) -> Block:
    """A small block."""
    torch.manual_seed(0)
    return randomised(Block(16, 2, 64, dropout=dropout, qk_norm=True, condition_width=condition_width))


def test_a_block_adds_its_halves_to_the_stream() -> None:
    block, x = make(), torch.randn(2, 5, 16)
    middle = x + block.attention(F.layer_norm(x, (16,)) * block.attention_norm.gain)
    hidden = F.gelu(block.mlp.inner(F.layer_norm(middle, (16,)) * block.mlp_norm.gain), approximate="tanh")
    torch.testing.assert_close(block(x), middle + block.mlp.outer(hidden))


def test_a_condition_shifts_scales_and_gates_each_half() -> None:
    block, x, condition = make(condition_width=4), torch.randn(2, 5, 16), torch.randn(2, 4)
    assert block.modulation is not None
    parts = [part[:, None] for part in block.modulation(condition).split(16, dim=-1)]
    shift, scale, gate, mlp_shift, mlp_scale, mlp_gate = parts
    middle = x + gate * block.attention(block.attention_norm(x) * (1 + scale) + shift)
    expected = middle + mlp_gate * block.mlp(block.mlp_norm(middle) * (1 + mlp_scale) + mlp_shift)
    torch.testing.assert_close(block(x, None, condition), expected)


def test_dropout_acts_in_training_alone() -> None:
    block, x = make(dropout=0.5), torch.randn(2, 5, 16)
    assert not torch.equal(block(x), block(x))
    block.eval()
    torch.testing.assert_close(block(x), block(x), atol=0, rtol=0)


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize(("condition_width", "backend"), [(None, "inductor"), (4, "aot_eager")])
def test_a_compiled_block_is_the_eager_one(condition_width: int | None, backend: str) -> None:
    block, x = make(condition_width=condition_width), torch.randn(2, 5, 16, requires_grad=True)
    condition = None if condition_width is None else torch.randn(2, 4)
    compiled = torch.compile(block, backend=backend, fullgraph=True)
    eager, got = block(x, None, condition), compiled(x, None, condition)
    torch.testing.assert_close(got, eager, atol=1e-5, rtol=1e-4)
    (eager_grad,) = torch.autograd.grad(eager.square().sum(), x)
    (got_grad,) = torch.autograd.grad(got.square().sum(), x)
    torch.testing.assert_close(got_grad, eager_grad, atol=1e-3, rtol=1e-3)
