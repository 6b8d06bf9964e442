"""Choose the next tokens of one input: greedy search, sampling and beam search.

    search = make_search(prompt, options, positions=1024)
    while not search.done:
        move = search.advance(candidates)    # of the rows of the last move; of the prompt at first

A search holds the sequences of one input, and tells after each step which tokens to feed and which
rows of the decoder's cache they continue. So searches of several inputs can share the batch of a
decoder, and join or leave it at any step. Beam search is that of transformers 4.57, whose results
depend on details such as when it stops.
"""

from __future__ import annotations

import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
from numpy.typing import NDArray
from typing_extensions import override

from enginery.core.errors import InputError
from enginery.runtime.generation.guide import Guide
from enginery.runtime.generation.options import MAX_TOP_LOGPROBS, GenerationOptions
from enginery.runtime.generation.processors import (
    Processor,
    Scores,
    Warper,
    banned_tokens,
    log_softmax,
    make_processors,
    make_warpers,
)
from enginery.runtime.generation.time_stamps import TimeStamps

_WORST = -1e9
"""The score of beams that do not count, as in transformers."""

_MAX_DRAWN = 200
"""Most probable tokens among which one is drawn, up to which they are enough to know."""
_TIES = 16
"""Further tokens, since all that are as probable as the last one of `top_k` have a chance."""
_MAX_BANNED = 200
"""Tokens that a beam may not continue with, up to which the best tokens are enough to know."""

StopsAt = Callable[[list[int]], bool]
"""Returns True if the tokens generated so far end with a stop string."""


@dataclass(frozen=True)
class Need:
    """What a search reads of a step's outputs."""

    logits: bool = False
    """All logits; else only the best tokens."""
    best: int = 1
    """Number of the best tokens: with more than one, also their log-probabilities."""


@dataclass(frozen=True)
class Candidates:
    """What a step gives for the rows of one search."""

    tokens: NDArray[np.int64]
    """(rows, best): the best tokens, best first."""
    log_probs: NDArray[np.float32] | None = None
    """(rows, best): their log-probabilities; None with logits, or if only the best is needed."""
    logits: NDArray[np.float32] | None = None
    """(rows, vocabulary), in place of the other two."""


@dataclass(frozen=True)
class Move:
    """The rows of a search in the next step."""

    tokens: list[int]
    """The token of each row."""
    parents: list[int]
    """For each row, the one of the search's rows of this step that it continues."""


@dataclass(frozen=True)
class TokenLogprob:
    """The log-probability of a generated token, by the model's own logits."""

    token: int
    logprob: float
    top: tuple[tuple[int, float], ...]
    """The most probable tokens of this place with theirs, best first."""


@dataclass(frozen=True)
class Hypothesis:
    """A finished sequence."""

    tokens: tuple[int, ...]
    """The generated tokens, with the one that ended the sequence."""
    finish: str
    """`stop` after an end token or a stop string, `length` at the largest length."""
    score: float | None = None
    """Score of a beam: the sum of log-probabilities, divided by a power of the length."""
    logprobs: tuple[TokenLogprob, ...] = ()
    """One for each token; none if they were not asked for."""


@dataclass(frozen=True)
class TextRules:
    """What bounds the texts of a search beside the options."""

    stops: StopsAt | None = None
    """None if there are no stop strings."""
    guide: Guide | None = None
    """What keeps texts to a schema; None for any text."""
    time_stamps: TimeStamps | None = None
    """The rules of time stamps; None for texts without."""


