"""An existing `.onnx` file as an artifact: copied with its external data, then checked."""

from __future__ import annotations

import shutil
from pathlib import Path

from enginery.core.errors import ExportError, SourceError
from enginery.core.external_data import external_data_files
from enginery.core.model_files import ModelConfig
from enginery.export.config import ExportConfig
from enginery.export.exported import Exported
from enginery.export.side_files import copy_side_files
from enginery.runtime.graph_limits import check_allocations


def import_onnx(source: Path, config: ExportConfig, out: Path) -> Exported:
    """Copies the graph as `model.onnx`, its external data under their own names, and side files.

    Raises:
        ExportError: the external data would overwrite the graph.
        SourceError: external data is missing or lies outside the model's directory, or the
            config.json beside the graph is malformed.
    """
    data = external_data_files(source)
    check_allocations(source, error=SourceError)
    if "model.onnx" in data:
        raise ExportError(f"{source}: its external data is named model.onnx, as the graph will be.")
    shutil.copyfile(source, out / "model.onnx")
    for name in data:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.parent / name, out / name)
    settings = ModelConfig.read(source.parent, error=SourceError)
    if (source.parent / ModelConfig.FILE).is_file():
        copy_side_files(source.parent, out, code=False)
        shutil.copyfile(source.parent / "config.json", out / "config.json")
    return Exported(
        files=["model.onnx"],
        task=config.task if config.task != "auto" else "unknown",
        model_type=settings.model_type or "unknown",
        library="onnx",
        config=settings,
        notes=[f"imported from {source.name}"],
    )
