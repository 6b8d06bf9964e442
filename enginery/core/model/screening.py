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
import reprlib
from collections.abc import Container, Iterator, Mapping
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any, NamedTuple

from enginery.core.errors import SourceError, UntrustedModelError
from enginery.core.json_file import read_document

# What loaders read settings from, in any folder of a model. Other JSON files hold vocabularies,
# names of tensors, or the notes of whoever trained the model. `config.4.0.0.json` is a config.json
# for one version of transformers.
_SETTINGS = re.compile(
    r"^(config(\..*)?|tokenizer_config|audio_tokenizer_config|special_tokens_map|generation_config|preprocessor_config"
    r"|processor_config|video_preprocessor_config|chat_template|adapter_config|model_index"
    r"|modules|config_sentence_transformers|sentence_\w+_config)\.json$"
)

# transformers 4.57: ALL_ATTENTION_FUNCTIONS; anything with a slash is fetched from the Hub.
_ATTENTION = ("eager", "sdpa", "flash_attention_2", "flash_attention_3", "flex_attention")
_ATTENTION_KEYS = ("_attn_implementation", "_attn_implementation_internal", "attn_implementation")

# Loaders open what these name. At the top of a file they are overwritten or ignored by loaders.
_PATH_KEYS = ("_name_or_path", "name_or_path", "backbone", "base_model_name_or_path")
_FILE_KEYS = re.compile(r"(^|_)file$")
_TOP_PATH_KEYS = ("gguf_file", "audio_tokenizer_name_or_path")

# transformers reads the file that these name for its version in the place of the one beside them:
# get_configuration_file in configuration_utils.py, get_fast_tokenizer_file in
# tokenization_utils_base.py. What is checked would not be what is loaded.
_SWITCHES = {"configuration_files": "config.json", "fast_tokenizer_files": "tokenizer.json"}

_CODE_SUFFIXES = (".py", ".pyc", ".so", ".pyd", ".dll", ".dylib")
_COPIED_SUFFIXES = (".json", ".txt", ".model", ".jinja", *_CODE_SUFFIXES)

_LONGEST = 300
"""Characters of a place or a value in a message."""
_SHORT = reprlib.Repr()
_SHORT.maxstring = _SHORT.maxother = _LONGEST

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
    for path in directory.rglob("*"):
        # Weights may be links, as people keep them on other disks: they are parsed, never copied.
        if path.is_symlink() and (path.suffix in _COPIED_SUFFIXES or path.is_dir()):
            refuse_linked_out(path, directory)
        if path.exists() and not path.is_file() and not path.is_dir():
            raise UntrustedModelError(
                f"{path} is a named pipe, a socket or a device: reading it may never end.",
                do=_DISTRUST,
            )
    for path in sorted(directory.rglob("*.json")):
        inside = path.relative_to(directory)
        hidden = any(part.startswith(".") for part in inside.parts)
        if _SETTINGS.match(path.name) and not hidden:
            _screen_file(directory, path, known_types)


def refuse_linked_out(path: Path, directory: Path) -> None:
    """Refuse a file or folder that a link leads to from inside a model's directory.

    Links of the Hub library's cache, which lead to its own folder of contents, are followed.

    Raises:
        UntrustedModelError: the file lies elsewhere.
    """
    try:
        target = path.resolve()
    except (OSError, RuntimeError):  # Python 3.13 says the one of a loop, earlier ones the other
        raise UntrustedModelError(f"{path} is a link that leads nowhere.", do=_DISTRUST) from None
    if not _is_below(target, directory) and not _is_hub_blob(target, directory):
        raise UntrustedModelError(
            f"{path} is a link to {target}, outside the model's directory.",
            do="Put the file itself in its place, if it belongs to the model.",
        )


def _screen_file(directory: Path, path: Path, known_types: Container[str]) -> None:
    try:
        document = json.loads(read_document(path).decode())
    except RecursionError:
        raise SourceError(f"{path} is nested too deeply to be a configuration.") from None
    except FileNotFoundError:  # a link to nowhere
        return
    except OSError as error:
        raise SourceError(
            f"{path} cannot be read: {error.strerror}.", do="Put the file itself in its place."
        ) from error
    except ValueError as error:
        if path.name == "config.json" and path.parent == directory:
            raise SourceError(f"{path} is not valid JSON: {error}.") from error
        return  # a loader that needs it says so itself
    top = document if isinstance(document, dict) else {}
    if path.name == "modules.json":
        _screen_modules(path, document)
    if path.name == "adapter_config.json":
        raise UntrustedModelError(
            f"{path} makes the model an adapter of another one, "
            f"{_SHORT.repr(top.get('base_model_name_or_path'))}, which loaders fetch by "
            "themselves.",
            do="Merge the two: peft's model.merge_and_unload().save_pretrained(DIR).",
        )
    for place, key, value in _members(document):
        nested = place.parent is not None
        if key == "auto_map" and isinstance(value, dict | list | str) and value:
            if nested or not _has_class(path, top, known_types):
                raise UntrustedModelError(
                    f"{path}: {place} names Python code that comes with the model: "
                    f"{_code_files(directory, value)}.",
                    do=_TRUST,
                )
        elif key == "custom_pipelines" and value:
            raise UntrustedModelError(
                f"{path}: {place} names Python code that comes with the model: "
                f"{_code_files(directory, value)}.",
                do=_TRUST,
            )
        elif key == "trust_remote_code" and value:
            raise UntrustedModelError(
                f"{path}: {place} is {_SHORT.repr(value)}: a file of the model would grant "
                "itself trust.",
                do="Remove the key, or pass --trust-remote-code if you trust the model's author.",
            )
        elif key in _SWITCHES and not nested and value:
            raise UntrustedModelError(
                f"{path}: {place} names other files, which transformers reads in the place of "
                f"{_SWITCHES[key]} by its own version.",
                do=f"Put what this version needs into {_SWITCHES[key]} and remove the key.",
            )
        elif key in _ATTENTION_KEYS:
            _screen_attention(path, place, value)
        elif isinstance(value, str) and (
            (key in _PATH_KEYS and nested) or _FILE_KEYS.search(key) or key in _TOP_PATH_KEYS
        ):
            _screen_path(directory, path, place, value)


