"""What a hosted model gives back: the values, and where the time went.

>>> reply.values[0].shape, reply.timings.tokens
((384,), 7)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(slots=True)
class Timings:
    """Of one request, in seconds; of several inputs the longest of each."""

    tokenize_seconds: float = 0.0
    """Tokenizing, or decoding and scaling images."""
    queue_seconds: float = 0.0
    """Waiting for a worker."""
    inference_seconds: float = 0.0
    """In a worker: padding, the graph, and its outputs into rows."""
    tokens: int = 0
    """Of all inputs, special tokens included."""
    truncated: int = 0
    """Inputs that were cut to what the model takes."""


@dataclass(slots=True)
class Reply:
    """The answers to one request, in the order of its inputs."""

    values: Any
    timings: Timings