@dataclass
class Search(ABC):
    """The state of one input."""

    prompt: tuple[int, ...]
    """The decoder's prompt."""
    options: GenerationOptions
    longest: int
    """The largest length, with the prompt."""
    rules: TextRules = TextRules()

    done: bool = field(default=False, init=False)
    error: Exception | None = field(default=None, init=False)
    """What ended the search in a batch before it had results; None otherwise."""
    _ends: frozenset[int] = field(init=False)
    _processors: list[Processor] = field(init=False)
    _warpers: list[Warper] = field(init=False)
    _random: np.random.Generator = field(init=False)

    def __post_init__(self) -> None:
        options = self.options
        self._ends = frozenset(options.eos_token_id)
        self._processors = make_processors(options, prompt=len(self.prompt), longest=self.longest)
        if self.rules.guide is not None:
            self._processors.append(self.rules.guide)
        if self.rules.time_stamps is not None:  # they come last, as in transformers
            self._processors.append(partial(self.rules.time_stamps, begin=len(self.prompt)))
        self._warpers = make_warpers(options) if options.do_sample else []
        self._random = np.random.default_rng(
            secrets.randbits(64) if options.seed is None else options.seed
        )

    @property
    @abstractmethod
    def need(self) -> Need:
        """What the search reads of the next step."""

    @abstractmethod
    def advance(self, candidates: Candidates) -> Move:
        """Take one step's outputs for the rows of the search; return the next rows.

        Args:
            candidates: the candidates for each row of the last move; at first for the prompt alone.

        Returns:
            The next rows; none if the search is done.
        """

    @abstractmethod
    def results(self) -> list[Hypothesis]:
        """Return the `num_return_sequences` results, best first."""

    @property
    def chosen(self) -> tuple[int, ...]:
        """The tokens that `PromptedSearch` fed behind `prompt`, before the first new one."""
        return ()

    @property
    def greedy(self) -> SequentialSearch | None:
        """The search, if it has one sequence that goes on with the most probable token each time.

        Such searches can be advanced together, see `SequentialSearch.tokens`.
        """
        return None

    def settle(self) -> None:
        """Take note of a token that was appended to the tokens of `greedy`.

        Only searches that have it are called.
        """
        raise NotImplementedError

    def _finish_of(self, tokens: Sequence[int]) -> str:
        """Return how a sequence with its prompt has ended; empty if it goes on."""
        if tokens[-1] in self._ends:
            return "stop"
        stops, guide = self.rules.stops, self.rules.guide
        if stops is not None and stops(list(tokens[len(self.prompt) :])):
            return "stop"
        if guide is not None and guide.is_complete(tokens):
            return "stop"
        return "length" if len(tokens) >= self.longest else ""


