"""Options of predict. Importing this module is fast, for `enginery --help`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from enginery.core.datasets.batches import Format
from enginery.core.errors import OptionError
from enginery.core.options import by_content, not_in_key

MAX_ROWS, MAX_TOKENS = 64, 512
"""The default limits of a batch, except for texts on a GPU."""

WINDOW_TEXTS = 2048
"""The default number of texts that are sorted together."""

Activation = Literal["auto", "softmax", "sigmoid", "none"]
Aggregation = Literal["none", "simple", "first", "average", "max"]
VectorKind = Literal["dense", "tokens", "sparse"]
VectorDtype = Literal["float32", "float16", "int8", "binary", "ubinary"]


@dataclass(frozen=True)
class PredictConfig:
    """Options of the predict stage.

    Those that change predictions by rounding at most are not in the key: the run's speed and
    memory, its parts, and where it runs.
    """

    column: str = "text"
    """Column with the text, or with the path of the image for an image model."""
    pair_column: str = ""
    """Column with the second text, for models that classify pairs of texts."""
    question_column: str = "question"
    """Column with the question, for question answering."""
    context_column: str = "context"
    """Column with the text that contains the answer, for question answering."""
    format: Format = "auto"
    """Format of the input; `auto` takes it from the suffix. Standard input has none, so set it."""
    delimiter: str = "auto"
    """Character between the fields of a CSV file; `auto` is a comma for CSV and a tab for TSV."""
    encoding: str = "utf-8"
    """Encoding of CSV, TSV, JSONL and text input. A row with other bytes is a bad row."""
    prefix: str = ""
    """Prefix of the names of the prediction's columns. Empty: a column gets the prefix
    `predicted_` if the input already has one of its name, as labelled data have `label`."""
    top_k: int = 1
    """Number of labels, answers or fillings per row, best first; 0 for all labels. Above 1, labels
    and answers are also written as a list."""
    activation: Activation = "auto"
    """Function that turns a classifier's logits into scores; `auto` chooses like transformers'
    pipeline."""
    aggregation: Aggregation = "simple"
    """Strategy that merges tokens into spans, as in transformers' pipeline."""
    candidate_labels: tuple[str, ...] = ()
    """Labels to choose from, for a model of natural language inference, or of texts and images such
    as CLIP: `sport,politics`. Repeat it for labels with commas."""
    hypothesis_template: str = ""
    """What is said of an input with a label, in place of `{}`, for `candidate_labels`. Empty for
    "This example is {}." of texts, and "This is a photo of {}." of images."""
    multi_label: bool = False
    """Judge each of `candidate_labels` by itself: several may be right."""
    threshold: float = -1.0
    """Score above which the objects or segments of an image are written, 0 to 1; -1 for that of
    transformers' pipelines, 0.5 of objects and 0.9 of segments."""
    subtask: Literal["auto", "panoptic", "semantic"] = "auto"
    """Kind of segmentation: `semantic` joins the objects of a panoptic model by label; `auto` is
    panoptic where the model can."""
    dimensions: int = 0
    """Number of leading dimensions of an embedding to keep, for models trained with Matryoshka
    representation learning; 0 for all."""
    vectors: VectorKind = "dense"
    """Vectors of a model that embeds: one for each text, or `tokens`, one for each token; `sparse`,
    the weights of a SPLADE model for fill-mask."""
    dtype: VectorDtype = "float32"
    """Type of the numbers of dense vectors: float16; int8 of vectors of length 1, times 127; or a
    bit for each dimension, packed into int8 (`binary`) or uint8 (`ubinary`)."""
    prompt_name: str = ""
    """A prompt of config_sentence_transformers.json; empty for the model's default."""
    max_answer_tokens: int = 15
    """Maximum number of tokens of an answer in question answering, 1 to 512."""
    allow_no_answer: bool = False
    """Allow "no answer" as a result of question answering, as an empty text."""
    return_timestamps: Literal["", "char", "word"] = ""
    """Add the column `chunks` to transcriptions of CTC models, with the time of each letter or
    word."""
    chunk_length_s: float = 0.0
    """Seconds of the chunks that audio is cut into before a CTC model transcribes it, which bounds
    the memory of long recordings; 0 for none."""
    generation: tuple[str, ...] = ()
    """An option of generation, `max_new_tokens=64`, `num_beams=4` or `target_language=fr`; repeat
    it for several. The model's generation_config.json has the others."""
    providers: str = by_content()
    """Execution providers in order of preference: tensorrt,cuda,cpu; or a YAML or JSON file of
    them. Empty for the variable `ENGINERY_PROVIDERS`, or cpu if it is not set."""
    provider_option: tuple[str, ...] = not_in_key(())  # part of the content of `providers`
    """An option of a provider, `cuda.gpu_mem_limit=2GiB`; repeat it for several."""
    allow_fallback: bool = False
    """Use the next provider, with a message, if the first one is not available."""
    io_binding: bool = not_in_key(True)
    """Keep inputs and outputs in GPU buffers, on NVIDIA's providers."""
    cuda_graph: bool = not_in_key(False)
    """Record the run of each shape as a CUDA graph and replay it."""
    ladder: bool = not_in_key(True)
    """On CUDA, round batches and lengths up to a few sizes and record a CUDA graph for each."""
    shrink_arena: bool = not_in_key(False)
    """Return memory beyond the arena's first chunk after each run; each run allocates it again."""
    allow_failed: bool = not_in_key(False)  # a permission
    """Accept an artifact whose validation failed."""
    optimized_graph: bool = not_in_key(True)
    """Keep ONNX Runtime's optimized graph for this processor in the store: the next run starts
    faster and needs less memory."""
    unproved: Literal["warn", "refuse"] = "warn"
    """A text that is longer than any that validate has compared with PyTorch: predict it, and say
    so once in the log; or count it as a bad row."""
    workers: int = not_in_key(0)
    """Number of batches that run at the same time, on the CPU one thread each; 0 for one per core.
    On a GPU one batch runs at a time."""
    window: int = not_in_key(0)
    """Number of rows that are sorted by length before they are cut into batches. 0 for 2048 texts,
    or two full batches of inputs that take longer: images, audio and prompts."""
    batch_tokens: int = not_in_key(0)
    """Maximum number of padded tokens per batch; a single text may have more. 0 for 512 on the CPU
    and 8192 on a GPU."""
    batch_rows: int = not_in_key(0)
    """Maximum number of rows per batch. 0 for 64, or 256 for texts on a GPU."""
    part_rows: int = not_in_key(0)
    """Number of rows per part of the output; a killed run repeats at most two parts. 0 for 4096 on
    the CPU and 65,536 on a GPU."""
    part_seconds: float = not_in_key(30.0)
    """Time after which a part with fewer rows is finished, in seconds."""
    fail_fast: bool = not_in_key(False)
    """Stop at the first bad row."""

    def __post_init__(self) -> None:
        """Raise OptionError for an invalid value."""
        minimums = {
            "top_k": 0,
            "dimensions": 0,
            "max_answer_tokens": 1,
            "chunk_length_s": 0,
            "workers": 0,
            "window": 0,
            "batch_tokens": 0,
            "batch_rows": 0,
            "part_rows": 0,
        }
        for name, minimum in minimums.items():
            if getattr(self, name) < minimum:
                raise OptionError(
                    f"option '{name}' is {getattr(self, name)}, expected {minimum} or more.",
                    option=name,
                )
        # Not `<= 0`, which is False for NaN.
        if not self.part_seconds > 0:
            raise OptionError(
                f"option 'part_seconds' is {self.part_seconds}, expected more than 0.",
                option="part_seconds",
            )
        if self.delimiter != "auto" and len(self.delimiter) != 1:
            raise OptionError(
                f"option 'delimiter' is {self.delimiter!r}, expected one character or auto.",
                do="In a shell, write a tab as $'\\t'.",
                option="delimiter",
            )
        _require_encoding(self.encoding)


def _require_encoding(name: str) -> None:
    import codecs

    try:
        codecs.lookup(name)
    except (LookupError, ValueError):
        raise OptionError(
            f"option 'encoding' is '{name}', expected an encoding that Python knows.",
            do="Use Python's names: utf-8, cp1252, utf-16.",
            option="encoding",
        ) from None
