"""Latent-augmented diffusion language models: train, distil, sample and measure. `from diladiff import MaskedLM`."""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diladiff.pipelines.masked_lm import MaskedLM

__version__ = "0.1.0"

__all__ = ["MaskedLM", "__version__"]

LAZY = {"MaskedLM": "diladiff.pipelines.masked_lm"}
"""What the package gives on demand, so that importing it imports neither torch nor any layer."""


def __getattr__(name: str) -> Any:
    if name not in LAZY:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(LAZY[name]), name)
