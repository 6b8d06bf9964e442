"""Answers of text models are those of transformers' own pipelines on the same directory."""

from __future__ import annotations

import numpy as np
import pytest

from enginery.core.errors import ArtifactError, InputError
from enginery.runtime.model import load_model
from tests.core.artifacts import verdict
from tests.tiny import TEXT_KINDS, with_more
from tests.tolerances import OUTPUTS, SCORES

TEXTS = [
    "The engine is warm and the pump runs again.",
    "",
    "Marie Curie lived in Paris, not far from the Seine!",
    "Über die Brücke in Köln fährt kein Zug.",
    "引擎已经热了 x/y z_w",
    "the ☃☃ and 한국 ☂x pump ☃",  # unknown characters: words of their own
    "Who built the bridge over the river in London? " * 3,
]


def pipeline(task, source, **options):
    import transformers

    return transformers.pipeline(task, model=str(source), tokenizer=str(source), **options)


@pytest.mark.parametrize("kind", with_more(TEXT_KINDS, "bert", "roberta"))
def test_classification_equals_the_pipeline(tiny, kind):
    source = tiny.source(kind, "text-classification")
    expected = pipeline("text-classification", source, top_k=None)(TEXTS)
    with load_model(tiny.artifact(kind, "text-classification")) as model:
        found = model.classify(TEXTS)
    for answer, reference in zip(found, expected, strict=True):
        assert [label.label for label in answer.labels] == [r["label"] for r in reference]
        np.testing.assert_allclose(
            [label.score for label in answer.labels], [r["score"] for r in reference], atol=SCORES
        )
    assert len({round(answer.score, 3) for answer in found}) > 3  # the inputs do differ


@pytest.mark.parametrize(
    ("config", "in_range"),
    [
        ({"problem_type": "multi_label_classification"}, True),
        ({"problem_type": "regression", "num_labels": 1}, False),
        ({"num_labels": 1}, True),
    ],
)
def test_scores_follow_the_problem_type(tiny, config, in_range):
    source = tiny.source("bert", "text-classification", **config)
    expected = pipeline("text-classification", source, top_k=None)(TEXTS)
    found = load_model(tiny.artifact("bert", "text-classification", **config)).classify(TEXTS)
    for answer, reference in zip(found, expected, strict=True):
        assert {
            label.label: pytest.approx(label.score, abs=OUTPUTS) for label in answer.labels
        } == {r["label"]: r["score"] for r in reference}
    totals = [sum(label.score for label in answer.labels) for answer in found]
    assert not np.allclose(totals, 1)  # not a softmax
    scores = [label.score for answer in found for label in answer.labels]
    assert all(0 <= score <= 1 for score in scores) == in_range


@pytest.mark.parametrize("kind", with_more(("bert", "roberta", "albert"), "bert", "roberta"))
def test_pairs_are_classified_as_by_the_pipeline(tiny, kind):
    source = tiny.source(kind, "text-classification")
    pairs = [("The pump runs.", "The engine is warm."), ("a b c", "?")]
    classifier = pipeline("text-classification", source, top_k=None)
    expected = [classifier({"text": text, "text_pair": pair}) for text, pair in pairs]
    found = load_model(tiny.artifact(kind, "text-classification")).classify(pairs)
    for answer, reference in zip(found, expected, strict=True):
        assert answer.label == reference[0]["label"]
        assert answer.score == pytest.approx(reference[0]["score"], abs=SCORES)


def test_a_graph_of_fixed_batch_and_sequence_gets_full_feeds(tiny):
    artifact = tiny.artifact("bert", "text-classification")
    graph = artifact.manifest.graphs[0]
    fixed = tuple(type(spec)(spec.name, spec.dtype, (4, 64)) for spec in graph.inputs)
    record = graph.model_copy(update={"inputs": fixed})
    manifest = artifact.manifest.model_copy(update={"graphs": (record,)})
    model = load_model(type(artifact)(artifact.path, manifest))
    shapes = []
    run = model._runner.__class__.__call__

    class Watched(model._runner.__class__):
        def __call__(self, feeds, outputs):
            shapes.extend(array.shape for array in feeds.values())
            return run(self, feeds, outputs)

    model._runner.__class__ = Watched
    found = model.classify(TEXTS)
    assert set(shapes) == {(4, 64)}
    for answer, expected in zip(found, load_model(artifact).classify(TEXTS), strict=True):
        assert answer.label == expected.label
        assert answer.score == pytest.approx(expected.score, abs=SCORES)


