"""Stage: an artifact's outputs against its source's, over its shapes and on real inputs."""
