"""Find the weight files that transformers will load, and refuse pickled ones.

weights = find_local_weights("minilm", Path("minilm"), allow_pickle=False)
weights.files      # ('model.safetensors',)
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginery.core.errors import SourceError
from enginery.core.json_file import read_json
from enginery.core.paths import is_relative_path

# In the order of transformers 4.57; source: _get_resolved_checkpoint_files in modeling_utils.py.
# timm looks for the two single files in the same order.
_WEIGHTS = (
    "model.safetensors",
    "model.safetensors.index.json",
    "pytorch_model.bin",
    "pytorch_model.bin.index.json",
)
_INDEX = ".index.json"
MODULE_WEIGHTS = ("model.safetensors", "pytorch_model.bin")
"""Weight files of a module of sentence-transformers, in the order in which it looks for them."""
_MODULE_FOLDER = "[0-9]+_(Dense|LayerNorm)"
_MODULE = re.compile(rf"{_MODULE_FOLDER}/({'|'.join(map(re.escape, MODULE_WEIGHTS))})$")


def is_module_folder(name: str) -> bool:
    """Return True for the folder of a module whose weights belong to the model: `2_Dense`."""
    return re.fullmatch(_MODULE_FOLDER, name.strip("/")) is not None


@dataclass(frozen=True)
class Weights:
    """The weight files that transformers loads, relative to the model's directory."""

    files: tuple[str, ...]
    pickled: bool
    """True for PyTorch's pickle format, which can run code when it is loaded."""


def find_local_weights(model: str, path: Path, *, allow_pickle: bool) -> Weights:
    """Return the weights of a local model.

    Args:
        model: name of the model for messages.
        path: directory of the model.
        allow_pickle: accept pickled weights.

    Raises:
        SourceError: there is no config.json, no usable weights, or only pickled ones.
    """
    if not (path / "config.json").is_file():
        raise SourceError(
            f"model '{model}': {path} has no config.json, so it is not a Hugging Face model.",
            do="Pass the directory that save_pretrained wrote.",
        )
    return find_weights(
        model,
        {p.name for p in path.iterdir() if p.is_file()},
        lambda name: read_json(path / name),
        allow_pickle=allow_pickle,
    )


def find_weights(
    model: str,
    names: Collection[str],
    read_json_file: Callable[[str], dict[str, Any]],
    *,
    allow_pickle: bool,
) -> Weights:
    """Return the weights that transformers will load, searched in its order.

    Other files with weights are ignored.

    Args:
        model: name of the model for messages.
        names: names of the files directly in the model's directory.
        read_json_file: reads config.json or an index of shards.
        allow_pickle: accept pickled weights.

    Raises:
        SourceError: there are no weights, or only pickled ones, or an index names missing files or
            other directories.
    """
    main_file = next((name for name in _WEIGHTS if name in names), "")
    # config.json may name a file with this key; transformers accepts only safetensors there.
    if any(".safetensors" in name for name in names):
        configured = read_json_file("config.json").get("transformers_weights")
        configured_file = _require_name(model, "config.json: transformers_weights", configured)
        main_file = configured_file or main_file
    if main_file not in names:
        others = sorted(n for n in names if n.endswith((".safetensors", ".bin", ".pt", ".ckpt")))
        description = f"found {', '.join(others[:3])}" if others else "found none"
        raise SourceError(
            f"model '{model}' has no weights: expected {main_file or ' or '.join(_WEIGHTS)}, "
            f"{description}.",
            do="Save them with model.save_pretrained(DIR), under the names transformers loads.",
        )
    pickled = ".safetensors" not in main_file
    files: tuple[str, ...] = (main_file,)
    if main_file.endswith(_INDEX):
        files = _shards(model, main_file, names, read_json_file, pickled=pickled)
    if pickled and not allow_pickle:
        raise SourceError(
            f"model '{model}' has only pickled weights ({files[0]}). "
            "Unpickling can run code from the file, so they are refused by default.",
            do="Convert them to safetensors, or pass --allow-pickle if you trust their author.",
        )
    return Weights(files, pickled)


def find_module_weights(
    model: str, names: Collection[str], *, allow_pickle: bool
) -> tuple[str, ...]:
    """Return the weight files of sentence-transformers' modules, such as `2_Dense`.

    Args:
        model: name of the model for messages.
        names: names of all files of the model, relative to its directory.
        allow_pickle: accept pickled weights.

    Raises:
        SourceError: a module has only pickled weights.
    """
    files = []
    for folder in sorted({name.partition("/")[0] for name in names if _MODULE.match(name)}):
        safe, pickle = (f"{folder}/{name}" for name in MODULE_WEIGHTS)
        if safe not in names and not allow_pickle:
            raise SourceError(
                f"model '{model}' has only pickled weights for the module {folder} ({pickle}). "
                "Unpickling can run code from the file, so they are refused by default.",
                do="Convert them to safetensors, or pass --allow-pickle if you trust their author.",
            )
        files.append(safe if safe in names else pickle)
    return tuple(files)


def _shards(
    model: str,
    index: str,
    names: Collection[str],
    read_json_file: Callable[[str], dict[str, Any]],
    *,
    pickled: bool,
) -> tuple[str, ...]:
    """Return the files that an index names; see `find_weights` for the arguments and errors."""
    shards = read_json_file(index).get("weight_map")
    if not isinstance(shards, dict) or not shards:
        raise SourceError(
            f"model '{model}': {index}: weight_map is {type(shards).__name__}, expected an object "
            "that names the file of each tensor."
        )
    files = sorted({_require_name(model, f"{index}: weight_map", name) for name in shards.values()})
    for name in files:
        if name not in names:
            raise SourceError(f"model '{model}': {index} names {name}, which is missing.")
        if pickled == name.endswith(".safetensors"):
            raise SourceError(f"model '{model}': {index} names {name}, which has another format.")
    return tuple(files)


def _require_name(model: str, key: str, name: object) -> str:
    """Return the name of a file in the same directory; empty for None."""
    if name is None:
        return ""
    if not isinstance(name, str) or not is_relative_path(name) or "/" in name:
        raise SourceError(
            f"model '{model}': {key} is {name!r}, expected the name of a file in the same "
            "directory.",
            do="A model may load only files of its own directory; do not trust this one.",
        )
    return name
