"""Serve artifacts over HTTP, in the protocols of TEI, OpenAI and the Open Inference Protocol."""
