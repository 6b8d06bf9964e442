"""The tasks that are answered, each defined once.

>>> find_task("text-classification").verb
'classify'
"""

from __future__ import annotations

from collections.abc import Iterable

from enginery.core.errors import ArtifactError
from enginery.core.manifest import GraphRecord, Manifest
from enginery.runtime.tasks.answer import Answer
from enginery.runtime.tasks.classify import Classify
from enginery.runtime.tasks.embed import Embed
from enginery.runtime.tasks.fill import Fill
from enginery.runtime.tasks.images import ClassifyImages, EmbedImages
from enginery.runtime.tasks.tag import Tag
from enginery.runtime.tasks.task import Task

TASKS: dict[str, type[Task]] = {
    task.verb: task for task in (Embed, Classify, Tag, Answer, Fill, ClassifyImages, EmbedImages)
}
"""By verb; a new task is added here."""


def supported_tasks() -> tuple[str, ...]:
    """Return the tasks of transformers that are answered, each once."""
    return tuple(dict.fromkeys(name for task in TASKS.values() for name in task.tasks))


def find_task(name: str, *, takes_images: bool = False) -> type[Task] | None:
    """Return how a task of transformers is answered; None where it is not.

    Args:
        name: `feature-extraction` and so on.
        takes_images: whether the graph takes pixels.
    """
    fitting = [task for task in TASKS.values() if name in task.tasks]
    return next((task for task in fitting if task.takes_images == takes_images), None)


def manifest_task(manifest: Manifest, record: GraphRecord | None = None) -> type[Task] | None:
    """Return how an artifact is answered, by its manifest; None where it is not.

    Args:
        manifest: of the artifact.
        record: its graph; None for the first.
    """
    graphs = [record] if record else manifest.graphs[:1]
    inputs = (spec for graph in graphs for spec in graph.inputs)
    return find_task(manifest.task, takes_images=takes_pixels(spec.name for spec in inputs))


def require_task(manifest: Manifest, record: GraphRecord | None = None) -> type[Task]:
    """Return how an artifact is answered; raise ArtifactError where it is not."""
    task = manifest_task(manifest, record)
    if task is None:
        raise ArtifactError(
            f"the artifact was exported for {manifest.task}; answers are made for "
            f"{', '.join(supported_tasks())}.",
            do="Run its graphs with OrtRunner, or open the directory with Optimum's ORTModel "
            "classes.",
        )
    return task


def takes_pixels(inputs: Iterable[str]) -> bool:
    """Whether a graph with inputs of these names takes images."""
    return "pixel_values" in inputs
