"""The routes and shapes of text-embeddings-inference."""

import json

import numpy as np
import pytest
from huggingface_hub import InferenceClient
from huggingface_hub.utils import reset_sessions

from enginery import export_model, load_model
from enginery.runtime.tasks.embed import VectorOptions, finish_vectors
from enginery.serve.config import ServeConfig
from enginery.serve.models import served_model
from tests.serve.conftest import Running
from tests.serve.doubles import StandInModel, application, ask
from tests.tolerances import LARGER, OUTPUTS, SCORES

TEXTS = ["The engine is warm.", "Nobody knows."]


@pytest.fixture(scope="module")
def vectors(tiny_paths):
    with load_model(tiny_paths("vectors")["vectors"]) as model:
        return model.embed(TEXTS)


def test_embed_gives_unit_vectors_unless_told_otherwise(running_one, vectors):
    key = {"x-api-key": "s3cret"}
    found = running_one("POST", "/embed", {"inputs": TEXTS}, headers=key).json
    norms = np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(found, vectors / norms, atol=SCORES)
    raw = running_one("POST", "/embed", {"inputs": TEXTS, "normalize": False}, headers=key).json
    np.testing.assert_allclose(raw, vectors, atol=OUTPUTS)
    assert abs(norms - 1).max() > 0.1  # else the two are one


def test_embed_of_one_text_is_a_list_of_one(running, vectors):
    found = running("POST", "/models/vectors/embed", {"inputs": TEXTS[0], "dimensions": 5}).json
    wanted = vectors[:1, :5] / np.linalg.norm(vectors[0, :5])
    np.testing.assert_allclose(found, wanted, atol=OUTPUTS)


def test_model_is_named_by_the_body_or_the_path_when_there_are_several(running):
    by_body = running("POST", "/embed", {"inputs": "a", "model": "vectors"})
    by_path = running("POST", "/models/vectors/embed", {"inputs": "a"})
    assert running("POST", "/models/vectors", {"inputs": "a"}).json == by_path.json
    np.testing.assert_allclose(by_body.json, by_path.json, atol=SCORES)
    assert running("POST", "/models/nobody/embed", {"inputs": "a"}).status == 404


QUERY = {"query": "a", "texts": ["b"]}


@pytest.mark.parametrize(
    ("path", "body", "model"),
    [
        ("/embed", {"inputs": "a"}, "vectors"),
        ("/similarity", {"inputs": {"source_sentence": "a", "sentences": ["b"]}}, "vectors"),
        ("/rerank", QUERY, "ranker"),
        ("/v1/embeddings", {"input": "a"}, "vectors"),
    ],
)
def test_without_a_name_the_only_fitting_model_is_used(running, path, body, model):
    found = running("POST", path, body)
    assert found.status == 200, found.json
    assert found.json == running("POST", path, {**body, "model": model}).json


def test_without_a_name_those_that_fit_are_named(running):
    found = running("POST", "/predict", {"inputs": "a"})
    assert (found.status, found.json["error_type"]) == (422, "Validation")
    assert found.json["error"] == (
        "the server has 2 models for this route, but the request names none. "
        "Name one of mood, ranker."
    )
    found = running("POST", "/", {"inputs": "a"})
    assert "Name one of vectors, mood, ranker." in found.json["error"]


def test_without_a_name_and_a_model_that_fits_all_are_named():
    mood, photos = StandInModel("mood", "classify"), StandInModel("photos", "classify_images")
    found = ask(application(mood, photos), "POST", "/embed", {"inputs": "a"})
    assert (found.status, found.json["error"]) == (
        422,
        "none of the server's 2 models supports this route, expected one exported for "
        "feature-extraction. "
        "Models: mood (text-classification), photos (image-classification).",
    )
    labels = {"id2label": {"0": "a", "1": "b"}}
    two = application(StandInModel("mood", "classify", config=labels), StandInModel("words"))
    assert "supports this route" in ask(two, "POST", "/rerank", QUERY).json["error"]
    only = ask(application(photos), "POST", "/embed", {"inputs": "a"})
    assert "expected a model that embeds texts" in only.json["error"]


@pytest.mark.parametrize(
    ("path", "body", "wanted"),
    [
        ("/embed", {}, True),
        ("/embed", {"normalize": True}, True),
        ("/embed", {"normalize": False}, False),
        ("/predict/minilm", {}, None),
        ("/predict/minilm", {"parameters": {"normalize": True}}, True),
        ("/predict/minilm", {"parameters": {"normalize": False}}, False),
    ],
)
def test_normalize_reaches_the_model(path, body, wanted):
    model = StandInModel()
    assert ask(application(model), "POST", path, {"inputs": "a", **body}).status == 200
    assert model.calls[0][1].normalize is wanted


