"""The options of export-triton; importing them is quick, as `enginery --help` is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from enginery.core.errors import OptionError
from enginery.core.paths import is_portable_name

Backend = Literal["onnxruntime", "tensorrt"]
TritonProvider = Literal["cuda", "cpu", "tensorrt"]


@dataclass(frozen=True)
class TritonConfig:
    """What Triton calls the model, where it runs it, and how it batches."""

    name: str = ""
    """The model's name in Triton; empty for its source's."""
    backend: Backend = "onnxruntime"
    """`tensorrt` loads the artifact's classic TensorRT engines without ONNX Runtime."""
    provider: TritonProvider = "cuda"
    """Where the ONNX Runtime backend runs the graph. `tensorrt` takes the artifact's classic
    TensorRT engine; none is built in the server."""
    graph: str = ""
    """Which ONNX file of the artifact; empty for the only one."""
    engine: str = ""
    """Which engine's directory; empty for the only one of each compute capability."""
    tokenizer: bool = True
    """Where texts can be answered, add the models that tokenize and answer, in the Python
    backend, and the ensemble of all; texts in, answers out."""
    version: int = 1
    """The model's version, a folder in Triton's repository. Older ones of the same backend stay
    there, and Triton serves the newest."""
    profile: tuple[str, ...] = ()
    """Shapes to warm up and to prefer where no engine has profiles: batch=1:8:32,sequence=8:64:128;
    repeat it for several."""
    max_batch_size: int = 32
    """The most rows of a batch; less where a profile's maximum is less."""
    preferred_batch_size: tuple[int, ...] = ()
    """Batches that Triton tries to make, none larger than the profiles take; empty for their
    optima."""
    max_queue_delay_us: int = 100
    """How long a request waits for others to share its batch, in microseconds."""
    max_queue_size: int = 1024
    """The most requests that wait for the graph; beyond it they are refused. 0 for no limit."""
    queue_timeout_us: int = 10_000_000
    """How long a request may wait before it is refused, in microseconds; 0 for no limit."""
    instances: int = 1
    """Copies of the graph that run at the same time, on each GPU."""
    tokenizer_instances: int = 2
    """Processes that tokenize, and as many that answer."""
    threads: int = 0
    """ONNX Runtime's threads within an operator; 0 for its own choice."""
    pad_multiple: int = 16
    """Texts are padded up to a multiple of so many tokens: Triton batches requests of equal shapes
    alone."""
    execution_env: str = ""
    """A conda-pack archive or environment with enginery, as the server sees it; empty where
    enginery is installed in the Python backend's own Python."""
    allow_failed: bool = False
    """Take an artifact whose validation failed."""

    def __post_init__(self) -> None:
        """Raises OptionError for a value that Triton does not take."""
        if self.name and not is_portable_name(self.name):
            raise OptionError(
                f"option 'name' is {self.name!r}, expected letters, digits, '.', '_' and '-', "
                "at most 128, the first a letter or a digit.",
                option="name",
            )
        for option, least in (
            ("version", 1),
            ("max_batch_size", 1),
            ("max_queue_delay_us", 0),
            ("max_queue_size", 0),
            ("queue_timeout_us", 0),
            ("instances", 1),
            ("tokenizer_instances", 1),
            ("threads", 0),
            ("pad_multiple", 1),
        ):
            found = getattr(self, option)
            if not least <= found < 2**31:  # most are int32 in Triton's model_config.proto
                raise OptionError(
                    f"option '{option}' is {found}, expected a whole number from {least} to "
                    f"{2**31 - 1}.",
                    option=option,
                )
        for size in self.preferred_batch_size:
            if not 1 <= size <= self.max_batch_size:
                raise OptionError(
                    f"option 'preferred_batch_size' has {size}, expected 1 to max_batch_size, "
                    f"{self.max_batch_size}.",
                    option="preferred_batch_size",
                )
        if self.backend == "tensorrt" and self.provider == "cpu":
            raise OptionError(
                "backend 'tensorrt' runs on a GPU, found provider 'cpu'.",
                do="Leave out --backend, or --provider.",
                option="backend",
            )
        if self.execution_env != self.execution_env.strip() or (
            self.execution_env and not self.execution_env.isprintable()
        ):
            raise OptionError(
                f"option 'execution_env' is {self.execution_env!r}, expected one line of text.",
                option="execution_env",
            )

    @property
    def needs_engine(self) -> bool:
        """Whether an engine of the artifact is what runs."""
        return self.backend == "tensorrt" or self.provider == "tensorrt"
