"""The command predict."""

from __future__ import annotations

from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Annotated

from cyclopts import Parameter

from enginery.cli.app import OUTPUT, Flag, Output
from enginery.cli.app import application as app
from enginery.core.errors import OptionError
from enginery.core.scratch import temporary_directory
from enginery.predict.config import PredictConfig

_DEFAULT = PredictConfig()


@app.command
def predict(
    artifact: str,
    *,
    # - is standard input. The other commands call their rows --data.
    input: Annotated[  # noqa: A002  it is the option's name
        str, Parameter(name=("--input", "-i", "--data"), allow_leading_hyphen=True)
    ],
    out: Annotated[Path, Parameter(name=("--out", "-o"), allow_leading_hyphen=True)],
    force: Flag = False,
    config: Annotated[PredictConfig, Parameter(name="*")] = _DEFAULT,
    output: Output = OUTPUT,
) -> None:
    """Predict every row of a file: CSV, TSV, JSONL, Parquet, text lines, or a folder of files.

    Parameters
    ----------
    artifact
        The artifact's directory; or a model, as for `export`, which is exported and validated on
        its first use.
    input
        The file, a folder of images or audio, or - for standard input. For .npz, also arrays of
        the graph's own inputs: .npz, .npy or a folder of .npz files.
    out
        Where the results go: a .parquet, .csv or .jsonl file, or .npz for the graph's own outputs.
        - prints JSON lines to standard output when all rows are done.
    force
        Start again even if there is a finished or a half-finished output.
    """
    from enginery.api import predict_file
    from enginery.cli.render import show
    from enginery.first_use import open_or_make
    from enginery.predict.stage import require_input

    console = output.console()
    require_input(input)  # before a model is exported, which may take minutes
    opened = open_or_make(artifact, progress=console)
    with ExitStack() as stack:
        if str(out) == "-":
            if output.json:
                raise OptionError(
                    "option 'json' would print the report among the predictions.",
                    do="Leave it out, or name a file: --out answers.jsonl",
                    option="json",
                )
            out = stack.enter_context(temporary_directory("predict")) / "answers.jsonl"
            report = predict_file(opened, input, out, progress=console, config=config)
            console.json_lines(out)
            report = replace(report, output="the output")
        else:
            report = predict_file(opened, input, out, force=force, progress=console, config=config)
            console.json(report.as_json())
            show(console, report.rows())
    report.require_answers()