def test_content_type_does_not_matter(running):
    body = b'{"inputs": "a", "model": "vectors"}'
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        assert running("POST", "/embed", body, headers={"content-type": kind}).status == 200


def test_compressed_body_is_refused(running):
    headers = {"content-encoding": "gzip"}
    found = running("POST", "/embed", b"\x1f\x8b", headers=headers)
    assert (found.status, "'gzip'" in found.json["error"]) == (400, True)


@pytest.mark.parametrize(
    ("body", "status", "kind", "message"),
    [
        ({"inputs": []}, 400, "Empty", "inputs is empty"),
        ({"inputs": [[]]}, 400, "Empty", "inputs[0] is empty"),
        ({"inputs": "a", "truncation_direction": "Left"}, 422, "Validation", "found left"),
        ({"inputs": "a", "truncation_direction": "up"}, 422, "Validation", "'up'"),
        ({"inputs": "a", "normalize": "yes"}, 422, "Validation", "expected true or false"),
        ({"inputs": "a", "prompt_name": "query"}, 422, "Validation", "no prompt 'query'"),
        ({"inputs": "long " * 200, "truncate": False}, 413, "Validation", "128 tokens"),
        ({"inputs": ["a"] * 65}, 413, "Validation", "65 inputs"),
        ({"inputs": [600]}, 422, "Validation", "token id 600, expected whole numbers from 0 to"),
    ],
)
def test_embed_refuses(running, body, status, kind, message):
    found = running("POST", "/models/vectors/embed", body)
    assert (found.status, found.json["error_type"]) == (status, kind)
    assert message in found.json["error"]


def test_long_text_is_cut_where_the_request_says_so(running):
    long = "long " * 200
    assert (
        running("POST", "/models/vectors/embed", {"inputs": long, "truncate": True}).status == 200
    )


def test_predict_of_one_is_a_list_of_labels_best_first(running, tiny_paths):
    with load_model(tiny_paths("mood")["mood"]) as model:
        wanted = model.classify([TEXTS[0], ("a", "b")])
    one = running("POST", "/models/mood/predict", {"inputs": TEXTS[0]}).json
    assert [item["label"] for item in one] == [label.label for label in wanted[0].labels]
    np.testing.assert_allclose(
        [item["score"] for item in one], [label.score for label in wanted[0].labels], atol=SCORES
    )
    assert running("POST", "/models/mood/predict", {"inputs": [TEXTS[0]]}).json == one
    pair = running("POST", "/models/mood/predict", {"inputs": ["a", "b"]}).json
    np.testing.assert_allclose(pair[0]["score"], wanted[1].score, atol=SCORES)


def test_predict_of_a_batch_mixes_texts_and_pairs(running):
    found = running("POST", "/models/mood/predict", {"inputs": [[TEXTS[0]], ["a", "b"]]}).json
    single = [
        running("POST", "/models/mood/predict", {"inputs": i}).json for i in (TEXTS[0], ["a", "b"])
    ]
    for got, want in zip(found, single, strict=True):
        assert [item["label"] for item in got] == [item["label"] for item in want]
        np.testing.assert_allclose(
            [i["score"] for i in got], [i["score"] for i in want], atol=SCORES
        )


def test_predict_raw_scores_are_logits(running):
    raw = running("POST", "/models/mood/predict", {"inputs": "a", "raw_scores": True}).json
    soft = running("POST", "/models/mood/predict", {"inputs": "a"}).json
    scores = np.exp([item["score"] for item in raw])
    np.testing.assert_allclose(scores / scores.sum(), [i["score"] for i in soft], atol=SCORES)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (["a", "b", "c"], "inputs: found a list, expected at most 2 items"),
        ([["a"], "b"], "inputs[1]"),
        ([["a", 1]], "inputs[0][1]: found the number 1"),
        (3, "found the number 3"),
        ([["a", "b", "c"]], "inputs[0]: found a list, expected at most 2 items"),
        ([None], "inputs[0]: found null"),
    ],
)
def test_predict_rejects_inputs_other_than_texts_and_pairs(running, inputs, message):
    found = running("POST", "/models/mood/predict", {"inputs": inputs})
    assert (found.status, found.json["error_type"]) == (422, "Validation")
    assert message in found.json["error"]


