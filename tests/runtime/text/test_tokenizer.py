"""Texts become the same ids, types, masks and offsets as with transformers' tokenizers."""

from __future__ import annotations

import json
import shutil

import numpy as np
import pytest

from enginery.core.artifact.manifest import GraphRecord, PaddingRecord
from enginery.core.errors import ArtifactError, InputError
from enginery.core.shapes import TensorSpec
from enginery.runtime.text.tokenizer import TextTokenizer, check_texts
from tests.tiny import MAX_POSITIONS, TEXT_KINDS, save_tiny

TEXTS = ["The Engine is warm, isn't it?", "", " über  Köln 引擎 x/y", "the [MASK] <mask> </s>"]
INPUTS = tuple(
    TensorSpec(name, "int64", ("batch", "sequence"))
    for name in ("input_ids", "attention_mask", "token_type_ids")
)


@pytest.fixture(scope="module")
def directories(tmp_path_factory):
    root = tmp_path_factory.mktemp("tokenizers")
    return {kind: save_tiny(kind, "feature-extraction", root / kind) for kind in TEXT_KINDS}


@pytest.mark.parametrize("kind", TEXT_KINDS)
def test_feeds_equal_transformers(directories, kind):
    from transformers import AutoTokenizer

    reference = AutoTokenizer.from_pretrained(directories[kind])(
        TEXTS, padding=True, return_tensors="np", return_token_type_ids=True
    )
    tokenizer = TextTokenizer.open(directories[kind])
    found = tokenizer.feeds(tokenizer.encode(TEXTS), INPUTS)
    for name, array in found.items():
        assert array.dtype == np.int64
        np.testing.assert_array_equal(array, reference[name], err_msg=name)


@pytest.mark.parametrize("kind", TEXT_KINDS)
def test_texts_are_cut_at_the_positions_of_the_model(directories, kind, tmp_path):
    import torch
    from transformers import AutoModel

    directory = shutil.copytree(directories[kind], tmp_path / kind)
    _edit(directory / "tokenizer_config.json", model_max_length=int(1e30))
    tokenizer = TextTokenizer.open(directory)
    assert tokenizer.limit == MAX_POSITIONS
    encoding = tokenizer.encode(["pump " * 500])[0]
    assert len(encoding.ids) == MAX_POSITIONS
    assert encoding.overflowing
    model = AutoModel.from_pretrained(directories[kind]).eval()
    ids = torch.tensor([encoding.ids])
    with torch.no_grad():
        model(input_ids=ids)  # the longest that the model takes
        if kind not in ("deberta-v2", "modernbert"):  # relative positions have no hard end
            with pytest.raises((IndexError, RuntimeError)):
                model(input_ids=torch.cat([ids, ids[:, 1:2]], dim=1))


@pytest.mark.parametrize(
    ("settings", "sentence", "limit"),
    [
        ({"model_max_length": 20}, {}, 20),
        ({"model_max_length": 1e30}, {}, MAX_POSITIONS),
        ({"model_max_length": 20}, {"max_seq_length": 12}, 12),
        ({"model_max_length": 12}, {"max_seq_length": 20}, 20),  # sentence-transformers sets it
        ({"model_max_length": 512}, {"max_seq_length": 256}, MAX_POSITIONS),
    ],
)
def test_limit_is_that_of_the_files_and_of_positions(
    directories, tmp_path, settings, sentence, limit
):
    directory = shutil.copytree(directories["roberta"], tmp_path / "model")
    _edit(directory / "tokenizer_config.json", **settings)
    (directory / "sentence_bert_config.json").write_text(json.dumps(sentence))
    assert TextTokenizer.open(directory).limit == limit


def test_saved_padding_and_truncation_are_dropped(directories, tmp_path):
    from tokenizers import Tokenizer

    directory = shutil.copytree(directories["bert"], tmp_path / "model")
    saved = Tokenizer.from_file(str(directory / "tokenizer.json"))
    saved.enable_padding(length=64)
    saved.enable_truncation(max_length=4)
    saved.save(str(directory / "tokenizer.json"))
    fresh, plain = TextTokenizer.open(directory), TextTokenizer.open(directories["bert"])
    assert [e.ids for e in fresh.encode(TEXTS)] == [e.ids for e in plain.encode(TEXTS)]


def test_lower_casing_follows_the_tokenizer_config_as_in_transformers(directories, tmp_path):
    from transformers import AutoTokenizer

    directory = shutil.copytree(directories["bert"], tmp_path / "model")
    _edit(directory / "tokenizer_config.json", do_lower_case=False)
    expected = AutoTokenizer.from_pretrained(directory)(TEXTS)["input_ids"]
    assert [e.ids for e in TextTokenizer.open(directory).encode(TEXTS)] == expected
    assert expected != [e.ids for e in TextTokenizer.open(directories["bert"]).encode(TEXTS)]


def test_padding_is_on_the_side_that_the_tokenizer_names(directories, tmp_path):
    directory = shutil.copytree(directories["bert"], tmp_path / "model")
    _edit(directory / "tokenizer_config.json", padding_side="left")
    tokenizer = TextTokenizer.open(directory)
    encodings = tokenizer.encode(["the pump", "the"])
    feeds = tokenizer.feeds(encodings, INPUTS)
    assert feeds["attention_mask"].tolist() == [[1, 1, 1, 1], [0, 1, 1, 1]]
    assert tokenizer.strip_padding(feeds["input_ids"][1], encodings[1]).tolist() == encodings[1].ids


