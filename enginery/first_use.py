"""Take a model wherever an artifact is expected: it is exported and validated on its first use.

    with load_model("sentence-transformers/all-MiniLM-L6-v2") as model: ...

The artifact is in the store from then on, and later uses start with it.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from pathlib import Path
from typing import Concatenate, ParamSpec, TypeVar

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.staging import MANIFEST
from enginery.core.errors import EngineryError
from enginery.core.model.files import ModelConfig
from enginery.core.model.source import is_hub_id
from enginery.core.progress import SILENT, Progress
from enginery.export.config import ExportConfig
from enginery.runtime import model as runtime
from enginery.stages import run_cached, run_validate
from enginery.validate.config import ValidateConfig

Parameters = ParamSpec("Parameters")
Result = TypeVar("Result")


def open_or_make(model: str | Path | Artifact, *, progress: Progress = SILENT) -> Artifact:
    """Open an artifact, or make it of a model.

    Args:
        model: an artifact or its directory; or a model: a Hub id, a directory, an `.onnx` file or
            `package:NAME`. A Hub id whose first part is a directory here is a path.
        progress: receives progress messages.

    Raises:
        ArtifactError: the path is neither.
        EngineryError: the model cannot be exported or compared; see `run_cached`.
    """
    if isinstance(model, Artifact):
        return model
    if not names_model(str(model)):
        return Artifact.open(model)
    progress.say(
        f"{model} is a model: its artifact is made on first use, then taken from the store"
    )
    try:
        artifact = run_cached(str(model), ExportConfig(), progress=progress).artifact
        verdict = artifact.manifest.verdict("validate")
        if verdict is not None and verdict.passed:  # whatever its options were
            return artifact
        return run_validate(artifact, ValidateConfig(), progress=progress).artifact
    except EngineryError as error:
        message = f"{model} is not an artifact, and its model cannot be exported: {error.message}"
        raise type(error)(message, do=error.do) from error


def names_model(name: str) -> bool:
    """Return True for what names a model, not the directory of an artifact."""
    if name.startswith("package:"):
        return True
    path = Path(name).expanduser()
    if path.is_dir():
        return not (path / MANIFEST).exists() and (path / ModelConfig.FILE).exists()
    if path.is_file():
        return path.suffix == ".onnx"
    # `build/minilm` that is missing here is a mistake, no model of an organization `build`.
    organization, slash, _ = name.partition("/")
    return bool(slash) and is_hub_id(name) and not Path(organization).exists()


def _also_of_models(
    function: Callable[Concatenate[str | Path | Artifact, Parameters], Result],
) -> Callable[Concatenate[str | Path | Artifact, Parameters], Result]:
    """Return the function of an artifact as one that takes models, too."""

    @wraps(function, assigned=("__name__", "__qualname__", "__doc__"))
    def of_artifact_or_model(
        artifact: str | Path | Artifact, /, *args: Parameters.args, **options: Parameters.kwargs
    ) -> Result:
        return function(open_or_make(artifact), *args, **options)

    return of_artifact_or_model


load_model = _also_of_models(runtime.load_model)
