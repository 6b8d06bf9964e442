"""The options of export-kserve; importing them is quick, as `enginery --help` is."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from enginery.core.errors import OptionError, nearest
from enginery.publish.config import is_word

Runtime = Literal["enginery", "triton"]
KserveProvider = Literal["cuda", "cpu", "tensorrt"]

# SupportedStorageURIPrefixList in pkg/controller/v1beta1/inferenceservice/utils/utils.go of KServe
# v0.20.0.
SCHEMES = ("gs", "s3", "pvc", "file", "https", "http", "hdfs", "webhdfs", "oci", "oci+native",
           "oci+fetch", "hf")  # fmt: skip
# IsvcNameFmt in pkg/apis/serving/v1beta1/inference_service_validation.go; the length is a label's.
_NAME = re.compile(r"[a-z]([-a-z0-9]*[a-z0-9])?")
_MOST_LETTERS = 63
_QUANTITY = re.compile(r"[0-9]+(\.[0-9]+)?(m|k|M|G|T|Ki|Mi|Gi|Ti)?")


@dataclass(frozen=True)
class KserveConfig:
    """Where the model lies, what serves it, and what a replica gets."""

    storage_uri: str
    """Where the cluster finds the model: pvc://, s3://, gs://, hf://, oci://, https://. For
    enginery the artifact, for Triton the repository of export-triton."""
    runtime: Runtime = "enginery"
    """`triton`: KServe's own Triton runtime; `enginery`: a container that runs `enginery serve`."""
    name: str = ""
    """The InferenceService's name; empty for the model's source's, as Kubernetes takes it."""
    model_name: str = ""
    """The model's name in requests; empty for its source's, as export-triton has it."""
    namespace: str = ""
    """Empty for the one that kubectl is set to."""
    image: str = ""
    """The container's image; for enginery it must be named, see docs/deploy. For Triton empty is
    KServe's own, which has no enginery for the ensemble's Python models."""
    provider: KserveProvider = "cuda"
    """Where the model runs; on the CPU no GPU is asked for."""
    gpus: int = 1
    """GPUs of a replica."""
    cpu: str = "2"
    """CPU cores of a replica, requested and not limited."""
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
            )
        if scheme not in SCHEMES:
            raise OptionError(
                f"option 'storage_uri': unknown scheme '{scheme}'{nearest(scheme, SCHEMES)}",
                do=f"Known: {', '.join(SCHEMES)}.",
            )
        for option in ("name", "namespace", "service_account"):
            value = getattr(self, option)
            if value and (not _NAME.fullmatch(value) or len(value) > _MOST_LETTERS):
                raise OptionError(
                    f"option '{option}' is {value!r}, expected small letters, digits and '-', at "
                    f"most {_MOST_LETTERS}, the first a letter."
                )
        if self.model_name and not is_word(self.model_name):
            raise OptionError(
                f"option 'model_name' is {self.model_name!r}, expected letters, digits, '.', '_' "
                "and '-', the first a letter or a digit."
            )
        if self.image != "".join(self.image.split()):
            raise OptionError(f"option 'image' is {self.image!r}, expected no blanks.")
        if self.runtime == "enginery" and not self.image:
            raise OptionError(
                "option 'image' is empty, and the runtime enginery needs one.",
                do="Build it with docs/deploy/Dockerfile.cuda or Dockerfile.cpu, and name it: "
                "--image registry/enginery-serve:cuda",
            )
        for option in ("cpu", "memory"):
            value = getattr(self, option)
            if not _QUANTITY.fullmatch(value) and (option, value) != ("memory", "auto"):
                raise OptionError(
                    f"option '{option}' is {value!r}, expected a quantity of Kubernetes: "
                    f"{'500m or 2' if option == 'cpu' else '512Mi or 4Gi'}."
                )
        for option, least in (("gpus", 0), ("min_replicas", 0), ("max_replicas", 1)):
            if getattr(self, option) < least:
                raise OptionError(
                    f"option '{option}' is {getattr(self, option)}, expected {least} or more."
                )
        if self.max_replicas < self.min_replicas:
            raise OptionError(
                f"option 'max_replicas' is {self.max_replicas}, less than min_replicas, "
                f"{self.min_replicas}."
            )
        if self.provider != "cpu" and not self.gpus:
            raise OptionError(
                f"provider '{self.provider}' needs a GPU, found gpus 0.", do="Add --provider cpu."
            )
