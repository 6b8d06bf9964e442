"""Sockets, connections and processes of the server, on uvicorn."""
