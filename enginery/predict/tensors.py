"""Raw tensors: a graph's own outputs for arrays, images or sounds, written as an .npz file.

    predict_file(artifact, "scans", "maps.npz")
    np.load("maps.npz")["sigmoid_0.tmp_0"].shape    # (96, 1, 320, 320)

The file has an array for each output of the graph, with the rows of the input in their order. If
rows have outputs of different shapes, as images of different sizes do, each row has arrays of its
own, named `OUTPUT/ROW`; so has each file of arrays if the graph has no batch axis.

The rows go to a temporary file for each output first, so that memory does not grow with them.
"""

from __future__ import annotations

import errno
import sys
import time
import zipfile
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import IO, Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.closing import Closeable
from enginery.core.datasets.folders import MediaKind, list_media
from enginery.core.datasets.samples import array_files, holds_arrays, load_arrays
from enginery.core.errors import InputError
from enginery.core.model.feeds import Feeds
from enginery.core.model.files import PreprocessorConfig
from enginery.predict.config import MAX_ROWS, PredictConfig
from enginery.predict.task_inputs import provider_specs
from enginery.predict.writer import ASSEMBLED
from enginery.runtime.graph_roles import input_graph
from enginery.runtime.onnxruntime.runner import OrtRunner, RunnerOptions
from enginery.runtime.providers.specification import check_run_options
from enginery.runtime.sample_inputs import (
    ImageFeeder,
    SoundFeeder,
    fit_arrays,
    takes_audio,
    takes_images,
    takes_real_inputs,
)
from enginery.runtime.tasks.batch_runner import BatchRunner
from enginery.runtime.tasks.task import InputLimits, Row
from enginery.runtime.tasks.tensors import Tensors

NPZ = ".npz"
ROW_NAMES = "row"
"""Name of the array with the names of images or sounds, relative to their folder."""


@dataclass(frozen=True)
class WrittenTensors:
    """A file of tensors."""

    path: Path
    rows: int
    providers: tuple[str, ...]
    start_seconds: float
    """Time until the session was loaded."""
    run_seconds: float
    """Time of reading the input and running the graph."""


def write_tensors(
    artifact: Artifact, source: Path, scratch: Path, config: PredictConfig
) -> WrittenTensors:
    """Run a graph on every row of the input and write its outputs to a file in `scratch`.

    Args:
        artifact: a model of any task; of several graphs, the one that takes the model's inputs.
        source: an .npz file with an array for each input, an .npy file for the only one, a folder
            of .npz files, or an image, a sound, or a folder of them.
        scratch: an empty directory.
        config: the options; those of the providers count, and `batch_rows`.

    Raises:
        InputError: the input cannot be read or does not fit the graph. Unlike in a table, a row
            that cannot be used ends the run.
        ArtifactError: the artifact's image or audio processor cannot be loaded.
        ProviderError: the provider is not available.
        OSError: a file cannot be written.
    """
    started = time.perf_counter()
    artifact.require_passed(allow_failed=config.allow_failed)
    record = input_graph(artifact.manifest.graphs)
    specs = provider_specs(config)
    check_run_options(
        specs,
        io_binding=config.io_binding,
        cuda_graph=config.cuda_graph,
        shrink_arena=config.shrink_arena,
    )
    inputs = _read_inputs(artifact, record, source)
    with ExitStack() as opened:
        runner = opened.enter_context(
            OrtRunner(
                artifact,
                RunnerOptions(
                    io_binding=config.io_binding,
                    cuda_graph=config.cuda_graph,
                    shrink_arena=config.shrink_arena,
                    keep_optimized=config.optimized_graph,
                ),
                graph=record.file,
                providers=specs,
                allow_fallback=config.allow_fallback,
            )
        )
        loaded = time.perf_counter()
        # The outputs of all rows may not fit into memory, and an .npz file takes one array
        # at a time.
        spools = [
            opened.enter_context(_Spool(spec.name, scratch / f"part-{index:06}"))
            for index, spec in enumerate(record.outputs)
        ]
        task = Tensors.open(artifact, record, InputLimits(unproved=config.unproved))
        names = _run(BatchRunner(task, runner), inputs, spools, config.batch_rows or MAX_ROWS)
        finished = time.perf_counter()
        providers = tuple(provider.name for provider in runner.providers)
    path = scratch / ASSEMBLED
    _assemble(path, spools, names, joined=task.has_rows, name_rows=not holds_arrays(source))
    return WrittenTensors(path, len(names), providers, loaded - started, finished - loaded)


