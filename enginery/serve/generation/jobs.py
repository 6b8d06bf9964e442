"""The texts that requests ask for: prepared inputs, their options and limits.

    plan = GenerationPlan(generator, config)
    jobs = plan.jobs(["The engine"], {"max_new_tokens": 20})

Preparing tokenizes texts or decodes images: call it in a thread.
"""

from __future__ import annotations

import base64
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from enginery.core.errors import ArtifactError, InputError
from enginery.core.model.files import ModelConfig
from enginery.runtime.generation.generator import Generation, TextGenerator
from enginery.runtime.generation.inputs import GenerationRow, SourceImages, SourceSounds
from enginery.runtime.generation.options import GenerationOptions
from enginery.runtime.generation.search import Search
from enginery.runtime.generation.stream import TextStream
from enginery.runtime.tasks.audio import example_wav
from enginery.runtime.tasks.images import example_png
from enginery.runtime.tasks.task import (
    InputField,
    Modality,
    TaskOptionError,
    describe_value,
    without_null,
)
from enginery.runtime.text.chat_template import ChatTemplate
from enginery.serve.config import ServeConfig

_MAX_STOPS = 16
_MAX_STOP_CHARACTERS = 256
_MAX_EXCLUDED = 1000
"""Bounds of what each step compares with every text, in the thread that all requests share."""
_PROBE_TOKENS = 2
_EXAMPLE = "The engine is warm, and the pump"
_FORM_OPTIONS = (
    "max_new_tokens",
    "num_beams",
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "seed",
    "repetition_penalty",
    "stop_strings",
)
"""The options of the page at /."""


@dataclass(frozen=True)
class Progress:
    """What has become of one input since the last step."""

    index: int
    """The input's place in its request."""
    tokens: int
    """Number of tokens generated so far, of all its texts."""
    prompt_tokens: int
    pieces: tuple[tuple[int, str], ...] = ()
    """New text: the place of the text among those of the input, and the piece."""
    results: tuple[Generation, ...] = ()
    """The finished texts; empty as long as the input is not done."""


@dataclass(eq=False)
class GenerationJob:
    """One input of a request."""

    row: GenerationRow
    options: GenerationOptions
    search: Search
    texts: Sequence[TextStream]
    """One for each result."""
    streams: bool
    """Whether pieces are wanted while the text is generated."""
    prompt_tokens: int
    """Number of tokens of the input; 1 for an image."""
    same_length: int = 0
    """Length of the prompts that it may share a batch with; 0 for all."""
    started: bool = field(default=False, init=False)
    """Whether its first token was reported."""

    @property
    def key(self) -> Hashable:
        """What inputs that begin together have in common: images their size."""
        arrays = self.row.arrays.items()
        return self.same_length, *(array.shape for name, array in arrays if name != "input_ids")

    @property
    def rows(self) -> int:
        """Largest number of rows that it takes in the batch."""
        return max(self.options.num_beams, self.options.num_return_sequences)

    @property
    def tokens(self) -> int:
        """Largest number of tokens that it needs: those of the input and the new ones."""
        return self.prompt_tokens + self.search.longest - len(self.search.prompt)

    def progress(self, index: int) -> Progress | None:
        """Return what is to be reported after a step; None for nothing.

        Args:
            index: the input's place in its request.

        Raises:
            InputError: the search has failed, or the tokens cannot be decoded.
        """
        search, first = self.search, not self.started
        if search.error is not None:
            raise search.error
        self.started = True
        if search.done:
            sequences = search.results()
            pieces = [
                (position, text.finish(sequence.tokens))
                for position, (text, sequence) in enumerate(zip(self.texts, sequences, strict=True))
            ]
            results = [
                Generation(
                    text.text(sequence.tokens), sequence.tokens, sequence.finish, sequence.score
                )
                for text, sequence in zip(self.texts, sequences, strict=True)
            ]
            count = sum(len(sequence.tokens) for sequence in sequences)
            return Progress(index, count, self.prompt_tokens, tuple(pieces), tuple(results))
        if not (self.streams and self.options.num_beams == 1):
            return Progress(index, 1, self.prompt_tokens) if first else None
        sequences = search.results()
        parts = (
            (position, text.feed(sequence.tokens))
            for position, (text, sequence) in enumerate(zip(self.texts, sequences, strict=True))
        )
        written = tuple((position, piece) for position, piece in parts if piece)
        count = sum(len(sequence.tokens) for sequence in sequences)
        return Progress(index, count, self.prompt_tokens, written) if written or first else None


