"""The inputs of a graph, from the model's main input and what its tokenizer or processor gives."""

import json

import pytest
import transformers

from enginery.core.errors import ExportError
from enginery.core.model.files import ModelConfig
from enginery.export.native.inputs import describe_inputs
from tests.environments import needs_transformers5

SMALL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 32,
    "vocab_size": 60,
}
IMAGE = {**SMALL, "image_size": 32, "patch_size": 8}
TOKENS = ("batch", "sequence")


def inputs_of(model, task, folder):
    """Return the inputs of a model that has neither tokenizer nor processor."""
    folder.mkdir(exist_ok=True)
    model.config.save_pretrained(folder)
    settings = ModelConfig.read(folder)
    return describe_inputs(model.eval(), folder, task, settings, trust_remote_code=False)


def test_texts_have_tokens_their_mask_and_types(tmp_path):
    model = transformers.BertModel(transformers.BertConfig(**SMALL, max_position_embeddings=40))
    inputs = inputs_of(model, "feature-extraction", tmp_path)
    assert [(spec.name, spec.dims) for spec in inputs.specs] == [
        ("input_ids", TOKENS),
        ("attention_mask", TOKENS),
        ("token_type_ids", TOKENS),
    ]
    assert dict(inputs.sizes) == {"batch": 3, "sequence": 13}
    assert not inputs.takes_images
    assert inputs.feeds(model)["input_ids"].shape == (3, 13)


def test_length_stays_below_the_last_position(tmp_path):
    model = transformers.BertModel(transformers.BertConfig(**SMALL, max_position_embeddings=8))
    assert inputs_of(model, "feature-extraction", tmp_path).sizes["sequence"] == 7


def test_choices_have_a_dim_of_their_own(tmp_path):
    config = transformers.DistilBertConfig(
        dim=32, n_layers=1, n_heads=4, hidden_dim=32, vocab_size=60
    )
    model = transformers.DistilBertForMultipleChoice(config)
    inputs = inputs_of(model, "multiple-choice", tmp_path)
    assert {spec.dims for spec in inputs.specs} == {("batch", "num_choices", "sequence")}


def test_images_have_pixels_whatever_else_forward_accepts(tmp_path):
    model = transformers.ViTModel(transformers.ViTConfig(**IMAGE))
    inputs = inputs_of(model, "feature-extraction", tmp_path)
    (pixels,) = inputs.specs
    assert (pixels.name, pixels.dims) == ("pixel_values", ("batch", 3, "height", "width"))
    assert inputs.takes_images
    assert inputs.feeds(model)["pixel_values"].shape == (3, 3, 32, 32)
    assert inputs.with_larger_images().feeds(model)["pixel_values"].shape == (3, 3, 64, 96)
    fixed = inputs.with_fixed_images()
    assert fixed.specs[0].dims == ("batch", 3, 32, 32)
    assert not fixed.takes_images
    assert fixed.dims() == {"pixel_values": {0: "batch"}}


def test_texts_and_images_have_batches_of_their_own(tmp_path):
    config = transformers.CLIPConfig(
        text_config={**SMALL, "max_position_embeddings": 20}, vision_config=IMAGE
    )
    model = transformers.CLIPModel(config)
    inputs = inputs_of(model, "zero-shot-image-classification", tmp_path)
    dims = {spec.name: spec.dims for spec in inputs.specs}
    assert dims == {
        "input_ids": ("text_batch", "sequence"),
        "pixel_values": ("image_batch", 3, "height", "width"),
        "attention_mask": ("text_batch", "sequence"),
    }


def test_sounds_have_enough_samples(tmp_path):
    config = transformers.Wav2Vec2Config(
        **SMALL,
        conv_dim=[16, 16],
        conv_kernel=[10, 3],
        conv_stride=[5, 2],
        num_feat_extract_layers=2,
        num_conv_pos_embeddings=8,
        num_conv_pos_embedding_groups=2,
    )
    model = transformers.Wav2Vec2ForCTC(config)
    inputs = inputs_of(model, "automatic-speech-recognition", tmp_path)
    (wave,) = inputs.specs
    assert (wave.name, wave.dims) == ("input_values", TOKENS)
    assert model(**inputs.feeds(model)).logits.shape[0] == 3


