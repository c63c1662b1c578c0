"""Losses, each with the networks that it trains."""
