"""Quantize detectors from .onnx files to INT8, and compare the boxes that they find.

    python -m benchmarks.quantize_detectors --packages DIR --photos DIR --work DIR ddddocr rapidocr

With `--target cpu`, they are quantized for ONNX Runtime's CPU provider.

The models come with the packages of these names: `pip download --no-deps ddddocr nudenet rapidocr`,
and unzip. Calibration and test images are crops of photographs with lines of text;
the photographs of `--photos` are divided between both, so that no crop that measures has been seen.
Boxes are compared with those of the source file in ONNX Runtime, as `quantize` compares them. For
TensorRT, each model is quantized with and without bias correction. For the CPU, FP32 and INT8 take
turns over the test images, one at a time, on all cores.
"""

from __future__ import annotations

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from enginery import Artifact, export_model, quantize_model
from enginery.core.model.feeds import Feeds
from enginery.reports.quantization import QuantizationReport
from enginery.runtime.agreement import AnswerAgreement
from enginery.runtime.detections import read_detections
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.onnxruntime.tracing import GraphTracer
from enginery.runtime.sample_inputs import ImageFeeder, media_batches
from tests.photos import save_pages

MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "ddddocr": ("common_det.onnx", {"rescale": "1", "channel_order": "bgr"}),
    "nudenet": ("320n.onnx", {"resize": "320"}),
    "rapidocr": (
        "models/PP-OCRv6_det_small.onnx",
        {
            "resize": "416",
            "mean": "0.485,0.456,0.406",
            "std": "0.229,0.224,0.225",
            "channel_order": "bgr",
        },
    ),
}
"""Package -> file, and how an image becomes its input."""
_IMAGES = {"calibration": 192, "test": 96}


def main() -> None:
    """Quantize each model, and print a table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("models", nargs="+", choices=MODELS)
    parser.add_argument("--packages", type=Path, required=True, help="the folder of the packages")
    parser.add_argument("--photos", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--min-cosine", type=float, default=0.9985)
    parser.add_argument("--target", choices=("tensorrt", "cpu"), default="tensorrt")
    parser.add_argument("--rounds", type=int, default=5, help="of the CPU's speed")
    given = parser.parse_args()
    files = sorted(p for p in given.photos.rglob("*") if p.suffix in (".png", ".jpg"))
    for index, name in enumerate(_IMAGES):
        photos = [Image.open(file).convert("RGB") for file in files[index::2]]
        save_pages(given.work / name, _IMAGES[name], photos=photos, seed=index)
    run = "to FP32, by round" if given.target == "cpu" else "engine"
    print(f"| model | bias correction | layers | multiply-adds | {run} | cosine | least | F1 | s |")
    print("|-|-|-|-|-|-|-|-|-|")
    for model in given.models:
        file, options = MODELS[model]
        source = export_model(str(given.packages / model / file), opset=20, **options)
        for correct in (True, False) if given.target == "tensorrt" else (True,):
            started = time.monotonic()
            quantized = quantize_model(
                source,
                data=str(given.work / "calibration"),
                rows=given.rows,
                min_cosine=given.min_cosine,
                scheme="int8",
                target=given.target,
                bias_correction=correct,
                force=True,
            )
            seconds = time.monotonic() - started
            cells = row(source, quantized, given.work / "test", given.rounds)
            print(f"| {model} | {correct} | {cells} | {seconds:.0f} |", flush=True)


def row(source: Artifact, quantized: Artifact, images: Path, rounds: int) -> str:
    """Return the cells of one quantized model."""
    report = QuantizationReport.of(quantized)
    record = source.manifest.graphs[0]
    agreement = AnswerAgreement.of(source.path)
    files = sorted(images.glob("*.png"))
    boxes = 0  # that the unquantized graph finds
    every = [
        batch.load()
        for batch in media_batches("images", ImageFeeder.open(source, record), files, record)
    ]
    names = [spec.name for spec in record.outputs]
    with (
        GraphTracer(source.path / record.file, names, optimized=True) as reference,
        GraphTracer(quantized.path / record.file, names, optimized=True) as int8,
    ):
        for feeds in every:
            found = {name: np.asarray(a, np.float32) for name, a in int8(feeds).items()}
            wanted = reference(feeds)
            agreement.add(found, wanted, feeds)
            boxes += sum(len(each.boxes) for each in read_detections(wanted, feeds) or ())
    seen = agreement.metrics()
    found_boxes = "–" if seen.box_f1 is None else f"{seen.box_f1:.1%} of {boxes}"
    total = len(report.quantized_layers) + len(report.left_out)
    layers = f"{len(report.quantized_layers)} of {total}"
    share = report.multiply_adds.share if report.multiply_adds else float("nan")
    cosines = f"{seen.cosine:.5f} | {seen.worst_cosine:.4f}"
    if report.engines:
        trial = report.engines[0]
        run = f"{trial.quantized_layers} of {trial.quantized_layers + len(trial.not_quantized)}"
    else:
        run = speedup(source, quantized, every, rounds)
    return f"{layers} | {share:.1%} | {run} | {cosines} | {found_boxes}"


def speedup(source: Artifact, quantized: Artifact, every: list[Feeds], rounds: int) -> str:
    """Return how many times as fast as FP32 the quantized graph is in ONNX Runtime on the CPU."""
    ratios = []
    for _ in range(rounds):
        seconds = []
        for artifact in (source, quantized):
            # One session at a time: the idle threads of another one would wait in busy loops.
            with OrtRunner(artifact) as runner:
                for feeds in every[:8]:
                    runner(feeds)
                started = time.perf_counter()
                for feeds in every:
                    runner(feeds)
                seconds.append(time.perf_counter() - started)
        ratios.append(seconds[0] / seconds[1])
    return f"{statistics.median(ratios):.2f} ({min(ratios):.2f}–{max(ratios):.2f})"


if __name__ == "__main__":
    main()
