"""Parse the requested execution providers, in order, with their options.

>>> specs = parse_providers("cuda,cpu", ["cuda.gpu_mem_limit=2GiB"])
>>> [(spec.name, spec.options) for spec in specs]
[('cuda', {'gpu_mem_limit': '2147483648'}), ('cpu', {})]

Other notations are a single text, `cuda,cpu; cuda.gpu_mem_limit=2GiB`, also in the environment
variable `ENGINERY_PROVIDERS`; a list in a recipe, `[{cuda: {gpu_mem_limit: 2 GiB}}, cpu]`; a
mapping, `{cuda: {gpu_mem_limit: 2 GiB}, cpu: }`; and the name of a YAML or JSON file with any of
them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from enginery.core.errors import OptionError, ProviderError
from enginery.runtime.providers.known import CUDA, TENSORRT, TENSORRT_RTX, full_name, short_name
from enginery.runtime.providers.options import read_options

ENVIRONMENT = "ENGINERY_PROVIDERS"
"""Environment variable with the default providers."""

CUDA_GRAPH_OPTIONS = {
    CUDA: ("enable_cuda_graph", "1"),
    TENSORRT: ("trt_cuda_graph_enable", "True"),
    TENSORRT_RTX: ("enable_cuda_graph", "1"),
}
"""Provider with CUDA graphs -> (option that enables them, value)."""
_OFF = ("0", "False")

_FILES = (".yaml", ".yml", ".json")
"""How the name of a file with providers ends."""

_ARENA = "enable_cpu_mem_arena"


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
    | Path
    | ProviderSpec
    | Mapping[str, Any]
    | Sequence["str | ProviderSpec | Mapping[str, Any]"]
)
"""Notations that `parse_providers` accepts."""


def parse_providers(
    requested: Providers = "", options: Iterable[str] = (), *, default: str = ""
) -> tuple[ProviderSpec, ...]:
    """Return the requested providers in order, without duplicates.

    Args:
        requested: text, list, mapping or file; see the module's docstring. Empty for
            `ENGINERY_PROVIDERS`.
        options: options of requested providers, such as `cuda.gpu_mem_limit=2GiB`; they override
            those in `requested`.
        default: providers if `requested` is empty and the environment variable is not set.

    Raises:
        ProviderError: no provider was requested, or a name is unknown.
        OptionError: an option is unknown, invalid, given twice with different values, or belongs to
            a provider that was not requested; or a file does not exist or cannot be read.
    """
    if isinstance(requested, Path):
        requested = str(requested)
    if isinstance(requested, str) and not requested.strip():
        if text := os.environ.get(ENVIRONMENT, "").strip():
            with _about(ENVIRONMENT):
                return parse_providers(text, options)
        requested = default
    if isinstance(requested, str) and is_file_name(requested):
        specs = _merge(_from_file(Path(requested.strip()).expanduser()))
    else:
        specs = _merge(_read(requested))
    if not specs:
        raise ProviderError(
            "no execution provider was requested.", do="Pass one, for example: --providers cuda"
        )
    for text in options:
        name, key, value = _read_option(text, specs)
        # These override what was requested; within one text, two values are an error.
        specs[name][key] = value
    return tuple(ProviderSpec(name, values) for name, values in specs.items())


def format_providers(specs: Iterable[ProviderSpec]) -> str:
    """Format providers as a text that `parse_providers` reads back.

    `cuda,cpu; cuda.gpu_mem_limit=2147483648`, or JSON if a value contains a semicolon.
    """
    listed = list(specs)
    if any(";" in value or "\n" in value for spec in listed for value in spec.options.values()):
        return json.dumps([{spec.name: spec.options} for spec in listed])
    options = (f"{spec.name}.{key}={spec.options[key]}" for spec in listed for key in spec.options)
    return "; ".join([",".join(spec.name for spec in listed), *options])


def is_file_name(text: str) -> bool:
    """Return True if a text names a YAML or JSON file with providers, which need not exist.

    >>> is_file_name("config.yaml"), is_file_name("openvino; openvino.load_config=a.json")
    (True, False)
    """
    is_notation = ";" in text or "\n" in text.strip() or text.lstrip().startswith(("[", "{"))
    return text.strip().lower().endswith(_FILES) and not is_notation


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
        OptionError: `cuda_graph` is set without `io_binding` or with `shrink_arena`, the
            provider's own option for CUDA graphs is set, or `shrink_arena` is set without an arena.
    """
    for spec in specs:
        option, _ = CUDA_GRAPH_OPTIONS.get(spec.full_name, ("", ""))
        # The provider's own switch would record without buffers that stay in their place.
        if spec.options.get(option, _OFF[0]) not in _OFF:
            raise OptionError(
                f"option '{option}' for {spec.name} is set by itself: a CUDA graph is recorded on "
                "bound buffers, a graph for each shape, and only where every node is the "
                "provider's.",
                do="Leave it out, and pass --cuda-graph (cuda_graph=True in Python).",
            )
        if shrink_arena and spec.name == "cpu" and spec.options.get(_ARENA) == "0":
            raise OptionError(
                f"shrink_arena is set, but cpu.{_ARENA} is false: there is no arena to shrink.",
                do=f"Leave shrink_arena out, or pass --provider-option cpu.{_ARENA}=true.",
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


def _read(requested: Any) -> list[ProviderSpec]:
    """Read specifications, which may contain duplicates."""
    if isinstance(requested, ProviderSpec):
        return [_spec(requested.name, requested.options)]
    if isinstance(requested, str):
        return _from_text(requested)
    if isinstance(requested, Mapping):
        return _from_mapping(requested)
    if isinstance(requested, Sequence):
        return [spec for item in requested for spec in _from_item(item)]
    raise OptionError(
        f"providers: found a {type(requested).__name__}, expected names, a list or a mapping."
    )


def _from_item(item: Any) -> list[ProviderSpec]:
    if isinstance(item, str | ProviderSpec | Mapping):
        return _read(item)
    # ONNX Runtime's own notation: (name, options).
    if isinstance(item, Sequence) and len(item) == 2 and isinstance(item[0], str):
        return _from_mapping({item[0]: item[1]})
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


def _from_file(path: Path) -> list[ProviderSpec]:
    """Read a YAML or JSON file."""
    if not path.exists():
        raise OptionError(
            f"providers: the file {path} does not exist.",
            do="Name an existing file, or providers such as cuda,cpu.",
        )
    try:
        # Editors on Windows put a byte order mark in front.
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise OptionError(f"providers: the file {path} cannot be read: {error}.") from error
    with _about(str(path)):
        return _from_yaml(text)


@contextmanager
def _about(where: str) -> Iterator[None]:
    """Prefix the message of an error about providers with its source, such as a file."""
    try:
        yield
    except ProviderError as error:
        raise ProviderError(f"{where}: {error.message}", do=error.do) from None
    except OptionError as error:
        raise OptionError(f"{where}: {error.message}", do=error.do) from None


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


def _from_mapping(mapping: Mapping[str, Any]) -> list[ProviderSpec]:
    specs = []
    for name, options in mapping.items():
        if options is not None and options != "" and not isinstance(options, Mapping):
            is_scalar = isinstance(options, str | int | float)
            value = f"'{options}'" if is_scalar else f"a {type(options).__name__}"
            raise OptionError(
                f"provider '{name}': found {value}, expected its options, such as "
                "cuda: {device_id: 0}."
            )
        specs.append(_spec(name, options or {}))  # `cuda:` in YAML has the value None
    return specs


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
