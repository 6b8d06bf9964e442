"""Import an existing `.onnx` file with its external data and the files beside it."""

from __future__ import annotations

import shutil
from pathlib import Path

from enginery.core.artifact.external_data import external_data_files
from enginery.core.errors import ExportError, SourceError
from enginery.core.model.files import ModelConfig
from enginery.core.model.screening import screen_model
from enginery.export.config import ExportConfig
from enginery.export.graphs import ExportedModel
from enginery.export.side_files import copy_side_files
from enginery.runtime.onnxruntime.graph_limits import check_allocations


def import_onnx(source: Path, config: ExportConfig, out: Path) -> ExportedModel:
    """Copy the graph as `model.onnx`, its external data under their own names, and side files.

    Raises:
        ExportError: the external data would overwrite the graph.
        SourceError: external data is missing or is outside the model's directory, or the
            config.json beside the graph is malformed.
        UntrustedModelError: the files beside the graph require permissions that only the user may
            give, or they are links out of the directory.
    """
    check_allocations(source, error=SourceError)  # before the package onnx reads the whole file
    data = external_data_files(source)
    has_side_files = (source.parent / ModelConfig.FILE).is_file()
    if has_side_files:
        trust = config.trust_remote_code
        screen_model(source.parent, known_types=_KnownTypes(), trust_remote_code=trust)
    if "model.onnx" in data:
        raise ExportError(
            f"{source}: its external data is named model.onnx, which will be the graph's name.",
            do="Save the graph with another name for its external data.",
        )
    shutil.copyfile(source, out / "model.onnx")
    for name in data:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.parent / name, out / name)
    settings = ModelConfig.read(source.parent, error=SourceError)
    if has_side_files:
        copy_side_files(source.parent, out, code=False, config=True)
    return ExportedModel(
        files=["model.onnx"],
        task=config.task if config.task != "auto" else "unknown",
        model_type=settings.model_type or "unknown",
        library="onnx",
        config=settings,
        notes=[f"imported from {source.name}"],
    )


class _KnownTypes:
    """The model types of transformers, which is imported only when one is looked up."""

    def __contains__(self, kind: object) -> bool:
        try:
            from transformers import CONFIG_MAPPING
        except ImportError:  # importing a graph needs neither transformers nor PyTorch
            return False
        return kind in CONFIG_MAPPING
