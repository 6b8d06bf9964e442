"""The command run: a recipe, and sample predictions with what it made."""

from __future__ import annotations

from dataclasses import replace

from enginery.cli.app import OUTPUT, Flag, Out, Output, decode_argument
from enginery.cli.app import application as app
from enginery.core.errors import CheckFailedError


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
    """Run a recipe: make the artifact, check it, use it, and predict a few inputs with it.

    Parameters
    ----------
    recipe
        A YAML file; empty for the built-in recipe.
    model
        Another model than the recipe's.
    task
        Another task than the recipe's.
    revision
        Another Hub revision than the recipe's.
    out
        Where the artifact goes, besides the store.
    ask
        A text, or the path of an image, to predict at the end instead of the recipe's; repeat the
        option for several.
    check
        Check the recipe, the files that it names and this machine, and run nothing.
    force
        Run every stage even if its result is there.
    allow_failed
        Go on after a failed validation.
    trust_remote_code
        Run Python code that comes with the model. Only for authors you trust.
    allow_pickle
        Load pickled weights. Only for authors you trust.
    """
    from enginery.api import run_recipe
    from enginery.cli import render
    from enginery.cli.demo import builtin_inputs, predict_samples
    from enginery.predict.report import PredictReport
    from enginery.recipe import Recipe
    from enginery.recipe.checks import check_recipe
    from enginery.reports.artifact import summary_rows

    console = output.console()
    original = Recipe.load(recipe) if recipe else Recipe.default()
    plan = original.with_model(model=model, task=task, revision=revision)
    if out:
        plan = plan.changed(out=out)
    plan = replace(plan, ask=tuple(decode_argument(text, "--ask") for text in ask) or plan.ask)
    if check:
        plan = plan.trusted(trust_remote_code=trust_remote_code, allow_pickle=allow_pickle)
        check_recipe(plan)
        names = [step.stage for step in plan.steps]
        console.json({"recipe": recipe, "model": plan.model, "stages": names})
        summary = f"no mistake found; it takes {plan.model} through {', '.join(names)}"
        console.line(f"{recipe or 'the built-in recipe'}: {summary}")
        return
    result = run_recipe(
        plan,
        force=force,
        allow_failed=allow_failed,
        trust_remote_code=trust_remote_code,
        allow_pickle=allow_pickle,
        progress=console,
    )
    console.table("Made", summary_rows(result.artifact))
    console.table("Stages", render.run_rows(result))
    if console.verbose:
        for report in (stage.report for stage in result.stages if stage.report):
            render.show(console, report.lines())
    for stage in result.stages:
        if stage.output is not None:
            render.show_output(console, stage.output)
    samples = []
    if result.passed or allow_failed:
        inputs = plan.ask
        if original.ask and not inputs:  # those of the recipe are for its own model
            inputs = builtin_inputs(result.artifact, progress=console)
        samples = predict_samples(
            result.artifact, inputs, allow_failed=allow_failed, progress=console
        )
    console.table("Answers", [sample.row() for sample in samples])
    console.json(render.run_json(result, samples))
    if not result.passed:
        failed = next(stage for stage in result.stages if not stage.passed)
        marked = f"{result.artifact.path} failed its validation: {failed.failure}"
        raise CheckFailedError(failed.problem or marked)
    for stage in result.stages:
        if isinstance(stage.output, PredictReport):
            stage.output.require_answers()
