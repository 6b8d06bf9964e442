"""Run the PyTorch reference in a child process that is confined to loading and running its model.

    with TorchReference(source, artifact.manifest, precision="fp32") as reference:
        files = reference(feeds, scratch / "case-0")
    np.load(files["logits"])

Weights are read there, too, because unpickling them is left to the confined process:

    reference.weights(scratch).weights["encoder.layer.0.output.dense.bias"].shape

Outputs are returned as files, because those of a large profile take gigabytes. Importing PyTorch,
transformers and Optimum takes seconds, so a process is kept for a while for the next model.
"""

from __future__ import annotations

import atexit
import json
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, Literal

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.manifest import Manifest
from enginery.core.closing import Closeable
from enginery.core.errors import ArtifactError, EngineryError, ExportError, InputError
from enginery.core.model.source import ModelSource
from enginery.core.subprocess import WorkerProcess, WorkerResult, peak_rss_bytes, serve_requests
from enginery.core.trust.confinement import stay_offline
from enginery.core.trust.resource_limits import ResourceLimits

_IDLE_SECONDS = 30.0
_LARGE_BYTES = 2 << 30
"""Peak memory above which a process is not kept, because it may not return all of it."""

_ANSWERS = "answers.npz"

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
        self._worker: WorkerProcess | None = _take_worker(process)
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

    def __call__(
        self,
        feeds: Feeds,
        directory: Path,
        *,
        decode: Literal["", "start", "resume"] = "",
        random: Path | None = None,
    ) -> dict[str, Path]:
        """Run the model on the feeds of the graph.

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
        return self._run(
            "run", feeds, directory, decode=decode, random=str(random) if random else ""
        )

    def generate(
        self, feeds: Feeds, directory: Path, options: Mapping[str, Any]
    ) -> dict[str, Path]:
        """Run the model's own `generate` on one input; see `TorchRunner.generate`.

        Args:
            feeds: the inputs of a batch of one.
            directory: where to write the outputs; it must not exist.
            options: options in place of those of the model's files.

        Returns:
            An `.npy` file for each of `tokens`, `scores` and `score` that there is.

        Raises:
            InputError: PyTorch rejects the feeds or the options.
            UntrustedModelError: the model attempted an operation that no model needs.
            EngineryError: the outputs cannot be written to the directory.
        """
        return self._run("generate", feeds, directory, options=dict(options))

    def answers(
        self, kind: str, items: Sequence[Mapping[str, Any]], directory: Path
    ) -> list[dict[str, Any]]:
        """Answer raw inputs as transformers does; see `TorchAnswers`.

        Args:
            kind: the task's verb, or `tensors` for the model's outputs.
            items: the inputs; arrays among their values pass through a file.
            directory: where to write the arrays of the answers; it must not exist.

        Returns:
            The fields of a `RawAnswer` for each input, with its `arrays` read.

        Raises:
            InputError: transformers cannot load the tokenizer or a processor, or nothing answers
                such inputs.
            UntrustedModelError: the model attempted an operation that no model needs.
            EngineryError: the arrays cannot be written.
        """
        plain = [
            {name: value for name, value in item.items() if not isinstance(value, np.ndarray)}
            for item in items
        ]
        arrays = {
            f"{index}:{name}": value
            for index, item in enumerate(items)
            for name, value in item.items()
            if isinstance(value, np.ndarray)
        }
        file = self._write_feeds(directory, arrays)
        answer = self._request(
            "answers", kind=kind, items=plain, feeds=str(file), directory=str(directory)
        )
        file.unlink()
        results: list[dict[str, Any]] = answer["answers"]
        with np.load(directory / _ANSWERS, allow_pickle=False) as stored:
            for index, result in enumerate(results):
                result["arrays"] = {name: stored[f"{index}:{name}"] for name in result.pop("names")}
        return results

    def prepare(self, item: Mapping[str, Any], directory: Path) -> dict[str, NDArray[Any]]:
        """Return what the model's own tokenizer or processor makes of a raw input, by name.

        Raises:
            InputError: transformers cannot load it, or it rejects the input.
            UntrustedModelError: the model attempted an operation that no model needs.
            EngineryError: the arrays cannot be written.
        """
        arrays = {name: value for name, value in item.items() if isinstance(value, np.ndarray)}
        plain = {name: value for name, value in item.items() if name not in arrays}
        files = self._run("prepare", arrays, directory, item=plain)
        return {name: np.load(file, allow_pickle=False) for name, file in files.items()}

    def tokenize(self, texts: Sequence[str]) -> list[list[int]]:
        """Return the tokens of texts by the model's own tokenizer in transformers.

        Raises:
            InputError: transformers cannot load the tokenizer, or it cannot encode a text.
            UntrustedModelError: the tokenizer attempted an operation that none needs.
        """
        ids: list[list[int]] = self._request("tokenize", texts=list(texts))["ids"]
        return ids

    def decode_tokens(self, tokens: Sequence[Sequence[int]]) -> list[str]:
        """Return the texts of tokens by the model's own tokenizer, without special tokens.

        Raises:
            InputError: transformers cannot load the tokenizer, or it cannot decode a token.
            UntrustedModelError: the tokenizer attempted an operation that none needs.
        """
        texts: list[str] = self._request("decode_tokens", tokens=[list(t) for t in tokens])["texts"]
        return texts

    def generation_config(self) -> dict[str, Any]:
        """Return the options that the model's `generate` has without any arguments.

        Raises:
            InputError: the model's class does not generate.
        """
        options: dict[str, Any] = self._request("generation_config")["options"]
        return options

    def weights(self, directory: Path) -> TorchWeights:
        """Describe every parameter and buffer; samples pass through a file in `directory`.

        Raises:
            EngineryError: the file cannot be written.
        """
        file = directory / "samples.npz"
        answer = self._request("list_weights", file=str(file))
        with np.load(file, allow_pickle=False) as stored:
            samples = [stored[str(index)] for index in range(len(answer["weights"]))]
        file.unlink()
        weights = {
            name: TorchWeight(name, tuple(shape), sample)
            for (name, shape), sample in zip(answer["weights"], samples, strict=True)
        }
        return TorchWeights(
            weights,
            frozenset(answer["linear"]),
            answer["batch_norms"],
            stored=frozenset(answer["stored"]),
            unused=answer["unused"],
            lost=tuple(answer["lost"]),
        )

    def weight(self, name: str, directory: Path) -> NDArray[Any]:
        """Return all elements of a weight, through a file in `directory`.

        Raises:
            EngineryError: the file cannot be written.
        """
        file = directory / "weight.npy"
        self._request("write_weight", name=name, file=str(file))
        array: NDArray[Any] = np.load(file, allow_pickle=False)
        file.unlink()
        return array

    def close(self) -> None:
        """Free the model; keep the process for the next one, or end it."""
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

    def _run(self, does: str, feeds: Feeds, directory: Path, **values: Any) -> dict[str, Path]:
        """Send feeds through a file, and return the files of the outputs."""
        file = self._write_feeds(directory, feeds)
        answer = self._request(does, feeds=str(file), directory=str(directory), **values)
        file.unlink()
        self.notes = answer["notes"]
        return {name: directory / file for name, file in answer["files"].items()}

    def _write_feeds(self, directory: Path, feeds: Feeds) -> Path:
        """Write arrays to a file in a new directory."""
        file = directory / "feeds.npz"
        try:
            directory.mkdir(parents=True)
            with file.open("wb") as stream:
                np.savez(stream, allow_pickle=False, **feeds)
        except OSError as error:
            raise _write_error(directory, error) from error
        return file

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
    directory: Path,
    file: Path,
    question: SideFileQuestion,
    *,
    process: TorchProcess = CONFINED,
) -> dict[str, Any]:
    """Return what transformers reads from a directory; see `runtime/pytorch/side_files.py`.

    Args:
        directory: the directory of a model, or of files of an artifact.
        file: a file to pass the answer through, which may take megabytes.
        question: what is asked.
        process: how the process that answers is started.

    Raises:
        UntrustedModelError: the files require permissions that were not granted.
        EngineryError: the file cannot be written.
    """
    worker = _take_worker(process)
    try:
        worker.request(
            "describe_side_files",
            limits=ResourceLimits.of_checkpoint(file_bytes=0),
            path=str(directory),
            file=str(file),
            limit=question.limit,
            task=question.task,
            keys=list(question.keys),
            processor=question.processor,
            trust_remote_code=process.trust_remote_code,
        )
    except BaseException:
        worker.close()
        raise
    _keep_worker(worker, process)
    described: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
    file.unlink()
    return described


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
        "enginery.runtime.pytorch.reference",
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


def _write_error(directory: Path, error: OSError) -> EngineryError:
    return EngineryError(
        f"PyTorch's outputs cannot be written to {directory}: {error.strerror or error}.",
        do="Set TMPDIR to a directory with more space, or validate smaller profiles.",
    )


class _Child:
    """The child process's side, which holds one model at a time."""

    def __init__(self) -> None:
        self._held = ExitStack()
        self._runner: Any = None
        self._confinement: Any = None
        self._weights: dict[str, NDArray[Any]] = {}

    def answer(self, request: WorkerResult) -> WorkerResult:
        does = {
            "load": self.load,
            "run": self.run,
            "generate": self.run,
            "answers": self.answers,
            "prepare": self.run,
            "tokenize": self.tokenize,
            "decode_tokens": self.decode_tokens,
            "generation_config": self.generation_config,
            "list_weights": self.list_weights,
            "write_weight": self.write_weight,
            "describe_side_files": self.describe_side_files,
            "unload": self.unload,
        }
        return does[request["do"]](request)

    def load(self, request: WorkerResult) -> WorkerResult:
        if not request["trust_remote_code"]:
            stay_offline()
        from enginery.runtime.pytorch.runner import TorchOptions, TorchRunner, guarded

        manifest = Manifest.model_validate(request["manifest"])
        path, trust = Path(request["path"]), request["trust_remote_code"]
        vocoder = Path(request["vocoder"]) if request["vocoder"] else None
        read = [path, vocoder] if vocoder else [path]
        with ExitStack() as stack:
            self._confinement = stack.enter_context(guarded(*read, trust_remote_code=trust))
            self._runner = stack.enter_context(
                TorchRunner(
                    ModelSource(path, manifest.source, pickled=request["pickled"]),
                    manifest,
                    TorchOptions(precision=request["precision"], trust_remote_code=trust),
                    graph=request["graph"],
                    vocoder=vocoder,
                )
            )
            self._require_harmless()
            # Only a model that is loaded stays open; any error above closes what was opened.
            self._held = stack.pop_all()
        return {"notes": self._runner.notes}

    def run(self, request: WorkerResult) -> WorkerResult:
        with np.load(request["feeds"], allow_pickle=False) as stored:
            feeds = {name: stored[name] for name in stored.files}
        if request["do"] == "generate":
            outputs = self._runner.generate(feeds, request["options"])
        elif request["do"] == "prepare":
            outputs = self._runner.prepare({**request["item"], **feeds})
        elif request["decode"]:
            outputs = self._runner.decode(feeds, resume=request["decode"] == "resume")
        elif request["random"]:
            outputs = self._run_random(feeds, Path(request["random"]))
        else:
            outputs = self._runner(feeds)
        self._require_harmless()
        files = {}
        try:
            for index, (name, array) in enumerate(outputs.items()):
                files[name] = f"{index}.npy"
                np.save(Path(request["directory"], files[name]), array, allow_pickle=False)
        except OSError as error:
            raise _write_error(Path(request["directory"]), error) from error
        return {"files": files, "notes": self._runner.notes}

    def _run_random(self, feeds: Feeds, file: Path) -> dict[str, NDArray[Any]]:
        """Run the model; write the random numbers that it draws, or give it those of the file."""
        from enginery.runtime.pytorch.random import RandomNumbers

        if file.exists():
            with np.load(file, allow_pickle=False) as stored:
                given = {name: stored[name] for name in stored.files}
            outputs: dict[str, NDArray[Any]] = self._runner(feeds, RandomNumbers(given))
            return outputs
        numbers = RandomNumbers()
        outputs = self._runner(feeds, numbers)
        arrays = numbers.arrays
        self._write(str(file), lambda stream: np.savez(stream, allow_pickle=False, **arrays))
        return outputs

    def answers(self, request: WorkerResult) -> WorkerResult:
        items: list[dict[str, Any]] = request["items"]
        with np.load(request["feeds"], allow_pickle=False) as stored:
            for key in stored.files:
                index, _, name = key.partition(":")
                items[int(index)][name] = stored[key]
        answers = self._runner.answers(request["kind"], items)
        self._require_harmless()
        arrays = {
            f"{index}:{name}": array
            for index, answer in enumerate(answers)
            for name, array in answer.arrays.items()
        }
        file = str(Path(request["directory"], _ANSWERS))
        self._write(file, lambda stream: np.savez(stream, allow_pickle=False, **arrays))
        return {"answers": [{**vars(a), "arrays": None, "names": list(a.arrays)} for a in answers]}

    def tokenize(self, request: WorkerResult) -> WorkerResult:
        ids = self._runner.tokenize(request["texts"])
        self._require_harmless()
        return {"ids": ids}

    def decode_tokens(self, request: WorkerResult) -> WorkerResult:
        texts = self._runner.decode_tokens(request["tokens"])
        self._require_harmless()
        return {"texts": texts}

    def generation_config(self, request: WorkerResult) -> WorkerResult:  # noqa: ARG002
        return {"options": self._runner.generation_config()}

    def list_weights(self, request: WorkerResult) -> WorkerResult:
        self._weights = self._runner.weights()
        self._require_harmless()
        samples = {
            str(index): array[sample_positions(array.shape)]
            for index, array in enumerate(self._weights.values())
        }
        self._write(request["file"], lambda stream: np.savez(stream, allow_pickle=False, **samples))
        return {
            "weights": [(name, array.shape) for name, array in self._weights.items()],
            **self._runner.checkpoint(),
            "linear": self._runner.linear_modules(),
            "batch_norms": self._runner.batch_norms(),
        }

    def write_weight(self, request: WorkerResult) -> WorkerResult:
        array = self._weights[request["name"]]
        self._write(request["file"], lambda stream: np.save(stream, array, allow_pickle=False))
        return {"file": request["file"]}

    def describe_side_files(self, request: WorkerResult) -> WorkerResult:
        trust = request["trust_remote_code"]
        if not trust:
            stay_offline()
        from enginery.runtime.pytorch.runner import guarded
        from enginery.runtime.pytorch.side_files import describe_side_files

        path = Path(request["path"])
        with guarded(path, trust_remote_code=trust) as confinement:
            described = describe_side_files(
                path,
                limit=request["limit"],
                task=request["task"],
                keys=request["keys"],
                processor=request["processor"],
                trust_remote_code=trust,
            )
            if confinement is not None and confinement.blocked:
                raise confinement.error()
        text = json.dumps(described).encode()
        self._write(request["file"], lambda stream: stream.write(text))
        return {"file": request["file"]}

    def unload(self, request: WorkerResult) -> WorkerResult:  # noqa: ARG002
        self._runner = self._confinement = None
        self._weights = {}
        self._held.close()
        return {"peak_rss_bytes": peak_rss_bytes()}

    def _write(self, file: str, write: Callable[[BinaryIO], object]) -> None:
        try:
            with Path(file).open("wb") as stream:
                write(stream)
        except OSError as error:
            raise _write_error(Path(file).parent, error) from error

    def _require_harmless(self) -> None:
        """Raise UntrustedModelError for a blocked operation even if the model caught the error."""
        if self._confinement is not None and self._confinement.blocked:
            raise self._confinement.error()


if __name__ == "__main__":
    serve_requests(_Child().answer)
