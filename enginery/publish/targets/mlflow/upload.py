"""Upload a package to MLflow: a run, a logged model with all files, and a model version.

The version is created last, so that it never points to an incomplete model. MLflow cannot resume an
upload: the run and the model of a failed or killed upload are deleted, and `mlflow gc` frees their
space.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import socket
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout, suppress
from dataclasses import asdict
from pathlib import PurePosixPath
from typing import Any

from enginery.core.artifact.fingerprint import runtime_version
from enginery.core.home import enginery_home
from enginery.core.progress import Progress
from enginery.core.temporary import temporary_directory
from enginery.core.version import __version__
from enginery.publish.package import Package
from enginery.publish.publication import CARD
from enginery.publish.pyfunc import PyfuncConfig
from enginery.publish.targets.mlflow.model import (
    ARTIFACT,
    CONTENT_TAG,
    checks_its_inputs,
    input_example,
    let_loader_check_inputs,
    signature,
    stage_params,
    tags,
)

MODEL_TAG = "enginery.registered_model"
"""Registered model of a logged model; the same content may be published to several."""
WRITER_TAG = "enginery.writer"
"""Digest of the machine and the home of the process that writes a run."""
_SOURCE = "models:/"


def upload_version(client: Any, package: Package, name: str, progress: Progress) -> str:
    """Upload the package as a new version of a registered model; return the version's number.

    Args:
        client: `MlflowClient` of the current tracking URI.
        package: the package.
        name: name of the registered model, which must exist. The caller holds this machine's lock
            for the package's content on this server.
        progress: receives the number of uploaded files.
    """
    import mlflow
    from mlflow.entities import LoggedModelOutput

    experiment_id = _experiment(client)
    _delete_interrupted_uploads(client, experiment_id, package, name)
    marks = {**tags(package), MODEL_TAG: name}
    params = stage_params(package.artifact.manifest)
    with (
        redirect_stdout(sys.stderr),  # MLflow prints links to the run
        mlflow.start_run(
            experiment_id=experiment_id,
            run_name=f"publish {name}",
            nested=True,  # the caller may have an active run
            tags={**marks, WRITER_TAG: _writer()},
        ) as run,
    ):
        model = mlflow.initialize_logged_model(
            name=name.replace(".", "-"),  # a logged model's name has no dots
            experiment_id=experiment_id,
            tags=marks,
            params=params,
            model_type=package.artifact.manifest.task,
        )
        try:
            client.log_outputs(run.info.run_id, [LoggedModelOutput(model.model_id, step=0)])
            mlflow.log_params(params)
            mlflow.log_metrics(package.metrics, model_id=model.model_id)
            for plot in package.plots:
                mlflow.log_artifact(str(plot.path), "plots")
            _upload(client, model.model_id, run.info.run_id, package, progress)
            mlflow.finalize_logged_model(model.model_id, "READY")
            model_version = client.create_model_version(
                name,
                source=f"{_SOURCE}{model.model_id}",
                run_id=run.info.run_id,
                model_id=model.model_id,
                tags=tags(package),
                description=_description(package),
            )
        except BaseException:
            with suppress(Exception):  # the first error is raised
                client.delete_logged_model(model.model_id)
            raise
    return str(model_version.version)


def repair_version(client: Any, package: Package, version: Any, progress: Progress) -> None:
    """Upload model files again that a version with the same content has lost or has incompletely.

    Only sizes are compared, so that nothing is downloaded. Card and reports are not replaced.
    """
    if not version.source.startswith(_SOURCE):
        return
    model_id = version.source.removeprefix(_SOURCE)
    stored_sizes = dict(_file_sizes(client, model_id, ARTIFACT))
    for file in package.files:
        path = PurePosixPath(ARTIFACT, file.name)
        is_content = file.name in package.artifact.manifest.files
        if is_content and stored_sizes.get(str(path)) != file.size_bytes:
            progress.say(
                f"publish: uploading {file.name} again, version {version.version} has lost it"
            )
            client.log_model_artifact(model_id, str(file.path), str(path.parent))


@contextmanager
def ignore_existing() -> Iterator[None]:
    """Suppress MLflow's error that an object already exists."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _upload(client: Any, model_id: str, run_id: str, package: Package, progress: Progress) -> None:
    """Upload the package's files from where they are, then MLflow's own files.

    `pyfunc.log_model` does both with one call, but it first copies the whole artifact into a
    temporary directory, and it loads and runs the model to test the input example, which cannot be
    switched off. So `save_model` gets only the card, in a directory with the artifact's name.
    """
    from mlflow import pyfunc
    from mlflow.models import Model

    with progress.task(f"uploading {package.name}", len(package.files)) as advance:
        for file in package.files:
            path = PurePosixPath(ARTIFACT, file.name)
            client.log_model_artifact(model_id, str(file.path), str(path.parent))
            advance()
    versions = runtime_version()
    with temporary_directory("mlflow") as scratch, _no_warnings():
        artifact = scratch / PurePosixPath(ARTIFACT).name
        artifact.mkdir()
        card = next(file.path for file in package.files if file.name == CARD)
        shutil.copyfile(card, artifact / CARD)
        pyfunc.save_model(
            path=str(scratch / "model"),
            loader_module="enginery.publish.pyfunc",
            data_path=str(artifact),
            mlflow_model=Model(model_id=model_id, run_id=run_id),
            signature=signature(package.artifact.manifest),
            input_example=input_example(package),
            pip_requirements=[
                f"enginery=={__version__}",
                *(f"{name}=={version}" for name, version in versions.items() if version != "none"),
            ],
            # MLflow takes only options that are named here.
            model_config=asdict(PyfuncConfig(allow_failed=bool(package.problem))),
            metadata=tags(package),
        )
        if checks_its_inputs(package.artifact.manifest):
            let_loader_check_inputs(scratch / "model" / "MLmodel")
        client.log_model_artifacts(model_id, str(scratch / "model"))


