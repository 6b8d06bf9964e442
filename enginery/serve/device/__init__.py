"""Fronts and device processes: what the processes of a server for a GPU say to each other.

A *front* speaks HTTP: it parses, checks, tokenizes and answers. A *device process* owns one GPU: it
has the sessions, the queue and the metrics of batches, and runs whatever waits. Every front is
connected to every device process by a Unix socket.
"""
