"""Import an existing `.onnx` file with its external data and the files beside it.

The graph stays as it is, but for three things. Dynamic dims of inputs that have no name, or one
that no command line takes (`DynamicDimension.0`), get names, since profiles, engines and requests
refer to dims by name. Weights that old files list among the inputs are inputs no more. And with
`--opset`, the graph is converted.
"""

from __future__ import annotations

import json
import re
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import onnx

from enginery.core.artifact.external_data import external_data_files, load_graph
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ExportError, OptionError, ShapeError, SourceError, nearest
from enginery.core.model.feeds import FeedLimits, make_feeds
from enginery.core.model.files import ModelConfig, PreprocessorConfig
from enginery.core.shapes import INPUT_AXES, canonical_dim, dim_terms
from enginery.core.trust.graph_limits import check_allocations
from enginery.core.trust.screening import screen_model
from enginery.export.config import (
    ExportConfig,
    image_options,
    parse_image_options,
    parse_input_dims,
)
from enginery.export.graphs import (
    ExportedModel,
    TracedInputs,
    base_sizes,
    check_tensors,
    is_readable,
    record_graph,
)
from enginery.export.side_files import copy_side_files
from enginery.passes.ir.opset import convert_opset
from enginery.runtime.sample_inputs import channel_axis

_IMAGES = {
    1: ("batch", "channels", "height", "width"),
    3: ("batch", "height", "width", "channels"),
}
"""Axis of the channels -> names of all axes."""
_CHANNELS = (1, 3, 4)
_WORD = re.compile(r"[^\W\d]\w*")

Key = str | tuple[str, int]
"""A dim: its name in the file, or the input and axis of one without a name."""


