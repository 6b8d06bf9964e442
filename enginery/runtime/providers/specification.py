"""What a user writes: which execution providers, in which order, with which options.

    >>> parse_providers("cuda,cpu", ["cuda.gpu_mem_limit=2GiB"])
    (ProviderSpec('cuda', {'gpu_mem_limit': '2147483648'}), ProviderSpec('cpu', {}))

The same from one text, `cuda,cpu; cuda.gpu_mem_limit=2GiB`, which is what `ENGINERY_PROVIDERS`
holds; from a recipe's list, `[{cuda: {gpu_mem_limit: 2 GiB}}, cpu]`; and from a mapping, RapidOCR's
own among them: `{use_cuda: true, CUDAExecutionProvider: {gpu_mem_limit: 2 * 1024 * 1024 * 1024}}`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from enginery.core.errors import OptionError, ProviderError
from enginery.runtime.providers.known import CUDA, TENSORRT, TENSORRT_RTX, full_name, short_name
from enginery.runtime.providers.options import ProviderOptions, changed_options, read_options

ENVIRONMENT = "ENGINERY_PROVIDERS"
"""The environment variable that names the providers where nothing else does."""

CUDA_GRAPH_OPTIONS = {
    CUDA: ("enable_cuda_graph", "1"),
    TENSORRT: ("trt_cuda_graph_enable", "True"),
    TENSORRT_RTX: ("enable_cuda_graph", "1"),
}
"""The providers that have CUDA graphs, each with its option for them and the value that is on."""
_OFF = ("0", "False")

_RAPIDOCR = {
    "use_cuda": ("cuda", ("CUDAExecutionProvider", "cuda_ep_cfg")),
    "use_dml": ("directml", ("DmlExecutionProvider", "dm_ep_cfg")),
    "use_cann": ("cann", ("CANNExecutionProvider", "cann_ep_cfg")),
}
"""RapidOCR's switch -> the provider, and the keys of its options in versions 1 and 3."""
_RAPIDOCR_SECTIONS = ("Global", "Det", "Cls", "Rec")
"""The sections of its whole file: version 1 has the switches in them."""


@dataclass(frozen=True)
class ProviderSpec:
    """One execution provider that is requested, with its options."""

    name: str
    """Its short name."""
    options: dict[str, str] = field(default_factory=dict)
    """What ONNX Runtime is to be given, checked; the rest stays at its defaults."""

    @property
    def full_name(self) -> str:
        return full_name(self.name)


Providers: TypeAlias = (
    str
    | ProviderSpec
    | Mapping[str, Any]
    | Sequence["str | ProviderSpec | ProviderOptions | Mapping[str, Any]"]
)
"""What `parse_providers` reads."""


def parse_providers(
    given: Providers = "", options: Iterable[str] = (), *, default: str = ""
) -> tuple[ProviderSpec, ...]:
    """Return the requested providers, in order, each once.

    Args:
        given: text, a list or a mapping, as in this module's first lines. Empty for what
            `ENGINERY_PROVIDERS` says.
        options: `cuda.gpu_mem_limit=2GiB`, each for a provider that is named; they replace
            options of the same name in `given`.
        default: for an empty `given` where the environment says nothing.

    Raises:
        ProviderError: nothing is named, or a name is unknown.
        OptionError: an option is unknown, does not fit, is for a provider that is not named, or is
            there twice with two values.
    """
    if isinstance(given, str) and not given.strip():
        if text := os.environ.get(ENVIRONMENT, "").strip():
            try:
                return parse_providers(text, options)
            except ProviderError as error:
                raise ProviderError(f"{ENVIRONMENT}: {error.message}", do=error.do) from None
            except OptionError as error:
                raise OptionError(f"{ENVIRONMENT}: {error.message}", do=error.do) from None
        given = default
    specs = _merge(_read(given))
    if not specs:
        raise ProviderError("no execution provider is named.", do="Name one: --provider cuda")
    for text in options:
        name, key, value = _read_option(text, specs)
        specs[name][key] = value
    return tuple(ProviderSpec(name, values) for name, values in specs.items())


def format_providers(specs: Iterable[ProviderSpec]) -> str:
    """Return one text that `parse_providers` reads back: for a key, a recipe or a message.

    `cuda,cpu; cuda.gpu_mem_limit=2147483648`, or JSON where a value has a semicolon of its own.
    """
    known = list(specs)
    if any(";" in value or "\n" in value for spec in known for value in spec.options.values()):
        return json.dumps([{spec.name: spec.options} for spec in known])
    options = (f"{spec.name}.{key}={spec.options[key]}" for spec in known for key in spec.options)
    return "; ".join([",".join(spec.name for spec in known), *options])


