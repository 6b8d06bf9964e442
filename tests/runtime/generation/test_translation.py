"""Models with several languages translate as transformers does, with their own tokenizers."""

import warnings

import pytest

from enginery import export_model, load_model, validate_model
from enginery.core.errors import InputError
from tests.tiny_generators import save_translator

TASK = "text2text-generation-with-past"
TEXTS = ["Return the number of items.", "Where is it?"]
# kind of tokenizer -> model type, source and target language, the option that names the target
MODELS = {
    "m2m100": ("m2m_100", "en", "fr", "forced_bos_token_id"),
    "mbart": ("mbart", "en_XX", "fr_XX", "decoder_start_token_id"),
    "marian": ("marian", None, "fra", ""),
}


@pytest.fixture(scope="module")
def translator(slow_tokenizer, tmp_path_factory):
    """`translator("marian")`: the source of a tiny model, its artifact and its slow tokenizer."""
    made = {}

    def make(kind):
        if kind not in made:
            source = tmp_path_factory.mktemp("translators") / kind
            model, tokenizer = save_translator(MODELS[kind][0], slow_tokenizer(kind), source)
            made[kind] = (model, tokenizer, export_model(str(source), task=TASK))
        return made[kind]

    return make


@pytest.mark.more
@pytest.mark.parametrize(
    "kind",
    [
        pytest.param("m2m100", marks=pytest.mark.more),
        pytest.param("mbart", marks=pytest.mark.more),
        "marian",
    ],
)
def test_translations_are_those_of_pytorch(translator, home, kind):
    import torch

    model, tokenizer, artifact = translator(kind)
    _, source, target, option = MODELS[kind]
    expected, scores = [], []
    for text in TEXTS:
        if source:
            tokenizer.src_lang = source
        inputs = tokenizer(f">>{target}<< {text}" if not source else text, return_tensors="pt")
        options = {option: tokenizer.convert_tokens_to_ids(_token(kind, target))} if option else {}
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = model.generate(
                **inputs,
                **options,
                max_new_tokens=10,
                num_beams=3,
                do_sample=False,
                output_scores=True,
                return_dict_in_generate=True,
            )
        expected.append(tokenizer.decode(found.sequences[0], skip_special_tokens=True))
        scores.append(found.sequences_scores.item())
    with load_model(artifact) as loaded:
        languages = {"target_language": target} | ({"source_language": source} if source else {})
        found = loaded.generate(TEXTS, max_new_tokens=10, num_beams=3, **languages)
    assert [each.text for each in found] == expected
    # Random weights may give two texts the same translation, but not the same score.
    assert [each.score for each in found] == pytest.approx(scores, abs=1e-5)
    assert abs(scores[0] - scores[1]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_validation_translates_with_the_tokenizer_of_transformers(translator, home, kind):
    report = validate_model(translator(kind)[2], effort="quick")
    assert report.passed, report.summary
    assert report.generation.equal == report.generation.inputs
    assert not [note for note in report.notes if "generated" in note or "decoded" in note]


def _token(kind, language):
    return f"__{language}__" if kind == "m2m100" else language


@pytest.mark.more
def test_languages_that_are_missing_or_unknown_are_errors(translator, home):
    artifact = translator("m2m100")[2]
    with load_model(artifact) as model:
        for languages, message in (
            ({}, "no target language is given, and the model has 100: "),
            ({"target_language": "fx"}, "'fx' is not one of the tokenizer's 100; the nearest are"),
            (
                {"target_language": "fr", "source_language": "french"},
                "source language 'french' is not one of",
            ),
        ):
            with pytest.raises(InputError, match=message):
                model.generate(TEXTS, **languages)
