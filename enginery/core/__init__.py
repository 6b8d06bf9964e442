"""The nouns: artifacts, manifests, fingerprints, the store, shapes, precisions, feeds, errors."""
