"""Add the graph with a cache of fixed size to a generating artifact for CUDA.

It stands beside the decoder from which it is made and shares its weights. It is made in FP32 first,
compared with the decoder on the CPU, and then cast as the decoder was. A model that is not built as
expected gets none, with a note that names the first node that does not fit.
"""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.external_data import external_data_files
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import EngineryError, raise_system_error
from enginery.core.model.feeds import FeedLimits
from enginery.core.shapes import TensorSpec
from enginery.optimize.comparison import cast_feeds, input_types
from enginery.optimize.config import OptimizeConfig
from enginery.passes.cast.cast import cast_graph
from enginery.passes.generation.fixed_cache import (
    BUFFER,
    IDS,
    LAST,
    LENGTHS,
    POSITIONS,
    ROWS,
    TOTAL,
    DecoderFacts,
    add_choice,
    fix_cache,
    measure_decoder,
)
from enginery.passes.generation.sizes import Sizes, UnsuitableGraphError
from enginery.passes.ir.graph_file import check_graph, read_graph, weight_bytes, write_graph
from enginery.runtime.decoder_graphs import (
    LOGITS,
    DecoderGraphs,
    is_cross_attention,
    is_past,
    present_name,
)
from enginery.runtime.onnxruntime.tracing import GraphTracer

SUFFIX = "_fixed_cache"

# Smaller graphs hold their weights themselves, each a copy.
_SHARED_BYTES = 16 << 20
# FP32 sums in another order, relative to the largest logit.
_MAX_ERROR = 1e-3
# The cast is that of the decoder, which has been checked; this finds overflows.
_MAX_ERROR_FP16 = 0.1
_LENGTHS = (21, 14)
_STEPS = 3
_ENCODER_POSITIONS = 6
_ENCODER_PADDING = 2

Arrays = dict[str, NDArray[Any]]


@dataclass(frozen=True)
class DecoderFiles:
    """A decoder in an artifact that is being optimized."""

    record: GraphRecord
    fp32: Path
    """The prepared FP32 graph, in a temporary directory."""
    out: Path
    """The finished graph, in the new artifact."""
    keep_fp32: frozenset[str]
    """The nodes that a cast keeps in FP32."""


@dataclass(frozen=True)
class FixedCacheGraph:
    """What came of the attempt to add the graph."""

    note: str
    record: GraphRecord | None = None
    """The record of the graph; None if there is none."""
    data_files: tuple[str, ...] = ()
    """The data files of the decoder, whose weights may have moved out of its file."""


def wants_fixed_cache(artifact: Artifact, record: GraphRecord, config: OptimizeConfig) -> bool:
    """Return True for a decoder that runs prompts and tokens, for CUDA."""
    decoders = DecoderGraphs.find_all(artifact.manifest.graphs)
    runs_all = any(graphs.first is graphs.later is record for graphs in decoders)
    return config.target == "cuda" and runs_all


def add_fixed_cache(
    artifact: Artifact, decoder: DecoderFiles, config: OptimizeConfig
) -> FixedCacheGraph:
    """Write the graph with a cache of fixed size beside a decoder."""
    target = decoder.out.with_name(f"{decoder.out.stem}{SUFFIX}.onnx")
    try:
        return _add(artifact, decoder, config, target)
    except Exception as error:  # whatever is unusual in a graph: the artifact does without
        raise_system_error(error)
        target.unlink(missing_ok=True)
        expected = isinstance(error, UnsuitableGraphError | EngineryError)
        reason = str(error) if expected else f"{type(error).__name__}: {error}"
        return FixedCacheGraph(
            f"{decoder.record.file}: no graph with a cache of fixed size, because of {reason}",
            data_files=_data_files(decoder.out),
        )


def _add(
    artifact: Artifact, decoder: DecoderFiles, config: OptimizeConfig, target: Path
) -> FixedCacheGraph:
    facts = measure_decoder(decoder.fp32, FeedLimits.from_artifact(artifact))
    # ONNX Runtime's CUDA kernel of GroupQueryAttention computes in FP16 and BF16 alone.
    precision = config.low_precision
    grouped = precision is not None
    rotary = _has_rotary(facts, decoder, grouped=grouped)
    # With rotary embeddings, `_has_rotary` has made this comparison.
    if not rotary:
        _compare(facts, decoder, fix_cache(facts, grouped=grouped).model, _MAX_ERROR)
    fixed = fix_cache(facts, grouped=grouped, rotary=rotary)
    model = fixed.model
    if precision is not None:
        fp32_nodes = fixed.kept(decoder.keep_fp32)
        cast_graph(model, precision, keep_fp32=fp32_nodes, io_dtype="same")
    if precision == "fp16":  # the CPU has no kernels for BF16
        # A clone, because the comparison adds a choice to the graph.
        _compare(facts, decoder, model.clone(), _MAX_ERROR_FP16)
    add_choice(model)
    data_files = _share_weights(model, decoder.out)
    ir.save(model, target)
    check_graph(target)
    record = _record(model, decoder.record, target.name, _data_files(target))
    return FixedCacheGraph(_describe(target.name, fixed.attentions), record, data_files)


