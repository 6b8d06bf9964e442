"""Observability of the server: request records, metrics, the access log and traces."""
