"""Artifacts: their files, manifest, hashes, engines and reports."""
