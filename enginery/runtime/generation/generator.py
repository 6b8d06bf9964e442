"""Generate text: prompts in, continuations out.

    with load_model("gpt2") as model:
        model.generate(["The engine"], max_new_tokens=32)[0].text
        for piece in model.stream("The engine"):
            print(piece, end="")

Needs only onnxruntime, tokenizers and numpy; no torch or transformers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from enginery.core.artifact.artifact import Artifact
from enginery.core.closing import Closeable
from enginery.core.errors import InputError
from enginery.core.model.files import ModelConfig
from enginery.runtime.generation.decoder import CachedDecoder
from enginery.runtime.generation.options import GenerationOptions, read_generation_config
from enginery.runtime.generation.search import Candidates, Hypothesis, Need, Search, make_search
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.providers.selection import Provider
from enginery.runtime.tasks import TASKS
from enginery.runtime.text.tokenizer import TextTokenizer, check_texts

_UNFINISHED = "�"
"""What the first bytes of a character decode to."""


@dataclass(frozen=True)
class Generation:
    """A generated text."""

    text: str
    """The new text, without the prompt and special tokens."""
    tokens: tuple[int, ...]
    """The new tokens, with the one that ended the text."""
    finish: str
    """`stop` after an end token or a stop string, `length` at the largest length."""
    score: float | None
    """Score of beam search: the sum of log-probabilities, divided by a power of the length; None
    without."""


class TextGenerator(Closeable):
    """A decoder loaded for inference. A context manager; closing it frees the session."""

    tasks: ClassVar[tuple[str, ...]] = ("text-generation-with-past",)
    method = "generate"

    def __init__(self, artifact: Artifact, runner: OrtRunner) -> None:
        """Read the artifact's tokenizer and generation_config.json.

        Raises:
            ArtifactError: a file is missing or malformed, or the graph takes no cache.
        """
        self.artifact = artifact
        self.task = artifact.manifest.task
        self.tokenizer = TextTokenizer.open(artifact.path)
        self.options = read_generation_config(artifact.path)
        """The model's own options."""
        self.positions = ModelConfig.read(artifact.path).merged().positions or None
        """Largest number of tokens, with the prompt; None if the model has no limit."""
        self._runner = runner
        self._decoder = CachedDecoder(runner, pad_id=self.tokenizer.pad_id or 0)

    @property
    def providers(self) -> list[Provider]:
        return self._runner.providers

    def generate(self, inputs: Sequence[str], **options: Any) -> list[Generation]:
        """Continue texts.

        Args:
            inputs: the prompts.
            options: `max_new_tokens`, `num_beams` and others, see `GenerationOptions`; those that
                are not given are the model's own.

        Returns:
            `num_return_sequences` results for each prompt, in order.

        Raises:
            InputError: a prompt is empty or too long, or an option is invalid.
        """
        chosen = self.options.with_arguments(**options)
        searches = [self._search(ids, chosen) for ids in self._encode(inputs)]
        for _ in self._run(searches):
            pass
        return [self._finished(found, chosen) for each in searches for found in each.results()]

    def stream(self, text: str, **options: Any) -> Iterator[str]:
        """Continue one text, piece by piece; the pieces together are that of `generate`.

        A piece ends between characters, and what may be the beginning of a stop string is held
        back.

        Args:
            text: the prompt.
            options: see `generate`; with beam search the whole text is one piece.

        Raises:
            InputError: the prompt is empty or too long, or an option is invalid.
        """
        chosen = self.options.with_arguments(**options)
        if chosen.num_return_sequences > 1:
            raise InputError("num_return_sequences is above 1, but a stream has one text.")
        (ids,) = self._encode([text])
        search = self._search(ids, chosen)
        return self._pieces(search, chosen)

    def close(self) -> None:
        """Free the session."""
        self._runner.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name not in TASKS:
            raise AttributeError(f"a {type(self).__name__} has no attribute '{name}'")

        def refuse(*_: Any, **__: Any) -> Any:
            raise InputError(
                f"{name}() was called, but {self.artifact.name} was exported for {self.task}.",
                do=f"Call {self.method}(), or export the model for another --task.",
            )

        return refuse

    def _pieces(self, search: Search, options: GenerationOptions) -> Iterator[str]:
        sent = ""
        for _ in self._run([search]):
            if options.num_beams > 1 or search.done:
                continue
            (found,) = search.results()
            text = self._text(found.tokens)
            held = max(
                (
                    size
                    for stop in options.stop_strings
                    for size in range(1, len(stop))
                    if text.endswith(stop[:size])
                ),
                default=0,
            )
            ready = text[: len(text) - held]
            if ready.startswith(sent) and not ready.endswith(_UNFINISHED) and ready != sent:
                yield ready[len(sent) :]
                sent = ready
        rest = self._finished(search.results()[0], options).text
        if rest[len(sent) :]:
            yield rest[len(sent) :]

    def _encode(self, inputs: Sequence[str]) -> list[list[int]]:
        check_texts(inputs)
        encodings = self.tokenizer.encode_untruncated(inputs, special=True)
        for index, encoding in enumerate(encodings):
            if not encoding.ids:
                raise InputError(
                    f"prompt {index} is empty, and the tokenizer puts no token in front.",
                    do="Start with some text.",
                )
        return [list(encoding.ids) for encoding in encodings]

    def _search(self, prompt: list[int], options: GenerationOptions) -> Search:
        stops = options.stop_strings
        return make_search(
            prompt,
            options,
            positions=self.positions,
            stops=(lambda tokens: any(stop in self._text(tokens) for stop in stops))
            if stops
            else None,
        )

    def _run(self, searches: Sequence[Search]) -> Iterator[None]:
        """Run all searches in one batch until they are done; yield after each step."""
        if not searches:
            return
        state, found = self._decoder.begin([s.prompt for s in searches], _joined(searches))
        rows = [range(index, index + 1) for index in range(len(searches))]
        running = list(searches)
        while True:
            tokens: list[int] = []
            parents: list[int] = []
            following: list[range] = []
            for search, place in zip(running, rows, strict=True):
                move = search.advance(_part(found, place))
                following.append(range(len(tokens), len(tokens) + len(move.tokens)))
                tokens += move.tokens
                parents += [place[parent] for parent in move.parents]
            yield
            left = [index for index, search in enumerate(running) if not search.done]
            running, rows = [running[index] for index in left], [following[index] for index in left]
            if not running:
                return
            state, found = self._decoder.step(state, tokens, parents, _joined(running))

    def _text(self, tokens: Sequence[int]) -> str:
        return self.tokenizer.decode(list(tokens), skip_special=True)

    def _finished(self, found: Hypothesis, options: GenerationOptions) -> Generation:
        text = self._text(found.tokens)
        ends = [text.find(stop) + len(stop) for stop in options.stop_strings if stop in text]
        return Generation(
            text[: min(ends)] if ends else text, found.tokens, found.finish, found.score
        )


def _joined(searches: Sequence[Search]) -> Need:
    """Return what all searches of a batch need together."""
    needs = [search.need for search in searches]
    return Need(any(need.logits for need in needs), max(need.best for need in needs))


def _part(found: Candidates, rows: range) -> Candidates:
    """Return the candidates of one search's rows."""
    place = slice(rows.start, rows.stop)
    return Candidates(
        found.tokens[place],
        None if found.log_probs is None else found.log_probs[place],
        None if found.logits is None else found.logits[place],
    )
