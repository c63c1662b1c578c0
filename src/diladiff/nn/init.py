"""Initial weights: the scale that torch gives its own linear layers, normal instead of uniform."""

import math

import torch
from torch import nn

from diladiff.nn.norms import LayerNorm, RMSNorm


@torch.no_grad()
def initialise(network: nn.Module) -> None:
    """Set every parameter held by linear layers, embeddings and norms inside: normal matrices, unit gains, no biases.

    A matrix has standard deviation (3 fan-in)^-1/2, .0208 at width 768; an embedding .02.
    """
    for module in network.modules():
        if isinstance(module, nn.Linear):
            module.weight.normal_(std=(3 * module.in_features) ** -0.5)
            if module.bias is not None:
                module.bias.zero_()
        elif isinstance(module, nn.Embedding):
            module.weight.normal_(std=0.02)
        elif isinstance(module, LayerNorm | RMSNorm):
            module.gain.fill_(1.0)


@torch.no_grad()
def shrink_residuals(outputs: list[nn.Linear]) -> None:
    """Divide the layers that write to the residual stream by the root of their number: its variance stays O(1)."""
    for linear in outputs:
        linear.weight.div_(math.sqrt(len(outputs)))


@torch.no_grad()
def zero(linear: nn.Linear) -> None:
    """Make a linear layer's output zero until it has learned something."""
    linear.weight.zero_()
    linear.bias.zero_()
