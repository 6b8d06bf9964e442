"""The files that come with a model: real notations are read, everything else is a typed error."""

import json
import math
import random

import pytest

from enginery.core.errors import ArtifactError, SourceError
from enginery.core.model.feeds import FeedLimits, make_feeds
from enginery.core.model.files import (
    ModelConfig,
    PoolingConfig,
    PreprocessorConfig,
    SentenceBertConfig,
    SentenceTransformersConfig,
    SpecialTokensMap,
    TokenizerConfig,
    read_modules,
)
from enginery.core.shapes import TensorSpec

WRONG = (
    "x",
    "",
    [],
    ["x"],
    {},
    {"a": 1},
    -7,
    10**9,
    10**400,
    3.5,
    1e300,
    math.nan,
    math.inf,
    True,
    [[1, [2]]],
    {"content": {"content": 1}},
    [None],
    None,
    [1, 2, 3, 4, 5],
)


def written(directory, kind, document):
    (directory / kind.FILE).write_text(json.dumps(document), encoding="utf-8")
    return directory


@pytest.mark.parametrize(
    ("kind", "document", "message"),
    [
        (
            ModelConfig,
            {"type_vocab_size": "x"},
            "type_vocab_size is 'x', expected a whole number.",
        ),
        (ModelConfig, {"vocab_size": -1}, "vocab_size is -1, expected at least 0."),
        (
            ModelConfig,
            {"vocab_size": 10**12},
            "vocab_size is 1000000000000, expected at most 16777216.",
        ),
        (ModelConfig, {"pad_token_id": 1.5}, "pad_token_id is 1.5, expected a whole number"),
        (ModelConfig, {"eos_token_id": ["a"]}, "eos_token_id is ['a'], expected"),
        (ModelConfig, {"text_config": {"vocab_size": []}}, "text_config.vocab_size is [], exp"),
        (ModelConfig, {"vision_config": 3}, "vision_config is 3, expected an object."),
        (
            ModelConfig,
            {"id2label": {"one": "glad"}},
            "id2label has the key 'one', expected a whole",
        ),
        (ModelConfig, {"id2label": {"1": ["glad"]}}, "id2label.1 is ['glad'], expected a string."),
        (ModelConfig, {"image_size": "big"}, "image_size is 'big', expected a positive number"),
        (ModelConfig, {"conv_kernel": [10, 3], "conv_stride": [5]}, "conv_stride is [5], expected"),
        (ModelConfig, {"conv_kernel": [9] * 9, "conv_stride": [99] * 9}, "conv_stride is [99, 99"),
        (
            ModelConfig,
            {"conv_kernel": [1] * 65, "conv_stride": [1] * 65},
            "conv_kernel is [1, 1, 1, 1, 1, 1, ...], expected at most 64 items",
        ),
        (
            ModelConfig,
            {"text_config": {"conv_kernel": [9] * 9}, "conv_stride": [99] * 9},
            "conv_stride is [99, 99",
        ),
        (
            ModelConfig,
            {"model_type": "roberta", "max_position_embeddings": 2, "pad_token_id": 5},
            "max_position_embeddings is 2, expected more than pad_token_id + 1",
        ),
        (
            ModelConfig,
            {"num_mel_bins": 10**9},
            "num_mel_bins is 1000000000, expected at most 1024.",
        ),
        (TokenizerConfig, {"model_max_length": "x"}, "model_max_length is 'x', expected a number."),
        (TokenizerConfig, {"model_max_length": math.nan}, "model_max_length is nan, expected"),
        (
            TokenizerConfig,
            {"added_tokens_decoder": {"0": {}}},
            "added_tokens_decoder.0.content is missing",
        ),
        (
            TokenizerConfig,
            {"added_tokens_decoder": {"a": {"content": "b"}}},
            "added_tokens_decoder has the key 'a', expected a whole number",
        ),
        (TokenizerConfig, {"padding_side": "middle"}, "padding_side is 'middle', expected 'left'"),
        (TokenizerConfig, {"strip_accents": "some"}, "strip_accents is 'some', expected true or"),
        (SpecialTokensMap, {"pad_token": 5}, "pad_token is 5, expected a string, or an object"),
        (SentenceBertConfig, {"max_seq_length": -1}, "max_seq_length is -1, expected at least 0"),
        (SentenceTransformersConfig, {"prompts": ["q"]}, "prompts is ['q'], expected an object."),
        (PoolingConfig, {"include_prompt": "maybe"}, "include_prompt is 'maybe', expected true or"),
        (PreprocessorConfig, {"image_std": [0, 1, 1]}, "image_std is [0, 1, 1], expected a number"),
        (PreprocessorConfig, {"resample": 9}, "resample is 9, expected at most 5."),
        (PreprocessorConfig, {"rescale_factor": math.inf}, "rescale_factor is inf, expected"),
    ],
)
def test_invalid_value_names_file_key_found_and_expected(tmp_path, kind, document, message):
    written(tmp_path, kind, document)
    with pytest.raises(ArtifactError) as error:
        kind.read(tmp_path)
    assert str(error.value).startswith(f"{tmp_path / kind.FILE}: {message}")
    with pytest.raises(SourceError):
        kind.read(tmp_path, error=SourceError)


