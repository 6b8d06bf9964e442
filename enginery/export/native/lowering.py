"""Lower a PyTorch module to an ONNX graph whose named dims vary.

    lowered = lower(model, Signature(feeds, dims, ["logits"]), out / "model.onnx", opset=20)
    lowered.route, lowered.dims    # "transformers", "named"

This is the only module that touches `transformers.exporters`, which changes between minor versions,
and torch's own exporter, which is tried after it. Both take the module apart with `torch.export`.

Dims are named first: torch then raises where a model allows only some sizes. It accepts such a
range with `Dim.DYNAMIC`, and with `Dim.AUTO` it may fix a size without a word. So what a graph
declares is compared with what was asked for, and its outputs at other sizes with the module's: some
graphs accept any size and compute with that of the example.
"""

from __future__ import annotations

import inspect
import re
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
import torch
from numpy.typing import NDArray
from transformers import masking_utils
from transformers.utils import torch_int

from enginery.core.errors import ExportError
from enginery.core.shapes import dim_terms, resolve_dim
from enginery.core.versions import TRANSFORMERS5, transformers_family
from enginery.export.graphs import open_session
from enginery.export.native.recurrences import exportable_scans
from enginery.passes.ir.graph_file import write_graph

Route = Literal["transformers", "dynamo"]
DimKind = Literal["named", "dynamic", "auto"]
Dims = Mapping[str, Mapping[int, str]]
"""Names of the dynamic axes of each input: `{"input_ids": {0: "batch", 1: "sequence"}}`."""

_KINDS: tuple[DimKind, ...] = ("named", "dynamic", "auto")
_DESCRIPTIONS = {"transformers": "transformers' exporter", "dynamo": "torch's dynamo exporter"}
_IMAGE_SIZES = ("height", "width")
_HUGE = 1e6
"""Absolute value from which on a number stands for a masked one."""
_TINY = 1e-6
"""Smallest standard deviation that differences are compared with."""
_FULL, _HALF = 1e-3, 5e-2
"""Allowed difference in standard deviations, of FP32 and of FP16."""
_SKIP_OF_MASKS = "_ignore_bidirectional_mask_sdpa"
"""The function of transformers that tells whether a mask is needed."""
_SYMBOL = re.compile(r"[A-Za-z_]\w*")


@dataclass(frozen=True)
class Signature:
    """The inputs and outputs that a graph is to have."""

    feeds: Mapping[str, torch.Tensor]
    """Example inputs by the graph's names, in their order, on the module's device. Sizes should be
    coprime: torch takes equal ones for one dim, and 0 and 1 for constants."""
    dims: Dims
    """The dynamic axes of each input. A sum, such as `past_sequence + sequence`, follows from
    others."""
    outputs: Sequence[str]
    """The graph's names of the outputs."""


@dataclass(frozen=True)
class Lowered:
    """How a graph was lowered."""

    route: Route
    """The exporter that wrote the graph."""
    dims: DimKind
    """How its dims were described to torch."""
    notes: tuple[str, ...] = ()
    """The attempts that failed before, and why."""

    @property
    def description(self) -> str:
        """How the graph was lowered, in words."""
        return f"{_DESCRIPTIONS[self.route]} with {self.dims} dims"


class _LoweringError(Exception):
    """One attempt failed; the next may not."""


def available_routes() -> tuple[Route, ...]:
    """Return the exporters of this environment, the preferred one first."""
    if transformers_family() == TRANSFORMERS5:
        return ("transformers", "dynamo")
    return ("dynamo",)


def lower(
    module: torch.nn.Module,
    signature: Signature,
    path: Path,
    *,
    opset: int,
    routes: Sequence[Route] = (),
) -> Lowered:
    """Write the ONNX graph of a module to `path`, by the first route and kind of dims that works.

    Args:
        module: takes the feeds by name, and returns a mapping that has the outputs, or a sequence
            of them in their order. It is in evaluation mode.
        signature: the graph's inputs and outputs.
        path: the ONNX file; large weights go to a file beside it.
        opset: the ONNX operator set.
        routes: the exporters to try; empty for all of this environment.

    Raises:
        ExportError: no route works, or each fixes a dim that must vary.
    """
    failures: list[str] = []
    smaller = _smaller_feeds(signature.feeds, signature.dims)
    expected = _run_module(module, smaller, signature.outputs)
    with (
        _exportable_experts(module),
        exportable_scans(module),
        _symbolic_sizes(module),
        _only_real_masks(),
    ):
        for route in routes or available_routes():
            for kind in _kinds(signature.dims):
                try:
                    model = _attempt(module, signature, opset, route, kind)
                    write_graph(model, path)
                    _compare(path, smaller, expected)
                except _LoweringError as error:
                    failures.append(f"{_DESCRIPTIONS[route]} with {kind} dims: {error}")
                    continue
                return Lowered(route, kind, tuple(failures))
    raise ExportError(f"the model cannot be lowered to ONNX: {'; '.join(dict.fromkeys(failures))}.")


