"""The model to measure: an artifact or an .onnx file.

>>> Target.open(artifact, "", allow_failed=False).record.inputs[0]
TensorSpec(name='input_ids', dtype='int64', dims=('batch', 'sequence'))

An .onnx file is opened in place: nothing is copied, and nothing is written beside it. It has no
PyTorch model and no tokenizer, and its dims are those that the file names.
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.fingerprint import combined_sha256, sha256_of
from enginery.core.artifact.manifest import GraphRecord, Manifest, SourceRecord
from enginery.core.errors import ArtifactError, OptionError, ProviderError
from enginery.core.model.feeds import FeedLimits
from enginery.core.model.files import ModelConfig
from enginery.core.shapes import Dim, TensorSpec, canonical_dim
from enginery.core.trust.graph_limits import check_allocations
from enginery.core.trust.resource_limits import ResourceLimits, limited_call
from enginery.reports.benchmark import SubjectRecord
from enginery.reports.validation import ValidationReport
from enginery.runtime.onnxruntime.session import tensor_spec

IMAGE_AXES = {
    "first": ("batch", "channels", "height", "width"),
    "last": ("batch", "height", "width", "channels"),
}
_CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class Target:
    """A model to measure."""

    name: str
    artifact: Artifact
    record: GraphRecord
    """The graph to measure."""
    limits: FeedLimits
    is_onnx_file: bool
    """True for an .onnx file, False for an artifact."""

    @classmethod
    def open(cls, model: Artifact | str | Path, graph: str, *, allow_failed: bool) -> Target:
        """Open an artifact or an .onnx file.

        Args:
            model: the artifact, its directory, or an .onnx file.
            graph: which graph of the artifact; empty for the first.
            allow_failed: accept an artifact whose validation failed.

        Raises:
            ArtifactError: `model` is neither of them, or has no such graph.
            RejectedArtifactError: its validation failed.
            ProviderError: ONNX Runtime cannot read the file.
        """
        if not isinstance(model, Artifact) and Path(model).suffix == ".onnx":
            artifact = artifact_from_onnx(Path(model))
        else:
            artifact = model if isinstance(model, Artifact) else Artifact.open(model)
        artifact.require_passed(allow_failed=allow_failed)
        record = artifact.graph(graph) if graph else artifact.manifest.graphs[0]
        is_onnx_file = artifact.manifest.library == "" and not artifact.manifest.stages
        config = ModelConfig() if is_onnx_file else ModelConfig.read(artifact.path)
        limits = FeedLimits.from_config(config, record.sample_sizes)
        if is_onnx_file:  # without a config.json, default sizes of dims would be guesses
            limits = replace(limits, sizes={})
        name = (
            Path(model).stem if is_onnx_file and not isinstance(model, Artifact) else artifact.name
        )
        return cls(name, artifact, record, limits, is_onnx_file)

    @property
    def model(self) -> Path:
        """Path of the ONNX file."""
        return self.artifact.path / self.record.file

    def content_sha256(self) -> str:
        """Return a digest of what is measured: the graph's name and the files of the artifact."""
        files = {self.record.file: sha256_of(self.model)}
        source = self.artifact.manifest.source
        if not self.is_onnx_file:
            files |= {"artifact": self.artifact.content_sha256(), "source": source.sha256}
        return combined_sha256(files)

    def as_json(self) -> SubjectRecord:
        """Return the target's record for the result."""
        manifest = self.artifact.manifest
        record: SubjectRecord = {
            "name": self.name,
            "path": str(self.model if self.is_onnx_file else self.artifact.path),
            "graph": self.record.file,
            "graph_sha256": sha256_of(self.model),
            "source": manifest.source.id,
            "task": manifest.task,
            "precision": manifest.precision,
            "target": manifest.target,
        }
        if self.is_onnx_file:
            return record
        record["size_bytes"] = self.artifact.graph_bytes(self.record)
        record["verdict"] = self.artifact.validation_status()
        with suppress(ArtifactError):  # the page of that artifact says that the report is damaged
            report = ValidationReport.of(self.artifact)
            if error := report and report.error_use():
                record["error"] = error
        return record


