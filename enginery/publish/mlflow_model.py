"""What MLflow is told of a package: its `MLmodel`, signature, tags, parameters.

Takes a package; leaves a directory with `MLmodel`, its requirements and the input example, to
which the artifact's own files belong under `data/artifact/`.

    >>> write_mlflow_model(package, scratch / "model", model_id="m-1", run_id="r-1")
    >>> (scratch / "model" / "MLmodel").is_file()
    True

The artifact's files are not copied for it: they may be gigabytes.
"""

from __future__ import annotations

import json
import warnings
from io import BytesIO
from pathlib import Path
from typing import Any

import enginery
from enginery.core.fingerprint import runtime_version
from enginery.core.manifest import Manifest
from enginery.core.model_files import SpecialTokensMap, TokenizerConfig
from enginery.publish.engine_bond import bound_to
from enginery.publish.package import Package
from enginery.publish.pyfunc import COLUMNS, IMAGE, TEXT_PAIR
from enginery.runtime.model import METHODS

ARTIFACT = "data/artifact"
"""Where the artifact is inside of the MLflow model."""
CONTENT_TAG = "enginery.content_sha256"
WITHOUT_RIGHTS_TAG = "enginery.without_rights_sha256"
_EXAMPLES = {
    "text": "The engine is warm.",
    "question": "Who built the bridge?",
    "context": "Ada built the bridge in London.",
}
_TOP_K = {"classify": 0, "classify_images": 0, "answer": 1, "fill": 5}
"""The defaults of `Model`'s methods."""
_MAX_VALUE = 5000  # MLflow's smallest limit of a tag's value


def write_mlflow_model(package: Package, directory: Path, *, model_id: str, run_id: str) -> None:
    """Writes everything of the MLflow model but the artifact's own files.

    Args:
        package: what is published.
        directory: does not exist yet.
        model_id: MLflow's id of the logged model.
        run_id: MLflow's id of the run that it belongs to.
    """
    from mlflow import pyfunc
    from mlflow.models import Model

    # save_model copies what it is given; it is given a directory of the right name alone.
    artifact = directory.parent / Path(ARTIFACT).name
    artifact.mkdir()
    (artifact / ".keep").touch()
    versions = runtime_version()
    with warnings.catch_warnings():
        # Of MLflow's own use of pandas and pydantic; nobody who publishes can mend it.
        warnings.simplefilter("ignore")
        pyfunc.save_model(
            path=str(directory),
            loader_module="enginery.publish.pyfunc",
            data_path=str(artifact),
            mlflow_model=Model(model_id=model_id, run_id=run_id),
            signature=signature(package.artifact.manifest),
            input_example=input_example(package),
            pip_requirements=[
                f"enginery=={enginery.__version__}",
                *(f"{name}=={version}" for name, version in versions.items() if version != "none"),
            ],
            model_config={"allow_failed": True} if package.problem else None,
            metadata=tags(package),
        )


def signature(manifest: Manifest) -> Any:
    """The `ModelSignature` of the artifact's task; None for one that `load_model` does not answer.

    Inputs are strings, or the bytes of image files. Embeddings are float32 (rows, dim), every other
    answer is a list or a dict a row.
    """
    import numpy as np
    from mlflow.models import ModelSignature
    from mlflow.types import ColSpec, DataType, ParamSchema, ParamSpec, Schema, TensorSpec
    from mlflow.types.schema import Array, Object, Property

    method = _method(manifest)
    if not method:
        return None
    label = [Property("label", DataType.string), Property("score", DataType.double)]
    place = [Property("start", DataType.long), Property("end", DataType.long),
             Property("text", DataType.string)]  # fmt: skip
    filling = [
        Property("token", DataType.string),
        Property("token_id", DataType.long),
        Property("score", DataType.double),
        Property("sequence", DataType.string),
    ]
    labels = ColSpec(Array(Object(label)), name="labels")
    outputs = {
        "embed": TensorSpec(np.dtype("float32"), (-1, -1)),
        "embed_images": TensorSpec(np.dtype("float32"), (-1, -1)),
        "classify": labels,
        "classify_images": labels,
        "tag": ColSpec(Array(Object([*label, *place]))),
        "answer": ColSpec(Array(Object([label[1], *place]))),
        "fill": ColSpec(Array(Array(Object(filling))), name="masks"),
    }
    names = COLUMNS[method]
    single = len(names) == 1
    kind = DataType.binary if names[0] == IMAGE else DataType.string
    # Without a name, MLflow takes a plain list of texts; with names, tables alone.
    inputs = [
        ColSpec(kind) if single else ColSpec(kind, name=name, required=name != TEXT_PAIR)
        for name in names
    ]
    top_k = _TOP_K.get(method)
    params = None if top_k is None else ParamSchema([ParamSpec("top_k", DataType.long, top_k)])
    return ModelSignature(Schema(inputs), Schema([outputs[method]]), params)


def input_example(package: Package) -> Any:
    """One row that the signature takes; None where there is no signature."""
    method = _method(package.artifact.manifest)
    if not method:
        return None
    import pandas as pd

    names = COLUMNS[method]
    if names[0] == IMAGE:
        return pd.DataFrame({IMAGE: [_grey_image()]})
    if method == "fill":
        return [f"The engine is {_mask_token(package)}."]
    if len(names) == 1:
        return [_EXAMPLES[names[0]]]
    return pd.DataFrame({name: [_EXAMPLES[name]] for name in names if name in _EXAMPLES})


def tags(package: Package) -> dict[str, str]:
    """What the run, the logged model and the version are marked with."""
    manifest = package.artifact.manifest
    marks = {
        CONTENT_TAG: package.content_sha256,
        WITHOUT_RIGHTS_TAG: package.without_rights_sha256,
        "enginery.task": manifest.task,
        "enginery.precision": manifest.precision,
        "enginery.target": manifest.target,
        "enginery.source": f"{manifest.source.id}@{manifest.source.revision}".rstrip("@"),
        "enginery.source_sha256": manifest.source.sha256,
        "enginery.validated": "false" if package.problem else "true",
        "enginery.version": enginery.__version__,
    }
    for record in package.engines:
        marks[f"enginery.engine.{record.directory_name}"] = bound_to(record)
    return {name: value[:_MAX_VALUE] for name, value in marks.items()}


def stage_params(manifest: Manifest) -> dict[str, str]:
    """Options of the stages as MLflow's parameters: `export.opset` -> `20`."""
    return {
        f"{stage.stage}.{name}": (value if isinstance(value, str) else json.dumps(value))
        for stage in manifest.stages
        for name, value in stage.options.items()
        # MLflow refuses an empty value, and a long one is in manifest.json whole.
        if value not in ("", None) and len(str(value)) <= _MAX_VALUE
    }


def _method(manifest: Manifest) -> str:
    """The method of `Model` that answers; empty where there is none."""
    method = METHODS.get(manifest.task, "")
    takes_pixels = any(spec.name == "pixel_values" for spec in manifest.graphs[0].inputs)
    return "embed_images" if method == "embed" and takes_pixels else method


def _grey_image() -> bytes:
    from PIL import Image

    stream = BytesIO()
    Image.new("RGB", (64, 64), (128, 128, 128)).save(stream, "PNG")
    return stream.getvalue()


def _mask_token(package: Package) -> str:
    """The tokenizer's own, `[MASK]` or `<mask>`."""
    directory = package.artifact.path
    settings = TokenizerConfig.read(directory)
    return settings.with_map(SpecialTokensMap.read(directory)).mask_token or "[MASK]"
