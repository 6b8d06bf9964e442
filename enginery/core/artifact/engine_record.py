"""What an engine says of itself: `engine.json`, beside its plan and its ONNX wrapper.

Takes and leaves JSON, in `engines/<flavor>-<sm>-<key16>/` of the artifact that it was built from:

    >>> record = EngineRecord.read(Path("minilm/engines/tensorrt-rtx-sm89-3f2a91c04be7d815"))
    >>> record.tensorrt, record.profiles
    ('1.7.1', ('batch=1:8:32,sequence=8:128:512',))
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, ValidationError

from enginery.core.artifact.fingerprint import combined_sha256
from enginery.core.artifact.manifest import Count, FileRecord, GraphRecord, RelativePath
from enginery.core.errors import ArtifactError
from enginery.core.json_file import read_document
from enginery.core.paths import resolve_inside
from enginery.core.shapes import TensorSpec

ENGINES = "engines"
ENGINE_FILE = "engine.json"
SCHEMA_VERSION: Literal[1] = 1
_KEY_DIGITS = 16

Kind = Literal["gemm", "convolution", "attention", "other"]
"""Of a layer, whatever TensorRT calls it."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class GpuRecord(_Record):
    """The GPU that an engine was built on; empty for a flavor that builds without one."""

    name: str = ""
    driver: str = ""


@dataclass(frozen=True)
class LayerRecord:
    """One layer of an engine, as `layers.json` lists it."""

    name: str
    kind: Kind
    precision: str
    """What a GEMM, a convolution or an attention multiplies, and any other layer gives its result
    in: fp32, fp16, bf16, fp8, int8, or TensorRT's name of another type."""
    type: str
    """TensorRT's own word: gemm, kgen (a generated kernel), runtime_fusion, CaskConvolution, …"""
    inputs: tuple[str, ...]
    """The types of the activations that it takes."""
    constants: tuple[str, ...]
    """The types of its weights and scales."""
    outputs: tuple[str, ...]
    nodes: tuple[str, ...]
    """The ONNX nodes that are in it."""
    tactic: str


class EngineRecord(_Record):
    """The whole of `engine.json`: one graph, one plan."""

    schema_version: Literal[1] = SCHEMA_VERSION
    flavor: str
    """`tensorrt` or `tensorrt-rtx`."""
    tensorrt: str
    """TensorRT's version; a plan runs with this one alone, unless it is `version_compatible`."""
    capabilities: tuple[str, ...]
    """The compute capabilities it was built for, `8.9`; none for a portable plan."""
    gpu: GpuRecord = GpuRecord()
    hardware_compatibility: str = "none"
    """Classic TensorRT: `none`, `ampere-plus` or `same-compute-capability`."""
    version_compatible: bool = False
    """Classic TensorRT: later minor versions of the same major take the plan, too."""
    profiles: tuple[str, ...]
    """`batch=1:8:32,sequence=8:128:512`, in the plan's order; none for fixed shapes."""
    graph: RelativePath
    """The ONNX file of the artifact that the plan was built from."""
    graph_sha256: str
    """Over that file and its external data; see `graph_sha256`."""
    key: str
    """The fingerprint's digest, 64 hex digits."""
    fields: dict[str, str]
    """What went into the fingerprint."""
    plan: RelativePath
    """File name, beside this record."""
    plan_sha256: str
    plan_size_bytes: Count
    wrapper: RelativePath
    """File name of the ONNX model that ONNX Runtime opens in the graph's place."""
    inputs: tuple[TensorSpec, ...]
    outputs: tuple[TensorSpec, ...]
    """As the artifact's graph names them and their dims."""
    layers: dict[str, Count]
    """Layers by kind and precision: `{"gemm int8": 50, "attention fp16": 12}`."""
    layer_list: RelativePath
    """File name of the list of all layers, `layers.json`."""
    fused_attentions: Count
    activation_bytes: Count
    """Device memory for activations at the profiles' largest shapes, as TensorRT counts it."""
    weights_bytes: Count
    seconds: float
    """What TensorRT took to parse and to build."""
    peak_rss_bytes: Count
    """Of the process that built."""
    warnings: tuple[str, ...]
    """TensorRT's warnings, each once."""
    options: dict[str, Any]
    """What the build was asked for."""

    @classmethod
    def read(cls, directory: Path) -> EngineRecord:
        """The record of one engine's directory.

        Raises:
            ArtifactError: there is none, it cannot be read, or a newer enginery wrote it.
        """
        file = directory / ENGINE_FILE
        try:
            text = read_document(file).decode()
        except (FileNotFoundError, NotADirectoryError):
            raise ArtifactError(f"{directory} is not an engine: it has no {ENGINE_FILE}.") from None
        except (OSError, UnicodeDecodeError) as error:
            raise ArtifactError(f"{file} cannot be read: {error}.") from error
        try:
            return cls.model_validate_json(text)
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the document"
            hint = "It may come from a newer enginery." if where == "schema_version" else ""
            raise ArtifactError(
                f"{file}: {where}: {first['msg']} (expected engine version {SCHEMA_VERSION}).",
                do=hint,
            ) from error

    def to_json(self) -> str:
        """The text of `engine.json`."""
        return self.model_dump_json(indent=2) + "\n"

    @property
    def directory_name(self) -> str:
        """Where the engine lies under `engines/`: `tensorrt-rtx-sm89-3f2a91c04be7d815`.

        Several capabilities are `sm80-sm89`, none is `portable`. The key tells engines of several
        graphs apart.
        """
        targets = "-".join(f"sm{capability.replace('.', '')}" for capability in self.capabilities)
        return f"{self.flavor}-{targets or 'portable'}-{self.key[:_KEY_DIGITS]}"

    @property
    def binding(self) -> str:
        """Return what the engine is bound to, in the words that every registry gets.

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
    """`model.plan` for `model.onnx`."""
    return f"{Path(graph).stem}.plan"


def wrapper_name(graph: str) -> str:
    """`model_ctx.onnx` for `model.onnx`, as ONNX Runtime names what it compiles."""
    return f"{Path(graph).stem}_ctx.onnx"


def engine_directories(artifact: Path) -> list[Path]:
    """The directories of all engines of an artifact, by name."""
    root = resolve_inside(artifact, ENGINES, what=f"the artifact {artifact}")
    found = root.iterdir() if root.is_dir() else ()
    return sorted(
        path for path in found if not path.is_symlink() and (path / ENGINE_FILE).is_file()
    )


def graph_sha256(graph: GraphRecord, files: Mapping[str, FileRecord]) -> str:
    """One digest over an ONNX file and its external data, from the artifact's own records.

    Args:
        graph: which graph.
        files: of the manifest, by name.
    """
    return combined_sha256({name: files[name].sha256 for name in (graph.file, *graph.data_files)})
