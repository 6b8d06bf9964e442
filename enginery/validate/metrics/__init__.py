"""Metrics and the tolerances that decide whether an output passes."""
