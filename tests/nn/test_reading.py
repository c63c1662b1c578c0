"""A block that reads a context against its formula; untouched, and without a context, as if it read nothing."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from diladiff.nn.attention import KeysValues
from diladiff.nn.blocks import Block, Reading
from diladiff.nn.init import zero


def make(*, cross: bool, condition_width: int | None = None) -> Block:
    """A small block with every parameter drawn, gains near one."""
    torch.manual_seed(0)
    block = Block(16, 2, 64, dropout=0.0, qk_norm=True, condition_width=condition_width)
    if cross:
        block.reading = Reading(16, 2, dropout=0.0)
    for name, parameter in block.named_parameters():
        nn.init.normal_(parameter, mean=1.0 if name.endswith("gain") else 0.0, std=0.2)
    return block


def context(count: int = 3) -> KeysValues:
    """Keys and values of a few positions."""
    return KeysValues(torch.randn(2, 2, count, 8), torch.randn(2, 2, count, 8))


def test_reading_stands_between_the_halves() -> None:
    block, told, x = make(cross=True), context(), torch.randn(2, 5, 16)
    assert block.reading is not None
    middle = x + block.attention(block.attention_norm(x))
    inner = F.linear(block.reading.norm(middle), block.reading.inner.weight, block.reading.inner.bias)
    read = F.linear(block.reading.attention(inner, told), block.reading.outer.weight, block.reading.outer.bias)
    expected = block.feed(middle + read)
    torch.testing.assert_close(block(x, None, None, told), expected)


def test_without_a_reading_self_attention_takes_the_context_in() -> None:
    block, told, x = make(cross=False), context(), torch.randn(2, 5, 16)
    middle = x + block.attention(block.attention_norm(x), None, told)
    torch.testing.assert_close(block(x, None, None, told), block.feed(middle))


@pytest.mark.parametrize("condition_width", [None, 4])
def test_a_reading_that_is_zero_or_not_asked_changes_no_bit(condition_width: int | None) -> None:
    block, told, x = make(cross=True, condition_width=condition_width), context(), torch.randn(2, 5, 16)
    plain = make(cross=False, condition_width=condition_width)
    plain.load_state_dict({name: value for name, value in block.state_dict().items() if "reading" not in name})
    condition = None if condition_width is None else torch.randn(2, 4)
    expected = plain(x, None, condition)
    assert not torch.allclose(block(x, None, condition, told), expected)
    torch.testing.assert_close(block(x, None, condition), expected, atol=0, rtol=0)
    assert block.reading is not None
    zero(block.reading.outer)
    torch.testing.assert_close(block(x, None, condition, told), expected, atol=0, rtol=0)


def test_dropout_of_what_was_read_acts_in_training_alone() -> None:
    reading, told, x = Reading(16, 2, dropout=0.5), context(), torch.randn(2, 5, 16)
    assert not torch.equal(reading(x, told), reading(x, told))
    reading.eval()
    torch.testing.assert_close(reading(x, told), reading(x, told), atol=0, rtol=0)


@pytest.mark.compile
@pytest.mark.parametrize("cross", [True, False], ids=["cross", "joint"])
def test_a_compiled_block_that_reads_is_the_eager_one(*, cross: bool) -> None:
    block, x = make(cross=cross), torch.randn(2, 5, 16, requires_grad=True)
    told = KeysValues(*(part.requires_grad_() for part in context()))
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    eager, got = block(x, None, None, told), compiled(x, None, None, told)
    torch.testing.assert_close(got, eager, atol=1e-5, rtol=1e-4)
    expected = torch.autograd.grad(eager.square().sum(), (x, *told))
    torch.testing.assert_close(torch.autograd.grad(got.square().sum(), (x, *told)), expected, atol=1e-3, rtol=1e-3)
