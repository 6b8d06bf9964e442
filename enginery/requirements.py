"""The optional packages that each stage needs, which are checked before it does anything.

    require_stages([("quantize", QuantizeConfig())])
    # MissingPackageError: Quantizing a model needs the packages 'onnx' and 'onnx-ir', which are not
    # installed. Install them with: pip install 'enginery[export]'

What only some models or files need, such as the extra `audio`, is checked where it is used, and an
import that still fails is translated by `core/extras.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from enginery.core.python_environment import OWN_ENVIRONMENT, PythonEnvironment
from enginery.core.versions import TRANSFORMERS5
from enginery.engine.config import BuildConfig
from enginery.export.config import ExportConfig
from enginery.optimize.config import OptimizeConfig
from enginery.predict.config import PredictConfig
from enginery.quantize.config import QuantizeConfig, list_capabilities
from enginery.runtime.providers.availability import ONNXRUNTIME, require_onnxruntime
from enginery.runtime.tensorrt.options import CLASSIC, RTX
from enginery.validate.config import ValidateConfig

PURPOSES = {
    "export": "Exporting a model",
    "optimize": "Optimizing a model",
    "quantize": "Quantizing a model",
    "build": "Building an engine",
    "validate": "Validating a model",
    "lint": "Linting a model",
    "bench": "Measuring a model",
    "predict": "Predicting the rows of a file",
    "publish": "Publishing a model",
    "pull": "Pulling a model",
    "export-triton": "Writing a model repository",
    "export-kserve": "Writing an InferenceService",
    "run": "Running this recipe",
}
"""Stage or command -> start of the message."""

_GRAPHS = ("onnx", "onnx_ir")
_PYTORCH = ("torch", "transformers")
_OPTIMUM = ("optimum",)
_ROWS = ("pyarrow", "orjson")
_FOLDING = "onnxscript"


@dataclass(frozen=True)
class _Packages:
    """Modules that a stage needs."""

    now: tuple[str, ...] = ()
    later: tuple[str, ...] = ()
    """Those that a later check requires, in words that say more; see `require_packages`."""
    elsewhere: tuple[str, ...] = ()
    """Those of the environment that exports or runs PyTorch, if that is another one."""
    environment: PythonEnvironment = OWN_ENVIRONMENT
    """That environment."""


def require_stages(
    steps: Sequence[tuple[str, Any]], *, is_onnx: bool = False, purpose: str = ""
) -> None:
    """Check that the packages of stages are installed; nothing is imported.

    Args:
        steps: names of stages with their options.
        is_onnx: True if the model is an .onnx file, or was made from one.
        purpose: start of the message; empty for that of the first stage.

    Raises:
        MissingPackageError: a package is not installed.
        ProviderError: the installation of ONNX Runtime is broken.
        OptionError: there is no such interpreter as an option names, or it is too old.
    """
    needed = [_packages(stage, options, is_onnx=is_onnx) for stage, options in steps]
    now = dict.fromkeys(module for packages in needed for module in packages.now)
    later = [module for packages in needed for module in packages.later]
    purpose = purpose or PURPOSES[steps[0][0]]
    require_onnxruntime(purpose, *now, later=later)
    for packages in needed:
        if not packages.environment.is_own:
            packages.environment.require(purpose, packages.elsewhere)


def _packages(stage: str, options: Any, *, is_onnx: bool) -> _Packages:
    rows = _ROWS if getattr(options, "data", "") else ()
    match stage, options:
        case "export", ExportConfig():
            if is_onnx:
                return _Packages((ONNXRUNTIME, *_GRAPHS))
            environment = PythonEnvironment.find(options.python)
            exporter = options.exporter
            if exporter == "auto" and environment.family != TRANSFORMERS5:
                exporter = "optimum"
            traced = (*_PYTORCH, *(_OPTIMUM if exporter == "optimum" else (_FOLDING,)))
            modules = (ONNXRUNTIME, *_GRAPHS, *traced)
            if environment.is_own:
                return _Packages(modules)
            return _Packages(elsewhere=modules, environment=environment)
        case "optimize", OptimizeConfig():
            return _Packages((ONNXRUNTIME, *_GRAPHS, _FOLDING), rows)
        case "quantize", QuantizeConfig():
            trials = list_capabilities(options) and options.scheme != "dynamic"
            return _Packages((ONNXRUNTIME, *_GRAPHS), (*rows, *([RTX.module] if trials else ())))
        case "build", BuildConfig():
            # Classic TensorRT is in no extra.
            bindings = () if options.flavor == CLASSIC.name else (RTX.module,)
            return _Packages((*bindings, *_GRAPHS), rows)
        case "validate", ValidateConfig():
            is_file = options.reference.endswith(".onnx") if options.reference else is_onnx
            graphs = (ONNXRUNTIME, *_GRAPHS)
            if is_file:
                return _Packages(graphs, rows)
            environment = PythonEnvironment.find(options.python)
            if environment.is_own:
                return _Packages((*graphs, *_PYTORCH), rows)
            return _Packages(graphs, rows, _PYTORCH, environment)
        case "predict", PredictConfig():
            return _Packages((ONNXRUNTIME,), _ROWS)  # later: .npz has no rows
        case "lint", _:
            return _Packages(_GRAPHS)
        case "bench", _:
            return _Packages((ONNXRUNTIME,), rows)
    return _Packages()
