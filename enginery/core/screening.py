"""What a model's own files may not say: nothing that makes a loader run foreign code.

Reads the JSON files that transformers, Optimum, timm and sentence-transformers load, before any of
them does. Trust is given by the person who runs the command, never by a file:

>>> screen_model(Path("downloaded-model"), known_types=CONFIG_MAPPING)
Traceback (most recent call last):
UntrustedModelError: …/config.json: auto_map names Python code that comes with the model: …

What it looks for follows published holes in loaders: a nested configuration whose code is fetched
from elsewhere (CVE-2026-5241), attention kernels fetched from the Hub (CVE-2026-4372).
"""

from __future__ import annotations

import json
import re
from collections.abc import Container, Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from enginery.core.errors import SourceError, UntrustedModelError

# What loaders read settings from, in any folder of a model. Other JSON files hold vocabularies,
# names of tensors, or the notes of whoever trained the model.
_SETTINGS = re.compile(
    r"^(config|tokenizer_config|special_tokens_map|generation_config|preprocessor_config"
    r"|processor_config|video_preprocessor_config|chat_template|adapter_config|model_index"
    r"|modules|config_sentence_transformers|sentence_\w+_config)\.json$"
)

# transformers 4.57: ALL_ATTENTION_FUNCTIONS; anything with a slash is fetched from the Hub.
_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
_ATTENTION_KEYS = ("_attn_implementation", "_attn_implementation_internal", "attn_implementation")

# Loaders open what these name. At the top of a file they are overwritten or ignored by loaders.
_PATH_KEYS = ("_name_or_path", "name_or_path", "backbone", "base_model_name_or_path")
_FILE_KEYS = re.compile(r"(^|_)file$")

_CODE_SUFFIXES = (".py", ".pyc", ".so", ".pyd", ".dll", ".dylib")
_COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja", *_CODE_SUFFIXES)

_TRUST = "Read that code; if you trust its author, pass --trust-remote-code."
_DISTRUST = "A model has no use for it; this one cannot be trusted."


def screen_model(
    directory: Path, *, known_types: Container[str], trust_remote_code: bool = False
) -> None:
    """Refuse a model's directory whose files would make a loader run or open foreign things.

    Args:
        directory: the model's directory, with config.json.
        known_types: the values of `model_type` that the installed transformers has classes for.
            Code that comes with a model of such a type is never used: its own class is.
        trust_remote_code: the consent of the person who runs the command, for all of it.

    Raises:
        UntrustedModelError: a file asks for what it may not; the message names file and key.
        SourceError: a file is not JSON, or a configuration is not an object.
    """
    if trust_remote_code:
        return
    for path in _linked_out(directory):
        raise UntrustedModelError(
            f"{path} is a link to {path.resolve()}, outside the model's directory.",
            do="Put the file itself in its place, if it belongs to the model.",
        )
    for path in sorted(directory.rglob("*.json")):
        inside = path.relative_to(directory)
        hidden = any(part.startswith(".") for part in inside.parts)
        if _SETTINGS.match(path.name) and not hidden:
            _screen_file(directory, path, known_types)


def _screen_file(directory: Path, path: Path, known_types: Container[str]) -> None:
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except RecursionError:
        raise SourceError(f"{path} is nested too deeply to be a configuration.") from None
    except (OSError, ValueError) as error:
        if path.name == "config.json" and path.parent == directory:
            raise SourceError(f"{path} is not valid JSON: {error}.") from error
        return  # a loader that needs it says so itself
    top = document if isinstance(document, dict) else {}
    if path.name == "modules.json":
        _screen_modules(path, document)
    if path.name == "adapter_config.json":
        raise UntrustedModelError(
            f"{path} makes the model an adapter of another one, "
            f"{top.get('base_model_name_or_path')!r}, which loaders fetch by themselves.",
            do="Merge the two: peft's model.merge_and_unload().save_pretrained(DIR).",
        )
    kind = top.get("model_type")
    has_class = path.name != "config.json" or (isinstance(kind, str) and kind in known_types)
    for where, key, value in _members(document):
        nested = "." in where or "[" in where
        if key == "auto_map" and isinstance(value, dict | list | str) and value:
            if nested or not has_class:
                raise UntrustedModelError(
                    f"{path}: {where} names Python code that comes with the model: "
                    f"{_code_files(directory, value)}.",
                    do=_TRUST,
                )
        elif key == "custom_pipelines" and value:
            raise UntrustedModelError(
                f"{path}: {where} names Python code that comes with the model: "
                f"{_code_files(directory, value)}.",
                do=_TRUST,
            )
        elif key == "trust_remote_code" and value:
            raise UntrustedModelError(
                f"{path}: {where} is {value!r}: a file of the model would grant itself trust.",
                do="Remove the key, or pass --trust-remote-code if you trust the model's author.",
            )
        elif key in _ATTENTION_KEYS:
            _screen_attention(f"{path}: {where}", value)
        elif isinstance(value, str) and (
            (key in _PATH_KEYS and nested) or _FILE_KEYS.search(key) or key == "gguf_file"
        ):
            _screen_path(directory, f"{path}: {where}", key, value)


