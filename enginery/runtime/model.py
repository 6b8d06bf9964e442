"""Load an artifact for inference: texts, images or audio in, results out.

    with load_model("minilm") as model:
        model.embed(["The engine is warm."]).shape    # (1, 384)

Needs only onnxruntime, tokenizers, numpy and Pillow, and for audio files the extra `audio`; no
torch or transformers.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from functools import partial
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias, Unpack, cast, get_args, overload

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact.artifact import Artifact
from enginery.core.closing import Closeable
from enginery.core.errors import InputError, OptionError
from enginery.core.extras import missing_packages_as_errors
from enginery.runtime.onnxruntime.runner import OrtRunner, RunnerOptions
from enginery.runtime.providers.availability import ONNXRUNTIME, require_onnxruntime
from enginery.runtime.providers.known import CUDA
from enginery.runtime.providers.selection import Provider
from enginery.runtime.providers.specification import Providers, parse_providers
from enginery.runtime.tasks import manifest_tasks, require_task
from enginery.runtime.tasks.answer import ContextAnswer
from enginery.runtime.tasks.audio import Transcription
from enginery.runtime.tasks.batch_runner import BatchRunner
from enginery.runtime.tasks.classify import Classification
from enginery.runtime.tasks.detect import Detection
from enginery.runtime.tasks.fill import MaskFillings
from enginery.runtime.tasks.generate import GenerateOptions, Generation, TextSearch
from enginery.runtime.tasks.row_stream import (
    PREPARED_BATCHES,
    SWITCH_INTERVAL,
    RowStream,
    Window,
    run_here,
)
from enginery.runtime.tasks.segment import Segment
from enginery.runtime.tasks.tag import TokenSpan
from enginery.runtime.tasks.task import (
    InputLimits,
    MediaTask,
    ModelInputs,
    Row,
    RowValues,
    Task,
    TaskOptions,
    Unproved,
    count_characters,
)
from enginery.runtime.tasks.text_generator import TextGenerator, open_rows
from enginery.runtime.tasks.views import SparseVector, task_views
from enginery.runtime.tasks.zero_shot import split_labels
from enginery.runtime.text.batching import GPU_MAX_ROWS, GPU_MAX_TOKENS
from enginery.runtime.text.chat_template import Message
from enginery.runtime.text.vector_dtypes import VectorDtype

if TYPE_CHECKING:
    from PIL.Image import Image

    from enginery.keywords import (
        AnswerKeywords,
        ClassifyKeywords,
        DetectKeywords,
        EmbedKeywords,
        FillKeywords,
        GenerationKeywords,
        LabelKeywords,
        PromptKeywords,
        SegmentKeywords,
        SparseKeywords,
        TagKeywords,
        TranscribeKeywords,
        VectorKeywords,
        ZeroShotImageKeywords,
    )

ImageInput: TypeAlias = "str | Path | bytes | Image | NDArray[np.uint8]"
"""A path, the content of a file, a Pillow image, or an array (height, width, channels)."""
AudioInput: TypeAlias = "str | Path | bytes | tuple[NDArray[Any], int] | Mapping[str, Any]"
"""A path, the content of a file, samples with their sampling rate in Hz, or a mapping with the keys
`array` and `sampling_rate`. Samples are (samples,) or (samples, channels)."""

_FIRST_WINDOW, _WINDOW = 512, 4096
"""Number of inputs that are tokenized together on a GPU, at first and later."""
_WINDOW_CHARACTERS = 1 << 22
"""Characters of a window: an encoding takes much more memory than its text."""


class Model(Closeable):
    """A model loaded for inference. A context manager; closing it frees the session.

    Call the method of its task: `embed`, `classify`, `tag`, `answer`, `fill`, `classify_images`,
    `embed_images`, `zero_shot_images`, `detect`, `segment`, `classify_audio`, `transcribe`, or
    `generate` and `stream`; a model that embeds has `embed_tokens` as well, and one that fills
    masks `embed_sparse`. The methods of other tasks raise InputError. A method takes a list of
    inputs, images and audio as `ImageInput` and `AudioInput`, and returns the results in the same
    order. Texts and audio that are longer than the model takes are truncated, and counted in
    `truncated`; texts beyond the `length_limit` of the artifact raise InputError.

    Every method raises InputError for an invalid input, with its index, and for an option's value
    that is out of range.
    """

    def __init__(
        self,
        artifact: Artifact,
        rows: BatchRunner | TextGenerator,
        others: Sequence[BatchRunner] = (),
    ) -> None:
        """Take the artifact, and what runs the rows of its task, which is closed with this.

        Args:
            artifact: the artifact.
            rows: runs the rows of the artifact's task.
            others: run the rows of further tasks with the same session.
        """
        self.artifact = artifact
        self.task = artifact.manifest.task
        self._rows = rows
        self._runner = runner = rows.runner
        self.definition = cast("Task", rows.task)
        """The task, which preprocesses inputs and postprocesses outputs."""
        self._others = {cast("Task", other.task).verb: other for other in others}
        self._views = task_views(self.definition, artifact)
        self.method = self.definition.verb
        """Name of the task's method."""
        self.truncated = 0
        """Number of inputs truncated so far."""
        self._on_gpu = runner.device.kind != "cpu"
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        providers = ", ".join(provider.name for provider in self.providers)
        return f"<Model {self.artifact.path}: {self.definition.purpose}, on {providers}>"

    @property
    def notes(self) -> tuple[str, ...]:
        """Choices made for this model, with their reasons."""
        others = (cast("Task", other.task).notes for other in self._others.values())
        return tuple(dict.fromkeys((*self.definition.notes, *chain.from_iterable(others))))

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
        if isinstance(self._rows, TextGenerator):
            return self.generate(inputs, **{"num_return_sequences": 1, **options})
        return self._run_rows(self._rows, self.definition, inputs, options)

    def _run_rows(
        self, batches: BatchRunner, task: Task, inputs: Sequence[Any], options: Mapping[str, Any]
    ) -> Any:
        read = task.Options.read(options)
        if isinstance(task, MediaTask):  # rows are large: do not hold all of them in memory
            media = ModelInputs([])
            rows = map(self._count, task.read_rows(inputs, read, media))
            return batches.answer_stream(rows, read, media)
        if self._on_gpu and isinstance(inputs, list | tuple) and len(inputs) > _FIRST_WINDOW:
            return self._run_windows(batches, task, inputs, read)
        work = task.preprocess(inputs, read)
        outputs = batches.run_all([self._count(row) for row in work.rows])
        return task.postprocess(work, outputs, read)

    @overload
    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        dtype: Literal["float32"] = "float32",
        **options: Unpack[EmbedKeywords],
    ) -> NDArray[np.float32]: ...

    @overload
    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        dtype: VectorDtype,
        **options: Unpack[EmbedKeywords],
    ) -> NDArray[Any]: ...

    def embed(
        self,
        texts: Sequence[str | Sequence[int]],
        *,
        dtype: VectorDtype = "float32",
        **options: Unpack[EmbedKeywords],
    ) -> NDArray[Any]:
        """Embed texts; pool and normalize as the model's sentence-transformers modules specify.

        Args:
            texts: texts, or lists of token ids, which get no prompt.
            dtype: type of the numbers, see `EmbedOptions`.
            options: the others of `EmbedOptions`.

        Returns:
            (len(texts), dim), or (len(texts), dimensions); of bits an eighth of that.
        """
        vectors: NDArray[Any] = self._run_task("embed", texts, {"dtype": dtype, **options})
        return vectors

    def embed_tokens(
        self, texts: Sequence[str | Sequence[int]], **options: Unpack[PromptKeywords]
    ) -> list[NDArray[np.float32]]:
        """Embed each token of texts: the model's token vectors, as they are before the pooling.

        Args:
            texts: see `embed`.
            options: see `PromptOptions`.

        Returns:
            float32 (tokens, dim) for each text; its special tokens and its prompt count.

        Raises:
            InputError: the graph pools by itself, and has no output of token vectors.
        """
        vectors: list[NDArray[np.float32]] = self._run_task("embed_tokens", texts, options)
        return vectors

    def embed_sparse(
        self, texts: Sequence[str | Sequence[int]], **options: Unpack[SparseKeywords]
    ) -> list[SparseVector]:
        """Embed texts as sparse vectors over the vocabulary, with a SPLADE model.

        That is a model for fill-mask, whose logits become weights as in sentence-transformers'
        SparseEncoder.

        Args:
            texts: see `embed`.
            options: see `SparseOptions`.

        Returns:
            The indices and values of the weights above 0 of each text.
        """
        vectors: list[SparseVector] = self._run_task("embed_sparse", texts, options)
        return vectors

    def classify(
        self, texts: Sequence[str | tuple[str, str]], **options: Unpack[ClassifyKeywords]
    ) -> list[Classification]:
        """Classify texts, or pairs of texts for models that compare two.

        Args:
            texts: texts or pairs; (query, document) for a reranker.
            options: see `ClassifyOptions`.
        """
        classifications: list[Classification] = self._run_task("classify", texts, options)
        return classifications

    def zero_shot(
        self, texts: Sequence[str], labels: Sequence[str], **options: Unpack[ClassifyKeywords]
    ) -> list[Classification]:
        """Choose among labels that the model was not trained on.

        The model is one of natural language inference (MNLI). The scores are those of transformers'
        zero-shot pipeline.

        Args:
            texts: the texts.
            labels: the labels, at most 100, or a text with commas between them; each text runs
                once for each.
            options: see `ClassifyOptions`, without `candidate_labels`, which are the labels.

        Raises:
            InputError: no label of the model is one of entailment, or a label is empty.
        """
        if not labels:
            raise InputError("no label is given to choose from.")
        # A dict display would let these labels replace others in the options.
        classifications: list[Classification] = self._run_task(
            "classify", texts, dict(**options, candidate_labels=split_labels(labels))
        )
        return classifications

    def zero_shot_images(
        self,
        images: Sequence[ImageInput],
        labels: Sequence[str],
        **options: Unpack[ZeroShotImageKeywords],
    ) -> list[Classification]:
        """Choose among labels for images, with a model such as CLIP or SigLIP.

        The scores are those of transformers' zero-shot-image-classification pipeline: they sum to 1
        for each image, or of SigLIP are of each label by itself.

        Args:
            images: the images.
            labels: the labels, at most 100, or a text with commas between them.
            options: see `ZeroShotImageOptions`, without `candidate_labels`.

        Raises:
            InputError: there is no label, or one is empty or too long.
        """
        classifications: list[Classification] = self._run_task(
            "zero_shot_images",
            images,
            dict(**options, candidate_labels=split_labels(labels) or None),
        )
        return classifications

    def tag(self, texts: Sequence[str], **options: Unpack[TagKeywords]) -> list[list[TokenSpan]]:
        """Find labelled spans of texts, such as names or parts of speech.

        Args:
            texts: texts.
            options: see `TagOptions`.

        Returns:
            The spans of each text in their order, with offsets in characters.
        """
        spans: list[list[TokenSpan]] = self._run_task("tag", texts, options)
        return spans

    def answer(
        self,
        questions: Sequence[tuple[str, str] | Mapping[str, str]],
        **options: Unpack[AnswerKeywords],
    ) -> list[list[ContextAnswer]]:
        """Find the answers to questions in their contexts; a long context is split into windows.

        Args:
            questions: pairs (question, context), or dicts with these two keys.
            options: see `AnswerOptions`.

        Returns:
            The answers to each question, best first, with offsets in characters of the context.
        """
        answers: list[list[ContextAnswer]] = self._run_task("answer", questions, options)
        return answers

    def fill(self, texts: Sequence[str], **options: Unpack[FillKeywords]) -> list[MaskFillings]:
        """Predict the most probable tokens for each mask of each text.

        Args:
            texts: texts with one or more of the tokenizer's mask tokens, such as `[MASK]`.
            options: see `FillOptions`.
        """
        fillings: list[MaskFillings] = self._run_task("fill", texts, options)
        return fillings

    def classify_images(
        self, images: Sequence[ImageInput], **options: Unpack[LabelKeywords]
    ) -> list[Classification]:
        """Classify images; see `LabelOptions`."""
        classifications: list[Classification] = self._run_task("classify_images", images, options)
        return classifications

    def detect(
        self, images: Sequence[ImageInput], **options: Unpack[DetectKeywords]
    ) -> list[list[Detection]]:
        """Find objects in images; see `DetectOptions`.

        Returns:
            The objects of each image in the order of transformers' pipeline, with boxes in pixels
            of the upright image.
        """
        detections: list[list[Detection]] = self._run_task("detect", images, options)
        return detections

    def segment(
        self, images: Sequence[ImageInput], **options: Unpack[SegmentKeywords]
    ) -> list[list[Segment]]:
        """Segment images: by label or, with a panoptic model, by object; see `SegmentOptions`.

        Returns:
            The segments of each image as in transformers' pipeline, with masks of its own size.
        """
        segments: list[list[Segment]] = self._run_task("segment", images, options)
        return segments

    @overload
    def embed_images(
        self,
        images: Sequence[ImageInput],
        *,
        dtype: Literal["float32"] = "float32",
        **options: Unpack[VectorKeywords],
    ) -> NDArray[np.float32]: ...

    @overload
    def embed_images(
        self,
        images: Sequence[ImageInput],
        *,
        dtype: VectorDtype,
        **options: Unpack[VectorKeywords],
    ) -> NDArray[Any]: ...

    def embed_images(
        self,
        images: Sequence[ImageInput],
        *,
        dtype: VectorDtype = "float32",
        **options: Unpack[VectorKeywords],
    ) -> NDArray[Any]:
        """Embed images; `notes` states which output of the graph the vectors come from.

        Args:
            images: the images.
            dtype: type of the numbers, see `VectorOptions`.
            options: the others of `VectorOptions`.

        Returns:
            (len(images), dim), or (len(images), dimensions); of bits an eighth of that.
        """
        vectors: NDArray[Any] = self._run_task("embed_images", images, {"dtype": dtype, **options})
        return vectors

    def classify_audio(
        self, audio: Sequence[AudioInput], **options: Unpack[LabelKeywords]
    ) -> list[Classification]:
        """Classify sounds, speakers, spoken words or languages; see `LabelOptions`."""
        classifications: list[Classification] = self._run_task("classify_audio", audio, options)
        return classifications

    def transcribe(
        self, audio: Sequence[AudioInput], **options: Unpack[TranscribeKeywords]
    ) -> list[Transcription]:
        """Transcribe speech with a CTC model, by the most likely token of each frame.

        Args:
            audio: the recordings.
            options: see `TranscribeOptions`.
        """
        transcriptions: list[Transcription] = self._run_task("transcribe", audio, options)
        return transcriptions

    def generate(
        self,
        inputs: Sequence[ImageInput | AudioInput],
        *,
        batch_size: int = 8,
        **options: Unpack[GenerationKeywords],
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
                beginning of each text, which the result leaves out. Speech of any length is
                transcribed in windows: `return_timestamps`, `chunk_length_s`, `stride_length_s` and
                `prompt` are about them.

        Returns:
            `num_return_sequences` results for each input, in order; `TimedGeneration` with
            `return_timestamps`.
        """
        generator = self._generator("generate")
        if batch_size < 1:
            raise InputError(f"batch_size is {batch_size}, expected 1 or more.")
        read = GenerateOptions.read(options)
        rows = generator.task.read_rows(inputs, read)
        outputs = generator.run_stream(rows, batch_rows=batch_size)
        texts = generator.task.postprocess(ModelInputs([]), outputs, read)
        return [generation for generations in texts for generation in generations]

    def stream(
        self, text: ImageInput | AudioInput, **options: Unpack[GenerationKeywords]
    ) -> Iterator[str]:
        """Generate the text of one input, piece by piece; together they are that of `generate`.

        A piece ends between characters, and what may be the beginning of a stop string is held
        back.

        Args:
            text: the input, see `generate`.
            options: see `generate`; with beam search the whole text is one piece.
        """
        generator = self._generator("stream")
        read = GenerateOptions.read(options)
        (row,) = generator.task.preprocess([text], read, streams=True).rows
        return generator.stream(row)

    def chat(
        self, messages: Sequence[Message], **options: Unpack[GenerationKeywords]
    ) -> Generation:
        """Generate the answer to a conversation, which the model's chat template makes a prompt.

        Args:
            messages: `{"role": "user", "content": "Is it warm?"}` and so on, oldest first.
            options: see `generate`. Without a length, the answer ends by itself.

        Raises:
            InputError: the model has no chat template, or it rejects the messages.
        """
        row = self._chat_row("chat", messages, options)
        ((generation,),) = self._generator("chat").run_stream([row])
        answer: Generation = generation
        return answer

    def stream_chat(
        self, messages: Sequence[Message], **options: Unpack[GenerationKeywords]
    ) -> Iterator[str]:
        """Generate the answer to a conversation piece by piece; see `chat` and `stream`."""
        row = self._chat_row("stream_chat", messages, options)
        return self._generator("stream_chat").stream(row)

    def _chat_row(
        self, method: str, messages: Sequence[Message], options: Mapping[str, Any]
    ) -> Row:
        task = self._generator(method).task
        read = GenerateOptions.read({"num_return_sequences": 1, **options})
        (row,) = task.preprocess_chat(messages, read, streams=method == "stream_chat").rows
        content: TextSearch = row.content
        if content.options.num_return_sequences != 1:
            raise InputError("num_return_sequences is above 1, but a chat has one answer.")
        return row

    def _generator(self, method: str) -> TextGenerator:
        """Return what generates; raise InputError if the model's task is another one."""
        if not isinstance(self._rows, TextGenerator):
            raise self._other_task(method)
        return self._rows

    def _run_task(self, verb: str, inputs: Sequence[Any], options: Mapping[str, Any]) -> Any:
        """Run the model on inputs; raise InputError if its task is another than `verb`."""
        if verb in self._others:
            other = self._others[verb]
            return self._run_rows(other, cast("Task", other.task), inputs, options)
        if verb in self._views and isinstance(self._rows, BatchRunner):
            return self._run_rows(self._rows, self._views[verb], inputs, options)
        if verb != self.method:
            raise self._other_task(verb)
        return self(inputs, **options)

    def _other_task(self, method: str) -> InputError:
        return InputError(
            f"{method}() was called, but {self.artifact.name} was exported for {self.task}.",
            do=f"Call {self.method}(), or export the model for another --task.",
        )

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
        self, batches: BatchRunner, task: Task, inputs: Sequence[Any], options: TaskOptions
    ) -> RowValues:
        """Return the results of many inputs: batches run while other inputs are tokenized.

        Batches run in this thread, because CUDA graphs are replayed by the thread that recorded
        them.
        """
        plan = batches.plan
        if not self._runner.profiles:  # an engine has limits of its own
            plan = partial(plan, max_rows=GPU_MAX_ROWS, max_tokens=GPU_MAX_TOKENS)
        preprocess = partial(task.preprocess, options=options)
        stream = RowStream(batches, preprocess, plan, run_here, concurrent=0)
        prepared = stream.prepare_ahead(_windows(inputs), ahead=PREPARED_BATCHES)
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