def test_wrong_task_says_where_to_go(running):
    found = running("POST", "/models/mood/embed", {"inputs": "a"})
    assert found.status == 422
    assert found.json["error"].endswith("It classifies texts: POST /predict/mood.")


def test_rerank_sorts_by_score(running):
    texts = ["a small cat", "the rain is cold", "Paris"]
    body = {"query": "Who sleeps?", "texts": texts}
    found = running("POST", "/models/ranker/rerank", body).json
    scores = [item["score"] for item in found]
    assert scores == sorted(scores, reverse=True)
    assert sorted(item["index"] for item in found) == [0, 1, 2]
    assert set(found[0]) == {"index", "score"}
    with_text = running("POST", "/models/ranker/rerank", {**body, "return_text": True}).json
    assert all(item["text"] == texts[item["index"]] for item in with_text)
    raw = running("POST", "/models/ranker/rerank", {**body, "raw_scores": True}).json
    logits = {item["index"]: item["score"] for item in raw}
    for item in found:
        sigmoid = 1 / (1 + np.exp(-logits[item["index"]]))
        assert item["score"] == pytest.approx(sigmoid, abs=SCORES)


@pytest.mark.parametrize(("raw", "activation"), [(False, "auto"), (True, "none")])
def test_rerank_scores_a_pair_as_predict_does(raw, activation):
    config = {"id2label": {"0": "x"}, "problem_type": "regression"}
    model = StandInModel(verb="classify", config=config)
    ask(application(model), "POST", "/rerank", {"query": "a", "texts": ["b"], "raw_scores": raw})
    assert model.calls[0][1].activation == activation


def test_rerank_of_a_language_model_takes_an_instruction(reranker, home):
    artifact = export_model(str(reranker()))
    texts = ["a small cat", "the rain is cold"]
    with Running({"judge": artifact.path}, ServeConfig(access_log="off")) as server:
        body = {"query": "Who sleeps?", "texts": texts, "raw_scores": True}
        found = {item["index"]: item["score"] for item in server("POST", "/rerank", body).json}
        with load_model(artifact) as model:
            pairs = [("Who sleeps?", text) for text in texts]
            results = model.classify(pairs, activation="none")
        assert [found[0], found[1]] == pytest.approx([r.score for r in results], abs=SCORES)
        other = server("POST", "/rerank", {**body, "instruction": "Is it a plant?"}).json
        assert {item["index"]: item["score"] for item in other} != pytest.approx(found, abs=1e-3)
        alone = server("POST", "/predict/judge", {"inputs": "a small cat"})
        assert (alone.status, "Pass pairs" in alone.json["error"]) == (422, True)
        example = server("GET", "/models/judge/info").json["example"]
        assert server("POST", "/predict/judge", example).status == 200


def test_rerank_requires_a_model_with_one_label(running):
    found = running("POST", "/models/mood/rerank", {"query": "a", "texts": ["b"]})
    assert (found.status, "several labels" in found.json["error"]) == (422, True)
    empty = running("POST", "/models/ranker/rerank", {"query": "a", "texts": []})
    assert (empty.status, empty.json["error_type"]) == (400, "Empty")
    bare = running("POST", "/models/ranker/rerank", {"query": "a", "texts": "b"})
    assert (bare.status, "expected a list" in bare.json["error"]) == (422, True)


def test_similarity_is_the_cosine(running, vectors):
    inputs = {"source_sentence": TEXTS[0], "sentences": TEXTS}
    found = running("POST", "/models/vectors/similarity", {"inputs": inputs}).json
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(found, unit @ unit[0], atol=SCORES)


@pytest.mark.parametrize("path", ["", "/", "/similarity"])
def test_similarity_for_the_client_of_huggingface_hub(running_one, vectors, monkeypatch, path):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # the server is here
    reset_sessions()
    client = InferenceClient(model=f"{running_one.url}{path}", token="s3cret")
    try:
        found = client.sentence_similarity(TEXTS[0], other_sentences=TEXTS)
    finally:
        reset_sessions()
    unit = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    np.testing.assert_allclose(found, unit @ unit[0], atol=SCORES)


