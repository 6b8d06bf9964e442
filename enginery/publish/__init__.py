"""Publish artifacts with a model card to registries, and pull them."""
