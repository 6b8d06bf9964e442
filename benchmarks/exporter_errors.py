"""Export tiny models as a user of an exporter would, and compare the graphs at other sizes.

    python -m benchmarks.exporter_errors --work DIR --types mamba,bert
    python -m benchmarks.exporter_errors --work DIR --table     # what is in results/

Nothing of enginery takes part: the exporters are transformers' own with `dynamic=True`, and torch's
with all axes `Dim.AUTO`. Both are traced at a batch of 2 and the usual length, and run at other
sizes. It needs transformers 5. A model runs in a process of its own, and a line of
`DIR/errors.jsonl` has its results.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.model_types import model_types, save_model

EXPORTERS = ("transformers", "torch")
_LENGTHS = (16, 13)
"""Lengths of the example: a multiple of the small chunks and windows here, and none."""
_TEXT_SIZES = ((1, 16), (3, 9), (3, 24), (2, 33))
"""Batches and lengths that a graph of texts is run at."""
_IMAGE_SIZES = ((1, 1.0), (3, 1.0), (2, 1.5), (2, 2.0))
"""Batches and factors of the height and width that a graph of images is run at."""
_WRONG = 1e-2
"""Difference in standard deviations of the output from which a graph is wrong."""
_HUGE = 1e6
"""Absolute value from which on a number stands for a masked one."""


def main() -> None:
    """Export the models, and print a line for each exporter and example."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--types", default="")
    parser.add_argument("--exporters", default=",".join(EXPORTERS))
    parser.add_argument("--seconds", type=int, default=600, help="limit for each example")
    parser.add_argument("--table", action="store_true", help="print the results so far, and end")
    parser.add_argument("--one", nargs=3, metavar=("TYPE", "EXPORTER", "LENGTH"))
    options = parser.parse_args()
    options.work.mkdir(parents=True, exist_ok=True)
    results = options.work / "errors.jsonl"
    if options.one:
        kind, exporter, length = options.one
        print(json.dumps(compare(kind, exporter, int(length))))
        return
    if options.table:
        print(table(json.loads(line) for line in results.read_text().splitlines()))
        return
    for kind in options.types.split(",") if options.types else model_types():
        for exporter in options.exporters.split(","):
            for length in _LENGTHS if _is_text(kind) else _LENGTHS[:1]:
                words = ["--work", str(options.work), "--one", kind, exporter, str(length)]
                result = _run_apart(words, options.seconds)
                result = {"type": kind, "exporter": exporter, "length": length} | result
                with results.open("a") as file:
                    file.write(json.dumps(result) + "\n")
                print(json.dumps(result), flush=True)


def _is_text(kind: str) -> bool:
    """Return True if a type's own task is one of texts."""
    return "vocab_size" in model_types()[kind]["config"]