def _kinds(dims: Dims) -> tuple[DimKind, ...]:
    """Return how dims are described, in the order of attempts.

    Images are not left to AUTO: what it fixes of their size is found only by running the graph, and
    each attempt takes a detector minutes.
    """
    names = {name for axes in dims.values() for name in axes.values()}
    return _KINDS[:2] if names & set(_IMAGE_SIZES) else _KINDS


def _attempt(
    module: torch.nn.Module,
    signature: Signature,
    opset: int,
    route: Route,
    kind: DimKind,
) -> ir.Model:
    """Return a graph with the names that were asked for."""
    feeds, dims, outputs = signature.feeds, signature.dims, signature.outputs
    arguments = dict(zip(_identifiers(feeds), feeds.values(), strict=True))
    shapes = {
        argument: _shapes(dims.get(name, {}), kind)
        for argument, name in zip(arguments, feeds, strict=True)
    }
    export = _with_transformers if route == "transformers" else _with_torch
    try:
        with warnings.catch_warnings(), torch.no_grad(), _flat_forward(module, feeds, outputs):
            warnings.simplefilter("ignore")
            model = export(module, arguments, shapes, opset)
    except Exception as error:  # torch.export, torch.onnx and models raise many unrelated types
        raise _LoweringError(_first_line(error)) from error
    _remove_traces(model)
    _rename(model.graph, list(feeds), outputs)
    _name_dims(model, dims)
    return model


