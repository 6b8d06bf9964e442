"""Upload a package to MLflow: a run, a logged model with all files, and a model version.

The version is created last, so that it never points to an incomplete model. An upload that failed
or was killed leaves a run and a logged model that no version points to.
"""

from __future__ import annotations

import os
import shutil
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import asdict
from pathlib import Path
from typing import Any

from enginery.core.artifact.fingerprint import runtime_version, sha256_of
from enginery.core.errors import ArtifactError
from enginery.core.progress import Progress
from enginery.core.scratch import temporary_directory
from enginery.core.version import __version__
from enginery.publish.card.figures import metrics
from enginery.publish.package import Package
from enginery.publish.pyfunc import PyfuncConfig
from enginery.publish.targets.mlflow.model import ARTIFACT, signature, stage_params, tags


def upload_version(client: Any, package: Package, name: str, progress: Progress) -> str:
    """Upload the package as a new version of a registered model; return the version's number.

    Args:
        client: `MlflowClient` of the current tracking URI.
        package: the package.
        name: name of the registered model, which must exist.
        progress: receives progress messages.

    Raises:
        ArtifactError: a file was changed while it was published; the message names it.
    """
    import mlflow

    with (
        progress.task(f"uploading {package.name}"),
        redirect_stdout(sys.stderr),  # MLflow prints links to the run
        mlflow.start_run(
            experiment_id=_experiment(client),
            run_name=f"publish {name}",
            nested=True,  # the caller may have an active run
        ) as run,
    ):
        mlflow.log_params(stage_params(package.artifact.manifest))
        mlflow.log_metrics(metrics(package.reports))
        for file in package.files:
            if file.path.suffix in (".svg", ".png"):
                mlflow.log_artifact(str(file.path), "plots")
        with temporary_directory("mlflow") as scratch, _no_warnings():
            model_id = _log_model(package, name, scratch)
        version = client.create_model_version(
            name,
            source=f"models:/{model_id}",
            run_id=run.info.run_id,
            model_id=model_id,
            tags=tags(package),
            description=_description(package),
        )
    return str(version.version)


def _log_model(package: Package, name: str, scratch: Path) -> str:
    """Log the package as a model of the active run; return the logged model's id.

    Args:
        package: the package.
        name: name of the registered model.
        scratch: an empty directory. MLflow copies the package beside it, before it sends it.

    Raises:
        ArtifactError: a file was changed meanwhile; the message names it.
    """
    from mlflow import pyfunc

    # The card and the listing are not in the artifact's directory. MLflow follows links.
    artifact = scratch / Path(ARTIFACT).name
    for file in package.files:
        path = artifact / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            path.symlink_to(file.path.absolute())
        except OSError:  # Windows without permission
            shutil.copyfile(file.path, path)
    model = pyfunc.log_model(
        name=name.replace(".", "-"),  # a logged model's name has no dots
        loader_module="enginery.publish.pyfunc",
        data_path=str(artifact),
        signature=signature(package.artifact.manifest),
        pip_requirements=[
            f"enginery=={__version__}",
            *(f"{key}=={value}" for key, value in runtime_version().items() if value != "none"),
        ],
        # MLflow takes only options that are named here.
        model_config=asdict(PyfuncConfig(allow_failed=bool(package.problem))),
        tags=tags(package),
        model_type=package.artifact.manifest.task,
    )
    for file in package.files:
        if sha256_of(file.path) != file.sha256:
            raise ArtifactError(
                f"{file.path} was changed while it was published.", do="Publish again."
            )
    return str(model.model_id)


@contextmanager
def ignore_existing() -> Iterator[None]:
    """Suppress MLflow's error that an object already exists."""
    from mlflow.exceptions import MlflowException

    try:
        yield
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise


def _experiment(client: Any) -> str:
    """Return the id of the experiment in MLflow's environment variables, or of `enginery`."""
    if named := os.environ.get("MLFLOW_EXPERIMENT_ID"):
        return named
    name = os.environ.get("MLFLOW_EXPERIMENT_NAME") or "enginery"
    with ignore_existing():
        client.create_experiment(name)
    return str(client.get_experiment_by_name(name).experiment_id)


def _description(package: Package) -> str:
    """Return a short description; the card is in the model, as data/artifact/README.md."""
    checked = f"Not validated: {package.problem}." if package.problem else "Validated."
    lines = [
        f"{package.description}. {checked} The card is {ARTIFACT}/README.md.",
        *(f"- `engines/{r.directory_name}` is {r.hardware_target}" for r in package.engines),
    ]
    return "\n".join(lines)[:4000]


@contextmanager
def _no_warnings() -> Iterator[None]:
    """Hide the warnings that MLflow's use of pandas and pydantic causes."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
