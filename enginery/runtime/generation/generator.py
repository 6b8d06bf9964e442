"""Generate text: prompts in, continuations out.

    with load_model("gpt2") as model:
        model.generate(["The engine"], max_new_tokens=32)[0].text
        for piece in model.stream("The engine"):
            print(piece, end="")

Needs only onnxruntime, tokenizers and numpy; no torch or transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from typing import Annotated, Any, ClassVar

from enginery.core.artifact.artifact import Artifact
from enginery.core.closing import Closeable
from enginery.core.errors import ArtifactError, InputError
from enginery.runtime.decoder_graphs import DecoderGraphs
from enginery.runtime.generation.batch import RunningBatch
from enginery.runtime.generation.decoder import CachedDecoder
from enginery.runtime.generation.fixed_cache import FixedCacheDecoder
from enginery.runtime.generation.inputs import (
    Feeds,
    GenerationRow,
    open_inputs,
    read_positions,
    require_prepared,
)
from enginery.runtime.generation.options import GenerationOptions, read_generation_config
from enginery.runtime.generation.search import Hypothesis, Search, make_search
from enginery.runtime.generation.stream import TextStream
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.providers.selection import Provider
from enginery.runtime.tasks import TASKS
from enginery.runtime.tasks.results import ColumnName
from enginery.runtime.text.tokenizer import TextTokenizer


@dataclass(frozen=True)
class Generation:
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


class TextGenerator(Closeable):
    """A model that generates text, loaded for inference. A context manager; closing it frees it.

    A decoder continues texts. With an encoder it writes the text of other texts, images or speech.
    """

    tasks: ClassVar[tuple[str, ...]] = (
        "text-generation-with-past",
        "text2text-generation-with-past",
        "automatic-speech-recognition-with-past",
        "image-to-text-with-past",
    )
    method = "generate"

    def __init__(
        self,
        artifact: Artifact,
        open_graph: Callable[[str], OrtRunner],
        *,
        fixed_cache: bool = False,
    ) -> None:
        """Read the artifact's tokenizer, processor and generation_config.json; open its graphs.

        Args:
            artifact: the artifact.
            open_graph: opens the graph of a file; the generator closes it.
            fixed_cache: generate with the decoder's graph with a fixed cache, if there is one;
                that is the faster one on CUDA.

        Raises:
            ArtifactError: a file is missing or malformed, or a graph takes no cache.
        """
        self.artifact = artifact
        self.task = artifact.manifest.task
        self.graphs = graphs = find_generating(artifact)
        if graphs.encoder is not None:
            require_prepared(graphs.encoder)
        self.tokenizer = TextTokenizer.open(artifact.path)
        self.options = read_generation_config(artifact.path)
        """The model's own options."""
        self.positions = read_positions(artifact.path)
        """Largest number of a decoder's tokens, with the prompt; None if it has no limit."""
        self.inputs = open_inputs(artifact, graphs, self.tokenizer, self.options)
        """How inputs are prepared."""
        decoding = graphs.fixed if fixed_cache and graphs.fixed is not None else graphs.later
        with ExitStack() as stack:
            # The stack closes what is open if a later graph cannot be opened.
            records = [decoding, *([graphs.encoder] if graphs.encoder else [])]
            runners = {
                record.file: stack.enter_context(open_graph(record.file)) for record in records
            }
            self.decoder: CachedDecoder | FixedCacheDecoder
            if decoding is graphs.fixed:
                self.decoder = FixedCacheDecoder(
                    graphs, runners, pad_id=self.tokenizer.pad_id or 0, limit=self.positions
                )
                stack.callback(self.decoder.close)
                self.graphs = replace(graphs, counts_padding=False)  # prompts are padded behind
            else:
                self.decoder = CachedDecoder(graphs, runners, pad_id=self.tokenizer.pad_id or 0)
            self.runner = runners[decoding.file]
            """The decoder's graph."""
            self._open = stack.pop_all()

    @property
    def providers(self) -> list[Provider]:
        return self.runner.providers

    def generate(
        self, inputs: Sequence[Any], *, batch_size: int = 8, **options: Any
    ) -> list[Generation]:
        """Generate a text for each input.

        Args:
            inputs: texts; for image-to-text, images as paths, file contents, Pillow images or uint8
                arrays (height, width, channels); for speech, sounds as paths, file contents or
                pairs (samples, sampling_rate).
            batch_size: largest number of inputs that run together; results do not depend on it.
            options: `max_new_tokens`, `num_beams` and others, see `GenerationOptions`; those that
                are not given are the model's own. Of translation models also `source_language` and
                `target_language`, of speech `language` and `task`, of images `prompt`: the
                beginning of each text, which is no part of the result.

        Returns:
            `num_return_sequences` results for each input, in order.

        Raises:
            InputError: an input is empty, too long or malformed, or an option is invalid.
        """
        if batch_size < 1:
            raise InputError(f"batch_size is {batch_size}, expected 1 or more.")
        own, chosen = self.read_options(options)
        rows = self.inputs.rows(inputs, chosen, **own)
        generations: list[Generation] = []
        while batch := list(islice(rows, batch_size)):
            searches = [self.search(row, chosen) for row in batch]
            for indices in self.graphs.batches([len(row.prompt) for row in batch]):
                joined = self.inputs.join([batch[index] for index in indices])
                for _ in self._run([searches[index] for index in indices], joined):
                    pass
            generations += [
                self._finished(hypothesis, chosen)
                for search in searches
                for hypothesis in search.results()
            ]
        return generations

    def stream(self, text: Any, **options: Any) -> Iterator[str]:
        """Generate the text of one input, piece by piece; together they are that of `generate`.

        A piece ends between characters, and what may be the beginning of a stop string is held
        back.

        Args:
            text: the input, see `generate`.
            options: see `generate`; with beam search the whole text is one piece.

        Raises:
            InputError: the input is invalid, or an option is.
        """
        own, chosen = self.read_options(options)
        if chosen.num_return_sequences > 1:
            raise InputError("num_return_sequences is above 1, but a stream has one text.")
        rows = list(self.inputs.rows([text], chosen, **own))
        return self._pieces(self.search(rows[0], chosen), self.inputs.join(rows), chosen)

    def read_options(self, arguments: dict[str, Any]) -> tuple[dict[str, Any], GenerationOptions]:
        """Return the arguments that are about the inputs, and the options of generation.

        Raises:
            InputError: an argument is unknown or has an invalid value.
        """
        names = self.inputs.arguments
        own = {name: value for name, value in arguments.items() if name in names}
        others = {name: value for name, value in arguments.items() if name not in names}
        return own, self.options.with_arguments(**{**self.inputs.implied(**own), **others})

    def search(self, row: GenerationRow, options: GenerationOptions) -> Search:
        """Return the search of one prepared input.

        Raises:
            InputError: the prompt alone reaches the largest length.
        """
        stops = options.stop_strings
        return make_search(
            row.prompt,
            options,
            positions=self.positions,
            rest=row.rest,
            stops=(lambda tokens: any(stop in self._text(tokens) for stop in stops))
            if stops
            else None,
        )

    def text_stream(self, options: GenerationOptions, *, keep_stop: bool = True) -> TextStream:
        """Return a stream that decodes the tokens of one sequence to text.

        Args:
            options: the options of generation.
            keep_stop: a stop string that ends the text is part of it.
        """
        return TextStream(
            self._text,
            stops=options.stop_strings,
            keep_stop=keep_stop,
            clean_up=self.tokenizer.clean_up,
        )

    def close(self) -> None:
        """Free the sessions."""
        self._open.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in TASKS:
            raise AttributeError(f"a {type(self).__name__} has no attribute '{name}'")

        def refuse(*_: Any, **__: Any) -> Any:
            raise InputError(
                f"{name}() was called, but {self.artifact.name} was exported for {self.task}.",
                do=f"Call {self.method}(), or export the model for another --task.",
            )

        return refuse

    def _pieces(
        self, search: Search, inputs: Feeds | None, options: GenerationOptions
    ) -> Iterator[str]:
        stream = self.text_stream(options)
        for _ in self._run([search], inputs):
            if options.num_beams > 1 or search.done:
                continue
            if piece := stream.feed(search.results()[0].tokens):
                yield piece
        if remainder := stream.finish(search.results()[0].tokens):
            yield remainder

    def _run(self, searches: Sequence[Search], inputs: Feeds | None) -> Iterator[None]:
        """Run all searches in one batch until they are done; yield after each step."""
        batch = RunningBatch(self.decoder)
        batch.add(searches, inputs)
        while True:
            for search in searches:
                if search.error is not None:
                    raise search.error
            yield
            if not batch.searches:
                return
            batch.step()

    def _text(self, tokens: Sequence[int]) -> str:
        hidden = self.inputs.hidden
        shown = [token for token in tokens if token not in hidden]
        return self.tokenizer.decode(shown, skip_special=True)

    def _finished(self, hypothesis: Hypothesis, options: GenerationOptions) -> Generation:
        text = self.text_stream(options).text(hypothesis.tokens)
        return Generation(text, hypothesis.tokens, hypothesis.finish, hypothesis.score)


# Decoders without position ids whose embeddings of positions count from the first column.
_COUNT_PADDING = (
    "bart",
    "bigbird_pegasus",
    "blenderbot",
    "blenderbot-small",
    "marian",
    "mbart",
    "pegasus",
)


def find_generating(artifact: Artifact) -> DecoderGraphs:
    """Return the graphs of an artifact that generate.

    Raises:
        ArtifactError: no graph takes a cache.
    """
    decoders = DecoderGraphs.find_all(artifact.manifest.graphs)
    if len(decoders) != 1:
        names = ", ".join(record.file for record in artifact.manifest.graphs)
        raise ArtifactError(
            f"{artifact.path} does not generate: expected one decoder with a cache, found {names}.",
            do="Export the model for a task that ends in -with-past.",
        )
    counts_padding = decoders[0].encoder is None and artifact.manifest.model_type in _COUNT_PADDING
    return replace(decoders[0], counts_padding=counts_padding)
