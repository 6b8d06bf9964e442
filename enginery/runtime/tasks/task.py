"""The interface of a task: preprocess inputs into rows, postprocess the graph's outputs.

A task (embed, classify, tag, …) is one class in one module of this package. `load_model`, the
server, `predict`, the MLflow model, Triton's Python steps and the sample predictions of a recipe
all use it. To add a task, add a module, a line in `enginery.runtime.tasks.TASKS` and a method of
`enginery.runtime.model.Model`, with the keywords that `make schema` writes.

    task = Embed.open(artifact, record)
    work = task.preprocess(["The engine is warm."], task.Options())
    outputs = BatchRunner(task, runner).run(work.rows)
    vectors = task.postprocess(work, outputs, task.Options())

Between preprocessing and postprocessing, rows may run in any batches, together with rows of other
calls, and in other threads.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Self, TypeAlias

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord, Manifest
from enginery.core.errors import ArtifactError, InputError, nearest
from enginery.runtime.text.tokenizer import Encode

Arrays = dict[str, NDArray[Any]]
RowValues: TypeAlias = Any
"""A list with a value for each row, or an array (rows, …), which type checkers take for no list."""
ProcessingCost = Literal["light", "medium", "heavy"]
"""CPU time that a request's preprocessing or postprocessing may take: microseconds, about a
millisecond, or more than that."""

Modality = Literal["text", "image", "audio"]
"""What a task's inputs are."""
PLURALS: Mapping[Modality, str] = {"text": "texts", "image": "images", "audio": "audio"}

Unproved = Literal["warn", "refuse"]
"""`warn` answers, and says once in the log that the answer was never compared."""

MAX_RESULTS = 10_000
"""Upper bound of `top_k`."""


class TaskOptionError(InputError):
    """An option of a task is unknown or has an invalid value."""

    def __init__(self, message: str, *, field: str, do: str = "") -> None:
        super().__init__(message, do=do)
        self.field = field
        """Name of the option."""


class UnreadableOutputsError(ArtifactError):
    """A task cannot make results of a graph's outputs, which only its tensors give then."""


class TaskOptions(BaseModel):
    """Base of a task's options: typed, with bounds; unknown options are errors."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def read(cls, values: Mapping[str, Any], *, where: str = "") -> Self:
        """Build the options from a mapping; None counts as absent.

        Args:
            values: values by option name.
            where: prefix of option names in error messages, such as `parameters.`.

        Raises:
            TaskOptionError: an option is unknown or has an invalid value.
        """
        present = {name: value for name, value in values.items() if value is not None}
        try:
            return cls.model_validate(present)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=True)[0]
        # Outside of the handler, so that pydantic's error is not shown beside this one.
        name = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            names = tuple(cls.model_fields)
            raise TaskOptionError(
                f"unknown option '{where}{name[:60]}'{nearest(name[:60], names)}",
                field=f"{where}{name[:60]}",
                do=f"Known: {', '.join(names) or 'none'}.",
            )
        expected = expected_values(cls.schemas()[name])
        raise TaskOptionError(
            f"{where}{name}: found {describe_value(first['input'])}, expected {expected}.",
            field=f"{where}{name}",
        )

    @property
    def max_items(self) -> int:
        """Maximum number of items of a result; 0 for all."""
        return int(getattr(self, "top_k", 0))

    @property
    def rows_per_input(self) -> int:
        """Number of rows that an input becomes because of the options."""
        return 1

    @classmethod
    def schemas(cls) -> dict[str, dict[str, Any]]:
        """Return the JSON schema of each option, without null."""
        schemas = cls.model_json_schema().get("properties", {})
        return {name: without_null(schema) for name, schema in schemas.items()}


def without_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return a field's JSON schema without null among its types."""
    types = [option for option in schema.get("anyOf", ()) if option.get("type") != "null"]
    return {**schema, **(types[0] if types else {})}


