"""The command line: one subcommand a stage. Parse, build the stage's options, run, print.

    $ enginery run
    $ enginery export org/name --task text-classification --out build/name
    $ enginery validate build/name --profile batch=1:8:32,sequence=8:64:128

Exit status: 0 when everything asked for is true, 1 when a check says no, 2 when it cannot be done.
"""

from __future__ import annotations

import io
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import App, CycloptsError, Parameter

from enginery import __version__
from enginery.core.errors import CheckFailedError, EngineryError, OptionError
from enginery.doctor.config import DoctorConfig
from enginery.export.config import ExportConfig
from enginery.validate.config import ValidateConfig

if TYPE_CHECKING:
    from enginery.console import Console

# Stages are imported by the command that runs them: `enginery --help` shows within a blink.


def _shown_default(value: Any) -> str | None:
    """What help says of a default; nothing of an empty text or a flag that is off."""
    return None if value in ("", False, ()) else str(value)


app = App(
    name="enginery",
    help="A Hugging Face model to a validated ONNX artifact that runs on an NVIDIA GPU.",
    version=__version__,
    default_parameter=Parameter(show_default=_shown_default),
    result_action="return_value",
    suppress_keyboard_interrupt=False,
)
store_app = App(name="store", help="Finished artifacts, by what they were made from.")
app.command(store_app)

Flag = Annotated[bool, Parameter(negative=())]
Out = Annotated[str, Parameter(name=("--out", "-o"))]


@Parameter(name="*")
@dataclass(frozen=True)
class Output:
    """How results are shown."""

    json: Flag = False
    """Print the result as one JSON document, for programs."""
    quiet: Flag = False
    """Print the result and errors alone: no news, no progress."""
    verbose: Annotated[bool, Parameter(name=("--verbose", "-v"), negative=())] = False
    """Print every detail."""

    def console(self) -> Console:
        """The console of this command."""
        from enginery.console import Console

        return Console(as_json=self.json, quiet=self.quiet, verbose=self.verbose)


Options = Annotated[ExportConfig, Parameter(name="*")]
Checks = Annotated[ValidateConfig, Parameter(name="*")]
Examination = Annotated[DoctorConfig, Parameter(name="*")]
_DOCTOR = DoctorConfig()
_EXPORT = ExportConfig()
_VALIDATE = ValidateConfig()
_OUTPUT = Output()