def has_cuda_graphs(provider: str) -> bool:
    """Tell whether a provider, by ONNX Runtime's name, can record runs as CUDA graphs."""
    return provider in CUDA_GRAPH_OPTIONS


def require_cuda_graphs(provider: str) -> None:
    """Raise ProviderError unless a provider, by ONNX Runtime's name, has CUDA graphs."""
    if not has_cuda_graphs(provider):
        raise ProviderError(
            f"cuda_graph is set, and {short_name(provider)} has no CUDA graphs.",
            do="Leave it out, or run on cuda, tensorrt or tensorrt-rtx.",
        )


def check_run_options(
    specs: Sequence[ProviderSpec],
    *,
    io_binding: bool = True,
    cuda_graph: bool = False,
    shrink_arena: bool = False,
) -> None:
    """Check that ways of running fit the providers and each other, before anything is opened.

    The arguments are those of `OrtRunner`. What in a graph forbids a capture is said when it is
    opened: see `cuda_graphs.with_cuda_graph`.

    Raises:
        ProviderError: `cuda_graph`, and the provider that is meant, the first, has none.
        OptionError: `cuda_graph` without the buffers that it is recorded on, or with an arena that
            gives the recorded memory back; or a provider's own option for CUDA graphs is set.
    """
    for spec in specs:
        option, _ = CUDA_GRAPH_OPTIONS.get(spec.full_name, ("", ""))
        if spec.options.get(option, _OFF[0]) not in _OFF:
            raise OptionError(
                f"option '{option}' for {spec.name} is set by itself: a CUDA graph is recorded on "
                "bound buffers, a graph for each shape, and only where every node is the "
                "provider's.",
                do="Leave it out, and pass --cuda-graph (cuda_graph=True in Python).",
            )
    if not cuda_graph:
        return
    require_cuda_graphs(specs[0].full_name)
    if not io_binding:
        raise OptionError(
            "cuda_graph is set and io_binding is not: a CUDA graph replays on bound buffers.",
            do="Leave one of them out.",
        )
    if shrink_arena:
        raise OptionError(
            "cuda_graph and shrink_arena are both set: a CUDA graph replays in the arena's memory, "
            "which shrinking gives back.",
            do="Leave one of them out.",
        )


def _spec(name: str, options: Mapping[str, Any]) -> ProviderSpec:
    return ProviderSpec(short_name(full_name(name)), read_options(name, options))


def _read(given: Any) -> list[ProviderSpec]:
    """Read specifications as often as they are there."""
    if isinstance(given, ProviderSpec):
        return [_spec(given.name, given.options)]
    if isinstance(given, str):
        return _from_text(given)
    if isinstance(given, Mapping):
        return _from_mapping(given)
    if isinstance(given, Sequence):
        return [spec for item in given for spec in _from_item(item)]
    raise OptionError(
        f"providers: found a {type(given).__name__}, expected names, a list or a mapping."
    )


def _from_item(item: Any) -> list[ProviderSpec]:
    if isinstance(item, str | ProviderSpec | Mapping):
        return _read(item)
    # ONNX Runtime's own notation: (name, options).
    if isinstance(item, Sequence) and len(item) == 2 and isinstance(item[0], str):
        return _from_mapping({item[0]: item[1]})
    if isinstance(item, ProviderOptions):
        return [_spec(*changed_options(item))]
    raise OptionError(
        f"providers: found a {type(item).__name__} in the list, expected a name or "
        "a name with its options, as cuda: {device_id: 0}."
    )


def _from_text(text: str) -> list[ProviderSpec]:
    if text.lstrip().startswith(("[", "{")) or "\n" in text.strip():
        return _from_yaml(text)
    names, *options = text.split(";")
    specs = _merge(_spec(name, {}) for name in names.split(",") if name.strip())
    for option in filter(str.strip, options):
        name, key, value = _read_option(option, specs)
        _add(specs, name, key, value)
    return [ProviderSpec(name, values) for name, values in specs.items()]


def _from_yaml(text: str) -> list[ProviderSpec]:
    from ruamel.yaml import YAML
    from ruamel.yaml.error import YAMLError

    try:
        # `base` leaves every scalar as it is written: `no` may be an option's word.
        return _read(YAML(typ="base", pure=True).load(text))
    except YAMLError as error:
        first = getattr(error, "problem", None) or str(error).partition("\n")[0]
        raise OptionError(
            f"providers are not YAML: {first}.", do="Close quotes and brackets."
        ) from error


