"""The options of export-kserve; importing them is quick, as `enginery --help` is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from enginery.core.errors import OptionError, nearest
from enginery.core.paths import is_portable_name

Runtime = Literal["enginery", "triton"]
KserveProvider = Literal["cuda", "cpu", "tensorrt"]

# SupportedStorageURIPrefixList in pkg/controller/v1beta1/inferenceservice/utils/utils.go of KServe
# v0.20.0.
SCHEMES = (
    "gs",
    "s3",
    "pvc",
    "file",
    "https",
    "http",
    "hdfs",
    "webhdfs",
    "oci",
    "oci+native",
    "oci+fetch",
    "hf",
)
# IsvcNameFmt in pkg/apis/serving/v1beta1/inference_service_validation.go of it. Kubernetes takes 63
# letters for a service's name: KServe adds -predictor, and Knative -00001 for a revision.
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
MOST_LETTERS, MOST_LETTERS_KNATIVE = 53, 47
# A label and a subdomain of RFC 1123, as Kubernetes' validation of the two has it.
_LABEL = re.compile(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?")
_SUBDOMAIN = re.compile(rf"{_LABEL.pattern}(\.{_LABEL.pattern})*")
_CPU = re.compile(r"[0-9]+m|[0-9]+(\.[0-9]{1,3})?")
_MEMORY = re.compile(r"(?P<number>[0-9]+(\.[0-9]+)?)(?P<unit>[kMGT]|[KMGT]i)?")
_UNITS = {
    "": 1,
    "k": 10**3,
    "M": 10**6,
    "G": 10**9,
    "T": 10**12,
    "Ki": 1 << 10,
    "Mi": 1 << 20,
    "Gi": 1 << 30,
    "Ti": 1 << 40,
}
_LEAST_MEMORY_BYTES = 64 << 20
"""No server with ONNX Runtime starts in less."""


@dataclass(frozen=True)
class KserveConfig:
    """Where the model lies, what serves it, and what a replica gets."""

    storage_uri: str
    """Where the cluster finds the model: pvc://, s3://, gs://, hf://, oci://, https://. For
    enginery the artifact, for Triton the repository of export-triton."""
    runtime: Runtime = "enginery"
    """`triton`: KServe's own Triton runtime; `enginery`: a container that runs `enginery serve`."""
    name: str = ""
    """The InferenceService's name; empty for the model's source's, as Kubernetes takes it. At most
    53 letters, with Knative 47."""
    model_name: str = ""
    """The model's name in requests to enginery; empty for its source's. Triton's is the one that
    export-triton gave it."""
    namespace: str = ""
    """Empty for the one that kubectl is set to."""
    image: str = ""
    """The container's image; for enginery it must be named, see docs/deploy. For Triton empty is
    KServe's own, which has no enginery for the ensemble's Python models."""
    provider: KserveProvider = "cuda"
    """Where the model runs; on the CPU no GPU is asked for, for TensorRT the artifact needs an
    engine."""
    gpus: int = 1
    """GPUs of a replica; on the CPU it has none."""
    cpu: str = "2"
    """CPU cores of a replica, 2 or 500m, requested and not limited."""
    memory: str = "auto"
    """Memory of a replica, 4Gi; `auto`: 1 GiB and three times the model's files."""
    min_replicas: int = 1
    """0 lets Knative stop the last one."""
    max_replicas: int = 1
    """The most replicas."""
    service_account: str = ""
    """Whose secrets fetch the model; empty for the namespace's default."""
    allow_failed: bool = False
    """Take an artifact whose validation failed."""

    def __post_init__(self) -> None:
        """Raises OptionError for a value that Kubernetes or KServe refuses."""
        scheme, found, rest = self.storage_uri.partition("://")
        if not found or not rest or not self.storage_uri.isprintable() or " " in self.storage_uri:
            raise OptionError(
                f"option 'storage_uri' is {self.storage_uri!r}, expected an address.",
                do=f"Known: {', '.join(f'{name}://' for name in SCHEMES)}.",
                option="storage_uri",
            )
        if scheme not in SCHEMES:
            raise OptionError(
                f"option 'storage_uri': unknown scheme '{scheme}'{nearest(scheme, SCHEMES)}",
                do=f"Known: {', '.join(SCHEMES)}.",
                option="storage_uri",
            )
        self._check_names()
        if self.model_name and not is_portable_name(self.model_name):
            raise OptionError(
                f"option 'model_name' is {self.model_name!r}, expected letters, digits, '.', '_' "
                "and '-', the first a letter or a digit.",
                option="model_name",
            )
        if self.image != "".join(self.image.split()):
            raise OptionError(
                f"option 'image' is {self.image!r}, expected no blanks.", option="image"
            )
        if self.runtime == "enginery" and not self.image:
            raise OptionError(
                "option 'image' is empty, and the runtime enginery needs one.",
                do="Build it with docs/deploy/Dockerfile.cuda or Dockerfile.cpu, and name it: "
                "--image registry/enginery-serve:cuda",
                option="image",
            )
        self._check_quantities()
        for option, least in (("gpus", 0), ("min_replicas", 0), ("max_replicas", 1)):
            if getattr(self, option) < least:
                raise OptionError(
                    f"option '{option}' is {getattr(self, option)}, expected {least} or more.",
                    option=option,
                )
        if self.max_replicas < self.min_replicas:
            raise OptionError(
                f"option 'max_replicas' is {self.max_replicas}, less than min_replicas, "
                f"{self.min_replicas}.",
                option="max_replicas",
            )
        if self.provider != "cpu" and not self.gpus:
            raise OptionError(
                f"provider '{self.provider}' needs a GPU, found gpus 0.",
                do="Add --provider cpu.",
                option="gpus",
            )
        if self.provider == "cpu" and self.gpus > 1:  # 1 is what nobody has set
            raise OptionError(
                f"option 'gpus' is {self.gpus}, and provider 'cpu' has none.",
                do="Leave out --gpus.",
                option="gpus",
            )

    def _check_names(self) -> None:
        # Without replicas there is Knative alone.
        knative = self.min_replicas == 0
        most = MOST_LETTERS_KNATIVE if knative else MOST_LETTERS
        if self.name and (not _NAME.fullmatch(self.name) or len(self.name) > most):
            raise OptionError(
                f"option 'name' is {self.name!r}, expected small letters, digits and '-', at most "
                f"{most}{' with min_replicas 0' if knative else ''}, the first a letter.",
                option="name",
            )
        if self.namespace and (not _LABEL.fullmatch(self.namespace) or len(self.namespace) > 63):
            raise OptionError(
                f"option 'namespace' is {self.namespace!r}, expected small letters, digits and "
                "'-', at most 63, no '-' at either end.",
                option="namespace",
            )
        account = self.service_account
        if account and (not _SUBDOMAIN.fullmatch(account) or len(account) > 253):
            raise OptionError(
                f"option 'service_account' is {account!r}, expected small letters, digits, '-' and "
                "'.', at most 253, a letter or a digit at both ends of each part.",
                option="service_account",
            )
        if self.runtime == "triton" and self.model_name:
            raise OptionError(
                f"option 'model_name' is {self.model_name!r}, and Triton's models have the names "
                "that their repository has.",
                do=f"Name it there, enginery export-triton --name {self.model_name}, and leave "
                "this out.",
                option="model_name",
            )

    def _check_quantities(self) -> None:
        """Kubernetes takes more, as 400m of memory, less than a byte, and never starts the pod."""
        if not _CPU.fullmatch(self.cpu) or float(self.cpu.rstrip("m")) == 0:
            raise OptionError(
                f"option 'cpu' is {self.cpu!r}, expected CPU cores above 0: 500m, 1.5 or 2.",
                option="cpu",
            )
        if self.memory == "auto":
            return
        found = _MEMORY.fullmatch(self.memory)
        if not found or float(found["number"]) * _UNITS[found["unit"] or ""] < _LEAST_MEMORY_BYTES:
            raise OptionError(
                f"option 'memory' is {self.memory!r}, expected a quantity of Kubernetes from 64Mi: "
                "512Mi, 4G or 4Gi.",
                option="memory",
            )