def test_top_k_keeps_the_best_labels(tiny):
    model = load_model(tiny.artifact("bert", "text-classification"))
    whole, best = model.classify(TEXTS[:1])[0], model.classify(TEXTS[:1], top_k=1)[0]
    assert best.labels == whole.labels[:1]
    assert best.to_dict() == {"labels": [{"label": best.label, "score": best.score}]}


@pytest.mark.parametrize("aggregation", ["none", "simple", "first", "average", "max"])
@pytest.mark.parametrize("kind", with_more(TEXT_KINDS, "bert", "roberta"))
def test_tags_equal_the_pipeline(tiny, kind, aggregation):
    source = tiny.source(kind, "token-classification")
    texts = [text for text in TEXTS if text]
    tagger = pipeline("token-classification", source, aggregation_strategy=aggregation)
    expected = [tagger(text) for text in texts]
    found = load_model(tiny.artifact(kind, "token-classification")).tag(
        texts, aggregation=aggregation
    )
    name = "entity" if aggregation == "none" else "entity_group"
    for text, spans, reference in zip(texts, found, expected, strict=True):
        assert [(s.label, s.start, s.end) for s in spans] == [
            (r[name], r["start"], r["end"]) for r in reference
        ]
        np.testing.assert_allclose(
            [s.score for s in spans], [r["score"] for r in reference], atol=SCORES
        )
        assert all(s.text == text[s.start : s.end] for s in spans)
    assert sum(len(spans) for spans in found) > 5


CONTEXT = (
    "Marie Curie lived in Paris, not far from the Seine. The engine is warm and the pump runs "
    "again. Who built the bridge over the river in London? Nobody knows, but Ada wrote about it. "
)
QUESTIONS = [
    ("Who lived in Paris?", CONTEXT),
    ("Where is the bridge?", CONTEXT * 6),  # several windows
    ("Wo ist die Brücke?", "Über die Brücke in Köln fährt kein Zug, sagt Jürgen."),
]


# Optimum does not export ModernBERT for question answering.
@pytest.mark.parametrize("allow_none", [False, True])
@pytest.mark.parametrize(
    "kind", with_more([kind for kind in TEXT_KINDS if kind != "modernbert"], "bert", "roberta")
)
def test_question_answers_equal_the_pipeline(tiny, kind, allow_none):
    source = tiny.source(kind, "question-answering")
    reader = pipeline("question-answering", source)
    found = load_model(tiny.artifact(kind, "question-answering")).answer(
        QUESTIONS, top_k=3, allow_none=allow_none
    )
    for (question, context), answers in zip(QUESTIONS, found, strict=True):
        reference = reader(
            question=question, context=context, top_k=3, handle_impossible_answer=allow_none
        )
        reference = reference if isinstance(reference, list) else [reference]
        assert [(a.text, a.start, a.end) for a in answers] == [
            (r["answer"], r["start"], r["end"]) for r in reference
        ]
        np.testing.assert_allclose(
            [a.score for a in answers], [r["score"] for r in reference], atol=SCORES
        )
        assert all(a.text == context[a.start : a.end] for a in answers)


def test_answers_keep_to_the_longest_answer(tiny):
    model = load_model(tiny.artifact("bert", "question-answering"))
    for answers in model.answer(QUESTIONS, top_k=5, max_tokens=1):
        assert all(" " not in answer.text for answer in answers)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        (("", CONTEXT), "question 0 is empty"),
        (("Who?", " "), "context 0 is empty"),
        (("Who?", 3), "context 0 is an int"),
        ("Who?", "expected \\(question, context\\)"),
        (("why " * 300, CONTEXT), "question 0 is too long"),
    ],
)
def test_unusable_questions_are_rejected(tiny, question, message):
    model = load_model(tiny.artifact("bert", "question-answering"))
    with pytest.raises(InputError, match=message):
        model([question])


