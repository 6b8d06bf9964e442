"""Write the weights of sentence-transformers' modules, Dense and LayerNorm, for the artifact.

They become float32 safetensors at the place where sentence-transformers looks for them, whatever
their type and file are: `runtime/text/pooling.py` reads them with numpy alone.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from enginery.core.errors import ExportError, SourceError
from enginery.core.model.files import DenseConfig, read_modules
from enginery.core.model.weights import MODULE_WEIGHTS, is_module_folder
from enginery.runtime.text.pooling import require_dense


def write_module_weights(source: Path, out: Path) -> list[str]:
    """Write the weights of each module that has some, and return notes.

    Args:
        source: the model directory.
        out: the staging directory.

    Raises:
        ExportError: a module is not supported, or its weights are missing.
    """
    if not (source / "modules.json").is_file():
        return []
    notes = []
    for module in read_modules(source):
        if module.kind not in ("Dense", "LayerNorm"):
            continue
        # The weights of other folders are not in the source's hash, nor was a pickle refused.
        if not is_module_folder(module.path):
            raise ExportError(
                f"{source / 'modules.json'}: the module {module.kind} is in {module.path!r}, "
                "expected a folder such as 2_Dense.",
                do="Save the model again with sentence-transformers.",
            )
        folder = source / module.path
        if module.kind == "Dense":
            config = DenseConfig.read(folder, error=SourceError)
            require_dense(folder / DenseConfig.FILE, config, error=ExportError)
        tensors = _load(folder)
        (out / module.path).mkdir(parents=True, exist_ok=True)
        save_file(
            {name: tensor.float().contiguous() for name, tensor in tensors.items()},
            out / module.path / MODULE_WEIGHTS[0],
        )
        notes.append(f"the module {module.path} runs after the graph, in FP32")
    return notes


def _load(folder: Path) -> dict[str, Any]:
    """Return the tensors of a module; `find_module_weights` has refused unwanted pickles."""
    safe, pickled = (folder / name for name in MODULE_WEIGHTS)
    if safe.is_file():
        return dict(load_file(safe))
    if not pickled.is_file():
        raise ExportError(
            f"{folder} has no weights: expected {' or '.join(MODULE_WEIGHTS)}.",
            do="Save the model again with sentence-transformers.",
        )
    return dict(torch.load(pickled, map_location="cpu", weights_only=True))
