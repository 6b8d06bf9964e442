"""The command init."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from enginery.cli.app import OUTPUT, Flag, Output
from enginery.cli.app import application as app
from enginery.core.errors import EngineryError, OptionError


@app.command
def init(
    model: str,
    out: Annotated[Path, Parameter(name=("--out", "-o"))] = Path("recipe.yaml"),
    *,
    task: str = "auto",
    target: Literal["tensorrt", "cuda", "cpu"] = "tensorrt",
    data: str = "",
    column: str = "",
    label_column: str = "",
    capability: str = "portable",
    force: Flag = False,
    output: Output = OUTPUT,
) -> None:
    """Write a recipe for a model and a target, with comments: all stages from model to registry.

    Parameters
    ----------
    model
        A Hub id (org/name or org/name@revision), a directory, an .onnx file or package:NAME.
    out
        The recipe's file.
    task
        The model's task; `auto` reads it from the model's class.
    target
        What runs the model: TensorRT, ONNX Runtime on CUDA, or ONNX Runtime on the CPU.
    data
        Inputs like those of your users: a CSV, TSV, JSONL, Parquet or text file, or a folder of
        images. With them, the recipe for TensorRT has INT8.
    column
        Column of the data with the texts; empty for `text`.
    label_column
        Column of the data with the correct labels, to measure accuracy.
    capability
        GPUs that engines are built for: compute capabilities such as `8.9`; `current`, this
        machine's; or `portable`, every GPU from Ampere (8.0) on.
    force
        Replace an existing file.
    """
    from enginery.core.temporary import write_atomically
    from enginery.recipe import Recipe
    from enginery.recipe.checks import check_recipe
    from enginery.recipe.draft import DraftOptions, draft_recipe

    console = output.console()
    if out.exists() and not force:
        raise OptionError(
            f"{out} exists already.", do="Name another file, or replace it: --force", option="out"
        )
    text = draft_recipe(
        model,
        out,
        DraftOptions(
            task=task,
            target=target,
            data=data,
            column=column,
            label_column=label_column,
            capability=capability,
        ),
    )
    recipe = Recipe.parse(text, str(out), base=out.parent)
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, text.encode())
    stages = [step.stage for step in recipe.steps]
    console.line(f"wrote {out}: {', '.join(stages)}")
    problem = ""
    try:
        check_recipe(recipe)
    except EngineryError as error:
        problem = str(error)
    console.line(f"fix before it runs: {problem}" if problem else f"next: enginery run {out}")
    console.json({"recipe": str(out), "stages": stages, "problem": problem})
