"""The models of a server: the registry, and served models with their backends."""