def _from_mapping(given: Mapping[str, Any]) -> list[ProviderSpec]:
    engines = given.get("EngineConfig")
    if isinstance(engines, Mapping) and isinstance(engines.get("onnxruntime"), Mapping):
        given = engines["onnxruntime"]
    if any(switch in given for switch in _RAPIDOCR):
        return _from_rapidocr(given)
    if any(name in given for name in _RAPIDOCR_SECTIONS):
        return _from_rapidocr_file(given)
    specs = []
    for name, options in given.items():
        if options is not None and options != "" and not isinstance(options, Mapping):
            raise OptionError(
                f"provider '{name}': found {_describe(options)}, expected its options, "
                "as cuda: {device_id: 0}."
            )
        specs.append(_spec(name, options or {}))  # YAML's `cuda:` has nothing behind it
    return specs


def _from_rapidocr_file(given: Mapping[str, Any]) -> list[ProviderSpec]:
    """Read the sections of a whole file of version 1, which must request the same providers."""
    first, requested = "", [ProviderSpec("cpu")]  # without a switch: RapidOCR's own default
    for section in _RAPIDOCR_SECTIONS:
        part = given.get(section)
        if not isinstance(part, Mapping) or not any(switch in part for switch in _RAPIDOCR):
            continue
        try:
            specs = _from_rapidocr(part)
        except OptionError as error:
            raise OptionError(f"{section}: {error.message}", do=error.do) from None
        if first and specs != requested:
            raise OptionError(
                f"{first} requests '{format_providers(requested)}' and {section} "
                f"'{format_providers(specs)}', and one model has one list of providers.",
                do="Make them the same, or pass the section of the model that is meant.",
            )
        first, requested = section, specs
    return requested


def _from_rapidocr(given: Mapping[str, Any]) -> list[ProviderSpec]:
    """Read its switches, each with its options, with the CPU beneath; pass over its other keys."""
    specs = []
    for switch, (name, keys) in _RAPIDOCR.items():
        options: dict[str, str] = {}
        for key in keys:
            value = given.get(key)
            if isinstance(value, Mapping):
                options |= read_options(name, value)  # checked although the switch may be off
            elif value not in (None, "", "null"):
                raise OptionError(
                    f"{key}: found {_describe(value)}, expected the options of {name}."
                )
        word = str(given.get(switch, "false")).strip().lower()
        if word not in ("true", "false"):
            raise OptionError(f"{switch}: found '{given[switch]}', expected true or false.")
        if word == "true":
            specs.append(ProviderSpec(name, options))
    # Of the CPU's arena RapidOCR sets how it grows, which ONNX Runtime takes from no provider.
    return [*specs, ProviderSpec("cpu")]


def _merge(specs: Iterable[ProviderSpec]) -> dict[str, dict[str, str]]:
    """Return the options of each provider, from all places where it is named."""
    merged: dict[str, dict[str, str]] = {}
    for spec in specs:
        merged.setdefault(spec.name, {})
        for key, value in spec.options.items():
            _add(merged, spec.name, key, value)
    return merged


def _add(specs: Mapping[str, dict[str, str]], name: str, key: str, value: str) -> None:
    first = specs[name].setdefault(key, value)
    if first != value:
        raise OptionError(
            f"option '{key}' for {name} is given twice: '{first}' and '{value}'.", do="Keep one."
        )


def _read_option(text: str, specs: Mapping[str, Any]) -> tuple[str, str, str]:
    """Return the provider's short name, the option and its value from `cuda.device_id=0`."""
    where, equals, value = text.partition("=")
    name, dot, key = where.strip().rpartition(".")
    if not equals or not dot or not key:
        raise OptionError(
            f"provider option '{text.strip()}': expected provider.option=value.",
            do="For example: --provider-option cuda.gpu_mem_limit=2GiB",
        )
    short = short_name(full_name(name))
    if short not in specs:
        raise OptionError(
            f"option '{key}' is for {short}, which is not requested; "
            f"requested: {', '.join(specs) or 'none'}.",
            do=f"Name it among the providers: --provider {','.join([*specs, short])}",
        )
    return short, key, read_options(short, {key: value.strip()})[key]


def _describe(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str | int | float) else f"a {type(value).__name__}"
