"""Predict on a Ray cluster."""
