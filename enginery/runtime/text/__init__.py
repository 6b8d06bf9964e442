"""Tokenizers, batches of texts, and pooling."""