def _members(value: Any, where: str = "") -> Iterator[tuple[str, str, Any]]:
    """Yield every member of every object in a document as its path, its key and its value."""
    pending: list[tuple[str, Any]] = [(where, value)]
    while pending:
        place, found = pending.pop()
        if isinstance(found, Mapping):
            for key, member in found.items():
                inner = f"{place}.{key}" if place else str(key)
                yield inner, str(key), member
                pending.append((inner, member))
        elif isinstance(found, list):
            pending.extend((f"{place}[{index}]", item) for index, item in enumerate(found))


def _screen_attention(where: str, value: Any) -> None:
    """Refuse attention code that transformers would fetch; parts of a model may have their own."""
    for name in value.values() if isinstance(value, Mapping) else [value]:
        if name is not None and str(name).removeprefix("paged|") not in _ATTENTION:
            raise UntrustedModelError(
                f"{where} is {name!r}: transformers would load that code from the Hub. "
                f"Expected one of {', '.join(_ATTENTION)}.",
                do="Remove the key, or pass --trust-remote-code if you trust the model's author.",
            )


def _screen_path(directory: Path, where: str, key: str, value: str) -> None:
    """Refuse a path out of the model's directory; one that earlier tools left is harmless."""
    is_absolute = PurePosixPath(value).is_absolute() or PureWindowsPath(value).is_absolute()
    leads_up = ".." in PurePosixPath(value).parts or ".." in PureWindowsPath(value).parts
    if not is_absolute and not leads_up:
        return
    # A tokenizer's settings often keep the path on the machine that saved them.
    target = directory / value
    if _FILE_KEYS.search(key) and (not target.exists() or _is_below(target, directory)):
        return
    raise UntrustedModelError(
        f"{where} is {value!r}, which leads out of the model's directory.", do=_DISTRUST
    )


def _screen_modules(path: Path, document: Any) -> None:
    modules = document if isinstance(document, list) else []
    for index, module in enumerate(modules):
        kind = module.get("type") if isinstance(module, dict) else module
        if not isinstance(kind, str) or not kind.startswith("sentence_transformers."):
            raise UntrustedModelError(
                f"{path}: [{index}].type is {kind!r}, expected a class of sentence_transformers.",
                do=_TRUST,
            )
        place = module.get("path")
        if isinstance(place, str) and place:
            _screen_path(path.parent, f"{path}: [{index}].path", "path", place)


def _code_files(directory: Path, value: Any) -> str:
    """Name the files with the code that a reference such as `modeling_x.Model` leads to."""
    references = [found for _, _, found in _members({"": value}) if isinstance(found, str)]
    if isinstance(value, list):
        references = [item for item in value if isinstance(item, str)]
    files = []
    for reference in references:
        elsewhere, _, name = reference.rpartition("--")
        file = f"{name.partition('.')[0]}.py"
        files.append(f"{file} of {elsewhere}" if elsewhere else str(directory / file))
    return ", ".join(dict.fromkeys(files)) or "it does not say which"


def _linked_out(directory: Path) -> Iterator[Path]:
    """Yield side files, code and folders that are links to somewhere else.

    Weights may be links, as people keep them on other disks: they are parsed, never copied.
    """
    for path in directory.rglob("*"):
        if path.is_symlink() and (path.suffix in _COPIED_SUFFIXES or path.is_dir()):
            target = path.resolve()
            if not _is_below(target, directory) and not _is_hub_blob(target, directory):
                yield path


def _is_below(target: Path, directory: Path) -> bool:
    return target.resolve().is_relative_to(directory.resolve())


def _is_hub_blob(target: Path, directory: Path) -> bool:
    """Return whether a link is the Hub library's own: snapshots/<commit>/x -> blobs/<hash>."""
    snapshot = directory.resolve()
    return snapshot.parent.name == "snapshots" and target.parent == snapshot.parent.parent / "blobs"
