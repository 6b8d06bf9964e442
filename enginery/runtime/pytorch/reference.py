"""Run the PyTorch reference in a child process that is confined to loading and running its model.

    with TorchReference(source, artifact.manifest, precision="fp32") as reference:
        files = reference(feeds, scratch / "case-0")
    np.load(files["logits"])

The child, `worker.py`, holds a `TorchRunner`, whose methods are called by their names. Arrays pass
through files, because the outputs of a large profile take gigabytes. Weights are read in the child,
too, because unpickling them is left to the confined process:

    reference.weights().weights["encoder.layer.0.output.dense.bias"].shape

Importing PyTorch, transformers and Optimum takes seconds, so a process is kept for a while for the
next model.
"""

from __future__ import annotations

import atexit
import shutil
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field, is_dataclass
from itertools import count
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.manifest import Manifest
from enginery.core.closing import Closeable
from enginery.core.errors import ArtifactError, EngineryError, ExportError, InputError, os_errors_as
from enginery.core.model.source import ModelSource
from enginery.core.scratch import temporary_directory
from enginery.core.subprocess import WorkerProcess, WorkerResult
from enginery.core.trust.resource_limits import ResourceLimits

_IDLE_SECONDS = 30.0
_LARGE_BYTES = 2 << 30
"""Peak memory above which a process is not kept, because it may not return all of it."""

_ARRAY = "__array__"
"""Key of what stands for an array in JSON: its number, which is the name of its file."""
_SAMPLES = 256
"""Elements of a weight that `TorchWeight.sample` holds."""

Feeds = Mapping[str, NDArray[Any]]


@dataclass(frozen=True)
class TorchWeight:
    """A parameter or a buffer of the PyTorch model."""

    name: str
    shape: tuple[int, ...]
    sample: NDArray[Any]
    """The elements at `sample_positions(shape)`."""


@dataclass(frozen=True)
class TorchWeights:
    """The weights of a PyTorch model, and what their modules compute with them."""

    weights: dict[str, TorchWeight]
    """By name. A shared weight is there under each of its names."""
    linear: frozenset[str]
    """Names of the modules whose weight is (outputs, inputs)."""
    batch_norms: dict[str, float]
    """Epsilon of each batch normalization by the module's name."""
    inputs_first: frozenset[str] = frozenset()
    """Names of weights that are (inputs, outputs), as in ONNX's MatMul."""
    by_path: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """Path and role, `encoder.output.dense.bias`, -> the weights that nodes of this path read."""
    stored: frozenset[str] = frozenset()
    """Names of weights that the checkpoint has."""
    unused: Mapping[str, int] = field(default_factory=dict)
    """Tensors of the checkpoint that no weight took -> their number of elements."""
    lost: tuple[str, ...] = ()
    """Those of them without which the answers are others: adapters, more layers."""


def sample_positions(shape: Sequence[int]) -> tuple[NDArray[np.int64], ...]:
    """Return the positions of a sample of an array's elements, one index array for each axis."""
    if not shape:
        return ()
    size = prod(shape)
    flat = (
        np.arange(size)
        if size <= _SAMPLES
        # The same positions for all arrays of a shape, so that samples of two models can be
        # compared.
        else np.sort(np.random.default_rng(0).integers(size, size=_SAMPLES))
    )
    return np.unravel_index(flat, tuple(shape))


@dataclass(frozen=True)
class TorchProcess:
    """How a process with PyTorch is started."""

    python: str = ""
    """The interpreter of another environment; empty for this one's."""
    trust_remote_code: bool = False
    """Run Python code that comes with the model, without confinement."""


CONFINED = TorchProcess()