def _run_apart(words: list[str], seconds: int) -> dict[str, Any]:
    command = [sys.executable, "-m", "benchmarks.exporter_errors", *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=seconds, check=False)
    except subprocess.TimeoutExpired:
        return {"error": f"no result after {seconds} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"error": (done.stderr.strip().splitlines() or ["no output"])[-1]}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def compare(kind: str, exporter: str, length: int) -> dict[str, Any]:
    """Return how far a graph is from PyTorch at each size, or why there is none."""
    import onnxruntime
    import torch

    warnings.simplefilter("ignore")
    model = _load(kind)
    example = _inputs(model, 2, length, 1.0)
    traced = _shape(example)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.onnx")
        try:
            _export(model, example, exporter, path)
            session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        except Exception as error:  # torch, models and ONNX Runtime raise many unrelated types
            return {"error": _first_line(error)}
        sizes: dict[str, Any] = {}
        for batch, size in _sizes(example):
            inputs = _inputs(model, batch, *size)
            with torch.no_grad():
                expected = model(**inputs)
            sizes[_shape(inputs)] = _difference(session, inputs, dict(expected.items()))
        declared = {value.name: value.shape for value in session.get_inputs()}
        return {"traced": traced, "sizes": sizes, "inputs": declared}


def _load(kind: str) -> Any:
    """Return a tiny model with a task's head, without a cache."""
    import transformers

    from enginery.runtime.pytorch.classes import class_for_task

    entry = model_types()[kind]
    task = entry["task"].removesuffix("-with-past")
    with tempfile.TemporaryDirectory() as folder:
        source = save_model(kind, entry["task"], Path(folder, "model"))
        config = transformers.AutoConfig.from_pretrained(source)
        own = getattr(transformers, entry["class"])
        loader = own if hasattr(own, "config_class") else class_for_task(task, config)
        model = loader.from_pretrained(source).eval()
    model.config.use_cache = False
    return model


def _inputs(model: Any, batch: int, length: int, scale: float) -> dict[str, Any]:
    """Return the main input of a model and its mask, without padding."""
    import torch

    generator = torch.Generator().manual_seed(0)
    config = model.config
    if model.main_input_name == "pixel_values":
        parts = (config, getattr(config, "backbone_config", None))
        edge = next(filter(None, (getattr(part, "image_size", None) for part in parts)), 64)
        height, width = edge if isinstance(edge, (list, tuple)) else (edge, edge)
        shape = (batch, getattr(config, "num_channels", 3), int(height * scale), int(width * scale))
        return {"pixel_values": torch.randn(shape, generator=generator)}
    ids = torch.randint(5, min(config.vocab_size, 40), (batch, length), generator=generator)
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    if config.is_encoder_decoder:
        inputs["decoder_input_ids"] = ids[:, : length - 2].contiguous()
    return inputs


def _shape(inputs: Mapping[str, Any]) -> str:
    return " × ".join(map(str, next(iter(inputs.values())).shape))


def _sizes(example: Mapping[str, Any]) -> list[tuple[int, tuple[int, float]]]:
    """Return the batch, and the length and the factor of images, of each run."""
    if "pixel_values" in example:
        return [(batch, (0, factor)) for batch, factor in _IMAGE_SIZES]
    return [(batch, (length, 1.0)) for batch, length in _TEXT_SIZES]


def _export(model: Any, example: dict[str, Any], exporter: str, path: Path) -> None:
    """Write a graph that takes any size, as far as its exporter says so."""
    import onnx_ir
    import torch

    if exporter == "transformers":
        from transformers.exporters import OnnxConfig, OnnxExporter

        exported = OnnxExporter().export(model, dict(example), config=OnnxConfig(dynamic=True))
        onnx_ir.save(exported.program, path)
        return
    auto = torch.export.Dim.AUTO
    shapes = {name: dict.fromkeys(range(value.ndim), auto) for name, value in example.items()}
    program = torch.onnx.export(
        model, kwargs=dict(example), dynamo=True, dynamic_shapes=shapes, verbose=False
    )
    program.save(path)


def _difference(session: Any, inputs: Mapping[str, Any], expected: Mapping[str, Any]) -> Any:
    """Return the largest difference in standard deviations, or what went wrong."""
    feeds = {name: tensor.numpy() for name, tensor in inputs.items()}
    known = {value.name for value in session.get_inputs()}
    names = [value.name for value in session.get_outputs()]
    try:
        values = session.run(None, {name: feeds[name] for name in feeds if name in known})
    except Exception as error:  # ONNX Runtime raises many unrelated types
        return _first_line(error)
    first = next(name for name, value in expected.items() if hasattr(value, "numpy"))
    reference = expected[first].numpy()
    value = values[names.index(first) if first in names else 0]
    if value.shape != reference.shape:
        return f"shape {value.shape} instead of {reference.shape}"
    usual = np.abs(reference) < _HUGE
    return float(np.abs(value - reference)[usual].max() / reference[usual].std())


def _first_line(error: BaseException) -> str:
    """Return what an exception says first, with the cause that torch.onnx wraps."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0]}" if lines else repr(error)


def table(results: Any) -> str:
    """Return the exports that reported success and are wrong or fail at another size."""
    latest = {(row["type"], row["exporter"], row["length"]): row for row in results}
    rows = []
    for (kind, exporter, length), row in sorted(latest.items()):
        for size, outcome in row.get("sizes", {}).items():
            if isinstance(outcome, str) or not outcome < _WRONG:
                traced = row.get("traced", f"2 × {length}")
                rows.append(f"| {kind} | {exporter} | {traced} | {size} | {_in_short(outcome)} |")
    return "\n".join(["| type | exporter | traced at | run at | result |", "|-|-|-|-|-|", *rows])


def _in_short(outcome: str | float) -> str:
    """Return the result of a run that is not PyTorch's.

    >>> _in_short(0.52), _in_short("Fail: Non-zero status code returned while running Add node.")
    ('differs by 0.52 σ', 'Add fails')
    """
    if not isinstance(outcome, str):
        return f"differs by {outcome:.2g} σ"
    if node := re.search(r"while running (\w+) node", outcome):
        return f"{node[1]} fails"
    return "refused: the graph has another size" if "invalid dimensions" in outcome else outcome


if __name__ == "__main__":
    main()
