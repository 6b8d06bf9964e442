"""Source models: finding and reading their files."""
