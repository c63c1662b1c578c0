"""Attention against a naive float64 einsum."""

import math

import pytest
import torch
from torch import Tensor

from diladiff.nn.attention import SelfAttention
from diladiff.nn.embed import rotary_angles


def naive(attention: SelfAttention, x_BLD: Tensor, *, rotary: bool) -> Tensor:
    """Head by head, with explicit softmax and, where asked, complex rotation."""
    length, width = x_BLD.shape[1:]
    head_width = width // attention.heads
    q_BLD, k_BLD, v_BLD = torch.einsum("bld,ed->ble", x_BLD, attention.qkv.weight).chunk(3, dim=-1)
    heads = []
    for head in range(attention.heads):
        columns = slice(head * head_width, (head + 1) * head_width)
        q, k, v = q_BLD[..., columns], k_BLD[..., columns], v_BLD[..., columns]
        if attention.q_norm is not None and attention.k_norm is not None:
            q = q / (q.square().mean(-1, keepdim=True) + 1e-5).sqrt() * attention.q_norm.gain
            k = k / (k.square().mean(-1, keepdim=True) + 1e-5).sqrt() * attention.k_norm.gain
        if rotary:
            half = head_width // 2
            angles = torch.arange(length)[:, None] * 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
            turn = torch.polar(torch.ones_like(angles), angles)
            q, k = (torch.complex(y[..., :half], y[..., half:]) * turn for y in (q, k))
            q, k = (torch.cat((y.real, y.imag), dim=-1) for y in (q, k))
        scores = torch.einsum("bqe,bke->bqk", q, k) / math.sqrt(head_width)
        heads.append(torch.einsum("bqk,bke->bqe", scores.softmax(-1), v))
    return torch.einsum("bld,ed->ble", torch.cat(heads, dim=-1), attention.out.weight)


@pytest.mark.parametrize("qk_norm", [True, False])
@pytest.mark.parametrize("rotary", [True, False])
def test_attention_is_the_naive_one(*, qk_norm: bool, rotary: bool) -> None:
    torch.manual_seed(0)
    attention = SelfAttention(24, 3, qk_norm=qk_norm)
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(2, 7, 24)
    got = attention(x, rotary_angles(7, 8, x.device) if rotary else None)
    expected = naive(attention.double(), x.double(), rotary=rotary).float()
    torch.testing.assert_close(got, expected, atol=1e-4, rtol=1e-4)
    exact = attention(x.double(), rotary_angles(7, 8, x.device) if rotary else None)
    torch.testing.assert_close(exact.float(), expected, atol=2e-5 if rotary else 1e-6, rtol=1e-6)


def test_qk_norm_makes_attention_blind_to_the_scale_of_q_and_k() -> None:
    torch.manual_seed(0)
    attention = SelfAttention(16, 2, qk_norm=True)
    x = torch.randn(1, 5, 16)
    before = attention(x)
    with torch.no_grad():
        attention.qkv.weight[:32] *= 100
    torch.testing.assert_close(attention(x), before, atol=1e-4, rtol=1e-3)
