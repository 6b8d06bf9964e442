"""Reject model files that would make a loader run foreign code.

This reads the JSON files that transformers, Optimum, timm and sentence-transformers load, before
they do. Trust is given by the user on the command line, never by a file of the model:

    screen_model(Path("downloaded-model"), known_types=CONFIG_MAPPING)
    # UntrustedModelError: …/config.json: auto_map names Python code that comes with the model: …

The checks follow published vulnerabilities of loaders: a nested configuration whose code is fetched
from another repository (CVE-2026-5241), attention kernels fetched from the Hub (CVE-2026-4372),
names of chat templates that are paths, to which saving a tokenizer writes (CVE-2026-9856).
"""

from __future__ import annotations

import os
import re
import reprlib
from collections.abc import Container, Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

from enginery.core.errors import UntrustedModelError
from enginery.core.json_file import load_json
from enginery.core.paths import list_tree

# Files that loaders read settings from, in any folder of a model. Other JSON files are
# vocabularies, tensor names or logs. `config.4.0.0.json` is for one version of transformers.
_SETTINGS = re.compile(
    r"^(config(\..*)?|tokenizer_config|audio_tokenizer_config|special_tokens_map|generation_config|preprocessor_config"
    r"|processor_config|video_preprocessor_config|chat_template|adapter_config|model_index"
    r"|modules|config_sentence_transformers|sentence_\w+_config)\.json$"
)

# ALL_ATTENTION_FUNCTIONS of transformers 4.57 and 5.24; a name with a slash is fetched from the
# Hub.
_ATTENTION = (
    "eager",
    "sdpa",
    "flash_attention_2",
    "flash_attention_3",
    "flash_attention_4",
    "flex_attention",
)
_ATTENTION_KEYS = ("_attn_implementation", "_attn_implementation_internal", "attn_implementation")

# Arguments of from_pretrained in transformers 5 that replace code of a model by that of the Hub. It
# does not read them from a file, and no file has a reason to contain them.
_KERNEL_KEYS = ("use_kernels", "kernel_config", "allow_all_kernels")
_EXPERTS_KEYS = (
    "_experts_implementation",
    "_experts_implementation_internal",
    "experts_implementation",
)

# Loaders open the paths in these keys if they are nested; at the top level they ignore them.
_PATH_KEYS = ("_name_or_path", "name_or_path", "backbone", "base_model_name_or_path")
_FILE_KEYS = re.compile(r"(^|_)(file|spm|vocab)$")
_TOP_PATH_KEYS = ("gguf_file", "audio_tokenizer_name_or_path")

# transformers loads one of the files named here, selected by its version, instead of the usual one.
# So the file that was checked would not be the one that is loaded. Source: get_configuration_file
# in configuration_utils.py, get_fast_tokenizer_file in tokenization_utils_base.py.
_SWITCHES = {"configuration_files": "config.json", "fast_tokenizer_files": "tokenizer.json"}

_CODE_SUFFIXES = (".py", ".pyc", ".so", ".pyd", ".dll", ".dylib")
_COPIED_SUFFIXES = (".json", ".txt", ".model", ".spm", ".jinja", *_CODE_SUFFIXES)

