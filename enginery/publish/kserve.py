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
from typing import Any

import yaml

from enginery.core.artifact import Artifact
from enginery.core.engine_record import ENGINES
from enginery.core.errors import ArtifactError, OptionError
from enginery.core.progress import SILENT, Progress
from enginery.core.staging import write_beside
from enginery.publish.kserve_options import KserveConfig
from enginery.publish.package import registry_name
from enginery.runtime.model import METHODS

FILE = "inferenceservice.yaml"
_MADE_BY = "# Made by enginery export-kserve. "
_MOUNT = "/mnt/models"
_PORT = 8080
_GIB = 1 << 30
# Of the images in docs/deploy.
_USER = 10001
_RESTRICTED = {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]},
               "readOnlyRootFilesystem": True, "runAsNonRoot": True, "runAsUser": _USER,
               "seccompProfile": {"type": "RuntimeDefault"}}  # fmt: skip


@dataclass(frozen=True)
class KserveExport:
    """What was made."""

    path: Path
    """The manifest."""
    name: str
    """Of the InferenceService."""
    model: str
    """The model's name in requests: `/v2/models/<model>/infer`."""
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
        progress: who is told what happens.

    Raises:
        OptionError: an option does not fit the artifact.
        ArtifactError: the artifact is damaged, or there is a file of that name that this command
            did not make.
        RejectedArtifactError: the artifact's validation failed.
    """
    artifact.require_passed(allow_failed=config.allow_failed)
    if config.runtime == "enginery" and artifact.manifest.task not in METHODS:
        raise OptionError(
            f"{artifact.path} was exported for {artifact.manifest.task}, and `enginery serve` "
            f"answers {', '.join(METHODS)}.",
            do="Use --runtime triton.",
        )
    source = registry_name(artifact.manifest.source.name)
    name = config.name or service_name(source)
    model = config.model_name or source
    manifest = inference_service(name, model, _memory(artifact, config), config)
    target = out / FILE
    try:
        if target.exists() and not target.read_text(encoding="utf-8").startswith(_MADE_BY):
            raise ArtifactError(
                f"{target} was not made by export-kserve, so it is not overwritten.",
                do="Name another directory, or remove it yourself.",
            )
        out.mkdir(parents=True, exist_ok=True)
        write_beside(target, manifest_text(manifest, config).encode())
    except (OSError, UnicodeDecodeError) as error:
        raise ArtifactError(f"{target} cannot be written: {error}.") from error
    notes = _notes(config)
    for note in notes:
        progress.say(f"export-kserve: {note}")
    return KserveExport(target, name, model, notes)


def inference_service(name: str, model: str, memory: str, config: KserveConfig) -> dict[str, Any]:
    """The manifest, as Kubernetes' API takes it.

    Args:
        name: of the InferenceService.
        model: in requests.
        memory: of a replica, as a quantity.
        config: the options.
    """
    predictor: dict[str, Any] = {
        "minReplicas": config.min_replicas,
        "maxReplicas": config.max_replicas,
    }
    if config.service_account:
        predictor["serviceAccountName"] = config.service_account
    metadata: dict[str, Any] = {"name": name}
    if config.namespace:
        metadata["namespace"] = config.namespace
    metadata["labels"] = {
        "app.kubernetes.io/name": name,
        "app.kubernetes.io/managed-by": "enginery",
    }
    if config.runtime == "triton":
        predictor["model"] = _triton(memory, config)
    else:
        predictor |= _enginery(model, memory, config)
        if _is_image(config):
            # Knative takes no image volumes.
            metadata["annotations"] = {"serving.kserve.io/deploymentMode": "Standard"}
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": metadata,
        "spec": {"predictor": predictor},
    }


def manifest_text(manifest: dict[str, Any], config: KserveConfig) -> str:
    """The YAML, with a line that says what it is."""
    served = "Triton's" if config.runtime == "triton" else "enginery serve's"
    text: str = yaml.safe_dump(manifest, sort_keys=False, allow_unicode=True, width=100)
    return f"{_MADE_BY}{served} models from {config.storage_uri}\n{text}"


def service_name(text: str) -> str:
    """A name for an InferenceService: small letters, digits and `-`, the first a letter."""
    plain = re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")
    return (plain if plain[:1].isalpha() else f"model-{plain}")[:63].strip("-")


def _triton(memory: str, config: KserveConfig) -> dict[str, Any]:
    """KServe's own runtime of Triton, whose ports are 8080 and 9000."""
    fields: dict[str, Any] = {
        "modelFormat": {"name": "triton", "version": "2"},
        "runtime": "kserve-tritonserver",
        "protocolVersion": "v2",
        "storageUri": config.storage_uri,
        "resources": _resources(memory, config),
        "readinessProbe": _ready(),
    }
    if config.image:
        fields["image"] = config.image
    return fields


