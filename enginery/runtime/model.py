"""Load an artifact for inference: texts, images or audio in, results out.

    with load_model("minilm") as model:
        model.embed(["The engine is warm."]).shape    # (1, 384)

Needs only onnxruntime, tokenizers, numpy and Pillow, and for audio files the extra `audio`; no
torch or transformers.
"""

from __future__ import annotations

import inspect
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, cast

import numpy as np

from enginery.core.artifact.artifact import Artifact
from enginery.core.closing import Closeable
from enginery.core.errors import InputError
from enginery.core.extras import missing_packages_as_errors
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.providers.availability import ONNXRUNTIME, require_onnxruntime
from enginery.runtime.providers.known import CUDA
from enginery.runtime.providers.selection import Provider
from enginery.runtime.providers.specification import Providers, parse_providers
from enginery.runtime.tasks import TASKS, require_task
from enginery.runtime.tasks.batch_runner import BatchRunner
from enginery.runtime.tasks.generate import Generate, Generation
from enginery.runtime.tasks.row_stream import (
    PREPARED_BATCHES,
    SWITCH_INTERVAL,
    RowStream,
    Window,
    read_ahead,
    run_here,
)
from enginery.runtime.tasks.task import MediaTask, ModelInputs, Row, RowValues, Task, TaskOptions
from enginery.runtime.tasks.text_generator import TextGenerator, open_rows
from enginery.runtime.text.batching import GPU_MAX_ROWS, GPU_MAX_TOKENS

_FIRST_WINDOW, _WINDOW = 512, 4096
"""Number of inputs that are tokenized together on a GPU, at first and later."""
_WINDOW_CHARACTERS = 1 << 22
"""Characters of a window: an encoding takes much more memory than its text."""


