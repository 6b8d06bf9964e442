"""What is measured: an artifact, or any .onnx file taken as one.

>>> Subject.of("detector.onnx", "", allow_failed=False).record.inputs[0]
TensorSpec(name='x', dtype='float32', dims=('batch', 3, 'height', 'width'))

An .onnx file is read where it lies, by ONNX Runtime; nothing is copied and nothing is written
beside it. It has no PyTorch model and no tokenizer, and only the dims that the file names.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.fingerprint import sha256_of
from enginery.core.artifact.manifest import GraphRecord, Manifest, SourceRecord
from enginery.core.artifact.reports import SubjectRecord
from enginery.core.errors import ArtifactError, OptionError, ProviderError
from enginery.core.model.feeds import FeedLimits
from enginery.core.model.files import ModelConfig
from enginery.core.shapes import Dim, TensorSpec, canonical_dim
from enginery.runtime.onnxruntime.graph_limits import check_allocations

_IMAGE_AXES = {
    "first": ("batch", "channels", "height", "width"),
    "last": ("batch", "height", "width", "channels"),
}
_CHANNELS = (1, 3, 4)


@dataclass(frozen=True)
class Subject:
    """One model whose speed is asked for."""

    name: str
    artifact: Artifact
    record: GraphRecord
    limits: FeedLimits
    is_bare: bool
    """Whether it is an .onnx file and no artifact."""

    @classmethod
    def of(cls, model: Artifact | str | Path, graph: str, *, allow_failed: bool) -> Subject:
        """Opens an artifact's directory, or an .onnx file.

        Raises:
            ArtifactError: it is neither, or has no such graph.
            RejectedArtifactError: its validation failed.
            ProviderError: ONNX Runtime cannot read the file.
        """
        if not isinstance(model, Artifact) and Path(model).suffix == ".onnx":
            artifact = artifact_of_file(Path(model))
        else:
            artifact = model if isinstance(model, Artifact) else Artifact.open(model)
        artifact.require_passed(allow_failed=allow_failed)
        record = artifact.graph(graph) if graph else artifact.manifest.graphs[0]
        is_bare = artifact.manifest.library == "" and not artifact.manifest.stages
        config = ModelConfig() if is_bare else ModelConfig.read(artifact.path)
        limits = FeedLimits.from_config(config)
        if is_bare:  # nothing is known of it, so nothing is taken as usual
            limits = replace(limits, sizes={})
        name = Path(model).stem if is_bare and not isinstance(model, Artifact) else artifact.name
        return cls(name, artifact, record, limits, is_bare)

    @property
    def model(self) -> Path:
        """The ONNX file."""
        return self.artifact.path / self.record.file

    @property
    def precision(self) -> str:
        """`int8` for a quantized artifact, else what its float tensors are."""
        manifest = self.artifact.manifest
        quantized = [stage for stage in manifest.stages if stage.stage == "quantize"]
        scheme = str(quantized[-1].options.get("scheme", "int8")) if quantized else ""
        return scheme or manifest.precision

    def convolutions(self) -> int | None:
        """How many the graph has, or None where the package onnx, which reads graphs, is absent."""
        try:
            import onnx
        except ImportError:
            return None
        graph = onnx.load(str(self.model), load_external_data=False).graph
        return sum(node.op_type in ("Conv", "ConvTranspose", "FusedConv") for node in graph.node)

    def as_json(self) -> SubjectRecord:
        """For the result: what it is, by content."""
        manifest = self.artifact.manifest
        return {
            "name": self.name,
            "path": str(self.model if self.is_bare else self.artifact.path),
            "graph": self.record.file,
            "graph_sha256": sha256_of(self.model),
            "source": manifest.source.id,
            "task": manifest.task,
            "precision": self.precision,
            "target": manifest.target,
        }


def with_unique_names(subjects: list[Subject]) -> list[Subject]:
    """The same subjects, those of one name numbered."""
    names = [subject.name for subject in subjects]
    return [
        replace(subject, name=f"{subject.name} ({names[: index + 1].count(subject.name)})")
        if names.count(subject.name) > 1
        else subject
        for index, subject in enumerate(subjects)
    ]


def artifact_of_file(path: Path) -> Artifact:
    """An artifact in memory over an .onnx file where it lies.

    Raises:
        ArtifactError: there is no such file.
        ProviderError: ONNX Runtime cannot read it.
    """
    if not path.is_file():
        raise ArtifactError(f"{path} is not there.", do="Name an artifact or an .onnx file.")
    check_allocations(path)
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.log_severity_level = 4
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    try:
        session = ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])
    except Exception as error:  # ONNX Runtime raises many unrelated types
        raise ProviderError(f"{path} cannot be read by ONNX Runtime: {error}") from error
    inputs = tuple(_spec(value) for value in session.get_inputs())
    record = GraphRecord(
        file=path.name,
        opset=0,
        inputs=tuple(_named(spec) for spec in inputs),
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
    """`first` for (batch, channels, height, width), `last` for channels at the end.

    Raises:
        OptionError: the input is no image.
    """
    if len(spec.dims) == 4 and spec.dtype in ("float32", "float16", "uint8"):
        if spec.dims[1] in _CHANNELS or spec.name == "pixel_values":
            return "first"
        if spec.dims[3] in _CHANNELS:
            return "last"
        if all(isinstance(dim, str) for dim in spec.dims):
            return "first"
    raise OptionError(
        f"option 'images': {spec} takes no image, expected 4 dims with 1, 3 or 4 channels."
    )


def _named(spec: TensorSpec) -> TensorSpec:
    """The same input with the usual names for an image's free dims, whatever the exporter's.

    Paddle calls them `DynamicDimension.0` and the like, others `p2o.dim`, `?` or nothing.
    """
    if len(spec.dims) != 4:
        return spec
    try:
        axes = _IMAGE_AXES[image_layout(spec)]
    except OptionError:
        return spec
    pairs = zip(spec.dims, axes, strict=True)
    dims: list[Dim] = [dim if isinstance(dim, int) else axis for dim, axis in pairs]
    return TensorSpec(spec.name, spec.dtype, tuple(dims))


_TYPES = {"float": "float32", "double": "float64"}


def _spec(value: Any) -> TensorSpec:
    kind = value.type.removeprefix("tensor(").removesuffix(")")
    dims: list[Dim] = []
    for index, dim in enumerate(value.shape):
        if isinstance(dim, int) and dim > 0:
            dims.append(dim)
        else:
            dims.append(canonical_dim(dim) if isinstance(dim, str) and dim else f"dim{index}")
    return TensorSpec(value.name, _TYPES.get(kind, kind), tuple(dims))


def _precision(record: GraphRecord) -> str:
    types = {spec.dtype for spec in (*record.inputs, *record.outputs)}
    return "fp16" if "float16" in types and "float32" not in types else "fp32"