@pytest.mark.parametrize("kind", with_more(TEXT_KINDS, "bert", "roberta"))
def test_fillings_equal_the_pipeline(tiny, kind):
    source = tiny.source(kind, "fill-mask")
    filler = pipeline("fill-mask", source)
    mask = filler.tokenizer.mask_token
    texts = [f"The {mask} is warm.", f"Marie {mask} lived in {mask}, not far.", f"{mask} läuft"]
    found = load_model(tiny.artifact(kind, "fill-mask")).fill(texts, top_k=4)
    for text, fillings in zip(texts, found, strict=True):
        reference = filler(text, top_k=4)
        reference = reference if isinstance(reference[0], list) else [reference]
        assert len(fillings.masks) == text.count(mask)
        for row, expected in zip(fillings.masks, reference, strict=True):
            assert [(f.token_id, f.token, f.sequence) for f in row] == [
                (r["token"], r["token_str"], r["sequence"]) for r in expected
            ]
            np.testing.assert_allclose(
                [f.score for f in row], [r["score"] for r in expected], atol=SCORES
            )


def test_text_without_a_mask_is_an_error_with_the_mask_token(tiny):
    with pytest.raises(InputError, match=r"text 1 has no <mask>.*Write <mask>"):
        load_model(tiny.artifact("roberta", "fill-mask")).fill(["a <mask>", "none"])


def test_call_runs_the_models_task(tiny):
    model = load_model(tiny.artifact("bert", "text-classification"))
    assert model(TEXTS) == model.classify(TEXTS)
    reader = load_model(tiny.artifact("bert", "question-answering"))
    as_dict = {"question": QUESTIONS[0][0], "context": CONTEXT}
    assert reader([as_dict]) == reader.answer(QUESTIONS[:1])


def test_method_of_another_task_names_the_right_one(tiny):
    model = load_model(tiny.artifact("bert", "text-classification"))
    with pytest.raises(InputError, match=r"exported for text-classification.*Call classify\(\)"):
        model.embed(["x"])
    with pytest.raises(InputError, match=r"Call classify\(\)"):
        model.classify_images([])


@pytest.mark.parametrize(
    ("texts", "message"),
    [
        ("one text", "found one text, expected a list"),
        (["a", 3], "text 1 is an int"),
        (["a", "b", None], "text 2 is None"),
        (["a", ("b", 3)], "text 1 is an int"),
        ([("a", "b", "c")], "text 0 is a tuple"),
    ],
)
def test_inputs_that_are_not_texts_are_rejected_by_index(tiny, texts, message):
    with pytest.raises(InputError, match=message):
        load_model(tiny.artifact("bert", "text-classification")).classify(texts)


def test_an_empty_list_has_an_empty_answer(tiny):
    assert load_model(tiny.artifact("bert", "text-classification")).classify([]) == []
    assert load_model(tiny.artifact("bert", "token-classification")).tag([]) == []
    assert load_model(tiny.artifact("bert", "question-answering")).answer([]) == []
    assert load_model(tiny.artifact("bert", "fill-mask")).fill([]) == []
    embedder = load_model(tiny.artifact("bert", "feature-extraction"))
    assert embedder.embed([]).shape == (0, 32)


def test_batches_do_not_change_answers_or_their_order(tiny):
    model = load_model(tiny.artifact("deberta-v2", "text-classification"))
    texts = [f"{word} " * (1 + index % 7) for index, word in enumerate(TEXTS * 15)]
    together = [c.to_dict() for c in model.classify(texts)]
    alone = [model.classify([text])[0].to_dict() for text in texts]
    for one, other in zip(together, alone, strict=True):
        assert [x["label"] for x in one["labels"]] == [x["label"] for x in other["labels"]]
        np.testing.assert_allclose(
            [x["score"] for x in one["labels"]], [x["score"] for x in other["labels"]], atol=SCORES
        )


def test_a_missing_tokenizer_says_how_to_get_one(tiny, altered):
    artifact = altered(tiny.artifact("bert", "text-classification"), {"tokenizer.json": None})
    with pytest.raises(ArtifactError, match=r"no tokenizer\.json.*save_pretrained"):
        load_model(artifact)


def test_a_task_without_answers_is_rejected(tiny):
    with pytest.raises(ArtifactError, match="exported for text-generation, which is not"):
        load_model(tiny.artifact("gpt2", "text-generation"))


def test_a_failed_artifact_is_rejected(tiny, altered):
    from enginery.core.errors import RejectedArtifactError

    artifact = altered(tiny.artifact("bert", "text-classification"), {})
    failed = artifact.annotate(verdict(artifact, passed=False, summary="off by 3"), b"{}")
    with pytest.raises(RejectedArtifactError, match="off by 3"):
        load_model(failed.path)
    assert load_model(failed.path, allow_failed=True).classify(["x"])
