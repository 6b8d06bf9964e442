"""Let a text be nothing but JSON of a schema, token by token; needs the package `llguidance`.

    grammars = Grammars.open(tokenizer, ends=[50256])
    guide = grammars.guide({"type": "object"}, prompt=len(prompt))
    scores = guide(tokens, scores)    # minus infinity for what cannot follow
    guide.is_complete(tokens)         # True once nothing more can follow

A guide is a processor of scores, see `processors`, and so it works with each kind of search.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.errors import InputError
from enginery.core.extras import is_installed
from enginery.runtime.text.tokenizer_files import failure_reason

_PACKAGE = "llguidance"
_WHITESPACE = r"\n?[ \t]{0,16}"
"""Between the parts of JSON. Without a bound, a small model may write nothing else to the end."""


@dataclass(frozen=True)
class Grammars:
    """A model's vocabulary, as grammars need it."""

    vocabulary: Any
    """`llguidance.LLTokenizer`."""

    @classmethod
    def open(cls, tokenizer_json: str, ends: Sequence[int]) -> Grammars:
        """Read a tokenizer, which takes a second for a large vocabulary.

        Args:
            tokenizer_json: the tokenizer, as tokenizer.json has it.
            ends: the tokens that end a text.

        Raises:
            InputError: llguidance is not installed, or cannot read the tokenizer.
        """
        if not is_installed(_PACKAGE):
            raise InputError(
                f"json_schema: the package {_PACKAGE}, which keeps a text to a schema, is not "
                "installed.",
                do="Install it with: pip install 'enginery[guided]'",
            )
        from llguidance import LLTokenizer

        if not ends:
            raise InputError("json_schema: the model has no token that ends a text.")
        try:
            return cls(LLTokenizer(tokenizer_json, eos_token=list(ends)))
        except BaseException as error:  # a panic derives from it
            raise InputError(
                f"json_schema: the tokenizer cannot be used: {failure_reason(error)}."
            ) from error

    def guide(self, schema: dict[str, Any], *, prompt: int) -> Guide:
        """Compile a JSON schema.

        Args:
            schema: the schema.
            prompt: number of tokens in front of the text.

        Raises:
            InputError: the schema is invalid, has keywords that are not supported, or is too large.
        """
        from llguidance import LLMatcher

        try:
            grammar = LLMatcher.grammar_from_json_schema(
                schema, overrides={"whitespace_pattern": _WHITESPACE}
            )
            matcher = LLMatcher(self.vocabulary, grammar, log_level=0)
        except BaseException as error:
            raise InputError(f"json_schema: {failure_reason(error)}.") from error
        if matcher.is_error():
            raise InputError(f"json_schema: {_first_line(matcher)}.")
        return Guide(prompt, self.vocabulary.vocab_size, {(): matcher})


@dataclass(eq=False)
class Guide:
    """The grammar of one input's texts."""

    prompt: int
    vocabulary: int
    _matchers: dict[tuple[int, ...], Any] = field(repr=False)
    """The state after each of the generated sequences that may still go on."""

    def __call__(self, tokens: Sequence[int], scores: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return the scores, with minus infinity for tokens that cannot follow.

        Raises:
            InputError: the grammar is too complex here, or other options exclude every token.
        """
        from llguidance.numpy import allocate_token_bitmask, fill_next_token_bitmask

        matcher = self._matcher(tokens)
        # The search has the error of NaN, and a beam without a chance already has its score.
        if matcher is None or np.isnan(scores).any():
            return scores
        mask = allocate_token_bitmask(1, self.vocabulary)
        fill_next_token_bitmask(matcher, mask)
        if matcher.is_error():
            raise InputError(f"json_schema: {_first_line(matcher)}.")
        bits = np.unpackbits(mask[0].view(np.uint8), bitorder="little")[: self.vocabulary]
        # A model may have more logits than its tokenizer has tokens.
        count = min(len(bits), len(scores))
        allowed = np.zeros(len(scores), bool)
        allowed[:count] = bits[:count]
        guided = np.where(allowed, scores, np.float32(-np.inf))
        if not np.isfinite(guided.max()):
            raise InputError(
                "json_schema: the other options exclude every token that could follow.",
                do="Exclude fewer tokens.",
            )
        return guided

    def is_complete(self, tokens: Sequence[int]) -> bool:
        """Return True if nothing can follow a sequence."""
        matcher = self._matcher(tokens)
        return matcher is not None and bool(matcher.is_stopped())

    def _matcher(self, tokens: Sequence[int]) -> Any:
        """Return the state after a sequence, from that of the sequence without its last token.

        None for a beam that has no chance: where few tokens may follow, others fill the places.
        """
        generated = tuple(tokens[self.prompt :])
        if generated in self._matchers:
            return self._matchers[generated]
        matcher = self._matchers[generated[:-1]]
        if matcher is not None:
            matcher = matcher.deep_copy()  # microseconds
            if matcher.try_consume_tokens([generated[-1]]) != 1:
                matcher = None
        # Sequences of a search have one length: shorter ones are done, or are gone.
        shortest = len(generated) - 1
        self._matchers = {
            key: value for key, value in self._matchers.items() if len(key) >= shortest
        }
        self._matchers[generated] = matcher
        return matcher


def _first_line(matcher: Any) -> str:
    return str(matcher.get_error()).strip().partition("\n")[0][:300].rstrip(".")
