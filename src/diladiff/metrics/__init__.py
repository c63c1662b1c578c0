"""Measurements of texts and ids; none of them looks inside a model."""