def _has_class(path: Path, top: Mapping[str, Any], known_types: Container[str]) -> bool:
    """Return whether transformers takes a class of its own, whatever code a configuration names."""
    kind = top.get("model_type")
    is_config = path.name.startswith("config.")
    return not is_config or (isinstance(kind, str) and kind in known_types)


class _Place(NamedTuple):
    """A place in a document, linked to the one around it; written out only for a message."""

    parent: _Place | None
    key: str | int

    def __str__(self) -> str:
        """Return `parts[0].auto_map`, of a long one the end."""
        keys = []
        place: _Place | None = self
        while place is not None:
            keys.append(f"[{place.key}]" if isinstance(place.key, int) else f".{place.key}")
            place = place.parent
        text = "".join(reversed(keys)).removeprefix(".")
        return text if len(text) <= _LONGEST else f"…{text[-_LONGEST:]}"


def _members(value: Any) -> Iterator[tuple[_Place, str, Any]]:
    """Yield every member of every object in a document as its place, its key and its value."""
    entered = [_inside(None, value)]
    while entered:
        if (found := next(entered[-1], None)) is None:
            entered.pop()
            continue
        place, member = found
        if isinstance(place.key, str):
            yield place, place.key, member
        if isinstance(member, dict | list):
            entered.append(_inside(place, member))


def _inside(place: _Place | None, value: Any) -> Iterator[tuple[_Place, Any]]:
    """Yield the members of an object, or what a list holds of objects and lists."""
    if isinstance(value, dict):
        for key, member in value.items():
            yield _Place(place, key), member
    elif isinstance(value, list):
        for index, item in enumerate(value):
            if isinstance(item, dict | list):
                yield _Place(place, index), item


def _screen_attention(path: Path, place: _Place, value: Any) -> None:
    """Refuse attention code that transformers would fetch; parts of a model may have their own."""
    for name in value.values() if isinstance(value, Mapping) else [value]:
        if name is not None and str(name).removeprefix("paged|") not in _ATTENTION:
            raise UntrustedModelError(
                f"{path}: {place} is {_SHORT.repr(name)}: transformers would load that code from "
                f"the Hub. Expected one of {', '.join(_ATTENTION)}.",
                do="Remove the key, or pass --trust-remote-code if you trust the model's author.",
            )


def _screen_path(directory: Path, path: Path, place: _Place, value: str) -> None:
    """Refuse a path out of the model's directory; one that earlier tools left is harmless."""
    is_absolute = PurePosixPath(value).is_absolute() or PureWindowsPath(value).is_absolute()
    leads_up = ".." in PurePosixPath(value).parts or ".." in PureWindowsPath(value).parts
    if not is_absolute and not leads_up:
        return
    # A tokenizer's settings often keep the path on the machine that saved them.
    target = directory / value
    try:
        is_harmless = not target.exists() or _is_below(target, directory)
    except OSError:  # a name that is too long for any file
        is_harmless = True
    if _FILE_KEYS.search(str(place.key)) and is_harmless:
        return
    raise UntrustedModelError(
        f"{path}: {place} is {_SHORT.repr(value)}, which leads out of the model's directory.",
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
        place = module.get("path")
        if isinstance(place, str) and place:
            _screen_path(path.parent, path, _Place(_Place(None, index), "path"), place)


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
    shown = list(dict.fromkeys(files))
    more = f" and {len(shown) - 5} more" if len(shown) > 5 else ""
    return ", ".join(shown[:5])[:_LONGEST] + more or "it does not say which"


def _is_below(target: Path, directory: Path) -> bool:
    return target.resolve().is_relative_to(directory.resolve())


def _is_hub_blob(target: Path, directory: Path) -> bool:
    """Return whether a link is the Hub library's own: snapshots/<commit>/x -> blobs/<hash>."""
    snapshot = directory.resolve()
    return snapshot.parent.name == "snapshots" and target.parent == snapshot.parent.parent / "blobs"