class Model(Closeable):
    """A model loaded for inference. A context manager; closing it frees the session.

    It has the method of its task: `embed`, `classify`, `tag`, `answer`, `fill`, `classify_images`,
    `embed_images`, `classify_audio`, `transcribe` or `generate`, with the task's options as keyword
    arguments (`help(model.embed)` lists them). The method takes a list of inputs and returns the
    results in the same order. Texts and audio that are longer than the model takes are truncated,
    and counted in `truncated`; generation has its own limits.
    """

    def __init__(self, artifact: Artifact, rows: BatchRunner | TextGenerator) -> None:
        """Take the artifact, and what runs the rows of its task, which is closed with this."""
        self.artifact = artifact
        self.task = artifact.manifest.task
        self._rows = rows
        self._runner = runner = rows.runner
        self.definition = cast("Task", rows.task)
        """The task, which preprocesses inputs and postprocesses outputs."""
        self.method = self.definition.verb
        """Name of the task's method."""
        self.truncated = 0
        """Number of inputs truncated so far."""
        self._on_gpu = runner.device.kind != "cpu"
        self._lock = threading.Lock()

    @property
    def notes(self) -> tuple[str, ...]:
        """Choices made for this model, with their reasons."""
        return self.definition.notes

    @property
    def providers(self) -> list[Provider]:
        return self._runner.providers

    def __call__(self, inputs: Sequence[Any], **options: Any) -> Any:
        """Run the model's task on inputs.

        Args:
            inputs: texts or pairs of texts; images as paths, file contents, Pillow images or uint8
                arrays (height, width, channels); audio as paths, file contents, or pairs (samples,
                sampling rate in Hz); (question, context) pairs for question answering.
            options: options of the task.

        Returns:
            float32 (len(inputs), dim) for embeddings, else a list with one result per input.

        Raises:
            InputError: an input or an option is invalid; the message has the input's index.
        """
        task, batches = self.definition, self._rows
        if isinstance(batches, TextGenerator):
            return self.generate(inputs, **options)
        read = task.Options.read(options)
        if isinstance(task, MediaTask):  # rows are large: do not hold all of them in memory
            outputs = batches.run_stream(map(self._count, task.read_rows(inputs)))
            return task.collect(task.postprocess(ModelInputs([]), outputs, read))
        if self._on_gpu and isinstance(inputs, list | tuple) and len(inputs) > _FIRST_WINDOW:
            return task.collect(self._run_windows(batches, inputs, read))
        work = task.preprocess(inputs, read)
        outputs = batches.run_all([self._count(row) for row in work.rows])
        return task.collect(task.postprocess(work, outputs, read))

    def generate(
        self, inputs: Sequence[Any], *, batch_size: int = 8, **options: Any
    ) -> list[Generation]:
        """Generate a text for each input: continue, translate, summarize, read or transcribe it.

        Args:
            inputs: texts; for image-to-text, images as paths, file contents, Pillow images or uint8
                arrays (height, width, channels); for speech, sounds as paths, file contents or
                pairs (samples, sampling_rate).
            batch_size: largest number of inputs that run together; results do not depend on it.
            options: `max_new_tokens`, `num_beams` and others, see `GenerationOptions`; those that
                are not given are the model's own. Of translation models also `source_language` and
                `target_language`, of speech `language` and `task`, of images `prompt`: the
                beginning of each text, which is no part of the result.

        Returns:
            `num_return_sequences` results for each input, in order.

        Raises:
            InputError: an input is empty, too long or malformed, or an option is invalid.
        """
        task, generator = self._generator("generate")
        if batch_size < 1:
            raise InputError(f"batch_size is {batch_size}, expected 1 or more.")
        rows = task.read_rows(inputs, task.Options.read(options))
        return task.collect(generator.run_stream(rows, batch_rows=batch_size))

    def stream(self, text: Any, **options: Any) -> Iterator[str]:
        """Generate the text of one input, piece by piece; together they are that of `generate`.

        A piece ends between characters, and what may be the beginning of a stop string is held
        back.

        Args:
            text: the input, see `generate`.
            options: see `generate`; with beam search the whole text is one piece.

        Raises:
            InputError: the input is invalid, or an option is.
        """
        task, generator = self._generator("stream")
        (row,) = task.preprocess([text], task.Options.read(options)).rows
        return generator.stream(row)

    def _generator(self, method: str) -> tuple[Generate, TextGenerator]:
        """Return the task and what generates; raise InputError if the task is another one."""
        if not isinstance(self._rows, TextGenerator):
            self._refuse(method)
        return self._rows.task, self._rows

    def __getattr__(self, name: str) -> Callable[..., Any]:
        if name == self.__dict__.get("method"):
            return _documented(self)
        if name in TASKS and "method" in self.__dict__:
            return partial(self._refuse, name)
        verb = self.__dict__.get("method")
        hint = "" if verb is None or name.startswith("_") else f"; call {verb}()"
        raise AttributeError(f"a {type(self).__name__} has no attribute '{name}'{hint}")

    def __dir__(self) -> list[str]:
        return [*super().__dir__(), self.method]

    def warm_up(self) -> None:
        """Run every engine once at its optimal shape, and every rung of the ladder.

        On CUDA this takes some seconds, and records the CUDA graphs of the current thread, so that
        no later call does. `load_model` runs the engines, and leaves the rungs to their first use.

        Raises:
            ProviderError: an engine fails at its own optimal shape.
            InputError: the graph fails.
        """
        self._runner.warm_up()
        self._rows.record_rungs(longest=self.definition.max_tokens)

    def close(self) -> None:
        """Free the sessions."""
        self._rows.close()

    def _run_windows(
        self, batches: BatchRunner, inputs: Sequence[Any], options: TaskOptions
    ) -> RowValues:
        """Return the results of many inputs: batches run while other inputs are tokenized.

        Batches run in this thread, because CUDA graphs are replayed by the thread that recorded
        them.
        """
        task = self.definition
        plan = batches.plan
        if not self._runner.profiles:  # an engine has limits of its own
            plan = partial(plan, max_rows=GPU_MAX_ROWS, max_tokens=GPU_MAX_TOKENS)
        preprocess = partial(task.preprocess, options=options)
        stream = RowStream(batches, preprocess, plan, run_here, concurrent=0)
        prepared = read_ahead(
            stream.prepare(_windows(task, inputs)), ahead=PREPARED_BATCHES, name="enginery-prepare"
        )
        results: list[RowValues] = []
        finishing: deque[Future[RowValues]] = deque()
        with (
            SWITCH_INTERVAL.lowered(),
            closing(prepared),
            ThreadPoolExecutor(1, "enginery-finish") as finisher,
        ):
            for window in stream.run(prepared):
                if window.error is not None:
                    if not window.work.rows:
                        task.preprocess(inputs, options)  # raises it with the index among all
                    raise window.error
                for row in window.work.rows:
                    self._count(row)
                finishing.append(
                    finisher.submit(task.postprocess, window.work, window.outputs(), options)
                )
                if len(finishing) > 1:  # outputs may be large
                    results.append(finishing.popleft().result())
            results += [future.result() for future in finishing]
        if all(isinstance(part, np.ndarray) for part in results):
            return np.concatenate(results)
        return [result for part in results for result in part]

    def _count(self, row: Row) -> Row:
        """Count a row if its input was truncated."""
        if row.truncated:
            with self._lock:
                self.truncated += 1
        return row

    def _refuse(self, verb: str, *_: Any, **__: Any) -> NoReturn:
        raise InputError(
            f"{verb}() was called, but {self.artifact.name} was exported for {self.task}.",
            do=f"Call {self.method}(), or export the model for another --task.",
        )


