"""Serve: artifacts over HTTP, in the protocols that clients already speak."""
