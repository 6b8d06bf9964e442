"""Parse the requested execution providers, in order, with their options.

>>> specs = parse_providers("cuda,cpu", ["cuda.gpu_mem_limit=2GiB"])
>>> [(spec.name, spec.options) for spec in specs]
[('cuda', {'gpu_mem_limit': '2147483648'}), ('cpu', {})]

Other notations are a single text, `cuda,cpu; cuda.gpu_mem_limit=2GiB`, also in the environment
variable `ENGINERY_PROVIDERS`; a list in a recipe, `[{cuda: {gpu_mem_limit: 2 GiB}}, cpu]`; and a
mapping, including RapidOCR's: `{use_cuda: true, CUDAExecutionProvider: {gpu_mem_limit: 2 * 1024}}`.
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
"""Environment variable with the default providers."""

CUDA_GRAPH_OPTIONS = {
    CUDA: ("enable_cuda_graph", "1"),
    TENSORRT: ("trt_cuda_graph_enable", "True"),
    TENSORRT_RTX: ("enable_cuda_graph", "1"),
}
"""Provider with CUDA graphs -> (option that enables them, value)."""
_OFF = ("0", "False")

_RAPIDOCR = {
    "use_cuda": ("cuda", ("CUDAExecutionProvider", "cuda_ep_cfg")),
    "use_dml": ("directml", ("DmlExecutionProvider", "dm_ep_cfg")),
    "use_cann": ("cann", ("CANNExecutionProvider", "cann_ep_cfg")),
}
"""RapidOCR's switch -> (provider, keys of its options in versions 1 and 3)."""
_RAPIDOCR_SECTIONS = ("Global", "Det", "Cls", "Rec")
"""Sections of RapidOCR's configuration file; in version 1 they contain the switches."""


@dataclass(frozen=True)
class ProviderSpec:
    """A requested execution provider with its options."""

    name: str
    """Short name."""
    options: dict[str, str] = field(default_factory=dict)
    """Checked options for ONNX Runtime; others keep their defaults."""

    @property
    def full_name(self) -> str:
        return full_name(self.name)


Providers: TypeAlias = (
    str
    | ProviderSpec
    | Mapping[str, Any]
    | Sequence["str | ProviderSpec | ProviderOptions | Mapping[str, Any]"]
)
"""Notations that `parse_providers` accepts."""