def describe_value(value: Any) -> str:
    """Describe a JSON value for an error message: its type and, if it is short, the value."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, str):
        return f"the string {value if len(value) <= 60 else value[:60] + '…'!r}"
    if isinstance(value, int | float):
        return f"the number {value if isinstance(value, int) else format(value, '.12g')}"
    kinds: dict[type, str] = {dict: "an object", list: "a list", tuple: "a list", bytes: "bytes"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def expected_values(schema: Mapping[str, Any]) -> str:
    """Describe the values that an option takes, from its JSON schema."""
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    if schema.get("type") == "array":
        return f"a list of {schema['minItems']} to {schema['maxItems']} strings"
    kind = {"boolean": "true or false", "string": "a string", "integer": "a whole number"}.get(
        schema.get("type", ""), "a number"
    )
    minimum, maximum = schema.get("minimum"), schema.get("maximum")
    if minimum is None:
        return kind
    if maximum is None:
        return f"{kind} of {minimum} or more"
    return f"{kind} from {minimum} to {maximum}"


@dataclass(frozen=True)
class InputField:
    """A named part of an input: a column of a table, or a tensor of a request."""

    name: str
    example: str = ""
    """A text, with `{mask}` for the tokenizer's mask; empty for an optional part, an image or
    audio."""
    optional: bool = False
    takes_token_ids: bool = False
    """True if a list of token ids is accepted in place of a text."""


@dataclass(frozen=True)
class InputLimits:
    """What a server accepts of inputs and options; 0 for no limit of its own."""

    max_pixels: int = 0
    """Maximum number of pixels of an image file."""
    max_seconds: float = 0.0
    """Maximum duration of audio that runs in one piece."""
    max_speech_seconds: float = 0.0
    """Maximum duration of speech that runs in windows."""
    max_new_tokens: int = 0
    """Maximum number of tokens to generate for a text."""
    max_sequences: int = 0
    """Maximum number of beams or texts of an input."""
    unproved: Unproved = "warn"
    """What to do with a text that is longer than any that was compared with PyTorch."""
    token_ids: bool = True
    """False to reject lists of token ids in place of texts."""
    parallel_encode: Callable[[Encode, list[Any]], list[Any]] | None = None
    """Runs the encoding of a list of texts, see `TextTokenizer`."""


NO_LIMITS = InputLimits()


@dataclass(slots=True, eq=False)
class Row:
    """One row of a batch."""

    content: Any
    """An encoding of a text, or arrays by the names of the graph's inputs."""
    tokens: int = 1
    """Number of tokens without padding; 1 for an image, 50 for a second of audio."""
    prompt_tokens: int = 0
    """Number of leading tokens that belong to a prompt."""
    truncated: bool = False
    """True if the input had more tokens than the model takes."""
    reads_raw: bool = False
    """True if `split` needs the graph's raw outputs for this row, not its final one."""
    form: str = ""
    """The verb of a task's view whose outputs `split` returns for this row; empty for its own."""
    group: int = 0
    """Only rows of one group share a batch."""
    image_size: tuple[int, int] = (0, 0)
    """Height and width in pixels of the image that the row was made of, upright."""


@dataclass
class ModelInputs:
    """Preprocessed inputs."""

    rows: list[Row]
    context: Any = None
    """What `postprocess` needs besides the rows, such as the texts."""
    decoded: int = 0
    """Number of texts that `postprocess` has to decode."""
    numbers: int = 0
    """Largest number of numbers of the results, if they may be many more than the rows."""
    postprocess_cost: ProcessingCost = "light"


