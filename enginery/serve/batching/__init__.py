"""Rows of many requests in batches: admission, planning, cost, workers.

Nothing here knows of HTTP, or of how models are loaded.
"""