@dataclass
class SequentialSearch(Search):
    """Greedy search, or independent samples: each sequence continues itself."""

    _sequences: list[list[int]] = field(init=False)
    _running: list[int] = field(init=False)
    """The sequence of each row."""
    _finishes: list[str] = field(init=False)
    _logprobs: list[list[TokenLogprob]] = field(init=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        count = self.options.num_return_sequences
        self._logprobs = [[] for _ in range(count)]
        self._sequences = [list(self.prompt) for _ in range(count)]
        self._running = [0]
        self._finishes = [""] * count

    @property
    def need(self) -> Need:
        """The best token, those that a draw is among, or with processors all logits."""
        drawn = self._drawn if self.options.do_sample else 1
        if self._processors or not drawn:
            return Need(logits=True)
        if self.options.top_logprobs is None:
            return Need(best=drawn)
        # One number for all, since a GPU prepares for each number of best tokens.
        return Need(best=max(drawn, MAX_TOP_LOGPROBS))

    @property
    def _drawn(self) -> int:
        """Number of the best tokens that a draw needs; 0 for all."""
        top = self.options.top_k
        return top + _TIES if 0 < top <= _MAX_DRAWN else 0

    def advance(self, candidates: Candidates) -> Move:
        """Append a token to each running sequence."""
        rows = list(range(len(self._running)))
        # The prompt was run once, whatever the number of sequences. From the second step on, each
        # sequence has a row.
        if len(self._sequences[0]) == len(self.prompt):  # the prompt's row starts all sequences
            rows = [0] * len(self._sequences)
            self._running = list(range(len(self._sequences)))
        tokens, parents, running = [], [], []
        for row, sequence in zip(rows, self._running, strict=True):
            tokens_so_far = self._sequences[sequence]
            token = self._choose(candidates, row, tokens_so_far)
            tokens_so_far.append(token)
            if (top := self.options.top_logprobs) is not None:
                self._logprobs[sequence].append(_logprob(candidates, row, token, top))
            self._finishes[sequence] = self._finish_of(tokens_so_far)
            if not self._finishes[sequence]:
                running.append(sequence)
                tokens.append(tokens_so_far[-1])
                parents.append(row)
        self._running = running
        self.done = not running
        return Move(tokens, parents)

    @property
    @override
    def greedy(self) -> SequentialSearch | None:
        """The search itself, once it has a token, unless more than the best token matters."""
        if self._processors or self.options.do_sample or len(self._sequences) > 1:
            return None
        if self.options.top_logprobs is not None:
            return None
        return self if len(self.tokens) > len(self.prompt) else None

    @property
    def tokens(self) -> list[int]:
        """The first sequence with its prompt. Callers append the tokens of `greedy` themselves."""
        return self._sequences[0]

    @override
    def settle(self) -> None:
        """Find out whether the token that was appended ends the sequence."""
        self._finishes[0] = self._finish_of(self.tokens)
        if self._finishes[0]:
            self._running, self.done = [], True

    def results(self) -> list[Hypothesis]:
        """Return the sequences; of greedy search there is one."""
        return [
            Hypothesis(tuple(tokens[len(self.prompt) :]), finish or "length", None, tuple(logprobs))
            for tokens, finish, logprobs in zip(
                self._sequences, self._finishes, self._logprobs, strict=True
            )
        ]

    def _choose(self, candidates: Candidates, row: int, tokens: Sequence[int]) -> int:
        if candidates.logits is None:
            if not self.options.do_sample:
                if candidates.log_probs is not None and math.isnan(candidates.log_probs[row, 0]):
                    raise undefined_logits()
                return int(candidates.tokens[row, 0])
            return self._draw_of_best(candidates, row)
        scores = candidates.logits[row]
        for processor in self._processors:
            scores = processor(tokens, scores)
        if not self.options.do_sample:
            best = int(scores.argmax())
            if math.isnan(scores[best]):
                raise undefined_logits()
            return best
        return self._draw(scores)

    def _draw_of_best(self, candidates: Candidates, row: int) -> int:
        """Draw from the best tokens; what was left out has no chance.

        In the order of the tokens, a draw is the one among all tokens with the same seed.
        """
        if candidates.log_probs is None:
            raise AssertionError("a draw needs log-probabilities")
        order = np.argsort(candidates.tokens[row])
        return int(candidates.tokens[row][order][self._draw(candidates.log_probs[row][order])])

    def _draw(self, scores: Scores) -> int:
        for warp in self._warpers:
            scores = warp(scores)
        _require_candidates(scores)
        # In float64, as numpy's `choice`, so that the same seed draws the same token.
        shares = np.exp(log_softmax(scores).astype(np.float64))
        # What numpy's Generator.choice does, without its checks, which take longer.
        sums = (shares / shares.sum()).cumsum()
        return int((sums / sums[-1]).searchsorted(self._random.random(), side="right"))


@dataclass
class _Beam:
    tokens: tuple[int, ...]
    """With the prompt."""
    score: float
    finish: str = ""


@dataclass
class BeamSearch(Search):
    """Beam search as transformers 4.57 defines it."""

    _running: list[_Beam] = field(init=False)
    _finished: list[_Beam] = field(init=False)
    """The best `num_beams` sequences; those without `finish` are place holders."""
    _may_improve: bool = field(default=True, init=False)
    closest: float = field(default=math.inf, init=False)
    """The smallest difference of two beams' scores, sums of log-probabilities, of which one was
    kept and the other was not."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self._running = [_Beam(self.prompt, 0.0)]
        self._finished = [_Beam(self.prompt, _WORST)] * self.options.num_beams

    @property
    def need(self) -> Need:
        """The best tokens of each beam; all logits for a draw, or if many or all would change."""
        # Log-probabilities that nothing changes are as they are after another log-softmax.
        if self.options.renormalize_logits and self._processors:
            return Need(logits=True)
        # A banned token may be among the best, so as many more are fetched as there are banned
        # ones.
        banned = [banned_tokens(self._processors, beam.tokens) for beam in self._running]
        counts = [_MAX_BANNED + 1 if tokens is None else len(tokens) for tokens in banned]
        if self.options.do_sample or max(counts) > _MAX_BANNED:
            return Need(logits=True)
        return Need(best=self._kept + max(counts))

    @property
    def _kept(self) -> int:
        """Continuations that are kept of a step: enough if all beams end with each end token."""
        # `beams_to_keep` in transformers' `_beam_search`.
        return max(2, 1 + len(self.options.eos_token_id)) * self.options.num_beams

    def advance(self, candidates: Candidates) -> Move:
        """Extend the beams by their best continuations."""
        beams = self.options.num_beams
        continuations = self._continuations(candidates)
        going: list[tuple[int, _Beam]] = []
        # There is one more for each end token. What comes behind those that go on, and the one that
        # they are compared with, counts for nothing: neither do its tokens become a text.
        for rank, (row, beam) in enumerate(continuations):
            beam.finish = self._finish_of(beam.tokens)
            if not beam.finish:
                going.append((row, beam))
            if len(going) > beams:
                del continuations[rank + 1 :]
                break
        # Beams that ended stay behind the others, as in transformers: with too few, they go on.
        ended = [
            (row, _Beam(beam.tokens, beam.score + _WORST))
            for row, beam in continuations
            if beam.finish
        ]
        following = (going + ended)[:beams]
        # Both what goes on and what may end are chosen by rank, so a small gap in either can decide
        # differently with another rounding.
        for ranked in (going, continuations if ended else []):
            if len(ranked) > beams:
                gap = ranked[beams - 1][1].score - ranked[beams][1].score
                self.closest = min(self.closest, gap)
        # In the order of transformers' loop: sequences that ended count before the heuristic is
        # asked.
        self._update_finished([beam for _, beam in continuations])
        self._running = [beam for _, beam in following]
        self._may_improve = self._may_improve and self._can_improve()
        full = all(beam.finish for beam in self._finished)
        closed = full and self.options.early_stopping is True
        self.done = not self._may_improve or closed or not going
        if self.done:
            return Move([], [])
        return Move([beam.tokens[-1] for beam in self._running], [row for row, _ in following])

    def results(self) -> list[Hypothesis]:
        """Return the best finished sequences."""
        return [
            Hypothesis(beam.tokens[len(self.prompt) :], beam.finish or "length", beam.score)
            for beam in self._finished[: self.options.num_return_sequences]
        ]

    def _continuations(self, candidates: Candidates) -> list[tuple[int, _Beam]]:
        """Return the best continuations of all beams, each with the row that it continues."""
        scores, tokens = self._log_probs(candidates)
        # (beams, candidates), in float32 as in transformers: near ties depend on the rounding.
        scores = scores + np.array([[beam.score] for beam in self._running], np.float32)
        flat = scores.ravel()
        count = min(self._kept, len(flat))
        if np.isnan(flat).any():
            raise undefined_logits()
        if self.options.do_sample:
            _require_candidates(flat)
            # Sampling draws continuations without replacement from all beams together, as
            # transformers does with torch.multinomial.
            shares = np.exp(log_softmax(flat).astype(np.float64))
            count = min(count, int(np.count_nonzero(shares)))
            best = self._random.choice(len(flat), count, replace=False, p=shares / shares.sum())
        else:
            # Only the best few are sorted: sorting all beams' vocabularies would take longer.
            best = np.argpartition(-flat, count - 1)[:count]
            best = best[np.argsort(-flat[best], kind="stable")]
        rows, columns = np.unravel_index(best, scores.shape)
        return [
            (
                int(row),
                _Beam((*self._running[row].tokens, int(tokens[row, column])), float(flat[index])),
            )
            for row, column, index in zip(rows, columns, best, strict=True)
        ]

    def _log_probs(self, candidates: Candidates) -> tuple[Scores, NDArray[np.int64]]:
        """Return log-probabilities with their tokens: (beams, candidates) each."""
        if candidates.log_probs is not None:
            scores = candidates.log_probs.copy()
            for row, beam in enumerate(self._running):
                banned = banned_tokens(self._processors, beam.tokens)
                if banned is not None and len(banned):
                    scores[row, np.isin(candidates.tokens[row], banned)] = -np.inf
            return scores, candidates.tokens
        # (beams, vocabulary). transformers changes the log-probabilities of a beam search, not its
        # logits.
        scores = log_softmax(np.asarray(candidates.logits))
        for row, beam in enumerate(self._running):
            for processor in self._processors:
                scores[row] = processor(beam.tokens, scores[row])
            for warp in self._warpers:
                scores[row] = warp(scores[row])
        if self.options.renormalize_logits:
            # `LogitNormalization` of transformers, which comes last. What a single sequence
            # chooses does not depend on it.
            scores = log_softmax(scores)
        # Without a copy: all rows share one range of tokens.
        tokens = np.broadcast_to(np.arange(scores.shape[1], dtype=np.int64), scores.shape)
        return scores, tokens

    def _update_finished(self, beams: Sequence[_Beam]) -> None:
        """Put sequences that have just ended among the best; only the first beams may end."""
        full = all(beam.finish for beam in self._finished)
        if (full and self.options.early_stopping is True) or not self._may_improve:
            return
        # transformers' `top_num_beam_mask`: the continuations behind the first `num_beams` are
        # there to go on, and do not end.
        just_ended = [
            _Beam(beam.tokens, beam.score / self._divisor(len(beam.tokens)), beam.finish)
            for beam in beams[: self.options.num_beams]
            if beam.finish
        ]
        merged = [*self._finished, *just_ended]
        merged.sort(key=lambda beam: -beam.score)  # stable: of equal ones the earlier is better
        self._finished = merged[: self.options.num_beams]

    def _can_improve(self) -> bool:
        """Return True if the best running beam may still beat the worst finished one."""
        if not all(beam.finish for beam in self._finished):
            return True
        to_the_end = self.options.early_stopping == "never" and self.options.length_penalty > 0
        # `_check_early_stop_heuristic` of transformers: with a positive penalty a longer sequence
        # has a better score, so that "never" assumes the largest length. It compares the best beam
        # alone.
        length = self.longest if to_the_end else len(self._running[0].tokens)
        best_possible = self._running[0].score / self._divisor(length)
        return best_possible > min(beam.score for beam in self._finished)

    def _divisor(self, length: int) -> float:
        # The prompt does not count: `(cur_len - decoder_prompt_len) ** length_penalty` in
        # transformers.
        return float((length - len(self.prompt)) ** self.options.length_penalty)


@dataclass
class PromptedSearch(Search):
    """Feed the rest of a prompt token by token, then search.

    Where a place of the prompt has several tokens, the model's most probable one is taken.
    """

    rest: Sequence[Sequence[int]] = ()
    """The tokens of each place behind `prompt`."""

    _chosen: list[int] = field(default_factory=list, init=False)
    _search: Search | None = field(default=None, init=False)
    """The search behind the whole prompt; None until that is known."""

    @property
    def need(self) -> Need:
        """All logits to choose among tokens; behind the prompt, what the search needs."""
        if self._search is not None:
            return self._search.need
        return Need(logits=len(self.rest[len(self._chosen)]) > 1)

    def advance(self, candidates: Candidates) -> Move:
        """Return the next token of the prompt, and behind it the moves of the search."""
        if self._search is not None:
            move = self._search.advance(candidates)
            self.done = self._search.done
            return move
        tokens = self.rest[len(self._chosen)]
        # A place with one token needs no logits.
        best = 0 if candidates.logits is None else int(candidates.logits[0, list(tokens)].argmax())
        self._chosen.append(tokens[best])
        if len(self._chosen) == len(self.rest):
            prompt = (*self.prompt, *self._chosen)
            self._search = _search_kind(self.options)(
                prompt, self.options, self.longest, self.rules
            )
        return Move([tokens[best]], [0])

    @property
    @override
    def chosen(self) -> tuple[int, ...]:
        """The tokens of the places so far."""
        return tuple(self._chosen)

    @property
    @override
    def greedy(self) -> SequentialSearch | None:
        """The search behind the prompt, if it is greedy."""
        return None if self._search is None else self._search.greedy

    @override
    def settle(self) -> None:
        """Let the search behind the prompt settle."""
        if self._search is not None:
            self._search.settle()
            self.done = self._search.done

    def results(self) -> list[Hypothesis]:
        """Return the results of the search; within the prompt, one without tokens."""
        return [Hypothesis((), "length")] if self._search is None else self._search.results()


def _logprob(candidates: Candidates, row: int, token: int, top: int) -> TokenLogprob:
    """Return the log-probability of a chosen token, and of the `top` most probable ones."""
    if candidates.logits is not None:
        logprobs = log_softmax(candidates.logits[row])
        best = np.argpartition(-logprobs, min(top, len(logprobs) - 1))[:top]
        best = best[np.argsort(-logprobs[best], kind="stable")]
        chosen, tokens, values = logprobs[token], best, logprobs[best]
    elif candidates.log_probs is not None:
        tokens, values = candidates.tokens[row], candidates.log_probs[row]
        chosen = values[int((tokens == token).argmax())]
    else:
        raise AssertionError("log-probabilities need candidates with theirs")
    pairs = zip(tokens[:top].tolist(), values[:top].tolist(), strict=True)
    return TokenLogprob(token, float(chosen), tuple(pairs))


def _search_kind(options: GenerationOptions) -> type[SequentialSearch | BeamSearch]:
    return BeamSearch if options.num_beams > 1 else SequentialSearch


def undefined_logits() -> InputError:
    """Return the error of a sequence whose logits are NaN."""
    return InputError(
        "no token can be chosen: the logits are NaN.",
        do="Run `enginery validate` to check the model; in FP16, values may overflow.",
    )


def _require_candidates(scores: Scores) -> None:
    """Raise InputError unless a token can be drawn."""
    if np.isnan(scores).any():
        raise undefined_logits()
    if not np.isfinite(scores.max()):
        raise InputError(
            "no token can be drawn: the options exclude every token.", do="Exclude fewer tokens."
        )


def make_search(
    prompt: Sequence[int],
    options: GenerationOptions,
    *,
    positions: int | None,
    rules: TextRules = TextRules(),
    rest: Sequence[Sequence[int]] = (),
) -> Search:
    """Return the search of one input.

    Args:
        prompt: the decoder's prompt: the input itself, or the start token of an encoder-decoder.
        options: the options.
        positions: the decoder's limit; None if it has none.
        rules: what bounds the texts beside the options.
        rest: what follows the prompt before the first new token, see `PromptedSearch`.

    Raises:
        InputError: the prompt alone reaches the largest length.
    """
    longest = options.longest(len(prompt) + len(rest), positions)
    if rest:
        return PromptedSearch(tuple(prompt), options, longest, rules, rest)
    return _search_kind(options)(tuple(prompt), options, longest, rules)