@dataclass
class RowTask(ABC):
    """Base of tasks: converts inputs to rows and outputs to results. Holds the model's settings."""

    Options: ClassVar[type[TaskOptions]] = TaskOptions
    runs_in_steps: ClassVar[bool] = False
    """True if a row takes many steps, which `TextGenerator` runs, instead of one run."""
    graph_outputs: ClassVar[Mapping[str, int]] = {}
    """The graph outputs that the task reads, with their ranks."""

    record: GraphRecord

    @classmethod
    @abstractmethod
    def open(cls, artifact: Artifact, record: GraphRecord, limits: InputLimits = NO_LIMITS) -> Self:
        """Read the model's files beside a graph.

        Args:
            artifact: the artifact.
            record: the graph.
            limits: what a server accepts.

        Raises:
            ArtifactError: a file is missing or malformed, or the graph lacks an input or output
                that the task needs.
        """

    @abstractmethod
    def preprocess(self, inputs: Any, options: Any) -> ModelInputs:
        """Convert inputs to rows, one or more per input.

        Raises:
            InputError: an input is invalid; the message has its index.
        """

    @abstractmethod
    def collate(self, rows: Sequence[Row], width: int) -> Arrays:
        """Return the feeds for the rows of a batch, padded to at least `width` tokens."""

    @abstractmethod
    def split(
        self, rows: Sequence[Row], feeds: Mapping[str, NDArray[Any]], outputs: Arrays
    ) -> RowValues:
        """Split the graph's outputs by row, without padding.

        Raises:
            ArtifactError: an output does not have the shape that the graph declares.
        """

    @abstractmethod
    def postprocess(self, work: ModelInputs, outputs: Sequence[Any], options: Any) -> Any:
        """Return a result for each input, from the outputs of each row as `split` returned them.

        If those of all batches were arrays, `outputs` is an array (rows, …). Vectors are one array
        (inputs, dim); the outputs of a graph for its own tensors are arrays by name.
        """

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of an input; 0 without a limit."""
        return 0

    def outputs_read(self, *, raw: bool = False) -> tuple[str, ...]:
        """Return the names of the graph outputs that `split` needs; empty for all.

        Args:
            raw: for rows with `reads_raw`.
        """
        return tuple(self.graph_outputs)

    @property
    def can_pad(self) -> bool:
        """True if rows of different lengths can share a batch."""
        return True


@dataclass
class Task(RowTask):
    """Base of tasks that have typed inputs and results, as opposed to raw tensors."""

    verb: ClassVar[str]
    """Name of the task and of the method of `Model`, such as `embed`."""
    purpose: ClassVar[str]
    """What a model of this task does, for messages, such as `embeds texts`."""
    tasks: ClassVar[tuple[str, ...]]
    """Names of the transformers tasks that this class implements."""
    inputs: ClassVar[tuple[InputField, ...]]
    result_type: ClassVar[Any]
    """The type of one result: a dataclass, a list of dataclasses, or `Vectors`; see `results`."""
    modality: ClassVar[Modality] = "text"

    notes: tuple[str, ...] = field(default=(), kw_only=True)
    """Choices made for this model, with their reasons."""

    @classmethod
    def fits(cls, manifest: Manifest, record: GraphRecord | None) -> bool:
        """Return True if an artifact is of this task.

        Args:
            manifest: the artifact's manifest.
            record: the graph to run; None for the first one.
        """
        graphs = [record] if record else manifest.graphs[:1]
        names = [spec.name for graph in graphs for spec in graph.inputs]
        if "input_ids" in names and "pixel_values" in names:
            return False  # a class of its own embeds with such a graph
        return manifest.task in cls.tasks and input_modality(names) == cls.modality

    @classmethod
    def result_type_for(cls, options: TaskOptions) -> Any:
        """Return the type of one result of a call with these options."""
        return cls.result_type

    @abstractmethod
    def describe(self, result: Any) -> str:
        """Describe a result in a few words, for people."""


@dataclass
class MediaTask(Task):
    """Base of tasks on images or audio. Inputs are read one by one, because rows are large."""

    has_large_outputs: ClassVar[bool] = False
    """True if the outputs of a list of inputs may take gigabytes, and their results do not."""

    def preprocess(self, inputs: Sequence[Any], options: Any) -> ModelInputs:
        """Read each input into one row, or into several."""
        work = ModelInputs([])
        work.rows = list(self.read_rows(inputs, options, work))
        return work

    def read_rows(self, inputs: Sequence[Any], options: Any, work: ModelInputs) -> Iterator[Row]:
        """Read inputs one by one, for `BatchRunner.run_stream`.

        Args:
            inputs: the inputs.
            options: options of the task.
            work: gets what `postprocess` needs besides the rows.
        """
        if isinstance(inputs, str | bytes) or not isinstance(inputs, Sequence):
            raise InputError(
                f"found one {type(inputs).__name__}, expected a list of {PLURALS[self.modality]}.",
                do=f"Pass [{self.modality}].",
            )
        for index, item in enumerate(inputs):
            yield from self.rows_of(item, index, options, work)

    def rows_of(self, item: Any, index: int, options: Any, work: ModelInputs) -> Iterator[Row]:
        """Yield the rows of one input; see `read_rows`."""
        yield self.read_row(item, index)

    @abstractmethod
    def read_row(self, item: Any, index: int = 0) -> Row:
        """Read one input; error messages refer to it by `index`."""

    def collate(self, rows: Sequence[Row], _width: int) -> Arrays:
        """Return the graph's inputs: (len(rows), …) each."""
        return {name: np.stack([row.content[name] for row in rows]) for name in rows[0].content}


