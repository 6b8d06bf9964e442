"""Chunks and time stamps become the transcript that Whisper's tokenizer in transformers makes."""

import numpy as np
import pytest

from enginery.runtime.audio.transcript import ChunkTokens, TranscriptDecoder, join_overlapping
from enginery.runtime.text.tokenizer import TextTokenizer
from tests.speech import LANGUAGES, save_tokenizer

POSITION = 0.02


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tokenizer")
    return save_tokenizer(directory, time_stamps=True), TextTokenizer.open(directory)


@pytest.fixture(scope="module")
def decoder(tokenizers):
    reference, own = tokenizers
    ids = reference.get_vocab()
    return TranscriptDecoder(
        decode=lambda tokens: own.decode(tokens, skip_special=False),
        first_stamp=ids["<|0.00|>"],
        languages={ids[f"<|{code}|>"]: code for code in LANGUAGES},
        specials=own.special_ids,
        seconds_per_position=POSITION,
        positions=1500,
    )


def chunks_at_random(random, decoder, *, count, stride):
    """Chunks that repeat some of the tokens before them, with time stamps in and out of order."""
    chunks, before = [], []
    for index in range(count):
        words = [int(word) for word in random.integers(60, 120, int(random.integers(1, 14)))]
        words = before[len(before) - int(random.integers(0, 6)) :] + words
        before, tokens, position = words, [], int(random.integers(0, 50))
        for word in words:
            kind = random.random()
            if kind < 0.3:
                position = min(position + int(random.integers(0, 400)), 1500)
                tokens += [decoder.first_stamp + position] * int(random.integers(1, 3))
            elif kind < 0.35:
                position = 0
                tokens.append(decoder.first_stamp)
            elif kind < 0.4:
                tokens.append(int(random.choice(sorted(decoder.specials))))
            tokens.append(word)
        left, right = 5.0 * (index > 0), 5.0 * (index < count - 1)
        chunks.append(ChunkTokens(tokens, (30.0, left, right) if stride else None))
    return chunks


@pytest.mark.parametrize("has_time_stamps", [False, True])
@pytest.mark.parametrize("stride", [False, True])
def test_transcripts_are_those_of_transformers(tokenizers, decoder, has_time_stamps, stride):
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    reference, _ = tokenizers
    random = np.random.default_rng(0)
    for _ in range(60):
        count = int(random.integers(1, 4)) if stride else 1
        chunks = chunks_at_random(random, decoder, count=count, stride=stride)
        outputs = [
            {"tokens": torch.tensor([chunk.tokens])} | ({"stride": chunk.stride} if stride else {})
            for chunk in chunks
        ]
        text, optional = reference._decode_asr(
            outputs,
            return_timestamps=has_time_stamps or None,
            return_language=None,
            time_precision=POSITION,
        )
        parts = decoder(chunks, has_time_stamps=has_time_stamps)
        assert "".join(part.text for part in parts) == text
        if has_time_stamps:
            expected = [(part["text"], part["timestamp"]) for part in optional["chunks"]]
            assert [(part.text, part.timestamp) for part in parts] == expected


def test_overlaps_are_joined_as_in_transformers():
    from transformers.models.whisper.tokenization_whisper import _find_longest_common_sequence

    random = np.random.default_rng(1)
    for _ in range(100):
        words = random.integers(0, 6, 40).tolist()
        ends = np.sort(random.integers(0, 40, 4))
        sequences = [words[max(end - 12, 0) : end + 6] for end in ends]
        for sequence in sequences:  # heard differently
            if sequence:
                sequence[int(random.integers(len(sequence)))] = 9
        assert join_overlapping(sequences) == _find_longest_common_sequence(sequences)
    assert join_overlapping([[]]) == []
    assert join_overlapping([[1, 2, 3, 4], [3, 4, 5]]) == [1, 2, 3, 4, 5]
