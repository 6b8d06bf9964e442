"""Predict stage: run a model on every row of a file or every image of a folder."""
