"""Images become the same pixels as with transformers' processors, and the same answers."""

from __future__ import annotations

import importlib
import io
import json
import os
import re

import numpy as np
import pytest
from PIL import Image

from enginery.core.errors import ArtifactError, InputError
from enginery.export.side_files import name_pillow_processor
from enginery.runtime.image.files import FORMATS
from enginery.runtime.image.processor import ImageProcessor, load_image
from enginery.runtime.model import load_model
from tests.environments import needs_transformers5
from tests.tiny import IMAGE_KINDS, with_more
from tests.tolerances import LARGER, OUTPUTS, SCORES


def photo(height, width, *, seed=0):
    """Smooth colours with some noise: resampling filters differ on it."""
    random = np.random.default_rng(seed)
    rows, columns = np.mgrid[0:height, 0:width]
    waves = [np.sin(rows / (3 + c)) * np.cos(columns / (5 + c)) for c in range(3)]
    pixels = 127 + 90 * np.stack(waves, axis=2) + random.normal(0, 12, (height, width, 3))
    return pixels.clip(0, 255).astype(np.uint8)


SIZES = [(50, 70), (70, 50), (33, 33), (300, 40), (224, 224), (20, 20), (640, 481)]

PROCESSORS = [
    ("vit", "ViT", {}),
    ("vit", "ViT", {"size": {"height": 30, "width": 41}, "resample": 3, "do_center_crop": True}),
    ("vit", "ViT", {"do_rescale": False, "do_normalize": True, "image_mean": [100, 110, 120]}),
    ("vit", "ViT", {"do_normalize": False, "resample": 0}),
    ("layoutlmv3", "LayoutLMv3", {"apply_ocr": False}),
    ("deit", "DeiT", {}),
    ("deit", "DeiT", {"do_resize": False, "crop_size": {"height": 51, "width": 60}}),
    ("beit", "Beit", {}),
    ("beit", "Beit", {"do_center_crop": False, "size": {"height": 64, "width": 64}}),
    ("siglip", "Siglip", {}),
    ("pvt", "Pvt", {}),
    ("convnext", "ConvNext", {}),
    ("convnext", "ConvNext", {"size": {"shortest_edge": 224}, "resample": 3}),
    ("convnext", "ConvNext", {"size": {"shortest_edge": 65}, "crop_pct": 0.95}),
    ("clip", "CLIP", {}),
    ("clip", "CLIP", {"size": {"height": 60, "width": 50}, "crop_size": 48}),
    ("clip", "CLIP", {"size": {"shortest_edge": 31}, "crop_size": {"height": 45, "width": 20}}),
    ("bit", "Bit", {"size": {"shortest_edge": 448}, "crop_size": 448}),
    ("donut", "Donut", {"size": {"height": 256, "width": 192}}),
    ("donut", "Donut", {"size": [61, 80], "do_align_long_axis": True}),
    ("donut", "Donut", {"size": {"height": 60, "width": 90}, "do_align_long_axis": True}),
    ("donut", "Donut", {"size": {"height": 700, "width": 700}, "do_resize": False}),
    ("chinese_clip", "ChineseCLIP", {"size": {"height": 40, "width": 30}, "crop_size": 28}),
    ("owlvit", "OwlViT", {"size": {"height": 64, "width": 48}}),
    ("owlvit", "OwlViT", {"size": {"height": 64, "width": 48}, "do_center_crop": True}),
    ("levit", "Levit", {}),
    ("levit", "Levit", {"size": {"height": 64, "width": 48}, "crop_size": 40}),
    ("poolformer", "PoolFormer", {}),
    ("poolformer", "PoolFormer", {"size": {"height": 64, "width": 64}, "crop_pct": 0.8}),
    ("poolformer", "PoolFormer", {"size": {"height": 64, "width": 48}, "crop_size": 40}),
    ("mobilevit", "MobileViT", {}),
    ("mobilevit", "MobileViT", {"do_flip_channel_order": False, "do_center_crop": False}),
    ("segformer", "Segformer", {}),
    ("dpt", "DPT", {"size": {"height": 96, "width": 64}}),
    ("dpt", "DPT", {"size": {"height": 96, "width": 64}, "keep_aspect_ratio": True}),
    (
        "dpt",
        "DPT",
        {
            "size": {"height": 518, "width": 518},
            "keep_aspect_ratio": True,
            "ensure_multiple_of": 14,
            "do_pad": True,
            "size_divisor": 16,
        },
    ),
    ("glpn", "GLPN", {"size_divisor": 16}),
    ("glpn", "GLPN", {"size_divisor": 20, "resample": 3}),
    ("swin2sr", "Swin2SR", {}),
    ("swin2sr", "Swin2SR", {"do_resize": True, "do_normalize": True, "size": {"height": 9}}),
    ("glpn", "GLPN", {"size_divisor": 8, "do_normalize": True, "size": 9}),
    ("mobilevit", "MobileViT", {"do_normalize": True}),
    ("swin2sr", "Swin2SR", {"size_divisor": 16, "do_rescale": False}),
    ("sam", "Sam", {"size": {"longest_edge": 100}, "pad_size": {"height": 100, "width": 128}}),
    ("maskformer", "MaskFormer", {}),
    ("maskformer", "MaskFormer", {"size": {"shortest_edge": 60, "longest_edge": 90}}),
    ("maskformer", "MaskFormer", {"size": {"height": 60, "width": 90}, "size_divisor": 16}),
    ("mask2former", "Mask2Former", {"size": {"shortest_edge": 60, "longest_edge": 90}}),
    ("mask2former", "Mask2Former", {"size": {"height": 60, "width": 90}, "size_divisor": 16}),
    ("detr", "Detr", {}),
    ("detr", "Detr", {"size": {"shortest_edge": 60, "longest_edge": 90}}),
    ("detr", "Detr", {"size": {"max_height": 60, "max_width": 90}}),
    ("detr", "Detr", {"size": {"height": 60, "width": 90}, "do_normalize": False}),
    (
        "detr",
        "Detr",
        {
            "size": {"shortest_edge": 60, "longest_edge": 90},
            "pad_size": {"height": 90, "width": 96},
        },
    ),
    ("conditional_detr", "ConditionalDetr", {"size": {"shortest_edge": 50, "longest_edge": 333}}),
    ("deformable_detr", "DeformableDetr", {"size": {"shortest_edge": 50, "longest_edge": 333}}),
    ("rt_detr", "RTDetr", {}),
    ("yolos", "Yolos", {"size": {"shortest_edge": 70, "longest_edge": 333}}),
    ("yolos", "Yolos", {"size": {"shortest_edge": 50, "longest_edge": 150}}),
    ("mobilenet_v1", "MobileNetV1", {}),
    ("mobilenet_v2", "MobileNetV2", {}),
    ("efficientnet", "EfficientNet", {}),
    (
        "efficientnet",
        "EfficientNet",
        {
            "rescale_offset": True,
            "rescale_factor": 1 / 127.5,
            "do_center_crop": True,
            "include_top": False,
        },
    ),
]