def _has_rotary(facts: DecoderFacts, decoder: DecoderFiles, *, grouped: bool) -> bool:
    """Return True if GroupQueryAttention rotates queries and keys as the decoder does."""
    if not grouped:
        return False
    model = fix_cache(facts, grouped=grouped, rotary=True).model
    if not any("do_rotary" in node.attributes for node in model.graph):
        return False
    try:
        _compare(facts, decoder, model, _MAX_ERROR)
    except (UnsuitableGraphError, EngineryError):
        return False
    return True


def _describe(file: str, counts: Counter[str]) -> str:
    parts = " and ".join(f"{count} by {operator}" for operator, count in counts.items())
    return f"{file}: a cache of fixed size, attention {parts}"


def _data_files(path: Path) -> tuple[str, ...]:
    return tuple(external_data_files(path))


def _share_weights(model: ir.Model, decoder: Path) -> tuple[str, ...]:
    """Let a graph refer to the weights of a decoder, and return the decoder's data files.

    Large weights inside the decoder's file move to a file of their own.
    """
    stored = read_graph(decoder)
    if not _data_files(decoder) and weight_bytes(stored) > _SHARED_BYTES:
        folder = decoder.with_name(f"{decoder.name}.outside")
        folder.mkdir()
        names = write_graph(stored, folder / decoder.name, max_inline_bytes=0)
        for name in (decoder.name, *names):
            (folder / name).replace(decoder.parent / name)
        shutil.rmtree(folder)
        # Read again: the tensors so far belong to the file that was replaced.
        stored = read_graph(decoder)
    weights = stored.graph.initializers
    for name, value in model.graph.initializers.items():
        shared = weights[name].const_value if name in weights else None
        weight = value.const_value
        # A weight that was cast or rearranged in only one of the graphs is not shared.
        if (
            isinstance(shared, ir.ExternalTensor)
            and weight is not None
            and (shared.dtype, tuple(shared.shape)) == (weight.dtype, tuple(weight.shape))
        ):
            value.const_value = shared
    return _data_files(decoder)


def _record(
    model: ir.Model, decoder: GraphRecord, file: str, data_files: tuple[str, ...]
) -> GraphRecord:
    def spec(value: ir.Value) -> TensorSpec:
        dims = () if value.shape is None else tuple(value.shape)
        return TensorSpec(
            name=value.name or "",
            dtype="" if value.dtype is None else _dtype_name(value.dtype),
            dims=tuple(dim if isinstance(dim, int) else str(dim.value) for dim in dims),
        )

    return GraphRecord(
        file=(Path(decoder.file).parent / file).as_posix(),
        opset=model.opset_imports[""],
        inputs=tuple(map(spec, model.graph.inputs)),
        outputs=tuple(map(spec, model.graph.outputs)),
        data_files=tuple((Path(decoder.file).parent / name).as_posix() for name in data_files),
    )


def _dtype_name(dtype: ir.DataType) -> str:
    names = {ir.DataType.FLOAT: "float32", ir.DataType.BFLOAT16: "bfloat16"}
    return names.get(dtype) or dtype.name.lower()


def _compare(facts: DecoderFacts, decoder: DecoderFiles, model: ir.Model, max_error: float) -> None:
    """Compare the logits of rows of two lengths, for a prompt and some tokens.

    Args:
        facts: what is known of the decoder.
        decoder: the decoder.
        model: the graph with a cache of fixed size, without a choice, which it gets.
        max_error: the largest error, relative to the largest logit.

    Raises:
        UnsuitableGraphError: they differ.
    """
    add_choice(model)
    fixed = decoder.fp32.with_name(f"{decoder.fp32.stem}{SUFFIX}.onnx")
    ir.save(model, fixed)
    lengths = _row_lengths(facts)
    ids = facts.sizes.token_ids((len(lengths), max(lengths) + _STEPS), seed=1)
    encoder = _encoder_inputs(facts)
    logits = _run_fixed(fixed, ids, lengths, encoder)
    expected = _run_decoder(facts, decoder.fp32, ids, lengths, encoder)
    error = float(np.abs(logits - expected).max())
    largest = float(np.abs(expected).max())
    if not error <= max_error * largest:  # NaN included
        raise UnsuitableGraphError(
            f"its logits, which differ by up to {error:.3g} of {largest:.3g} from the decoder's"
        )


