"""Export an artifact as a KServe InferenceService: a manifest for `kubectl apply`.

>>> config = KserveConfig("pvc://models/minilm", "enginery-serve:cuda", name="minilm")
>>> run(artifact, tmp_path, config).path.name
'inferenceservice.yaml'

The fields are those of KServe v0.20.0, serving.kserve.io/v1beta1. The tests check manifests with
its schema.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.engine_record import ENGINES
from enginery.core.errors import ArtifactError, OptionError
from enginery.core.options import options_dict
from enginery.core.paths import portable_name
from enginery.core.progress import SILENT, Progress
from enginery.core.scratch import write_atomically
from enginery.core.table import Table
from enginery.deploy.kserve.options import MAX_CHARACTERS, KserveConfig
from enginery.deploy.providers import TENSORRT_PROVIDERS, DeployProvider, resolve_provider
from enginery.runtime.tasks import manifest_task, supported_tasks
from enginery.runtime.tensorrt.options import CLASSIC, RTX, get_flavor

FILE = "inferenceservice.yaml"
_MADE_BY = "# Made by enginery export-kserve."
_MOUNT = "/mnt/models"
_PORT = 8080
_GIB = 1 << 30
_RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "runAsUser": 10001,  # the user of the images in docs/deploy
    "seccompProfile": {"type": "RuntimeDefault"},
}


@dataclass(frozen=True)
class KserveExport:
    """A written manifest."""

    path: Path
    """Path of the manifest."""
    name: str
    """Name of the InferenceService."""
    model: str
    """Name of the model in requests: `/v2/models/<model>/infer`."""
    notes: tuple[str, ...]
    """Requirements of the manifest."""

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
    if manifest_task(artifact.manifest) is None:
        raise OptionError(
            f"{artifact.path} was exported for {artifact.manifest.task}, but `enginery serve` "
            f"supports {', '.join(supported_tasks())}."
        )
    config = replace(config, provider=_provider(artifact, config.provider))
    model = portable_name(artifact.manifest.source.name)
    name = config.name or service_name(model)
    text = yaml.safe_dump(
        inference_service(artifact, name, model, config),
        sort_keys=False,
        allow_unicode=True,
        width=100,
    )
    target = out / FILE
    try:
        if target.exists() and not target.read_text(encoding="utf-8").startswith(_MADE_BY):
            raise ArtifactError(
                f"{target} exists and was not written by export-kserve.",
                do="Choose another directory, or remove the file.",
            )
        out.mkdir(parents=True, exist_ok=True)
        write_atomically(target, f"{_MADE_BY}\n{text}".encode())
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{target} cannot be written: {error}.") from error
    notes = []
    if config.provider != "cpu":
        number = "a GPU" if config.gpus == 1 else f"{config.gpus} GPUs"
        notes.append(f"each replica requests {number}; --provider cpu requests none")
    if _is_image(config):
        notes.append(
            "the artifact is an image volume: it needs Kubernetes 1.33, or 1.31 with the feature "
            "gate ImageVolume"
        )
    for note in notes:
        progress.say(f"export-kserve: {note}")
    return KserveExport(target, name, model, tuple(notes))


def service_name(text: str) -> str:
    """Return a valid name of an InferenceService.

    >>> service_name("all-MiniLM-L6_v2")
    'all-minilm-l6-v2'
    """
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    named = plain if plain[:1].isalpha() else f"model-{plain}"
    # Under Knative a revision's name has six characters more: `-00001`.
    return named[: MAX_CHARACTERS - 6].strip("-")


def inference_service(
    artifact: Artifact, name: str, model: str, config: KserveConfig
) -> dict[str, Any]:
    """Return the manifest of an InferenceService.

    Args:
        artifact: the artifact, for the size of its files.
        name: name of the InferenceService.
        model: name of the model in requests.
        config: the options, with the provider that runs.
    """
    labels = {"app.kubernetes.io/name": name, "app.kubernetes.io/managed-by": "enginery"}
    metadata: dict[str, Any] = {"name": name, "labels": labels}
    env = [
        {"name": "PROTOCOL", "value": "v2"},
        {"name": "ENGINERY_HOME", "value": "/var/cache/enginery"},
    ]
    mounts: list[dict[str, Any]] = [
        {"name": "cache", "mountPath": "/var/cache/enginery"},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  in the container
    ]
    volumes: list[dict[str, Any]] = [
        {"name": "cache", "emptyDir": {"sizeLimit": "2Gi"}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}},
    ]
    if _is_image(config):
        # The image of `enginery publish` has the artifact as its root. KServe's own support of
        # oci:// needs a shell in the image, which this one does not have.
        reference = config.storage_uri.partition("://")[2]
        volumes.append({"name": "model", "image": {"reference": reference}})
        mounts.append({"name": "model", "mountPath": _MOUNT, "readOnly": True})
        # Knative does not support image volumes.
        metadata["annotations"] = {"serving.kserve.io/deploymentMode": "Standard"}
    else:
        env.append({"name": "STORAGE_URI", "value": config.storage_uri})
    predictor = {
        "minReplicas": config.replicas,
        "maxReplicas": config.replicas,
        "containers": [
            {
                **_container(model, config),
                "env": env,
                "resources": _resources(artifact, config),
                "volumeMounts": mounts,
            }
        ],
        "volumes": volumes,
    }
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": metadata,
        "spec": {"predictor": predictor},
    }


def _container(model: str, config: KserveConfig) -> dict[str, Any]:
    """Return the container that runs `enginery serve`, without what depends on the artifact."""
    return {
        "name": "kserve-container",  # KServe looks for this name
        "image": config.image,
        "command": ["enginery"],
        # Delay and grace period together stay below Kubernetes' 30 seconds for ending a pod.
        "args": [
            "serve",
            f"{model}={_MOUNT}",
            "--host=0.0.0.0",
            f"--port={_PORT}",
            f"--providers={config.provider}",
            "--drain-delay=5",
            "--grace=20",
            *(["--allow-failed"] if config.allow_failed else []),
        ],
        "ports": [{"containerPort": _PORT, "protocol": "TCP"}],
        # Loading may take minutes. A failing readiness probe does not restart the pod.
        "readinessProbe": {
            "httpGet": {"path": "/v2/health/ready", "port": _PORT},
            "periodSeconds": 5,
            "timeoutSeconds": 2,
            "failureThreshold": 3,
        },
        "livenessProbe": {
            "httpGet": {"path": "/v2/health/live", "port": _PORT},
            "initialDelaySeconds": 30,
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 3,
        },
        "securityContext": _RESTRICTED,
    }


def _is_image(config: KserveConfig) -> bool:
    """Return True if the artifact is mounted as an image volume."""
    return config.storage_uri.startswith("oci://")


def _resources(artifact: Artifact, config: KserveConfig) -> dict[str, Any]:
    """Return requests and limits, without a CPU limit: throttling would increase the latency.

    The memory `auto` is 1 GiB for the process, plus three times the model's size: for the files in
    the page cache, the weights, and the activations of a run.
    """
    memory = config.memory
    if memory == "auto":
        size_bytes = sum(artifact.graph_bytes(graph) for graph in artifact.manifest.graphs)
        if config.provider in TENSORRT_PROVIDERS:
            files = artifact.manifest.files.items()
            size_bytes += sum(r.size_bytes for n, r in files if n.startswith(f"{ENGINES}/"))
        memory = f"{math.ceil((_GIB + 3 * size_bytes) / _GIB)}Gi"
    limits, requests = {"memory": memory}, {"cpu": config.cpu, "memory": memory}
    if config.provider != "cpu":
        # Kubernetes requires limits for extended resources, with requests equal to them.
        limits["nvidia.com/gpu"] = requests["nvidia.com/gpu"] = str(config.gpus)
    return {"requests": requests, "limits": limits}


def _provider(artifact: Artifact, option: DeployProvider) -> DeployProvider:
    """Return the provider that runs the artifact; of TensorRT, one that has an engine there.

    `enginery serve` builds none. `auto` takes classic TensorRT if there are engines of both
    flavors, because those were built on a GPU like the server's.

    Raises:
        OptionError: the provider does not run the artifact.
        ArtifactError: the artifact has no engine for the provider.
    """
    manifest = artifact.manifest
    provider = resolve_provider(
        option,
        precision=manifest.precision,
        target=manifest.target,
        kind=manifest.describe_precision(),
    )
    if provider not in TENSORRT_PROVIDERS:
        return provider
    engines = artifact.engines()
    graphs = {graph.file for graph in manifest.graphs}
    built = {engine.record.flavor for engine in engines if engine.record.graph in graphs}
    flavors = (CLASSIC, RTX) if option == "auto" else (get_flavor(option),)
    for flavor in flavors:
        if flavor.name in built:
            return flavor.name
    titles = " or ".join(f"{flavor.title} {flavor.major}" for flavor in flavors)
    engine_names = ", ".join(engine.name for engine in engines) or "none"
    raise ArtifactError(
        f"{artifact.path} has no engine of {titles}, found {engine_names}.",
        do=f"Build one for the cluster's GPU: enginery build {artifact.path} --help",
    )
