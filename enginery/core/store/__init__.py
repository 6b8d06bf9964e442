"""The store: finished artifacts, engines and optimized graphs, by fingerprint."""
