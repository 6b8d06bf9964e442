"""Run an .onnx file as the reference for an artifact that was made from it.

    with SourceFile(Path("detector.onnx"), artifact.manifest.graphs[0]) as reference:
        files = reference(feeds, scratch / "case-0")
    np.load(files["boxes"])

The graph runs in plain ONNX Runtime on the CPU, without its optimizations. FP16 and BF16 values of
the file are widened to FP32 first.

For the noise floor it runs once more:

- FP16, BF16: every value that a node computes is rounded to the precision, as `optimize` simulates
  it. ONNX Runtime itself would compute an FP16 graph in FP32 on the CPU.
- FP32: every weight matrix and every float input is moved to a neighbouring FP32 number at random,
  `DRAWS` times.

Largest error of a graph with ONNX Runtime's optimizations, its largest noise floor, and for
comparison the rule of 16 roundings of the largest value, which is used without a noise floor:

    all-MiniLM-L6-v2, fused   4.7e-06    4.6e-06    6.0e-06
    PaddleOCR's classifier    1.2e-07    4.8e-07    5.5e-07
    its detector              1.8e-07    2.1e-07    1.5e-09
    its recognizer            3.2e-06    5.4e-06    5.9e-07
    OpenNSFW                  1.8e-07    7.2e-07    8.7e-07
    NudeNet                   9.2e-05    1.2e-04    3.1e-04
    Magika                    1.5e-06    9.1e-04    7.2e-07

MiniLM's noise floors in PyTorch are 3.7e-06, and 7.5e-03 in FP16; here they are 4.6e-06 and
7.6e-03. The rule of roundings would fail the detector. Magika sums over 2048 positions, so that the
last bits of its weights matter far more than the rounding of sums; weights are compared by
themselves.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir
from numpy.typing import NDArray

from enginery.core.artifact.manifest import GraphRecord
from enginery.core.closing import Closeable
from enginery.core.errors import InputError, SourceError
from enginery.core.model.feeds import Feeds
from enginery.core.scratch import temporary_directory
from enginery.core.trust.resource_limits import ResourceLimits, limited_call, read_sizes
from enginery.passes.cast.low_precision import read_values
from enginery.passes.cast.simulation import simulate_cast
from enginery.passes.cast.widening import widen
from enginery.passes.ir.graph_file import read_graph, write_graph
from enginery.passes.ir.nodes import all_graphs
from enginery.passes.ir.op_types import FLOAT
from enginery.runtime.onnxruntime.runner import open_session
from enginery.runtime.onnxruntime.session import tensor_spec
from enginery.runtime.providers.selection import choose_providers
from enginery.runtime.pytorch.reference import save_outputs

DRAWS = 3
"""Number of runs whose largest error is the noise floor of FP32."""

Noise = Literal["fp32", "fp16", "bf16"]


class SourceFile(Closeable):
    """An .onnx file in ONNX Runtime, as it is or with noise. A context manager."""

    notes: tuple[str, ...] = ()

    def __init__(
        self, path: Path, record: GraphRecord, *, noise: Noise | None = None, seed: int = 0
    ) -> None:
        """Open the file.

        Args:
            path: the .onnx file.
            record: the artifact's graph that is compared with it.
            noise: the precision whose rounding errors the outputs have; None for none.
            seed: seed of the errors of FP32.

        Raises:
            SourceError: the file has other inputs than the artifact's graph, or cannot be read.
            ArtifactError: the graph is damaged or would allocate too much memory.
            ProviderError: ONNX Runtime cannot load it.
        """
        self._outputs = [spec.name for spec in record.outputs]
        self._noise, self._seed = noise, seed
        self._path = path
        self._file_bytes, _ = read_sizes(path)
        with temporary_directory("source") as scratch:
            file = _with_noise(path, scratch / "model.onnx", noise, seed)
            # Without optimizations: a fusion that is wrong would be wrong on both sides.
            self._session: Any = open_session(file, choose_providers("cpu"), optimize=False)
        specs = [tensor_spec(value) for value in self._session.get_inputs()]
        self._types = {spec.name: spec.dtype for spec in specs}
        if set(self._types) != {spec.name for spec in record.inputs}:
            raise SourceError(
                f"{path} takes {'; '.join(map(str, specs))}, but the artifact's graph takes "
                f"{'; '.join(map(str, record.inputs))}.",
                do="Name the model that the artifact was made from with --reference.",
            )
        self._found = {value.name for value in self._session.get_outputs()}

    def __call__(self, feeds: Feeds, directory: Path) -> dict[str, Path]:
        """Run the graph.

        Args:
            feeds: arrays by name; floats of another precision are cast.
            directory: where to write the outputs; it must not exist.

        Returns:
            An `.npy` file for each output that the artifact's graph and the file both have.

        Raises:
            InputError: the graph fails on the feeds.
            EngineryError: the outputs cannot be written to the directory.
        """
        names = [name for name in self._outputs if name in self._found]
        try:
            arrays = self._feeds(feeds)
            with limited_call(self._path, lambda: ResourceLimits.of_run(self._file_bytes, arrays)):
                values = self._session.run(names, arrays)
        except Exception as error:  # ONNX Runtime raises many unrelated types
            shapes = ", ".join(f"{name} {array.shape}" for name, array in feeds.items())
            first = str(error).strip().partition("\n")[0]
            raise InputError(f"the source file fails on the inputs {shapes}: {first}") from error
        return save_outputs(dict(zip(names, values, strict=True)), directory)

    def close(self) -> None:
        """Free the session."""
        self._session = None

    def _feeds(self, feeds: Mapping[str, NDArray[Any]]) -> dict[str, NDArray[Any]]:
        arrays = {name: array.astype(self._types[name]) for name, array in feeds.items()}
        if self._noise == "fp32":
            generator = np.random.default_rng(self._seed)
            for name, array in arrays.items():
                if array.dtype == np.float32:
                    arrays[name] = _neighbours(array, generator)
        return arrays


def _with_noise(path: Path, file: Path, noise: Noise | None, seed: int) -> Path:
    """Return a file of the graph in FP32, with noise: `file`, or `path` if nothing changes."""
    model = read_graph(path)
    widened = widen(model)
    if noise == "fp32":
        # A backward stable computation has an error that such a change of its data explains
        # (Higham, Accuracy and Stability of Numerical Algorithms, 2002, section 1.5). FP64, which
        # is PyTorch's noise floor, is not possible here: ONNX Runtime has no convolution and no Erf
        # in FP64, and onnx's own evaluator in numpy computes other results for some graphs
        # (PaddleOCR's classifier and recognizer: 0.41 and 0.029 off) and fails on others (Magika).
        _move_weights(model, np.random.default_rng(seed))
    elif noise is not None:
        simulate_cast(model, noise)
    elif not widened:
        return path
    write_graph(model, file)
    return file


def _move_weights(model: ir.Model, generator: np.random.Generator) -> None:
    """Move each element of every FP32 matrix to a neighbouring number, in place.

    Vectors stay: some are sizes, such as the scales of a Resize.
    """

    def moved(tensor: ir.TensorProtocol) -> ir.TensorProtocol:
        return ir.tensor(_neighbours(read_values(tensor), generator), name=tensor.name)

    def is_matrix(tensor: ir.TensorProtocol | None) -> bool:
        return tensor is not None and tensor.dtype == FLOAT and len(tensor.shape) > 1

    for graph in all_graphs(model.graph):
        for value in graph.initializers.values():
            if value.const_value is not None and is_matrix(value.const_value):
                value.const_value = moved(value.const_value)
        for node in graph:
            attribute = node.attributes.get("value") if node.op_type == "Constant" else None
            if attribute is not None and is_matrix(attribute.as_tensor()):
                node.attributes["value"] = ir.AttrTensor("value", moved(attribute.as_tensor()))


def _neighbours(array: NDArray[Any], generator: np.random.Generator) -> NDArray[Any]:
    """Return the next FP32 number above or below each element, at random.

    Zeros stay zeros, and the lowest number, with which masks are filled, stays finite.
    """
    direction = np.where(generator.random(array.shape, np.float32) < 0.5, np.inf, -np.inf)
    with np.errstate(over="ignore"):
        moved = np.nextafter(array, direction.astype(np.float32))
    return np.where((array == 0) | ~np.isfinite(moved), array, moved)