def reference_processor(module, name):
    # Through its own module: transformers' lazy one wants torchvision for the fast variants.
    path = f"transformers.models.{module}.image_processing_{module}"
    return getattr(importlib.import_module(path), f"{name}ImageProcessor")


@pytest.mark.parametrize(("module", "name", "settings"), PROCESSORS)
def test_pixels_equal_transformers(tmp_path, module, name, settings):
    reference = reference_processor(module, name)(**settings)
    reference.save_pretrained(tmp_path)
    processor = ImageProcessor.open(tmp_path)
    for height, width in SIZES:
        image = Image.fromarray(photo(height, width))
        expected = reference(image, return_tensors="np")["pixel_values"][0]
        found = processor(load_image(image))
        assert found.dtype == np.float32
        assert found.shape == expected.shape
        np.testing.assert_array_equal(found, expected)


@needs_transformers5
@pytest.mark.parametrize("settings", [case[2] for case in PROCESSORS if case[1] == "Donut"])
def test_pixels_of_donut_are_those_of_transformers_5(tmp_path, settings):
    module = "transformers.models.donut.image_processing_pil_donut"
    reference = importlib.import_module(module).DonutImageProcessorPil(**settings)
    reference.save_pretrained(tmp_path)
    name_pillow_processor(tmp_path)
    processor = ImageProcessor.open(tmp_path)
    for height, width in SIZES:
        image = Image.fromarray(photo(height, width))
        expected = reference(image, return_tensors="np")["pixel_values"][0]
        np.testing.assert_array_equal(processor(image), expected)