def test_decoder_without_a_cache_has_positions(tmp_path):
    config = transformers.LlamaConfig(**SMALL, num_key_value_heads=2)
    model = transformers.LlamaForCausalLM(config)
    inputs = inputs_of(model, "text-generation", tmp_path)
    assert [spec.name for spec in inputs.specs] == ["input_ids", "attention_mask", "position_ids"]


def test_unknown_main_input_is_an_error(tmp_path):
    config = transformers.BertConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1)
    model = transformers.BertModel(config)
    model.main_input_name = "states"
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "bert"}))
    with pytest.raises(ExportError, match="main input of BertModel is states"):
        inputs_of(model, "feature-extraction", tmp_path)


def test_images_of_patches_have_their_mask_and_shapes(tmp_path):
    siglip2 = pytest.importorskip("transformers.models.siglip2")
    config = siglip2.Siglip2VisionConfig(
        **{**SMALL, "patch_size": 4, "num_patches": 16, "vision_use_head": False}
    )
    model = siglip2.Siglip2VisionModel(config)
    inputs = inputs_of(model, "feature-extraction", tmp_path)
    dims = {spec.name: spec.dims for spec in inputs.specs}
    assert dims == {
        "pixel_values": ("batch", "num_patches", 48),
        "pixel_attention_mask": ("batch", "num_patches"),
        "spatial_shapes": ("batch", 2),
    }
    feeds = inputs.feeds(model)
    rows = feeds["spatial_shapes"].prod(dim=1)
    assert (rows == feeds["pixel_attention_mask"].sum(dim=1)).all()


def clap(**audio):
    return transformers.ClapModel(
        transformers.ClapConfig(
            text_config={**SMALL, "max_position_embeddings": 20},
            audio_config={
                "window_size": 4,
                "num_mel_bins": 8,
                "spec_size": 32,
                "hidden_size": 32,
                "depths": [1, 1],
                "num_attention_heads": [2, 2],
                "patch_embeds_hidden_size": 16,
                "num_hidden_layers": 2,
                **audio,
            },
            projection_dim=16,
        )
    )


def test_texts_and_sounds_have_batches_of_their_own(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(
        json.dumps({"max_length_s": 1, "sampling_rate": 16_000, "hop_length": 160})
    )
    inputs = inputs_of(clap(), "feature-extraction", tmp_path)
    dims = {spec.name: spec.dims for spec in inputs.specs}
    assert dims == {
        "input_ids": ("text_batch", "sequence"),
        # Its processor cuts or repeats all sounds to one second: 101 frames.
        "input_features": ("audio_batch", 1, 101, 8),
        "attention_mask": ("text_batch", "sequence"),
    }


def test_sounds_that_are_fused_from_parts_are_refused(tmp_path):
    model = clap(enable_fusion=True, fusion_type="aff_2d")
    with pytest.raises(ExportError, match="ClapModel fuses parts of sounds"):
        inputs_of(model, "feature-extraction", tmp_path)


@needs_transformers5
def test_frames_have_a_mask(tmp_path):
    config = transformers.ParakeetCTCConfig(
        vocab_size=40,
        pad_token_id=39,
        encoder_config={
            "hidden_size": 32,
            "num_hidden_layers": 1,
            "num_attention_heads": 4,
            "intermediate_size": 32,
            "subsampling_conv_channels": 8,
            "num_mel_bins": 16,
        },
    )
    model = transformers.ParakeetForCTC(config)
    dims = {
        s.name: s.dims for s in inputs_of(model, "automatic-speech-recognition", tmp_path).specs
    }
    assert dims == {
        "input_features": ("batch", "frames", 16),
        "attention_mask": ("batch", "frames"),
    }
