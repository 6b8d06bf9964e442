"""The commands publish and pull."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from enginery.cli.app import OUTPUT, Flag, Output
from enginery.cli.app import application as app
from enginery.publish.config import PublishConfig

_DEFAULT = PublishConfig()


@app.command(usage="enginery publish [OPTIONS] ARTIFACT [ARTIFACT...] URL")
def publish(
    artifact: Path,
    /,
    *url: Annotated[str, Parameter(required=True)],
    config: Annotated[PublishConfig, Parameter(name="*")] = _DEFAULT,
    output: Output = OUTPUT,
) -> None:
    """Publish an artifact with a model card: to a folder, MLflow, the Hub or an OCI registry.

    Every file is read and checked first. Publishing the same content again gives the same version.

    Parameters
    ----------
    artifact
        The artifact's directory. With --layout hub, artifacts of the same model in other precisions
        may follow.
    url
        The registry: file:///path or a plain path, mlflow:/name, hf://org/name or
        hf://org/name@branch, oci://registry/name or oci://registry/name:tag.
    """
    from enginery.api import publish_model
    from enginery.cli.render import show

    console = output.console()
    *variants, address = url
    published = publish_model(artifact, address, variants=variants, progress=console, config=config)
    console.json(published.as_json())
    show(console, published.rows())


@app.command
def pull(
    url: str, out: Path, *, variant: str = "", insecure: Flag = False, output: Output = OUTPUT
) -> None:
    """Fetch a published artifact, and check every byte of it against its listing.

    Parameters
    ----------
    url
        The address that `publish` printed; also with an alias, NAME@production, except in a folder,
        or without a version for the newest: the branch main for hf://, the tag latest for oci://.
    out
        Where the artifact goes. An artifact that is there is replaced.
    variant
        One of several artifacts that were published together in the layout hub: fp32, fp16,
        quantized, … It becomes the artifact that it was. Without it, the whole version is written.
    insecure
        Use plain HTTP for an OCI registry.
    """
    from enginery.api import pull_model
    from enginery.cli.render import artifact_json

    console = output.console()
    artifact = pull_model(url, out, variant=variant, insecure=insecure, progress=console)
    manifest = artifact.manifest
    console.json(artifact_json(artifact))
    console.line(
        f"wrote {artifact.path}: {manifest.task}, {manifest.describe_precision()}, "
        "every file checked"
    )
