"""Generate a text for each row of a window.

runner = GenerationRunner(generator, {"max_new_tokens": 64}, batch_rows=8)
runner(["The engine"], WindowStats())[0].text
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Annotated, Any, ClassVar

from enginery.core.closing import Closeable
from enginery.core.errors import InputError, OptionError
from enginery.predict.config import PredictConfig
from enginery.predict.report import WindowStats
from enginery.runtime.generation.generator import Generation, TextGenerator
from enginery.runtime.tasks.results import Alternatives
from enginery.runtime.tasks.task import InputField, Modality


class Generate:
    """What predict reads and writes for a model that generates texts from texts."""

    tasks: ClassVar[tuple[str, ...]] = TextGenerator.tasks
    modality: ClassVar[Modality] = "text"
    inputs: ClassVar[tuple[InputField, ...]] = (InputField("text"),)
    notes: ClassVar[tuple[str, ...]] = ()
    result_type: ClassVar[Any] = Annotated[list[Generation], Alternatives()]


class GenerateFromImages(Generate):
    """The same for a model that generates texts from images."""

    modality = "image"
    inputs = (InputField("image"),)


class GenerateFromAudio(Generate):
    """The same for a model that transcribes speech."""

    modality = "audio"
    inputs = (InputField("audio"),)


def generation_task(name: str) -> type[Generate] | None:
    """Return what predict does for a task of Optimum; None if that does not generate."""
    if name not in Generate.tasks:
        return None
    if name.startswith("automatic-speech-recognition"):
        return GenerateFromAudio
    return GenerateFromImages if name.startswith("image-to-text") else Generate


def read_generation_options(config: PredictConfig) -> dict[str, Any]:
    """Return the options of generation by name.

    Raises:
        OptionError: one is not of the form NAME=VALUE.
    """
    options = {}
    for text in config.generation:
        name, equals, value = text.partition("=")
        if not equals or not name.strip():
            raise OptionError(
                f"option 'generation' is '{text}', expected NAME=VALUE.",
                do="Write it as max_new_tokens=64.",
                option="generation",
            )
        try:
            options[name.strip()] = json.loads(value)
        except ValueError:
            options[name.strip()] = value.strip()
    return options


class GenerationRunner(Closeable):
    """A generator for windows of rows, with the interface of `WindowRunner`."""

    dim = 0
    """Embeddings have one."""

    def __init__(
        self, generator: TextGenerator, options: dict[str, Any], *, batch_rows: int
    ) -> None:
        """Take a generator, which is closed with this.

        Raises:
            OptionError: an option of generation is unknown or invalid.
        """
        self.task = Generate()
        self._generator = generator
        self._options = {"num_return_sequences": 1, **options}
        try:
            generation_options = generator.read_options(self._options)[1]
        except InputError as error:
            raise OptionError(error.message, do=error.do, option="generation") from error
        self._batch_rows = max(1, batch_rows // generation_options.num_beams)

    def __call__(self, inputs: Sequence[Any], stats: WindowStats) -> list[list[Generation]]:
        """Return the results of each input; rows of similar length run together.

        Raises:
            InputError: an input cannot be used.
        """
        length = len if all(isinstance(value, str) for value in inputs) else (lambda _: 0)
        order = sorted(range(len(inputs)), key=lambda index: length(inputs[index]))
        generations = self._generator.generate(
            [inputs[index] for index in order], batch_size=self._batch_rows, **self._options
        )
        per_input = len(generations) // len(inputs)
        results: list[list[Generation]] = [[] for _ in inputs]
        for position, index in enumerate(order):
            results[index] = generations[position * per_input : (position + 1) * per_input]
            stats.tokens += sum(len(result.tokens) for result in results[index])
        return results

    def close(self) -> None:
        """Free the sessions."""
        self._generator.close()
