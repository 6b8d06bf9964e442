"""Options of export-triton. Importing this module is fast, for `enginery --help`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from enginery.core.errors import OptionError, join_problems
from enginery.core.paths import is_portable_name
from enginery.deploy.providers import DeployProvider

Backend = Literal["onnxruntime", "tensorrt"]
_OTHERS = ("cuda", "cpu")


@dataclass(frozen=True)
class TritonConfig:
    """Options of export-triton."""

    name: str = ""
    """Name of the model in Triton; empty for the name of its source."""
    backend: Backend = "onnxruntime"
    """Triton backend of the graph: `tensorrt` loads the artifact's classic TensorRT engines without
    ONNX Runtime."""
    provider: DeployProvider = "auto"
    """Execution provider of the ONNX Runtime backend; `auto` is tensorrt for static INT8 and FP8,
    cpu for what was made for it, else cuda. `tensorrt` uses the artifact's classic TensorRT engine;
    without one, the server builds it from the graph when it loads the model."""
    graph: str = ""
    """ONNX file of the artifact; empty if there is only one."""
    engine: str = ""
    """Directory of the engine that Triton must use; empty if there is only one for each compute
    capability."""
    engine_cache: str = ""
    """Folder on the server for an engine that it builds, in an existing folder; empty to build at
    every load."""
    tokenizer: bool = True
    """For text tasks, add models for preprocessing and postprocessing in the Python backend, and an
    ensemble that takes texts and returns results."""
    profile: tuple[str, ...] = ()
    """Shapes for warm-up, for preferred batches and of an engine that the server builds, if the
    artifact's engine has no profiles: batch=1:8:32,sequence=8:64:128; repeat it for several."""
    max_batch_size: int = 32
    """Maximum number of rows per batch; a profile may reduce it. Triton prefers the profiles'
    optima."""
    max_queue_delay_us: int = 100
    """Time that a request waits for others to share its batch, in microseconds."""
    max_queue_size: int = 1024
    """Maximum number of requests that wait for the graph, further ones are rejected; 0 for no
    limit."""
    queue_timeout_us: int = 10_000_000
    """Time after which a waiting request is rejected, in microseconds; 0 for no limit."""
    instances: int = 1
    """Number of instances of the graph per GPU that run at the same time."""
    tokenizer_instances: int = 2
    """Number of processes for preprocessing, and the same number for postprocessing."""
    threads: int = 0
    """Intra-op threads of ONNX Runtime; 0 for its own choice."""
    pad_multiple: int = 16
    """Texts are padded to a multiple of this number of tokens, because Triton batches only requests
    of equal shapes."""
    execution_env: str = ""
    """Path on the server of a conda-pack archive or an environment with enginery; empty if enginery
    is installed in the Python backend's Python."""
    allow_failed: bool = False
    """Accept an artifact whose validation failed."""

    def __post_init__(self) -> None:
        """Raise OptionError for the values that Triton rejects."""
        if problems := list(self._problems()):
            raise join_problems(problems)

    def _problems(self) -> Iterator[OptionError]:
        if self.provider == "tensorrt-rtx":
            yield OptionError(
                "option 'provider' is tensorrt-rtx, but Triton's ONNX Runtime has no TensorRT for "
                "RTX.",
                do="For Triton, build on the server's GPU: enginery build ARTIFACT --flavor "
                "tensorrt --capability current. Engines for RTX run in `enginery serve`.",
                option="provider",
            )
        if self.name and not is_portable_name(self.name):
            yield OptionError(
                f"option 'name' is {self.name!r}, expected at most 128 letters, digits, '.', '_' "
                "and '-', with a letter or digit first.",
                option="name",
            )
        for option, least in (
            ("max_batch_size", 1),
            ("max_queue_delay_us", 0),
            ("max_queue_size", 0),
            ("queue_timeout_us", 0),
            ("instances", 1),
            ("tokenizer_instances", 1),
            ("threads", 0),
            ("pad_multiple", 1),
        ):
            value = getattr(self, option)
            if not least <= value < 2**31:  # most are int32 in Triton's model_config.proto
                yield OptionError(
                    f"option '{option}' is {value}, expected a whole number from {least} to "
                    f"{2**31 - 1}.",
                    option=option,
                )
        if self.backend == "tensorrt" and self.provider == "cpu":
            yield OptionError(
                "option 'provider' is cpu, but the backend tensorrt needs a GPU.",
                do="Leave out --backend, or --provider.",
                option="backend",
            )
        for option in ("engine", "engine_cache"):
            if getattr(self, option) and self.backend == "onnxruntime" and self.provider in _OTHERS:
                yield OptionError(
                    f"option '{option}' is set, but provider '{self.provider}' uses no engine.",
                    do=f"Leave out --provider, or --{option.replace('_', '-')}.",
                    option=option,
                )
        if self.engine_cache and (self.engine or self.backend == "tensorrt"):
            yield OptionError(
                "option 'engine_cache' is set, but Triton gets an engine and builds none.",
                do="Leave it out.",
                option="engine_cache",
            )
        for option in ("engine_cache", "execution_env"):
            value = getattr(self, option)
            if value != value.strip() or (value and not value.isprintable()):
                yield OptionError(
                    f"option '{option}' is {value!r}, expected one line of text.", option=option
                )
