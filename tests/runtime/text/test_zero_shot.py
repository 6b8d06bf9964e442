"""Zero-shot classification equals transformers' pipeline."""

import tracemalloc

import numpy as np
import pytest
import transformers

from enginery import export_model, load_model
from enginery.core.errors import InputError
from enginery.predict.config import PredictConfig
from enginery.predict.task_inputs import read_options
from enginery.runtime.tasks.classify import Classify
from tests.natural_language_inference import save_nli
from tests.tiny import TEXT

LABELS = ["machines", "animals", "the weather", "food and drink", "music"]


@pytest.fixture(scope="module")
def judge(tmp_path_factory, session_home):
    """`judge("last")`: the source of a model of natural language inference, and the model."""
    made = {}

    def make(kind, family="bert"):
        if (kind, family) not in made:
            folder = save_nli(kind, family, tmp_path_factory.mktemp("nli") / family)
            made[kind, family] = (folder, load_model(export_model(str(folder))))
        return made[kind, family]

    yield make
    for _, model in made.values():
        model.close()


@pytest.mark.parametrize(
    ("kind", "family"), [("last", "bert"), ("first", "bert"), ("two", "bert"), ("last", "roberta")]
)
@pytest.mark.parametrize("multi_label", [False, True])
@pytest.mark.parametrize("template", ["This example is {}.", "It is about {}, I think"])
def test_scores_are_those_of_the_pipeline(judge, kind, family, multi_label, template):
    source, model = judge(kind, family)
    options = {"multi_label": multi_label, "hypothesis_template": template}
    reference = transformers.pipeline("zero-shot-classification", model=str(source), device="cpu")
    texts = [text for text in TEXT if text.strip()][:8]
    expected = reference(texts, candidate_labels=LABELS, **options)
    for answer, wanted in zip(model.zero_shot(texts, LABELS, **options), expected, strict=True):
        np.testing.assert_allclose(
            [label.score for label in answer.labels], wanted["scores"], atol=2e-6
        )
        scores = dict(zip(wanted["labels"], wanted["scores"], strict=True))
        for label in answer.labels:
            assert scores[label.label] == pytest.approx(label.score, abs=2e-6)


def test_one_label_is_judged_by_itself(judge):
    source, model = judge("last")
    reference = transformers.pipeline("zero-shot-classification", model=str(source), device="cpu")
    expected = reference(TEXT[0], candidate_labels=["machines"])
    (answer,) = model.zero_shot([TEXT[0]], ["machines"])
    assert answer.score == pytest.approx(expected["scores"][0], abs=2e-6)


def test_commas_divide_labels_that_are_one_text(judge):
    source, model = judge("last")
    reference = transformers.pipeline("zero-shot-classification", model=str(source), device="cpu")
    expected = reference(TEXT[0], candidate_labels="machines, birds")["labels"]
    (answer,) = model.zero_shot([TEXT[0]], "machines, birds")
    assert [label.label for label in answer.labels] == expected
    for given, labels in (
        (("machines, birds",), ["machines", "birds"]),
        (("machines, birds", "x"), ["machines, birds", "x"]),
    ):
        config = PredictConfig(candidate_labels=given)
        assert read_options(Classify, config).candidate_labels == labels


def test_a_text_has_the_answer_that_it_has_alone(judge):
    _, model = judge("last")
    together = model.zero_shot(TEXT[:5], LABELS)
    for text, answer in zip(TEXT[:5], together, strict=True):
        (alone,) = model.zero_shot([text], LABELS)
        for label, other in zip(answer.labels, alone.labels, strict=True):
            assert (label.label, label.score) == (other.label, pytest.approx(other.score, abs=1e-6))


@pytest.mark.parametrize(
    ("labels", "options", "message"),
    [
        ([], {}, "no label is given"),
        (["a", " "], {}, "candidate_labels: a label is empty"),
        (["a"], {"hypothesis_template": "This is."}, r"expected a text with one '\{\}'"),
        (["a"], {"hypothesis_template": "{} {}"}, r"expected a text with one '\{\}'"),
        (["a"], {"hypothesis_template": "{0} {}"}, r"expected a text with one '\{\}'"),
        (["a"] * 101, {}, "candidate_labels: found a list, expected a list of 1 to 100"),
        ([3], {}, "candidate_labels"),
    ],
)
def test_what_cannot_be_asked_is_an_error(judge, labels, options, message):
    _, model = judge("last")
    with pytest.raises(InputError, match=message):
        model.zero_shot(["warm"], labels, **options)


def test_labels_are_given_once(judge):
    _, model = judge("last")
    with pytest.raises(TypeError, match="candidate_labels"):
        model.zero_shot(["warm"], ["a"], candidate_labels=["b"])


def test_texts_have_a_limit_with_all_their_labels(judge):
    _, model = judge("last")
    with pytest.raises(InputError, match="100 labels each have"):
        model.zero_shot(["warm " * 20_000], [str(number) for number in range(100)])
    template = "x" * 8_000_000 + "{}"
    tracemalloc.start()
    with pytest.raises(InputError, match="100 labels each have"):
        model.zero_shot(
            ["warm"], [str(number) for number in range(100)], hypothesis_template=template
        )
    assert tracemalloc.get_traced_memory()[1] < 50_000_000, "the hypotheses are not made first"
    tracemalloc.stop()
    with pytest.raises(InputError, match="text 0"):
        model.zero_shot([("warm", "cold")], ["a"])


def test_a_model_of_other_labels_is_refused(exported):
    with (
        load_model(exported("bert", "text-classification")) as model,
        pytest.raises(InputError, match="none begins with 'entail'"),
    ):
        model.zero_shot(["warm"], ["a"])
    with (
        load_model(exported("bert", "feature-extraction")) as model,
        pytest.raises(InputError, match="was exported for feature-extraction"),
    ):
        model.zero_shot(["warm"], ["a"])
