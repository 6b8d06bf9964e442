"""The commands for registries: publish, pull."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from enginery.cli.app import OUTPUT, Flag, Output
from enginery.cli.app import application as app
from enginery.cli.results import result_json, show_result
from enginery.publish.config import PublishConfig

_PUBLISH = PublishConfig()


@app.command
def publish(
    artifact: Path,
    url: str,
    *,
    config: Annotated[PublishConfig, Parameter(name="*")] = _PUBLISH,
    output: Output = OUTPUT,
) -> None:
    """Publish an artifact with a model card: to a folder, MLflow, the Hub or an OCI registry.

    Every file is read and checked first. The same content is the same version, however often.

    Parameters
    ----------
    artifact
        The artifact's directory.
    url
        The registry: file:///path or a plain path, mlflow:/name, hf://org/name or
        hf://org/name@branch, oci://registry/name or oci://registry/name:tag.
    """
    from enginery.api import publish_model
    from enginery.core.options import options_dict

    console = output.console()
    published = publish_model(artifact, url, progress=console, **options_dict(config))
    console.json(result_json("publish", published))
    show_result(console, "publish", published)


@app.command
def pull(url: str, out: Path, *, insecure: Flag = False, output: Output = OUTPUT) -> None:
    """Fetch a published artifact, and read every byte of it against its listing.

    Parameters
    ----------
    url
        What `publish` printed; also with an alias, NAME@production, or without a version for the
        newest: for hf:// that is the branch main, for oci:// the tag latest.
    out
        Where the artifact goes. An artifact that is there is replaced.
    insecure
        Talk plain HTTP to an OCI registry.
    """
    from enginery.api import pull_model

    console = output.console()
    artifact = pull_model(url, out, insecure=insecure, progress=console)
    manifest = artifact.manifest
    console.json({"path": str(artifact.path), **manifest.model_dump(mode="json")})
    console.line(
        f"wrote {artifact.path}: {manifest.task}, {manifest.precision}, every file checked"
    )
