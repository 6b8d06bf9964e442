"""Encoder-decoders generate the tokens of PyTorch's `generate`, alone and in batches."""

import numpy as np
import pytest

from enginery import export_model, load_model
from enginery.core.errors import ArtifactError, InputError
from tests.tiny_generators import filled, reference_tokens

TASK = "text2text-generation-with-past"
TEXTS = [
    "The engine is warm and the pump runs again.",
    "Who?",
    "A small cat sleeps on the boat under the tree; the rain is cold.",
]
KINDS = ("t5", "marian")
MORE_KINDS = ("bart", "mbart", "pegasus", "m2m_100", "mt5", "blenderbot-small")
CASES = {
    "greedy": {},
    "beams": {"num_beams": 4},
    "all beams": {"num_beams": 3, "num_return_sequences": 3, "early_stopping": True},
    "processors": {"num_beams": 2, "no_repeat_ngram_size": 2, "repetition_penalty": 1.3},
    "language": {"forced_bos_token_id": 300},
    "many ends": {"eos_token_id": [2, *range(200, 400)], "num_beams": 4},
}


@pytest.mark.parametrize(
    "kind", [*KINDS, *(pytest.param(kind, marks=pytest.mark.slow) for kind in MORE_KINDS)]
)
def test_tokens_are_those_of_pytorch(tiny_model, home, kind):
    source = tiny_model(kind, "text2text-generation")
    artifact = export_model(str(source), task=TASK)
    assert len(artifact.manifest.graphs) == 2
    with load_model(artifact) as model:
        for name, case in CASES.items():
            options = {"max_new_tokens": 15, **case}
            tokens, scores, pad = reference_tokens(source, TEXTS, **options)
            together = model.generate(TEXTS, **options)
            alone = model.generate(TEXTS, batch_size=1, **options)
            for found in (together, alone):
                assert [
                    filled(each.tokens, len(wanted), pad)
                    for each, wanted in zip(found, tokens, strict=True)
                ] == tokens, name
                if scores:
                    np.testing.assert_allclose([each.score for each in found], scores, rtol=1e-4)
        assert "".join(model.stream(TEXTS[0])) == model.generate(TEXTS[:1])[0].text


@pytest.mark.more
def test_no_weight_is_in_two_graphs(tiny_model, home):
    source = tiny_model("t5", "text2text-generation")
    own = export_model(str(source), task=TASK)
    optimum = export_model(str(source), task=TASK, layout="optimum")
    assert [graph.file for graph in own.manifest.graphs] == [
        "decoder_with_past_model.onnx",
        "encoder_model.onnx",
    ]
    assert "present.1.encoder.value" in [s.name for s in own.graph("encoder_model.onnx").outputs]
    assert len(optimum.manifest.graphs) == 3
    with pytest.raises(ArtifactError, match="first step is another graph, decoder_model"):
        load_model(optimum)


@pytest.mark.more
def test_graphs_of_optimum_open_in_its_class(tiny_model, home):
    from optimum.onnxruntime import ORTModelForSeq2SeqLM
    from transformers import AutoTokenizer

    source = tiny_model("t5", "text2text-generation")
    artifact = export_model(str(source), task=TASK, layout="optimum")
    tokens, _, _ = reference_tokens(source, TEXTS[:1], max_new_tokens=8)
    model = ORTModelForSeq2SeqLM.from_pretrained(artifact.path)
    inputs = AutoTokenizer.from_pretrained(source)(TEXTS[:1], return_tensors="pt")
    assert model.generate(**inputs, max_new_tokens=8)[0][1:].tolist() == tokens[0]


@pytest.mark.slow
def test_validation_compares_both_graphs_and_decodes(tiny_model, home):
    from enginery import validate_model

    artifact = export_model(str(tiny_model("marian", "text2text-generation")), task=TASK)
    report = validate_model(artifact, effort="quick", force=True)
    assert report.passed
    compared = {found.output for case in report.cases for found in case.outputs}
    assert {"logits", "last_hidden_state", "present.0.encoder.key"} <= compared
    assert any("token 5" in case.name for case in report.cases)


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        (["fine", "The engine. " * 100], r"text 1 has \d+ tokens, and the model's limit is 128"),
        ("a", "expected a list"),
        (["a", 3], "text 1 is an int"),
    ],
)
def test_bad_texts_are_errors(tiny_model, home, texts, message):
    artifact = export_model(str(tiny_model("marian", "text2text-generation")), task=TASK)
    with load_model(artifact) as model, pytest.raises(InputError, match=message):
        model.generate(texts)
