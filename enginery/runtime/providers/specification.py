"""Parse the requested execution providers, in order, with their options.

>>> specs = parse_providers("cuda,cpu", ["cuda.gpu_mem_limit=2GiB"])
>>> [(spec.name, spec.options) for spec in specs]
[('cuda', {'gpu_mem_limit': '2147483648'}), ('cpu', {})]

Other notations are a single text, `cuda,cpu; cuda.gpu_mem_limit=2GiB`, also in the environment
variable `ENGINERY_PROVIDERS`; a list in a recipe, `[{cuda: {gpu_mem_limit: 2 GiB}}, cpu]`; a
mapping, including RapidOCR's: `{use_cuda: true, CUDAExecutionProvider: {gpu_mem_limit: 2 * 1024}}`;
and the name of a YAML or JSON file with any of them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

from enginery.core.errors import OptionError, ProviderError, nearest
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

_FILES = (".yaml", ".yml", ".json")
"""How the name of a file with providers ends."""

# RapidOCR 1.2 to 1.4 and 3.10. The order is that of `ProviderConfig.get_ep_list` in 3.10.
_RAPIDOCR = {
    "use_coreml": ("coreml", ("CoreMLExecutionProvider", "coreml_ep_cfg")),
    "use_cann": ("cann", ("CANNExecutionProvider", "cann_ep_cfg")),
    "use_dml": ("directml", ("DmlExecutionProvider", "dml_ep_cfg", "dm_ep_cfg")),
    "use_cuda": ("cuda", ("CUDAExecutionProvider", "cuda_ep_cfg")),
}
"""RapidOCR's switch -> (provider, keys of its options in versions 1 and 3), in its order."""
_RAPIDOCR_SECTIONS = ("Global", "Det", "Cls", "Rec")
"""Sections of RapidOCR's configuration file; in version 1 they contain the switches."""
_RAPIDOCR_STEPS = (
    "use_det",
    "use_cls",
    "use_rec",
    "use_text_det",
    "use_angle_cls",
    "use_preprocess_img",
    "use_vertical_padding",
    "use_dilation",
)
"""Switches of RapidOCR's own steps in these sections, which are about no provider."""
_RAPIDOCR_PRECISION = ("use_fp16", "use_int8")
"""Switches for engines that RapidOCR builds with TensorRT, on by default."""
_NOTHING = (None, "", "null", "~")
"""A key without value; YAML is read as text."""
_THREADS = ("intra_op_num_threads", "inter_op_num_threads")
_ARENA = "enable_cpu_mem_arena"
_RAPIDOCR_KEYS = (
    *_RAPIDOCR,
    *(key for _, keys in _RAPIDOCR.values() for key in keys),
    *_THREADS,
    _ARENA,
    "cpu_ep_cfg",
)
"""All keys of the section EngineConfig.onnxruntime of version 3, with the earlier names."""


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
    | Sequence["str | ProviderSpec | ProviderOptions | Mapping[str, Any]"]
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
    if "EngineConfig" in mapping or "onnxruntime" in mapping:
        return _from_rapidocr_engines(mapping)
    if any(str(key).startswith("use_") for key in mapping):
        return _from_rapidocr(mapping)
    if any(name in mapping for name in _RAPIDOCR_SECTIONS):
        return _from_rapidocr_file(mapping)
    specs = []
    for name, options in mapping.items():
        if options is not None and options != "" and not isinstance(options, Mapping):
            raise OptionError(
                f"provider '{name}': found {_describe(options)}, expected its options, "
                "such as cuda: {device_id: 0}."
            )
        specs.append(_spec(name, options or {}))  # `cuda:` in YAML has the value None
    return specs


def _from_rapidocr_engines(document: Mapping[str, Any]) -> list[ProviderSpec]:
    """Read a file of version 3, or its `EngineConfig` alone: the section onnxruntime counts."""
    engines = _section(document, "EngineConfig") if "EngineConfig" in document else document
    engine_types = {
        name: _section(document, name).get("engine_type") for name in _RAPIDOCR_SECTIONS
    }
    # From Python, these are members of RapidOCR's enums.
    engine_types = {
        name: getattr(kind, "value", kind) for name, kind in engine_types.items() if kind
    }
    for name, kind in engine_types.items():
        if kind != "onnxruntime":
            raise OptionError(
                f"{name}: engine_type is '{kind}', but enginery runs models in ONNX Runtime.",
                do="Change it to onnxruntime, or pass only the section EngineConfig.onnxruntime.",
            )
    if not engine_types:
        _reject_other_devices(engines)
    section = _section(engines, "onnxruntime")
    for key in map(str, section):
        if key not in _RAPIDOCR_KEYS and not key.startswith("use_"):
            raise OptionError(
                f"onnxruntime: unknown key '{key}'{nearest(key, _RAPIDOCR_KEYS)}",
                do=f"Leave it out. Known keys: {', '.join(_RAPIDOCR_KEYS)}.",
            )
    return _from_rapidocr(section)


