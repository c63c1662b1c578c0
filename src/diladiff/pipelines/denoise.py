"""A token transformer as the callable that samplers ask: the trunk over sequences, the head over the wanted rows.

Shapes are exact by default. Under compile the number of sequences is rounded up to a power of two, so that few graphs
serve all steps; `fixed_batch` gives every call one shape: a sample then does not hang on its batch in bfloat16 either.
"""

from typing import Any, final

import torch
from jaxtyping import Float, Int
from torch import Tensor

from diladiff.models.token_transformer import TokenTransformer

SEQUENCES_AT_ONCE = 128
"""The most sequences of one graph: with powers of two below it, eight graphs, as many as dynamo keeps by default."""

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
        if compile:
            # On a GPU the graph of a bucket is also recorded, which takes the launches off the host.
            mode = "reduce-overhead" if next(model.parameters()).device.type == "cuda" else None
            self._trunk = torch.compile(model.trunk, dynamic=False, fullgraph=True, mode=mode)

    @torch.no_grad()
    def __call__(
        self, tokens_AL: Int[Tensor, "A L"], time_A: Float[Tensor, " A"], rows_N: Int[Tensor, " N"]
    ) -> Float[Tensor, "N V"]:
        """Logits at rows a * L + l."""
        return self._head(self.hidden(tokens_AL, time_A).flatten(0, 1)[rows_N])

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
            if self.compile:
                torch.compiler.cudagraph_mark_step_begin()
            hidden_BLD = self._run(padded_BL, padded_B)[:count]
            # A recorded graph writes its next result over this one.
            parts.append(hidden_BLD if count == len(tokens_AL) else hidden_BLD.clone())
        return parts[0] if len(parts) == 1 else torch.cat(parts)

    def _run(self, tokens_BL: Tensor, time_B: Tensor) -> Tensor:
        return self._trunk(tokens_BL, time_B if self.model.config.time_conditioning else None)

    def _most(self) -> int:
        return SEQUENCES_AT_ONCE if self.fixed_batch is None else self.fixed_batch

    def _size(self, count: int) -> int:
        if self.fixed_batch is not None:
            return self.fixed_batch
        return 1 << (count - 1).bit_length()

    def _head(self, hidden_ND: Tensor) -> Tensor:
        if self.fixed_batch is None:
            return self.model.head(hidden_ND)
        parts = []
        for part in hidden_ND.split(FIXED_ROWS):
            padded = torch.cat((part, part[:1].expand(FIXED_ROWS - len(part), -1)))
            parts.append(self.model.head(padded)[: len(part)])
        return torch.cat(parts)