def _enginery(model: str, memory: str, config: KserveConfig) -> dict[str, Any]:
    """A container of one's own; what it is given of the model is at /mnt/models."""
    # Less than the 30 seconds that Kubernetes gives a pod.
    args = ["serve", f"{model}={_MOUNT}", "--host=0.0.0.0", f"--port={_PORT}",
            f"--provider={config.provider}", "--drain-delay=5", "--grace=20"]  # fmt: skip
    if config.allow_failed:
        args.append("--allow-failed")
    env = [{"name": "PROTOCOL", "value": "v2"}]
    mounts: list[dict[str, Any]] = [
        {"name": "cache", "mountPath": "/var/cache/enginery"},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  of the container
    ]
    volumes: list[dict[str, Any]] = [
        {"name": "cache", "emptyDir": {"sizeLimit": "2Gi"}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}},
    ]
    if _is_image(config):
        # `enginery publish` makes an image whose root is the artifact; KServe's own way with
        # oci:// wants a shell in it, which it has not.
        reference = config.storage_uri.partition("://")[2]
        volumes.insert(0, {"name": "model", "image": {"reference": reference}})
        mounts.insert(0, {"name": "model", "mountPath": _MOUNT, "readOnly": True})
    else:
        env.append({"name": "STORAGE_URI", "value": config.storage_uri})
    env.append({"name": "ENGINERY_HOME", "value": "/var/cache/enginery"})
    container = {
        "name": "kserve-container",
        "image": config.image,
        "command": ["enginery"],
        "args": args,
        "env": env,
        "ports": [{"containerPort": _PORT, "protocol": "TCP"}],
        "readinessProbe": _ready(),
        "livenessProbe": {
            "httpGet": {"path": "/v2/health/live", "port": _PORT},
            "initialDelaySeconds": 30, "periodSeconds": 10, "timeoutSeconds": 5,
            "failureThreshold": 3,
        },
        "resources": _resources(memory, config),
        "securityContext": _RESTRICTED,
        "volumeMounts": mounts,
    }  # fmt: skip
    return {"containers": [container], "volumes": volumes}


def _ready() -> dict[str, Any]:
    """Every model is ready; the first load may take minutes, so that nothing ends the pod."""
    return {
        "httpGet": {"path": "/v2/health/ready", "port": _PORT},
        "periodSeconds": 5, "timeoutSeconds": 2, "failureThreshold": 3,
    }  # fmt: skip


def _resources(memory: str, config: KserveConfig) -> dict[str, Any]:
    """No limit of the CPU, as throttled threads make slow answers of fast ones."""
    limits: dict[str, str] = {"memory": memory}
    requests = {"cpu": config.cpu, "memory": memory}
    if config.provider != "cpu":
        # Kubernetes takes extended resources as limits, and requests equal to them.
        limits["nvidia.com/gpu"] = requests["nvidia.com/gpu"] = str(config.gpus)
    return {"requests": requests, "limits": limits}


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


def _is_image(config: KserveConfig) -> bool:
    return config.runtime == "enginery" and config.storage_uri.startswith("oci://")


def _notes(config: KserveConfig) -> tuple[str, ...]:
    notes = []
    if config.runtime == "triton" and not config.image:
        notes.append(
            "KServe's image of Triton has no enginery, which the ensemble's Python models need: "
            "name one that has with --image, or export the repository with --no-tokenizer"
        )
    if _is_image(config):
        notes.append("the artifact is an image volume: Kubernetes 1.33, or 1.31 with its gate")
    if config.min_replicas == 0:
        notes.append("0 replicas are of Knative alone; in KServe's standard mode there is one")
    return tuple(notes)
