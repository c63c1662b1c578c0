"""Times: stratified over a global batch for training, uniform grids for sampling. t = 0 is data, t = 1 is noise."""

import torch
from jaxtyping import Float, Int
from torch import Tensor


def bit_reverse(i: Int[Tensor, "*S"], bits: int) -> Int[Tensor, "*S"]:
    """The lowest `bits` bits of i in reverse order."""
    out = torch.zeros_like(i)
    for bit in range(bits):
        out = out | (((i >> bit) & 1) << (bits - 1 - bit))
    return out


def stratified(u: Float[Tensor, ""], index_B: Int[Tensor, " B"], size: int) -> Float[Tensor, " B"]:
    """Times of these samples of a global batch, one a stratum: (u + bitreverse(i)) / size, docs/math.md (8).

    Bit reversal makes every aligned power-of-two slice of the batch stratified itself.
    """
    if size < 1 or size & (size - 1):
        raise ValueError(f"size = {size} is not a power of two; choose a global batch of 1, 2, 4, 8, ...")
    return (u + bit_reverse(index_B, size.bit_length() - 1)) / size


def uniform_grid(steps: int) -> Float[Tensor, " {steps}+1"]:
    """Times from exactly 1 to exactly 0 in `steps` equal steps, float64 on the CPU."""
    if steps < 1:
        raise ValueError(f"steps = {steps} is too few; give at least 1")
    return torch.arange(steps, -1, -1, dtype=torch.float64, device="cpu") / steps
