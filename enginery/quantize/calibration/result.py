"""The results of a calibration, of which `reports/ranges.json` has what `validate` compares."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from enginery.core.errors import ArtifactError
from enginery.passes.qdq.layers import Layer
from enginery.passes.qdq.scales import ActivationQuantParams
from enginery.passes.qdq.scheme import Vector

RANGES = "ranges.json"

Item = TypeVar("Item")


@dataclass(frozen=True)
class SmoothQuantParams:
    """Smoothing of one activation, as the report shows it."""

    strength: float
    shifted: bool
    error: float


@dataclass(frozen=True)
class Calibration:
    """All results of a calibration."""

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
    def merge(cls, parts: Sequence[Calibration]) -> Calibration:
        """Return what was calibrated for one or more graphs as one.

        Raises:
            ArtifactError: two graphs have a layer or an activation of the same name.
        """

        def join(mappings: Iterable[Mapping[str, Item]]) -> dict[str, Item]:
            merged: dict[str, Item] = {}
            for mapping in mappings:
                # Nodes and tensors are found by name, whichever graph they are in.
                if common := sorted(merged.keys() & mapping.keys()):
                    raise ArtifactError(
                        f"two graphs have a node or a tensor named '{common[0]}', which their "
                        "calibrations cannot share.",
                        do="Rename it in one of them.",
                    )
                merged.update(mapping)
            return merged

        return cls(
            ranges=join(part.ranges for part in parts),
            bias_deltas=join(part.bias_deltas for part in parts),
            left_out=join(part.left_out for part in parts),
            smoothed=join(part.smoothed for part in parts),
            fp32_nodes=join(part.fp32_nodes for part in parts),
            beyond_layers=all(part.beyond_layers for part in parts),
        )

    def quantized_layers(self, layers: Sequence[Layer]) -> list[Layer]:
        """Return the layers that are quantized."""
        return [layer for layer in layers if layer.name not in self.left_out]

    def to_json(self) -> bytes:
        """Return the content of the file."""
        document = {
            "ranges": {name: r.to_json() for name, r in self.ranges.items()},
            # Converting float32 to float64 and back is exact.
            "bias_deltas": {n: [float(v) for v in d] for n, d in self.bias_deltas.items()},
        }
        return json.dumps(document).encode() + b"\n"
