"""Cross-attention, and self-attention over extra keys, against a naive float64 einsum."""

import math

import pytest
import torch
from torch import Tensor, nn

from diladiff.nn.attention import CrossAttention, KeysValues, KeyValueProjection, SelfAttention


def randomised(module: nn.Module) -> nn.Module:
    """Every parameter drawn, gains near one."""
    for name, parameter in module.named_parameters():
        nn.init.normal_(parameter, mean=1.0 if name.endswith("gain") else 0.0, std=0.5)
    return module.double()


def heads(x_BND: Tensor, weight: Tensor, gain: Tensor | None) -> Tensor:
    """Three heads of a projection, RMS-normalised where there is a gain."""
    y_BNHE = torch.einsum("bnc,ec->bne", x_BND, weight).unflatten(-1, (3, 8))
    if gain is None:
        return y_BNHE
    return y_BNHE / (y_BNHE.square().mean(-1, keepdim=True) + 1e-5).sqrt() * gain


def naive(q_BLHE: Tensor, k_BKHE: Tensor, v_BKHE: Tensor, out: Tensor, mask_BK: Tensor | None = None) -> Tensor:
    """Explicit softmax, with masked keys struck out of it."""
    scores_BHLK = torch.einsum("blhe,bkhe->bhlk", q_BLHE, k_BKHE) / math.sqrt(8)
    if mask_BK is not None:
        scores_BHLK = scores_BHLK.masked_fill(~mask_BK[:, None, None], -math.inf)
    mixed_BLHE = torch.einsum("bhlk,bkhe->blhe", scores_BHLK.softmax(-1), v_BKHE)
    return torch.einsum("bld,ed->ble", mixed_BLHE.flatten(2), out)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("qk_norm", [True, False])
def test_cross_attention_is_the_naive_one(*, qk_norm: bool, masked: bool) -> None:
    torch.manual_seed(0)
    projection = randomised(KeyValueProjection(10, 24, 3, qk_norm=qk_norm))
    attention = randomised(CrossAttention(24, 3, qk_norm=qk_norm))
    x_BLD, context_BKC = torch.randn(2, 7, 24).double(), torch.randn(2, 5, 10).double()
    mask_BK = torch.tensor([[True] * 5, [False, True, True, False, True]]) if masked else None
    k_gain = projection.k_norm.gain if qk_norm else None
    q_gain = attention.q_norm.gain if qk_norm else None
    k_weight, v_weight = projection.kv.weight.chunk(2)
    k, v = heads(context_BKC, k_weight, k_gain), heads(context_BKC, v_weight, None)
    expected = naive(heads(x_BLD, attention.q.weight, q_gain), k, v, attention.out.weight, mask_BK)
    torch.testing.assert_close(attention(x_BLD, projection(context_BKC), mask_BK), expected, atol=1e-12, rtol=1e-12)
    got = attention.float()(x_BLD.float(), projection.float()(context_BKC.float()), mask_BK)
    torch.testing.assert_close(got, expected.float(), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("qk_norm", [True, False])
def test_extra_keys_share_the_softmax_of_self_attention(*, qk_norm: bool) -> None:
    torch.manual_seed(0)
    projection = randomised(KeyValueProjection(10, 24, 3, qk_norm=qk_norm))
    attention = randomised(SelfAttention(24, 3, qk_norm=qk_norm))
    x_BLD, extra = torch.randn(2, 7, 24).double(), projection(torch.randn(2, 5, 10).double())
    q_gain = attention.q_norm.gain if qk_norm else None
    k_gain = attention.k_norm.gain if qk_norm else None
    q_weight, k_weight, v_weight = attention.qkv.weight.chunk(3)
    k = torch.cat((heads(x_BLD, k_weight, k_gain), extra.k_BHKE.transpose(1, 2)), dim=1)
    v = torch.cat((heads(x_BLD, v_weight, None), extra.v_BHKE.transpose(1, 2)), dim=1)
    expected = naive(heads(x_BLD, q_weight, q_gain), k, v, attention.out.weight)
    torch.testing.assert_close(attention(x_BLD, None, extra), expected, atol=1e-12, rtol=1e-12)


def test_no_extra_keys_are_as_none() -> None:
    torch.manual_seed(0)
    attention, x_BLD = SelfAttention(24, 3, qk_norm=True), torch.randn(2, 7, 24)
    empty = KeysValues(torch.zeros(2, 3, 0, 8), torch.zeros(2, 3, 0, 8))
    torch.testing.assert_close(attention(x_BLD, None, empty), attention(x_BLD), atol=0, rtol=0)


def test_masked_positions_get_no_gradient() -> None:
    torch.manual_seed(0)
    projection, attention = KeyValueProjection(10, 24, 3, qk_norm=True), CrossAttention(24, 3, qk_norm=True)
    context_BKC = torch.randn(2, 5, 10, requires_grad=True)
    mask_BK = torch.tensor([[True] * 5, [False, True, True, False, True]])
    attention(torch.randn(2, 7, 24), projection(context_BKC), mask_BK).square().sum().backward()
    assert torch.equal(context_BKC.grad.abs().sum(-1) > 0, mask_BK)


def test_keys_of_another_type_are_read() -> None:
    """Keys and values may be kept in bfloat16 while they are used at many steps."""
    torch.manual_seed(0)
    projection, attention = KeyValueProjection(10, 24, 3, qk_norm=True), CrossAttention(24, 3, qk_norm=True)
    context, x_BLD = projection(torch.randn(2, 5, 10)), torch.randn(2, 7, 24)
    low = KeysValues(*(part.bfloat16() for part in context))
    torch.testing.assert_close(attention(x_BLD, low), attention(x_BLD, context), atol=0.02, rtol=0.02)
    assert SelfAttention(24, 3, qk_norm=True)(x_BLD, None, low).dtype == torch.float32