class _Spool(Closeable):
    """A temporary file with one output of all rows, one after the other."""

    def __init__(self, name: str, path: Path) -> None:
        self.name, self.path = name, path
        self._shapes_and_dtypes: list[tuple[tuple[int, ...], str]] = []
        """Shape and dtype of each row."""
        self._stream = path.open("wb")

    def close(self) -> None:
        """Close the file, which stays."""
        self._stream.close()

    def append(self, array: NDArray[Any]) -> None:
        """Write the output of the next row.

        Raises:
            InputError: it holds texts.
        """
        if array.dtype.hasobject:
            raise InputError(f"output '{self.name}' holds texts, which .npz files do not take.")
        self._shapes_and_dtypes.append((array.shape, array.dtype.str))
        self._stream.write(np.ascontiguousarray(array).data)

    def members(self, names: list[str], *, joined: bool) -> Iterator[tuple[str, Any, int]]:
        """Yield (name, header, size in bytes) of the arrays that the file becomes, in its order."""
        have_one_shape = len(set(self._shapes_and_dtypes)) == 1
        for name, (shape, dtype) in zip(names, self._shapes_and_dtypes, strict=True):
            size = int(np.prod(shape)) * np.dtype(dtype).itemsize
            if joined and have_one_shape:
                yield self.name, _header((len(names), *shape[1:]), dtype), size * len(names)
                return
            alone = len(names) == 1 and not joined
            yield self.name if alone else f"{self.name}/{name}", _header(shape, dtype), size


def _header(shape: tuple[int, ...], dtype: str) -> dict[str, Any]:
    return {"descr": dtype, "fortran_order": False, "shape": shape}


def _read_inputs(
    artifact: Artifact, record: GraphRecord, source: Path
) -> Iterator[tuple[str, Feeds]]:
    """Yield the name and the feeds of each image, sound or file of arrays.

    Raises:
        InputError: the input is of another kind, or the graph does not take it.
    """
    if holds_arrays(source):
        return _read_arrays(record, source)
    media: MediaKind = "audio" if takes_audio(record) else "images"
    if takes_images(record) and not (artifact.path / PreprocessorConfig.FILE).is_file():
        raise InputError(
            f"data '{source}': the artifact does not say how images become its input.",
            do="Import the .onnx file with --resize, --rescale, --mean and --std, or save arrays.",
        )
    if not takes_real_inputs(artifact, record) or not (takes_images(record) or media == "audio"):
        names = ", ".join(spec.name for spec in record.inputs)
        raise InputError(
            f"data '{source}': the graph takes {names}, of which raw tensors are expected as .npz.",
            do="Save an array for each input: numpy.savez(path, name=array, …); or choose a table, "
            "such as --out results.parquet, if the model's task has one.",
        )
    files = list_media(source, media, rows=sys.maxsize)
    feeder = (SoundFeeder if media == "audio" else ImageFeeder).open(artifact, record)
    return _read_media(source, files, feeder)


def _read_arrays(record: GraphRecord, source: Path) -> Iterator[tuple[str, Feeds]]:
    names = [spec.name for spec in record.inputs]
    for file in array_files(source):
        yield file.stem, fit_arrays(file, record, load_arrays(file, names))


def _read_media(
    source: Path, files: list[Path], feeder: ImageFeeder | SoundFeeder
) -> Iterator[tuple[str, Feeds]]:
    root = source if source.is_dir() else source.parent
    for file in files:
        yield file.relative_to(root).as_posix(), feeder([file])


def _run(
    batch: BatchRunner, inputs: Iterator[tuple[str, Feeds]], spools: list[_Spool], batch_rows: int
) -> list[str]:
    """Run the rows in their order, and return their names."""
    names: list[str] = []

    def named_rows() -> Iterator[Row]:
        for name, feeds in inputs:
            try:
                rows = batch.task.preprocess(feeds, None).rows
            except InputError as error:
                raise InputError(f"data '{name}': {error.message}", do=error.do) from error
            numbered = len(rows) > 1
            names.extend(f"{name}/{i}" if numbered else name for i in range(len(rows)))
            yield from rows

    waiting = named_rows()
    while window := list(islice(waiting, batch_rows)):
        for outputs in batch.run_stream(window):
            for spool in spools:
                spool.append(outputs[spool.name])
    return names


def _assemble(
    path: Path, spools: list[_Spool], names: list[str], *, joined: bool, name_rows: bool
) -> None:
    """Write an .npz file of the arrays.

    Args:
        path: the file.
        spools: the outputs.
        names: names of the rows.
        joined: True if rows are joined along their first axis where their shapes agree.
        name_rows: True to add the array `ROW_NAMES`.
    """
    with zipfile.ZipFile(path, "w") as archive:
        for spool in spools:
            with spool.path.open("rb") as rows:
                for name, header, size in spool.members(names, joined=joined):
                    with archive.open(f"{name}.npy", "w", force_zip64=True) as member:
                        np.lib.format.write_array_header_2_0(member, header)
                        _copy(rows, member, size)
        if name_rows:
            with archive.open(f"{ROW_NAMES}.npy", "w") as member:
                np.lib.format.write_array(member, np.array(names))


def _copy(source: IO[bytes], target: IO[bytes], size: int) -> None:
    """Copy the next `size` bytes."""
    while size:
        block = source.read(min(size, 1 << 20))
        if not block:
            raise OSError(errno.EIO, "a temporary file was cut off")
        target.write(block)
        size -= len(block)