def _windows(inputs: Sequence[Any]) -> Generator[Window[None]]:
    """Yield windows of the inputs. The first ones are small, so that the model soon has work."""
    first, size = 0, _FIRST_WINDOW
    while first < len(inputs):
        items = inputs[first : first + size]
        while len(items) > 1 and count_characters(items) > _WINDOW_CHARACTERS:
            items = items[: len(items) // 2]
        yield Window(items, None)
        first += len(items)
        size = min(2 * size, _WINDOW)


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
    unproved: Unproved = "warn",
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
        unproved: `warn` answers texts that are longer than any that validate has compared with
            PyTorch, and says so once in the log; `refuse` raises InputError for them.

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
    further = manifest_tasks(opened.manifest)[1:]
    packages = (ONNXRUNTIME, "onnx") if definition.runs_in_steps else (ONNXRUNTIME,)
    require_onnxruntime("Loading a model", *packages, extra="generate")
    specs = parse_providers(providers, provider_options, default="cpu")

    options = RunnerOptions(
        threads=threads,
        io_binding=io_binding,
        cuda_graph=cuda_graph,
        # A decoder with a fixed cache rounds its sizes up itself.
        # Rungs are of one kind of inputs.
        ladder=ladder and not definition.runs_in_steps and not further,
        shrink_arena=shrink_arena,
    )

    def open_graph(file: str = "") -> OrtRunner:
        return OrtRunner(
            opened,
            options,
            graph=file,
            providers=specs,
            allow_fallback=allow_fallback,
            allow_build=allow_build,
        )

    if unproved not in get_args(Unproved):
        raise OptionError(f"option 'unproved' is '{unproved}', expected warn or refuse.")
    limits = InputLimits(unproved=unproved)
    task = definition.open(opened, opened.manifest.graphs[0], limits)
    rows = open_rows(task, open_graph, on_cuda=specs[0].full_name == CUDA)
    try:
        rows.runner.warm_up()
        graph = opened.manifest.graphs[0]
        others = [BatchRunner(other.open(opened, graph), rows.runner) for other in further]
        return Model(opened, rows, others)
    except BaseException:
        rows.close()
        raise
