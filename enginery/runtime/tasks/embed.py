"""Text embedding."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Annotated, Any, ClassVar, Self

import numpy as np
from numpy.typing import NDArray
from pydantic import Field

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ArtifactError, InputError, nearest
from enginery.core.model.files import ModelConfig, SentenceTransformersConfig
from enginery.runtime.tasks.task import (
    NO_LIMITS,
    Arrays,
    InputLimits,
    ModelInputs,
    Row,
    RowValues,
    TaskOptionError,
    TaskOptions,
    output_rows,
)
from enginery.runtime.tasks.text import TextOptions, TextTask
from enginery.runtime.text.pooling import Pooling, Vectors, read_pooling
from enginery.runtime.text.tokenizer import (
    OTHER_TOKENIZER,
    check_texts,
    describe_type,
    require_list,
)
from enginery.runtime.text.vector_dtypes import VectorDtype, to_dtype

TOKEN_OUTPUTS = ("last_hidden_state", "token_embeddings")
SENTENCE_OUTPUT = "sentence_embedding"
"""A text's vector as sentence-transformers' modules make it of the token vectors."""
_PROJECTED, _POOLED = "text_embeds", "pooler_output"
TOKENS = "embed_tokens"
"""The form of rows whose tokens' vectors are wanted; the verb of that view."""

_UNIT = 1e-6
"""Tolerance for a squared norm of 1: a model that normalizes in float32 leaves an error of 1e-7."""


class VectorOptions(TaskOptions):
    """Options of tasks whose results are vectors."""

    normalize: bool | None = None
    """Scale vectors to length 1 (true) or return them as pooled (false); null follows the model's
    own files."""
    dimensions: Annotated[int, Field(ge=1)] | None = None
    """Keep only this many leading dimensions, for models trained with Matryoshka representation
    learning (arXiv:2205.13147); null for all."""
    dtype: VectorDtype = "float32"
    """Type of the numbers: float16; int8 of vectors of length 1, times 127; or a bit for each
    dimension, packed into int8 (`binary`) or uint8 (`ubinary`)."""


class PromptOptions(TextOptions):
    """Options of tasks whose texts may have a prompt in front."""

    prompt_name: str = ""
    """Name of a prompt in config_sentence_transformers.json; empty for the model's default."""


class EmbedOptions(PromptOptions, VectorOptions):
    """Options of `embed`."""