def number_duplicate_names(targets: list[Target]) -> list[Target]:
    """Number targets that have the same name: `bert (1)`, `bert (2)`."""
    names = [target.name for target in targets]
    return [
        replace(target, name=f"{target.name} ({names[: index + 1].count(target.name)})")
        if names.count(target.name) > 1
        else target
        for index, target in enumerate(targets)
    ]


def artifact_from_onnx(path: Path) -> Artifact:
    """Return an artifact in memory for an .onnx file.

    Raises:
        ArtifactError: the file does not exist, or it is not an ONNX model.
        ProviderError: ONNX Runtime cannot read it.
    """
    if not path.is_file():
        raise ArtifactError(f"{path} was not found.", do="Name an artifact or an .onnx file.")
    check_allocations(path)
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        with limited_call(path, lambda: ResourceLimits.of_graph_file(path)):
            session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises many unrelated types
        raise ProviderError(f"ONNX Runtime cannot read {path}: {error}") from error
    inputs = tuple(_spec(value) for value in session.get_inputs())
    record = GraphRecord(
        file=path.name,
        opset=0,
        inputs=tuple(_with_image_dims(spec) for spec in inputs),
        outputs=tuple(_spec(value) for value in session.get_outputs()),
        data_files=(),
    )
    source = SourceRecord(kind="onnx", id=str(path), revision="", sha256="", files={})
    manifest = Manifest(
        source=source,
        task="unknown",
        model_type="unknown",
        library="",
        precision=_precision(record),
        target="onnx",
        graphs=(record,),
        stages=(),
        files={},
    )
    return Artifact(path.parent, manifest)


def image_layout(spec: TensorSpec) -> Literal["first", "last"]:
    """Return the position of the channels in an image input.

    Returns:
        `first` for (batch, channels, height, width), `last` for (batch, height, width, channels).

    Raises:
        OptionError: the input is not an image.
    """
    if len(spec.dims) == 4 and spec.dtype in ("float32", "float16", "uint8"):
        if spec.dims[1] in _CHANNELS or spec.name == "pixel_values":
            return "first"
        if spec.dims[3] in _CHANNELS:
            return "last"
        if all(isinstance(dim, str) for dim in spec.dims):
            return "first"
    raise OptionError(
        f"option 'images': the input {spec} is not an image, expected 4 dims with 1, 3 or 4 "
        "channels."
    )


def _with_image_dims(spec: TensorSpec) -> TensorSpec:
    """Give the dynamic dims of an image input their usual names.

    Paddle's exporter calls them `DynamicDimension.0`; others write `p2o.dim`, `?` or no name.
    """
    if len(spec.dims) != 4:
        return spec
    try:
        axes = IMAGE_AXES[image_layout(spec)]
    except OptionError:
        return spec
    pairs = zip(spec.dims, axes, strict=True)
    dims: list[Dim] = [dim if isinstance(dim, int) else axis for dim, axis in pairs]
    return TensorSpec(spec.name, spec.dtype, tuple(dims))


def _spec(value: Any) -> TensorSpec:
    """Return the spec of an `onnxruntime.NodeArg`, with canonical names of the dynamic dims."""
    spec = tensor_spec(value)
    dims: list[Dim] = [
        dim if isinstance(dim, int) else f"dim{index}" if dim == "?" else canonical_dim(dim)
        for index, dim in enumerate(spec.dims)
    ]
    return TensorSpec(spec.name, spec.dtype, tuple(dims))


def _precision(record: GraphRecord) -> str:
    types = {spec.dtype for spec in (*record.inputs, *record.outputs)}
    return "fp16" if "float16" in types and "float32" not in types else "fp32"
