"""Which execution providers are asked for, in order, each with its options.

    >>> parse_wishes("cuda,cpu", ["cuda.gpu_mem_limit=2GiB"])
    (ProviderWish('cuda', {'gpu_mem_limit': '2147483648'}), ProviderWish('cpu', {}))

The same from one text, `cuda,cpu; cuda.gpu_mem_limit=2GiB`, which is what `ENGINERY_PROVIDERS`
holds; from a recipe's list, `[{cuda: {gpu_mem_limit: 2 GiB}}, cpu]`; and from a mapping, RapidOCR's
own among them: `{use_cuda: true, CUDAExecutionProvider: {gpu_mem_limit: 2 * 1024 * 1024 * 1024}}`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn, TypeAlias

from enginery.core.errors import OptionError, ProviderError
from enginery.runtime.provider_names import CPU, full_name, short_name
from enginery.runtime.provider_options import (
    TypedOptions,
    changed_options,
    provider_of,
    read_options,
)

ENVIRONMENT = "ENGINERY_PROVIDERS"
"""Names the environment variable with the wish of those who make none."""

_RAPIDOCR = {
    "use_cuda": ("cuda", ("CUDAExecutionProvider", "cuda_ep_cfg")),
    "use_dml": ("directml", ("DmlExecutionProvider", "dm_ep_cfg")),
    "use_cann": ("cann", ("CANNExecutionProvider", "cann_ep_cfg")),
}
"""RapidOCR's switch -> the provider, and the keys of its options in versions 1 and 3."""
_RAPIDOCR_PARTS = ("Global", "Det", "Cls", "Rec")
"""The sections of its whole file: version 1 has the switches in them."""
_NAME_ONE = "Name one: --provider cuda"


@dataclass(frozen=True)
class ProviderWish:
    """One execution provider that is asked for."""

    name: str
    """Its short name."""
    options: dict[str, str] = field(default_factory=dict)
    """What ONNX Runtime is to be given, checked; the rest stays at its defaults."""

    @property
    def full_name(self) -> str:
        return full_name(self.name)


Given: TypeAlias = (
    str
    | ProviderWish
    | Mapping[str, Any]
    | Sequence["str | ProviderWish | TypedOptions | Mapping[str, Any]"]
)
"""What `parse_wishes` reads."""


def parse_wishes(
    given: Given = "", options: Iterable[str] = (), *, default: str = ""
) -> tuple[ProviderWish, ...]:
    """The providers asked for, in order, each once.

    Args:
        given: text, a list or a mapping, as in this module's first lines. Empty for what
            `ENGINERY_PROVIDERS` says.
        options: `cuda.gpu_mem_limit=2GiB`, each for a provider that is named; they go before
            options of the same name in `given`.
        default: for an empty `given` where the environment says nothing.

    Raises:
        ProviderError: nothing is named, or a name is unknown.
        OptionError: an option is unknown, does not fit, is for a provider that is not asked for,
            or is there twice with two values.
    """
    if isinstance(given, str) and not given.strip():
        if text := os.environ.get(ENVIRONMENT, "").strip():
            try:
                return parse_wishes(text, options)
            except ProviderError as error:
                raise ProviderError(f"{ENVIRONMENT}: {error.message}", do=error.do) from None
            except OptionError as error:
                raise OptionError(f"{ENVIRONMENT}: {error.message}", do=error.do) from None
        given = default
    wishes = _gathered(_pairs(given))
    if not wishes:
        raise ProviderError("no execution provider is named.", do=_NAME_ONE)
    for text in options:
        _give(wishes, text, replace=True)
    return tuple(ProviderWish(name, values) for name, values in wishes.items())


def wish_text(wishes: Iterable[ProviderWish]) -> str:
    """The wishes as one text, which is read again the same: for a key, a recipe or a message.

    `cuda,cpu; cuda.gpu_mem_limit=2147483648`, or JSON where a value has a semicolon of its own.
    """
    known = list(wishes)
    if any(";" in value or "\n" in value for wish in known for value in wish.options.values()):
        return json.dumps([{wish.name: wish.options} for wish in known])
    options = [f"; {wish.name}.{key}={value}"
               for wish in known for key, value in wish.options.items()]  # fmt: skip
    return ",".join(wish.name for wish in known) + "".join(options)


def _pairs(given: Any) -> list[tuple[str, dict[str, str]]]:
    """Names with options, as often as they are there; an option alone comes as `name.option`."""
    if isinstance(given, ProviderWish):
        return [(short_name(given.full_name), read_options(given.name, given.options))]
    if isinstance(given, str):
        return _from_text(given)
    if isinstance(given, Mapping):
        return _from_mapping(given)
    if isinstance(given, Sequence):
        return [pair for item in given for pair in _from_item(item)]
    raise OptionError(
        f"providers: found a {type(given).__name__}, expected names, a list or a mapping."
    )


def _from_item(item: Any) -> list[tuple[str, dict[str, str]]]:
    if isinstance(item, str | ProviderWish | Mapping):
        return _pairs(item)
    # ONNX Runtime's own notation: (name, options).
    if isinstance(item, Sequence) and len(item) == 2 and isinstance(item[0], str):
        return _from_mapping({item[0]: item[1]})
    if hasattr(item, "__dataclass_fields__"):
        return [(short_name(provider_of(item)), changed_options(item))]
    raise OptionError(
        f"providers: found a {type(item).__name__} in the list, expected a name or "
        "a name with its options, as cuda: {device_id: 0}."
    )


