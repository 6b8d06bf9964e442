"""The child process that fuses graphs. It imports torch and transformers, and loads all weights.

It reads a request file, writes the fused graphs to the directory that the request names, and writes
a result file.

    $ python -m enginery.optimize.worker request.json result.json
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from enginery.core.errors import ExportError, UntrustedModelError
from enginery.core.subprocess import peak_rss_bytes, worker_main


def fuse(model: Path, files: list[str], level: str, out: Path) -> list[str]:
    """Fuse each graph and write it under its own name to `out`; return notes.

    Raises:
        ExportError: Optimum or ONNX Runtime cannot fuse the graph, or the model's configuration
            requires code of the model's author.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when the Hub library is imported below
    from enginery.runtime.pytorch.runner import guarded

    try:
        with guarded(model, trust_remote_code=False, writable=[out]):
            return _fuse(model, files, level, out)
    except UntrustedModelError as error:
        raise ExportError(
            error.message,
            do="Fusions depend on the configuration's class, which is not loaded here. Use "
            "--target tensorrt, which needs no fusions.",
        ) from error


def _fuse(model: Path, files: list[str], level: str, out: Path) -> list[str]:
    from optimum.onnxruntime import ORTOptimizer
    from optimum.onnxruntime.configuration import AutoOptimizationConfig
    from optimum.onnxruntime.utils import ORTConfigManager
    from transformers import AutoConfig

    # O4 is O3 in FP16; the cast to FP16 follows later, when the ranges are known.
    name = "O3" if level == "O4" else level
    kind = AutoConfig.from_pretrained(model).model_type
    config = AutoOptimizationConfig.with_optimization_level(name, disable_shape_inference=True)
    # ONNX Runtime applies its higher levels when it loads the graph, for the provider that runs it.
    # Applied here, they would suit this machine: some of the CPU's fused ops have no CUDA kernel.
    config.optimization_level = 1
    try:
        ORTConfigManager.check_optimization_supported_model(kind, config)
    except NotImplementedError:
        return _basic(model, files, kind, out)
    try:
        optimizer = ORTOptimizer.from_pretrained(str(model), file_names=files)
        optimizer.optimize(config, save_dir=str(out), file_suffix="")
    except (KeyError, NotImplementedError, RuntimeError, ValueError) as error:
        raise ExportError(f"Optimum cannot fuse {kind} at {name}: {error}") from error
    return [f"fused by Optimum at {name} as {ORTConfigManager.get_model_ort_type(kind)}"]


def _basic(model: Path, files: list[str], kind: str, out: Path) -> list[str]:
    """Apply only ONNX Runtime's level 1, for a model type without fusions in Optimum."""
    from onnxruntime.transformers.optimizer import optimize_model

    for file in files:
        optimized = optimize_model(str(model / file), opt_level=1, only_onnxruntime=True)
        external = any((model / file).parent.glob(f"{file}*data"))
        optimized.save_model_to_file(str(out / file), use_external_data_format=external)
    return [f"no fusions: Optimum has none for {kind}; only ONNX Runtime's level 1"]


def handle_request(request: dict[str, Any]) -> dict[str, Any]:
    """Run one request; request and result are JSON data."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they concern third-party code
        notes = fuse(
            Path(request["model"]), request["files"], request["level"], Path(request["out"])
        )
    return {"notes": notes, "peak_rss_bytes": peak_rss_bytes()}


if __name__ == "__main__":
    worker_main(handle_request, description="fusing")
