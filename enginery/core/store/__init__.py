"""Finished artifacts, engines and optimized graphs by fingerprint."""
