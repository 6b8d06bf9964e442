"""Artifacts into registries, with a model card, and back."""