def test_real_notations_are_read():
    config = ModelConfig.model_validate(
        {
            "vocab_size": 30522.0,
            "pad_token_id": None,
            "eos_token_id": [2, 3],
            "image_size": [32, 48],
            "id2label": {"0": "calm", "1": 7},
            "label2id": {"calm": 0},
            "hidden_act": "gelu",
            "max_position_embeddings": "512",
            "problem_type": None,
            "architectures": None,
        }
    )
    assert (config.vocab_size, config.pad_token_id, config.positions) == (30522, None, 512)
    assert (config.id2label, config.image_size.sides(1)) == ({0: "calm", 1: "7"}, (32, 48))
    settings = TokenizerConfig.model_validate(
        {
            "model_max_length": 1000000000000000019884624838656,
            "strip_accents": None,
            "do_lower_case": None,
            "pad_token": {"content": "[PAD]", "lstrip": False},
            "mask_token": None,
            "added_tokens_decoder": {"4": {"content": "<x>", "special": True}},
        }
    )
    assert settings.do_lower_case
    assert settings.added_tokens_decoder[4].special
    other = SpecialTokensMap(pad_token="<pad>", mask_token="<mask>", cls_token={"content": "<s>"})
    both = settings.with_map(other)
    assert (both.pad_token, both.mask_token, both.cls_token) == ("[PAD]", None, None)
    # Without `added_tokens_decoder`, transformers reads the older file, and prefers it.
    both = TokenizerConfig(pad_token="[PAD]", eos_token="</s>").with_map(other)
    assert (both.pad_token, both.mask_token, both.eos_token) == ("<pad>", "<mask>", "</s>")
    for size in (224, 224.0, {"height": 224, "width": 224}, [224, 224], {"shortest_edge": 224}):
        found = PreprocessorConfig.model_validate({"size": size, "image_mean": [0.5, 0.5, 0.5]})
        assert found.size.sides(1) == (224, 224)


def test_keys_of_the_text_or_vision_part_are_merged():
    config = ModelConfig.model_validate(
        {
            "vision_config": {"image_size": 32, "hidden_size": 8},
            "pad_token_id": 1,
            "text_config": {"vocab_size": 90, "hidden_size": 16, "pad_token_id": 5},
        }
    )
    merged = config.merged()
    assert (merged.vocab_size, merged.hidden_size, merged.pad_token_id) == (90, 16, 1)
    assert (config.vocab_size, merged.image_size.edge) == (0, 32)


