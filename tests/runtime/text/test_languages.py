"""Languages of translation models: their codes, and texts encoded as transformers encodes them."""

import json
import shutil

import pytest
from transformers import AutoTokenizer

from enginery.core.errors import ArtifactError, InputError
from enginery.runtime.text.tokenizer import TextTokenizer
from tests.translation import HOSTILE, TEXTS

SAMPLES = [*TEXTS, *HOSTILE["special"], *HOSTILE["codes"]]
MODELS = {
    "m2m100": ("en", "fr", 100),
    "m2m100-bpe": ("en", "zh", 100),
    "nllb": ("eng_Latn", "fra_Latn", 202),
    "mbart": ("en_XX", "fr_XX", 25),
    "mbart50": ("en_XX", "uk_UA", 52),
}


def slow(directory, **settings):
    return AutoTokenizer.from_pretrained(directory, use_fast=False, **settings)


def encoded(tokenizer, texts=SAMPLES, **languages):
    return [encoding.ids for encoding in tokenizer.encode_source(texts, **languages)]


@pytest.mark.more
@pytest.mark.parametrize("kind", MODELS)
def test_every_language_has_the_token_of_transformers(written_tokenizer, kind):
    own, other, count = MODELS[kind]
    tokenizer, wanted = TextTokenizer.open(written_tokenizer(kind)), slow(written_tokenizer(kind))
    assert len(tokenizer.languages) == count
    assert {own, other} < set(tokenizer.languages)
    for code, token_id in tokenizer.languages.items():
        token = f"__{code}__" if kind.startswith("m2m100") else code
        assert wanted.convert_tokens_to_ids(token) == token_id
        assert list(tokenizer.load_languages().first_tokens(code).values()) == [token_id]
    inputs = wanted._build_translation_inputs(
        "x", src_lang=own, tgt_lang=other, **({} if "m2m" in kind else {"return_tensors": None})
    )
    name = "decoder_start_token_id" if kind == "mbart" else "forced_bos_token_id"
    found = tokenizer.load_languages().first_tokens(other)
    assert found == {name: inputs["forced_bos_token_id"]}


@pytest.mark.parametrize("kind", MODELS)
def test_texts_of_a_language_are_encoded_as_by_transformers(written_tokenizer, kind):
    tokenizer, wanted = TextTokenizer.open(written_tokenizer(kind)), slow(written_tokenizer(kind))
    ordinary = [text for text in SAMPLES if text not in HOSTILE["special"]]
    for code in (None, *list(tokenizer.languages)[::7]):
        if code is not None:
            wanted.src_lang = code
        ids = [wanted(text).input_ids for text in ordinary]
        assert encoded(tokenizer, ordinary, source_language=code) == ids
    assert encoded(tokenizer) == encoded(
        tokenizer, source_language=wanted.init_kwargs["src_lang"] or MODELS[kind][0]
    )


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("m2m100", {"src_lang": "fr"}),
        ("mbart", {"src_lang": "ro_RO"}),
        ("mbart50", {"src_lang": "ro_RO"}),
        ("nllb", {"src_lang": "fra_Latn"}),
        ("nllb", {"legacy_behaviour": True}),
        ("nllb", {"legacy_behaviour": True, "src_lang": "fra_Latn"}),
    ],
)
def test_settings_of_the_model_are_followed(written_tokenizer, kind, settings):
    directory = written_tokenizer(kind, **settings)
    tokenizer, wanted = TextTokenizer.open(directory), slow(directory)
    assert encoded(tokenizer, TEXTS) == [wanted(text).input_ids for text in TEXTS]
    (plain,) = tokenizer.encode_untruncated(TEXTS[:1], special=True)
    assert plain.ids == wanted(TEXTS[0]).input_ids
    wanted.src_lang = MODELS[kind][1]
    ids = [wanted(text).input_ids for text in TEXTS]
    assert encoded(tokenizer, TEXTS, source_language=MODELS[kind][1]) == ids


@pytest.mark.parametrize("kind", ["mbart50", "nllb"])
def test_tokenizer_json_of_transformers_is_read_alike(slow_tokenizer, tmp_path, kind):
    fast = AutoTokenizer.from_pretrained(slow_tokenizer(kind))
    fast.save_pretrained(tmp_path)
    settings = json.loads((tmp_path / "tokenizer_config.json").read_text())
    assert settings["tokenizer_class"] in (
        "MBart50Tokenizer",
        "NllbTokenizer",
        "NllbTokenizerFast",
        "MBart50TokenizerFast",
    )
    tokenizer = TextTokenizer.open(tmp_path)
    assert len(tokenizer.languages) == MODELS[kind][2]
    fast.src_lang = MODELS[kind][1]
    ids = [fast(text).input_ids for text in SAMPLES]
    assert encoded(tokenizer, source_language=MODELS[kind][1]) == ids


