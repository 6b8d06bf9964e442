"""What calibration found, on disk: enough to make the same graph again without the data.

    >>> recorded = Recorded.read("build/minilm-int8", graph_sha256="9c1f…", scheme="int8")
    >>> recorded.ranges["/encoder/layer.0/Add_output_0"].scale
    0.0312

It is `reports/ranges.json` of a quantized artifact.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from enginery.core.errors import InputError
from enginery.core.json_file import document_bytes, parse_json
from enginery.passes.layers import Layer
from enginery.passes.qdq import ActivationQuantParams
from enginery.passes.scheme import Vector

RANGES = "ranges.json"
VERSION = 1


@dataclass(frozen=True)
class Smoothed:
    """How one activation was smoothed, for the report."""

    strength: float
    shifted: bool
    error: float


@dataclass(frozen=True)
class Recorded:
    """Everything that the data decided."""

    graph_sha256: str
    """Of the FP32 graph: ranges fit no other."""
    scheme: str
    """`int8` or `fp8`: a range is a scale, and a scale is of one of them."""
    ranges: dict[str, ActivationQuantParams]
    """By activation."""
    bias_deltas: dict[str, Vector]
    """By layer."""
    left_out: dict[str, str]
    """Layers that stay as they are, with reasons."""
    smoothed: dict[str, Smoothed]
    """By activation."""
    fp32_nodes: dict[str, str]
    """Nodes whose numbers leave FP16's range, with reasons."""

    def quantized(self, layers: Sequence[Layer]) -> list[Layer]:
        """The layers that are quantized."""
        return [layer for layer in layers if layer.name not in self.left_out]

    def to_json(self) -> bytes:
        """The file's content."""
        document = {
            "version": VERSION,
            "graph_sha256": self.graph_sha256,
            "scheme": self.scheme,
            "ranges": {
                name: {"scale": float(r.scale), "multiplier": _list(r.multiplier),
                       "offset": _list(r.offset)}
                for name, r in self.ranges.items()
            },
            "bias_deltas": {name: _list(delta) for name, delta in self.bias_deltas.items()},
            "left_out": self.left_out,
            "fp32_nodes": self.fp32_nodes,
            "smoothed": {name: asdict(found) for name, found in self.smoothed.items()},
        }  # fmt: skip
        return json.dumps(document).encode() + b"\n"

    @classmethod
    def read(cls, path: str | Path, *, graph_sha256: str, scheme: str) -> Recorded:
        """Reads the file, or that of an artifact's directory.

        Raises:
            InputError: there is none, it is not such a file, or it belongs to another graph or
                scheme.
        """
        file = find_ranges(path)
        try:
            found = parse_json(document_bytes(file))
            recorded = cls(
                graph_sha256=found["graph_sha256"],
                scheme=found["scheme"],
                ranges={n: _range(r) for n, r in found["ranges"].items()},
                bias_deltas={n: _required(v) for n, v in found["bias_deltas"].items()},
                left_out=dict(found["left_out"]),
                smoothed={n: Smoothed(**s) for n, s in found["smoothed"].items()},
                fp32_nodes=dict(found["fp32_nodes"]),
            )
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"ranges '{file}' cannot be read: {error}.") from error
        if recorded.graph_sha256 != graph_sha256:
            raise InputError(
                f"ranges '{file}' were calibrated for another graph "
                f"({recorded.graph_sha256[:12]}…, this is {graph_sha256[:12]}…).",
                do="Calibrate this one: --calibration FILE",
            )
        if recorded.scheme != scheme:
            raise InputError(
                f"ranges '{file}' were calibrated for {recorded.scheme}, found --scheme {scheme}.",
                do="Calibrate anew: --calibration FILE",
            )
        return recorded


def find_ranges(path: str | Path) -> Path:
    """The file itself, or that of an artifact; raises InputError where there is none."""
    given = Path(path).expanduser()
    for file in (given, given / "reports" / RANGES):
        if file.is_file():
            return file
    raise InputError(f"ranges '{given}': expected a {RANGES}, or an artifact with one.")


def _range(record: dict[str, Any]) -> ActivationQuantParams:
    return ActivationQuantParams(
        float(record["scale"]), _vector(record["multiplier"]), _vector(record["offset"])
    )


def _list(vector: Vector | None) -> list[float] | None:
    # float32 through float64 and back is exact.
    return None if vector is None else [float(value) for value in vector]


def _vector(values: list[float] | None) -> Vector | None:
    return None if values is None else _required(values)


def _required(values: list[float]) -> Vector:
    return np.asarray(values, dtype=np.float32)
