"""The command init."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from cyclopts import Parameter

from enginery.cli.app import OUTPUT, Flag, Output
from enginery.cli.app import application as app
from enginery.core.errors import EngineryError, OptionError

if TYPE_CHECKING:
    from enginery.cli.console import Console
    from enginery.recipe.draft import DraftOptions


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
    held_out: str = "",
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
    held_out
        A file like the data to measure on, which calibrates nothing. Without it, and with labels,
        init splits the rows of a file into two Parquet files beside the recipe.
    capability
        GPUs that engines are built for: compute capabilities such as `8.9`; `current`, this
        machine's; or `portable`, every GPU from Ampere (8.0) on.
    force
        Replace an existing file.
    """
    from enginery.core.scratch import write_atomically
    from enginery.recipe import Recipe
    from enginery.recipe.checks import check_recipe
    from enginery.recipe.draft import DraftOptions, draft_recipe

    console = output.console()
    if out.exists() and not force:
        raise OptionError(
            f"{out} exists already.", do="Name another file, or replace it: --force", option="out"
        )
    options = DraftOptions(
        task=task,
        target=target,
        data=data,
        column=column,
        label_column=label_column,
        held_out=held_out,
        capability=capability,
    )
    draft_recipe(model, out, options)  # its errors come before a file is written
    out.parent.mkdir(parents=True, exist_ok=True)
    if label_column and not held_out and Path(data).expanduser().is_file():
        options = _split(options, out, console, force=force)
    text = draft_recipe(model, out, options)
    recipe = Recipe.parse(text, str(out), base=out.parent)
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


def _split(options: DraftOptions, recipe: Path, console: Console, *, force: bool) -> DraftOptions:
    """Split the rows into two files beside the recipe; return the options that name them."""
    from enginery.recipe.held_out import split_rows

    calibrating, held_out = (
        recipe.with_name(f"{recipe.stem}-{name}.parquet") for name in ("calibration", "held-out")
    )
    for path in (calibrating, held_out):
        if path.exists() and not force:
            raise OptionError(
                f"{path} exists already.", do="Replace it: --force. Or name your own: --held-out"
            )
    rows = split_rows(Path(options.data).expanduser(), calibrating, held_out)
    if rows is None:
        console.say("init: there are too few rows to hold some out")
        return options
    console.line(f"wrote {held_out}: {rows[1]:,} rows to measure on, which calibrate nothing")
    console.line(f"wrote {calibrating}: the other {rows[0]:,} rows")
    return replace(options, data=str(calibrating), held_out=str(held_out))
