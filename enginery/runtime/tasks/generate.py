"""Generate text: continue prompts, translate, read images, transcribe speech.

A row is a search that takes many steps: `TextGenerator` runs it, where `BatchRunner` runs the rows
of other tasks in one step each.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Annotated, Any, ClassVar, Self

from numpy.typing import NDArray
from pydantic import ConfigDict
from typing_extensions import override

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord, Manifest
from enginery.core.errors import ArtifactError, InputError
from enginery.core.model.files import ModelConfig
from enginery.runtime.audio.transcript import ChunkTokens, SpeechChunk, describe_chunks
from enginery.runtime.decoder_graphs import DecoderGraphs, find_generating
from enginery.runtime.generation.guide import Grammars
from enginery.runtime.generation.inputs import (
    GenerationInputs,
    GenerationRow,
    SourceSounds,
    open_inputs,
    read_positions,
    require_prepared,
)
from enginery.runtime.generation.options import (
    DEFAULT_NEW_TOKENS,
    GenerationOptions,
    check_items,
    read_generation_config,
)
from enginery.runtime.generation.recording import Recording, RecordingPart
from enginery.runtime.generation.search import (
    Hypothesis,
    Search,
    TextRules,
    TokenLogprob,
    make_search,
)
from enginery.runtime.generation.stream import TextStream
from enginery.runtime.tasks.results import Alternatives, ColumnName, Result
from enginery.runtime.tasks.task import (
    NO_LIMITS,
    Arrays,
    InputField,
    InputLimits,
    ModelInputs,
    Row,
    Task,
    TaskOptionError,
    TaskOptions,
    describe_value,
    without_null,
)
from enginery.runtime.tasks.text import ComparedLengths
from enginery.runtime.text.chat_template import ChatTemplate, Message
from enginery.runtime.text.token_bytes import TokenBytes
from enginery.runtime.text.tokenizer import TextTokenizer

_PROBE_TOKENS = 2
_MAX_LOGPROBS = 2**19
"""Maximum number of log-probabilities of a request to a server; one takes about 200 bytes."""
_COMPARED = ("bad_words_ids", "eos_token_id", "forced_eos_token_id", "stop_strings")
"""Lists that each step compares with every text, in the thread that all requests share."""
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
"""The options of a form, which people change most."""


@dataclass(frozen=True)
class Generation(Result):
    """A generated text."""

    text: Annotated[str, ColumnName("generated")]
    """The new text, without the prompt and special tokens."""
    tokens: Annotated[tuple[int, ...], ColumnName("")]
    """The new tokens, with the one that ended the text."""
    finish: str
    """`stop` after an end token or a stop string, `length` at the largest length."""
    score: float | None
    """Score of beam search: the sum of log-probabilities, divided by a power of the length; None
    without."""
    prompt_tokens: Annotated[int, ColumnName("")] = 0
    """Number of tokens of the input; 1 for an image or audio."""
    logprobs: Annotated[tuple[TokenLogprob, ...], ColumnName("")] = ()
    """The log-probabilities of the new tokens; none without `top_logprobs`."""


@dataclass(frozen=True)
class TimedGeneration(Generation):
    """A text that was spoken, with the time of its parts."""

    chunks: tuple[SpeechChunk, ...] = ()
    """The parts; their texts together are `text`."""
    language: Annotated[str, ColumnName("")] = ""
    """Code of the language; empty if the model has none."""
    seconds: Annotated[float, ColumnName("")] = 0.0
    """Duration of the audio."""


class GenerateOptions(TaskOptions):
    """Options of a call by name; those that are not given are the model's own.

    Which ones there are depends on the model, see `GenerationOptions` and
    `GenerationInputs.arguments`; `Generate.resolve` checks them.
    """

    model_config = ConfigDict(extra="allow", strict=True, frozen=True)

    @property
    def values(self) -> dict[str, Any]:
        """The options that are given."""
        return dict(self.model_extra or {})

    @property
    @override
    def max_items(self) -> int:
        """Number of texts of each input."""
        return int(self.values.get("num_return_sequences") or 1)


@dataclass(eq=False)
class TextSearch:
    """The search for the texts of one input."""

    row: GenerationRow
    options: GenerationOptions
    search: Search
    texts: Sequence[TextStream]
    """One for each text."""
    prompt_tokens: int
    """Number of tokens of the input; 1 for an image or audio."""
    streams: bool = False
    """Pieces of the texts are wanted before the search is done."""
    started: bool = False
    """The first token was reported."""
    earlier_tokens: int = 0
    """Number of tokens that were generated for the windows of a recording before this one."""

    @property
    def part(self) -> RecordingPart | None:
        """What of a recording the input is a window of; None for other inputs."""
        return self.row.part

    @property
    def rows(self) -> int:
        """Largest number of rows that it takes in a batch."""
        return max(self.options.num_beams, self.options.num_return_sequences)

    @property
    def new_tokens(self) -> int:
        """Largest number of tokens of a text."""
        return self.search.longest - len(self.search.prompt)

    @property
    def has_pieces(self) -> bool:
        """True if what the texts have so far stays: with beam search only at the end.

        What a window of a recording ends with may be left to the next window.
        """
        return self.search.done or (self.options.num_beams == 1 and self.part is None)

    def pieces(self, sequences: Sequence[Hypothesis]) -> list[tuple[int, str]]:
        """Return what is new since the last call: the index of each text, and the piece.

        Args:
            sequences: the search's results so far.
        """
        if self.part is not None:
            (text,), tokens = self.texts, self.part.tokens
            return [(0, text.finish(tokens) if self.part.done else text.feed(tokens))]
        done, texts = self.search.done, zip(self.texts, sequences, strict=True)
        return [
            (index, text.finish(sequence.tokens) if done else text.feed(sequence.tokens))
            for index, (text, sequence) in enumerate(texts)
        ]

    def generations(self, sequences: Sequence[Hypothesis]) -> list[Any]:
        """Return the texts of the results of a search that is done.

        Of a recording, that is the recording once all its parts are done, and nothing before.
        """
        if self.part is not None:
            return [self.part.recording] if self.part.recording.done else []
        return [
            Generation(
                text.text(sequence.tokens),
                sequence.tokens,
                sequence.finish,
                sequence.score,
                self.prompt_tokens,
                sequence.logprobs,
            )
            for text, sequence in zip(self.texts, sequences, strict=True)
        ]


@dataclass
class Generate(Task):
    """Generate text from texts: continue them with a decoder, or write others with an encoder.

    A row's content is a `TextSearch`, and each input's result a list of `num_return_sequences`
    generations.
    """

    verb = "generate"
    purpose = "generates text"
    tasks: ClassVar[tuple[str, ...]] = (
        "text-generation-with-past",
        "text2text-generation-with-past",
    )
    runs_in_steps = True
    inputs: ClassVar[tuple[InputField, ...]] = (
        InputField("text", "The engine is warm, and the pump"),
    )
    result_type = Annotated[list[Generation], Alternatives()]
    Options: ClassVar[type[GenerateOptions]] = GenerateOptions

    tokenizer: TextTokenizer
    reader: GenerationInputs
    """How inputs are prepared."""
    graphs: DecoderGraphs
    defaults: GenerationOptions
    """The model's own options."""
    positions: int | None
    """Largest number of a decoder's tokens, with the prompt; None if it has no limit."""
    vocabulary: int
    """Number of tokens; 0 if config.json does not say."""
    chat_template: ChatTemplate | None = None
    limits: InputLimits = field(default=NO_LIMITS, kw_only=True)
    lengths: ComparedLengths = field(default_factory=ComparedLengths, kw_only=True)

    @classmethod
    def open(cls, artifact: Artifact, record: GraphRecord, limits: InputLimits = NO_LIMITS) -> Self:
        """Read tokenizer, processor and generation_config.json; see `RowTask.open`."""
        graphs = find_generating(artifact)
        if graphs.encoder is not None:
            require_prepared(graphs.encoder)
        tokenizer = TextTokenizer.open(artifact.path)
        defaults = read_generation_config(artifact.path)
        lengths = ComparedLengths.of(artifact, limits.unproved)
        own_positions = positions = read_positions(artifact.path)
        if lengths.longest is not None and limits.unproved == "refuse":
            positions = min(positions or lengths.longest, lengths.longest)
        reader = open_inputs(artifact, graphs, tokenizer, defaults, positions)
        reader.max_pixels, reader.max_seconds = limits.max_pixels, limits.max_speech_seconds
        return cls(
            record=record,
            tokenizer=tokenizer,
            reader=reader,
            graphs=graphs,
            defaults=defaults,
            positions=positions,
            vocabulary=ModelConfig.read(artifact.path).merged().vocab_size,
            chat_template=ChatTemplate.open(artifact.path),
            limits=limits,
            lengths=lengths,
            notes=tuple(lengths.notes(own_positions or sys.maxsize)),
        )

    @classmethod
    @override
    def fits(cls, manifest: Manifest, record: GraphRecord | None) -> bool:
        """Return True for an artifact of one of the tasks: each has inputs of one kind."""
        return manifest.task in cls.tasks

    @property
    def has_encoder(self) -> bool:
        """True if the model does not continue its input, but writes another text."""
        return self.graphs.encoder is not None

    @property
    def has_own_length(self) -> bool:
        """True if the model's own options set a length."""
        return self.defaults.max_new_tokens is not None or self.defaults.max_length is not None

    @property
    @override
    def max_tokens(self) -> int:
        """Maximum number of tokens, with the prompt; 0 without a limit."""
        return self.positions or 0

    # -- options ------------------------------------------------------------------------------

    def resolve(self, options: GenerateOptions) -> tuple[dict[str, Any], GenerationOptions]:
        """Return the arguments that are about the inputs, and the options of generation.

        Raises:
            InputError: an option is unknown, invalid, or beyond the limits.
        """
        values = options.values
        for name in ("source_language", "target_language"):
            value = values.get(name)
            if value is not None and not isinstance(value, str):
                raise TaskOptionError(
                    f"{name}: found {describe_value(value)}, expected a string.", field=name
                )
        names = self.reader.arguments
        arguments = {name: value for name, value in values.items() if name in names}
        others = {name: value for name, value in values.items() if name not in names}
        chosen = self.defaults.with_arguments(**{**self.reader.implied(**arguments), **others})
        if self.limits.max_new_tokens:
            self._check_limits(chosen, has_length="max_new_tokens" in values)
        return arguments, chosen

    def _check_limits(self, chosen: GenerationOptions, *, has_length: bool) -> None:
        """Raise InputError for options beyond the limits of a server."""
        limits = self.limits
        rows = max(chosen.num_beams, chosen.num_return_sequences)
        if rows > limits.max_sequences:
            raise InputError(
                f"the request takes {rows} beams or sequences for each input, expected at most "
                f"{limits.max_sequences}.",
                do="Set a smaller num_beams or num_return_sequences.",
            )
        if has_length and (chosen.max_new_tokens or 0) > limits.max_new_tokens:
            raise TaskOptionError(
                f"max_new_tokens is {chosen.max_new_tokens}, expected at most "
                f"{limits.max_new_tokens}.",
                field="max_new_tokens",
            )
        if self.vocabulary and (token := max(chosen.logit_bias, default=0)) >= self.vocabulary:
            raise TaskOptionError(
                f"logit_bias: found the token {token}, expected less than {self.vocabulary}.",
                field="logit_bias",
            )
        for name in _COMPARED:  # also those of the model's own file
            check_items(name, getattr(chosen, name))
        forced = [*chosen.forced_eos_token_id]
        if chosen.forced_bos_token_id is not None:
            forced.append(chosen.forced_bos_token_id)
        for token in forced:
            if 0 < self.vocabulary <= token:
                raise InputError(
                    f"found the forced token {token}, expected less than {self.vocabulary}."
                )

    def _require_few_logprobs(self, inputs: int, chosen: GenerationOptions) -> None:
        """Raise InputError if a server would have to hold too many log-probabilities."""
        limit = self.limits.max_new_tokens
        tokens = min(chosen.max_new_tokens or chosen.max_length or DEFAULT_NEW_TOKENS, limit)
        count = inputs * chosen.num_return_sequences * tokens * (1 + (chosen.top_logprobs or 0))
        if count > _MAX_LOGPROBS:
            raise InputError(
                f"the request asks for up to {count} log-probabilities, expected at most "
                f"{_MAX_LOGPROBS}.",
                do="Set a smaller max_new_tokens or top_logprobs, or send several requests.",
            )

    def _with_length(self, options: GenerationOptions) -> GenerationOptions:
        """Return options with the largest allowed length if they have none."""
        if options.max_new_tokens is not None or options.max_length is not None:
            return options
        longest = self.limits.max_new_tokens or None
        return options.model_copy(update={"max_new_tokens": longest})

    def option_schemas(self) -> dict[str, dict[str, Any]]:
        """Return the JSON schemas of the options for a form, with the model's own values."""
        schemas = GenerationOptions.model_json_schema()["properties"]
        defaults = self.defaults.model_dump(mode="json")
        form_schemas = {
            name: {**without_null(schemas[name]), "default": defaults[name]}
            for name in _FORM_OPTIONS
        }
        types = self.reader.argument_types
        arguments = {name: {"type": types.get(name, "string")} for name in self.reader.arguments}
        return form_schemas | arguments

    # -- inputs -------------------------------------------------------------------------------

    def preprocess(
        self, inputs: Sequence[Any], options: GenerateOptions, **delivery: bool
    ) -> ModelInputs:
        """Prepare the searches of inputs, all before the first is run; see `read_rows`."""
        rows = list(self.read_rows(inputs, options, **delivery))
        # Overlapping chunks are joined by comparing their tokens, which takes long.
        is_heavy = any(row.content.part is not None for row in rows)
        return ModelInputs(rows, postprocess_cost="heavy" if is_heavy else "light")

    def read_rows(
        self,
        inputs: Sequence[Any],
        options: GenerateOptions,
        *,
        streams: bool = False,
        keep_stop: bool = True,
        whole: bool = False,
    ) -> Iterator[Row]:
        """Prepare inputs one by one, for `TextGenerator.run_stream`.

        Args:
            inputs: texts; or images or audio, as paths or contents of files.
            options: options of the call.
            streams: pieces of the texts are wanted before they are finished.
            keep_stop: a stop string that ends a text is part of it.
            whole: without a length in the options, texts end by themselves, or at the limit.

        Raises:
            InputError: an input or an option is invalid, or beyond the limits.
        """
        arguments, chosen = self.resolve(options)
        if whole:
            chosen = self._with_length(chosen)
        if chosen.top_logprobs is not None:
            self._require_few_logprobs(len(inputs), chosen)
        for row in self.reader.rows(inputs, chosen, **arguments):
            yield self._search(row, chosen, streams=streams, keep_stop=keep_stop)

    def preprocess_chat(
        self, messages: Sequence[Message], options: GenerateOptions, *, streams: bool = False
    ) -> ModelInputs:
        """Prepare the answer to the messages of a conversation, as one row.

        Args:
            messages: `role` and `content` each, oldest first.
            options: see `preprocess`; without a length, the text ends by itself, or at the limit.
            streams: pieces are wanted.

        Raises:
            InputError: the model has no chat template, or it rejects the messages; or see
                `preprocess`.
        """
        if self.has_encoder:
            raise InputError(
                f"the model is an encoder-decoder ({self.tasks[-1]}), which does not chat.",
                do="Generate from the text itself; over HTTP: /v1/completions or /generate.",
            )
        if self.chat_template is None:
            raise InputError(
                "the model has no chat template, in chat_template.jinja or tokenizer_config.json.",
                do="Generate from the whole prompt; over HTTP: /v1/completions or /generate.",
            )
        _, chosen = self.resolve(options)
        chosen = self._with_length(chosen)
        if chosen.top_logprobs is not None:
            self._require_few_logprobs(1, chosen)
        try:
            prompt = self.chat_template.render(messages, add_generation_prompt=True)
        except ArtifactError as error:
            raise InputError(error.message) from error
        # The template writes the special tokens.
        (encoding,) = self.tokenizer.encode_untruncated([prompt], special=False)
        if not encoding.ids:
            raise InputError("the chat template gives no prompt for these messages.")
        row = GenerationRow(tuple(encoding.ids), {})
        return ModelInputs([self._search(row, chosen, streams=streams, keep_stop=False)])

    def _search(
        self,
        row: GenerationRow,
        options: GenerationOptions,
        *,
        streams: bool = False,
        keep_stop: bool = True,
    ) -> Row:
        """Return the row of one prepared input.

        Raises:
            InputError: the prompt alone reaches the largest length.
        """
        longest = options.longest(row.prompt_length, self.positions)
        self.lengths.check([longest])
        # A length in the request was refused above the limit; one of the model's files is cut to
        # it.
        limit = self.limits.max_new_tokens
        if limit and longest - row.prompt_length > limit:
            options = options.model_copy(update={"max_new_tokens": limit})
        stops = options.stop_strings
        texts = [
            TextStream(
                self.decode, stops=stops, keep_stop=keep_stop, clean_up=self.tokenizer.clean_up
            )
            for _ in range(options.num_return_sequences)
        ]
        source = row.arrays.get("input_ids")
        tokens = len(row.prompt) if not self.has_encoder else 1 if source is None else len(source)
        search = self._make_search(row, options)
        return Row(TextSearch(row, options, search, texts, tokens, streams), tokens)

    def _make_search(self, row: GenerationRow, options: GenerationOptions) -> Search:
        stops, guide = options.stop_strings, None
        if options.json_schema is not None:
            if options.eos_token_id != self.defaults.eos_token_id:
                raise InputError("json_schema: a text ends with the model's own eos_token_id.")
            guide = self._grammars.guide(options.json_schema, prompt=row.prompt_length)
        rules = TextRules(
            (lambda tokens: any(stop in self.decode(tokens) for stop in stops)) if stops else None,
            guide,
            None if row.part is None else row.part.recording.search_stamps,
        )
        return make_search(
            row.prompt, options, positions=self.positions, rules=rules, rest=row.rest
        )

    def following(self, row: Row) -> Row | None:
        """Return the row that goes on with the input of one that is done; None if there is none."""
        return None

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens, without special ones."""
        hidden = self.reader.hidden
        shown = [token for token in tokens if token not in hidden]
        return self.tokenizer.decode(shown, skip_special=True)

    @cached_property
    def _grammars(self) -> Grammars:
        """The vocabulary for JSON schemas; InputError if the package is not installed."""
        return Grammars.open(self.tokenizer.state(), self.defaults.eos_token_id)

    @cached_property
    def token_bytes(self) -> TokenBytes:
        """The bytes of each token."""
        return TokenBytes(self.tokenizer.backend)

    def shows(self, token: int) -> bool:
        """Return True if a token is part of a text that `decode` returns."""
        return token not in self.reader.hidden and not self.token_bytes.is_special(token)

    def probe(self, tokens: int = 0) -> Row:
        """Return a made-up input, for which two tokens are generated."""
        return self._search(self.reader.probe(), GenerationOptions(max_new_tokens=_PROBE_TOKENS))

    def collate(self, rows: Sequence[Row], width: int) -> Arrays:
        """Return the encoder's inputs of rows in one batch; empty without an encoder."""
        return dict(self.reader.join([row.content.row for row in rows]) or {})

    # -- results ------------------------------------------------------------------------------

    def split(
        self,
        rows: Sequence[Row],
        feeds: Mapping[str, NDArray[Any]],
        outputs: Arrays,
    ) -> list[list[Any]]:
        """Return the texts of each row, whose search is done; see `TextSearch.generations`."""
        return [row.content.generations(row.content.search.results()) for row in rows]

    def postprocess(
        self, work: ModelInputs, outputs: Sequence[list[Any]], options: Any
    ) -> list[list[Generation]]:
        """Return the texts of each input, from those of each row as `split` returned them."""
        return list(outputs)

    @override
    def describe(self, result: Generation) -> str:
        """Return the text."""
        return result.text


