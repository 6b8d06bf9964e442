"""The supported tasks. Each is defined once, for every part of the package that runs a model.

>>> find_task("text-classification").verb
'classify'
"""

from __future__ import annotations

import json

from enginery.core.artifact.manifest import GraphRecord, Manifest
from enginery.core.errors import ArtifactError
from enginery.runtime.tasks.answer import Answer
from enginery.runtime.tasks.audio import ClassifyAudio, Transcribe
from enginery.runtime.tasks.classify import Classify
from enginery.runtime.tasks.detect import DetectObjects
from enginery.runtime.tasks.embed import Embed
from enginery.runtime.tasks.fill import Fill
from enginery.runtime.tasks.generate import Generate, GenerateFromAudio, GenerateFromImages
from enginery.runtime.tasks.images import ClassifyImages, EmbedImages
from enginery.runtime.tasks.segment import SegmentImages
from enginery.runtime.tasks.tag import Tag
from enginery.runtime.tasks.task import Modality, Task
from enginery.runtime.tasks.two_towers import EmbedImagesOfBoth, EmbedTextsOfBoth
from enginery.runtime.tasks.zero_shot_images import ZeroShotImages

TASKS: dict[str, type[Task]] = {
    task.verb: task
    for task in (
        Embed,
        Classify,
        Tag,
        Answer,
        Fill,
        ClassifyImages,
        EmbedImages,
        DetectObjects,
        SegmentImages,
        ZeroShotImages,
        ClassifyAudio,
        Transcribe,
        Generate,
    )
}
"""Task classes by verb. Add a new task here."""

_OTHER_INPUTS: tuple[type[Task], ...] = (
    GenerateFromImages,
    GenerateFromAudio,
    EmbedTextsOfBoth,
    EmbedImagesOfBoth,
)
"""Classes with the verb of another one, for other inputs."""


def task_classes() -> tuple[type[Task], ...]:
    """Return the class of each task and kind of inputs."""
    return (*TASKS.values(), *_OTHER_INPUTS)


def supported_tasks() -> tuple[str, ...]:
    """Return the transformers tasks that are supported, without duplicates."""
    return tuple(dict.fromkeys(name for task in task_classes() for name in task.tasks))


def is_generating(name: str) -> bool:
    """Return True for a transformers task whose models generate text."""
    return any(name in task.tasks and task.runs_in_steps for task in task_classes())


def find_task(name: str, *, modality: Modality = "text") -> type[Task] | None:
    """Return the class for a transformers task, or None if the task is not supported.

    Args:
        name: the transformers task, such as `feature-extraction`.
        modality: what the graph takes.
    """
    fitting = [task for task in task_classes() if name in task.tasks]
    return next((task for task in fitting if task.modality == modality), None)


def manifest_tasks(manifest: Manifest, record: GraphRecord | None = None) -> list[type[Task]]:
    """Return the task classes for an artifact: several if its graph takes texts and images.

    Args:
        manifest: the artifact's manifest.
        record: the graph to run; None for the first one.
    """
    fitting = [task for task in task_classes() if task.fits(manifest, record)]
    # First the task that the artifact was exported for.
    return sorted(fitting, key=lambda task: manifest.task not in task.tasks)


def manifest_task(manifest: Manifest, record: GraphRecord | None = None) -> type[Task] | None:
    """Return the task class for an artifact, or None if its task is not supported.

    Args:
        manifest: the artifact's manifest.
        record: the graph to run; None for the first one.
    """
    return next(iter(manifest_tasks(manifest, record)), None)


def require_task(manifest: Manifest, record: GraphRecord | None = None) -> type[Task]:
    """Return the task class for an artifact; raise ArtifactError if its task is not supported."""
    task = manifest_task(manifest, record)
    if task is None:
        graphs = [record] if record else manifest.graphs[:1]
        names = [json.dumps(spec.name) for graph in graphs for spec in graph.inputs]
        feeds = ", ".join(f"{name}: …" for name in names)
        if manifest.task == "text-generation":
            hint = "To generate, export it for text-generation-with-past. "
        else:
            hint = ""
        supported = supported_tasks()
        problem = f"which is not a supported task; supported: {', '.join(supported)}"
        if manifest.task in supported:
            outputs = ", ".join(spec.name for graph in graphs for spec in graph.outputs)
            problem = f"whose graph has outputs that are not read as results: {outputs}"
            if len(manifest.graphs) > 1:
                problem = "with several graphs, which is not a supported task"
        raise ArtifactError(
            f"the artifact was exported for {manifest.task}, {problem}.",
            do=f"{hint}Run its graph on numpy arrays: from enginery import Artifact, OrtRunner; "
            f'OrtRunner(Artifact.open("…"), providers="cpu")({{{feeds}}}). Or open the directory '
            "with Optimum's ORTModel classes.",
        )
    return task
