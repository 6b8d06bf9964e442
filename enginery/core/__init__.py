"""Artifacts, manifests, fingerprints, the store, shapes, precisions, data and errors."""
