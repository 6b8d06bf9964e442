"""The record of a TensorRT engine: `engine.json`, in the directory of the engine.

    record = EngineRecord.read(Path("minilm/engines/tensorrt-rtx-sm89-3f2a91c04be7d815"))
    record.tensorrt    # '1.7.1'
    record.profiles    # ('batch=1:8:32,sequence=8:128:512',)

The directory is `engines/<flavor>-<sm>-<first 16 digits of the key>/` in the artifact that the
engine was built from. It also holds the plan, an ONNX model that wraps it, and the list of layers.
The last member of the file, `self_sha256`, is the sha256 of everything before it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from enginery.core.artifact.fingerprint import combined_sha256
from enginery.core.artifact.manifest import Count, FileRecord, GraphRecord, RelativePath
from enginery.core.errors import ArtifactError
from enginery.core.json_file import (
    ChecksumError,
    append_checksum,
    first_problem,
    read_document,
    verify_checksum,
)
from enginery.core.paths import list_directory, resolve_inside
from enginery.core.shapes import TensorSpec, one_of

ENGINES = "engines"
ENGINE_FILE = "engine.json"
SCHEMA_VERSION: Literal[1] = 1
_KEY_DIGITS = 16

LayerKind = Literal["gemm", "convolution", "attention", "other"]
"""Type of a layer, independent of TensorRT's names."""


FlavorName = Annotated[str, Field(pattern=one_of("tensorrt", "tensorrt-rtx"))]
Compatibility = Annotated[
    str, Field(pattern=one_of("none", "ampere-plus", "same-compute-capability"))
]
Capability = Annotated[str, Field(pattern=r"^[0-9]{1,2}\.[0-9]$")]
"""A compute capability, `8.9`."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GpuRecord(_Record):
    """The GPU that an engine was built on; empty if the flavor builds without one."""

    name: str = ""
    driver: str = ""


@dataclass(frozen=True)
class LayerRecord:
    """One layer of an engine, an entry of `layers.json`."""

    name: str
    kind: LayerKind
    precision: str
    """Precision of the multiplied values for a GEMM, a convolution or an attention, and of the
    output for other layers: fp32, fp16, bf16, fp8, int8, or TensorRT's name of another type."""
    type: str
    """TensorRT's layer type: gemm, kgen (a generated kernel), runtime_fusion, CaskConvolution, …"""
    inputs: tuple[str, ...]
    """Types of the input activations."""
    constants: tuple[str, ...]
    """Types of the weights and scales."""
    outputs: tuple[str, ...]
    nodes: tuple[str, ...]
    """Names of the ONNX nodes that the layer computes."""
    tactic: str


_PRODUCTS = {
    "gemm": "matrix product",
    "convolution": "convolution",
    "attention": "fused attention",
}
"""Kinds of layers that multiply, in words."""


def describe_products(layers: Mapping[str, int]) -> str:
    """Return the layers that multiply, by kind and precision; empty if there are none.

    Args:
        layers: number of layers by kind and precision, as in `EngineRecord.layers`.

    >>> describe_products({"other fp16": 40, "gemm fp16": 12, "gemm int8": 8, "attention fp16": 6})
    '12 FP16, 8 INT8 matrix products; 6 FP16 fused attentions'
    """
    parts = []
    for kind, title in _PRODUCTS.items():
        counts = {
            name.removeprefix(kind).strip().upper(): count
            for name, count in sorted(layers.items(), key=lambda layer: -layer[1])
            if name.partition(" ")[0] == kind
        }
        if counts:
            listed = ", ".join(f"{count} {name}".rstrip() for name, count in counts.items())
            parts.append(f"{listed} {title}{'s' * (sum(counts.values()) != 1)}")
    return "; ".join(parts)