@dataclass
class GenerateFromImages(Generate):
    """Generate text from images: read or describe them."""

    modality = "image"
    tasks = ("image-to-text-with-past",)
    inputs = (InputField("image"),)


@dataclass
class GenerateFromAudio(Generate):
    """Generate text from audio: transcribe or translate speech."""

    modality = "audio"
    tasks = ("automatic-speech-recognition-with-past",)
    inputs = (InputField("audio"),)

    reader: SourceSounds

    @classmethod
    @override
    def result_type_for(cls, options: TaskOptions) -> Any:
        """Return the type of one result, which has times if they are asked for."""
        if isinstance(options, GenerateOptions) and options.values.get("return_timestamps"):
            return Annotated[list[TimedGeneration], Alternatives()]
        return cls.result_type

    @override
    def _search(
        self,
        row: GenerationRow,
        options: GenerationOptions,
        *,
        streams: bool = False,
        keep_stop: bool = True,
    ) -> Row:
        search = super()._search(row, options, streams=streams, keep_stop=keep_stop)
        part, content = row.part, search.content
        if part is None:
            return search
        for name, value in (
            ("num_return_sequences", options.num_return_sequences - 1),
            ("stop_strings", options.stop_strings),
        ):
            if value:
                raise InputError(
                    f"{name} is set, which is not supported for audio in several windows.",
                    do=f"Leave it out, or send {part.recording.shape.seconds:g} seconds at most "
                    "without return_timestamps and chunk_length_s.",
                )
        if streams and part.stride is not None:
            raise InputError(
                "chunk_length_s is set, but a stream goes on where the last segment ended.",
                do="Leave it out.",
            )
        content.texts = [
            TextStream(partial(self._transcript, part), clean_up=self.tokenizer.clean_up)
        ]
        return search

    @override
    def following(self, row: Row) -> Row | None:
        """Return the next window of a recording's part; None behind the last one."""
        content: TextSearch = row.content
        part, search = content.part, content.search
        if part is None:
            return None
        (sequence,) = search.results()[:1]
        ends = content.options.eos_token_id
        tokens = sequence.tokens
        if tokens and tokens[-1] in ends:
            tokens = tokens[:-1]
        places = search.chosen
        codes = (self.reader.languages[token] for token in places if token in self.reader.languages)
        part.language = next(codes, "")
        part.take(tokens, sequence.finish)
        if part.done:
            return None
        # The language that was detected in the first window is that of all.
        prepared = replace(content.row, rest=tuple((token,) for token in places))
        following = replace(
            content,
            row=prepared,
            search=self._make_search(prepared, content.options),
            earlier_tokens=content.earlier_tokens + len(sequence.tokens),
        )
        return Row(following, row.tokens)

    @override
    def describe(self, result: Generation) -> str:
        """Return the text, with times if they were asked for."""
        return (
            describe_chunks(result.chunks) if isinstance(result, TimedGeneration) else result.text
        )

    @override
    def postprocess(
        self, work: ModelInputs, outputs: Sequence[list[Any]], options: Any
    ) -> list[list[Generation]]:
        """Return the texts of each input; those of recordings are decoded here."""
        return [
            [
                self._generation(result) if isinstance(result, Recording) else result
                for result in results
            ]
            for results in outputs
            if results  # of a recording's rows only the last to end has it
        ]

    def _generation(self, recording: Recording) -> Generation:
        """Return the transcript of a recording that is done."""
        chunks = self.reader.transcripts(
            recording.chunks(), has_time_stamps=recording.has_time_stamps
        )
        text = "".join(chunk.text for chunk in chunks)
        first = recording.parts[0]
        finishes = {part.finish for part in recording.parts}
        finish = "length" if "length" in finishes else "stop"
        values = (text, recording.tokens, finish, None, 1)
        if not recording.shows_time_stamps:
            return Generation(*values)
        return TimedGeneration(
            *values,
            chunks=tuple(chunks),
            language=first.language,
            seconds=recording.seconds,
        )

    def _transcript(self, part: RecordingPart, tokens: Sequence[int]) -> str:
        """Return the text of the tokens of a part without overlaps."""
        chunks = self.reader.transcripts(
            [ChunkTokens(tokens)], has_time_stamps=part.recording.has_time_stamps
        )
        return "".join(chunk.text for chunk in chunks)