def import_onnx(source: Path, config: ExportConfig, out: Path) -> ExportedModel:
    """Copy the graph as `model.onnx`, its external data under their own names, and side files.

    Raises:
        ExportError: the external data would overwrite the graph, or an input or output of the graph
            is no tensor.
        OptionError: `dims` do not fit the graph's inputs.
        SourceError: external data is missing or is outside the model's directory, or the
            config.json beside the graph is malformed.
        UntrustedModelError: the files beside the graph require permissions that only the user may
            give, or they are links out of the directory.
    """
    check_allocations(source, error=SourceError)  # before the package onnx reads the whole file
    data = external_data_files(source)
    has_side_files = (source.parent / ModelConfig.FILE).is_file()
    if has_side_files:
        trust = config.trust_remote_code
        screen_model(source.parent, known_types=_KnownTypes(), trust_remote_code=trust)
    if "model.onnx" in data:
        raise ExportError(
            f"{source}: its external data is named model.onnx, which will be the graph's name.",
            do="Save the graph with another name for its external data.",
        )
    shutil.copyfile(source, out / "model.onnx")
    for name in data:
        (out / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(source.parent / name, out / name)
    settings = ModelConfig.read(source.parent, error=SourceError)
    if has_side_files:
        copy_side_files(source.parent, out, code=False, config=True)
    weights = take_weights_out_of_inputs(out / "model.onnx", name=source.name)
    named = name_input_dims(out / "model.onnx", config.dims)
    traced = _write_image_settings(out, config)
    return ExportedModel(
        files=["model.onnx"],
        task=config.task if config.task != "auto" else "unknown",
        model_type=settings.model_type or "unknown",
        library="onnx",
        traced={"model.onnx": traced},
        config=settings,
        notes=[f"imported from {source.name}", *weights, *named],
        imported=source.name,
    )


def _write_image_settings(out: Path, config: ExportConfig) -> TracedInputs:
    """Write preprocessor_config.json if an option describes images, and return their shape.

    Raises:
        OptionError: the graph does not take such images.
    """
    settings = parse_image_options(config)
    if not settings:
        return TracedInputs()
    option = image_options(config)[0]
    record = record_graph(out / "model.onnx", out)
    axis = channel_axis(record)
    spec = record.inputs[0]
    if axis is None:
        raise OptionError(
            f"option '{option}' is given, but the graph takes no images: "
            f"{', '.join(map(str, record.inputs))}.",
            do="Leave it out, or name the dims and channels with --dims x=batch,3,height,width.",
            option=option,
        )
    sides = dict(
        zip(("height", "width"), spec.dims[2:] if axis == 1 else spec.dims[1:3], strict=True)
    )
    fixed = {name: side for name, side in sides.items() if isinstance(side, int)}
    size = {**settings.get("size", fixed), **({} if settings["do_resize"] else fixed)}
    if wrong := [name for name in fixed if size[name] != fixed[name]]:
        raise OptionError(
            f"option 'resize' is '{config.resize}', but the graph takes images of the {wrong[0]} "
            f"{fixed[wrong[0]]}.",
            do="Leave it out for the graph's own size.",
            option="resize",
        )
    order = settings["channel_order"] or ("gray" if spec.dims[axis] == 1 else "rgb")
    if (order == "gray") != (spec.dims[axis] == 1):
        raise OptionError(
            f"option 'channel_order' is '{order}', but the graph takes images of {spec.dims[axis]} "
            "channels.",
            option="channel_order",
        )
    fixed_size = len(size) == 2
    settings |= {
        "channel_order": order,
        "do_resize": fixed_size,
        **({"size": size} if fixed_size else {}),
    }
    (out / PreprocessorConfig.FILE).write_text(json.dumps(settings, indent=2) + "\n")
    if not fixed_size:
        return TracedInputs()
    traced = {sides[name]: side for name, side in size.items()}
    shape = (traced.get(dim, dim) if isinstance(dim, str) else dim for dim in spec.dims[1:])
    return TracedInputs({spec.name: (1, *(side for side in shape if isinstance(side, int)))})


def take_weights_out_of_inputs(path: Path, *, name: str) -> list[str]:
    """Remove the graph's initializers from its inputs, and save the file if there are any.

    ONNX before IR version 4 lists every weight among the inputs. A caller could replace such a
    weight, so that ONNX Runtime folds nothing into it, and passes must not change it.

    Args:
        path: the ONNX file.
        name: what the error calls it.

    Returns:
        A note if an input was removed.

    Raises:
        ExportError: an input or output is no tensor.
    """
    model = load_graph(path)
    check_tensors(name, model)
    stored = {tensor.name for tensor in model.graph.initializer}
    stored |= {tensor.values.name for tensor in model.graph.sparse_initializer}
    values = list(model.graph.input)
    inputs = [value for value in values if value.name not in stored]
    count = len(values) - len(inputs)
    if not count:
        return []
    if not inputs:
        raise ExportError(
            f"{name}: every input has a default value, so the graph computes the same each time.",
            do="Export it again with the default of its input left out.",
        )
    del model.graph.input[:]
    model.graph.input.extend(inputs)
    # Before version 4, every initializer has to be an input.
    model.ir_version = max(model.ir_version, 4)
    onnx.save(model, str(path))
    names = [value.name for value in values if value.name in stored]
    listed = ", ".join(names[:3]) + (f" and {count - 3} more" if count > 3 else "")
    return [f"no longer inputs, since the file has values for them: {listed}"]


def name_input_dims(path: Path, dims_option: Sequence[str] = ()) -> list[str]:
    """Give every dynamic dim of an input a readable name, and save the file if one changes.

    A dim keeps a readable name, and dims of equal names keep equal names. Others become:

    - `batch`, on the first axis, unless the dim is also on another axis;
    - the names in Optimum's exports, for inputs that these have, such as `input_ids`;
    - `height` and `width` of an input of four dims with 1, 3 or 4 channels, if the graph has
      convolutions;
    - their name in lower case, if that is readable;
    - the input's name and the axis, such as `x_1`.

    Args:
        path: the ONNX file.
        dims_option: the option `dims`: names and sizes that replace all others.

    Returns:
        A note for each input whose dims have changed.

    Raises:
        OptionError: `dims_option` does not fit the inputs.
    """
    model = load_graph(path)
    stored = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in stored]
    keys = {value.name: _keys(value) for value in inputs}
    new = _given_dims(keys, dims_option)
    dim_texts = [dim.dim_param for value in _values(model.graph) for dim in _dims(value)]
    used_names = {word for text in dim_texts for word in _WORD.findall(canonical_dim(text))}
    used_names |= {str(name) for name in new.values()}
    has_convolutions = any(node.op_type == "Conv" for node in model.graph.node)
    batches = _batch_dims(keys, new)
    for value in inputs:
        names = _usual_names(value.name, keys[value.name], images=has_convolutions)
        for axis, key in enumerate(keys[value.name]):
            if isinstance(key, int) or key in new or (isinstance(key, str) and is_readable(key)):
                continue
            if key in batches:
                new[key] = "batch"
            elif names and value.name in INPUT_AXES:  # a name that several inputs share
                new[key] = names[axis]
            else:
                candidates = list(names[axis : axis + 1])
                if isinstance(key, str) and is_readable(key.lower()):
                    candidates.append(key.lower())
                new[key] = _free_name([*candidates, _axis_name(value.name, axis)], used_names)
                used_names.add(str(new[key]))
    if not new:
        return []
    _rename(model, inputs, keys, new)
    onnx.save(model, str(path))
    notes = []
    for value in inputs:
        dims = [key if isinstance(key, int) else new.get(key, key) for key in keys[value.name]]
        if dims != keys[value.name]:
            before = ", ".join("?" if isinstance(k, tuple) else str(k) for k in keys[value.name])
            after = ", ".join(map(str, dims))
            notes.append(f"dims of {value.name} renamed: ({before}) → ({after})")
    return notes


