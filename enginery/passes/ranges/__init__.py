"""Measure the ranges of a graph's tensors."""