def test_tokens_have_byte_offsets_and_decode_to_the_text(running):
    text = "Où est la clé?"
    (found,) = running("POST", "/models/mood/tokenize", {"inputs": text}).json
    assert [found[0]["special"], found[-1]["special"]] == [True, True]
    assert set(found[0]) == {"id", "text", "special", "start", "stop"}
    assert (found[0]["start"], found[0]["stop"]) == (None, None)
    raw = text.encode()
    for token in found[1:-1]:
        assert raw[token["start"] : token["stop"]].decode() == token["text"]
    ids = [token["id"] for token in found]
    (decoded,) = running("POST", "/models/mood/decode", {"ids": ids}).json
    assert decoded == "ou est la cle?"  # the tokenizer's own normalizer
    (whole,) = running(
        "POST", "/models/mood/decode", {"ids": [ids], "skip_special_tokens": False}
    ).json
    assert whole.startswith("[CLS]")


def test_tokenize_cuts_nothing_and_leaves_special_tokens_out(running):
    body = {"inputs": ["warm " * 300, "warm"], "add_special_tokens": False}
    found = running("POST", "/models/mood/tokenize", body).json
    assert (len(found[0]), len(found[1])) == (300, 1)
    assert running("POST", "/models/mood/predict", {"inputs": "warm " * 300}).status == 200


def test_long_text_is_tokenized_in_a_thread(running):
    found = running("POST", "/models/mood/tokenize", {"inputs": "warm " * 10_000}).json
    assert len(found[0]) == 10_002


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("tokenize", {"inputs": []}),
        ("tokenize", {"inputs": "a", "prompt_name": "q"}),
        ("tokenize", {"inputs": ["a"] * 65}),
        ("decode", {"ids": []}),
        ("decode", {"ids": [[1], 2]}),
        ("decode", {"ids": [100_000]}),
        ("decode", {"ids": [True]}),
        ("decode", {"ids": [[1]] * 65}),
    ],
)
def test_tokenize_and_decode_refuse(running, path, body):
    assert running("POST", f"/models/mood/{path}", body).status in (400, 413, 422)


def test_image_model_has_no_tokenizer(running):
    found = running("POST", "/models/photos/tokenize", {"inputs": "a"})
    assert (found.status, "no tokenizer" in found.json["error"]) == (422, True)


def test_root_depends_on_the_task_of_the_only_model(running_one):
    key = {"authorization": "Bearer s3cret"}
    for path in ("/", "/invocations"):
        found = running_one("POST", path, {"inputs": "a"}, headers=key)
        assert (found.status, len(found.json[0])) == (200, 32)
    labels = application(StandInModel(verb="classify"))
    assert ask(labels, "POST", "/", {"inputs": "a"}).json[0] == {"score": 0.75, "label": "glad"}
    one = application(StandInModel(verb="classify", config={"id2label": {"0": "x"}}))
    assert ask(one, "POST", "/", {"query": "a", "texts": ["b"]}).json == [
        {"index": 0, "score": 0.75}
    ]


def test_info_has_teis_fields(running_one, running):
    info = running_one("GET", "/info", headers={"x-api-key": "s3cret"}).json
    assert info["model_type"] == {"embedding": {"pooling": "mean"}}
    assert (info["model_dtype"], info["max_input_length"]) == ("float32", 128)
    assert (info["max_client_batch_size"], info["auto_truncate"]) == (64, True)
    kinds = {
        name: running("GET", f"/models/{name}/info").json["model_type"]
        for name in ("mood", "ranker")
    }
    assert kinds["mood"]["classifier"]["label2id"]["glad"] == 2
    assert list(kinds["ranker"]) == ["reranker"]
    assert json.dumps(info)


def test_vectors_near_the_float32_limit_are_normalized():
    options = VectorOptions(normalize=True)
    (vector,) = finish_vectors([np.float32([3e38, 3e38])], options, model_normalizes=False)
    assert vector.dtype == np.float32
    assert vector == pytest.approx([0.5**0.5] * 2)


@pytest.mark.parametrize(
    ("path", "body", "message"),
    [
        ("/tokenize", {"inputs": "a " * 600_000}, "1200000 characters, expected at most 1048576"),
        ("/tokenize", {"inputs": ["a b " * 2500] * 60}, "tokens, expected at most 262144"),
        ("/tokenize", {"inputs": ["a"] * 65}, "found 65 inputs, expected at most 64"),
        ("/decode", {"ids": [[1] * 10_000] * 30}, "300000 tokens, expected at most 262144"),
    ],
    ids=["characters", "tokens", "inputs", "ids"],
)
def test_what_is_tokenized_or_decoded_is_counted_first(running, path, body, message):
    found = running("POST", path, {**body, "model": "vectors"})
    assert found.status == 413
    assert message in found.json["error"]


