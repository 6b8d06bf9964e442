"""Dynamic batching: admission, batch planning, cost estimation and worker threads.

This package is independent of HTTP and of how models are loaded.
"""
