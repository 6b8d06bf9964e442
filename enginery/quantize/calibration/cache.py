"""Calibration cache: the file from which the same quantized graph is made again without data.

It is `reports/ranges.json` of a quantized artifact.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from enginery.core.errors import ArtifactError, InputError
from enginery.core.json_file import parse_json, read_document
from enginery.passes.qdq.joining import joining_tensors
from enginery.passes.qdq.layers import Layer, quantized_tensors
from enginery.passes.qdq.scales import ActivationQuantParams
from enginery.passes.qdq.scheme import Vector

RANGES = "ranges.json"
VERSION = 1

Item = TypeVar("Item")


@dataclass(frozen=True)
class SmoothQuantParams:
    """Smoothing of one activation, as the report shows it."""

    strength: float
    shifted: bool
    error: float


@dataclass(frozen=True)
class CalibrationCache:
    """All results of a calibration."""

    graph_sha256: str
    """Digest of the FP32 graph; the ranges fit no other."""
    scheme: str
    """`Scheme.title` of the scheme that the scales are for."""
    ranges: dict[str, ActivationQuantParams]
    """Activation name -> range."""
    bias_deltas: dict[str, Vector]
    """Layer name -> correction of its bias, float32 (output channels,)."""
    left_out: dict[str, str]
    """Layers that are not quantized -> reason."""
    smoothed: dict[str, SmoothQuantParams]
    """Activation name -> smoothing."""
    fp32_nodes: dict[str, str]
    """Nodes that would overflow in FP16 -> reason."""
    beyond_layers: bool = False
    """True if what `BeyondLayers` names is quantized, too."""

    @classmethod
    def merge(cls, caches: Sequence[CalibrationCache], graph_sha256: str) -> CalibrationCache:
        """Return what was calibrated for several graphs as one.

        Args:
            caches: one or more, for the same scheme.
            graph_sha256: digest of all graphs.

        Raises:
            ArtifactError: two graphs have a layer or an activation of the same name.
        """

        def join(parts: Iterable[Mapping[str, Item]]) -> dict[str, Item]:
            merged: dict[str, Item] = {}
            for part in parts:
                # Nodes and tensors are found by name, whichever graph they are in.
                if common := sorted(merged.keys() & part.keys()):
                    raise ArtifactError(
                        f"two graphs have a node or a tensor named '{common[0]}', which their "
                        "calibrations cannot share.",
                        do="Rename it in one of them.",
                    )
                merged.update(part)
            return merged

        if len(caches) == 1:
            return caches[0]
        return cls(
            graph_sha256=graph_sha256,
            scheme=caches[0].scheme,
            ranges=join(cache.ranges for cache in caches),
            bias_deltas=join(cache.bias_deltas for cache in caches),
            left_out=join(cache.left_out for cache in caches),
            smoothed=join(cache.smoothed for cache in caches),
            fp32_nodes=join(cache.fp32_nodes for cache in caches),
            beyond_layers=all(cache.beyond_layers for cache in caches),
        )

    def of_graph(self, model: ir.Model, layers: Sequence[Layer]) -> CalibrationCache:
        """Return the part for one of several graphs.

        Args:
            model: the graph.
            layers: its layers.
        """
        names = {layer.name for layer in layers}
        nodes = {node.name for node in model.graph}
        # All that any target may have recorded; the cache says which of them are there.
        tensors = {*quantized_tensors(layers, outputs=True), *joining_tensors(model, layers)}
        return replace(
            self,
            ranges={n: r for n, r in self.ranges.items() if n in tensors},
            bias_deltas={n: d for n, d in self.bias_deltas.items() if n in names},
            left_out={n: r for n, r in self.left_out.items() if n in names},
            smoothed={n: s for n, s in self.smoothed.items() if n in tensors},
            fp32_nodes={n: r for n, r in self.fp32_nodes.items() if n in nodes},
        )

    def quantized_layers(self, layers: Sequence[Layer]) -> list[Layer]:
        """Return the layers that are quantized."""
        return [layer for layer in layers if layer.name not in self.left_out]

    def to_json(self) -> bytes:
        """Return the content of the file."""
        document = {
            "version": VERSION,
            "graph_sha256": self.graph_sha256,
            "scheme": self.scheme,
            "ranges": {name: r.to_json() for name, r in self.ranges.items()},
            # Converting float32 to float64 and back is exact.
            "bias_deltas": {n: [float(v) for v in d] for n, d in self.bias_deltas.items()},
            "left_out": self.left_out,
            "fp32_nodes": self.fp32_nodes,
            "beyond_layers": self.beyond_layers,
            "smoothed": {name: asdict(smoothing) for name, smoothing in self.smoothed.items()},
        }
        return json.dumps(document).encode() + b"\n"

    @classmethod
    def read(cls, path: str | Path, *, graph_sha256: str, scheme: str) -> CalibrationCache:
        """Read the file, or the one in an artifact's directory.

        Raises:
            InputError: the file is missing or malformed, or was written for another graph or
                scheme.
        """
        file = find_ranges_file(path)
        try:
            document = parse_json(read_document(file))
            cache = cls(
                graph_sha256=document["graph_sha256"],
                scheme=document["scheme"],
                ranges={
                    n: ActivationQuantParams.from_json(r) for n, r in document["ranges"].items()
                },
                bias_deltas={
                    n: np.asarray(d, dtype=np.float32) for n, d in document["bias_deltas"].items()
                },
                left_out=dict(document["left_out"]),
                smoothed={n: SmoothQuantParams(**s) for n, s in document["smoothed"].items()},
                fp32_nodes=dict(document["fp32_nodes"]),
                beyond_layers=bool(document.get("beyond_layers", False)),
            )
        except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
            raise InputError(f"ranges '{file}' cannot be read: {error}.") from error
        # Ranges belong to tensors by name, and another graph may have tensors of the same names.
        if cache.graph_sha256 != graph_sha256:
            raise InputError(
                f"ranges '{file}' were calibrated for another graph "
                f"(found {cache.graph_sha256[:12]}…, expected {graph_sha256[:12]}…).",
                do="Calibrate this graph: --data FILE",
            )
        # A scale maps a range to the numbers of its own scheme.
        if cache.scheme != scheme:
            raise InputError(
                f"ranges '{file}' were calibrated for {cache.scheme}, but this is {scheme}.",
                do=f"Calibrate for {scheme}: --data FILE",
            )
        return cache


def find_ranges_file(path: str | Path) -> Path:
    """Return the path of the cache: the file itself, or the one in an artifact.

    Raises:
        InputError: neither exists.
    """
    location = Path(path).expanduser()
    for file in (location, location / "reports" / RANGES):
        if file.is_file():
            return file
    raise InputError(
        f"ranges '{location}' not found: expected a {RANGES} file or an artifact that has one."
    )
