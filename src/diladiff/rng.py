"""Counter-based random numbers: each is a pure function of seed, stream, step, sample index and position.

Philox 4x32-10 (Salmon et al. 2011; docs/math.md, "Random numbers") in int64 tensor operations: the same integers on
every device, for any batch split or number of processes, without state. Counter: (position block, index, step, stream).
"""

import enum
import math

import torch
from jaxtyping import Float, Int
from torch import Tensor

Words = tuple[Tensor, Tensor, Tensor, Tensor]

_MASK = 0xFFFFFFFF
_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_WEYL = (0x9E3779B9, 0xBB67AE85)
_FEISTEL_ROUNDS = 4


class Stream(enum.IntEnum):
    """What a random number is for: streams never share numbers."""

    TIME = 1
    MASK = 2
    ORDER = 3
    TOKEN = 4
    REMASK = 5
    SHUFFLE = 6
    NOISE = 7


def philox(counter: Words, key: tuple[int, int]) -> Words:
    """Philox 4x32-10: four words in [0, 2^32), held in int64, for each counter. Counters broadcast."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        high0, low0 = _multiply(_MULTIPLIERS[0], c0)
        high1, low1 = _multiply(_MULTIPLIERS[1], c2)
        c0, c1, c2, c3 = high1 ^ c1 ^ k0, low1, high0 ^ c3 ^ k1, low0
        k0, k1 = (k0 + _WEYL[0]) & _MASK, (k1 + _WEYL[1]) & _MASK
    return c0, c1, c2, c3


def uniform(
    seed: int,
    stream: Stream,
    step: int | Int[Tensor, ""],
    index: Int[Tensor, " B"],
    count: int,
    *,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "B {count}"]:
    """Uniforms in [0, 1): 24 bits in float32, 53 in float64. Column j does not depend on `count`.

    The two dtypes read the same words: one stream is used with one dtype.
    """
    lanes = _lanes(dtype)
    block = torch.arange(-(-count // lanes), device=index.device)
    words = torch.broadcast_tensors(*_words(seed, stream, step, index[:, None], block[None, :]))
    return _to_unit(torch.stack(words, dim=-1).flatten(1), dtype)[:, :count]


def uniform_at(
    seed: int,
    stream: Stream,
    step: int | Int[Tensor, ""] | Int[Tensor, " N"],
    index: Int[Tensor, " N"],
    position: Int[Tensor, " N"],
    *,
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, " N"]:
    """The numbers that `uniform` has at these (sample, position) pairs, each at a step of its own if a row of them."""
    lanes = _lanes(dtype)
    words = torch.broadcast_tensors(*_words(seed, stream, step, index, position // lanes))
    row = _to_unit(torch.stack(words, dim=-1), dtype)
    return row.gather(1, (position % lanes)[:, None])[:, 0]


def normal(
    seed: int, stream: Stream, step: int | Int[Tensor, ""], index: Int[Tensor, " B"], count: int
) -> Float[Tensor, "B {count}"]:
    """Standard normals in float32: Box-Muller in float64 on 53-bit uniforms, then rounded.

    Devices may differ in the last bit of a float64 logarithm or cosine; rounding hides it but for near-ties.
    """
    pairs = uniform(seed, stream, step, index, count + count % 2, dtype=torch.float64).unflatten(1, (-1, 2))
    radius = torch.sqrt(-2 * torch.log1p(-pairs[..., 0]))
    angle = 2 * math.pi * pairs[..., 1]
    both = torch.stack((radius * torch.cos(angle), radius * torch.sin(angle)), dim=-1)
    return both.flatten(1)[:, :count].float()


def permute(i: Int[Tensor, " N"], n: int, seed: int, epoch: int) -> Int[Tensor, " N"]:
    """Where a keyed permutation of range(n) sends each i: a Feistel network, walked until it lands in range.

    Constant memory. It reads a result back to decide whether to walk on, so call it with tensors on the CPU.
    """
    if not 1 <= n <= 2**48:
        raise ValueError(f"permute: n = {n} is out of range; give 1 <= n <= 2^48")
    out = _feistel(i, n, seed, epoch)
    outside = (out >= n).nonzero()[:, 0]
    while outside.numel():
        walked = _feistel(out[outside], n, seed, epoch)
        out[outside] = walked
        outside = outside[walked >= n]
    return out


def _multiply(a: int, x: Tensor) -> tuple[Tensor, Tensor]:
    """High and low 32 bits of a * x, through 16-bit halves of a so that no int64 overflows."""
    low = x * (a & 0xFFFF)
    high = x * (a >> 16) + (low >> 16)
    return high >> 16, ((high & 0xFFFF) << 16) | (low & 0xFFFF)


def _key(seed: int) -> tuple[int, int]:
    if not 0 <= seed < 2**64:
        raise ValueError(f"seed = {seed} is out of range; give 0 <= seed < 2^64")
    return seed & _MASK, seed >> 32


def _words(seed: int, stream: Stream, step: int | Tensor, index: Tensor, block: Tensor) -> Words:
    """The four words of a block of positions; what varies least broadcasts last, so most of round one is cheap."""
    device = index.device
    # full() rather than tensor(): it writes on the device and copies nothing from the host.
    when = torch.full((), step, device=device) if isinstance(step, int) else step
    what = torch.full((), int(stream), device=device)
    return philox((block & _MASK, index & _MASK, when & _MASK, what), _key(seed))


def _lanes(dtype: torch.dtype) -> int:
    """Numbers in a block of four words."""
    if dtype == torch.float32:
        return 4
    if dtype == torch.float64:
        return 2
    raise ValueError(f"uniform: dtype = {dtype} is not supported; use torch.float32 or torch.float64")


def _to_unit(words: Tensor, dtype: torch.dtype) -> Tensor:
    """Words along the last axis to numbers in [0, 1): one word each in float32, two in float64."""
    if dtype == torch.float32:
        return (words >> 8).to(dtype) * 2.0**-24
    high, low = words.unflatten(-1, (-1, 2)).unbind(-1)
    return (((high >> 5) << 26) | (low >> 6)).to(dtype) * 2.0**-53


def _feistel(i: Tensor, n: int, seed: int, epoch: int) -> Tensor:
    """A bijection of a grid of a x b >= n cells, near a square and at most a - 1 cells too large."""
    a = math.isqrt(n - 1) + 1
    b = -(-n // a)
    row, column = i // b, i % b
    for number in range(0, _FEISTEL_ROUNDS, 2):
        row = (row + _round(column, number, seed, epoch)) % a
        column = (column + _round(row, number + 1, seed, epoch)) % b
    return row * b + column


def _round(half: Tensor, number: int, seed: int, epoch: int) -> Tensor:
    """A keyed hash of half a cell's place: the first word of Philox, a counter for each round."""
    return _words(seed, Stream.SHUFFLE, epoch, half, torch.full((), number, device=half.device))[0]
