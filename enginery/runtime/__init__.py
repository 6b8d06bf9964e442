"""Run models: providers, sessions, engines, tasks, tokenizers and the PyTorch reference."""