def _experiment(client: Any) -> str:
    """Return the id of the experiment in MLflow's environment variables, or of `enginery`."""
    if named := os.environ.get("MLFLOW_EXPERIMENT_ID"):
        return named
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "enginery"
    with ignore_existing():
        client.create_experiment(name)
    return str(client.get_experiment_by_name(name).experiment_id)


def _delete_interrupted_uploads(
    client: Any, experiment_id: str, package: Package, name: str
) -> None:
    """Delete the runs and logged models of this content whose upload was killed on this machine.

    The caller holds the lock for the content, so no process of this machine writes to a run that
    MLflow still lists as running.
    """
    criteria = {
        f"tags.`{CONTENT_TAG}`": package.content_sha256,
        f"tags.`{MODEL_TAG}`": name,
        f"tags.`{WRITER_TAG}`": _writer(),
        "attributes.status": "RUNNING",
    }
    conditions = " AND ".join(f"{field} = '{value}'" for field, value in criteria.items())
    for run in client.search_runs([experiment_id], conditions):
        if run.outputs:
            for output in run.outputs.model_outputs:
                client.delete_logged_model(output.model_id)
        client.delete_run(run.info.run_id)


def _writer() -> str:
    """Return a digest of the machine and the home; processes with the same one share locks."""
    return hashlib.sha256(f"{socket.gethostname()}:{enginery_home()}".encode()).hexdigest()


def _file_sizes(client: Any, model_id: str, path: str) -> Iterator[tuple[str, int]]:
    """Yield path and size in bytes of the files of a logged model below a path."""
    for info in client.list_logged_model_artifacts(model_id, path):
        if info.is_dir:
            yield from _file_sizes(client, model_id, info.path)
        else:
            yield str(info.path), int(info.file_size or 0)


def _description(package: Package) -> str:
    """Return a short description; the card is in the model, as data/artifact/README.md."""
    manifest = package.artifact.manifest
    checked = f"Not validated: {package.problem}." if package.problem else "Validated."
    lines = [
        f"{manifest.source.id}: {manifest.task}, {manifest.describe_precision()}, "
        f"for {manifest.target}. {checked} The card is {ARTIFACT}/README.md.",
        *(f"- `engines/{r.directory_name}` is {r.hardware_target}" for r in package.engines),
    ]
    return "\n".join(lines)[:4000]


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Hide the warnings that MLflow's use of pandas and pydantic causes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