def convert_import(
    exported: ExportedModel, out: Path, record: GraphRecord, opset: int
) -> GraphRecord:
    """Convert the imported graph in `out` to a later opset, and note it.

    Returns:
        The record of the converted graph.

    Raises:
        ExportError: it cannot be converted, its outputs change, or inputs for it cannot be made.
    """
    limits = FeedLimits.from_config(exported.config)
    try:
        feeds = make_feeds(record.inputs, base_sizes(record, limits), limits, seed=0)
    except ShapeError as error:
        raise ExportError(
            f"{exported.imported} cannot be converted to opset {opset}, because the result could "
            f"not be compared with it: {error.message}",
            do=error.do,
        ) from error
    path = out / record.file
    with tempfile.TemporaryDirectory(prefix="opset-", dir=out) as scratch:
        converted = Path(scratch, record.file)
        data_files = convert_opset(path, converted, opset, [feeds], name=exported.imported)
        for name in record.data_files:
            (out / name).unlink()
        for name in (record.file, *data_files):
            shutil.move(Path(scratch, name), out / name)
    exported.notes.append(
        f"converted from opset {record.opset} to {opset}: its outputs on generated inputs are those"
        " of the file"
    )
    return record.model_copy(update={"opset": opset, "data_files": data_files})


def _keys(value: Any) -> list[Key | int]:
    """Return the dims of an input: a size, a name, or input and axis for one without a name."""
    keys: list[Key | int] = []
    for axis, dim in enumerate(_dims(value)):
        if dim.HasField("dim_value") and dim.dim_value >= 0:
            keys.append(dim.dim_value)
        # `?` and None stand for any size: two of them are not one dim.
        elif re.search(r"\w", dim.dim_param) and dim.dim_param != "None":
            keys.append(dim.dim_param)
        else:
            keys.append((value.name, axis))
    return keys


def _given_dims(
    keys: dict[str, list[Key | int]], dims_option: Sequence[str]
) -> dict[Key, int | str]:
    """Return the new name or size of each dim that the option `dims` names."""
    new: dict[Key, int | str] = {}
    for text in dims_option:
        name, dims = parse_input_dims(text)
        if name not in keys:
            raise OptionError(
                f"option 'dims' is '{text}', but the file has no input '{name}'"
                f"{nearest(name, keys)}",
                do=f"Its inputs: {', '.join(keys)}.",
                option="dims",
            )
        if len(dims) != len(keys[name]):
            raise OptionError(
                f"option 'dims' is '{text}', with {len(dims)} dims, but the input has "
                f"{len(keys[name])}.",
                option="dims",
            )
        for key, dim in zip(keys[name], dims, strict=True):
            if isinstance(key, int):
                if key != dim:
                    raise OptionError(
                        f"option 'dims' is '{text}', with {dim} where the file has the fixed size "
                        f"{key}.",
                        do=f"Write {key} there.",
                        option="dims",
                    )
            elif new.setdefault(key, dim) != dim:
                raise OptionError(
                    f"option 'dims' replaces the file's dim {key} by {new[key]} and by {dim}.",
                    do="Give it one name or size.",
                    option="dims",
                )
    return new


