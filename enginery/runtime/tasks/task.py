"""What a task is: inputs to rows of a graph, and the graph's outputs to results.

A task (embed, classify, tag, ...) is one class in one module of this package. Everything that
answers with a model uses it: `load_model`, the server, `predict`, the MLflow model, Triton's
Python steps and the sample predictions of a recipe. A new task is a new module and a line in
`enginery.runtime.tasks.TASKS`.

    task = Embed.open(artifact, record)
    work = task.preprocess(["The engine is warm."], task.Options())
    outputs = BatchRunner(task, runner).run(work.rows)
    vectors = task.postprocess(work, outputs, task.Options())

Between preprocessing and postprocessing the rows may run in any batches, beside rows of other
calls, in other threads.
"""

from __future__ import annotations

import json
import math
from abc import ABC, abstractmethod
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, ClassVar, Literal, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import BaseModel, ConfigDict, ValidationError

from enginery.core.artifact import Artifact
from enginery.core.errors import ArtifactError, InputError, nearest
from enginery.core.manifest import GraphRecord

Arrays = dict[str, NDArray[Any]]
ProcessingCost = Literal["light", "medium", "heavy"]
"""How long work on one request may take: microseconds; about a millisecond; longer, or unbounded
because a tokenizer's own rules decide."""

MAX_RESULTS = 10_000
"""The largest `top_k`."""


class TaskOptionError(InputError):
    """An option of a task is unknown or has a value that cannot be used."""

    def __init__(self, message: str, *, field: str, do: str = "") -> None:
        super().__init__(message, do=do)
        self.field = field
        """The option's name."""


class TaskOptions(BaseModel):
    """Base of the options of a task: typed, limited, and none unknown."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)

    @classmethod
    def read(cls, values: Mapping[str, Any], *, where: str = "") -> Self:
        """Build the options from values by name; None counts as absent.

        Args:
            values: by option.
            where: what the options' names begin with in messages, `parameters.`.

        Raises:
            TaskOptionError: an option is unknown or its value is not one that it takes.
        """
        given = {name: value for name, value in values.items() if value is not None}
        try:
            return cls.model_validate(given)
        except ValidationError as error:
            first = error.errors(include_url=False, include_context=True)[0]
        name = str(first["loc"][0])
        if first["type"] == "extra_forbidden":
            known = tuple(cls.model_fields)
            raise TaskOptionError(
                f"unknown option '{where}{name[:60]}'{nearest(name[:60], known)}",
                field=f"{where}{name[:60]}",
                do=f"Known: {', '.join(known) or 'none'}.",
            )
        expected = expected_values(cls.schemas()[name])
        raise TaskOptionError(
            f"{where}{name}: found {describe_value(first['input'])}, expected {expected}.",
            field=f"{where}{name}",
        )

    @classmethod
    def schemas(cls) -> dict[str, dict[str, Any]]:
        """Return the JSON schema of each option's values, null left out."""
        schemas = cls.model_json_schema().get("properties", {})
        return {name: without_null(schema) for name, schema in schemas.items()}