class EngineRecord(_Record):
    """The content of `engine.json`: one plan of one graph."""

    schema_version: Literal[1] = SCHEMA_VERSION
    flavor: FlavorName
    """`tensorrt` or `tensorrt-rtx`."""
    tensorrt: str
    """Version of TensorRT; a plan runs only with this one."""
    capabilities: tuple[Capability, ...]
    """Compute capabilities that it was built for, such as `8.9`; empty for a portable plan."""
    gpu: GpuRecord = GpuRecord()
    hardware_compatibility: Compatibility = "none"
    """Classic TensorRT: `none`, `ampere-plus` or `same-compute-capability`."""
    profiles: tuple[str, ...]
    """`batch=1:8:32,sequence=8:128:512`, in the plan's order; empty for fixed shapes."""
    graph: RelativePath
    """Name of the ONNX file in the artifact that the plan was built from."""
    graph_sha256: str
    """Digest of that file and its external data; see the function `graph_sha256`."""
    key: str
    """Digest of the fingerprint, 64 hex digits."""
    fields: dict[str, str]
    """Fields of the fingerprint."""
    plan: RelativePath
    """File name in the engine's directory."""
    plan_sha256: str
    plan_size_bytes: Count
    wrapper: RelativePath
    """File name of the ONNX model that ONNX Runtime opens instead of the graph."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    """Inputs and outputs, with the names and dims of the artifact's graph."""
    layers: dict[str, Count]
    """Number of layers by kind and precision: `{"gemm int8": 50, "attention fp16": 12}`."""
    layer_list: RelativePath
    """File name of the list of all layers, `layers.json`."""
    fused_attentions: Count
    activation_bytes: Count
    """Device memory for activations at the largest shapes of the profiles, from TensorRT."""
    weights_bytes: Count
    seconds: float
    """Time that TensorRT took to parse and build."""
    peak_rss_bytes: Count
    """Peak memory of the process that built the engine."""
    warnings: tuple[str, ...]
    """Distinct warnings of TensorRT."""
    options: dict[str, Any]
    """Options of the build."""

    @classmethod
    def read(cls, directory: Path) -> EngineRecord:
        """Read the record in the directory of an engine.

        Raises:
            ArtifactError: it is missing, cannot be read, was altered, or was written by a newer
                enginery.
        """
        file = directory / ENGINE_FILE
        try:
            content = read_document(file)
        except (FileNotFoundError, NotADirectoryError):
            raise ArtifactError(f"{directory} is not an engine: it has no {ENGINE_FILE}.") from None
        except OSError as error:
            raise ArtifactError(f"{file} cannot be read: {error}.") from error
        try:
            content = verify_checksum(content)
            return cls.model_validate_json(content)
        except ChecksumError as error:
            raise ArtifactError(f"{file} is damaged: {error}.") from error
        except ValidationError as error:
            problem = first_problem(error)
            is_newer = problem.startswith("schema_version:")
            raise ArtifactError(
                f"{file}: {problem} (expected engine version {SCHEMA_VERSION}).",
                do="It may come from a newer enginery." if is_newer else "",
            ) from error

    def to_bytes(self) -> bytes:
        """Return the content of `engine.json`, with its checksum."""
        return append_checksum(self.model_dump_json(indent=2))

    @property
    def directory_name(self) -> str:
        """Name of the directory under `engines/`: `tensorrt-rtx-sm89-3f2a91c04be7d815`.

        Several capabilities give `sm80-sm89`, none gives `portable`. The key distinguishes engines
        of several graphs.
        """
        targets = "-".join(f"sm{capability.replace('.', '')}" for capability in self.capabilities)
        return f"{self.flavor}-{targets or 'portable'}-{self.key[:_KEY_DIGITS]}"

    @property
    def hardware_target(self) -> str:
        """Description of the hardware that the engine needs, for registries.

        `hardware-bound: tensorrt-rtx 1.7.1, compute capability 8.9`
        """
        targets = ", ".join(self.capabilities)
        parts = [
            f"hardware-bound: {self.flavor} {self.tensorrt}",
            f"compute capability {targets}" if targets else "any compute capability of its flavor",
            *([f"built on {self.gpu.name}"] if self.gpu.name else []),
        ]
        return ", ".join(parts)


def plan_name(graph: str) -> str:
    """Return the file name of a graph's plan.

    >>> plan_name("model.onnx")
    'model.plan'
    """
    return f"{Path(graph).stem}.plan"


def wrapper_name(graph: str) -> str:
    """Return the file name of the ONNX model that wraps a plan, after ONNX Runtime's convention.

    >>> wrapper_name("model.onnx")
    'model_ctx.onnx'
    """
    return f"{Path(graph).stem}_ctx.onnx"


def engine_directories(artifact: Path) -> list[Path]:
    """Return the directories of all engines of an artifact, sorted by name."""
    root = resolve_inside(artifact, ENGINES, what=f"the artifact {artifact}")
    return sorted(
        path
        for path in list_directory(root)
        if not path.is_symlink() and (path / ENGINE_FILE).is_file()
    )


def graph_sha256(graph: GraphRecord, files: Mapping[str, FileRecord]) -> str:
    """Return one digest of an ONNX file and its external data, from the manifest.

    Args:
        graph: record of the graph.
        files: files of the manifest, by name.
    """
    return combined_sha256({name: files[name].sha256 for name in (graph.file, *graph.data_files)})
