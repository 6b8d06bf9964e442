"""Tokens of CTC models become the same text as with transformers' tokenizer."""

from __future__ import annotations

import json
import re

import numpy as np
import pytest

from enginery.core.errors import ArtifactError
from enginery.runtime.audio.ctc import CtcDecoder, WordPieceDecoder, open_decoder
from tests.environments import needs_transformers5

LETTERS = ["<pad>", "<s>", "</s>", "<unk>", "|", "'", ".", *"ABNST", "é"]


def save_tokenizer(directory, tokens=LETTERS, **settings):
    from transformers import Wav2Vec2CTCTokenizer

    file = directory / "vocab.json"
    file.write_text(json.dumps({token: index for index, token in enumerate(tokens)}))
    tokenizer = Wav2Vec2CTCTokenizer(str(file), **settings)
    tokenizer.save_pretrained(directory)
    return tokenizer


@pytest.mark.parametrize(
    ("tokens", "settings"),
    [
        (LETTERS, {}),
        (LETTERS, {"do_lower_case": True}),
        (LETTERS, {"clean_up_tokenization_spaces": True}),
        (LETTERS, {"replace_word_delimiter_char": "_"}),
        (["[PAD]", "[UNK]", " ", *"abc"], {"pad_token": "[PAD]", "unk_token": "[UNK]"}),
        (["|", *"abcdefg", "[UNK]", "[PAD]"], {"pad_token": "[PAD]", "unk_token": "[UNK]"}),
        (["_", "-", "ab", "c", "</s>"], {"pad_token": "_", "word_delimiter_token": "-"}),
        (["<pad>", "a", "b"], {"word_delimiter_token": " "}),
    ],
)
def test_text_equals_transformers(tmp_path, tokens, settings):
    tokenizer = save_tokenizer(tmp_path, tokens, **settings)
    decoder = CtcDecoder.open(tmp_path)
    random = np.random.default_rng(0)
    for length in (0, 1, 2, 30, 200):
        # Each token is repeated up to three times; some ids are not in the vocabulary.
        ids = np.repeat(random.integers(0, len(tokens) + 5, length), random.integers(1, 4, length))
        assert decoder.decode(ids) == tokenizer.decode(ids)


def test_vocabulary_of_the_target_language_is_used(tmp_path):
    vocabulary = {"eng": {"<pad>": 0, "|": 1, "a": 2}, "fra": {"<pad>": 0, "|": 1, "é": 2}}
    (tmp_path / "vocab.json").write_text(json.dumps(vocabulary))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"target_lang": "fra"}))
    assert CtcDecoder.open(tmp_path).decode([2, 0, 2, 1]) == "éé"
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"target_lang": "deu"}))
    with pytest.raises(ArtifactError, match="no vocabulary for the language 'deu'"):
        CtcDecoder.open(tmp_path)


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "has no vocab.json"),
        ({"vocab.json": "[1]"}, "expected a JSON object"),
        ({"vocab.json": '{"a": "b"}'}, "the id of 'a' is 'b', expected an integer"),
        ({"vocab.json": '{"a": -1}'}, "the id of 'a' is -1"),
        ({"vocab.json": '{"a": true}'}, "the id of 'a' is True"),
        (
            {
                "vocab.json": "{}",
                "tokenizer_config.json": '{"tokenizer_class": "WhisperTokenizer"}',
            },
            "tokenizer 'WhisperTokenizer' is not supported for transcribing",
        ),
    ],
)
def test_malformed_files_are_named(tmp_path, files, message):
    for name, content in files.items():
        (tmp_path / name).write_text(content)
    with pytest.raises(ArtifactError, match=re.escape(message)):
        CtcDecoder.open(tmp_path)


@needs_transformers5
def test_text_of_word_pieces_equals_transformers(tmp_path):
    import tokenizers
    from transformers import ParakeetTokenizer

    vocabulary = {"<unk>": 0, "▁the": 1, "▁eng": 2, "ine": 3, "s": 4, "<pad>": 5}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocabulary, [], unk_token="<unk>"))
    backend.decoder = tokenizers.decoders.Metaspace()
    tokenizer = ParakeetTokenizer(tokenizer_object=backend, unk_token="<unk>", pad_token="<pad>")
    tokenizer.save_pretrained(tmp_path)
    decoder = open_decoder(tmp_path)
    assert isinstance(decoder, WordPieceDecoder)
    assert decoder.decode([5, 1, 1, 5, 2, 3, 4, 5, 4, 4]) == "the enginess"
    for ids in np.random.default_rng(0).integers(0, 6, (20, 12)):
        assert decoder.decode(ids) == tokenizer.decode(ids)


def test_letters_have_a_decoder_of_letters(tmp_path):
    save_tokenizer(tmp_path)
    assert isinstance(open_decoder(tmp_path), CtcDecoder)


def test_word_pieces_without_a_blank_are_an_error(tmp_path):
    import tokenizers

    tokenizers.Tokenizer(tokenizers.models.BPE({"a": 0}, [])).save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(ArtifactError, match="names no padding token"):
        open_decoder(tmp_path)