_LONGEST = 300
"""Longest key path or value in a message, in characters."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _LONGEST

_TRUST = "Read that code; if you trust its author, pass --trust-remote-code."
_DISTRUST = "No model needs this; do not trust this one."


def screen_model(
    directory: Path, *, known_types: Container[str], trust_remote_code: bool = False
) -> None:
    """Check that no file makes a loader run foreign code or open files outside the directory.

    Args:
        directory: directory of the model, with config.json.
        known_types: values of `model_type` for which the installed transformers has a class. For
            these, transformers uses its own class and never code that comes with the model.
        trust_remote_code: True if the user trusts the model; nothing is checked then.

    Raises:
        UntrustedModelError: a file would do so; the message has the file and the key.
        SourceError: config.json is not JSON, or a settings file cannot be read.
    """
    if trust_remote_code:
        return
    for path in list_tree(directory):
        # Weights may be links to other disks: they are parsed, but never copied.
        if path.is_symlink() and (path.suffix in _COPIED_SUFFIXES or path.is_dir()):
            refuse_linked_out(path, directory)
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UntrustedModelError(
                f"{path} is a named pipe, a socket or a device: reading it may block forever.",
                do=_DISTRUST,
            )
    for path in sorted(path for path in list_tree(directory) if path.suffix == ".json"):
        inside = path.relative_to(directory)
        hidden = any(part.startswith(".") for part in inside.parts)
        if _SETTINGS.match(path.name) and not hidden:
            _screen_file(directory, path, known_types)


def refuse_linked_out(path: Path, directory: Path) -> None:
    """Raise if a link in a model's directory leads out of it.

    Links in the Hub cache, which lead to its folder `blobs`, are allowed.

    Raises:
        UntrustedModelError: the link leads out of the directory, or nowhere.
    """
    try:
        target = Path(os.path.realpath(path, strict=True))
    except FileNotFoundError:  # judged by where it would be
        target = path.resolve()
    except OSError:  # a loop of links, which `Path.resolve` of Python 3.13 does not notice
        raise UntrustedModelError(f"{path} is a link that is broken.", do=_DISTRUST) from None
    if not _is_below(target, directory) and not _is_hub_blob(target, directory):
        raise UntrustedModelError(
            f"{path} is a link to {target}, outside the model's directory.",
            do="Put the file itself in its place, if it belongs to the model.",
        )


def _screen_file(directory: Path, path: Path, known_types: Container[str]) -> None:
    if not path.exists():  # a broken link
        return
    document = load_json(path)
    top = document if isinstance(document, dict) else {}
    if path.name == "modules.json":
        _screen_modules(path, document)
    if path.name == "adapter_config.json":
        raise UntrustedModelError(
            f"{path} makes the model an adapter of another model, "
            f"{_SHORT.repr(top.get('base_model_name_or_path'))}, which loaders would download.",
            do="Merge them: peft's model.merge_and_unload().save_pretrained(DIR).",
        )
    for key_path, value in _members(document):
        key, nested = str(key_path[-1]), len(key_path) > 1
        if key == "auto_map" and isinstance(value, dict | list | str) and value:
            if nested or not _has_class(path, top, known_types):
                raise UntrustedModelError(
                    f"{path}: {key_path} names Python code that comes with the model: "
                    f"{_code_files(directory, value)}.",
                    do=_TRUST,
                )
        elif key == "custom_pipelines" and value:
            raise UntrustedModelError(
                f"{path}: {key_path} names Python code that comes with the model: "
                f"{_code_files(directory, value)}.",
                do=_TRUST,
            )
        elif key == "trust_remote_code" and value:
            raise UntrustedModelError(
                f"{path}: {key_path} is {_SHORT.repr(value)}: a file of the model must not "
                "grant trust.",
                do="Remove the key, or pass --trust-remote-code if you trust the model's author.",
            )
        elif key in _SWITCHES and not nested and value:
            raise UntrustedModelError(
                f"{path}: {key_path} names other files, one of which transformers would load "
                f"instead of {_SWITCHES[key]}.",
                do=f"Put the content for this version into {_SWITCHES[key]} and remove the key.",
            )
        elif key in _ATTENTION_KEYS:
            _screen_attention(path, key_path, value)
        elif (key in _KERNEL_KEYS and value) or (key in _EXPERTS_KEYS and "/" in str(value)):
            raise UntrustedModelError(
                f"{path}: {key_path} is {_SHORT.repr(value)}: a file of the model must not name "
                "code of the Hub.",
                do="Remove the key, or pass --trust-remote-code if you trust the model's author.",
            )
        elif key == "chat_template":
            _screen_templates(path, key_path, value)
        elif isinstance(value, str) and (
            (key in _PATH_KEYS and nested) or _FILE_KEYS.search(key) or key in _TOP_PATH_KEYS
        ):
            _screen_path(directory, path, key_path, value)


def _has_class(path: Path, top: Mapping[str, Any], known_types: Container[str]) -> bool:
    """Return True if transformers uses its own class instead of code that the file names."""
    kind = top.get("model_type")
    is_config = path.name.startswith("config.")
    return not is_config or (isinstance(kind, str) and kind in known_types)


class _KeyPath(tuple[str | int, ...]):
    """The keys that lead to a member of a document; they are formatted for messages only."""

    __slots__ = ()

    def __str__(self) -> str:
        """Return `parts[0].auto_map`; only the end of a long path."""
        parts = (f"[{key}]" if isinstance(key, int) else f".{key}" for key in self)
        text = "".join(parts).removeprefix(".")
        return text if len(text) <= _LONGEST else f"…{text[-_LONGEST:]}"


def _members(value: Any, keys: tuple[str | int, ...] = ()) -> Iterator[tuple[_KeyPath, Any]]:
    """Yield every member of every object in a document, with the keys that lead to it."""
    if isinstance(value, dict):
        for key, member in value.items():
            key_path = _KeyPath((*keys, key))
            yield key_path, member
            yield from _members(member, key_path)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            yield from _members(item, (*keys, index))


def _screen_attention(path: Path, key_path: _KeyPath, value: Any) -> None:
    """Raise for attention code that transformers would download; submodels may have their own."""
    for name in value.values() if isinstance(value, Mapping) else [value]:
        if name is not None and str(name).removeprefix("paged|") not in _ATTENTION:
            raise UntrustedModelError(
                f"{path}: {key_path} is {_SHORT.repr(name)}: transformers would download that code "
                f"from the Hub. Expected one of {', '.join(_ATTENTION)}.",
                do="Remove the key, or pass --trust-remote-code if you trust the model's author.",
            )


def _screen_templates(path: Path, key_path: _KeyPath, value: Any) -> None:
    """Raise for a chat template whose name is a path: transformers saves it under its name."""
    names = list(value) if isinstance(value, dict) else []
    if isinstance(value, list):
        names = [item.get("name") for item in value if isinstance(item, dict)]
    for name in names:
        if isinstance(name, str) and not re.fullmatch(r"[\w-]+([. ][\w-]+)*", name):
            raise UntrustedModelError(
                f"{path}: {key_path} has the name {_SHORT.repr(name)}, expected letters, digits, "
                "'.', '_' and '-'.",
                do=_DISTRUST,
            )


def _screen_path(directory: Path, path: Path, key_path: _KeyPath, value: str) -> None:
    """Raise for a path out of the model's directory, unless no loader can open it."""
    is_absolute = PurePosixPath(value).is_absolute() or PureWindowsPath(value).is_absolute()
    leads_up = ".." in PurePosixPath(value).parts or ".." in PureWindowsPath(value).parts
    if not is_absolute and not leads_up:
        return
    # A tokenizer's settings often have a path on the machine that saved them.
    target = directory / value
    try:
        is_harmless = not target.exists() or _is_below(target, directory)
    except OSError:  # a name that is too long for any file
        is_harmless = True
    if _FILE_KEYS.search(str(key_path[-1])) and is_harmless:
        return
    raise UntrustedModelError(
        f"{path}: {key_path} is {_SHORT.repr(value)}, which leads out of the model's directory.",
        do=_DISTRUST,
    )