def test_donut_shrinks_in_three_ways(tmp_path):
    settings = {"size": {"height": 256, "width": 192}, "resample": 2}
    image = Image.fromarray(photo(150, 1500))
    pixels = {}
    for ending in ("", "Fast", "Pil"):
        document = {"image_processor_type": f"DonutImageProcessor{ending}", **settings}
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(document))
        pixels[ending] = ImageProcessor.open(tmp_path)(image)
    # The slow class skips pixels where an image shrinks much, and the newest filters linearly.
    assert np.abs(pixels[""] - pixels["Fast"]).max() > 0
    assert np.abs(pixels["Fast"] - pixels["Pil"]).max() > 0


@pytest.mark.parametrize("step", ["do_resize", "do_rescale", "do_normalize", "do_center_crop"])
@pytest.mark.parametrize(("module", "name"), [("clip", "CLIP"), ("owlvit", "OwlViT")])
def test_null_switches_a_step_off(tmp_path, module, name, step):
    size = {"size": {"height": 60, "width": 50}, "crop_size": 48}
    reference = reference_processor(module, name)(**{**size, step: None})
    reference.save_pretrained(tmp_path)
    assert json.loads((tmp_path / "preprocessor_config.json").read_text())[step] is None
    image = Image.fromarray(photo(80, 75))
    expected = reference(image, return_tensors="np")["pixel_values"][0]
    np.testing.assert_array_equal(ImageProcessor.open(tmp_path)(image), expected)


FAST = [
    ("ViT", {"do_center_crop": True, "crop_size": {"height": 75, "width": 99}}),
    ("ViT", {"do_center_crop": True, "crop_size": {"height": 301, "width": 151}}),
    ("ViT", {"do_center_crop": None}),
    ("ViT", {"do_pad": True, "pad_size": {"height": 300, "width": 301}}),
    ("Siglip", {"do_center_crop": True, "crop_size": {"height": 76, "width": 98}}),
    ("CLIP", {}),
    ("CLIP", {"do_center_crop": None}),
    ("CLIP", {"size": {"shortest_edge": 64}}),
    ("CLIP", {"do_resize": False}),
    ("DeiT", {"do_center_crop": None}),
    ("Levit", {"size": {"height": 70, "width": 91}}),
    ("EfficientNet", {"size": {"height": 70, "width": 91}}),
    ("OwlViT", {}),
    ("Detr", {"size": {"shortest_edge": 64, "longest_edge": 100}}),
]


@pytest.mark.parametrize(("name", "settings"), FAST)
def test_pixels_equal_the_fast_processors(tmp_path, name, settings):
    pytest.importorskip("torchvision")
    import transformers

    reference = getattr(transformers, f"{name}ImageProcessorFast")(**settings)
    reference.save_pretrained(tmp_path)
    processor = ImageProcessor.open(tmp_path)
    for height, width in SIZES:
        if min(height, width) < 30:
            continue  # CLIP's images of a few pixels become too large
        image = Image.fromarray(photo(height, width))
        expected = reference(image, return_tensors="pt")["pixel_values"][0].numpy()
        pixels = processor(image)
        assert pixels.shape == expected.shape
        # torchvision rounds otherwise than Pillow: by one of 255 levels, in two directions.
        assert np.abs(pixels - expected).max() < 3 / 255 / 0.224


def save_fast(directory, name, **settings):
    document = {"image_processor_type": f"{name}ImageProcessorFast", **settings}
    (directory / "preprocessor_config.json").write_text(json.dumps(document))
    return ImageProcessor.open(directory)


def test_a_fast_processor_crops_and_pads_where_the_slow_one_does_not(tmp_path):
    crop = {"do_center_crop": True, "crop_size": {"height": 75, "width": 99}}
    processor = save_fast(tmp_path, "ViT", **crop)
    # The slow processor of DeiT has the same steps.
    reference = reference_processor("deit", "DeiT")(
        size={"height": 224, "width": 224},
        resample=2,
        image_mean=[0.5] * 3,
        image_std=[0.5] * 3,
        **crop,
    )
    image = Image.fromarray(photo(70, 50))
    expected = reference(image, return_tensors="np")["pixel_values"][0]
    np.testing.assert_array_equal(processor(image), expected)
    padded = save_fast(tmp_path, "ViT", do_pad=True, pad_size={"height": 230, "width": 240})
    pixels = padded(image)
    assert pixels.shape == (3, 230, 240)
    assert not pixels[:, 224:].any()
    assert not pixels[:, :, 224:].any()
    slow = {"image_processor_type": "ViTImageProcessor", **crop}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(slow))
    assert ImageProcessor.open(tmp_path)(image).shape == (3, 224, 224)


