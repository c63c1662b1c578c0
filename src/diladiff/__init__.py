"""Latent-augmented diffusion language models: train, distil, sample and measure."""

__version__ = "0.1.0"
