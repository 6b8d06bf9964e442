"""The child process that fuses a graph: it imports torch and transformers, and holds all weights.

Takes a request file; leaves fused graphs in the directory that it names, and a result file.

    $ python -m enginery.optimize.worker request.json result.json
"""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any

from enginery.core.child import answer_parent
from enginery.core.errors import ExportError, UntrustedModelError
from enginery.core.memory import peak_rss_bytes


def fuse(model: Path, files: list[str], level: str, out: Path) -> list[str]:
    """Write each graph, fused, under its own name to `out`; return notes.

    Raises:
        ExportError: Optimum or ONNX Runtime cannot fuse the graph, or the model's configuration
            asks for foreign code.
    """
    os.environ["HF_HUB_OFFLINE"] = "1"  # read when the Hub library is imported, just below
    from enginery.runtime.torch import guarded

    try:
        with guarded(model, trust_remote_code=False, writable=[out]):
            return _fuse(model, files, level, out)
    except UntrustedModelError as error:
        raise ExportError(
            error.message,
            do="Fusions follow the class of the configuration, and this one is not loaded. "
            "--target tensorrt needs none.",
        ) from error


def _fuse(model: Path, files: list[str], level: str, out: Path) -> list[str]:
    from optimum.onnxruntime import ORTOptimizer
    from optimum.onnxruntime.configuration import AutoOptimizationConfig
    from optimum.onnxruntime.utils import ORTConfigManager
    from transformers import AutoConfig

    # O4 is O3 in FP16, and FP16 is made afterwards, where ranges are known.
    name = "O3" if level == "O4" else level
    kind = AutoConfig.from_pretrained(model).model_type
    config = AutoOptimizationConfig.with_optimization_level(name, disable_shape_inference=True)
    # What lies beyond level 1 ONNX Runtime applies when it loads the graph, for the provider that
    # runs it. Written into the file here, it would be this machine's: some of the CPU's fused ops
    # have no CUDA kernel.
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
    """ONNX Runtime's level 1 for a model type whose fusions nobody has written."""
    from onnxruntime.transformers.optimizer import optimize_model

    for file in files:
        optimized = optimize_model(str(model / file), opt_level=1, only_onnxruntime=True)
        external = any((model / file).parent.glob(f"{file}*data"))
        optimized.save_model_to_file(str(out / file), use_external_data_format=external)
    return [f"no fusions: Optimum has none for {kind}; ONNX Runtime's level 1 alone"]


def handle_request(request: dict[str, Any]) -> dict[str, Any]:
    """Runs one request, from JSON and to JSON."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about code that is not ours
        notes = fuse(Path(request["model"]), request["files"], request["level"],
                     Path(request["out"]))  # fmt: skip
    return {"notes": notes, "peak_rss_bytes": peak_rss_bytes()}


if __name__ == "__main__":
    answer_parent(handle_request, what="fusing")
