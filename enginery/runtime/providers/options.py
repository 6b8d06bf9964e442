"""Options of execution providers: what a user writes in, the strings that ONNX Runtime takes out.

    >>> read_options("cuda", {"gpu_mem_limit": "2 GiB", "do_copy_in_default_stream": "true"})
    {'gpu_mem_limit': '2147483648', 'do_copy_in_default_stream': '1'}

Those of CUDA and of both TensorRTs are typed and checked here, because ONNX Runtime says what is
wrong with one only where the provider's libraries are, and then goes on without the provider. Those
of other providers are handed on as they are written. Only what is given is handed on; for the
rest ONNX Runtime's own defaults hold.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import Field, fields
from typing import Any, Literal, get_args, get_origin, get_type_hints

from enginery.core.errors import OptionError, nearest
from enginery.runtime.providers.cuda_options import CudaOptions
from enginery.runtime.providers.names import (
    CPU,
    CUDA,
    TENSORRT,
    TENSORRT_RTX,
    full_name,
    short_name,
)
from enginery.runtime.providers.option_fields import parse_size, parse_whole
from enginery.runtime.providers.tensorrt_options import TensorrtOptions
from enginery.runtime.providers.tensorrt_rtx_options import TensorrtRtxOptions

TypedOptions = CudaOptions | TensorrtOptions | TensorrtRtxOptions

_TYPES: dict[str, type[TypedOptions]] = {
    CUDA: CudaOptions,
    TENSORRT: TensorrtOptions,
    TENSORRT_RTX: TensorrtRtxOptions,
}
_WORDS = {"true": True, "1": True, "yes": True, "on": True,
          "false": False, "0": False, "no": False, "off": False}  # fmt: skip


def typed_names(provider: str) -> tuple[str, ...]:
    """The names of a provider's typed options; none for a provider whose options are not."""
    kind = _TYPES.get(full_name(provider))
    return tuple(field.name for field in fields(kind)) if kind else ()


def provider_of(options: TypedOptions) -> str:
    """ONNX Runtime's name of the provider that a dataclass of options is for."""
    return next(name for name, kind in _TYPES.items() if isinstance(options, kind))


def read_options(provider: str, given: Mapping[str, Any]) -> dict[str, str]:
    """A provider's options as ONNX Runtime takes them.

    Args:
        provider: its short or full name.
        given: values as text, or of the option's own type.

    Raises:
        OptionError: a name is unknown, or a value does not fit the option; for CUDA and TensorRT.
            Or the provider takes no options.
        ProviderError: there is no such provider.
    """
    name = full_name(provider)
    short = short_name(name)
    if name == CPU and given:
        raise OptionError(
            f"option '{next(iter(given))}' for cpu: the CPU provider takes no options.",
            do="Leave it out.",
        )
    kind = _TYPES.get(name)
    if kind is None:
        return {key: _plain(short, key, value) for key, value in given.items()}
    known = _fields(kind)
    read = {}
    for key, value in given.items():
        if key not in known:
            raise OptionError(
                f"unknown option '{key}' for {short}{nearest(key, known)}",
                do=f"Known options: {', '.join(known)}.",
            )
        hint, field = known[key]
        read[key] = _written(name, _read(f"option '{key}' for {short}", hint, field, value))
    return read


def changed_options(options: TypedOptions) -> dict[str, str]:
    """Those of a dataclass of options that are not the defaults, checked, as ONNX Runtime's."""
    given = {f.name: getattr(options, f.name) for f in fields(options)}
    changed = {f.name: given[f.name] for f in fields(options) if given[f.name] != f.default}
    return read_options(provider_of(options), changed)


def _fields(kind: type[TypedOptions]) -> dict[str, tuple[Any, Field[Any]]]:
    hints = get_type_hints(kind)
    return {field.name: (hints[field.name], field) for field in fields(kind)}


def _read(what: str, hint: Any, field: Field[Any], value: Any) -> bool | int | str:
    if value is None:
        raise OptionError(f"{what} has no value.", do="Leave it out for the default.")
    if hint is bool:
        if isinstance(value, bool):
            return value
        word = _WORDS.get(str(value).strip().lower())
        if word is None:
            raise OptionError(f"{what}: found '{value}', expected true or false.")
        return word
    if get_origin(hint) is Literal:
        *most, last = get_args(hint)
        if value in (*most, last):
            return str(value)
        raise OptionError(f"{what}: found '{value}', expected {', '.join(most)} or {last}.")
    if hint is str:
        return str(value)
    return _number(what, field, value)


def _number(what: str, field: Field[Any], value: Any) -> int:
    least, most = field.metadata["least"], field.metadata["most"]
    is_size = field.metadata.get("size", False)
    expected = "a size such as 2GiB or 2147483648" if is_size else "a whole number"
    if isinstance(value, int) and not isinstance(value, bool):
        number = value
    else:
        try:
            number = parse_size(str(value)) if is_size else parse_whole(str(value))
        except ValueError:
            raise OptionError(f"{what}: found '{value}', expected {expected}.") from None
    if not least <= number <= most:
        wide = most >= (1 << 31) - 1  # the limit of a type; nobody looks for it
        span = f"{least} or more, below {most + 1}" if wide else f"{least} to {most}"
        raise OptionError(f"{what}: found {number}, expected {span}.")
    return number


def _written(provider: str, value: bool | int | str) -> str:
    """As the provider's parser reads it: TensorRT's takes no 0 and 1, and RTX's no words."""
    if isinstance(value, bool):
        return str(value) if provider == TENSORRT else str(int(value))
    return str(value)


def _plain(short: str, key: str, value: Any) -> str:
    if value is None or isinstance(value, Mapping | list | tuple):
        found = "no value" if value is None else f"a {type(value).__name__}"
        raise OptionError(f"option '{key}' for {short}: found {found}, expected one value.")
    return str(value)