def test_padding_is_as_the_graph_was_measured(directories):
    tokenizer = TextTokenizer.open(directories["bert"])
    record = GraphRecord(file="model.onnx", opset=20, inputs=INPUTS, outputs=(), data_files=())
    assert tokenizer.for_graph(record) == tokenizer
    padding = PaddingRecord(side="left", token_id=5)
    left = tokenizer.for_graph(record.model_copy(update={"padding": padding}))
    encodings = left.encode(["the pump", "the"])
    feeds = left.feeds(encodings, INPUTS)
    assert feeds["input_ids"].tolist() == [encodings[0].ids, [5, *encodings[1].ids]]
    padding = PaddingRecord(side="none")
    apart = tokenizer.for_graph(record.model_copy(update={"padding": padding}))
    assert not apart.can_pad(INPUTS)
    with pytest.raises(InputError, match="but the model's outputs depend on padding"):
        apart.feeds(encodings, INPUTS)


def test_the_padding_token_is_that_of_the_model(directories, tmp_path):
    directory = shutil.copytree(directories["bert"], tmp_path / "model")
    own = TextTokenizer.open(directory).pad_id
    for token_id, expected in ((own + 1, own + 1), (-1, own), (10**6, own), (None, own)):
        _edit(directory / "config.json", pad_token_id=token_id)
        assert TextTokenizer.open(directory).pad_id == expected


def test_types_that_the_tokenizer_does_not_name_are_zeros(directories, tmp_path):
    directory = shutil.copytree(directories["bert"], tmp_path / "model")
    names = ("input_ids", "token_type_ids")
    spec = tuple(TensorSpec(name, "int64", ("batch", "sequence")) for name in names)
    pair = [("the pump", "the")]
    tokenizer = TextTokenizer.open(directory)
    assert tokenizer.feeds(tokenizer.encode(pair), spec)["token_type_ids"].any()
    _edit(directory / "tokenizer_config.json", model_input_names=["input_ids", "attention_mask"])
    tokenizer = TextTokenizer.open(directory)
    assert not tokenizer.feeds(tokenizer.encode(pair), spec)["token_type_ids"].any()


def test_token_ids_have_the_types_of_the_special_tokens(directories, tmp_path):
    directory = shutil.copytree(directories["bert"], tmp_path / "model")
    file = directory / "tokenizer.json"
    document = json.loads(file.read_text(encoding="utf-8"))
    for part in document["post_processor"]["single"]:
        # Funnel's classification token has the type 2.
        if part.get("SpecialToken", {}).get("id") == "[CLS]":
            part["SpecialToken"]["type_id"] = 2
    file.write_text(json.dumps(document), encoding="utf-8")
    tokenizer = TextTokenizer.open(directory)
    (encoding,) = tokenizer.encode(["the pump"])
    assert encoding.type_ids == [2, 0, 0, 0]
    for ids in (encoding.ids, encoding.ids[1:-1]):
        assert tokenizer.encode_ids(ids).type_ids == encoding.type_ids


def test_only_the_inputs_of_the_graph_are_fed(directories):
    tokenizer = TextTokenizer.open(directories["bert"])
    spec = (
        TensorSpec("input_ids", "int32", ("batch", 9)),
        TensorSpec("attention_mask", "int32", ("batch", 9)),
        TensorSpec("position_ids", "int64", ("batch", 9)),
    )
    feeds = tokenizer.feeds(tokenizer.encode(["the pump"]), spec)
    assert {name: (array.dtype.name, array.shape) for name, array in feeds.items()} == {
        "input_ids": ("int32", (1, 9)),
        "attention_mask": ("int32", (1, 9)),
        "position_ids": ("int64", (1, 9)),
    }
    assert feeds["position_ids"][0, :4].tolist() == [0, 1, 2, 3]
    with pytest.raises(InputError, match="has 4 tokens, but the graph takes exactly 3"):
        tokenizer.feeds(
            tokenizer.encode(["the pump"]), (TensorSpec("input_ids", "int64", ("batch", 3)),)
        )
    with pytest.raises(ArtifactError, match="pixel_values"):
        tokenizer.feeds(
            tokenizer.encode(["x"]), (TensorSpec("pixel_values", "float32", ("batch",)),)
        )


def test_without_attention_mask_nothing_is_padded(directories):
    tokenizer = TextTokenizer.open(directories["bert"])
    assert not tokenizer.can_pad(INPUTS[:1])
    with pytest.raises(InputError, match="no attention_mask"):
        tokenizer.feeds(tokenizer.encode(["the pump", "the"]), INPUTS[:1])


def test_a_broken_tokenizer_is_named(tmp_path):
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"tokenizer\.json cannot be read"):
        TextTokenizer.open(tmp_path)


def _edit(file, **changes):
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))


def test_text_with_a_lone_surrogate_is_rejected_by_its_index():
    with pytest.raises(InputError, match="text 1 contains a lone surrogate"):
        check_texts(["fine", "broken \udcff"])


def test_long_text_is_complete_without_truncation(directories):
    tokenizer = TextTokenizer.open(directories["bert"])
    tokenizer.backend.no_truncation()  # as lengths of data are measured
    (encoding,) = tokenizer.encode(["pump " * 5000])
    assert len(encoding.ids) == 5002
