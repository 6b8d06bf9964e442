"""Models of timm, which needs torchvision: skipped without."""

import numpy as np
import pytest
from PIL import Image

from enginery import export_model, load_model, quantize_model, validate_model
from enginery.runtime.image.processor import ImageProcessor

timm = pytest.importorskip("timm", exc_type=ImportError, reason="pip install timm")


@pytest.fixture
def saved(tmp_path):
    """Return a function that writes a model with random weights, as timm does for the Hub."""

    def save(name):
        import torch

        torch.manual_seed(0)
        model = timm.create_model(name, pretrained=False, num_classes=10).eval()
        options = {"num_classes": 10}
        timm.models.save_for_hf(
            model, str(tmp_path / name), model_config=options, safe_serialization=True
        )
        return tmp_path / name

    return save


@pytest.mark.parametrize(
    ("name", "size"), [("resnet10t", ("height", "width")), ("vit_tiny_patch16_224", (224, 224))]
)
def test_a_directory_of_timm_is_exported_and_validated(name, size, saved, tmp_path):
    artifact = export_model(str(saved(name)), out=tmp_path / "artifact")
    (pixels,) = artifact.manifest.graphs[0].inputs
    assert pixels.dims == ("batch", 3, *size)
    report = validate_model(artifact, effort="quick")
    assert report.passed, report.summary


def test_int8_of_timm(saved, tmp_path):
    artifact = export_model(str(saved("resnet10t")), out=tmp_path / "artifact")
    quantized = quantize_model(artifact, allow_random=True, allow_failed=True, min_cosine=0.9)
    assert quantized.manifest.is_quantized


@pytest.mark.parametrize("name", ["resnet10t", "mobilenetv3_small_100", "efficientnet_b0"])
def test_images_are_prepared_as_timm_does(name, saved, tmp_path):
    artifact = export_model(str(saved(name)), out=tmp_path / "artifact")
    processor = ImageProcessor.open(artifact.path)
    model = timm.create_model(name, pretrained=False)
    transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model))
    random = np.random.default_rng(0)
    for width, height in [(300, 411), (333, 250), (224, 224), (97, 640)]:
        image = Image.fromarray(random.integers(0, 256, (height, width, 3), np.uint8))
        expected = transform(image).numpy()
        np.testing.assert_allclose(processor(image), expected, atol=1e-5)


def test_images_are_classified(saved, tmp_path):
    artifact = export_model(str(saved("resnet10t")), out=tmp_path / "artifact")
    image = Image.fromarray(np.full((300, 200, 3), 90, np.uint8))
    with load_model(artifact) as model:
        assert model.classify_images([image], top_k=3)[0].label.startswith("LABEL_")
