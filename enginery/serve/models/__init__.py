"""The models of a server: a registry of served models, each with its backend."""