def test_marian_names_the_target_in_the_text(written_tokenizer):
    directory = written_tokenizer("marian")
    tokenizer, wanted = TextTokenizer.open(directory), slow(directory)
    vocabulary = json.loads((directory / "vocab.json").read_text())
    assert tokenizer.languages == {
        "deu_Latn": vocabulary[">>deu_Latn<<"],
        "fra": vocabulary[">>fra<<"],
    }
    assert tokenizer.load_languages().first_tokens("fra") == {}
    ids = [wanted(f">>fra<< {text}").input_ids for text in SAMPLES]
    assert encoded(tokenizer, target_language="fra") == ids
    assert encoded(tokenizer) == [wanted(text).input_ids for text in SAMPLES]
    with pytest.raises(InputError, match=r"'eng' is given, but the tokenizer has only target lang"):
        tokenizer.encode_source(["x"], source_language="eng")
    with pytest.raises(
        InputError, match=r"target language 'fr' is not one of the tokenizer's 2; .*fra"
    ):
        tokenizer.encode_source(["x"], target_language="fr")


def test_unknown_language_names_the_nearest(written_tokenizer):
    tokenizer = TextTokenizer.open(written_tokenizer("nllb"))
    message = r"source language 'fra' is not one of the tokenizer's 202; the nearest are .*fra_Latn"
    with pytest.raises(InputError, match=message):
        tokenizer.encode_source(["x"], source_language="fra")
    with pytest.raises(InputError, match=r"target language .* not one of the tokenizer's 202"):
        tokenizer.load_languages().first_tokens("x" * 10**6)
    for odd in ("", 7, ["fra_Latn"]):
        with pytest.raises(InputError, match="not one of the tokenizer's 202"):
            tokenizer.encode_source(["x"], source_language=odd)
    with pytest.raises(InputError, match="expected a list"):
        tokenizer.encode_source("x", source_language="fra_Latn")


def test_model_without_languages_takes_none(written_tokenizer):
    tokenizer = TextTokenizer.open(written_tokenizer("t5"))
    assert tokenizer.languages == {}
    assert encoded(tokenizer, TEXTS) == [
        encoding.ids for encoding in tokenizer.encode_untruncated(TEXTS, special=True)
    ]
    with pytest.raises(InputError, match=r"'en' is given, but the tokenizer has no languages"):
        tokenizer.encode_source(["x"], source_language="en")
    with pytest.raises(InputError, match=r"'en' is given, but the tokenizer has no languages"):
        tokenizer.encode_source(["x"], target_language="en")
    with pytest.raises(InputError, match="no languages"):
        tokenizer.load_languages().first_tokens("en")


def test_default_language_that_the_vocabulary_lacks(written_tokenizer, tmp_path):
    directory = shutil.copytree(written_tokenizer("mbart"), tmp_path / "model")
    settings = json.loads((directory / "tokenizer_config.json").read_text())
    (directory / "tokenizer_config.json").write_text(json.dumps({**settings, "src_lang": "xx_XX"}))
    tokenizer = TextTokenizer.open(directory)
    with pytest.raises(ArtifactError, match="no token for its own source language 'xx_XX'"):
        tokenizer.encode_source(["x"])
    assert tokenizer.encode_source(["x"], source_language="fr_XX")


@pytest.mark.parametrize(
    "files",
    [
        {"tokenizer_config.json": None, "config.json": {"model_type": "mbart"}},
        {"tokenizer_config.json": {}, "config.json": {"tokenizer_class": "MBartTokenizer"}},
        {"tokenizer_config.json": {"tokenizer_class": "MBartTokenizerFast"}},
    ],
)
def test_class_is_found_as_transformers_finds_it(written_tokenizer, tmp_path, files):
    directory = shutil.copytree(written_tokenizer("mbart"), tmp_path / "model")
    for name, content in files.items():
        path = directory / name
        path.unlink(missing_ok=True) if content is None else path.write_text(json.dumps(content))
    assert len(TextTokenizer.open(directory).languages) == 25