def _row_lengths(facts: DecoderFacts) -> tuple[int, ...]:
    limit = facts.limits.position_limit
    longest = max(_LENGTHS) if limit is None else limit - _STEPS
    return tuple(max(1, min(length, longest)) for length in _LENGTHS)


def _encoder_inputs(facts: DecoderFacts) -> Arrays:
    """Return what the decoder reads of an encoder, with padding in the last row."""
    feeds = facts.sizes.feeds(Sizes(len(_LENGTHS), 1, 0, _ENCODER_POSITIONS))
    encoder = {
        name: array
        for name, array in feeds.items()
        if is_cross_attention(name) or name.startswith("encoder_")
    }
    if "encoder_attention_mask" in encoder:
        encoder["encoder_attention_mask"][-1, -_ENCODER_PADDING:] = 0
    return encoder


def _run_fixed(
    path: Path, ids: NDArray[np.int64], lengths: Sequence[int], encoder: Mapping[str, NDArray[Any]]
) -> NDArray[np.float32]:
    """Return the logits of each run and row, (runs, rows, vocabulary)."""
    rows, width, ends = len(lengths), max(lengths), np.array(lengths)
    # Longer than the rows get, as it is in use: what lies beyond must not be read.
    buffer = width + _STEPS + 2
    inputs = {value.name or "": value for value in ir.load(path).graph.inputs}
    types = input_types(path)
    cache: Arrays = {}
    for name, value in inputs.items():
        shape = value.shape
        if is_past(name) and not is_cross_attention(name) and shape is not None:
            cache[name] = np.zeros((rows, shape[1], buffer, shape[3]), types[name])
    logits = []
    with GraphTracer(path, [LOGITS, *map(present_name, cache)], optimized=True) as trace:
        for step in range(_STEPS + 1):
            if step == 0:
                tokens, positions = ids[:, :width], np.tile(np.arange(width), (rows, 1))
                # Rows are padded on the right, so each has its last token elsewhere.
                last, total = ends - 1, width
            else:
                positions = (ends + step - 1)[:, None]
                tokens = np.take_along_axis(ids, positions, axis=1)
                # GroupQueryAttention takes a run whose tokens are all there are for a prompt, so
                # the total of a step is that of the buffer.
                last, total = np.zeros(rows, np.int64), buffer
            feeds: Arrays = {
                IDS: tokens,
                POSITIONS: positions,
                LAST: last,
                # By ONNX Runtime's definition, the number of a row's tokens minus 1.
                LENGTHS: (ends + step - 1).astype(np.int32),
                TOTAL: np.array([total], np.int32),
                ROWS: np.arange(rows),
                BUFFER: np.arange(buffer),
                **encoder,
                **cache,
            }
            # A model without positions or an encoder lacks some of these inputs.
            used = {name: array for name, array in feeds.items() if name in inputs}
            outputs = trace(cast_feeds(used, types))
            cache = {name: outputs[present_name(name)] for name in cache}
            logits.append(outputs[LOGITS])
    return np.stack(logits)


def _run_decoder(
    facts: DecoderFacts,
    path: Path,
    ids: NDArray[np.int64],
    lengths: Sequence[int],
    encoder: Mapping[str, NDArray[Any]],
) -> NDArray[np.float32]:
    """Return the same of the decoder, which runs each row alone and from its beginning."""
    logits = []
    with GraphTracer(path, [LOGITS], optimized=True) as trace:
        for step in range(_STEPS + 1):
            for row, length in enumerate(lengths):
                feeds = facts.sizes.feeds(Sizes(1, length + step, 0, _ENCODER_POSITIONS))
                feeds[IDS] = ids[row : row + 1, : length + step].astype(feeds[IDS].dtype)
                feeds |= {name: array[row : row + 1] for name, array in encoder.items()}
                logits.append(trace(feeds)[LOGITS][0, -1])
    return np.stack(logits).reshape(_STEPS + 1, len(lengths), -1)