def test_a_fast_processor_pads_a_small_image_after_the_middle(tmp_path):
    crop = {"do_center_crop": True, "crop_size": {"height": 6, "width": 6}}
    plain = {"do_resize": False, "do_rescale": False, "do_normalize": False}
    image = Image.fromarray(np.full((3, 7, 3), 9, np.uint8))
    pixels = save_fast(tmp_path, "CLIP", **crop, **plain)(image)
    assert pixels[0, :, 0].tolist() == [0, 9, 9, 9, 0, 0]


def test_a_crop_without_a_size_is_rejected(tmp_path):
    with pytest.raises(ArtifactError, match="do_center_crop is true, but crop_size is missing"):
        save_fast(tmp_path, "ViT", do_center_crop=True)


def test_the_mask_of_an_image_covers_its_pixels(tmp_path):
    settings = {
        "size": {"max_height": 60, "max_width": 90},
        "pad_size": {"height": 64, "width": 96},
    }
    reference = reference_processor("detr", "Detr")(**settings)
    reference.save_pretrained(tmp_path)
    processor = ImageProcessor.open(tmp_path)
    for height, width in ((50, 70), (70, 50), (33, 33)):
        image = Image.fromarray(photo(height, width))
        expected = reference(image, return_tensors="np")["pixel_mask"][0]
        mask = processor.mask(image, processor(image))
        assert mask.dtype == np.int64
        np.testing.assert_array_equal(mask, expected)


@pytest.mark.parametrize(
    ("module", "name", "old"),
    [
        ("vit", "ViT", {"size": 40, "image_mean": [0.5, 0.4, 0.3]}),
        ("deit", "DeiT", {"size": 256, "crop_size": 200, "resample": 3}),
        ("convnext", "ConvNext", {"size": 224, "crop_pct": None, "resample": 3}),
        ("clip", "CLIP", {"size": 60, "crop_size": 50}),
        ("detr", "Detr", {"size": 60, "max_size": 75}),
        ("yolos", "Yolos", {"size": 60, "max_size": 75}),
        ("segformer", "Segformer", {"size": 60}),
        ("dpt", "DPT", {"size": 60}),
        ("levit", "Levit", {"size": 60}),
    ],
)
def test_old_configs_with_bare_sizes_and_missing_keys(tmp_path, module, name, old):
    config = {"feature_extractor_type": f"{name}FeatureExtractor", **old}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    reference = reference_processor(module, name).from_dict(config)
    image = Image.fromarray(photo(90, 70))
    expected = reference(image, return_tensors="np")["pixel_values"][0]
    np.testing.assert_array_equal(ImageProcessor.open(tmp_path)(image), expected)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "image processor '' is not supported"),
        ({"image_processor_type": "Owlv2ImageProcessor"}, "'Owlv2ImageProcessor' is not suppo"),
        ({"image_processor_type": "VitImageProcessor"}, "did you mean 'ViT'?"),
        ({"size": {"height": 3, "width": 3}}, "image processor '' is not supported"),
        ({"image_processor_type": "ViTImageProcessor", "size": "big"}, "size is 'big'"),
        (
            {"image_processor_type": "ConvNextImageProcessor", "size": {"height": 8, "width": 8}},
            "expected shortest_edge",
        ),
        (
            {"image_processor_type": "DetrImageProcessor", "size": {"shortest_edge": 8}},
            "expected height and width, or longest_edge and shortest_edge, or max_height and max_",
        ),
        (
            {"image_processor_type": "SamImageProcessor", "pad_size": {"shortest_edge": 8}},
            "pad_size is {'shortest_edge': 8}, expected a number, or height and width",
        ),
    ],
)
def test_unsupported_processor_is_named(tmp_path, config, message):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match=re.escape(message)):
        ImageProcessor.open(tmp_path)


@pytest.mark.parametrize(
    ("name", "key"),
    [("GLPN", "size_divisor"), ("Swin2SR", "size_divisor"), ("DPT", "ensure_multiple_of")],
)
def test_sizes_that_are_multiples_of_zero_are_rejected(tmp_path, name, key):
    config = {"image_processor_type": f"{name}ImageProcessor", key: 0}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    with pytest.raises(ArtifactError, match=f"{key} is 0, expected"):
        ImageProcessor.open(tmp_path)


