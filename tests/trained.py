"""Small image classifiers, trained for some seconds on scikit-learn's digits."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from enginery.runtime.image.processor import ImageProcessor, load_image

TRAINED = 1200
"""Number of images that the classifiers have seen; the others are unseen."""


def load_digit_images():
    """Return scikit-learn's digits in random order as uint8 images (8, 8, 3), and their labels."""
    from sklearn.datasets import load_digits

    found = load_digits()
    images = np.repeat((found.images * 15).astype(np.uint8)[..., None], 3, axis=-1)
    order = np.random.default_rng(0).permutation(len(images))
    return images[order], found.target[order]


def train_vit(directory: Path) -> Path:
    """Train a ViT of two layers on 8 × 8 pixels."""
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=128,
        image_size=8,
        patch_size=2,
        num_labels=10,
        hidden_dropout_prob=0.0,
    )
    return _train(ViTForImageClassification, config, directory, size=8, epochs=25)


def train_resnet(directory: Path) -> Path:
    """Train a ResNet of two stages on 32 × 32 pixels."""
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(
        embedding_size=16,
        hidden_sizes=[16, 32],
        depths=[1, 2],
        layer_type="basic",
        num_labels=10,
    )
    return _train(ResNetForImageClassification, config, directory, size=32, epochs=6)


def _train(model_class, config, directory: Path, *, size: int, epochs: int) -> Path:
    import torch
    from transformers import ViTImageProcessor

    torch.manual_seed(0)
    ViTImageProcessor(size={"height": size, "width": size}).save_pretrained(directory)
    model = model_class(config).train()
    images, labels = load_digit_images()
    processor = ImageProcessor.open(directory)
    pixels = torch.tensor(np.stack([processor(load_image(i)) for i in images[:TRAINED]]))
    targets = torch.tensor(labels[:TRAINED])
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    for _ in range(epochs):
        for part in torch.randperm(TRAINED).split(64):
            optimizer.zero_grad()
            model(pixel_values=pixels[part], labels=targets[part]).loss.backward()
            optimizer.step()
    model.eval().save_pretrained(directory)
    return directory