@dataclass
class PromptedTask(TextTask):
    """Base of the tasks that embed texts, with a prompt in front, or token ids without one."""

    inputs = (replace(TextTask.inputs[0], takes_token_ids=True),)
    Options: ClassVar[type[TaskOptions]] = PromptOptions

    prompts: dict[str, str] = field(default_factory=dict, kw_only=True)
    """The prompts of config_sentence_transformers.json, by name."""
    default_prompt: str = field(default="", kw_only=True)
    """Name of the prompt that applies if a call names none; empty for no prompt."""
    takes_token_ids: bool = field(default=True, kw_only=True)
    """False to reject lists of token ids: nothing tells of which tokenizer they are."""
    _prompt_tokens: dict[str, int] = field(default_factory=dict, init=False, repr=False)
    """Name of each prompt that was used -> the number of its tokens."""

    @classmethod
    def open(cls, artifact: Artifact, record: GraphRecord, limits: InputLimits = NO_LIMITS) -> Self:
        """Read the tokenizer, config.json and the modules; see `RowTask.open`."""
        task = super().open(artifact, record, limits)
        task.takes_token_ids = limits.token_ids
        return task

    @classmethod
    def _read_settings(
        cls, artifact: Artifact, record: GraphRecord
    ) -> tuple[list[str], dict[str, Any]]:
        notes, settings = super()._read_settings(artifact, record)
        sentence = SentenceTransformersConfig.read(artifact.path)
        prompts = {name: prompt or "" for name, prompt in sentence.prompts.items()}
        return notes, {
            **settings,
            "prompts": prompts,
            "default_prompt": sentence.default_prompt_name,
        }

    def preprocess(
        self, inputs: Sequence[str | Sequence[int]], options: PromptOptions
    ) -> ModelInputs:
        """Tokenize texts, with the prompt in front; token ids are taken without a prompt."""
        require_list(inputs, "text")
        texts = [item for item in inputs if isinstance(item, str)]
        if len(texts) == len(inputs):  # token ids are checked one by one below
            check_texts(inputs)
        for index, item in enumerate(inputs):
            if not isinstance(item, str | list | tuple | np.ndarray):
                raise InputError(
                    f"text {index} is {describe_type(item)}, expected a string or token ids."
                )
            if not self.takes_token_ids and not isinstance(item, str):
                raise InputError(
                    f"input {index} is a list of token ids, which this server does not take: "
                    "nothing tells whether they are ids of the model's own tokenizer.",
                    do=f"Send texts. {OTHER_TOKENIZER}",
                )
        name = options.prompt_name or self.default_prompt
        prompt, prompt_tokens = self._prompt(name) if name else ("", 0)
        prepared = [self.tokenizer.prepare(prompt + text) for text in texts]
        encoded = iter(self.tokenizer.encode(prepared, offsets=False))
        encodings = [
            next(encoded) if isinstance(item, str) else self.tokenizer.encode_ids(item, index)
            for index, item in enumerate(inputs)
        ]
        rows = self.rows(encodings, options)
        for row, item in zip(rows, inputs, strict=True):
            row.prompt_tokens = prompt_tokens if isinstance(item, str) else 0
        return ModelInputs(rows)

    def _prompt(self, name: str) -> tuple[str, int]:
        """Return the text of a prompt and the number of leading tokens that it takes up."""
        if name not in self.prompts:
            raise InputError(
                f"the model has no prompt '{name}'{nearest(name, self.prompts)}",
                do=f"Its prompts: {', '.join(self.prompts) or 'none'}.",
            )
        prompt = self.prompts[name]
        if name in self._prompt_tokens:
            return prompt, self._prompt_tokens[name]
        try:
            (encoding,) = self.tokenizer.encode([self.tokenizer.prepare(prompt)])
        except InputError as error:
            message = error.message.replace("text 0", f"prompt '{name}'", 1)
            raise InputError(message) from error
        # The tokenizer ends the prompt with a special token; within a text the prompt has none.
        ends_special = bool(encoding.special_tokens_mask and encoding.special_tokens_mask[-1])
        self._prompt_tokens[name] = len(encoding.ids) - ends_special
        return prompt, self._prompt_tokens[name]


