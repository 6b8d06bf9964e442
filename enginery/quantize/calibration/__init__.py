"""Calibration inputs, and what is measured on them: ranges, statistics, smoothing."""
