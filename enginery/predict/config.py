"""The options of predict; importing them is quick, as `enginery --help` is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from enginery.core.datasets.batches import Format
from enginery.core.errors import OptionError

Activation = Literal["auto", "softmax", "sigmoid", "none"]
Aggregation = Literal["none", "simple", "first", "average", "max"]
Engine = Literal["local", "ray"]


@dataclass(frozen=True)
class PredictConfig:
    """How a file's rows are read, answered and written."""

    column: str = "text"
    """The column that holds the text, or the path of an image for a model of images."""
    pair_column: str = ""
    """The column of the second text, for a model that compares two."""
    question_column: str = "question"
    """The column of the question, for question answering."""
    context_column: str = "context"
    """The column of the text that answers it."""
    format: Format = "auto"
    """What the input is; `auto` goes by its suffix. Standard input needs it named."""
    delimiter: str = "auto"
    """What separates a CSV's fields; `auto` is a tab for TSV and a comma for CSV."""
    encoding: str = "utf-8"
    """Of CSV, TSV, JSONL and text lines. A row that is not in it counts as a bad row."""
    prefix: str = ""
    """Goes before the names of the answer's columns, where the input has such columns already."""
    top_k: int = 1
    """Labels, answers or fillings of a row, best first; 0 for all labels. Beyond one, labels and
    answers are also written as a list."""
    activation: Activation = "auto"
    """What makes scores of a classifier's logits; `auto` as transformers' pipeline chooses."""
    aggregation: Aggregation = "simple"
    """How tokens become spans, as in transformers' pipeline."""
    prompt_name: str = ""
    """A prompt of config_sentence_transformers.json; empty for the model's default."""
    max_answer_tokens: int = 15
    """The most tokens of an answer to a question, 1 to 512."""
    allow_no_answer: bool = False
    """Let "no answer" compete, as an empty text."""
    provider: str = ""
    """Execution providers in order of preference: tensorrt,cuda,cpu. Empty: what the variable
    `ENGINERY_PROVIDERS` says, and else cpu."""
    provider_option: tuple[str, ...] = ()
    """An option of a provider, `cuda.gpu_mem_limit=2GiB`; repeat it for several."""
    allow_fallback: bool = False
    """Take the next provider where the first cannot be had, and say so."""
    io_binding: bool = True
    """On NVIDIA's providers, keep inputs and outputs in buffers on the GPU."""
    cuda_graph: bool = False
    """Record each shape's run as a CUDA graph and replay it."""
    shrink_arena: bool = False
    """Give memory that a run took beyond the arena's first piece back after it; each run allocates
    anew."""
    allow_failed: bool = False
    """Take an artifact whose validation failed."""
    optimized_graph: bool = True
    """Keep the graph as ONNX Runtime optimizes it for this processor in the store: the next run
    starts faster and takes less memory."""
    workers: int = 0
    """Batches that run at the same time, one thread each on the CPU; 0 for one a core, and in an
    actor of Ray for one."""
    window: int = 1024
    """Rows that are sorted by length together before they are cut into batches."""
    batch_tokens: int = 256
    """Padded tokens of a batch; one text alone may have more. A GPU wants many more than a CPU."""
    batch_rows: int = 64
    """The most rows of a batch."""
    part_rows: int = 4096
    """Rows after which a part is on disk for good: what a killed run repeats, at most."""
    part_seconds: float = 30.0
    """Time after which a part is closed although it has fewer rows."""
    fail_fast: bool = False
    """Stop at the first bad row."""
    engine: Engine = "local"
    """Where windows are answered: in this process, or by actors of a Ray cluster."""
    ray_address: str = ""
    """The cluster's, as `10.0.0.7:6379`, of which this machine is a node; `auto` for the one that
    runs here. Empty: what `RAY_ADDRESS` says, and else a Ray of this run's own."""
    ray_actors: int = 0
    """The most actors, each with a model of its own; 0 for as many as the cluster has room for."""
    ray_gpus: float = 0.0
    """GPUs of an actor: 0.5 puts two on one GPU."""

    def __post_init__(self) -> None:
        """Raises OptionError for a value that no run could have."""
        least = {
            "top_k": 0,
            "max_answer_tokens": 1,
            "workers": 0,
            "window": 1,
            "batch_tokens": 1,
            "batch_rows": 1,
            "part_rows": 1,
            "ray_actors": 0,
            "ray_gpus": 0,
        }
        for name, smallest in least.items():
            if getattr(self, name) < smallest:
                raise OptionError(
                    f"{name} is {getattr(self, name)}, expected {smallest} or more.", option=name
                )
        if not self.part_seconds > 0:
            raise OptionError(
                f"part_seconds is {self.part_seconds}, expected more than 0.", option="part_seconds"
            )
        if self.delimiter != "auto" and len(self.delimiter) != 1:
            raise OptionError(
                f"delimiter is {self.delimiter!r}, expected one character or auto.",
                do="A tab is $'\\t' in a shell.",
                option="delimiter",
            )
        _require_encoding(self.encoding)
        for name in ("ray_address", "ray_actors", "ray_gpus"):
            if self.engine == "local" and getattr(self, name):
                raise OptionError(
                    f"{name} is {getattr(self, name)}, and the engine is local.",
                    do="Say --engine ray, or leave it out.",
                    option=name,
                )


WITHOUT_EFFECT = (
    "workers",
    "window",
    "batch_tokens",
    "batch_rows",
    "part_rows",
    "part_seconds",
    "fail_fast",
    "allow_failed",
    "provider",
    "provider_option",
    "io_binding",
    "cuda_graph",
    "shrink_arena",
    "optimized_graph",
    "engine",
    "ray_address",
    "ray_actors",
    "ray_gpus",
)
"""Options that do not change an answer beyond its rounding: they are not in the fingerprint. The
providers are, as they are understood."""


def _require_encoding(name: str) -> None:
    import codecs

    try:
        codecs.lookup(name)
    except (LookupError, ValueError):
        raise OptionError(
            f"encoding '{name}' is not known.",
            do="As Python names them: utf-8, cp1252, utf-16.",
            option="encoding",
        ) from None
