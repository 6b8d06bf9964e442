"""Language models that rerank: a query and a document in a prompt, and the logits of two tokens."""

import json
import shutil

import numpy as np
import pytest

from enginery import export_model, load_model, quantize_model, validate_model
from enginery.core.artifact.artifact import commit_artifact
from enginery.core.errors import ArtifactError, ExportError, InputError, SourceError
from enginery.publish.card.snippets import loading_snippets
from tests.tiny_reranker import FALSE_TOKEN, INSTRUCTION, SUFFIX, TRUE_TOKEN

PAIRS = [
    ("Who built the bridge?", "Ada Lovelace wrote about it."),
    ("engine", "The engine is warm and the pump runs again."),
    ("cat", "A small cat sleeps on the boat. " * 40),  # longer than the model takes
]


def reference_scores(source, pairs, *, two=True, instruction=INSTRUCTION):
    """The scores of sentence-transformers' LogitScore, from transformers alone."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(source)
    model = AutoModelForCausalLM.from_pretrained(source).eval()
    suffix = tokenizer(SUFFIX, add_special_tokens=False).input_ids
    scores = []
    for query, document in pairs:
        contents = {"system": instruction, "query": query, "document": document}
        messages = [{"role": role, "content": text} for role, text in contents.items()]
        ids = tokenizer.apply_chat_template(messages, add_generation_prompt=True)
        limit = tokenizer.model_max_length
        ids = ids if len(ids) <= limit else ids[: limit - len(suffix)] + suffix
        with torch.no_grad():
            logits = model(torch.tensor([ids])).logits[0, -1].double().numpy()
        scores.append(logits[TRUE_TOKEN] - (logits[FALSE_TOKEN] if two else 0))
    return np.array(scores)


def raw(model, pairs, **options):
    return np.array([r.score for r in model.classify(pairs, activation="none", **options)])


@pytest.mark.more
@pytest.mark.parametrize("two", [True, False])
@pytest.mark.parametrize("left", [True, False])
def test_scores_are_those_of_the_two_tokens(reranker, home, two, left):
    source = reranker(scored_by_two=two, pad_left=left)
    artifact = export_model(str(source))
    assert artifact.manifest.task == "text-classification"
    with load_model(artifact) as model:
        found = raw(model, PAIRS)
        np.testing.assert_allclose(found, reference_scores(source, PAIRS, two=two), atol=1e-5)
        assert np.ptp(found) > 0.01
        probabilities = [result.score for result in model.classify(PAIRS)]
        np.testing.assert_allclose(probabilities, 1 / (1 + np.exp(-found)), atol=1e-6)


def test_instruction_replaces_that_of_the_model(reranker, home):
    source = reranker()
    with load_model(export_model(str(source))) as model:
        found = raw(model, PAIRS[:2], instruction="Is it about animals?")
    wanted = reference_scores(source, PAIRS[:2], instruction="Is it about animals?")
    np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert abs(found - reference_scores(source, PAIRS[:2])).max() > 1e-3


def test_long_documents_are_counted_as_truncated_or_refused(reranker, home):
    with load_model(export_model(str(reranker()))) as model:
        model.classify(PAIRS)
        assert model.truncated == 1
        with pytest.raises(InputError, match="input 2 is too long"):
            model.classify(PAIRS, truncate=False)


def test_single_texts_are_refused_and_other_models_take_no_instruction(reranker, exported):
    with (
        load_model(export_model(str(reranker()))) as model,
        pytest.raises(InputError, match=r"text 1 is a single text.*Pass pairs"),
    ):
        model.classify([PAIRS[0], "alone"])
    with (
        load_model(exported("bert", "text-classification")) as model,
        pytest.raises(InputError, match="instruction: the model takes none"),
    ):
        model.classify(PAIRS[:1], instruction="x")


@pytest.mark.more
def test_a_reranker_validates_and_keeps_its_order_in_int8(reranker, home):
    artifact = export_model(str(reranker()))
    report = validate_model(artifact)
    assert report.passed, report.summary
    assert not [note for note in report.notes if "LogitScore" in note]
    int8 = quantize_model(artifact, scheme="dynamic", target="cpu")
    with load_model(artifact) as model, load_model(int8) as small:
        assert np.corrcoef(raw(model, PAIRS), raw(small, PAIRS))[0, 1] > 0.9


def test_snippets_of_a_card_pass_a_pair(reranker, home, tmp_path):
    artifact = export_model(str(reranker()), out=tmp_path / "reranker")
    code = loading_snippets(artifact, str(artifact.path))["enginery"]
    assert 'model.classify([("Who built the bridge?", "' in code
    exec(compile(code, "card", "exec"), {})


@pytest.fixture
def altered(reranker, tmp_path):
    """`altered("modules.json", {...})`: a reranker's directory with another file."""

    def make(name, content):
        source = shutil.copytree(reranker(), tmp_path / "altered", dirs_exist_ok=True)
        text = content if isinstance(content, str) else json.dumps(content)
        (source / name).write_text(text)
        return str(source)

    return make


def test_a_token_that_the_head_lacks_is_an_error(altered, home):
    source = altered("1_LogitScore/config.json", {"true_token_id": 10**6})
    with pytest.raises(ExportError, match=r"reads the logits of the tokens \[1000000\], but"):
        export_model(source)
    source = altered("1_LogitScore/config.json", {"false_token_id": 1})
    with pytest.raises((ExportError, ArtifactError), match="true_token_id"):
        export_model(source)


@pytest.mark.more
@pytest.mark.parametrize(
    ("template", "message"),
    [
        (
            "{% for m in messages %}{{ m.role }}{% endfor %}",
            "leaves out the messages of the roles 'query' and 'document', which a reranker needs.",
        ),
        ("{{ messages | nothing }}", "is invalid: No filter named 'nothing'."),
        (
            "{% for m in messages %}",
            "is invalid: Unexpected end of template, Jinja was looking for the following tags: "
            "'endfor' or 'else', The innermost block that needs to be closed is 'for'.",
        ),
    ],
)
def test_templates_that_render_no_pair_are_errors(altered, home, template, message):
    source = altered("chat_template.jinja", template)
    with pytest.raises(SourceError) as caught:
        export_model(source)
    assert caught.value.message == f"the chat template in {source}/chat_template.jinja {message}"


def test_template_that_was_replaced_in_an_artifact_is_an_error(reranker, home, tmp_path):
    artifact = export_model(str(reranker()), out=tmp_path / "artifact")
    (artifact.path / "chat_template.jinja").write_text("{{ messages | nothing }}")
    commit_artifact(artifact.path, artifact.manifest)
    with pytest.raises(ArtifactError, match="is invalid: No filter named 'nothing'"):
        load_model(artifact.path)


@pytest.mark.more
def test_content_may_be_a_list_of_parts(altered, reranker, home):
    structured = (reranker() / "chat_template.jinja").read_text()
    structured = structured.replace("message.content", "message.content[0].text")
    structured = structured.replace("| first }}", "| first | map(attribute='text') | first }}")
    with (
        load_model(export_model(altered("chat_template.jinja", structured))) as parts,
        load_model(export_model(str(reranker()))) as strings,
    ):
        np.testing.assert_allclose(raw(parts, PAIRS), raw(strings, PAIRS), atol=1e-6)