def _reject_other_devices(engines: Mapping[str, Any]) -> None:
    """Raise OptionError if a section other than onnxruntime's turns a device on.

    Without an `engine_type`, that section's engine may be the one that is meant.
    """
    for name, section in engines.items():
        if name == "onnxruntime" or not isinstance(section, Mapping):
            continue
        for key, value in section.items():
            is_device = str(key).startswith("use_") and key not in _RAPIDOCR_PRECISION
            if is_device and _switch(key, value):
                raise OptionError(
                    f"{name}: {key} is true, but only the section onnxruntime is read.",
                    do=f"Turn {key} off there, or pass only the section EngineConfig.onnxruntime.",
                )


def _section(document: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    """Return a section of RapidOCR's file, which may be absent or empty."""
    section = document.get(name)
    if section in _NOTHING:
        return {}
    if not isinstance(section, Mapping):
        raise OptionError(f"{name}: found {_describe(section)}, expected a section of settings.")
    return section


def _from_rapidocr_file(document: Mapping[str, Any]) -> list[ProviderSpec]:
    """Read a configuration file of version 1, whose sections must request the same providers."""
    first, requested = "", [ProviderSpec("cpu")]  # RapidOCR's default without a switch
    for name in _RAPIDOCR_SECTIONS:
        section = _section(document, name)
        with _about(name):
            specs = _from_rapidocr(section)
        if not any(switch in section for switch in _RAPIDOCR):
            continue
        if first and specs != requested:
            raise OptionError(
                f"{first} requests '{format_providers(requested)}' and {name} "
                f"'{format_providers(specs)}', but one model has one list of providers.",
                do="Make them the same, or pass only the section of this model.",
            )
        first, requested = name, specs
    return requested


def _from_rapidocr(settings: Mapping[str, Any]) -> list[ProviderSpec]:
    """Read RapidOCR's switches, their options and those of the session; the CPU is added.

    Settings of its own steps are ignored.
    """
    specs = []
    for switch, (name, keys) in _RAPIDOCR.items():
        options: dict[str, str] = {}
        for key in keys:
            value = settings.get(key)
            if isinstance(value, Mapping):
                options |= read_options(name, value)  # checked even if the switch is off
            elif value not in _NOTHING:
                raise OptionError(
                    f"{key}: found {_describe(value)}, expected the options of {name}."
                )
        if _switch(switch, settings.get(switch, False)):
            specs.append(ProviderSpec(name, options))
    for key, value in settings.items():
        known_key = key in _RAPIDOCR or key in _RAPIDOCR_STEPS
        if str(key).startswith("use_") and not known_key and _switch(key, value):
            raise OptionError(
                f"{key} is true, but no execution provider of ONNX Runtime has this switch.",
                do=f"Leave it out. Known switches: {', '.join(_RAPIDOCR)}.",
            )
    _reject_threads(settings)
    # RapidOCR's cpu_ep_cfg is ignored: ONNX Runtime's CPU provider has no such options.
    arena = settings.get(_ARENA)
    cpu = {} if arena in _NOTHING else read_options("cpu", {_ARENA: arena})
    return [*specs, ProviderSpec("cpu", cpu)]


def _reject_threads(settings: Mapping[str, Any]) -> None:
    """Raise OptionError for numbers of threads; RapidOCR ignores those below 1."""
    for key in _THREADS:
        value = settings.get(key)
        if value in _NOTHING or str(value).strip() in ("-1", "0"):
            continue
        if key == "inter_op_num_threads":
            do = "Set it to -1: it has no effect, because nodes run one after the other."
        else:
            do = f"Set it to -1; serve and bench take --threads {value}, Python threads={value}."
        raise OptionError(f"{key} is {value}, but it is not an option of a provider.", do=do)


def _switch(key: str, value: Any) -> bool:
    word = str(value).strip().lower()
    if word not in ("true", "false"):
        raise OptionError(f"{key}: found '{value}', expected true or false.")
    return word == "true"


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