def test_keys_of_an_encoder_and_a_decoder_are_merged():
    config = ModelConfig.model_validate(
        {
            "model_type": "vision-encoder-decoder",
            "encoder": {"image_size": [64, 32], "num_channels": 3, "vocab_size": 90},
            "decoder": {"model_type": "roberta", "vocab_size": 95, "max_position_embeddings": 40},
        }
    )
    merged = config.merged()
    assert (merged.image_size.sides(1), merged.num_channels) == ((64, 32), 3)
    assert (merged.vocab_size, merged.positions, merged.model_type) == (90, 40, config.model_type)
    assert merged.position_limit() == 38
    assert ModelConfig.model_validate({"encoder": "bpe", "decoder": 3}).decoder is None


def test_older_sizes_of_donut_have_the_width_first():
    for size, kind in (([30, 40], "DonutFeatureExtractor"), ([40, 30], "ViTFeatureExtractor")):
        found = PreprocessorConfig.model_validate({"feature_extractor_type": kind, "size": size})
        assert found.size.sides(1) == (40, 30)


def test_values_that_pass_make_inputs():
    """Whatever a config says, made-up inputs are made of it, in memory that a machine has."""
    ids = TensorSpec("input_ids", "int64", ("batch", "sequence"))
    mask = TensorSpec("attention_mask", "int64", ("batch", "sequence"))
    generator = random.Random(7)
    parts = ("text_config", "vision_config", "encoder", "decoder")
    keys = [key for key in ModelConfig.model_fields if key not in parts]
    passed = 0
    for _ in range(1500):
        chosen = generator.sample(keys, 2)
        document = {key: generator.choice([*WRONG, 0, 1, 2, 40, [1, 2], "t5"]) for key in chosen}
        place = generator.choice(("", *parts))
        try:
            config = ModelConfig.model_validate({place: document} if place else document)
        except ValueError:
            continue
        passed += 1
        limits = FeedLimits.from_config(config)
        assert limits.max_positions >= 1
        if limits.vocab_size < 10**6:
            made = make_feeds((ids, mask), {"batch": 2, "sequence": 4}, limits, seed=0, ragged=True)
            assert made["input_ids"].min() >= 0
    assert passed > 100


@pytest.mark.parametrize(
    "kind",
    [
        ModelConfig,
        TokenizerConfig,
        SpecialTokensMap,
        SentenceBertConfig,
        PreprocessorConfig,
        SentenceTransformersConfig,
        PoolingConfig,
    ],
)
def test_every_key_with_every_wrong_value_is_read_or_rejected(tmp_path, kind):
    refused = 0
    for key in kind.model_fields:
        for value in WRONG:
            written(tmp_path, kind, {key: value})
            try:
                kind.read(tmp_path)
            except ArtifactError as error:
                refused += 1
                assert f"{kind.FILE}: {key}" in str(error)  # noqa: PT017  most are accepted
    assert refused >= 4 * len(kind.model_fields)


@pytest.mark.parametrize(
    "content",
    [
        b"[" * 100_000,
        b'{"a":' * 100_000,
        b"1" * 5000,
        b'{"vocab_size": ' + b"9" * 5000 + b"}",
        b'{"model_type": "\\ud800"}',
        b"\xff\xfe",
        b"[]",
        b"",
    ],
)
def test_file_without_a_json_object_is_rejected(tmp_path, content):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(ArtifactError, match=r"config\.json"):
        ModelConfig.read(tmp_path)


@pytest.mark.parametrize(
    ("modules", "message"),
    [
        ({}, "contains a dict, expected a list of modules"),
        ([3], "0 is 3, expected an object"),
        ([{"type": 5}], "0.type is 5, expected a string"),
        ([{"type": "a.Pooling", "path": "../other"}], "leads outside the model's directory"),
        ([{"type": "a.Pooling", "path": "/etc"}], "leads outside the model's directory"),
    ],
)
def test_modules_are_a_list_of_folders_inside(tmp_path, modules, message):
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    with pytest.raises(ArtifactError, match=message):
        read_modules(tmp_path)
