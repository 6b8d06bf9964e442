"""Options of export-kserve. Importing this module is fast, for `enginery --help`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from enginery.core.errors import OptionError, join_problems
from enginery.core.paths import is_portable_name
from enginery.deploy.providers import TENSORRT_PROVIDERS, TRITON_LACKS_RTX, DeployProvider

Runtime = Literal["enginery", "triton"]

# IsvcNameFmt in pkg/apis/serving/v1beta1/inference_service_validation.go of KServe v0.20.0. A
# service's name in Kubernetes has at most 63 characters; KServe appends -predictor, and Knative
# appends -00001 for a revision.
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_STORAGE_URI = re.compile(r"[a-z][a-z0-9+]*://\S+")
MAX_CHARACTERS, MAX_CHARACTERS_KNATIVE = 53, 47
# A subdomain of RFC 1123, as Kubernetes validates it.
_LABEL = r"[a-z0-9]([-a-z0-9]*[a-z0-9])?"
_SUBDOMAIN = re.compile(rf"{_LABEL}(\.{_LABEL})*")
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
_MIN_MEMORY_BYTES = 64 << 20
"""A server with ONNX Runtime does not start with less."""


@dataclass(frozen=True)
class KserveConfig:
    """Options of export-kserve."""

    storage_uri: str
    """Address of the model for the cluster: pvc://, s3://, gs://, hf://, oci://, https://. For
    enginery it is the artifact, for Triton the repository of export-triton."""
    runtime: Runtime = "enginery"
    """Server: `enginery` is a container with `enginery serve`, `triton` is KServe's Triton
    runtime."""
    name: str = ""
    """Name of the InferenceService, at most 53 characters, with Knative 47; empty for the name of
    the model's source."""
    model_name: str = ""
    """Name of the model in requests to enginery; empty for the name of its source. In Triton it has
    the name from export-triton."""
    image: str = ""
    """Container image, required for enginery, see docs/deploy. For Triton, empty for KServe's
    image, which lacks enginery for the ensemble's Python models."""
    provider: DeployProvider = "auto"
    """Execution provider; `auto` is tensorrt for static INT8 and FP8, or tensorrt-rtx if only
    that flavor has an engine in the artifact, cpu for what was made for it, else cuda. With cpu no
    GPU is requested. The runtime enginery needs an engine in the artifact for tensorrt and
    tensorrt-rtx; Triton has no tensorrt-rtx."""
    gpus: int = 1
    """GPUs per replica; not used with provider cpu."""
    cpu: str = "2"
    """Requested CPU cores per replica, 2 or 500m; they are not limited."""
    memory: str = "auto"
    """Memory per replica, 4Gi; `auto` is 1 GiB plus three times the size of the model's files."""
    min_replicas: int = 1
    """Minimum number of replicas; 0 lets Knative stop the last one."""
    max_replicas: int = 1
    """Maximum number of replicas."""
    service_account: str = ""
    """Service account with the secrets to download the model; empty for the namespace's default."""
    allow_failed: bool = False
    """Accept an artifact whose validation failed."""

    def __post_init__(self) -> None:
        """Raise OptionError for the values that Kubernetes or KServe rejects."""
        problems = (*self._sources(), *self._names(), *self._quantities(), *self._counts())
        if problems:
            raise join_problems(problems)

    def _sources(self) -> Iterator[OptionError]:
        if not _STORAGE_URI.fullmatch(self.storage_uri) or not self.storage_uri.isprintable():
            yield OptionError(
                f"option 'storage_uri' is {self.storage_uri!r}, expected an address that KServe "
                "supports, such as pvc://, s3://, gs://, hf://, oci:// or https://.",
                option="storage_uri",
            )
        if self.image != "".join(self.image.split()):
            yield OptionError(
                f"option 'image' is {self.image!r}, expected no spaces.", option="image"
            )
        if self.runtime == "enginery" and not self.image:
            yield OptionError(
                "option 'image' is empty, but the runtime enginery needs an image.",
                do="Build one with a Dockerfile of docs/deploy, and pass it: --image "
                "registry/enginery-serve:cuda",
                option="image",
            )

    def _counts(self) -> Iterator[OptionError]:
        for option, least in (("gpus", 0), ("min_replicas", 0), ("max_replicas", 1)):
            if getattr(self, option) < least:
                yield OptionError(
                    f"option '{option}' is {getattr(self, option)}, expected {least} or more.",
                    option=option,
                )
        if self.max_replicas < self.min_replicas:
            yield OptionError(
                f"option 'max_replicas' is {self.max_replicas}, expected at least min_replicas, "
                f"{self.min_replicas}.",
                option="max_replicas",
            )
        if self.provider in ("cuda", *TENSORRT_PROVIDERS) and not self.gpus:
            yield OptionError(
                f"option 'gpus' is 0, but provider '{self.provider}' needs a GPU.",
                do="Pass --provider cpu, or --gpus 1.",
                option="gpus",
            )
        if self.provider == "tensorrt-rtx" and self.runtime == "triton":
            yield OptionError(
                TRITON_LACKS_RTX,
                do="Leave out --runtime, or build with --flavor tensorrt on the server's GPU and "
                "pass --provider tensorrt.",
                option="provider",
            )
        if self.provider == "cpu" and self.gpus > 1:  # 1 is the default
            yield OptionError(
                f"option 'gpus' is {self.gpus}, but provider 'cpu' uses no GPU.",
                do="Leave out --gpus.",
                option="gpus",
            )

    def _names(self) -> Iterator[OptionError]:
        # Only Knative scales to 0 replicas.
        knative = self.min_replicas == 0
        max_characters = MAX_CHARACTERS_KNATIVE if knative else MAX_CHARACTERS
        if self.name and (not _NAME.fullmatch(self.name) or len(self.name) > max_characters):
            yield OptionError(
                f"option 'name' is {self.name!r}, expected at most {max_characters} lowercase "
                f"letters, digits and '-', with a letter "
                f"first{', for min_replicas 0' if knative else ''}.",
                option="name",
            )
        account = self.service_account
        if account and (not _SUBDOMAIN.fullmatch(account) or len(account) > 253):
            yield OptionError(
                f"option 'service_account' is {account!r}, expected at most 253 lowercase letters, "
                "digits, '-' and '.', with a letter or digit at both ends of each part.",
                option="service_account",
            )
        if self.runtime == "triton" and self.model_name:
            yield OptionError(
                f"option 'model_name' is {self.model_name!r}, but in Triton the model has its name "
                "in the repository.",
                do="Leave it out, and set the name there: enginery export-triton --name "
                f"{self.model_name}",
                option="model_name",
            )
        elif self.model_name and not is_portable_name(self.model_name):
            yield OptionError(
                f"option 'model_name' is {self.model_name!r}, expected letters, digits, '.', '_' "
                "and '-', with a letter or digit first.",
                option="model_name",
            )

    def _quantities(self) -> Iterator[OptionError]:
        """Yield the problems of quantities with which a pod cannot start.

        Kubernetes accepts more, such as a memory of 400m, which is less than a byte.
        """
        if not _CPU.fullmatch(self.cpu) or float(self.cpu.rstrip("m")) == 0:
            yield OptionError(
                f"option 'cpu' is {self.cpu!r}, expected CPU cores above 0: 500m, 1.5 or 2.",
                option="cpu",
            )
        if self.memory == "auto":
            return
        match = _MEMORY.fullmatch(self.memory)
        if not match or float(match["number"]) * _UNITS[match["unit"] or ""] < _MIN_MEMORY_BYTES:
            yield OptionError(
                f"option 'memory' is {self.memory!r}, expected a Kubernetes quantity of at least "
                "64Mi: 512Mi, 4G or 4Gi.",
                option="memory",
            )
