"""The command line: one subcommand a stage. Parse, build the stage's options, run, print.

    $ enginery run
    $ enginery export org/name --task text-classification --out build/name
    $ enginery validate build/name --profile batch=1:8:32,sequence=8:64:128

Exit status: 0 when everything asked for is true, 1 when a check says no, 2 when it cannot be done.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import App, Parameter

from enginery import __version__
from enginery.core.errors import CheckFailedError, EngineryError
from enginery.export.config import ExportConfig
from enginery.validate.config import ValidateConfig

if TYPE_CHECKING:
    from enginery.console import Console

# Stages are imported by the command that runs them: `enginery --help` shows within a blink.

app = App(
    name="enginery",
    help="A Hugging Face model to a validated ONNX artifact that runs on an NVIDIA GPU.",
    version=__version__,
)
store_app = App(name="store", help="Finished artifacts, by what they were made from.")
app.command(store_app)


@Parameter(name="*")
@dataclass(frozen=True)
class Output:
    """How results are shown."""

    json: bool = False
    """Print the result as JSON, for programs."""
    quiet: bool = False
    """Print the result and errors alone: no news, no progress."""
    verbose: Annotated[bool, Parameter(name=("--verbose", "-v"))] = False
    """Print every detail."""

    def console(self) -> Console:
        """The console of this command."""
        from enginery.console import Console

        return Console(as_json=self.json, quiet=self.quiet, verbose=self.verbose)


Options = Annotated[ExportConfig, Parameter(name="*")]
Checks = Annotated[ValidateConfig, Parameter(name="*")]
_EXPORT = ExportConfig()
_VALIDATE = ValidateConfig()
_OUTPUT = Output()


@app.command
def export(
    model: str,
    *,
    out: Annotated[str, Parameter(name=("--out", "-o"))] = "",
    force: bool = False,
    config: Options = _EXPORT,
    output: Output = _OUTPUT,
) -> None:
    """Export a model to an ONNX artifact.

    Parameters
    ----------
    model
        A Hub id (org/name or org/name@revision), a directory, an .onnx file or package:NAME.
    out
        Where the artifact goes; empty for the store.
    force
        Export although a finished artifact is there.
    """
    from enginery import show
    from enginery.core.options import options_dict
    from enginery.pipeline import export_model

    console = output.console()
    artifact = export_model(model, out=out, force=force, progress=console, **options_dict(config))
    console.json(show.artifact_json(artifact))
    console.table(f"Exported to {artifact.path}", show.artifact_rows(artifact))


@app.command
def validate(
    artifact: Path,
    *,
    force: bool = False,
    config: Checks = _VALIDATE,
    output: Output = _OUTPUT,
) -> None:
    """Compare an artifact's outputs with PyTorch.

    Parameters
    ----------
    artifact
        The artifact's directory.
    force
        Validate although a verdict with the same options is there.
    """
    from enginery import show
    from enginery.core.options import options_dict
    from enginery.pipeline import validate_model

    console = output.console()
    report = validate_model(artifact, force=force, progress=console, **options_dict(config))
    console.json(show.report_json(report))
    console.table(f"{artifact} against PyTorch", report.rows())
    for line in show.report_lines(report):
        console.line(line)
    if not report.passed:
        raise CheckFailedError(f"{artifact} failed its validation: {report.summary}")


@app.command
def run(
    recipe: str = "",
    *,
    model: str = "",
    task: str = "",
    revision: str = "",
    out: Annotated[str, Parameter(name=("--out", "-o"))] = "",
    ask: tuple[str, ...] = (),
    force: bool = False,
    allow_failed: bool = False,
    output: Output = _OUTPUT,
) -> None:
    """Run a recipe: make the artifact, check it, answer a few inputs with it.

    Parameters
    ----------
    recipe
        A YAML file; the built-in recipe where none is named.
    model
        Another model than the recipe's.
    task
        Another task than the recipe's.
    revision
        Another Hub revision than the recipe's.
    out
        Where the artifact goes, besides the store.
    ask
        Texts to answer at the end, instead of the recipe's.
    force
        Run every stage although its result is there.
    allow_failed
        Go on after a failed validation.
    """
    from dataclasses import replace

    from enginery import show
    from enginery.ask import ask as answer
    from enginery.pipeline import run_recipe
    from enginery.recipe import Recipe

    console = output.console()
    plan = Recipe.load(recipe) if recipe else Recipe.default()
    plan = plan.with_model(model=model, task=task, revision=revision)
    plan = replace(plan, out=out or plan.out, ask=ask or plan.ask)
    result = run_recipe(plan, force=force, allow_failed=allow_failed, progress=console)
    answers = answer(
        result.artifact, plan.ask, allow_failed=allow_failed or not result.passed, progress=console
    )
    console.json(show.run_json(result, answers))
    console.table("Made", show.run_rows(result))
    console.table("Answers", answers)
    if not result.passed:
        failed = [s.report.summary for s in result.stages if s.report and not s.report.passed]
        raise CheckFailedError(f"{result.artifact.path} failed its validation: {failed[0]}")


@app.command
def inspect(artifact: Path, *, verify: bool = False, output: Output = _OUTPUT) -> None:
    """Show what an artifact is, how it was made, and what was found about it.

    Parameters
    ----------
    artifact
        The artifact's directory.
    verify
        Read every file again instead of trusting its size and times.
    """
    from enginery import show
    from enginery.core.artifact import Artifact

    console = output.console()
    opened = Artifact.open(artifact, verify=verify)
    console.json(show.artifact_json(opened))
    console.table(str(artifact), show.artifact_rows(opened))
    console.table("Inputs and outputs", show.interface_rows(opened))
    console.table("Stages", show.stage_rows(opened))
    console.table("Files", show.file_rows(opened))


@app.command
def doctor(*, require: str = "", output: Output = _OUTPUT) -> None:
    """Show what this machine can run, and what to install to run more.

    Parameters
    ----------
    require
        A provider that must be able to run; if it cannot, the exit status is 1.
    """
    from enginery.doctor.config import DoctorConfig
    from enginery.doctor.stage import examine

    console = output.console()
    report = examine(DoctorConfig(require=require), progress=console)
    console.json(report.as_json())
    for table in report.tables():
        rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        console.table(table.title, rows)
    if require:
        report.require(require)


@store_app.command(name="list")
def list_store(*, output: Output = _OUTPUT) -> None:
    """List the finished artifacts, most recently used first."""
    from enginery import show
    from enginery.core.store import Store

    console = output.console()
    rows = show.store_rows(Store().entries())
    console.json(rows)
    console.table(str(Store().artifacts), rows)
    if not rows:
        console.line("The store is empty.")


@store_app.command
def prune(*, max_size: str = "0", output: Output = _OUTPUT) -> None:
    """Remove damaged artifacts and leftovers, then the least recently used down to a size.

    Parameters
    ----------
    max_size
        How much to keep: 20GB, 512MiB; 0 removes everything.
    """
    from enginery import show
    from enginery.console import parse_bytes
    from enginery.core.store import Store

    console = output.console()
    removed = Store().prune(max_size_bytes=parse_bytes(max_size))
    rows = show.store_rows(removed)
    console.json(rows)
    console.table("Removed", rows)
    if not rows:
        console.line("Nothing to remove.")


@store_app.command
def path(*, output: Output = _OUTPUT) -> None:
    """Print where the store is."""
    from enginery.core.store import Store

    console = output.console()
    console.json({"path": str(Store().artifacts)})
    console.line(str(Store().artifacts))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits; an expected error is a message, not a traceback."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        app(words)
    except EngineryError as error:
        Output(json="--json" in words).console().error(str(error))
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        sys.exit(130)
    except BrokenPipeError:
        sys.stderr.close()  # the reader went away, as `head` does; Python would complain at exit
        sys.exit(0)
