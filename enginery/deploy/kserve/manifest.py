"""The manifest of an InferenceService: what Kubernetes' API takes, and its YAML.

    >>> found = inference_service("minilm", "MiniLM", "2Gi", KserveConfig("pvc://models/minilm", …))
    >>> found["kind"]
    'InferenceService'

Fields are those of KServe v0.20.0, serving.kserve.io/v1beta1.
"""

from __future__ import annotations

from typing import Any

import yaml

from enginery.deploy.kserve.options import KserveConfig

MADE_BY = "# Made by enginery export-kserve. "
_MOUNT = "/mnt/models"
_PORT = 8080
# Of the images in docs/deploy.
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
        if is_image(config):
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
    return f"{MADE_BY}{served} models from {config.storage_uri}\n{text}"


def is_image(config: KserveConfig) -> bool:
    """Whether the artifact is mounted as an image volume."""
    return config.runtime == "enginery" and config.storage_uri.startswith("oci://")


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
    args = [
        "serve",
        f"{model}={_MOUNT}",
        "--host=0.0.0.0",
        f"--port={_PORT}",
        f"--provider={config.provider}",
        "--drain-delay=5",
        "--grace=20",
    ]
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
    if is_image(config):
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
    """Every model is ready; the first load may take minutes, so that nothing ends the pod."""
    return {
        "httpGet": {"path": "/v2/health/ready", "port": _PORT},
        "periodSeconds": 5,
        "timeoutSeconds": 2,
        "failureThreshold": 3,
    }


def _resources(memory: str, config: KserveConfig) -> dict[str, Any]:
    """No limit of the CPU, as throttled threads make slow answers of fast ones."""
    limits: dict[str, str] = {"memory": memory}
    requests = {"cpu": config.cpu, "memory": memory}
    if config.provider != "cpu":
        # Kubernetes takes extended resources as limits, and requests equal to them.
        limits["nvidia.com/gpu"] = requests["nvidia.com/gpu"] = str(config.gpus)
    return {"requests": requests, "limits": limits}
