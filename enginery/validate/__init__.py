"""Stage: an artifact's outputs against PyTorch, over its shapes and on real inputs."""
