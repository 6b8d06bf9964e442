"""Texts and images as a graph's inputs: what fits, what is cut, padded and repeated."""

from dataclasses import replace

import numpy as np
import pytest

from enginery.core.errors import ArtifactError, InputError
from enginery.core.shapes import TensorSpec
from enginery.runtime import sample_inputs as real_inputs
from enginery.runtime.builtin_inputs import SENTENCES, synthetic_images
from enginery.runtime.sample_inputs import (
    ImageFeeder,
    TextFeeder,
    fixed_batch,
    in_batches,
    pad_batch,
    takes_images,
    takes_real_inputs,
    takes_texts,
)
from enginery.runtime.text.tokenizer import TextTokenizer
from tests.tiny import TEXT


@pytest.fixture
def bert(exported):
    return exported("bert", "text-classification")


@pytest.fixture
def vit(exported):
    return exported("vit", "image-classification")


def graph(artifact):
    return artifact.manifest.graphs[0]


def with_dims(record, *dims):
    """The record with each input's dims set."""
    inputs = tuple(TensorSpec(spec.name, spec.dtype, dims) for spec in record.inputs)
    return record.model_copy(update={"inputs": inputs})


def with_inputs(record, *names):
    inputs = tuple(TensorSpec(name, "int64", ("batch", "sequence")) for name in names)
    return record.model_copy(update={"inputs": inputs})


def test_graph_takes_texts_or_images_or_neither(bert, vit):
    assert takes_texts(graph(bert))
    assert not takes_images(graph(bert))
    assert takes_images(graph(vit))
    assert not takes_texts(graph(vit))
    assert not takes_texts(with_inputs(graph(bert), "input_ids", "bbox"))
    assert not takes_texts(with_inputs(graph(bert), "attention_mask"))
    assert not takes_images(with_inputs(graph(vit), "pixel_values", "bool_masked_pos"))


@pytest.mark.parametrize(
    ("kind", "task", "file"),
    [
        ("bert", "text-classification", "tokenizer.json"),
        ("vit", "image-classification", "preprocessor_config.json"),
    ],
)
def test_real_inputs_need_the_file_that_makes_them(exported, copied, kind, task, file):
    artifact = copied(exported(kind, task))
    assert takes_real_inputs(artifact, graph(artifact))
    (artifact.path / file).unlink()
    assert not takes_real_inputs(artifact, graph(artifact))


def test_batches_are_padded_to_a_fixed_batch(bert):
    free, three = graph(bert), with_dims(graph(bert), 3, "sequence")
    assert (fixed_batch(free), fixed_batch(three)) == (None, 3)
    assert in_batches(range(5), 2, free) == [[0, 1], [2, 3], [4]]
    assert in_batches(range(5), 2, three) == [[0, 1, 2], [3, 4, 4]]
    assert pad_batch([7], free) == [7]
    assert pad_batch([7], three) == [7, 7, 7]


def test_lengths_equal_those_of_the_feeds(bert):
    feeder = TextFeeder.open(bert, graph(bert))
    lengths = feeder.lengths(TEXT)
    assert len(set(lengths)) > 1
    assert feeder(TEXT)["attention_mask"].sum(axis=1).tolist() == lengths


def test_texts_are_cut_and_padded_to_a_fixed_sequence(bert):
    feeder = TextFeeder.open(bert, with_dims(graph(bert), "batch", 12))
    assert feeder.width == 12
    assert feeder.lengths(["Yes.", *TEXT]) == [
        len(feeder.tokenizer.encode(["Yes."])[0].ids),
        *[12] * len(TEXT),
    ]
    assert feeder(["Yes.", *TEXT])["input_ids"].shape == (len(TEXT) + 1, 12)


def test_no_more_than_a_part_of_the_texts_is_tokenized_at_one_time(bert, monkeypatch):
    sizes = []
    encode = TextTokenizer.encode

    def counted(self, texts):
        sizes.append(len(texts))
        return encode(self, texts)

    monkeypatch.setattr(TextTokenizer, "encode", counted)
    monkeypatch.setattr(real_inputs, "_TOKENIZED", 4)
    feeder = TextFeeder.open(bert, graph(bert))
    whole = [feeder.lengths([text])[0] for text in TEXT]
    sizes.clear()
    assert feeder.lengths(TEXT) == whole
    assert max(sizes) == 4


def test_invalid_text_is_named_by_its_index(bert, monkeypatch):
    monkeypatch.setattr(real_inputs, "_TOKENIZED", 2)
    feeder = TextFeeder.open(bert, graph(bert))
    with pytest.raises(InputError, match="text 4 is an int"):
        feeder.lengths(["a", "b", "c", "d", 5])
    with pytest.raises(InputError, match="text 3 contains a lone surrogate"):
        feeder.lengths(["a", "b", "c", "\ud800"])


def test_questions_are_encoded_with_their_contexts(exported):
    artifact = exported("bert", "question-answering")
    feeder = TextFeeder.open(artifact, graph(artifact))
    feeds = feeder([("Who?", "Ada."), ("Where is the pump?", TEXT[0])])
    assert feeds["token_type_ids"].any(axis=1).all()
    expected = feeder.tokenizer.encode_pairs([("Who?", "Ada.")])[0].ids
    assert feeds["input_ids"][0, : len(expected)].tolist() == expected


def test_graph_with_other_inputs_is_an_error(bert):
    feeder = TextFeeder.open(bert, with_inputs(graph(bert), "input_ids", "bbox"))
    with pytest.raises(ArtifactError, match="bbox"):
        feeder(["text"])


def test_images_are_grouped_by_the_size_that_they_get(vit):
    feeder = ImageFeeder.open(vit, graph(vit))
    assert feeder.by_shape(synthetic_images()) == {(3, 32, 32): list(range(6))}
    settings = {**feeder.processor.settings, "do_resize": False}
    own = replace(feeder, processor=replace(feeder.processor, settings=settings))
    small, large = np.zeros((32, 32, 3), np.uint8), np.zeros((32, 64, 3), np.uint8)
    assert own.by_shape([small, large, small]) == {(3, 32, 32): [0, 2], (3, 32, 64): [1]}


def test_pixels_are_of_the_graphs_dtype(vit):
    (spec,) = graph(vit).inputs
    narrow = graph(vit).model_copy(
        update={"inputs": (TensorSpec(spec.name, "float16", spec.dims),)}
    )
    feeds = ImageFeeder.open(vit, narrow)(synthetic_images(2))
    assert (feeds["pixel_values"].dtype, feeds["pixel_values"].shape) == (
        np.float16,
        (2, 3, 32, 32),
    )


def test_a_damaged_image_is_named_by_its_place(vit, tmp_path):
    (tmp_path / "a.png").write_bytes(b"no image")
    feeder = ImageFeeder.open(vit, graph(vit))
    with pytest.raises(InputError, match=r"image 2.*a\.png is not a complete image"):
        feeder.by_shape([*synthetic_images(2), tmp_path / "a.png"])


def test_built_in_sentences_are_ragged_and_of_many_scripts(bert):
    assert len(set(TextFeeder.open(bert, graph(bert)).lengths(SENTENCES))) > 5
    assert sum(not sentence.isascii() for sentence in SENTENCES) >= 8