def _from_text(text: str) -> list[tuple[str, dict[str, str]]]:
    if text.lstrip().startswith(("[", "{")) or "\n" in text.strip():
        return _from_yaml(text)
    head, *options = text.split(";")
    pairs: list[tuple[str, dict[str, str]]] = [
        (short_name(full_name(part)), {}) for part in head.split(",") if part.strip()
    ]
    wishes = _gathered(pairs)
    for option in options:
        if option.strip():
            _give(wishes, option, replace=False)
    return list(wishes.items())


def _from_yaml(text: str) -> list[tuple[str, dict[str, str]]]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        # `base` leaves every scalar as it is written: `no` may be an option's word.
        return _pairs(YAML(typ="base", pure=True).load(text))
    except YAMLError as error:
        first = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise OptionError(
            f"providers are not YAML: {first}.", do="Close quotes and brackets."
        ) from error


def _from_mapping(given: Mapping[str, Any]) -> list[tuple[str, dict[str, str]]]:
    engines = given.get("EngineConfig")
    if isinstance(engines, Mapping) and isinstance(engines.get("onnxruntime"), Mapping):
        given = engines["onnxruntime"]
    if any(switch in given for switch in _RAPIDOCR):
        return _from_rapidocr(given)
    if parts := {name: given[name] for name in _RAPIDOCR_PARTS if name in given}:
        return _from_rapidocr_parts(parts)
    pairs = []
    for name, options in given.items():
        if options is None or options == "":  # YAML's `cuda:` with nothing behind it
            options = {}  # noqa: PLW2901
        if not isinstance(options, Mapping):
            raise OptionError(
                f"provider '{name}': found {_shown(options)}, expected its options, "
                "as cuda: {device_id: 0}."
            )
        pairs.append((short_name(full_name(name)), read_options(name, options)))
    return pairs


def _from_rapidocr_parts(parts: Mapping[str, Any]) -> list[tuple[str, dict[str, str]]]:
    """The sections of a whole file of version 1, which must ask for the same: one wish is made."""
    found: dict[str, list[tuple[str, dict[str, str]]]] = {}
    for name, part in parts.items():
        if isinstance(part, Mapping) and any(switch in part for switch in _RAPIDOCR):
            try:
                found[name] = _from_rapidocr(part)
            except OptionError as error:
                raise OptionError(f"{name}: {error.message}", do=error.do) from None
    if not found:  # no section has a switch: RapidOCR's own default
        return [(short_name(CPU), {})]
    (first, wanted), *others = found.items()
    for name, pairs in others:
        if pairs != wanted:
            raise OptionError(
                f"{first} asks for {_in_words(wanted)} and {name} for {_in_words(pairs)}, and one "
                "model has one list of providers.",
                do="Make them the same, or hand over the section of the model that is meant.",
            )
    return wanted


def _in_words(pairs: Iterable[tuple[str, dict[str, str]]]) -> str:
    return f"'{wish_text(ProviderWish(name, options) for name, options in pairs)}'"


def _from_rapidocr(given: Mapping[str, Any]) -> list[tuple[str, dict[str, str]]]:
    """Its switches, each with its options, and the CPU beneath; other keys of it are not ours."""
    pairs = []
    for switch, (name, keys) in _RAPIDOCR.items():
        options: dict[str, str] = {}
        for key in keys:
            value = given.get(key)
            if isinstance(value, Mapping):
                options |= read_options(name, value)  # checked although the switch may be off
            elif value not in (None, "", "null"):
                raise OptionError(f"{key}: found {_shown(value)}, expected the options of {name}.")
        word = str(given.get(switch, "false")).strip().lower()
        if word not in ("true", "false"):
            raise OptionError(f"{switch}: found '{given[switch]}', expected true or false.")
        if word == "true":
            pairs.append((name, options))
    # Of the CPU's arena RapidOCR sets how it grows, which ONNX Runtime takes from no provider.
    return [*pairs, (short_name(CPU), {})]


def _gathered(pairs: Iterable[tuple[str, dict[str, str]]]) -> dict[str, dict[str, str]]:
    wishes: dict[str, dict[str, str]] = {}
    for name, options in pairs:
        known = wishes.setdefault(name, {})
        for key, value in options.items():
            if known.setdefault(key, value) != value:
                _fail_twice(name, key, known[key], value)
    return wishes


def _give(wishes: dict[str, dict[str, str]], text: str, *, replace: bool) -> None:
    """Adds `cuda.gpu_mem_limit=2GiB` to its provider's options."""
    where, equals, value = text.partition("=")
    name, dot, key = where.strip().rpartition(".")
    if not equals or not dot or not key:
        raise OptionError(
            f"provider option '{text.strip()}': expected provider.option=value.",
            do="For example: --provider-option cuda.gpu_mem_limit=2GiB",
        )
    short = short_name(full_name(name))
    if short not in wishes:
        raise OptionError(
            f"option '{key}' is for {short}, which is not asked for; "
            f"asked for: {', '.join(wishes) or 'none'}.",
            do=f"Name it among the providers: --provider {','.join([*wishes, short])}",
        )
    read = read_options(short, {key: value.strip()})[key]
    if not replace and wishes[short].get(key, read) != read:
        _fail_twice(short, key, wishes[short][key], read)
    wishes[short][key] = read


def _fail_twice(name: str, key: str, first: str, second: str) -> NoReturn:
    raise OptionError(
        f"option '{key}' for {name} is given twice: '{first}' and '{second}'.", do="Keep one."
    )


def _shown(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str | int | float) else f"a {type(value).__name__}"