def _screen_modules(path: Path, document: Any) -> None:
    modules = document if isinstance(document, list) else []
    for index, module in enumerate(modules):
        kind = module.get("type") if isinstance(module, dict) else module
        if not isinstance(kind, str) or not kind.startswith("sentence_transformers."):
            raise UntrustedModelError(
                f"{path}: [{index}].type is {_SHORT.repr(kind)}, expected a class of "
                "sentence_transformers.",
                do=_TRUST,
            )
        module_path = module.get("path")
        if isinstance(module_path, str) and module_path:
            _screen_path(path.parent, path, _KeyPath((index, "path")), module_path)


def _code_files(directory: Path, value: Any) -> str:
    """List the files with the code of references such as `modeling_x.Model`."""
    references = [text for _, text in _members({"": value}) if isinstance(text, str)]
    if isinstance(value, list):
        references = [item for item in value if isinstance(item, str)]
    files = []
    for reference in references:
        repository, _, name = reference.rpartition("--")
        file = f"{name.partition('.')[0]}.py"
        files.append(f"{file} of {repository}" if repository else str(directory / file))
    unique = list(dict.fromkeys(files))
    remainder = f" and {len(unique) - 5} more" if len(unique) > 5 else ""
    return ", ".join(unique[:5])[:_LONGEST] + remainder or "unnamed files"


def _is_below(target: Path, directory: Path) -> bool:
    return target.resolve().is_relative_to(directory.resolve())


def _is_hub_blob(target: Path, directory: Path) -> bool:
    """Return True for a link of the Hub cache: snapshots/<commit>/x -> blobs/<hash>."""
    snapshot = directory.resolve()
    return snapshot.parent.name == "snapshots" and target.parent == snapshot.parent.parent / "blobs"
