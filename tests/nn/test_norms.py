"""Norms against torch's own and against the formula; under a compiled forward-mode derivative."""

import pytest
import torch
import torch.nn.functional as F

from diladiff.nn.norms import LayerNorm, RMSNorm


def test_layer_norm_is_torchs_affine_one_without_bias() -> None:
    torch.manual_seed(0)
    norm = LayerNorm(16)
    torch.nn.init.normal_(norm.gain)
    x = torch.randn(3, 5, 16)
    torch.testing.assert_close(norm(x), F.layer_norm(x, (16,), norm.gain, eps=1e-5))


def test_rms_norm_is_the_formula_and_keeps_the_dtype() -> None:
    torch.manual_seed(0)
    norm = RMSNorm(16, eps=1e-5)
    torch.nn.init.normal_(norm.gain)
    x = torch.randn(3, 5, 16)
    expected = x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.gain
    torch.testing.assert_close(norm(x), expected)
    assert norm(x.bfloat16()).dtype == torch.bfloat16


def test_rms_norm_of_zero_has_a_bounded_slope() -> None:
    norm = RMSNorm(8, eps=1e-5)
    x = torch.zeros(8, requires_grad=True)
    norm(x).sum().backward()
    torch.testing.assert_close(x.grad, torch.full((8,), 1e-5**-0.5))


@pytest.mark.compile
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.* is deprecated:DeprecationWarning")  # torch's own
@pytest.mark.parametrize("norm", [LayerNorm(8), RMSNorm(8)], ids=["layer", "rms"])
def test_norms_compile_under_a_forward_mode_derivative(norm: torch.nn.Module) -> None:
    torch.manual_seed(0)
    x, tangent = torch.randn(4, 8), torch.randn(4, 8)

    def derivative(x: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
        return torch.func.jvp(norm, (x,), (tangent,))[1].detach()

    compiled = torch.compile(derivative, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x, tangent), derivative(x, tangent))
