"""Where models run: providers, sessions, the PyTorch reference, tokenizers, answers."""
