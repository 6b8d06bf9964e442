"""Commands that make artifacts: export, optimize, quantize, build, and a recipe of them all."""

from __future__ import annotations

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from enginery.cli.app import OUTPUT, Flag, Out, Output
from enginery.cli.app import application as app
from enginery.cli.results import require_answers, result_json, show_result
from enginery.core.errors import CheckFailedError, OptionError
from enginery.engine.config import BuildConfig
from enginery.export.config import ExportConfig
from enginery.optimize.config import OptimizeConfig
from enginery.quantize.config import QuantizeConfig

if TYPE_CHECKING:
    from enginery.cli.console import Console
    from enginery.core.artifact.artifact import Artifact

_EXPORT = ExportConfig()
_OPTIMIZE = OptimizeConfig()
_QUANTIZE = QuantizeConfig()
_BUILD = BuildConfig()


@app.command
def export(
    model: str,
    *,
    out: Out = "",
    force: Flag = False,
    config: Annotated[ExportConfig, Parameter(name="*")] = _EXPORT,
    output: Output = OUTPUT,
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
    from enginery.api import export_model
    from enginery.cli import render as show
    from enginery.core.options import options_dict

    console = output.console()
    artifact = export_model(model, out=out, force=force, progress=console, **options_dict(config))
    console.json(show.artifact_json(artifact))
    console.table(f"Exported to {artifact.path}", show.artifact_rows(artifact))
    if console.verbose:
        console.table("Made by", show.stage_rows(artifact))


@app.command
def optimize(
    artifact: Path,
    *,
    out: Out = "",
    force: Flag = False,
    allow_failed: Flag = False,
    config: Annotated[OptimizeConfig, Parameter(name="*")] = _OPTIMIZE,
    output: Output = OUTPUT,
) -> None:
    """Make an artifact ready for CUDA, TensorRT or the CPU: fusions, FP16 or BF16.

    Parameters
    ----------
    artifact
        The directory of an FP32 artifact.
    out
        Where the new artifact goes; empty for the store.
    force
        Optimize although a finished artifact is there.
    allow_failed
        Take an artifact whose validation failed.
    """
    from enginery.api import optimize_model
    from enginery.core.options import options_dict

    console = output.console()
    made = optimize_model(
        artifact,
        out=out,
        force=force,
        allow_failed=allow_failed,
        progress=console,
        **options_dict(config),
    )
    _show_made(console, made, "Optimized")
    verdict = made.manifest.verdict("optimize")
    if verdict and not verdict.passed:
        raise CheckFailedError(f"{made.path}: {verdict.summary}")


@app.command
def quantize(
    artifact: Path,
    *,
    out: Out = "",
    force: Flag = False,
    config: Annotated[QuantizeConfig, Parameter(name="*")] = _QUANTIZE,
    output: Output = OUTPUT,
) -> None:
    """Make an artifact INT8 or FP8 for TensorRT, within an accuracy budget.

    Parameters
    ----------
    artifact
        The directory of an FP32 artifact that no other stage has changed.
    out
        Where the new artifact goes; empty for the store.
    force
        Quantize although a finished artifact is there.
    """
    from enginery.api import quantize_model
    from enginery.core.options import options_dict

    console = output.console()
    options = options_dict(config)
    calibration = options.pop("calibration")
    made = quantize_model(artifact, calibration, out=out, force=force, progress=console, **options)
    _show_made(console, made, "Quantized")


@app.command
def build(
    artifact: Path,
    *,
    out: Out = "",
    force: Flag = False,
    config: Annotated[BuildConfig, Parameter(name="*")] = _BUILD,
    output: Output = OUTPUT,
) -> None:
    """Build TensorRT engines of an artifact's graphs, for named GPUs and shapes.

    With TensorRT for RTX no GPU is needed. No engine has been run on a GPU by this project yet.

    Parameters
    ----------
    artifact
        The artifact's directory.
    out
        Where the artifact with the engines goes; the artifact's own directory adds them to it.
        Empty for the store.
    force
        Build although the engines are there.
    """
    from enginery.api import build_engine
    from enginery.cli import render_engines as show_engines
    from enginery.core.options import options_dict

    console = output.console()
    made = build_engine(artifact, out=out, force=force, progress=console, **options_dict(config))
    engines = show_engines.engines_of(made)
    console.json(show_engines.artifact_json(made, engines))
    console.table(f"Engines in {made.path}", show_engines.list_rows(engines))
    for note in show_engines.build_notes(made):
        console.line(f"note: {note}")


@app.command
def run(
    recipe: str = "",
    *,
    model: str = "",
    task: str = "",
    revision: str = "",
    out: Out = "",
    ask: tuple[str, ...] = (),
    check: Flag = False,
    force: Flag = False,
    allow_failed: Flag = False,
    trust_remote_code: Flag = False,
    allow_pickle: Flag = False,
    output: Output = OUTPUT,
) -> None:
    """Run a recipe: make the artifact, check it, use it, answer a few inputs with it.

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
    check
        Check the recipe, the files that it names and this machine, and run nothing.
    force
        Run every stage although its result is there.
    allow_failed
        Go on after a failed validation.
    trust_remote_code
        Run Python code that comes with the model. Only for authors you trust.
    allow_pickle
        Load pickled weights. Only for authors you trust.
    """
    from dataclasses import replace

    from enginery.api import run_recipe
    from enginery.cli import render as show
    from enginery.cli.demo import ask as answer
    from enginery.cli.demo import builtin_inputs
    from enginery.recipe import Recipe
    from enginery.recipe.checks import check_recipe

    console = output.console()
    written = Recipe.load(recipe) if recipe else Recipe.default()
    plan = written.with_model(model=model, task=task, revision=revision)
    asked = tuple(_as_text(words) for words in ask)
    if out:
        plan = plan.changed(out=out)
    plan = replace(plan, ask=asked or plan.ask)
    if check:
        plan = plan.trusted(trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
        check_recipe(plan)
        stages = [step.stage for step in plan.steps]
        console.json({"recipe": recipe, "model": plan.model, "stages": stages})
        name = recipe or "the built-in recipe"
        console.line(f"{name}: no mistake found; it takes {plan.model} through {', '.join(stages)}")
        return
    result = run_recipe(
        plan,
        force=force,
        allow_failed=allow_failed,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
        progress=console,
    )
    console.table("Made", show.made_rows(result))
    console.table("Stages", show.run_rows(result))
    for report in (stage.report for stage in result.stages if stage.report):
        for line in show.report_lines(report) if console.verbose else ():
            console.line(line)
    for stage in result.stages:
        show_result(console, stage.stage, stage.made)
    answers = []
    if result.passed or allow_failed:
        inputs = plan.ask
        if written.ask and not inputs:  # asked of the recipe's own model; this is another one
            inputs = builtin_inputs(result.artifact, progress=console)
        answers = answer(result.artifact, inputs, allow_failed=allow_failed, progress=console)
    console.table("Answers", [found.row() for found in answers])
    made = [result_json(stage.stage, stage.made) for stage in result.stages]
    console.json(show.run_json(result, answers, made))
    if not result.passed:
        failed = next(stage for stage in result.stages if not stage.passed)
        marked = f"{result.artifact.path} failed its validation: {failed.failure}"
        raise CheckFailedError(failed.problem or marked)
    for stage in result.stages:
        if stage.stage == "predict":
            require_answers(stage.made)


def _show_made(console: Console, artifact: Artifact, done: str) -> None:
    from enginery.cli import render as show

    console.json(show.artifact_json(artifact))
    console.table(f"{done} to {artifact.path}", show.artifact_rows(artifact))
    console.table("Made by", show.stage_rows(artifact)[-1:])


def _as_text(word: str) -> str:
    """A word of the command line as UTF-8 text, also where the locale knows ASCII alone."""
    try:
        return os.fsencode(word).decode("utf-8")
    except UnicodeDecodeError as error:
        raise OptionError(f"--ask {word!a}: byte {error.start} is not UTF-8 text.") from error