class TorchReference(Closeable):
    """A PyTorch model as the reference for one graph, in its own process."""

    def __init__(
        self,
        source: ModelSource,
        manifest: Manifest,
        *,
        graph: str = "",
        precision: str = "fp32",
        vocoder: Path | None = None,
        process: TorchProcess = CONFINED,
    ) -> None:
        """Load the model.

        Args:
            source: the model, as returned by `resolve_record(manifest.source)`.
            manifest: manifest of the artifact to compare with.
            graph: file name of the graph; empty for the first.
            precision: fp64, fp32, fp16 or bf16.
            vocoder: the directory of the vocoder that a model of speech was exported with.
            process: how its process is started.

        Raises:
            UntrustedModelError: the model requires permissions that were not granted, or attempted
                an operation that no model needs.
            ArtifactError: the artifact has no such graph.
            ExportError: PyTorch cannot load the model, or takes more memory than its size explains.
        """
        self._process = process
        files = (source.path / name for name in source.record.files)
        self._limits = ResourceLimits.of_checkpoint(
            file_bytes=sum(file.stat().st_size for file in files if file.is_file())
        )
        self._worker: WorkerProcess | None = None
        self._held = ExitStack()
        with ExitStack() as stack:
            self._scratch = stack.enter_context(temporary_directory("pytorch"))
            self._worker = _take_worker(process)
            self.notes: list[str] = self._request(
                "load",
                path=str(source.path),
                pickled=source.pickled,
                manifest=manifest.model_dump(mode="json"),
                graph=graph,
                precision=precision,
                vocoder=str(vocoder) if vocoder else "",
                trust_remote_code=process.trust_remote_code,
            )["notes"]
            self._held = stack.pop_all()

    def __call__(
        self,
        feeds: Feeds,
        directory: Path,
        *,
        decode: Literal["", "start", "resume"] = "",
        random: Path | None = None,
    ) -> dict[str, Path]:
        """Run the model on the feeds of the graph; see `TorchRunner`.

        Args:
            feeds: arrays by the graph's names.
            directory: where to write the outputs; it must not exist.
            decode: run the first or the next tokens with the model's own cache; the feeds are then
                those of `TorchDecoder.decode`.
            random: an `.npz` file of the random numbers that the model draws: it is written, or if
                it exists, the model gets the numbers in it.

        Returns:
            An `.npy` file for each output that PyTorch has, by the graph's names, float32 or wider.

        Raises:
            InputError: PyTorch itself rejects the feeds.
            UntrustedModelError: the model attempted an operation that no model needs.
            EngineryError: the outputs cannot be written to the directory.
        """
        if decode:
            return self._files("decode", directory, feeds, resume=decode == "resume")
        return self._files("run", directory, feeds, random=str(random) if random else "")

    def generate(
        self, feeds: Feeds, directory: Path, options: Mapping[str, Any]
    ) -> dict[str, Path]:
        """Run the model's own `generate`; see `TorchRunner.generate`, and `__call__` for files."""
        return self._files("generate", directory, feeds, dict(options))

    def answers(self, kind: str, items: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Return the fields of a `RawAnswer` for each input; see `TorchRunner.answers`."""
        answers: list[dict[str, Any]] = self._call("answers", kind, items)
        return answers

    def prepare(self, item: Mapping[str, Any]) -> dict[str, NDArray[Any]]:
        """Prepare a raw input with the model's own files; see `TorchRunner.prepare`."""
        arrays: dict[str, NDArray[Any]] = self._call("prepare", item)
        return arrays

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of texts; see `TorchRunner.tokenize`."""
        ids: list[list[int]] = self._call("tokenize", texts)
        return ids

    def decode_tokens(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of tokens; see `TorchRunner.decode_tokens`."""
        texts: list[str] = self._call("decode_tokens", tokens)
        return texts

    def generation_config(self) -> dict[str, Any]:
        """Return the defaults of `generate`; see `TorchRunner.generation_config`."""
        options: dict[str, Any] = self._call("generation_config")
        return options

    def weights(self) -> TorchWeights:
        """Describe every parameter and buffer; see `TorchRunner.weights`."""
        values: dict[str, Any] = self._call("weights")
        sets = {name: frozenset(values[name]) for name in ("linear", "inputs_first", "stored")}
        weights = {
            name: TorchWeight(name, tuple(weight["shape"]), weight["sample"])
            for name, weight in values["weights"].items()
        }
        return TorchWeights(**{**values, **sets, "weights": weights, "lost": tuple(values["lost"])})

    def weight(self, name: str) -> NDArray[Any]:
        """Return all elements of a weight."""
        array: NDArray[Any] = self._call("weight", name)
        return array

    def close(self) -> None:
        """Free the model; keep the process for the next one, or end it."""
        self._held.close()
        worker, self._worker = self._worker, None
        if worker is None:
            return
        if self._process.trust_remote_code:
            worker.close()
            return
        try:
            held_bytes = worker.request("unload")["peak_rss_bytes"]
        except EngineryError:
            worker.close()
            raise
        if held_bytes > _LARGE_BYTES:
            worker.close()
        else:
            _keep_worker(worker, self._process)

    def _files(
        self, method: str, directory: Path, *arguments: Any, **options: Any
    ) -> dict[str, Path]:
        """Call a method that returns arrays by name; leave them in files of a new directory."""
        _make_directory(directory)
        files: dict[str, Path] = self._send(
            directory, lambda file: file, method, *arguments, **options
        )
        return files

    def _call(self, method: str, *arguments: Any) -> Any:
        """Call a method of the child's `TorchRunner`, and return its result.

        Raises:
            InputError: PyTorch or transformers rejects the arguments; see the method.
            UntrustedModelError: the model attempted an operation that no model needs.
            EngineryError: arrays cannot be written.
        """
        return self._send(self._scratch, _take_array, method, *arguments)

    def _send(
        self,
        directory: Path,
        read: Callable[[Path], Any],
        method: str,
        *arguments: Any,
        **options: Any,
    ) -> Any:
        """Call a method; its arrays and those of the result pass through files in a directory."""
        request = save_arrays(arguments, directory / "arguments")
        answer = self._request(
            "call", method=method, arguments=request, options=options, directory=str(directory)
        )
        shutil.rmtree(directory / "arguments")
        self.notes = answer["notes"]
        return join_arrays(answer["result"], directory, read)

    def _request(self, does: str, **values: Any) -> WorkerResult:
        if self._worker is None:
            raise ExportError("the PyTorch reference is closed.")
        worker = self._worker
        try:
            return worker.request(does, limits=self._limits, **values)
        # The inputs were wrong, and the process is as before.
        except InputError:
            raise
        except BaseException as error:
            self._worker = None
            refused = does == "load" and isinstance(error, ExportError | ArtifactError)
            if refused and worker.is_alive:
                _keep_worker(worker, self._process)
            else:  # the process may be damaged: do not reuse it
                worker.close()
            raise


@dataclass(frozen=True)
class SideFileQuestion:
    """What is asked about the files beside a model's weights or an artifact's graphs."""

    limit: int
    """The length in tokens at which long texts are truncated; 0 for no tokenizer."""
    task: str = ""
    """The task that a model is loaded for; empty for files of an artifact."""
    keys: Sequence[str] = ()
    """Keys of tokenizer_config.json whose effect is asked for."""
    processor: bool = False
    """Compare the runtime's processor with transformers'."""


def describe_side_files(
    directory: Path, question: SideFileQuestion, *, process: TorchProcess = CONFINED
) -> dict[str, Any]:
    """Return what transformers reads from a directory; see `runtime/pytorch/side_files.py`.

    Args:
        directory: the directory of a model, or of files of an artifact.
        question: what is asked.
        process: how the process that answers is started.

    Raises:
        UntrustedModelError: the files require permissions that were not granted.
    """
    worker = _take_worker(process)
    try:
        described: dict[str, Any] = worker.request(
            "describe_side_files",
            limits=ResourceLimits.of_checkpoint(file_bytes=0),
            path=str(directory),
            question=asdict(question),
            trust_remote_code=process.trust_remote_code,
        )
    except BaseException:
        worker.close()
        raise
    _keep_worker(worker, process)
    return described


def save_outputs(outputs: Feeds, directory: Path) -> dict[str, Path]:
    """Write arrays to files in a new directory; return the files by name.

    Raises:
        EngineryError: an array cannot be written.
    """
    _make_directory(directory)
    files: dict[str, Path] = join_arrays(save_arrays(outputs, directory), directory, lambda f: f)
    return files


def save_arrays(value: Any, directory: Path) -> Any:
    """Return a value as JSON data, with the numbers of its arrays, which are written to files.

    Args:
        value: arrays, dataclasses and what JSON has.
        directory: where to write the arrays; it is made if it does not exist.

    Raises:
        EngineryError: an array cannot be written.
    """
    with _write_errors(directory):
        directory.mkdir(exist_ok=True)
        return _split_arrays(value, directory, count())


def _split_arrays(value: Any, directory: Path, numbers: count[int]) -> Any:
    if isinstance(value, np.ndarray | np.generic):
        number = next(numbers)
        np.save(_array_file(directory, number), value, allow_pickle=False)
        return {_ARRAY: number}
    if is_dataclass(value):
        value = vars(value)
    if isinstance(value, Mapping):
        return {name: _split_arrays(item, directory, numbers) for name, item in value.items()}
    if isinstance(value, list | tuple | frozenset):
        return [_split_arrays(item, directory, numbers) for item in value]
    return value


def join_arrays(value: Any, directory: Path, read: Callable[[Path], Any]) -> Any:
    """Return JSON data of `save_arrays` with what `read` returns for the file of each array."""
    if isinstance(value, list):
        return [join_arrays(item, directory, read) for item in value]
    if not isinstance(value, dict):
        return value
    if value.keys() == {_ARRAY}:
        return read(_array_file(directory, value[_ARRAY]))
    return {name: join_arrays(item, directory, read) for name, item in value.items()}


def _array_file(directory: Path, number: int) -> Path:
    # The number may come from a child that a model has taken over.
    return directory / f"{int(number)}.npy"


def load_array(file: Path) -> NDArray[Any]:
    """Return the array of a file."""
    array: NDArray[Any] = np.load(file, allow_pickle=False)
    return array


def _take_array(file: Path) -> NDArray[Any]:
    """Return the array of a file, which is removed."""
    array = load_array(file)
    file.unlink()
    return array


def _make_directory(directory: Path) -> None:
    with _write_errors(directory):
        directory.mkdir(parents=True)


def _write_errors(directory: Path) -> AbstractContextManager[None]:
    return os_errors_as(
        EngineryError,
        f"the reference's outputs cannot be written to {directory}",
        do="Set TMPDIR to a directory with more space, or validate smaller profiles.",
    )


_idle: list[tuple[WorkerProcess, TorchProcess]] = []
_idle_lock = threading.Lock()


def _take_worker(process: TorchProcess) -> WorkerProcess:
    """Return an idle process of this kind, or a new one."""
    with _idle_lock:
        for worker, kind in reversed(_idle.copy()):
            if kind == process:
                _idle.remove((worker, kind))
                if worker.is_alive:
                    return worker
                worker.close()
    return WorkerProcess(
        "enginery.runtime.pytorch.worker",
        description="PyTorch",
        error=ExportError,
        environment={"TOKENIZERS_PARALLELISM": "false"},
        python=process.python,
    )


def _keep_worker(worker: WorkerProcess, process: TorchProcess) -> None:
    """Keep a process for the next model, for `_IDLE_SECONDS`; end it if a model's code has run."""
    if process.trust_remote_code:
        worker.close()
        return
    with _idle_lock:
        _idle.append((worker, process))
    timer = threading.Timer(_IDLE_SECONDS, _end_worker, [worker])
    timer.daemon = True
    timer.start()


def _end_worker(worker: WorkerProcess) -> None:
    with _idle_lock:
        # Another model may have taken the process in the meantime.
        entry = next((entry for entry in _idle if entry[0] is worker), None)
        if entry is None:
            return
        _idle.remove(entry)
    worker.close()


@atexit.register
def _end_all_workers() -> None:
    for worker, _ in _idle.copy():
        _end_worker(worker)