class GenerationPlan:
    """How the requests of one model are prepared."""

    def __init__(self, generator: TextGenerator, config: ServeConfig) -> None:
        """Take a generator, and the limits of the server."""
        self.generator = generator
        self.has_encoder = generator.task != TextGenerator.tasks[0]
        self.modality: Modality = "text"
        if isinstance(generator.inputs, SourceImages):
            generator.inputs.max_pixels = config.max_pixels
            self.modality = "image"
        elif isinstance(generator.inputs, SourceSounds):
            self.modality = "audio"
        self.inputs = (InputField(self.modality),)
        """The fields of an input, as those of a task."""
        self.max_new_tokens = config.max_new_tokens
        """Largest number of tokens of a text."""
        defaults = generator.options
        self.has_own_length = defaults.max_new_tokens is not None or defaults.max_length is not None
        """Whether the model's own options set a length."""
        self._max_rows = config.generation_rows
        self._vocabulary = ModelConfig.read(generator.artifact.path).merged().vocab_size
        self._template = ChatTemplate.open(generator.artifact.path)

    def jobs(
        self,
        inputs: Sequence[Any],
        options: Mapping[str, Any],
        *,
        streams: bool = False,
        keep_stop: bool = True,
        whole: bool = False,
    ) -> list[GenerationJob]:
        """Prepare the inputs of a request.

        Args:
            inputs: texts, or contents of image files.
            options: see `TextGenerator.generate`; None counts as absent.
            streams: pieces are wanted.
            keep_stop: a stop string that ends a text is part of it.
            whole: without a length, the server's limit is the length, so that texts end by
                themselves.

        Raises:
            InputError: an input or an option is invalid, or beyond the limits of the server.
        """
        arguments, chosen = self.read_options(options)
        if whole:
            chosen = self._without_length(chosen)
        rows = self.generator.inputs.rows(inputs, chosen, **arguments)
        return self._jobs(rows, chosen, streams=streams, keep_stop=keep_stop)

    def chat_jobs(
        self,
        messages: Sequence[Mapping[str, Any]],
        options: Mapping[str, Any],
        *,
        streams: bool = False,
    ) -> list[GenerationJob]:
        """Prepare the answer to the messages of a conversation.

        Args:
            messages: `role` and `content` each, oldest first.
            options: see `jobs`; without a length, the server's limit is the length.
            streams: pieces are wanted.

        Raises:
            InputError: the model has no chat template, or it rejects the messages; or see `jobs`.
        """
        if self.has_encoder:
            raise InputError(
                f"the model is an encoder-decoder ({self.generator.task}), which does not chat.",
                do="Send the text to /v1/completions or /generate.",
            )
        if self._template is None:
            raise InputError(
                "the model has no chat template, in chat_template.jinja or tokenizer_config.json.",
                do="Send the whole prompt to /v1/completions or /generate.",
            )
        _, chosen = self.read_options(options)
        chosen = self._without_length(chosen)
        try:
            prompt = self._template.render(messages, add_generation_prompt=True)
        except ArtifactError as error:
            raise InputError(error.message) from error
        # The template writes the special tokens.
        (encoding,) = self.generator.tokenizer.encode_untruncated([prompt], special=False)
        if not encoding.ids:
            raise InputError("the chat template gives no prompt for these messages.")
        row = GenerationRow(tuple(encoding.ids), {})
        return self._jobs([row], chosen, streams=streams, keep_stop=False)

    def probe(self) -> GenerationJob:
        """Return a made-up input, to see that the graphs run."""
        options = GenerationOptions(max_new_tokens=_PROBE_TOKENS)
        (job,) = self._jobs([self.generator.inputs.probe()], options)
        return job

    def option_schemas(self) -> dict[str, dict[str, Any]]:
        """Return the JSON schemas of the options that people change most, for a form."""
        schemas = GenerationOptions.model_json_schema()["properties"]
        defaults = self.generator.options.model_dump(mode="json")
        form_schemas = {
            name: {**without_null(schemas[name]), "default": defaults[name]}
            for name in _FORM_OPTIONS
        }
        return form_schemas | {name: {"type": "string"} for name in self.generator.inputs.arguments}

    def example_input(self) -> str:
        """Return an example input as it is in JSON."""
        if self.modality == "image":
            return base64.b64encode(example_png()).decode("ascii")
        if self.modality == "audio":
            return base64.b64encode(example_wav()).decode("ascii")
        return _EXAMPLE

    def read_options(self, options: Mapping[str, Any]) -> tuple[dict[str, Any], GenerationOptions]:
        """Return the arguments that are about the inputs, and the options of generation.

        Raises:
            InputError: an option is unknown, invalid, or beyond the limits of the server.
        """
        for name in ("source_language", "target_language"):
            value = options.get(name)
            if value is not None and not isinstance(value, str):
                raise TaskOptionError(
                    f"{name}: found {describe_value(value)}, expected a string.", field=name
                )
        values = {name: value for name, value in options.items() if value is not None}
        arguments, chosen = self.generator.read_options(values)
        rows = max(chosen.num_beams, chosen.num_return_sequences)
        if rows > self._max_rows:
            raise InputError(
                f"the request takes {rows} beams or sequences for each input, expected at most "
                f"{self._max_rows}.",
                do="Set a smaller num_beams or num_return_sequences.",
            )
        if "max_new_tokens" in values and (chosen.max_new_tokens or 0) > self.max_new_tokens:
            raise TaskOptionError(
                f"max_new_tokens is {chosen.max_new_tokens}, expected at most "
                f"{self.max_new_tokens}.",
                field="max_new_tokens",
            )
        self._require(len(chosen.stop_strings), "stop strings", _MAX_STOPS)
        for stop in chosen.stop_strings:
            self._require(len(stop), "characters in a stop string", _MAX_STOP_CHARACTERS)
        self._require(sum(map(len, chosen.bad_words_ids)), "tokens of bad words", _MAX_EXCLUDED)
        forced = [*chosen.forced_eos_token_id]
        if chosen.forced_bos_token_id is not None:
            forced.append(chosen.forced_bos_token_id)
        for token in forced:
            if 0 < self._vocabulary <= token:
                raise InputError(
                    f"found the forced token {token}, expected less than {self._vocabulary}."
                )
        return arguments, chosen

    def _without_length(self, options: GenerationOptions) -> GenerationOptions:
        """Return options with the server's limit as the length if they have none."""
        if options.max_new_tokens is not None or options.max_length is not None:
            return options
        return options.model_copy(update={"max_new_tokens": self.max_new_tokens})

    def _require(self, count: int, unit: str, limit: int) -> None:
        if count > limit:
            raise InputError(f"the request has {count} {unit}, expected at most {limit}.")

    def _jobs(
        self,
        rows: Iterable[GenerationRow],
        options: GenerationOptions,
        *,
        streams: bool = False,
        keep_stop: bool = True,
    ) -> list[GenerationJob]:
        generator, jobs = self.generator, []
        for row in rows:
            chosen = options
            longest = options.longest(row.prompt_length, generator.positions)
            if longest - row.prompt_length > self.max_new_tokens:
                chosen = options.model_copy(update={"max_new_tokens": self.max_new_tokens})
            texts = [
                generator.text_stream(chosen, keep_stop=keep_stop)
                for _ in range(chosen.num_return_sequences)
            ]
            source = row.arrays.get("input_ids")
            tokens = (
                len(row.prompt) if not self.has_encoder else 1 if source is None else len(source)
            )
            search = generator.search(row, chosen)
            same = len(row.prompt) if generator.graphs.counts_padding else 0
            jobs.append(GenerationJob(row, chosen, search, texts, streams, tokens, same))
        return jobs
