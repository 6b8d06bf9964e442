"""Image files, and the processors that turn them into pixel values."""