def test_tokens_of_a_long_text_are_those_of_its_pieces(running):
    """Their JSON is made in pieces."""
    text = "the pump " * 3000
    found = running("POST", "/tokenize", {"inputs": [text, "warm"], "model": "vectors"})
    long, short = found.json
    assert len(long) > 4096
    starts = [token["start"] for token in long if token["start"] is not None]
    assert starts == sorted(starts)
    assert "".join(token["text"] for token in short if not token["special"]) == "warm"


def test_too_many_token_ids_are_an_error(running):
    body = {"inputs": [1] * (2**18 + 1), "model": "vectors"}
    found = running("POST", "/embed", body)
    assert found.status == 422
    assert "at most 262144 items" in found.json["error"]


@pytest.mark.parametrize(
    "path", ["/embed", "/tokenize", "/v1/embeddings", "/v2/models/vectors/infer"]
)
def test_values_of_a_body_are_counted_before_it_is_parsed(running, path):
    body = b'{"model": "vectors", "inputs": [1' + b",1" * 2**20 + b"]}"
    found = running("POST", path, body)
    assert found.status == 413
    assert b"more than 1048576 values" in found.body


@pytest.mark.parametrize(
    "inputs",
    [b"[1]," * 2**17, b'{"a":1},' * 2**17, b"[" * 2**18, b'"",' * 2**17, b'"\\\\",[],' * 2**17],
    ids=["lists", "objects", "depth", "strings", "both"],
)
@pytest.mark.parametrize("path", ["/predict", "/v2/models/vectors/infer"])
def test_objects_of_a_body_are_counted_before_it_is_parsed(running, path, inputs):
    answer = running("POST", path, b'{"model": "vectors", "inputs": [' + inputs + b"[1]]}")
    assert answer.status == 413
    assert b"more than 131072 lists, objects and strings" in answer.body


def test_brackets_and_quotes_of_a_text_are_no_objects(running):
    text = '[{"' * 2**17
    assert running("POST", "/embed", {"model": "vectors", "inputs": [text]}).status == 200


DOCUMENTS = ["a small cat", {"text": "the rain is cold"}, "Paris"]


@pytest.mark.parametrize("path", ["/v1/rerank", "/v2/rerank", "/rerank", "/models/ranker/rerank"])
def test_documents_are_ranked_in_the_shape_of_cohere_and_jina(running, path):
    texts = ["a small cat", "the rain is cold", "Paris"]
    body = {"model": "ranker", "query": "Who sleeps?"}
    wanted = running("POST", "/models/ranker/rerank", {**body, "texts": texts}).json
    found = running("POST", path, {**body, "documents": DOCUMENTS}).json
    assert found["results"] == [
        {"index": item["index"], "relevance_score": pytest.approx(item["score"], abs=SCORES)}
        for item in wanted
    ]
    assert found["model"] == "ranker"
    assert found["id"].startswith("rerank-")
    assert found["usage"]["total_tokens"] > len(texts)
    best = running(
        "POST", path, {**body, "documents": DOCUMENTS, "top_n": 1, "return_documents": True}
    ).json["results"]
    assert [item["document"]["text"] for item in best] == [texts[wanted[0]["index"]]]


@pytest.mark.parametrize(
    ("change", "status", "message"),
    [
        ({"documents": []}, 400, "documents"),
        ({"documents": "a"}, 422, "documents"),
        ({"documents": [3]}, 422, "documents"),
        ({"documents": [{"title": "a"}]}, 422, "documents"),
        ({"top_n": 0}, 422, "top_n"),
        (
            {"rank_fields": ["title", "text"]},
            422,
            "rank_fields: found a list, expected at most 1 items",
        ),
        ({"max_tokens_per_doc": 100}, 422, "expected the model's limit, 128, or more"),
        (
            {"max_chunks_per_doc": 10},
            422,
            "max_chunks_per_doc: found the number 10, expected at most 1",
        ),
        ({"model": "mood"}, 422, "has several labels, expected a reranker"),
        ({"model": "nothing"}, 404, "nothing"),
    ],
)
def test_documents_that_cannot_be_ranked_are_an_error(running, change, status, message):
    body = {"model": "ranker", "query": "Who?", "documents": ["a"], **change}
    for path in ("/v1/rerank", "/rerank"):
        response = running("POST", path, body)
        assert (response.status, message in response.json["error"]) == (status, True)