def _smaller_feeds(feeds: Mapping[str, torch.Tensor], dims: Dims) -> dict[str, torch.Tensor]:
    """Return the beginning of each input: two thirds along its dynamic axes."""
    sizes = {
        name: feeds[feed].shape[axis]
        for feed, axes in dims.items()
        for axis, name in axes.items()
        if dim_terms(name) == [name]
    }
    # Less than a patch would be no other grid.
    steps = dict(zip(_IMAGE_SIZES, (32, 64), strict=True))
    smaller = {
        name: max(1, size - steps[name] if name in steps else size * 2 // 3)
        for name, size in sizes.items()
    }
    result = dict(feeds)
    for feed, axes in dims.items():
        for axis, name in axes.items():
            result[feed] = result[feed].narrow(axis, 0, resolve_dim(name, smaller))
    return result


def _run_module(
    module: torch.nn.Module, feeds: Mapping[str, torch.Tensor], outputs: Sequence[str]
) -> dict[str, NDArray[Any]]:
    """Return the outputs of a module; none if it rejects the inputs, or if they are BF16."""
    try:
        with torch.no_grad():
            result = module(**feeds)
    except Exception:  # a model of any class may reject a size in any way
        return {}
    values = [result[name] for name in outputs] if isinstance(result, Mapping) else result
    if any(value.dtype == torch.bfloat16 for value in values):
        return {}  # ONNX Runtime has no BF16 kernels on the CPU
    return {
        name: value.detach().cpu().to(torch.float32).numpy()
        for name, value in zip(outputs, values, strict=True)
    }


def _compare(
    path: Path, feeds: Mapping[str, torch.Tensor], expected: Mapping[str, NDArray[Any]]
) -> None:
    """Compare the outputs of a graph with those of the module.

    Raises:
        _LoweringError: the graph does not run, or an output has another shape or other values.
    """
    if not expected:
        return
    arrays = {name: tensor.cpu().numpy() for name, tensor in feeds.items()}
    sizes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
    try:
        values = open_session(path, path.name).run(list(expected), arrays)
    except ExportError as error:
        raise _LoweringError(error.message) from error
    except Exception as error:  # ONNX Runtime raises many unrelated types
        raise _LoweringError(f"the graph fails on {sizes}: {_first_line(error)}") from error
    for (name, reference), value in zip(expected.items(), values, strict=True):
        if reference.shape != value.shape:
            raise _LoweringError(
                f"{name} is {value.shape} for {sizes}, but PyTorch's is {reference.shape}"
            )
        usual = np.abs(reference) < _HUGE
        scale = max(float(reference[usual].std()) if usual.any() else 0.0, _TINY)
        difference = np.abs(value.astype(np.float32) - reference)[usual].max(initial=0.0) / scale
        if not difference <= (_HALF if value.dtype == np.float16 else _FULL):  # NaN is not, either
            raise _LoweringError(
                f"{name} differs from PyTorch's by {difference:.2g} standard deviations for {sizes}"
            )


def _with_transformers(
    module: torch.nn.Module,
    arguments: Mapping[str, torch.Tensor],
    shapes: Mapping[str, Any],
    opset: int,
) -> ir.Model:
    """Return the graph of transformers' exporter."""
    from transformers.exporters import OnnxConfig, OnnxExporter

    config = OnnxConfig(dynamic_shapes=dict(shapes), opset_version=opset)
    # The exporter takes entries out of the mapping.
    model: ir.Model
    model, _ = OnnxExporter().export_program(module, dict(arguments), config)
    return model


def _with_torch(
    module: torch.nn.Module,
    arguments: Mapping[str, torch.Tensor],
    shapes: Mapping[str, Any],
    opset: int,
) -> ir.Model:
    """Return the graph of torch's exporter."""
    program = torch.onnx.export(
        module,
        kwargs=dict(arguments),
        dynamo=True,
        dynamic_shapes=dict(shapes),
        opset_version=opset,
        verbose=False,
    )
    model: ir.Model = program.model
    return model


@contextmanager
def _exportable_experts(module: torch.nn.Module) -> Iterator[None]:
    """Let mixtures of experts multiply all experts in one batch.

    The default adds rows up with ScatterElements, whose reduction TensorRT refuses.
    """
    models = [part for part in module.modules() if hasattr(part, "get_experts_implementation")]
    before = [model.get_experts_implementation() for model in models]
    for model in models:
        model.set_experts_implementation("batched_mm")
    try:
        yield
    finally:
        for model, implementation in zip(models, before, strict=True):
            model.set_experts_implementation(implementation)


class _IntegerType(type):
    """Lets the builtin integers be instances of `_Integer`."""

    def __instancecheck__(cls, value: object) -> bool:
        return isinstance(value, int)

    def __subclasscheck__(cls, subclass: type) -> bool:
        return issubclass(subclass, int)


class _Integer(int, metaclass=_IntegerType):
    """The builtin `int`, which leaves a dim as it is."""

    def __new__(cls, *arguments: Any, **keywords: Any) -> Any:
        if arguments and isinstance(arguments[0], torch.SymInt):
            return arguments[0]
        return int(*arguments, **keywords)


def _length(value: Any) -> Any:
    """Return what `len` does; of a tensor a dim, as `tensor.shape[0]` is."""
    return value.shape[0] if isinstance(value, torch.Tensor) else len(value)


@contextmanager
def _symbolic_sizes(module: torch.nn.Module) -> Iterator[None]:
    """Let `len(tensor)` and `int(height)` in the code of models be dims.

    Python's own functions return integers, which fixes the batch of RT-DETR and the size of Depth
    Anything's result. So does `torch_int` of transformers, unless TorchScript traces.
    """
    names = {torch_int.__module__, *(type(part).__module__ for part in module.modules())}
    own = [sys.modules[n] for n in names if n in sys.modules and not n.startswith("torch.")]
    replaced = {"len": _length, "int": _Integer}
    shadowed = [(code, name) for code in own for name in replaced if name not in vars(code)]
    for code, name in shadowed:
        setattr(code, name, replaced[name])  # found before the builtin one
    try:
        yield
    finally:
        for code, name in shadowed:
            delattr(code, name)


@contextmanager
def _only_real_masks() -> Iterator[None]:
    """Let models whose inputs have no mask attend to everything without one.

    As it is exported, transformers makes one of ones, (batch, 1, positions, positions), which
    each attention adds: the fused operators are slower with it, and TensorRT has to compute it.
    """
    original = getattr(masking_utils, _SKIP_OF_MASKS, None)
    if original is None:  # transformers 4 asks elsewhere
        yield
        return

    def skips(padding_mask: Any, kv_length: Any, local_attention_size: Any = None) -> bool:
        nothing_masked = padding_mask is None and local_attention_size is None
        return nothing_masked or original(padding_mask, kv_length, local_attention_size)

    setattr(masking_utils, _SKIP_OF_MASKS, skips)
    try:
        yield
    finally:
        setattr(masking_utils, _SKIP_OF_MASKS, original)


@contextmanager
def _flat_forward(
    module: torch.nn.Module, names: Sequence[str] | Mapping[str, Any], outputs: Sequence[str]
) -> Iterator[None]:
    """Let `forward` take the graph's inputs as identifiers, and return its outputs as a tuple."""
    own = vars(module).get("forward")
    original: Callable[..., Any] = module.forward
    identifiers = _identifiers(names)

    def forward(**tensors: Any) -> tuple[Any, ...]:
        inputs = {name: tensors[key] for key, name in zip(identifiers, names, strict=True)}
        result = original(**inputs)
        is_named = isinstance(result, Mapping)
        values = [result[name] for name in outputs] if is_named else list(result)
        # A graph that returns a tensor under two names, or an input, loses a name.
        known = {id(tensor) for tensor in tensors.values()}
        for index, value in enumerate(values):
            if id(value) in known:
                values[index] = value.clone()
            known.add(id(value))
        return tuple(values)

    forward.__signature__ = inspect.Signature(  # type: ignore[attr-defined]  # torch reads it
        [inspect.Parameter(key, inspect.Parameter.POSITIONAL_OR_KEYWORD) for key in identifiers]
    )
    module.forward = forward
    try:
        yield
    finally:
        if own is None:
            del module.forward
        else:
            module.forward = own


def _identifiers(names: Sequence[str] | Mapping[str, Any]) -> list[str]:
    """Return names that Python takes for arguments: `past_key_values_0_key`."""
    return [re.sub(r"\W", "_", name) for name in names]


def _shapes(axes: Mapping[int, str], kind: DimKind) -> dict[int, Any]:
    """Describe the dynamic axes of an input to `torch.export`.

    A sum of dims has no `torch.export.Dim`: torch finds it out.
    """
    dim = torch.export.Dim
    if kind == "auto":
        return dict.fromkeys(axes, dim.AUTO)
    if kind == "dynamic":
        return {
            axis: dim.DYNAMIC if dim_terms(name) == [name] else dim.AUTO
            for axis, name in axes.items()
        }
    return {
        axis: dim(name) if dim_terms(name) == [name] else dim.AUTO for axis, name in axes.items()
    }


def _remove_traces(model: ir.Model) -> None:
    """Remove what torch records of the code that a node comes from: paths of this machine."""
    model.metadata_props.clear()
    for graph in model.graphs():
        graph.metadata_props.clear()
        for node in graph:
            node.metadata_props.clear()
            node.doc_string = None
        for value in _values(graph):
            value.metadata_props.clear()
            value.doc_string = None


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def _rename(graph: ir.Graph, inputs: Sequence[str], outputs: Sequence[str]) -> None:
    """Give the inputs and outputs of a graph their names.

    Raises:
        _LoweringError: the graph has others.
    """
    targets = [*zip(graph.inputs, inputs, strict=False), *zip(graph.outputs, outputs, strict=False)]
    if len(graph.inputs) != len(inputs) or len(graph.outputs) != len(outputs):
        raise _LoweringError(
            f"the graph has {len(graph.inputs)} inputs and {len(graph.outputs)} outputs, expected "
            f"{len(inputs)} and {len(outputs)}"
        )
    renamed = {id(value) for value, _ in targets}
    taken = {*inputs, *outputs}
    used = {value.name for value in _values(graph)} | taken
    for value in list(_values(graph)):
        if id(value) in renamed or value.name not in taken:
            continue
        name = f"{value.name}_inner"
        while name in used:
            name += "_"
        used.add(name)
        value.name = name
    for value, name in targets:
        value.name = name


def _name_dims(model: ir.Model, dims: Dims) -> None:
    """Give the dims of all values the names that were asked for.

    Raises:
        _LoweringError: the exporter fixed a dim, or takes two for one.
    """
    names: dict[str, str] = {}
    for value in model.graph.inputs:
        if value.shape is None:
            raise _LoweringError(f"the exporter gave the input {value.name} no shape")
        shape = list(value.shape)
        for axis, name in dims.get(value.name or "", {}).items():
            dim = shape[axis]
            if isinstance(dim, int):
                raise _LoweringError(f"the exporter fixed {name} at {dim}, which must vary")
            symbol = dim.value or ""
            if _SYMBOL.fullmatch(symbol) and names.setdefault(symbol, name) != name:
                raise _LoweringError(f"the exporter takes {names[symbol]} and {name} for one dim")
            shape[axis] = ir.SymbolicDim(name)
        value.shape = ir.Shape(shape)

    def renamed(dim: int | ir.SymbolicDim) -> int | ir.SymbolicDim:
        if isinstance(dim, int) or dim.value is None:
            return dim
        return ir.SymbolicDim(_SYMBOL.sub(lambda match: names.get(match[0], match[0]), dim.value))

    for graph in model.graphs():
        for value in _values(graph):
            if value.shape is not None and not value.is_graph_input():
                value.shape = ir.Shape([renamed(dim) for dim in value.shape])


def _first_line(error: Exception) -> str:
    """Return what an exception of torch says first, with the cause that torch.onnx wraps."""
    cause: BaseException = error
    while cause.__cause__ is not None:
        cause = cause.__cause__
    lines = [line.strip() for line in str(cause).splitlines() if line.strip()]
    return f"{type(cause).__name__}: {lines[0]}" if lines else repr(cause)