@dataclass
class Embed(PromptedTask):
    """Embed texts; pool and normalize as the model's sentence-transformers modules specify."""

    verb = "embed"
    purpose = "embeds texts"
    tasks = ("feature-extraction",)
    result_type: ClassVar[Any] = Vectors
    Options: ClassVar[type[TaskOptions]] = EmbedOptions

    pooling: Pooling | None
    """The pooling of token vectors; None if the graph pools and has no output of them, or the
    model's files have another rule."""
    truncate_dim: int | None = None
    """Number of leading dimensions that are kept if a call does not say; None for all."""

    @classmethod
    def _read_settings(
        cls, artifact: Artifact, record: GraphRecord
    ) -> tuple[list[str], dict[str, Any]]:
        _, settings = super()._read_settings(artifact, record)
        outputs = [spec.name for spec in record.outputs]
        pooling: Pooling | None = None
        vector = vector_output(record, ModelConfig.read(artifact.path))
        if vector:
            note = f"the graph pools by itself (output {vector})"
            if vector == SENTENCE_OUTPUT and any(name in outputs for name in TOKEN_OUTPUTS):
                with suppress(ArtifactError):  # a module that the graph alone computes
                    pooling = read_pooling(artifact.path)
        elif any(name in outputs for name in TOKEN_OUTPUTS):
            pooling = read_pooling(artifact.path)
            note = pooling.note
        else:
            raise ArtifactError(
                f"{artifact.path}: the graph has the outputs {', '.join(outputs)}, "
                f"expected one of {', '.join((SENTENCE_OUTPUT, _PROJECTED, *TOKEN_OUTPUTS))} to "
                "embed texts."
            )
        sentence = SentenceTransformersConfig.read(artifact.path)
        notes = [note]
        if sentence.truncate_dim:
            notes.append(
                f"vectors are cut to their first {sentence.truncate_dim} numbers: truncate_dim in "
                f"{SentenceTransformersConfig.FILE}"
            )
        return notes, {**settings, "pooling": pooling, "truncate_dim": sentence.truncate_dim}

    @cached_property
    def graph_dim(self) -> int:
        """The size of a vector as the graph declares it; 0 if it does not."""
        (name,) = self.outputs_read()
        last = next(spec.dims[-1] for spec in self.record.outputs if spec.name == name)
        if not isinstance(last, int):
            return 0
        return self.pooling.size(last) if self.pooling and not self._vector else last

    def kept_dimensions(self, size: int) -> int:
        """Return the number of leading dimensions that a call keeps if it names no other."""
        # As sentence-transformers, which keeps vectors that are shorter as they are.
        return min(self.truncate_dim or size, size)

    def outputs_read(self, *, raw: bool = False) -> tuple[str, ...]:
        """Return the vectors if the graph pools, else the token vectors; see `RowTask`."""
        if self._vector and not raw:
            return (self._vector,)
        names = [spec.name for spec in self.record.outputs]
        return tuple(name for name in TOKEN_OUTPUTS if name in names)[:1]

    @cached_property
    def _vector(self) -> str:
        """The graph's output of one vector for each text; empty if it has none."""
        return vector_output(self.record, self.config)

    @property
    def pooling_modes(self) -> tuple[str, ...]:
        """The modes of the pooling, such as `mean`; `model` if the graph makes the vectors."""
        return ("model",) if self._vector or self.pooling is None else self.pooling.modes

    def preprocess(self, inputs: Sequence[str | Sequence[int]], options: Any) -> ModelInputs:
        """Tokenize texts, with the prompt in front; token ids are taken without a prompt."""
        if options.dimensions:
            require_dimensions(options, self.graph_dim)
        work = super().preprocess(inputs, options)
        # The graph's vectors are normalized if the model's are.
        reads_raw = bool(
            options.normalize is False
            and self._vector
            and self.pooling is not None
            and self.pooling.normalize
        )
        for row in work.rows:
            row.reads_raw = reads_raw
        return work

    def split(
        self, rows: Sequence[Row], feeds: Mapping[str, NDArray[Any]], outputs: Arrays
    ) -> RowValues:
        """Return pooled vectors, normalized only by the graph: float32 (len(rows), dim).

        Of rows with the form `embed_tokens`, return those of each token: (tokens, dim) each.
        """
        if rows[0].form == TOKENS:
            return self.token_outputs(rows, outputs, *self.outputs_read(raw=True))
        for name in (self._vector, *TOKEN_OUTPUTS):
            if name in outputs:
                output_rows(outputs, name, rows, tokens=name in TOKEN_OUTPUTS)
        if self.pooling is None or (self._vector in outputs and not rows[0].reads_raw):
            return outputs[self._vector].astype(np.float32, copy=False)
        tokens = next((outputs[name] for name in TOKEN_OUTPUTS if name in outputs), None)
        if tokens is None:
            raise InputError(
                "the graph's vectors are normalized, but the request asks for others.",
                do="Leave out normalize.",
            )
        mask = feeds.get("attention_mask", np.ones(tokens.shape[:2], np.int64))
        prompts = [row.prompt_tokens for row in rows]
        return self.pooling.pool(tokens, mask[: len(tokens)], prompt=prompts if any(prompts) else 0)

    def postprocess(
        self, work: ModelInputs, outputs: Sequence[Any], options: EmbedOptions
    ) -> NDArray[Any]:
        """Return the vectors, (texts, dim)."""
        normalizes = self.pooling is not None and self.pooling.normalize and not self._vector
        if self.truncate_dim and options.dimensions is None:
            size = len(outputs[0]) if len(outputs) else self.graph_dim or self.truncate_dim
            options = options.model_copy(update={"dimensions": self.kept_dimensions(size)})
        return finish_vectors(outputs, options, dim=self.graph_dim, model_normalizes=normalizes)

    def describe(self, result: Vectors) -> str:
        """Return the number of dims."""
        return f"{len(result)} dims"


