"""A package into MLflow: a run, a logged model with every file, and a version that points to it.

Takes MLflow's own client and a package; leaves a version of a registered model.

    >>> upload_version(MlflowClient(), package, "minilm", SILENT)
    '3'

Files go up one by one. A run that was killed is found again, see `mlflow_begun`; graphs, weights
and engines that are there are not sent again.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path, PurePosixPath
from typing import Any

from enginery.core.progress import Progress
from enginery.publish.engine_bond import bound_to
from enginery.publish.package import Package
from enginery.publish.package_files import PackageFile
from enginery.publish.targets.mlflow.begun import (
    LOGGED_TAG,
    MODEL_TAG,
    WRITER_TAG,
    find_begun,
    writer,
)
from enginery.publish.targets.mlflow.model import (
    ARTIFACT,
    CONTENT_TAG,
    stage_params,
    tags,
    write_mlflow_model,
)

_CHUNK = 100  # parameters and tags that MLflow takes at once
_METRICS_CHUNK = 1000
# Their digests are part of the content's, so that a file of the same name is the same file.
_CONTENT_GROUPS = ("graph", "weights", "engine")


def upload_version(client: Any, package: Package, name: str, progress: Progress) -> str:
    """Sends everything, then registers: a version never points to a part.

    Args:
        client: an `MlflowClient`.
        package: what is published.
        name: of the registered model, which is there.
        progress: who is told how many files are there.

    Returns:
        The number of the version.
    """
    experiment_id = _experiment(client)
    model, run_id = find_begun(client, experiment_id, package, name) or _begin(
        client, experiment_id, package, name
    )
    try:
        if str(model.status) != "READY":  # else it was killed before it was registered
            _send_all(client, model.model_id, run_id, package, progress)
            _record(client, run_id, model.model_id, package)
            client.finalize_logged_model(model.model_id, "READY")
        made = client.create_model_version(
            name, source=f"models:/{model.model_id}", run_id=run_id,
            model_id=model.model_id, tags={**tags(package), LOGGED_TAG: model.model_id},
            description=_description(package),
        )  # fmt: skip
    except BaseException:
        with suppress(Exception):  # the first error is the one to tell
            _end(client, run_id, "FAILED")
        raise
    _end(client, run_id, "FINISHED")
    return str(made.version)


def mend_version(client: Any, package: Package, version: Any, progress: Progress) -> None:
    """Sends the files of a version that are gone, or shorter than they were, once more.

    Only sizes are looked at: what MLflow's store has is not read. The card and the listing of the
    version stay, so all goes up again or nothing.
    """
    # The server keeps `model_id` of a version to itself.
    model_id = version.tags.get(LOGGED_TAG, "")
    if not model_id:
        return
    there = _sizes(client, model_id, ARTIFACT)
    lost = [
        file.name
        for file in package.files
        if _is_content(file) and there.get(str(PurePosixPath(ARTIFACT, file.name)))
        != file.size_bytes
    ]  # fmt: skip
    if not lost:
        return
    damage = f"version {version.version} of {version.name} has lost {', '.join(lost[:3])}"
    package.require_rights(damage, version.tags.get(CONTENT_TAG, ""))
    progress.say(f"publish: sends version {version.version} again, it has lost {lost[0]}")
    _send_all(client, model_id, str(version.run_id or ""), package, progress)


def _send_all(
    client: Any, model_id: str, run_id: str, package: Package, progress: Progress
) -> None:
    with tempfile.TemporaryDirectory(prefix="enginery-mlflow-") as scratch:
        directory = Path(scratch, "model")
        write_mlflow_model(package, directory, model_id=model_id, run_id=run_id)
        _send(client, model_id, package, directory, progress)


def _experiment(client: Any) -> str:
    """The experiment that MLflow's variables name, or `enginery`."""
    if named := os.environ.get("MLFLOW_EXPERIMENT_ID"):
        return named
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "enginery"
    with suppress_exists():
        client.create_experiment(name)
    return str(client.get_experiment_by_name(name).experiment_id)


