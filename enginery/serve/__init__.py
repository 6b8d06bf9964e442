"""Stage: the HTTP server. Not there yet."""
