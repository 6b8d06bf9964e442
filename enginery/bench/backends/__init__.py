"""The backends that are measured, each in its own process."""
