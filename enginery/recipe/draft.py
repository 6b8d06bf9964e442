"""Write a first recipe for a model and a target, with comments: `enginery init`.

>>> print(draft_recipe("org/name", tmp_path / "recipe.yaml", DraftOptions(target="cpu")))
# The stages of one model, from its files to a registry. Written by `enginery init`.
...
"""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from enginery.core.errors import OptionError, SourceError
from enginery.core.model.feeds import FeedLimits
from enginery.core.model.files import ModelConfig, module_kinds
from enginery.core.model.hub import hub_requests
from enginery.core.model.source import find_local
from enginery.core.paths import portable_name, source_name
from enginery.export.tasks import inferred_task, task_name
from enginery.runtime.tasks import TASKS
from enginery.runtime.tasks.classify import Classify
from enginery.runtime.tasks.images import ClassifyImages
from enginery.runtime.tasks.text import TextTask

_LONGEST = 512
_PLAIN = re.compile(r"[A-Za-z0-9_./][A-Za-z0-9_./@+=,:-]*(?<!:)")
"""Text that YAML reads as it is written."""


@dataclass(frozen=True)
class DraftOptions:
    """What the recipe is for."""

    task: str = "auto"
    """The model's task; `auto` reads it from the model's class."""
    target: Literal["tensorrt", "cuda", "cpu"] = "tensorrt"
    """What runs the model."""
    data: str = ""
    """Inputs like those of the users; with them, the recipe for TensorRT has INT8."""
    column: str = ""
    """Column of the data with the texts; empty for `text`."""
    label_column: str = ""
    """Column with the correct labels, to measure accuracy."""
    held_out: str = ""
    """Rows like the data to measure on, which calibrate nothing; empty to measure on the data."""
    capability: str = "portable"
    """GPUs that engines are built for: `8.9`, `current` or `portable`."""


def draft_recipe(model: str, file: Path, options: DraftOptions) -> str:
    """Return the text of a recipe.

    Args:
        model: a Hub id, a directory, an `.onnx` file or `package:NAME`.
        file: where the recipe goes; relative paths in it start from its directory.
        options: task, target and data.

    Raises:
        OptionError: the task is unknown, or a column is named without data.
        SourceError: a local model does not exist, or its config.json is damaged.
    """
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    column, label_column, capability = options.column, options.label_column, options.capability
    if (column or label_column) and not options.data:
        option = "column" if column else "label_column"
        raise OptionError(
            f"option '{option}' is set, but there are no data.",
            do="Name their file: --data reviews.csv",
            option=option,
        )
    if options.held_out and not options.data:
        raise OptionError(
            "option 'held_out' is set, but there are no data.",
            do="Name the rows to calibrate on: --data reviews.csv",
            option="held_out",
        )
    path = find_local(model)
    is_onnx = path is not None and path.is_file()
    settings = None if is_onnx else _model_settings(model, path)
    task = task_name(options.task)
    if task == "auto" and settings:
        task = inferred_task(settings, module_kinds(path) if path else ())
    if label_column and task not in ("auto", *Classify.tasks, *ClassifyImages.tasks):
        raise OptionError(
            f"option 'label_column' is set, but the task is {task}, expected a classifier.",
            do="Leave it out.",
            option="label_column",
        )
    # The shapes of models for audio and of decoders differ, so the draft has no profile for them.
    drafted = [
        definition
        for definition in TASKS.values()
        if task in definition.tasks
        and definition.modality != "audio"
        and not definition.runs_in_steps
    ]
    takes_images = bool(settings and settings.image_size and not settings.merged().vocab_size)
    modality = "image" if takes_images else "text"
    fitting = [definition for definition in drafted if definition.modality == modality] or drafted
    served = fitting[0] if fitting else None
    takes_texts = served is not None and issubclass(served, TextTask)
    limits = FeedLimits.from_config(settings).max_sizes if settings else {}
    longest = min(_LONGEST, limits.get("sequence", _LONGEST))
    name = portable_name(source_name(str(path.absolute()) if path else model.partition("@")[0]))
    environment = Environment(  # noqa: S701  # it is YAML, which the filter `yaml` quotes
        loader=FileSystemLoader(Path(__file__).parent),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters["yaml"] = _yaml_text
    model_in_recipe = (
        model if path is None or model.startswith("package:") else _relative(path, file)
    )
    return environment.get_template("draft.yaml.jinja").render(
        file=file.name,
        model=model_in_recipe,
        name=name,
        is_onnx=is_onnx,
        is_hub=path is None and "@" not in model,
        task=task,
        target=options.target,
        profile=_profile(longest, takes_texts=takes_texts) if served else "",
        sequences=",".join(dict.fromkeys(str(min(size, longest)) for size in (16, 128))),
        data=_data_lines(options.data, column, file),
        measured=_data_lines(options.held_out or options.data, column, file),
        held_out=_relative(Path(options.held_out).expanduser(), file) if options.held_out else "",
        label_column=label_column,
        capability=capability,
        gpus="" if capability in ("portable", "current") else capability,
        served=served is not None,
        takes_texts=takes_texts,
        takes_images=served is not None and served.modality == "image",
    )


def _model_settings(model: str, path: Path | None) -> ModelConfig | None:
    """Return a model's json; None if it is on the Hub, which cannot be reached."""
    from huggingface_hub import hf_hub_download

    if path is not None:
        return ModelConfig.read(path, error=SourceError)
    hub_id, _, revision = model.partition("@")
    try:
        with hub_requests():
            config = hf_hub_download(hub_id, ModelConfig.FILE, revision=revision or "main")
    except (OSError, ValueError):  # the recipe's export says why
        return None
    return ModelConfig.read(Path(config).parent, error=SourceError)


def _data_lines(data: str, column: str, file: Path) -> list[str]:
    """Return the lines of a stage that name the data."""
    if not data:
        return []
    lines = [f"data: {_yaml_text(_relative(Path(data).expanduser(), file))}"]
    return [*lines, f"column: {_yaml_text(column)}"] if column else lines


def _profile(longest: int, *, takes_texts: bool) -> str:
    """Return usual shapes of requests, up to `longest` tokens."""
    batch = "batch=1:8:32"
    if not takes_texts:
        return batch
    return f"{batch},sequence={min(8, longest)}:{min(128, longest)}:{longest}"


def _relative(path: Path, file: Path) -> str:
    """Return a path as the recipe names it: relative to its directory."""
    relative = os.path.relpath(path.absolute(), file.absolute().parent)
    return relative if relative.startswith("..") else f"./{relative}"


def _yaml_text(text: str) -> str:
    """Quote text for YAML where that is necessary; a literal `${` is not a variable."""
    if _PLAIN.fullmatch(text):
        return text
    return json.dumps(text.replace("${", "$${"), ensure_ascii=False)
