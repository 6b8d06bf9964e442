"""What TensorRT says of a graph: whether it takes it, and the engine that it made of it.

>>> report = parse_onnx(Path("model.onnx"))
>>> report.accepted, [str(refusal) for refusal in report.refusals]
(False, ['/Split_1 (If): …'])
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
    """A node that TensorRT does not take."""

    node: str
    """Its name; `#7` for the seventh node of a graph without names; empty where TensorRT
    refuses the graph as a whole."""
    op_type: str
    reason: str
    """TensorRT's own words."""
    remedy: str = ""
    """What to do about it, where that is known."""

    def __str__(self) -> str:
        where = f"{self.node} ({self.op_type}): " if self.node else ""
        return f"{where}{self.reason}"


@dataclass(frozen=True)
class ParseReport:
    """Whether TensorRT's parser takes a graph."""

    path: str
    tensorrt: str
    """TensorRT's version."""
    accepted: bool
    refusals: tuple[Refusal, ...]
    """Every operator that it does not know; of other reasons, the first that it meets."""
    inputs: tuple[TensorSpec, ...]
    warnings: tuple[str, ...]

    def require_accepted(self) -> None:
        """Raises ProviderError, naming the first node, unless TensorRT takes the graph."""
        if self.accepted:
            return
        more = f" ({len(self.refusals) - 1} more)" if len(self.refusals) > 1 else ""
        raise ProviderError(
            f"{self.path}: TensorRT {self.tensorrt} refuses {self.refusals[0]}{more}",
            do=f"Run: enginery lint {self.path} --target tensorrt",
        )


@dataclass(frozen=True)
class Coverage:
    """Which nodes of a graph TensorRT takes; those inside branches and loops count with theirs."""

    path: str
    tensorrt: str
    """TensorRT's version."""
    total: int
    """Nodes of the graph."""
    taken: int
    """Nodes that the parser takes."""
    refused: tuple[Refusal, ...]
    """The others. Of their reasons TensorRT gives the first that it meets."""
    partitions: int
    """Connected parts of the graph that it takes; a graph that it takes whole is 1."""

    def require_complete(self) -> None:
        """Raises ProviderError, with the first refused node and its remedy, unless it takes all."""
        if not self.refused:
            return
        more = f" ({len(self.refused) - 1} more)" if len(self.refused) > 1 else ""
        parts = f"{self.partitions} partition{'' if self.partitions == 1 else 's'}"
        raise ProviderError(
            f"{self.path}: TensorRT {self.tensorrt} takes {self.taken} of {self.total} nodes, in "
            f"{parts}; it refuses {self.refused[0]}{more}",
            do=self.refused[0].remedy or f"Run: enginery lint {self.path} --target tensorrt",
        )


@dataclass(frozen=True)
class BuiltPlan:
    """A serialized engine, and what is in it."""

    held: bytes = field(repr=False)
    """The plan; empty where it was written to a file."""
    plan_path: str
    """The file that it was written to; empty where it is held."""
    plan_bytes: int
    """The size of the plan."""
    flavor: str
    layers: tuple[LayerRecord, ...]
    """In the order that they run."""
    tensorrt: str
    """TensorRT's version; the plan runs with no other."""
    capabilities: tuple[str, ...]
    """The compute capabilities it was built for; none for a portable plan."""
    profiles: tuple[str, ...]
    """The profiles, `batch=1:8:32,sequence=8:128:512`."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    seconds: float
    """What TensorRT took to parse and to build."""
    peak_rss_bytes: int
    """Of the process that built."""
    activation_bytes: int
    """Device memory for activations at the profiles' largest shapes, as TensorRT counts it."""
    weights_bytes: int
    warnings: tuple[str, ...]
    """TensorRT's warnings, each once."""

    @property
    def plan(self) -> bytes:
        """The plan itself, read from its file if it is there."""
        return Path(self.plan_path).read_bytes() if self.plan_path else self.held

    def count(self, kind: LayerKind, precision: str = "") -> int:
        """How many layers are of a kind (and a precision): `count("gemm", "int8")`."""
        return sum(
            layer.kind == kind and precision in ("", layer.precision) for layer in self.layers
        )

    def counts(self) -> dict[str, int]:
        """Layers by kind and precision: `{"gemm int8": 50, "attention fp16": 12, …}`."""
        return dict(Counter(f"{layer.kind} {layer.precision}".strip() for layer in self.layers))

    @property
    def int8_gemms(self) -> int:
        """Matrix multiplications on INT8 activations; fused neighbours count as one."""
        return self.count("gemm", "int8")

    @property
    def fp16_gemms(self) -> int:
        """Matrix multiplications on FP16 activations; those inside a fused attention not."""
        return self.count("gemm", "fp16")

    @property
    def bf16_gemms(self) -> int:
        """Matrix multiplications on BF16 activations; those inside a fused attention not."""
        return self.count("gemm", "bf16")

    @property
    def fp32_gemms(self) -> int:
        """Matrix multiplications on FP32 activations."""
        return self.count("gemm", "fp32")

    @property
    def fp8_gemms(self) -> int:
        """Matrix multiplications on FP8 activations."""
        return self.count("gemm", "fp8")

    @property
    def int8_convolutions(self) -> int:
        """Convolutions on INT8 activations."""
        return self.count("convolution", "int8")

    @property
    def fused_attentions(self) -> int:
        """Attentions that became one kernel, of any precision."""
        return self.count("attention")