@pytest.mark.parametrize("kind", with_more(IMAGE_KINDS, "vit", "resnet"))
def test_classification_equals_the_pipeline(tiny, kind, tmp_path):
    import transformers

    task = "image-classification"
    source = tiny.source(kind, task)
    path = tmp_path / "photo.png"
    Image.fromarray(photo(60, 80, seed=3)).save(path)
    images = [Image.fromarray(photo(*size, seed=i)) for i, size in enumerate(SIZES)]
    classifier = transformers.pipeline(task, model=str(source), use_fast=False)
    expected = classifier([*images, Image.open(path)])
    with load_model(tiny.artifact(kind, task)) as model:
        found = model([*images, path])
        assert model([]) == []
    for answer, reference in zip(found, expected, strict=True):
        assert [label.label for label in answer.labels] == [r["label"] for r in reference]
        np.testing.assert_allclose(
            [label.score for label in answer.labels], [r["score"] for r in reference], atol=SCORES
        )
    assert len({round(answer.score, 4) for answer in found}) == len(found)


@pytest.mark.parametrize("kind", with_more(IMAGE_KINDS, "vit", "resnet"))
def test_vectors_are_what_the_note_says(tiny, kind):
    import torch
    from transformers import AutoImageProcessor, AutoModel

    source = tiny.source(kind, "feature-extraction")
    images = [Image.fromarray(photo(*size, seed=i)) for i, size in enumerate(SIZES)]
    processor = AutoImageProcessor.from_pretrained(source, use_fast=False)
    with torch.no_grad():
        output = AutoModel.from_pretrained(source).eval()(**processor(images, return_tensors="pt"))
    model = load_model(tiny.artifact(kind, "feature-extraction"))
    note = model.notes[-1]
    if "pooler_output" in note:
        expected = output.pooler_output.flatten(1)
    elif "first token" in note:
        expected = output.last_hidden_state[:, 0]
    else:
        assert "mean over all positions" in note
        axes = (2, 3) if output.last_hidden_state.ndim == 4 else 1
        expected = output.last_hidden_state.mean(axes)
    found = model.embed_images(images)
    assert found.shape == (len(images), 32)
    assert model.embed_images([]).shape == (0, 32)
    np.testing.assert_allclose(found, expected.numpy(), atol=OUTPUTS, rtol=LARGER)
    with pytest.raises(InputError, match=r"Call embed_images\(\)"):
        model.embed(["text"])


@pytest.mark.parametrize("mode", ["L", "LA", "P", "RGBA", "CMYK", "1", "YCbCr"])
def test_other_modes_become_rgb_as_in_transformers(mode):
    from transformers.image_utils import load_image as reference

    image = Image.fromarray(photo(20, 30)).convert("RGBA" if mode == "RGBA" else "RGB")
    image = image.convert(mode)
    if mode == "RGBA":
        image.putalpha(100)
    found = load_image(image)
    assert found.mode == "RGB"
    np.testing.assert_array_equal(np.asarray(found), np.asarray(reference(image)))


def test_arrays_with_one_and_four_channels_become_rgb():
    grey = photo(20, 30)[:, :, 0]
    for array in (grey, grey[:, :, None]):
        np.testing.assert_array_equal(np.asarray(load_image(array)), np.stack([grey] * 3, axis=2))
    alpha = np.dstack([photo(20, 30), np.full((20, 30), 9, np.uint8)])
    np.testing.assert_array_equal(np.asarray(load_image(alpha)), alpha[:, :, :3])


def test_a_photo_is_turned_as_its_exif_says(tmp_path):
    image = Image.fromarray(photo(20, 30))
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: turned by 90°
    image.save(tmp_path / "turned.png", exif=exif)
    assert load_image(tmp_path / "turned.png").size == (20, 30)


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (np.zeros((4, 4, 3), np.float32), "array of float32, expected uint8"),
        (np.zeros((4, 4), np.uint16), "array of uint16"),
        (np.zeros((3, 4, 5), np.uint8), r"shape \(3, 4, 5\)"),
        (np.zeros((2, 4, 4, 3), np.uint8), r"shape \(2, 4, 4, 3\)"),
        (Image.new("I;16", (4, 4)), "mode I;16"),
        (Image.new("F", (4, 4)), "mode F"),
        (b"bytes", "not an image of a supported format. Supported: PNG"),
        (5, "is a int, expected a path"),
        ("nowhere.png", "file nowhere.png does not exist"),
    ],
)
def test_images_of_other_than_8_bits_are_rejected(source, message):
    with pytest.raises(InputError, match=message):
        load_image(source, name="image 3")