def require_shapes(content: Arrays, record: GraphRecord, name: str, *, do: str) -> None:
    """Raise InputError unless the arrays of an input have the fixed dims of the graph.

    Args:
        content: the preprocessed input, without the batch axis.
        record: the graph.
        name: name of the input for the message.
        do: what to do about it.
    """
    for spec in record.inputs:
        shape, dims = content[spec.name].shape, spec.dims[1:]
        fits = len(shape) == len(dims) and all(
            size == dim or not isinstance(dim, int) for size, dim in zip(shape, dims, strict=True)
        )
        if not fits:
            raise InputError(
                f"{name}: preprocessor_config.json produces {' × '.join(map(str, shape))}, "
                f"but the graph takes {spec}.",
                do=do,
            )


def output_rows(
    outputs: Mapping[str, NDArray[Any]], name: str, rows: Sequence[Row], *, tokens: bool = False
) -> NDArray[Any]:
    """Return an output after checking its shape: (rows, …), with `tokens` (rows, tokens, …).

    Raises:
        ArtifactError: the output is smaller than that.
    """
    values = outputs[name]
    min_shape = (len(rows), *([max((row.tokens for row in rows), default=0)] if tokens else []))
    if values.ndim < len(min_shape) or any(
        a < b for a, b in zip(values.shape, min_shape, strict=False)
    ):
        raise ArtifactError(
            f"the graph returned {name} with the shape {values.shape} for {len(rows)} inputs, "
            f"expected at least {' × '.join(map(str, min_shape))}.",
            do="The output does not have the dims that manifest.json declares; export the model "
            "again.",
        )
    return values


def count_inputs(inputs: Any) -> int:
    """Return the number of inputs of a task; of tensors by name, the largest batch size."""
    if isinstance(inputs, Mapping):
        return max((len(array) for array in inputs.values() if array.ndim), default=1)
    return len(inputs)


def count_characters(inputs: Any) -> int:
    """Return the number of characters of texts and pairs of texts; a token id counts as one."""
    if isinstance(inputs, Mapping):
        return 0
    total = 0
    for item in inputs:
        if isinstance(item, tuple):
            total += sum(len(part) for part in item if isinstance(part, str))
        elif isinstance(item, str | list):
            total += len(item)
    return total


def input_modality(inputs: Iterable[str]) -> Modality:
    """Return what a graph with these input names takes."""
    names = set(inputs)
    if "pixel_values" in names:
        return "image"
    return "audio" if names & {"input_values", "input_features"} else "text"


def has_outputs(record: GraphRecord | None, outputs: Mapping[str, int]) -> bool:
    """Return True if a graph has outputs of these names and ranks; a rank may be unknown."""
    specs = {spec.name: spec for spec in record.outputs} if record else {}
    return all(
        name in specs and len(specs[name].dims) in (0, rank) for name, rank in outputs.items()
    )


def require_outputs(task: str, record: GraphRecord, outputs: Mapping[str, int]) -> None:
    """Raise ArtifactError unless the graph has outputs of these names and ranks.

    An output without dims in its record has an unknown rank and is accepted.
    """
    specs = {spec.name: spec for spec in record.outputs}
    for name, rank in outputs.items():
        if name not in specs:
            raise ArtifactError(
                f"{record.file} has the outputs {', '.join(specs)}; {task} needs {name}.",
                do="Export the model again for its task.",
            )
        if len(specs[name].dims) not in (0, rank):
            raise ArtifactError(
                f"{record.file} has the output {specs[name]}; {task} expects {rank} dims.",
                do="Export the model again for its task.",
            )
