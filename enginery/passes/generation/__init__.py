"""Prepare the graphs of decoders for generation."""
