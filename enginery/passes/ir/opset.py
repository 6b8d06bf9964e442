"""Convert a graph to a later opset, and check that it computes the same.

    convert_opset(Path("model.onnx"), Path("new/model.onnx"), 20, [feeds])

The conversion is `onnx.version_converter`'s. It replaces operators whose definition has changed by
others, such as a Softmax over several axes, so sums may be added in another order. How much that
may change an output is measured: by as much as ONNX Runtime's optimizations of the original change
it, within the tolerance for that noise floor. Largest differences from opset 11 to 20:

    PaddleOCR                 converted    optimized    limit
    PP-OCRv6 recognizer       9.2e-07      2.7e-06      2.3e-05
    PP-OCRv6 detector         0            1.8e-07      1.4e-06
    its classifier            0            1.2e-07      1.5e-06
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginery.core.artifact.external_data import external_data_files, load_graph
from enginery.core.errors import ExportError, InputError, ProviderError
from enginery.core.precision import PRECISION_OF_DTYPE
from enginery.core.tolerance import Tolerance
from enginery.passes.ir.graph_file import check_graph, write_graph
from enginery.runtime.onnxruntime.tracing import GraphTracer

Feeds = Mapping[str, NDArray[Any]]

_MAX_BYTES = 2**31 - 2**26
"""protobuf's limit of 2 GiB, minus space for the nodes; the converter takes one message."""
_DO = "Export the model again from its framework, with that opset."


def convert_opset(
    path: Path, out: Path, opset: int, batches: Sequence[Feeds], *, name: str = ""
) -> tuple[str, ...]:
    """Write a graph in a later opset to `out`, after running both on the same inputs.

    Args:
        path: an ONNX file of an earlier opset.
        out: the file to write, in another directory.
        opset: the opset of ONNX's own operators.
        batches: inputs of the graph, at least one.
        name: what messages call the file; empty for its path.

    Returns:
        The names of the external data files that were written: none or one.

    Raises:
        ExportError: the graph is over 2 GB, has an operator that cannot be converted, does not run
            on the inputs, or its outputs change.
    """
    import onnx
    from onnx import version_converter

    name = name or str(path)
    failed = f"{name} cannot be converted to opset {opset}"
    model = load_graph(path)
    files = [path, *(path.parent / file for file in external_data_files(path, model))]
    size_bytes = sum(file.stat().st_size for file in files)
    if size_bytes > _MAX_BYTES:
        raise ExportError(
            f"{failed}: it has {size_bytes:,} bytes, and onnx.version_converter takes up to "
            f"{_MAX_BYTES:,}.",
            do=_DO,
        )
    outputs = [value.name for value in model.graph.output]
    try:
        expected = _run(path, outputs, batches)
        # What another order of sums changes, as the noise floor of the comparison.
        noisy = _run(path, outputs, batches, optimized=True)
    except (InputError, ProviderError) as error:
        raise ExportError(
            f"{failed}, because the result could not be compared with it: {error.message}",
            do="The sizes of generated inputs are guesses: name those that the file takes when you "
            "import it, with --dims INPUT=batch,3,48,192.",
        ) from error
    onnx.load_external_data_for_model(model, str(path.parent))
    try:
        converted = version_converter.convert_version(model, opset)
    except Exception as error:  # the converter raises RuntimeError, ValueError and its own types
        first = str(error).strip().partition("\n")[0]
        raise ExportError(f"{failed}: onnx.version_converter: {first}", do=_DO) from error
    # Else its weights would stay in memory beside the converted ones.
    del model
    # A later opset may require a later version of the file format.
    min_ir_version = onnx.helper.find_min_ir_version_for(list(converted.opset_import))
    converted.ir_version = max(converted.ir_version, min_ir_version)
    out.parent.mkdir(parents=True, exist_ok=True)
    data_files = write_graph(ir.from_proto(converted), out)
    del converted
    try:
        check_graph(out)
        actual = _run(out, outputs, batches)
    except (ExportError, InputError, ProviderError) as error:
        raise ExportError(f"{failed}: {error.message}", do=_DO) from error
    for before, optimized, after in zip(expected, noisy, actual, strict=True):
        for output in outputs:
            if problem := _difference(before[output], optimized[output], after[output]):
                raise ExportError(f"{failed}: its output {output} changes, {problem}.", do=_DO)
    return data_files


def _run(
    path: Path, outputs: Sequence[str], batches: Sequence[Feeds], *, optimized: bool = False
) -> list[dict[str, NDArray[Any]]]:
    with GraphTracer(path, outputs, optimized=optimized) as trace:
        return [trace(feeds) for feeds in batches]


def _difference(before: NDArray[Any], noisy: NDArray[Any], after: NDArray[Any]) -> str:
    """Return how an output has changed by more than rounding explains; empty if it has not."""
    if (before.shape, before.dtype) != (after.shape, after.dtype):
        return f"from {before.dtype} {before.shape} to {after.dtype} {after.shape}"
    # Integers and booleans are not rounded, so all must be equal.
    if before.dtype.kind != "f":
        unequal = int(np.not_equal(before, after).sum())
        return f"in {unequal} of {before.size} elements" if unequal else ""
    finite = np.isfinite(before)
    if not np.array_equal(before[~finite], after[~finite], equal_nan=True):
        return "in elements that are NaN or infinite"
    limit = Tolerance.for_precision(PRECISION_OF_DTYPE[before.dtype.name]).limit(
        noise_floor=_largest_error(before[finite], noisy[finite]),
        largest=float(np.abs(before[finite]).max(initial=0.0)),
    )
    error = _largest_error(before[finite], after[finite])
    # Not `error > limit`, which is False for NaN.
    return "" if error <= limit else f"by up to {error:.3g}, expected at most {limit:.3g}"


def _largest_error(first: NDArray[Any], second: NDArray[Any]) -> float:
    difference = first.astype(np.float64) - second.astype(np.float64)
    return float(np.abs(difference).max(initial=0.0))
