"""MLflow's metadata of a package: signature, tags and parameters."""

from __future__ import annotations

import json
from dataclasses import fields, is_dataclass
from types import NoneType
from typing import Any, get_args, get_type_hints

from enginery.core.artifact.manifest import Manifest
from enginery.publish.package import Package
from enginery.runtime.tasks import manifest_task
from enginery.runtime.tasks.results import bare_type
from enginery.runtime.tasks.task import Task
from enginery.runtime.tasks.zero_shot_images import ZeroShotImages
from enginery.runtime.text.pooling import Vectors

ARTIFACT = "data/artifact"
"""Path of the artifact in the MLflow model."""
_MAX_VALUE = 5000  # characters; the lowest of MLflow's limits for tag values


def signature(manifest: Manifest) -> Any:
    """Return the `ModelSignature` of the artifact's task; None if the task is not supported.

    Inputs are strings, or the bytes of image or audio files. Embeddings are float32 (rows, dim);
    any other result is a list or a dict per row. Parameters are the task's options.
    """
    import numpy as np
    from mlflow.models import Model, ModelSignature
    from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema, TensorSpec

    task = _supported_task(manifest)
    if task is None:
        return None
    kind = DataType.string if task.modality == "text" else DataType.binary
    # Without a column name MLflow itself accepts a plain list of texts, with names only tables.
    inputs = [
        ColSpec(kind)
        if len(task.inputs) == 1
        else ColSpec(kind, name=field.name, required=not field.optional)
        for field in task.inputs
    ]
    result = bare_type(task.result_type)
    if result is Vectors:
        outputs = [TensorSpec(np.dtype("float32"), (-1, -1))]
    elif is_dataclass(result):
        outputs = [ColSpec(kind, name=name) for name, kind in _field_types(result).items()]
    else:
        outputs = [ColSpec(_column_type(result))]
    kinds = {
        "boolean": DataType.boolean,
        "integer": DataType.long,
        "number": DataType.double,
        "string": DataType.string,
    }
    defaults = {name: field.default for name, field in task.Options.model_fields.items()}
    params = [
        ParamSpec(name, kinds[schema["type"]], defaults[name])
        for name, schema in task.Options.schemas().items()
        if schema.get("type") in kinds
    ]
    signature = ModelSignature(Schema(inputs), Schema(outputs), ParamSchema(params))
    if any(field.optional for field in task.inputs):
        # MLflow's own check of named columns rejects a list of texts, and that of a column without
        # a name drops a second one. It leaves the check to the loader of a model whose signature
        # comes from Python's type hints; only the document of a model can say so.
        document = {"signature": signature.to_dict(), "is_signature_from_type_hint": True}
        return Model.from_dict(document).signature
    return signature


def _supported_task(manifest: Manifest) -> type[Task] | None:
    """Return the artifact's task; None if a logged model cannot answer it."""
    task = manifest_task(manifest)
    # The parameters of a signature are no lists, such as the labels to choose from.
    return None if task is None or task.runs_in_steps or task is ZeroShotImages else task


def _column_type(kind: Any) -> Any:
    """Return MLflow's type for a Python type: a scalar, a dataclass, or a list of these."""
    from mlflow.types import DataType
    from mlflow.types.schema import Array, Object, Property

    scalars = {
        str: DataType.string,
        int: DataType.long,
        float: DataType.double,
        bool: DataType.boolean,
    }
    if kind in scalars:
        return scalars[kind]
    if is_dataclass(kind):
        hints, kinds = get_type_hints(kind), _field_types(kind)
        return Object(
            [
                Property(name, part, required=NoneType not in get_args(hints[name]))
                for name, part in kinds.items()
            ]
        )
    return Array(_column_type(get_args(kind)[0]))


def _field_types(kind: Any) -> dict[str, Any]:
    """Return MLflow's type of each field of a dataclass."""
    hints = get_type_hints(kind)
    return {field.name: _column_type(bare_type(hints[field.name])) for field in fields(kind)}


def tags(package: Package) -> dict[str, str]:
    """Return the tags for the logged model and the version."""
    return {name: value[:_MAX_VALUE] for name, value in package.tags.items()}


def stage_params(manifest: Manifest) -> dict[str, str]:
    """Return the options of the stages as MLflow's parameters: `export.opset` -> `20`."""
    return {
        f"{stage.stage}.{name}": (value if isinstance(value, str) else json.dumps(value))
        for stage in manifest.stages
        for name, value in stage.options.items()
        # MLflow rejects empty values; long ones are in manifest.json.
        if value not in ("", None) and len(str(value)) <= _MAX_VALUE
    }