def without_null(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a field's values, null left out."""
    kinds = [each for each in schema.get("anyOf", ()) if each.get("type") != "null"]
    return {**schema, **(kinds[0] if kinds else {})}


def describe_value(value: Any) -> str:
    """Return a value as messages show it: its kind, and short ones themselves."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, str):
        return f"the string {value if len(value) <= 60 else value[:60] + '…'!r}"
    if isinstance(value, int | float):
        return f"the number {value if isinstance(value, int) else format(value, '.12g')}"
    kinds: dict[type, str] = {dict: "an object", list: "a list", tuple: "a list", bytes: "bytes"}
    return kinds.get(type(value), f"a {type(value).__name__}")


def expected_values(schema: Mapping[str, Any]) -> str:
    """Return the values that an option takes, from its JSON schema."""
    if "enum" in schema:
        return " or ".join(map(str, schema["enum"]))
    kind = {"boolean": "true or false", "string": "a string", "integer": "a whole number"}.get(
        schema.get("type", ""), "a number"
    )
    least, most = schema.get("minimum"), schema.get("maximum")
    if least is None:
        return kind
    return f"{kind} of {least} or more" if most is None else f"{kind} from {least} to {most}"


@dataclass(frozen=True)
class InputField:
    """One named part of an input: a column of a table, a tensor of a request."""

    name: str
    optional: bool = False


@dataclass(frozen=True)
class OutputTensor:
    """One tensor of results, as the Open Inference Protocol and Triton carry them."""

    name: str
    dtype: Literal["float32", "int64", "string"]
    rank: int


@dataclass(slots=True, eq=False)
class Row:
    """One row of a graph."""

    content: Any
    """An encoding, pixels (channels, height, width), or tensors by name."""
    tokens: int = 1
    """Real tokens; 1 for an image."""
    prompt_tokens: int = 0
    """How many tokens at the start belong to a prompt."""
    truncated: bool = False
    """The input had more tokens than the model takes."""


@dataclass
class ModelInputs:
    """Inputs as rows of the graph, with what is needed to make results of their outputs."""

    rows: list[Row]
    context: Any = None


@dataclass(frozen=True)
class ResultDescription:
    """A result in words for people, and as plain values for programs."""

    words: dict[str, str]
    values: dict[str, Any]


class Result:
    """Base of the results that are dataclasses."""

    def to_dict(self) -> dict[str, Any]:
        """Return the result as dicts, lists, strings and numbers."""
        plain: dict[str, Any] = _lists(asdict(self))  # type: ignore[call-overload]
        return plain


@dataclass
class RowTask(ABC):
    """Inputs to rows of a graph and back. Instances hold what the model's own files say."""

    takes_images: ClassVar[bool] = False
    Options: ClassVar[type[TaskOptions]] = TaskOptions

    record: GraphRecord
    notes: tuple[str, ...] = field(default=(), kw_only=True)
    """Choices that were made for this model, with their reasons."""

    @classmethod
    @abstractmethod
    def open(cls, artifact: Artifact, record: GraphRecord) -> Self:
        """Read the model's files beside a graph.

        Raises:
            ArtifactError: a file is missing or malformed, or the graph has not the inputs and
                outputs that the task needs.
        """

    @abstractmethod
    def preprocess(self, inputs: Any, options: Any) -> ModelInputs:
        """Return the rows of inputs, one or more each.

        Raises:
            InputError: an input cannot be used; the message has its index.
        """

    @abstractmethod
    def collate(self, rows: Sequence[Row], width: int) -> Arrays:
        """Return the graph's feeds for rows of one `batch_key`, padded to `width` tokens."""

    @abstractmethod
    def split(
        self, rows: Sequence[Row], feeds: Mapping[str, NDArray[Any]], outputs: Arrays
    ) -> list[Any]:
        """Return for each row its part of the graph's outputs.

        Raises:
            ArtifactError: the outputs have not the shapes that the graph declares.
        """

    @abstractmethod
    def postprocess(self, work: ModelInputs, outputs: Sequence[Any], options: Any) -> Any:
        """Return a result for each input, from what `split` gave for each row."""

    def batch_key(self, row: Row) -> Hashable:
        """Return what rows must have in common to share a batch."""
        return type(self)

    def row_shape(self, row: Row) -> tuple[int, ...]:
        """Return the sizes of a row that engines pad: its tokens; none to leave it as it is."""
        return (max(row.tokens, 1),)

    @property
    def has_rows(self) -> bool:
        """Return whether a row is one row of the graph's tensors, so that several share a batch."""
        return True

    @property
    def can_pad(self) -> bool:
        """Whether rows of different length can share a batch."""
        return True

    def count(self, inputs: Any) -> int:
        """Return how many inputs these are."""
        return len(inputs)

    def count_decoded(self, work: ModelInputs, options: Any) -> int:
        """Return how many texts postprocessing decodes."""
        return 0

    def preprocess_cost(self, inputs: Any) -> ProcessingCost:
        """Return how long preprocessing these inputs may take."""
        return "heavy"

    def postprocess_cost(self, work: ModelInputs, options: Any) -> ProcessingCost:
        """Return how long postprocessing may take."""
        return "light"

    def characters(self, inputs: Any) -> int:
        """Return the characters of all texts among the inputs."""
        return 0


@dataclass
class Task(RowTask):
    """One way to answer with a model."""

    verb: ClassVar[str]
    """The name of the task here, and of the method of a model: `embed`."""
    purpose: ClassVar[str]
    """What a model of it does, for messages: `embeds texts`."""
    tasks: ClassVar[tuple[str, ...]]
    """The tasks of transformers that are answered so."""
    takes_token_ids: ClassVar[bool] = False
    """A list of token ids is as good as a text."""
    takes_pairs: ClassVar[bool] = False
    """An input may have two parts, as `inputs` names them."""
    inputs: ClassVar[tuple[InputField, ...]]
    outputs: ClassVar[tuple[OutputTensor, ...]]
    graph_outputs: ClassVar[Mapping[str, int]] = {}
    """The outputs of the graph that results are made from, with their ranks."""
    result_type: ClassVar[Any]
    """The type of one result: a dataclass, a list of dataclasses, or `Vectors`."""
    example: ClassVar[tuple[str, ...]]
    """A text for each required part of one input, for model cards and published models; `{mask}`
    stands for the tokenizer's mask. Empty for images."""

    @classmethod
    def outputs_read(cls, record: GraphRecord) -> list[str]:
        """Return the names of the graph's outputs that results are made from."""
        return list(cls.graph_outputs)

    @abstractmethod
    def postprocess(self, work: ModelInputs, outputs: Sequence[Any], options: Any) -> list[Any]:
        """Return a result for each input, from what `split` gave for each row."""

    def collect(self, results: Sequence[Any]) -> Any:
        """Return the results of a call as `load_model` gives them: a list, or one array."""
        return list(results)

    @abstractmethod
    def probe(self, tokens: int) -> Row:
        """Return a made-up row, for warm-up and measuring: of so many tokens, or an image."""

    @abstractmethod
    def is_finite(self, result: Any) -> bool:
        """Whether every number of a result is finite."""

    @abstractmethod
    def tensors(self, results: Sequence[Any]) -> Arrays:
        """Return results as the tensors that `outputs` declares; strings are bytes in UTF-8."""

    @classmethod
    @abstractmethod
    def arrow_fields(cls, options: Any, dim: int) -> list[Any]:
        """Return the columns of a table of results, as `pyarrow.Field`; `dim` is of vectors."""

    @classmethod
    @abstractmethod
    def arrow_values(cls, result: Any) -> tuple[Any, ...]:
        """Return a result's value for each of `arrow_fields`, and perhaps more behind them."""

    @abstractmethod
    def describe(self, inputs: Sequence[str], results: Sequence[Any]) -> list[ResultDescription]:
        """Return each result in words."""

    def sample_inputs(self, sentences: Sequence[str]) -> tuple[str, ...]:
        """Return built-in sentences as inputs of this task; empty where it takes none."""
        return ()


def require_outputs(task: str, record: GraphRecord, outputs: Mapping[str, int]) -> None:
    """Raise ArtifactError unless the graph has outputs of these ranks.

    An output of unknown rank, which a record has without dims, is taken.
    """
    specs = {spec.name: spec for spec in record.outputs}
    for name, rank in outputs.items():
        if name not in specs:
            raise ArtifactError(
                f"{record.file} has the outputs {', '.join(specs)}; {task} is answered from {name}."
            )
        if len(specs[name].dims) not in (0, rank):
            raise ArtifactError(
                f"{record.file} has the output {specs[name]}; {task} is answered from {rank} dims."
            )


def are_finite(scores: Iterable[float]) -> bool:
    """Whether all of some scores are finite."""
    return all(map(math.isfinite, scores))


def string_tensor(texts: Sequence[Any]) -> NDArray[Any]:
    """Return strings, or lists of as many strings each, as an object array of UTF-8 bytes."""
    shape = (len(texts),) if texts and isinstance(texts[0], str) else (len(texts), len(texts[0]))
    flat = texts if len(shape) == 1 else [text for row in texts for text in row]
    array = np.empty(len(flat), dtype=object)
    array[:] = [text.encode() for text in flat]
    return array.reshape(shape)


def json_tensor(values: Sequence[Any]) -> NDArray[Any]:
    """Return values as one JSON document each, in UTF-8."""
    return string_tensor([json.dumps(value, ensure_ascii=False) for value in values])


def _lists(value: Any) -> Any:
    """Return tuples as lists, as JSON reads them back."""
    if isinstance(value, dict):
        return {name: _lists(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_lists(item) for item in value]
    return value
