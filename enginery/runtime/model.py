"""An artifact that answers: texts or images in, answers out.

Takes an artifact; runs it with onnxruntime, tokenizers, numpy and Pillow alone.

    >>> with load_model("minilm") as model:
    ...     model.embed(["The engine is warm."]).shape
    (1, 384)
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from enginery.core.artifact import Artifact
from enginery.core.closing import Closing
from enginery.core.errors import ArtifactError, InputError
from enginery.runtime.answers import Classification, ContextAnswer, MaskFillings, TokenSpan
from enginery.runtime.classification import Activation, Aggregation
from enginery.runtime.image_model import ImageModel
from enginery.runtime.ort import OrtRunner
from enginery.runtime.providers import Provider, parse_wishes
from enginery.runtime.question_answering import MAX_ANSWER_TOKENS
from enginery.runtime.run_fit import require_fit
from enginery.runtime.text_model import TextModel

# What each task answers with; feature-extraction by what the graph takes.
METHODS = {
    "feature-extraction": "embed",
    "text-classification": "classify",
    "token-classification": "tag",
    "question-answering": "answer",
    "fill-mask": "fill",
    "image-classification": "classify_images",
}
ANSWERED_TASKS = tuple(METHODS)


class Model(Closing):
    """A model that answers. A context manager; closing frees its session.

    Every method takes a list and answers in its order; an empty list has an empty answer. Texts
    longer than the model takes are cut, and counted in `truncated`.
    """

    def __init__(self, artifact: Artifact, runner: OrtRunner) -> None:
        self.artifact = artifact
        self.task = artifact.manifest.task
        self._runner = runner
        takes_pixels = any(spec.name == "pixel_values" for spec in runner.record.inputs)
        self._texts = None if takes_pixels else TextModel.open(artifact, runner)
        self._images = ImageModel.open(artifact, runner) if takes_pixels else None
        self.method = METHODS[self.task]
        """The method that answers the task."""
        if takes_pixels and self.method == "embed":
            self.method = "embed_images"

    @property
    def notes(self) -> tuple[str, ...]:
        """Choices that were made for this model, with their reasons."""
        return self._texts.notes if self._texts else self._images.notes if self._images else ()

    @property
    def providers(self) -> list[Provider]:
        return self._runner.providers

    @property
    def truncated(self) -> int:
        """How many texts were cut so far because they have more tokens than the model takes."""
        return self._texts.truncated if self._texts else 0

    def __call__(self, inputs: Sequence[Any]) -> Any:
        """What the task says, with default options.

        Args:
            inputs: texts; images for an image task; for question answering pairs
                (question, context) or dicts with these two keys.

        Returns:
            float32 (len(inputs), dim) for embeddings, else a list with one answer an input.
        """
        return getattr(self, self.method)(inputs)

    def embed(self, texts: Sequence[str], *, prompt_name: str = "") -> NDArray[np.float32]:
        """Vectors of texts, pooled as the model's sentence-transformers modules say.

        Args:
            texts: what to embed.
            prompt_name: a prompt of config_sentence_transformers.json; empty for its default.

        Returns:
            float32 (len(texts), dim).

        Raises:
            InputError: the model does not embed texts, an input is not a string, or there is no
                such prompt.
        """
        return self._text_model("embed").embed(texts, prompt_name=prompt_name)

    def classify(
        self,
        texts: Sequence[str | tuple[str, str]],
        *,
        top_k: int = 0,
        activation: Activation = "auto",
    ) -> list[Classification]:
        """Labels of texts.

        Args:
            texts: what to classify: texts, or pairs for a model that compares two.
            top_k: how many labels, best first; 0 for all.
            activation: what makes scores of logits; `auto` as transformers' pipeline chooses.

        Raises:
            InputError: the model does not classify texts, or an input is not a string.
        """
        _require_least(0, top_k=top_k)
        model = self._text_model("classify")
        return model.classify(texts, top_k=top_k, activation=activation)

    def tag(
        self, texts: Sequence[str], *, aggregation: Aggregation = "simple"
    ) -> list[list[TokenSpan]]:
        """Labelled stretches of texts, with character offsets.

        Args:
            texts: what to tag.
            aggregation: none, simple, first, average or max, as in transformers' pipeline.

        Raises:
            InputError: the model does not tag texts, or an input is not a string.
        """
        return self._text_model("tag").tag(texts, aggregation=aggregation)

    def answer(
        self,
        questions: Sequence[tuple[str, str] | Mapping[str, str]],
        *,
        top_k: int = 1,
        max_tokens: int = MAX_ANSWER_TOKENS,
        allow_none: bool = False,
    ) -> list[list[ContextAnswer]]:
        """Answers to questions, each found in its context; a long context is read in windows.

        Args:
            questions: pairs (question, context), or dicts with these two keys.
            top_k: the most answers to a question, best first.
            max_tokens: the most tokens of an answer.
            allow_none: "no answer" competes, as an empty text.

        Raises:
            InputError: the model does not answer questions, or an input is not such a pair.
        """
        model = self._text_model("answer")
        _require_least(1, top_k=top_k, max_tokens=max_tokens)
        pairs = [_pair(item, index) for index, item in enumerate(questions)]
        return model.answer(pairs, top_k=top_k, max_tokens=max_tokens, allow_none=allow_none)

    def fill(self, texts: Sequence[str], *, top_k: int = 5) -> list[MaskFillings]:
        """The likeliest tokens for each mask of each text.

        Raises:
            InputError: the model does not fill masks, or a text has none.
        """
        _require_least(0, top_k=top_k)
        return self._text_model("fill").fill(texts, top_k=top_k)

    def classify_images(
        self, images: Sequence[Any], *, top_k: int = 0, activation: Activation = "auto"
    ) -> list[Classification]:
        """Labels of images: paths, Pillow images or uint8 arrays (height, width, channels).

        Raises:
            InputError: the model does not classify images, or an image cannot be used.
        """
        _require_least(0, top_k=top_k)
        model = self._image_model("classify_images")
        return model.classify(images, top_k=top_k, activation=activation)

    def embed_images(self, images: Sequence[Any]) -> NDArray[np.float32]:
        """Vectors of images; `notes` says what of the graph they are.

        Returns:
            float32 (len(images), dim).

        Raises:
            InputError: the model does not embed images, or an image cannot be used.
        """
        return self._image_model("embed_images").embed(images)

    def warm_up(self) -> None:
        """Runs every engine once at its optimum; `load_model` has done so.

        Raises:
            ProviderError: an engine fails at its own optimum.
        """
        self._runner.warm_up()

    def close(self) -> None:
        """Frees the session."""
        self._runner.close()

    def _text_model(self, method: str) -> TextModel:
        if self._texts is None or self.method != method:
            raise self._wrong(method)
        return self._texts

    def _image_model(self, method: str) -> ImageModel:
        if self._images is None or self.method != method:
            raise self._wrong(method)
        return self._images

    def _wrong(self, method: str) -> InputError:
        return InputError(
            f"{method}() was called, but {self.artifact.name} was exported for {self.task}.",
            do=f"Call {self.method}(), or export the model for another --task.",
        )


def load_model(
    artifact: str | Path | Artifact,
    *,
    provider: str = "",
    provider_options: Sequence[str] = (),
    allow_fallback: bool = False,
    allow_failed: bool = False,
    allow_build: bool = False,
    threads: int = 0,
    io_binding: bool = True,
    cuda_graph: bool = False,
    shrink_arena: bool = False,
) -> Model:
    """Opens an artifact to answer its task; under TensorRT, its engines, and runs each once.

    Args:
        artifact: the artifact or its directory.
        provider: the ordered wish, `tensorrt,cuda,cpu`; empty for what `ENGINERY_PROVIDERS` says,
            and else the CPU.
        provider_options: options of the providers, `cuda.gpu_mem_limit=2GiB`.
        allow_fallback: take a later wish when the first cannot be had.
        allow_failed: take an artifact whose validation failed.
        allow_build: where no engine of the artifact fits this GPU, let TensorRT build one while
            it loads; minutes, and nothing of it is kept.
        threads: intra-op threads; 0 for ONNX Runtime's choice.
        io_binding: on NVIDIA's providers, keep inputs and outputs in buffers on the GPU.
        cuda_graph: record each shape's run as a CUDA graph and replay it.
        shrink_arena: give memory that a run took beyond the arena's first piece back after it.

    Raises:
        ArtifactError: not an artifact, or a task or a file that answers cannot be made from.
        RejectedArtifactError: its validation failed.
        ProviderError: the provider cannot be had, has no CUDA graphs, or runs no engine of the
            artifact on this GPU.
        OptionError: an option of a provider does not fit it, or ways of running exclude each other.
    """
    opened = artifact if isinstance(artifact, Artifact) else Artifact.open(artifact)
    opened.require_passed(allow_failed=allow_failed)
    task = opened.manifest.task
    if task not in METHODS:
        raise ArtifactError(
            f"{opened.path} was exported for {task}; answers are made for {', '.join(METHODS)}.",
            do="Run its graphs with OrtRunner, or open the directory with Optimum's ORTModel "
            "classes.",
        )
    wish = parse_wishes(provider, provider_options, default="cpu")
    require_fit(wish, io_binding=io_binding, cuda_graph=cuda_graph, shrink_arena=shrink_arena)
    runner = OrtRunner(
        opened, providers=wish, allow_fallback=allow_fallback, allow_build=allow_build,
        threads=threads, io_binding=io_binding, cuda_graph=cuda_graph, shrink_arena=shrink_arena,
    )  # fmt: skip
    try:
        model = Model(opened, runner)
        model.warm_up()
        return model
    except BaseException:
        runner.close()
        raise


def _pair(item: Any, index: int) -> tuple[str, str]:
    if isinstance(item, Mapping) and {"question", "context"} <= set(item):
        return item["question"], item["context"]
    if isinstance(item, tuple | list) and len(item) == 2:
        return item[0], item[1]
    raise InputError(
        f"question {index} is a {type(item).__name__}, expected (question, context) "
        "or a dict with question and context."
    )


def _require_least(least: int, **numbers: int) -> None:
    for name, number in numbers.items():
        if number < least:
            raise InputError(f"{name} is {number}, expected {least} or more.")
