"""Options of export-kserve. Importing this module is fast, for `enginery --help`."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from enginery.core.errors import OptionError, join_problems
from enginery.deploy.providers import DeployProvider

MAX_CHARACTERS = 53
"""A service's name in Kubernetes has at most 63 characters; KServe appends -predictor."""
# IsvcNameFmt in pkg/apis/serving/v1beta1/inference_service_validation.go of KServe v0.20.0.
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_STORAGE_URI = re.compile(r"[a-z][a-z0-9+]*://\S+")
_CPU = re.compile(r"[1-9][0-9]*m?|[0-9]+\.[0-9]{1,3}")
_MEMORY = re.compile(r"auto|[0-9]+(\.[0-9]+)?([kMGT]|[KMGT]i)?")


@dataclass(frozen=True)
class KserveConfig:
    """Options of export-kserve. What else a cluster needs is edited in the manifest."""

    storage_uri: str
    """Address of the artifact for the cluster: pvc://, s3://, gs://, hf://, oci://, https://."""
    image: str
    """Container image with enginery, see docs/deploy."""
    name: str = ""
    """Name of the InferenceService, at most 53 characters; empty for the name of the model's
    source."""
    provider: DeployProvider = "auto"
    """Execution provider; `auto` is tensorrt for static INT8 and FP8, or tensorrt-rtx if only
    that flavor has an engine in the artifact, cpu for what was made for it, else cuda. With cpu no
    GPU is requested. tensorrt and tensorrt-rtx need an engine in the artifact."""
    gpus: int = 1
    """GPUs per replica; not used with provider cpu."""
    cpu: str = "2"
    """Requested CPU cores per replica, 2 or 500m; they are not limited."""
    memory: str = "auto"
    """Memory per replica, 4Gi; `auto` is 1 GiB plus three times the size of the model's files."""
    replicas: int = 1
    """Number of replicas."""
    allow_failed: bool = False
    """Accept an artifact whose validation failed."""

    def __post_init__(self) -> None:
        """Raise OptionError for the values that KServe rejects."""
        if problems := list(self._problems()):
            raise join_problems(problems)

    def _problems(self) -> Iterator[OptionError]:
        if not _STORAGE_URI.fullmatch(self.storage_uri) or not self.storage_uri.isprintable():
            yield OptionError(
                f"option 'storage_uri' is {self.storage_uri!r}, expected an address that KServe "
                "supports, such as pvc://, s3://, gs://, hf://, oci:// or https://.",
                option="storage_uri",
            )
        if not self.image or self.image != "".join(self.image.split()):
            yield OptionError(
                f"option 'image' is {self.image!r}, expected the name of an image.",
                do="Build one with a Dockerfile of docs/deploy, and pass it: --image "
                "registry/enginery-serve:cuda",
                option="image",
            )
        if self.name and (not _NAME.fullmatch(self.name) or len(self.name) > MAX_CHARACTERS):
            yield OptionError(
                f"option 'name' is {self.name!r}, expected at most {MAX_CHARACTERS} lowercase "
                "letters, digits and '-', with a letter first.",
                option="name",
            )
        for option, pattern, example in (
            ("cpu", _CPU, "2 or 500m"),
            ("memory", _MEMORY, "4Gi, or auto"),
        ):
            if not pattern.fullmatch(getattr(self, option)):
                yield OptionError(
                    f"option '{option}' is {getattr(self, option)!r}, expected a value such as "
                    f"{example}.",
                    option=option,
                )
        for option in ("gpus", "replicas"):
            if getattr(self, option) < 1:
                yield OptionError(
                    f"option '{option}' is {getattr(self, option)}, expected 1 or more.",
                    option=option,
                )