def vector_output(record: GraphRecord, config: ModelConfig) -> str:
    """Return the graph's output of one vector for each text; empty if token vectors are pooled.

    `sentence_embedding` comes first, then the projection of CLIP's and others' encoders. The pooler
    of BERT and most others is left from pretraining, and its output is no embedding; DPR's encoders
    have no other output, and the towers of CLIP and SigLIP read it at the end of a text.
    """
    names = [spec.name for spec in record.outputs]
    for name in (SENTENCE_OUTPUT, _PROJECTED):
        if name in names:
            return name
    pools = config.model_type.endswith("_text_model") or not any(n in names for n in TOKEN_OUTPUTS)
    return _POOLED if _POOLED in names and pools else ""


def finish_vectors(
    vectors: RowValues,
    options: VectorOptions,
    *,
    dim: int = 0,
    model_normalizes: bool,
) -> NDArray[Any]:
    """Truncate vectors to `dimensions` and normalize them as the options or the model specify.

    A vector of zeros is returned unchanged.

    Args:
        vectors: (dim,) each, or an array (n, dim).
        options: the request's options.
        dim: the size of a vector, if there are none.
        model_normalizes: the model's own files specify vectors of length 1.

    Returns:
        (n, dim), or (n, dimensions), in the `dtype` of the options.

    Raises:
        TaskOptionError: the vectors have fewer than `dimensions` numbers.
        InputError: a number has no value in `dtype`.
    """
    if not len(vectors):
        return to_dtype(np.empty((0, options.dimensions or dim), np.float32), options.dtype)
    finished = np.asarray(vectors, np.float32)
    # The model's own normalization is part of its vectors and comes before they are cut; one that
    # is asked for comes last, so that the result has length 1.
    if options.normalize is None and model_normalizes:
        finished = unit_vectors(finished)
    if options.dimensions:
        require_dimensions(options, finished.shape[1])
        finished = np.ascontiguousarray(finished[:, : options.dimensions])
    if options.normalize:
        finished = unit_vectors(finished)
    return finished if options.dtype == "float32" else to_dtype(finished, options.dtype)


def require_dimensions(options: VectorOptions, size: int) -> None:
    """Raise TaskOptionError if `dimensions` exceeds the vectors' size; size 0 means unknown."""
    if size and (options.dimensions or 0) > size:
        raise TaskOptionError(
            f"dimensions: found {options.dimensions}, expected at most {size}.", field="dimensions"
        )


def unit_vectors(vectors: Vectors) -> Vectors:
    """Scale vectors (n, dim) to length 1; return those of zeros, NaN or infinity unchanged."""
    with np.errstate(over="ignore", invalid="ignore"):
        squared = np.vecdot(vectors, vectors).astype(np.float64)
        if (np.abs(squared - 1.0) < _UNIT).all():  # the graph has normalized them
            return vectors
        overflowed = ~np.isfinite(squared)  # squares of numbers above 1e19 overflow float32
        if overflowed.any():
            wide = vectors[overflowed].astype(np.float64)
            squared[overflowed] = np.vecdot(wide, wide)
        is_scaled = np.isfinite(squared) & (squared != 0.0) & (np.abs(squared - 1.0) >= _UNIT)
    if not is_scaled.any():
        return vectors
    # torch.nn.functional.normalize has this lower bound. The lengths are float64, so that numpy
    # divides in float64, which does not overflow.
    lengths = np.where(is_scaled, np.maximum(np.sqrt(squared), 1e-12), 1.0)
    return np.divide(
        vectors, lengths[:, None], out=np.empty(vectors.shape, np.float32), casting="same_kind"
    )
