"""A token transformer as the callable that samplers ask: the trunk over sequences, the head over the wanted rows.

Shapes are exact by default. Under compile numbers of sequences and rows are rounded up to powers of two, so that few
graphs serve all steps; `fixed_batch` gives every call one shape: a sample then does not hang on its batch in bfloat16.
"""

from collections.abc import Callable
from typing import Any, final

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from diladiff.models.token_transformer import TokenTransformer
from diladiff.samplers.base import ROWS_AT_ONCE, DrawConfig, Writer, pick

SEQUENCES_AT_ONCE = 128
"""The most sequences of one graph."""

LEAST_ROWS = 16
"""The fewest rows of a graph that draws."""

GRAPHS = 64
"""How many graphs dynamo may keep of one function: buckets, settings of the draw and models in a process."""

FIXED_ROWS = 256
"""Rows of every head call under `fixed_batch`."""


@final
class ModelDenoiser:
    """(tokens_AL, time_A, rows_N) -> logits_NV, without a gradient; see samplers.base.Denoiser."""

    def __init__(self, model: TokenTransformer, *, compile: bool = False, fixed_batch: int | None = None) -> None:
        self.model = model
        self.compile = compile
        self.fixed_batch = fixed_batch
        self._trunk: Any = model.trunk
        self._tail: Any = self._head_and_draw
        self._met: set[Any] = set()
        self._on_gpu = next(model.parameters()).device.type == "cuda"
        if compile:
            # On a GPU the graph of a bucket is also recorded, which takes the launches off the host.
            mode = "reduce-overhead" if self._on_gpu else None
            self._trunk = torch.compile(self._trunk, dynamic=False, fullgraph=True, mode=mode)
            self._tail = torch.compile(self._tail, dynamic=False, fullgraph=True, mode=mode)

    @property
    def writer(self) -> Writer | None:
        """`write`, where a recorded graph of head and draw is worth its compilation: on a GPU."""
        return self.write if self.compile and self._on_gpu and self.fixed_batch is None else None

    @torch.no_grad()
    def __call__(
        self, tokens_AL: Int[Tensor, "A L"], time_A: Float[Tensor, " A"], rows_N: Int[Tensor, " N"]
    ) -> Float[Tensor, "N V"]:
        """Logits at rows a * L + l."""
        return self._head(self.hidden(tokens_AL, time_A).flatten(0, 1)[rows_N])

    @torch.no_grad()
    def write(
        self,
        tokens_AL: Int[Tensor, "A L"],
        time_A: Float[Tensor, " A"],
        rows_N: Int[Tensor, " N"],
        uniform_N: Float[Tensor, " N"],
        draw: DrawConfig,
    ) -> Int[Tensor, " N"]:
        """A token for each row: head and draw are one graph for each bucket of rows; see samplers.base.Writer."""
        hidden_ND = self.hidden(tokens_AL, time_A).flatten(0, 1)[rows_N]
        parts = []
        for hidden_PD, uniform_P in zip(hidden_ND.split(ROWS_AT_ONCE), uniform_N.split(ROWS_AT_ONCE), strict=True):
            count = len(uniform_P)
            size = max(LEAST_ROWS, _bucket(count))
            hidden_RD = F.pad(hidden_PD, (0, 0, 0, size - count))
            uniform_R = F.pad(uniform_P, (0, size - count))
            ids_R = self._recorded(self._tail, (size, draw), hidden_RD, uniform_R, draw)
            parts.append(ids_R[:count].clone())
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def hidden(self, tokens_AL: Int[Tensor, "A L"], time_A: Float[Tensor, " A"]) -> Float[Tensor, "A L D"]:
        """The trunk's hidden states; under compile on a GPU they are valid until the next call."""
        if self.fixed_batch is None and not self.compile:
            return self._run(tokens_AL, time_A)
        parts = []
        for tokens_BL, time_B in zip(tokens_AL.split(self._most()), time_A.split(self._most()), strict=True):
            count, missing = len(tokens_BL), self._size(len(tokens_BL)) - len(tokens_BL)
            # Copies of the first sequence fill the shape; nobody reads their rows.
            padded_BL = torch.cat((tokens_BL, tokens_BL[:1].expand(missing, -1)))
            padded_B = torch.cat((time_B, time_B[:1].expand(missing)))
            hidden_BLD = self._run(padded_BL, padded_B)[:count]
            # A recorded graph writes its next result over this one.
            parts.append(hidden_BLD if count == len(tokens_AL) else hidden_BLD.clone())
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _run(self, tokens_BL: Tensor, time_B: Tensor) -> Tensor:
        return self._recorded(
            self._trunk, tokens_BL.shape, tokens_BL, time_B if self.model.config.time_conditioning else None
        )

    def _head_and_draw(self, hidden_RD: Tensor, uniform_R: Tensor, draw: DrawConfig) -> Tensor:
        return pick(self.model.head(hidden_RD), uniform_R, draw)

    def _recorded(self, function: Callable[..., Tensor], key: Any, *arguments: Any) -> Tensor:
        """Call a function that may be compiled; its result is valid until the next such call."""
        if not self.compile:
            return function(*arguments)
        torch.compiler.cudagraph_mark_step_begin()
        if key in self._met:
            return function(*arguments)
        self._met.add(key)
        from torch._dynamo import config as dynamo  # slow to import, and needed here alone

        with dynamo.patch(recompile_limit=GRAPHS):
            return function(*arguments)

    def _most(self) -> int:
        return SEQUENCES_AT_ONCE if self.fixed_batch is None else self.fixed_batch

    def _size(self, count: int) -> int:
        if self.fixed_batch is not None:
            return self.fixed_batch
        return _bucket(count)

    def _head(self, hidden_ND: Tensor) -> Tensor:
        if self.fixed_batch is None:
            return self.model.head(hidden_ND)
        parts = []
        for part in hidden_ND.split(FIXED_ROWS):
            padded = torch.cat((part, part[:1].expand(FIXED_ROWS - len(part), -1)))
            parts.append(self.model.head(padded)[: len(part)])
        return torch.cat(parts)


def _bucket(count: int) -> int:
    """The next power of two."""
    return 1 << (count - 1).bit_length()
