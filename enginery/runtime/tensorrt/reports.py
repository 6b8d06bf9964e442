"""Results of TensorRT for a graph: which nodes are supported, and the built engine.

    report = parse_onnx(Path("model.onnx"))
    report.accepted                                     # False
    [str(refusal) for refusal in report.refusals]       # ['/Split_1 (If): …']

The child process returns them as JSON; see `tensorrt.process`.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from enginery.core.artifact.engine_record import LayerKind, LayerRecord
from enginery.core.errors import ProviderError
from enginery.core.shapes import TensorSpec


@dataclass(frozen=True)
class Refusal:
    """A node that TensorRT rejects, or would compute incorrectly."""

    node: str
    """Its name; `#7` for an unnamed node with index 7; empty if the whole graph is rejected."""
    op_type: str
    """Empty if the reason names it."""
    reason: str
    """Message of TensorRT or of `enginery lint`."""
    remedy: str = ""
    """What to do about it, if known."""

    def __str__(self) -> str:
        op_type = f" ({self.op_type})" if self.op_type else ""
        where = f"{self.node}{op_type}: " if self.node else ""
        return f"{where}{self.reason}"


@dataclass(frozen=True)
class ParseReport:
    """The result of TensorRT's parser for a graph."""

    path: str
    tensorrt: str
    """TensorRT's version."""
    accepted: bool
    refusals: tuple[Refusal, ...]
    """Every unsupported operator, but only the first among other problems."""
    inputs: tuple[TensorSpec, ...]
    warnings: tuple[str, ...]

    def require_accepted(self) -> None:
        """Raise ProviderError with the first rejected node, if there is one."""
        if self.accepted:
            return
        more = f" ({len(self.refusals) - 1} more)" if len(self.refusals) > 1 else ""
        raise ProviderError(
            f"{self.path}: TensorRT {self.tensorrt} rejects {self.refusals[0]}{more}",
            do=f"Run: enginery lint {self.path} --target tensorrt",
        )


@dataclass(frozen=True)
class Coverage:
    """Which nodes of a graph TensorRT supports; subgraphs count as part of their node."""

    path: str
    tensorrt: str
    """TensorRT's version."""
    total: int
    """Number of nodes in the graph."""
    taken: int
    """Number of nodes that the parser supports."""
    refused: tuple[Refusal, ...]
    """The other nodes. TensorRT gives only the first reason that it finds."""
    partitions: int
    """Number of supported subgraphs; 1 if the whole graph is supported."""


@dataclass(frozen=True)
class BuiltPlan:
    """A serialized engine and its properties."""

    held: bytes = field(repr=False)
    """Content of the plan; empty if it was written to a file."""
    plan_path: str
    """File of the plan; empty if it is in memory."""
    plan_bytes: int
    """Size of the plan."""
    flavor: str
    layers: tuple[LayerRecord, ...]
    """Layers in execution order."""
    tensorrt: str
    """Version of TensorRT; the plan runs only with this one."""
    capabilities: tuple[str, ...]
    """Compute capabilities that it was built for; empty for a portable plan."""
    profiles: tuple[str, ...]
    """Profiles, `batch=1:8:32,sequence=8:128:512`."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    seconds: float
    """Time to parse and build."""
    peak_rss_bytes: int
    """Peak memory of the process that built the engine."""
    activation_bytes: int
    """Device memory for activations at the largest shapes of the profiles, from TensorRT."""
    weights_bytes: int
    warnings: tuple[str, ...]
    """Distinct warnings of TensorRT."""

    @property
    def plan(self) -> bytes:
        """Content of the plan, read from its file if it was written to one."""
        return Path(self.plan_path).read_bytes() if self.plan_path else self.held

    def count(self, kind: LayerKind, precision: str = "") -> int:
        """Return the number of layers of a kind (and a precision): `count("gemm", "int8")`."""
        return sum(
            layer.kind == kind and precision in ("", layer.precision) for layer in self.layers
        )

    def counts(self) -> dict[str, int]:
        """Return the number of layers by kind and precision: `{"gemm int8": 50, …}`."""
        return dict(Counter(f"{layer.kind} {layer.precision}".strip() for layer in self.layers))

    @property
    def int8_gemms(self) -> int:
        """Number of matrix products on INT8 activations; fused ones count once."""
        return self.count("gemm", "int8")

    @property
    def fused_attentions(self) -> int:
        """Number of attentions that run as one kernel, in any precision."""
        return self.count("attention")