@app.command
def export(
    model: str,
    *,
    out: Out = "",
    force: Flag = False,
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
    if console.verbose:
        console.table("Made by", show.stage_rows(artifact))


@app.command
def validate(
    artifact: Path,
    *,
    force: Flag = False,
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
    # A person sees what is worst; a pipe, and -v, every case.
    every = console.verbose or not console.is_terminal
    for graph, rows in show.validation_tables(report, every=every).items():
        console.table(f"{graph} against PyTorch", rows)
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
    out: Out = "",
    ask: tuple[str, ...] = (),
    force: Flag = False,
    allow_failed: Flag = False,
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
        A text, or the path of an image, to answer at the end instead of the recipe's; repeat the
        option for several.
    force
        Run every stage although its result is there.
    allow_failed
        Go on after a failed validation.
    """
    from dataclasses import replace

    from enginery import show
    from enginery.ask import ask as answer
    from enginery.ask import builtin_inputs
    from enginery.pipeline import run_recipe
    from enginery.recipe import Recipe

    console = output.console()
    written = Recipe.load(recipe) if recipe else Recipe.default()
    plan = written.with_model(model=model, task=task, revision=revision)
    asked = tuple(_as_text(words) for words in ask)
    plan = replace(plan, out=out or plan.out, ask=asked or plan.ask)
    result = run_recipe(plan, force=force, allow_failed=allow_failed, progress=console)
    console.table("Made", show.made_rows(result))
    console.table("Stages", show.run_rows(result))
    for report in (stage.report for stage in result.stages if stage.report):
        for line in show.report_lines(report) if console.verbose else ():
            console.line(line)
    answers = []
    if result.passed or allow_failed:
        inputs = plan.ask
        if written.ask and not inputs:  # asked of the recipe's own model; this is another one
            inputs = builtin_inputs(result.artifact, progress=console)
        answers = answer(result.artifact, inputs, allow_failed=allow_failed, progress=console)
    console.table("Answers", [found.row() for found in answers])
    console.json(show.run_json(result, answers))
    if not result.passed:
        raise CheckFailedError(f"{result.artifact.path} failed its validation: {result.failure}")


@app.command
def inspect(artifact: Path, *, verify: Flag = False, output: Output = _OUTPUT) -> None:
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
    console.table("Made by", show.stage_rows(opened))
    console.table("Files", show.file_rows(opened))


@app.command
def doctor(*, config: Examination = _DOCTOR, output: Output = _OUTPUT) -> None:
    """Show what this machine can run, and what to install to run more."""
    from enginery.doctor.stage import examine

    console = output.console()
    report = examine(config, progress=console)
    console.json(report.as_json())
    for table in report.tables():
        rows = [dict(zip(table.columns, row, strict=True)) for row in table.rows]
        console.table(table.title, rows)
    if config.require:
        report.require(config.require)


@store_app.command(name="list")
def list_store(*, output: Output = _OUTPUT) -> None:
    """List the finished artifacts, most recently used first."""
    from enginery import show
    from enginery.core.store import Store

    console = output.console()
    entries = Store().entries()
    console.json(show.store_json(entries))
    console.table(str(Store().artifacts), show.store_rows(entries))
    if not entries:
        console.line("The store is empty.")


@store_app.command
def prune(
    *,
    max_size: str = "",
    everything: Annotated[bool, Parameter(name="--all", negative=())] = False,
    output: Output = _OUTPUT,
) -> None:
    """Remove damaged artifacts and leftovers, then the least recently used down to a size.

    Parameters
    ----------
    max_size
        How much to keep: 20GB, 512MiB.
    everything
        Keep nothing.
    """
    from enginery import show
    from enginery.console import human_bytes, parse_bytes
    from enginery.core.store import Store

    if bool(max_size) == everything:
        found = "both" if everything else "neither"
        raise OptionError(
            f"store prune: found {found} of --max-size and --all, expected one.",
            do="Say how much to keep, --max-size 20GB, or remove everything with --all.",
        )
    console = output.console()
    removed = Store().prune(max_size_bytes=0 if everything else parse_bytes(max_size))
    freed = sum(entry.size_bytes for entry in removed)
    console.json({"removed": show.store_json(removed), "freed_bytes": freed})
    console.table("Removed", show.store_rows(removed))
    console.line(f"Freed {human_bytes(freed)}." if removed else "Nothing to remove.")


@store_app.command
def path(*, output: Output = _OUTPUT) -> None:
    """Print where the store is."""
    from enginery.core.store import Store

    console = output.console()
    console.json({"path": str(Store().artifacts)})
    console.line(str(Store().artifacts))


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs one command and exits; an expected error is a message, not a traceback."""
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None:  # closed by whoever started us
            setattr(sys, name, open(os.devnull, "w", encoding="utf-8"))  # noqa: SIM115, PTH123
        # A name that the terminal's encoding lacks is shown by its number; it stops nobody.
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")
    words = list(sys.argv[1:] if arguments is None else arguments)
    sys.exit(_status(words))


def _status(words: Sequence[str]) -> int:
    """Runs one command; its exit status."""
    try:
        app(words, exit_on_error=False, print_error=False)
    except EngineryError as error:
        failure = error
    except CycloptsError as error:
        failure = OptionError(str(error), do=f"See: {_help_of(error)}")
    except OSError as error:  # a full disk, a directory that may not be written
        place = f"{error.filename}: " if error.filename else ""
        failure = EngineryError(f"{place}{error.strerror or error}.")
    except KeyboardInterrupt:
        failure = EngineryError("interrupted.")
        failure.exit_code = 130
    else:
        return 0
    with suppress(OSError):  # there may be nowhere left to say it
        Output(json="--json" in words).console().error(failure)
    return failure.exit_code


def _as_text(word: str) -> str:
    """A word of the command line as UTF-8 text, also where the locale knows ASCII alone."""
    try:
        return os.fsencode(word).decode("utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(f"--ask {word!a}: byte {error.start} is not UTF-8 text.") from error


def _help_of(error: CycloptsError) -> str:
    return " ".join(["enginery", *(error.command_chain or ()), "--help"])
