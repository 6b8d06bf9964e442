"""Change the logits of the next token by what was generated before, as transformers does.

    change = make_processors(options, prompt=5, longest=40)
    for processor in change:
        scores = processor(tokens, scores)

`tokens` is one sequence with its prompt, `scores` float32 (vocabulary,): logits, or in beam search
their log-softmax. The order is that of transformers' `_get_logits_processor`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
from numpy.typing import NDArray

from enginery.runtime.generation.options import GenerationOptions

Scores = NDArray[np.float32]
Tokens = Sequence[int]
Processor = Callable[[Tokens, Scores], Scores]
Warper = Callable[[Scores], Scores]

_NEVER = np.float32(-np.inf)
_NONE = np.empty(0, np.int64)


@dataclass(frozen=True)
class Forbid:
    """Give tokens no chance."""

    banned: Callable[[Tokens], Sequence[int] | NDArray[np.int64]]
    """Returns the tokens that may not follow a sequence; an array if they are always the same."""

    def __call__(self, tokens: Tokens, scores: Scores) -> Scores:
        """Return the scores, with minus infinity for the banned tokens."""
        banned = np.asarray(self.banned(tokens), np.int64)
        banned = banned[banned < len(scores)]
        if not len(banned):
            return scores
        scores = scores.copy()
        scores[banned] = _NEVER
        return scores


@dataclass(frozen=True)
class Force:
    """Give only some tokens a chance, at one place."""

    tokens: Sequence[int]
    length: int
    """Length of the sequences that one of the tokens has to follow, with the prompt."""

    def __call__(self, tokens: Tokens, scores: Scores) -> Scores:
        """Return 0 for the tokens, and minus infinity for the others; elsewhere the scores."""
        if len(tokens) != self.length:
            return scores
        forced = np.full_like(scores, _NEVER)
        forced[list(self.tokens)] = 0.0
        return forced


def banned_tokens(processors: Sequence[Processor], tokens: Tokens) -> NDArray[np.int64] | None:
    """Return the tokens that may not follow a sequence; None if other scores change, too."""
    banned: list[NDArray[np.int64]] = [_NONE]
    for processor in processors:
        if isinstance(processor, Forbid):
            banned.append(np.asarray(processor.banned(tokens), np.int64))
        elif not isinstance(processor, Force) or processor.length == len(tokens):
            return None
    return np.concatenate(banned)


def make_processors(options: GenerationOptions, *, prompt: int, longest: int) -> list[Processor]:
    """Return the processors of the options, except for those of sampling.

    Args:
        options: the options.
        prompt: number of the decoder's prompt tokens.
        longest: the largest length, with the prompt.
    """
    processors: list[Processor] = []
    ends = _array(options.eos_token_id)
    # OpenAI's, which transformers does not have, in vLLM's order.
    if options.logit_bias:
        biased = np.array(list(options.logit_bias), np.int64)
        biases = np.array(list(options.logit_bias.values()), np.float32)
        processors.append(partial(_add, tokens_biased=biased, biases=biases))
    if options.repetition_penalty != 1.0:
        processors.append(partial(_penalize, penalty=options.repetition_penalty))
    if options.frequency_penalty or options.presence_penalty:
        penalties = (options.frequency_penalty, options.presence_penalty)
        processors.append(partial(_discourage, prompt=prompt, penalties=penalties))
    if options.no_repeat_ngram_size:
        processors.append(Forbid(partial(_repeating, size=options.no_repeat_ngram_size)))
    # A bad word that is only an end token would never let a sequence end.
    end_tokens = frozenset(options.eos_token_id)
    words = [
        word for word in options.bad_words_ids if not (len(word) == 1 and word[0] in end_tokens)
    ]
    if words:
        processors.append(Forbid(partial(_last_of_words, words=words)))
    if (shortest := options.shortest(prompt)) and len(ends):
        processors.append(Forbid(lambda tokens: ends if len(tokens) < shortest else _NONE))
    if (first := options.forced_bos_token_id) is not None:
        # `ForcedBOSTokenLogitsProcessor` of transformers acts behind a single token.
        processors.append(Force([first], length=1))
    if last := list(options.forced_eos_token_id):
        # `ForcedEOSTokenLogitsProcessor` of transformers acts at the last place.
        processors.append(Force(last, length=longest - 1))
    if options.suppress_tokens:
        suppressed = _array(options.suppress_tokens)
        processors.append(Forbid(lambda _: suppressed))
    if options.begin_suppress_tokens:
        # As in transformers: a first token that is forced still belongs to the prompt.
        begin = prompt + (1 if prompt == 1 and options.forced_bos_token_id is not None else 0)
        at_begin = _array(options.begin_suppress_tokens)
        processors.append(Forbid(lambda tokens: at_begin if len(tokens) == begin else _NONE))
    return processors


def make_warpers(options: GenerationOptions) -> list[Warper]:
    """Return the functions that change the scores before a draw."""
    # `min_tokens_to_keep` of transformers: beams need a continuation even if each end token is
    # among those that are kept.
    keep = 1 if options.num_beams == 1 else len(options.eos_token_id) + 1
    if options.num_beams > 1 and not options.eos_token_id:
        keep = 2
    warpers: list[Warper] = []
    if options.temperature != 1.0:
        warpers.append(lambda scores: scores / np.float32(options.temperature))
    if options.top_k:
        warpers.append(partial(_keep_best, count=max(options.top_k, keep)))
    if options.top_p < 1.0:
        warpers.append(partial(_keep_probable, mass=options.top_p, least=keep))
    return warpers


def log_softmax(logits: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the log-softmax over the last axis."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    return np.asarray(shifted - np.log(np.exp(shifted).sum(axis=-1, keepdims=True)), np.float32)


def _penalize(tokens: Tokens, scores: Scores, *, penalty: float) -> Scores:
    present = np.unique(np.asarray(tokens))
    seen_scores = scores[present]
    scores = scores.copy()
    # Both signs become less likely: a negative logit is multiplied (arXiv:1909.05858, as in
    # transformers).
    scores[present] = np.where(
        seen_scores < 0, seen_scores * np.float32(penalty), seen_scores / np.float32(penalty)
    )
    return scores


def _add(
    _tokens: Tokens, scores: Scores, *, tokens_biased: NDArray[np.int64], biases: Scores
) -> Scores:
    is_token = tokens_biased < len(scores)
    scores = scores.copy()
    scores[tokens_biased[is_token]] += biases[is_token]
    return scores


def _discourage(
    tokens: Tokens, scores: Scores, *, prompt: int, penalties: tuple[float, float]
) -> Scores:
    """Subtract the penalties of frequency and presence from tokens that were generated."""
    generated = np.asarray(tokens[prompt:], np.int64)
    present, counts = np.unique(generated, return_counts=True)
    scores = scores.copy()
    # platform.openai.com/docs/advanced-usage: the prompt does not count.
    scores[present] -= (penalties[0] * counts + penalties[1]).astype(np.float32)
    return scores


def _array(tokens: Sequence[int]) -> NDArray[np.int64]:
    return np.unique(np.asarray(tokens, np.int64))


def _repeating(tokens: Tokens, *, size: int) -> NDArray[np.int64]:
    """Return the tokens that would end an n-gram of the sequence again."""
    sequence = np.asarray(tokens, np.int64)
    starts = np.arange(len(sequence) - size + 1)
    beginning = sequence[len(sequence) - size + 1 :]
    for offset in range(size - 2, -1, -1):  # the last token first, which leaves few
        if not len(starts):
            break
        starts = starts[sequence[starts + offset] == beginning[offset]]
    return sequence[starts + size - 1]


def _last_of_words(tokens: Tokens, *, words: Sequence[tuple[int, ...]]) -> list[int]:
    """Return the last tokens of words whose other tokens end the sequence."""
    # transformers ignores words that are longer than the sequence, also where their beginning fits.
    return [
        word[-1]
        for word in words
        if len(word) == 1
        or (len(word) <= len(tokens) and tuple(tokens[1 - len(word) :]) == word[:-1])
    ]


def _keep_best(scores: Scores, *, count: int) -> Scores:
    if count >= len(scores):
        return scores
    least = np.partition(scores, len(scores) - count)[len(scores) - count]
    return np.where(scores < least, _NEVER, scores)


def _keep_probable(scores: Scores, *, mass: float, least: int) -> Scores:
    order = np.argsort(scores, kind="stable")  # ascending, as in transformers
    shares = np.exp(log_softmax(scores[order])).cumsum()
    removed = shares <= np.float32(1.0 - mass)
    removed[len(removed) - least :] = False
    scores = scores.copy()
    scores[order[removed]] = _NEVER
    return scores