def _begin(client: Any, experiment_id: str, package: Package, name: str) -> tuple[Any, str]:
    """A new logged model, and its run."""
    run = client.create_run(
        experiment_id,
        run_name=f"publish {name}",
        tags={**tags(package), MODEL_TAG: name, WRITER_TAG: writer()},
    )
    params = list(stage_params(package.artifact.manifest).items())
    # A logged model's name has no dots.
    model = client.create_logged_model(
        experiment_id, name=name.replace(".", "-"), source_run_id=run.info.run_id,
        tags={**tags(package), MODEL_TAG: name}, params=dict(params[:_CHUNK]),
        model_type=package.artifact.manifest.task,
    )  # fmt: skip
    return model, str(run.info.run_id)


def _send(
    client: Any, model_id: str, package: Package, directory: Path, progress: Progress
) -> None:
    """The artifact's files from where they are, then MLflow's own; `MLmodel` last."""
    there = _sizes(client, model_id, ARTIFACT)
    with progress.task(f"uploading {package.name}", len(package.files)) as advance:
        for file in package.files:
            target = PurePosixPath(ARTIFACT, file.name)
            if not (_is_content(file) and there.get(str(target)) == file.size_bytes):
                client.log_model_artifact(model_id, str(file.path), str(target.parent))
            advance()
    own = [path for path in directory.rglob("*") if path.is_file() and path.name != ".keep"]
    for path in sorted(own, key=lambda path: (path.name == "MLmodel", path)):
        parent = path.relative_to(directory).parent.as_posix()
        client.log_model_artifact(model_id, str(path), "" if parent == "." else parent)


def _is_content(file: PackageFile) -> bool:
    return file.group.partition(":")[0] in _CONTENT_GROUPS


def _sizes(client: Any, model_id: str, path: str) -> dict[str, int]:
    """What of the artifact is there already, by its place in the logged model."""
    sizes: dict[str, int] = {}
    for info in client.list_logged_model_artifacts(model_id, path):
        if info.is_dir:
            sizes |= _sizes(client, model_id, info.path)
        else:
            sizes[str(info.path)] = int(info.file_size or 0)
    return sizes


def _record(client: Any, run_id: str, model_id: str, package: Package) -> None:
    """Metrics, parameters and plots into the run; the metrics belong to the model, too."""
    from mlflow.entities import LoggedModelOutput, Metric, Param

    now = int(time.time() * 1000)
    metrics = [
        Metric(name, value, now, 0, model_id=model_id, run_id=run_id)
        for name, value in package.metrics.items()
    ]
    params = [Param(*item) for item in stage_params(package.artifact.manifest).items()]
    for start in range(0, len(metrics), _METRICS_CHUNK):
        client.log_batch(run_id, metrics=metrics[start : start + _METRICS_CHUNK])
    for start in range(0, len(params), _CHUNK):
        client.log_batch(run_id, params=params[start : start + _CHUNK])
    for plot in package.plots:
        client.log_artifact(run_id, str(plot.path), "plots")
    client.log_outputs(run_id, [LoggedModelOutput(model_id, step=0)])


def _end(client: Any, run_id: str, status: str) -> None:
    with redirect_stdout(sys.stderr):  # where MLflow prints links to the run
        client.set_terminated(run_id, status)


def _description(package: Package) -> str:
    """A few lines; the card is in the model, as data/artifact/README.md."""
    manifest = package.artifact.manifest
    checked = f"Not validated: {package.problem}." if package.problem else "Validated."
    lines = [
        f"{manifest.source.id}: {manifest.task}, {manifest.precision}, for {manifest.target}. "
        f"{checked} The card is {ARTIFACT}/README.md.",
        *(f"- `engines/{r.directory_name}` is {bound_to(r)}" for r in package.engines),
    ]
    return "\n".join(lines)[:4000]


@contextmanager
def suppress_exists() -> Iterator[None]:
    """Goes on where what was to be made is there already."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
