"""Export an artifact as a KServe InferenceService: a manifest for `kubectl apply`.

>>> config = KserveConfig("pvc://models/minilm", name="minilm", image="enginery-serve:cuda")
>>> run(artifact, tmp_path, config).path.name
'inferenceservice.yaml'

The tests check manifests with the schema of KServe v0.20.0 (InferenceService, v1beta1).
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.engine_record import ENGINES
from enginery.core.errors import ArtifactError, OptionError
from enginery.core.options import options_dict
from enginery.core.paths import portable_name
from enginery.core.progress import SILENT, Progress
from enginery.core.scratch import write_atomically
from enginery.core.table import Table
from enginery.deploy.kserve.manifest import MADE_BY, inference_service, is_image, manifest_text
from enginery.deploy.kserve.options import MAX_CHARACTERS_KNATIVE, KserveConfig
from enginery.deploy.providers import TENSORRT_PROVIDERS, DeployProvider, resolve_provider
from enginery.runtime.tasks import manifest_task, supported_tasks
from enginery.runtime.tensorrt.options import CLASSIC, RTX, get_flavor

FILE = "inferenceservice.yaml"
_GIB = 1 << 30


@dataclass(frozen=True)
class KserveExport:
    """A written manifest."""

    path: Path
    """Path of the manifest."""
    name: str
    """Name of the InferenceService."""
    model: str
    """Name of the model in requests: `/v2/models/<model>/infer`. In Triton it differs if
    export-triton had a `name`."""
    notes: tuple[str, ...]
    """Requirements and hints for applying the manifest."""

    def rows(self) -> list[Table | str]:
        """Return a line with the path, the service and the model."""
        return [f"wrote {self.path}: InferenceService {self.name}, model {self.model}"]

    def as_json(self) -> dict[str, Any]:
        """Return the export as JSON values."""
        return options_dict(self)


def run(
    artifact: Artifact, out: Path, config: KserveConfig, *, progress: Progress = SILENT
) -> KserveExport:
    """Write the manifest of an InferenceService into a folder.

    Args:
        artifact: the artifact to serve, for its sizes and names; it is not copied.
        out: the folder.
        config: the options.
        progress: receives progress messages.

    Raises:
        OptionError: an option does not fit the artifact.
        ArtifactError: the artifact is damaged or lacks a TensorRT engine, or the file exists and
            was not written by this command.
        RejectedArtifactError: the artifact's validation failed.
    """
    artifact = Artifact.open(artifact.path)
    artifact.require_passed(allow_failed=config.allow_failed)
    if config.runtime == "enginery" and manifest_task(artifact.manifest) is None:
        raise OptionError(
            f"{artifact.path} was exported for {artifact.manifest.task}, but `enginery serve` "
            f"supports {', '.join(supported_tasks())}.",
            do="Use --runtime triton.",
        )
    provider = resolve_provider(
        config.provider,
        precision=artifact.manifest.precision,
        target=artifact.manifest.target,
        kind=artifact.manifest.describe_precision(),
    )
    if provider in TENSORRT_PROVIDERS and config.runtime == "enginery":
        provider = _provider_with_engine(artifact, config.provider)
    config = replace(config, provider=provider)
    source = portable_name(artifact.manifest.source.name)
    name = config.name or service_name(source)
    model = config.model_name or source
    manifest = inference_service(name, model, _memory(artifact, config), config)
    target = out / FILE
    try:
        if target.exists() and not target.read_text(encoding="utf-8").startswith(MADE_BY):
            raise ArtifactError(
                f"{target} exists and was not written by export-kserve.",
                do="Choose another directory, or remove the file.",
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
    """Return a valid name of an InferenceService, short enough for Knative.

    >>> service_name("all-MiniLM-L6_v2")
    'all-minilm-l6-v2'
    """
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    named = plain if plain[:1].isalpha() else f"model-{plain}"
    return named[:MAX_CHARACTERS_KNATIVE].strip("-")


def _memory(artifact: Artifact, config: KserveConfig) -> str:
    """Return the memory of a replica, as a Kubernetes quantity.

    `auto` is 1 GiB for the process, plus three times the model's size: for the files in the page
    cache, the weights, and the activations of a run.
    """
    if config.memory != "auto":
        return config.memory
    manifest = artifact.manifest
    graphs = {file for graph in manifest.graphs for file in (graph.file, *graph.data_files)}
    size_bytes = sum(
        record.size_bytes
        for name, record in manifest.files.items()
        if name in graphs
        or (name.startswith(f"{ENGINES}/") and config.provider in TENSORRT_PROVIDERS)
    )
    return f"{math.ceil((_GIB + 3 * size_bytes) / _GIB)}Gi"


def _provider_with_engine(artifact: Artifact, provider: DeployProvider) -> DeployProvider:
    """Return the provider that runs the artifact's engines: `enginery serve` builds none.

    Args:
        artifact: the artifact.
        provider: the option; `auto` takes classic TensorRT if there are engines of both flavors,
            because those were built on a GPU like the server's.

    Raises:
        ArtifactError: the artifact has no engine for the provider.
    """
    engines = artifact.engines()
    graphs = {graph.file for graph in artifact.manifest.graphs}
    built = {engine.record.flavor for engine in engines if engine.record.graph in graphs}
    flavors = (CLASSIC, RTX) if provider == "auto" else (get_flavor(provider),)
    for flavor in flavors:
        if flavor.name in built:
            return flavor.name
    titles = " or ".join(f"{flavor.title} {flavor.major}" for flavor in flavors)
    engine_names = ", ".join(engine.name for engine in engines) or "none"
    remedies = {
        CLASSIC: f"on a GPU of the cluster's type, enginery build {artifact.path} --flavor "
        f"{CLASSIC.name} --capability current",
        RTX: f"on any machine, enginery build {artifact.path} --capability with one of "
        f"{', '.join(RTX.capabilities)}",
    }
    raise ArtifactError(
        f"{artifact.path} has no engine of {titles}, found {engine_names}.",
        do=f"Build one {' or '.join(remedies[flavor] for flavor in flavors)}.",
    )


def _notes(name: str, config: KserveConfig) -> tuple[str, ...]:
    notes = []
    if config.provider != "cpu":
        number = "a GPU" if config.gpus == 1 else f"{config.gpus} GPUs"
        notes.append(f"each replica requests {number}; --provider cpu requests none")
    if config.runtime == "triton" and not config.image:
        notes.append(
            "KServe's Triton image has no enginery, which the ensemble's Python models need: set "
            "--image to one that has it, or export the repository with --no-tokenizer"
        )
    if is_image(config):
        notes.append(
            "the artifact is an image volume: it needs Kubernetes 1.33, or 1.31 with the feature "
            "gate ImageVolume"
        )
    if config.min_replicas == 0:
        notes.append("only Knative scales to 0 replicas; KServe's standard mode keeps one")
    if len(name) > MAX_CHARACTERS_KNATIVE and not is_image(config):
        notes.append(
            f"the name has {len(name)} characters, but Knative allows {MAX_CHARACTERS_KNATIVE}: "
            "use KServe's standard mode"
        )
    return tuple(notes)