@pytest.mark.parametrize("damage", ["text", "truncated"])
def test_a_damaged_file_is_named(tmp_path, damage):
    path = tmp_path / "broken.png"
    Image.fromarray(photo(40, 40)).save(path)
    path.write_bytes(b"not an image" if damage == "text" else path.read_bytes()[:600])
    with pytest.raises(InputError, match=r"broken\.png is not a complete image"):
        load_image(path)


def test_one_image_instead_of_a_list_is_rejected(tiny):
    model = load_model(tiny.artifact("vit", "image-classification"))
    for one in ("cat.png", photo(20, 20), Image.fromarray(photo(20, 20))):
        with pytest.raises(InputError, match="expected a list of images"):
            model(one)


def test_a_processor_that_does_not_fit_the_graph_is_an_error(tiny, altered):
    artifact = tiny.artifact("vit", "image-classification")
    config = json.loads((artifact.path / "preprocessor_config.json").read_text())
    config["size"] = {"height": 40, "width": 32}
    other = altered(artifact, {"preprocessor_config.json": json.dumps(config)})
    graph = other.manifest.graphs[0]
    pixels = graph.inputs[0]
    fixed = type(pixels)(pixels.name, pixels.dtype, ("batch", 3, 32, 32))
    record = graph.model_copy(update={"inputs": (fixed,)})
    manifest = other.manifest.model_copy(update={"graphs": (record,)})
    with pytest.raises(InputError, match=r"image 0: .* 3 × 40 × 32, .* takes pixel_values"):
        load_model(type(other)(other.path, manifest)).classify_images([photo(20, 20)])


def test_a_program_is_never_started_for_an_image(tmp_path, monkeypatch):
    from PIL import EpsImagePlugin

    started = []
    monkeypatch.setattr(EpsImagePlugin, "Ghostscript", lambda *args, **kw: started.append(args))
    content = (
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\n"
        b"%%BeginProlog\n%%EndProlog\nshowpage\n%%EOF\n"
    )
    (path := tmp_path / "cat.png").write_bytes(content)
    for source in (content, path):
        with pytest.raises(InputError, match=r"Supported: PNG, JPEG|cannot identify"):
            load_image(source)
    assert started == []


@pytest.mark.parametrize("kind", FORMATS)
def test_every_known_format_is_read(kind):
    stream = io.BytesIO()
    Image.fromarray(photo(20, 30)).save(stream, kind)
    assert load_image(stream.getvalue()).size == (30, 20)


def test_photo_with_several_pictures_is_read():
    stream = io.BytesIO()
    one = Image.fromarray(photo(20, 30))
    one.save(stream, "MPO", save_all=True, append_images=[one])
    assert load_image(stream.getvalue()).size == (30, 20)


def test_named_pipe_is_rejected(tmp_path):
    os.mkfifo(path := tmp_path / "cat.png")
    with pytest.raises(InputError, match=r"cat\.png is not a regular file"):
        load_image(path)


def test_an_image_of_which_nothing_would_be_left_is_rejected(tmp_path):
    config = {"image_processor_type": "GLPNImageProcessor", "size_divisor": 32}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"image 2 has 200 × 31 pixels, .* makes 192 × 0"):
        ImageProcessor.open(tmp_path)(Image.new("RGB", (200, 31)), name="image 2")


NARROW = [
    ("CLIP", {}),
    ("ConvNext", {"size": {"shortest_edge": 224}}),
    ("Bit", {}),
    ("MobileNetV1", {}),
    ("ViT", {}),
    ("DeiT", {"do_resize": False}),
]


@pytest.mark.parametrize(("name", "settings"), NARROW)
def test_a_narrow_image_that_would_become_a_huge_one_is_rejected(
    tmp_path, monkeypatch, name, settings
):
    config = {"image_processor_type": f"{name}ImageProcessor", **settings}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(config))
    processor = ImageProcessor.open(tmp_path)
    monkeypatch.setattr(Image.Image, "resize", lambda *args, **kw: pytest.fail("it was resized"))
    with pytest.raises(
        InputError, match=r"image 3 has 1 × 600000 pixels; to resize it, an image of"
    ):
        processor(Image.new("RGB", (1, 600_000)), name="image 3")
