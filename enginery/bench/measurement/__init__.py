"""Shapes, rounds and statistics of a measurement."""