def _windows(task: Task, inputs: Sequence[Any]) -> Generator[Window[None]]:
    """Yield windows of the inputs. The first ones are small, so that the model soon has work."""
    first, size = 0, _FIRST_WINDOW
    while first < len(inputs):
        items = inputs[first : first + size]
        while len(items) > 1 and task.characters(items) > _WINDOW_CHARACTERS:
            items = items[: len(items) // 2]
        yield Window(items, None)
        first += len(items)
        size = min(2 * size, _WINDOW)


def _documented(model: Model) -> Callable[..., Any]:
    """Build the method of a model's task, with the task's options in its signature."""
    fields = model.definition.Options.model_fields

    def method(inputs: Sequence[Any], **options: Any) -> Any:
        return model(inputs, **options)

    method.__name__ = model.method
    method.__doc__ = model.definition.__doc__
    method.__signature__ = inspect.Signature(  # type: ignore[attr-defined]
        [
            inspect.Parameter("inputs", inspect.Parameter.POSITIONAL_OR_KEYWORD),
            *(
                inspect.Parameter(
                    name,
                    inspect.Parameter.KEYWORD_ONLY,
                    default=field.default,
                    annotation=field.annotation,
                )
                for name, field in fields.items()
            ),
        ]
    )
    return method


@missing_packages_as_errors("Loading a model")
def load_model(
    artifact: str | Path | Artifact,
    *,
    providers: Providers = "",
    provider_options: Sequence[str] = (),
    allow_fallback: bool = False,
    allow_failed: bool = False,
    allow_build: bool = False,
    threads: int = 0,
    io_binding: bool = True,
    cuda_graph: bool = False,
    ladder: bool = True,
    shrink_arena: bool = False,
) -> Model:
    """Load an artifact for inference; under TensorRT, load its engines and run each once.

    Args:
        artifact: the artifact or its directory.
        providers: names in order of preference, such as `tensorrt,cuda,cpu` or a list; empty for
            `ENGINERY_PROVIDERS` or, if that is not set, the CPU.
        provider_options: options of the providers, such as `cuda.gpu_mem_limit=2GiB`.
        allow_fallback: use the next provider if the first is unavailable.
        allow_failed: load an artifact whose validation failed.
        allow_build: if no engine of the artifact is compatible with this GPU, let TensorRT build
            one while loading. This takes minutes, and the engine is not stored.
        threads: number of intra-op threads; 0 for ONNX Runtime's default.
        io_binding: on NVIDIA's providers, keep inputs and outputs in buffers on the GPU.
        cuda_graph: capture the run of each shape as a CUDA graph and replay it.
        ladder: on CUDA, round batches and lengths up to a few sizes, and record a CUDA graph for
            each when it first runs. The answers are those of the inputs alone; new sizes of inputs
            are as fast as others.
        shrink_arena: after each run, free the memory that it took beyond the arena's initial chunk.

    Raises:
        ArtifactError: the directory is not an artifact, its task is not supported, or a file that
            the task needs is missing or malformed.
        RejectedArtifactError: the artifact's validation failed.
        MissingPackageError: ONNX Runtime, or a package that the task needs, is not installed.
        ProviderError: the provider is unavailable, does not support CUDA graphs, or cannot run any
            engine of the artifact on this GPU.
        OptionError: a provider's option is invalid, or run options exclude each other.
    """
    opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
    opened.require_passed(allow_failed=allow_failed)
    definition = require_task(opened.manifest)
    in_steps = definition.runs_in_steps
    packages = (ONNXRUNTIME, "onnx") if in_steps else (ONNXRUNTIME,)
    require_onnxruntime("Loading a model", *packages, extra="generate")
    specs = parse_providers(providers, provider_options, default="cpu")

    def open_graph(file: str = "") -> OrtRunner:
        return OrtRunner(
            opened,
            graph=file,
            providers=specs,
            allow_fallback=allow_fallback,
            allow_build=allow_build,
            threads=threads,
            io_binding=io_binding,
            cuda_graph=cuda_graph,
            # A decoder with a fixed cache rounds its sizes up itself.
            ladder=ladder and not in_steps,
            shrink_arena=shrink_arena,
        )

    task = definition.open(opened, opened.manifest.graphs[0])
    rows = open_rows(task, open_graph, on_cuda=specs[0].full_name == CUDA)
    try:
        rows.runner.warm_up()
        return Model(opened, rows)
    except BaseException:
        rows.close()
        raise
