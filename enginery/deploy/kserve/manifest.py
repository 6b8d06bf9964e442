"""The manifest of a KServe InferenceService, as an object and as YAML.

>>> config = KserveConfig("pvc://models/minilm", image="registry/enginery-serve:cuda")
>>> manifest = inference_service("minilm", "MiniLM", "2Gi", config)
>>> manifest["kind"], manifest["metadata"]["name"]
('InferenceService', 'minilm')

The fields are those of KServe v0.20.0, serving.kserve.io/v1beta1.
"""

from __future__ import annotations

from typing import Any

import yaml

from enginery.deploy.kserve.options import KserveConfig

MADE_BY = "# Made by enginery export-kserve. "
_MOUNT = "/mnt/models"
_PORT = 8080
# The user of the images in docs/deploy.
_USER = 10001
_RESTRICTED = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
    "readOnlyRootFilesystem": True,
    "runAsNonRoot": True,
    "runAsUser": _USER,
    "seccompProfile": {"type": "RuntimeDefault"},
}


def inference_service(name: str, model: str, memory: str, config: KserveConfig) -> dict[str, Any]:
    """Return the manifest of an InferenceService.

    Args:
        name: name of the InferenceService.
        model: name of the model in requests.
        memory: memory of a replica, as a Kubernetes quantity.
        config: the options.
    """
    predictor: dict[str, Any] = {
        "minReplicas": config.min_replicas,
        "maxReplicas": config.max_replicas,
    }
    if config.service_account:
        predictor["serviceAccountName"] = config.service_account
    metadata: dict[str, Any] = {
        "name": name,
        "labels": {
            "app.kubernetes.io/name": name,
            "app.kubernetes.io/managed-by": "enginery",
        },
    }
    if config.runtime == "triton":
        predictor["model"] = _triton(memory, config)
    else:
        predictor |= _enginery(model, memory, config)
        if is_image(config):
            # Knative does not support image volumes.
            metadata["annotations"] = {"serving.kserve.io/deploymentMode": "Standard"}
    return {
        "apiVersion": "serving.kserve.io/v1beta1",
        "kind": "InferenceService",
        "metadata": metadata,
        "spec": {"predictor": predictor},
    }


def manifest_text(manifest: dict[str, Any], config: KserveConfig) -> str:
    """Return the manifest as YAML, with a comment on its first line."""
    served = "Triton's" if config.runtime == "triton" else "enginery serve's"
    text: str = yaml.safe_dump(manifest, sort_keys=False, allow_unicode=True, width=100)
    return f"{MADE_BY}{served} models from {config.storage_uri}\n{text}"


def is_image(config: KserveConfig) -> bool:
    """Return True if the artifact is mounted as an image volume."""
    return config.runtime == "enginery" and config.storage_uri.startswith("oci://")


def _triton(memory: str, config: KserveConfig) -> dict[str, Any]:
    """Return the spec of KServe's Triton runtime, whose ports are 8080 and 9000."""
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
    """Return the spec of a custom container, with the model mounted at /mnt/models."""
    # Delay and grace period together stay below Kubernetes' 30 seconds for ending a pod.
    args = [
        "serve",
        f"{model}={_MOUNT}",
        "--host=0.0.0.0",
        f"--port={_PORT}",
        f"--providers={config.provider}",
        "--drain-delay=5",
        "--grace=20",
    ]
    if config.allow_failed:
        args.append("--allow-failed")
    env = [{"name": "PROTOCOL", "value": "v2"}]
    mounts: list[dict[str, Any]] = [
        {"name": "cache", "mountPath": "/var/cache/enginery"},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108  in the container
    ]
    volumes: list[dict[str, Any]] = [
        {"name": "cache", "emptyDir": {"sizeLimit": "2Gi"}},
        {"name": "tmp", "emptyDir": {"sizeLimit": "64Mi"}},
    ]
    if is_image(config):
        # The image of `enginery publish` has the artifact as its root. KServe's own support of
        # oci:// needs a shell in the image, which this one does not have.
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
            "initialDelaySeconds": 30,
            "periodSeconds": 10,
            "timeoutSeconds": 5,
            "failureThreshold": 3,
        },
        "resources": _resources(memory, config),
        "securityContext": _RESTRICTED,
        "volumeMounts": mounts,
    }
    return {"containers": [container], "volumes": volumes}


def _ready() -> dict[str, Any]:
    """Return a probe that succeeds once all models are ready.

    Loading may take minutes. A failing readiness probe does not restart the pod.
    """
    return {
        "httpGet": {"path": "/v2/health/ready", "port": _PORT},
        "periodSeconds": 5,
        "timeoutSeconds": 2,
        "failureThreshold": 3,
    }


def _resources(memory: str, config: KserveConfig) -> dict[str, Any]:
    """Return requests and limits, without a CPU limit: throttling would increase the latency."""
    limits: dict[str, str] = {"memory": memory}
    requests = {"cpu": config.cpu, "memory": memory}
    if config.provider != "cpu":
        # Kubernetes requires limits for extended resources, with requests equal to them.
        limits["nvidia.com/gpu"] = requests["nvidia.com/gpu"] = str(config.gpus)
    return {"requests": requests, "limits": limits}
