"""Audio files, and the processors that turn them into a model's features."""