def test_fields_of_cohere_that_change_nothing_are_taken(running):
    body = {"model": "ranker", "query": "Who?", "documents": ["a", "b"]}
    usual = {"rank_fields": ["text"], "max_tokens_per_doc": 4096, "max_chunks_per_doc": 1}
    found = running("POST", "/v1/rerank", {**body, **usual}).json["results"]
    assert found == running("POST", "/v1/rerank", body).json["results"]


def test_embed_all_has_a_vector_for_each_token(running, tiny_paths):
    with load_model(tiny_paths("vectors")["vectors"]) as model:
        expected = model.embed_tokens(TEXTS)
    for path in ("/embed_all", "/models/vectors/embed_all"):
        found = running("POST", path, {"inputs": TEXTS}).json
        for tokens, vectors in zip(found, expected, strict=True):
            np.testing.assert_allclose(tokens, vectors, atol=OUTPUTS, rtol=LARGER)
    assert len(running("POST", "/embed_all", {"inputs": [[5, 6]]}).json[0]) == 4


def test_embed_sparse_has_the_weights_above_zero(running, tiny_paths):
    with load_model(tiny_paths("filler")["filler"]) as model:
        expected = model.embed_sparse(TEXTS)
    found = running("POST", "/embed_sparse", {"inputs": TEXTS}).json
    for weights, vector in zip(found, expected, strict=True):
        assert [weight["index"] for weight in weights] == vector.indices.tolist()
        values = [weight["value"] for weight in weights]
        np.testing.assert_allclose(values, vector.values, atol=OUTPUTS, rtol=LARGER)


@pytest.mark.parametrize(
    ("path", "body", "status", "message"),
    [
        ("/embed_all", {"inputs": "a", "model": "mood"}, 422, "expected a model that embeds"),
        ("/embed_all", {"inputs": "a", "model": "pictures"}, 422, "expected a model that embeds"),
        ("/embed_sparse", {"inputs": "a", "model": "vectors"}, 422, "expected a model that fills"),
        ("/embed_all", {"inputs": "a", "prompt_name": "x"}, 422, "no prompt 'x'"),
        ("/embed_sparse", {"inputs": "long " * 200, "truncate": False}, 413, "128 tokens"),
    ],
)
def test_embed_all_and_embed_sparse_refuse(running, path, body, status, message):
    found = running("POST", path, body)
    assert found.status == status, found.json
    assert message in found.json["error"]


def test_results_are_counted_before_the_model_runs(running, monkeypatch):
    monkeypatch.setattr(served_model, "_MAX_NUMBERS", 1200)
    batches = running("GET", "/v2/models/stats").json
    found = running("POST", "/embed_all", {"inputs": ["the pump is warm"] * 9})
    assert (found.status, "expected at most 1200" in found.json["error"]) == (413, True)
    found = running("POST", "/embed_sparse", {"inputs": ["a"] * 3})
    assert (found.status, "up to 1800 numbers" in found.json["error"]) == (413, True)
    counts = {
        one["name"]: one["execution_count"]
        for one in running("GET", "/v2/models/stats").json["model_stats"]
    }
    assert counts == {one["name"]: one["execution_count"] for one in batches["model_stats"]}
    assert running("POST", "/embed_sparse", {"inputs": ["a"] * 2}).status == 200


def test_vectors_of_other_types(running, vectors):
    found = running("POST", "/embed", {"inputs": TEXTS, "model": "vectors", "dtype": "ubinary"})
    assert found.json == np.packbits(vectors > 0, axis=1).tolist()
    body = {"input": TEXTS, "model": "vectors", "dtype": "int8"}
    found = running("POST", "/v1/embeddings", {**body, "encoding_format": "float"}).json
    units = vectors / np.linalg.norm(vectors, axis=1, keepdims=True)
    for item, unit in zip(found["data"], units, strict=True):
        np.testing.assert_allclose(item["embedding"], 127 * unit, atol=0.6)
    found = running("POST", "/v1/embeddings", {**body, "encoding_format": "base64"})
    assert (found.status, "clients read as float32" in found.json["error"]["message"]) == (
        400,
        True,
    )
    tensors = {
        "inputs": [{"name": "text", "datatype": "BYTES", "shape": [1], "data": ["a"]}],
        "parameters": {"dtype": "int8"},
    }
    found = running("POST", "/v2/models/vectors/infer", tensors)
    assert (found.status, "is float32" in found.json["error"]) == (422, True)
