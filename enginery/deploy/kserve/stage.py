"""An artifact as KServe's InferenceService: a manifest for `kubectl apply`.

Takes an artifact and where the cluster finds it; leaves `inferenceservice.yaml`, or nothing.

    >>> config = KserveConfig("pvc://models/minilm", image="registry/enginery-serve:cuda")
    >>> run(Artifact.open("minilm"), Path("deploy"), config).name
    'minilm'

The manifest is checked with the schema of KServe v0.20.0 (InferenceService, v1beta1). No cluster
has been given one yet.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.engine_record import ENGINES
from enginery.core.artifact.staging import write_atomically
from enginery.core.errors import ArtifactError, OptionError
from enginery.core.paths import portable_name
from enginery.core.progress import SILENT, Progress
from enginery.deploy.kserve.manifest import MADE_BY, inference_service, is_image, manifest_text
from enginery.deploy.kserve.options import MOST_LETTERS_KNATIVE, KserveConfig
from enginery.runtime.engines.selection import read_engines
from enginery.runtime.tasks import manifest_task, supported_tasks
from enginery.runtime.tensorrt.options import CLASSIC

FILE = "inferenceservice.yaml"
_GIB = 1 << 30
_MOST_LETTERS_OF_A_HOST = 63


@dataclass(frozen=True)
class KserveExport:
    """What was made."""

    path: Path
    """The manifest."""
    name: str
    """Of the InferenceService."""
    model: str
    """The model's name in requests: `/v2/models/<model>/infer`. In Triton it is another where
    export-triton was given a `name`."""
    notes: tuple[str, ...]
    """What whoever applies it should know."""


def run(
    artifact: Artifact, out: Path, config: KserveConfig, *, progress: Progress = SILENT
) -> KserveExport:
    """Writes the manifest of an InferenceService into a folder.

    Args:
        artifact: what is served; its size and its names are read, and it stays where it is.
        out: the folder.
        config: the options.
        progress: receives progress messages.

    Raises:
        OptionError: an option does not fit the artifact.
        ArtifactError: the artifact is damaged or has no engine for TensorRT, or there is a file of
            that name that this command did not make.
        RejectedArtifactError: the artifact's validation failed.
    """
    artifact = Artifact.open(artifact.path)
    artifact.require_passed(allow_failed=config.allow_failed)
    if config.runtime == "enginery" and manifest_task(artifact.manifest) is None:
        raise OptionError(
            f"{artifact.path} was exported for {artifact.manifest.task}, and `enginery serve` "
            f"answers {', '.join(supported_tasks())}.",
            do="Use --runtime triton.",
        )
    if config.provider == "tensorrt":
        _require_engine(artifact)
    source = portable_name(artifact.manifest.source.name)
    name = config.name or service_name(source)
    model = config.model_name or source
    manifest = inference_service(name, model, _memory(artifact, config), config)
    target = out / FILE
    try:
        if target.exists() and not target.read_text(encoding="utf-8").startswith(MADE_BY):
            raise ArtifactError(
                f"{target} was not made by export-kserve, so it is not overwritten.",
                do="Name another directory, or remove it yourself.",
            )
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(target, manifest_text(manifest, config).encode())
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{target} cannot be written: {error}.") from error
    notes = _notes(name, config)
    for note in notes:
        progress.say(f"export-kserve: {note}")
    return KserveExport(target, name, model, notes)


def service_name(text: str) -> str:
    """A name for an InferenceService: small letters, digits and `-`, the first a letter.

    It is short enough for Knative, too.
    """
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    named = plain if plain[:1].isalpha() else f"model-{plain}"
    return named[:MOST_LETTERS_KNATIVE].strip("-")


def _memory(artifact: Artifact, config: KserveConfig) -> str:
    """Once the files in the page cache, once the weights, once what a run takes; and a process."""
    if config.memory != "auto":
        return config.memory
    manifest = artifact.manifest
    graphs = {file for graph in manifest.graphs for file in (graph.file, *graph.data_files)}
    size_bytes = sum(
        record.size_bytes
        for name, record in manifest.files.items()
        if name in graphs or (name.startswith(f"{ENGINES}/") and config.provider == "tensorrt")
    )
    return f"{math.ceil((_GIB + 3 * size_bytes) / _GIB)}Gi"


def _require_engine(artifact: Artifact) -> None:
    """ONNX Runtime and Triton load engines of classic TensorRT, and neither builds any."""
    engines = read_engines(artifact)
    graphs = {graph.file for graph in artifact.manifest.graphs}
    if any(e.record.flavor == CLASSIC.name and e.record.graph in graphs for e in engines):
        return
    there = ", ".join(engine.name for engine in engines) or "none"
    raise ArtifactError(
        f"{artifact.path} has no engine of {CLASSIC.title} {CLASSIC.major}, found {there}.",
        do=f"Build one on a GPU like the cluster's: enginery build {artifact.path} --flavor "
        f"{CLASSIC.name} --capability current",
    )


def _notes(name: str, config: KserveConfig) -> tuple[str, ...]:
    notes = []
    if config.runtime == "triton" and not config.image:
        notes.append(
            "KServe's image of Triton has no enginery, which the ensemble's Python models need: "
            "name one that has with --image, or export the repository with --no-tokenizer"
        )
    if is_image(config):
        notes.append("the artifact is an image volume: Kubernetes 1.33, or 1.31 with its gate")
    if config.min_replicas == 0:
        notes.append("0 replicas are of Knative alone; in KServe's standard mode there is one")
    if len(name) > MOST_LETTERS_KNATIVE and not is_image(config):
        notes.append(
            f"the name has {len(name)} letters, and Knative takes {MOST_LETTERS_KNATIVE}: use "
            "KServe's standard mode"
        )
    host = f"{name}-predictor-{config.namespace}"
    if config.namespace and len(host) > _MOST_LETTERS_OF_A_HOST:
        notes.append(
            f"KServe's own domain template makes the host {host}, {len(host)} letters, and DNS "
            f"takes {_MOST_LETTERS_OF_A_HOST}"
        )
    return tuple(notes)
