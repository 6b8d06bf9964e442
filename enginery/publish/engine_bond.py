"""What an engine is bound to, in the words that every registry gets.

    >>> bound_to(EngineRecord.read(Path("minilm/engines/tensorrt-rtx-sm89-3f2a91c04be7d815")))
    'hardware-bound: tensorrt-rtx 1.7.1, compute capability 8.9'

The graph that it was built from goes along, and runs everywhere.
"""

from __future__ import annotations

from enginery.core.engine_record import EngineRecord


def bound_to(record: EngineRecord) -> str:
    """Flavor, TensorRT's version, compute capabilities, and the GPU where one was needed."""
    targets = ", ".join(record.capabilities)
    parts = [
        f"hardware-bound: {record.flavor} {record.tensorrt}",
        f"compute capability {targets}" if targets else "any compute capability of its flavor",
        *([f"built on {record.gpu.name}"] if record.gpu.name else []),
    ]
    return ", ".join(parts)