def _batch_dims(keys: dict[str, list[Key | int]], new: dict[Key, int | str]) -> set[Key]:
    """Return the dims that are on first axes only; none if `batch` is on another axis already."""
    first: set[Key] = set()
    other: set[Key] = set()
    for dims in keys.values():
        for axis, key in enumerate(dims):
            if not isinstance(key, int):
                (other if axis else first).add(key)
    names = {new.get(key, key) for key in other}
    if any(isinstance(name, str) and "batch" in dim_terms(canonical_dim(name)) for name in names):
        return set()
    return first - other


def _usual_names(name: str, keys: list[Key | int], *, images: bool) -> tuple[str, ...]:
    """Return the names of an input's axes that are known; none for most inputs."""
    if name in INPUT_AXES and len(INPUT_AXES[name]) == len(keys):
        return INPUT_AXES[name]
    if images and len(keys) == 4:
        for axis, names in _IMAGES.items():
            if keys[axis] in _CHANNELS:
                return names
    return ()


def _axis_name(name: str, axis: int) -> str:
    word = re.sub(r"[^a-z0-9]+", "_", name.lower()).strip("_")
    return f"{word}_{axis}" if word[:1].isalpha() else f"input_{word}_{axis}"


def _free_name(candidates: Sequence[str], used_names: set[str]) -> str:
    """Return the first name that is free; if none is, the last with a number."""
    names = [
        *candidates,
        *(f"{candidates[-1]}_{number}" for number in range(2, len(used_names) + 3)),
    ]
    return next(name for name in names if name not in used_names)


def _rename(
    model: Any, inputs: Sequence[Any], keys: dict[str, list[Key | int]], new: dict[Key, int | str]
) -> None:
    """Replace dims of the inputs, and their names wherever the file mentions them."""
    for value in inputs:
        for dim, key in zip(_dims(value), keys[value.name], strict=True):
            if isinstance(key, tuple) and key in new:
                _set_dim(dim, str(new[key]))
    named = sorted((key for key in new if isinstance(key, str)), key=len, reverse=True)
    if not named:
        return
    # In `floor(DynamicDimension.1/2 - 1/2) + 1` too, and not in `DynamicDimension.10`.
    mention = re.compile(rf"(?<![\w.])(?:{'|'.join(map(re.escape, named))})(?![\w.])")
    for value in _values(model.graph):
        for dim in _dims(value):
            if dim.dim_param:
                _set_dim(dim, mention.sub(lambda match: str(new[match[0]]), dim.dim_param))


def _set_dim(dim: Any, text: str) -> None:
    if text.isascii() and text.isdigit():
        dim.dim_value = int(text)
    else:
        dim.dim_param = text


def _dims(value: Any) -> Any:
    return value.type.tensor_type.shape.dim


def _values(graph: Any) -> Iterator[Any]:
    """Yield the inputs, outputs and described values of a graph and its subgraphs."""
    yield from (*graph.input, *graph.output, *graph.value_info)
    for node in graph.node:
        for attribute in node.attribute:
            for subgraph in (attribute.g, *attribute.graphs):
                yield from _values(subgraph)


class _KnownTypes:
    """The model types of transformers, which is imported only when one is looked up."""

    def __contains__(self, kind: object) -> bool:
        try:
            from transformers import CONFIG_MAPPING
        except ImportError:  # importing a graph needs neither transformers nor PyTorch
            return False
        return kind in CONFIG_MAPPING