def parse_providers(
    given: Providers = "", options: Iterable[str] = (), *, default: str = ""
) -> tuple[ProviderSpec, ...]:
    """Return the requested providers in order, without duplicates.

    Args:
        given: text, list or mapping; see the module's docstring. Empty for `ENGINERY_PROVIDERS`.
        options: options of requested providers, such as `cuda.gpu_mem_limit=2GiB`; they override
            those in `given`.
        default: providers if `given` is empty and the environment variable is not set.

    Raises:
        ProviderError: no provider was requested, or a name is unknown.
        OptionError: an option is unknown, invalid, given twice with different values, or belongs to
            a provider that was not requested.
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
        raise ProviderError(
            "no execution provider was requested.", do="Pass one, for example: --providers cuda"
        )
    for text in options:
        name, key, value = _read_option(text, specs)
        specs[name][key] = value
    return tuple(ProviderSpec(name, values) for name, values in specs.items())


def format_providers(specs: Iterable[ProviderSpec]) -> str:
    """Format providers as a text that `parse_providers` reads back.

    `cuda,cpu; cuda.gpu_mem_limit=2147483648`, or JSON if a value contains a semicolon.
    """
    known = list(specs)
    if any(";" in value or "\n" in value for spec in known for value in spec.options.values()):
        return json.dumps([{spec.name: spec.options} for spec in known])
    options = (f"{spec.name}.{key}={spec.options[key]}" for spec in known for key in spec.options)
    return "; ".join([",".join(spec.name for spec in known), *options])


def has_cuda_graphs(provider: str) -> bool:
    """Return True if a provider (ONNX Runtime's name) supports CUDA graphs."""
    return provider in CUDA_GRAPH_OPTIONS


def require_cuda_graphs(provider: str) -> None:
    """Raise ProviderError unless a provider (ONNX Runtime's name) supports CUDA graphs."""
    if not has_cuda_graphs(provider):
        raise ProviderError(
            f"cuda_graph is set, but {short_name(provider)} has no CUDA graphs.",
            do="Leave it out, or run on cuda, tensorrt or tensorrt-rtx.",
        )


def check_run_options(
    specs: Sequence[ProviderSpec],
    *,
    io_binding: bool = True,
    cuda_graph: bool = False,
    shrink_arena: bool = False,
) -> None:
    """Check that run options match the providers and each other, before loading a model.

    The arguments are those of `OrtRunner`. Nodes that prevent a capture are found only when the
    graph is loaded; see `cuda_graphs.with_cuda_graph`.

    Raises:
        ProviderError: `cuda_graph` is set, but the first provider has no CUDA graphs.
        OptionError: `cuda_graph` is set without `io_binding` or with `shrink_arena`, or the
            provider's own option for CUDA graphs is set.
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
            "cuda_graph is set, but io_binding is not: a CUDA graph replays on bound buffers.",
            do="Leave one of them out.",
        )
    if shrink_arena:
        raise OptionError(
            "cuda_graph and shrink_arena are both set: a CUDA graph replays in the arena's memory, "
            "which shrinking frees.",
            do="Leave one of them out.",
        )


def _spec(name: str, options: Mapping[str, Any]) -> ProviderSpec:
    return ProviderSpec(short_name(full_name(name)), read_options(name, options))


def _read(given: Any) -> list[ProviderSpec]:
    """Read specifications, which may contain duplicates."""
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
        "a name with its options, such as cuda: {device_id: 0}."
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
        # `base` keeps every scalar as text: `no` may be the value of an option.
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
                "such as cuda: {device_id: 0}."
            )
        specs.append(_spec(name, options or {}))  # `cuda:` in YAML has the value None
    return specs


def _from_rapidocr_file(given: Mapping[str, Any]) -> list[ProviderSpec]:
    """Read a configuration file of version 1, whose sections must request the same providers."""
    first, requested = "", [ProviderSpec("cpu")]  # RapidOCR's default without a switch
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
                f"'{format_providers(specs)}', but one model has one list of providers.",
                do="Make them the same, or pass only the section of this model.",
            )
        first, requested = section, specs
    return requested


def _from_rapidocr(given: Mapping[str, Any]) -> list[ProviderSpec]:
    """Read RapidOCR's switches and their options; other keys are ignored, the CPU is added."""
    specs = []
    for switch, (name, keys) in _RAPIDOCR.items():
        options: dict[str, str] = {}
        for key in keys:
            value = given.get(key)
            if isinstance(value, Mapping):
                options |= read_options(name, value)  # checked even if the switch is off
            elif value not in (None, "", "null"):
                raise OptionError(
                    f"{key}: found {_describe(value)}, expected the options of {name}."
                )
        word = str(given.get(switch, "false")).strip().lower()
        if word not in ("true", "false"):
            raise OptionError(f"{switch}: found '{given[switch]}', expected true or false.")
        if word == "true":
            specs.append(ProviderSpec(name, options))
    # RapidOCR's option of the CPU's arena is not an option of the CPU provider.
    return [*specs, ProviderSpec("cpu")]


def _merge(specs: Iterable[ProviderSpec]) -> dict[str, dict[str, str]]:
    """Return the merged options of each provider."""
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
            do=f"Request it as well: --providers {','.join([*specs, short])}",
        )
    return short, key, read_options(short, {key: value.strip()})[key]


def _describe(value: Any) -> str:
    return f"'{value}'" if isinstance(value, str | int | float) else f"a {type(value).__name__}"
