"""Commands that look: validate, lint, inspect, provider-options, doctor."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from enginery.cli.app import OUTPUT, Flag, Output
from enginery.cli.app import application as app
from enginery.cli.results import result_json, show_result
from enginery.core.errors import CheckFailedError, OptionError
from enginery.doctor.config import DoctorConfig
from enginery.validate.config import ValidateConfig

_DOCTOR = DoctorConfig()
_VALIDATE = ValidateConfig()


@app.command
def validate(
    artifact: Path,
    *,
    force: Flag = False,
    config: Annotated[ValidateConfig, Parameter(name="*")] = _VALIDATE,
    output: Output = OUTPUT,
) -> None:
    """Compare an artifact's outputs with PyTorch.

    Parameters
    ----------
    artifact
        The artifact's directory.
    force
        Validate although a verdict with the same options is there.
    """
    from enginery.api import validate_model
    from enginery.cli import render as show
    from enginery.core.options import options_dict

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
def lint(
    model: Path,
    *,
    target: Literal["tensorrt", "cuda"] = "tensorrt",
    output: Output = OUTPUT,
) -> None:
    """Say what TensorRT or CUDA would not take of any ONNX model, and how to mend it.

    Parameters
    ----------
    model
        An .onnx file, whoever made it, or an artifact's directory.
    target
        Who is to run it.
    """
    from enginery.api import lint_model

    console = output.console()
    reports = lint_model(model, target=target)
    console.json(result_json("lint", reports))
    show_result(console, "lint", reports)
    for report in reports:
        report.require_passed()


@app.command
def inspect(
    path: Path,
    *,
    verify: Flag = False,
    placement: Flag = False,
    graph: str = "",
    provider: str = "",
    provider_option: tuple[str, ...] = (),
    allow_fallback: bool = False,
    output: Output = OUTPUT,
) -> None:
    """Show what an artifact or an engine is, how it was made, and what was found about it.

    Parameters
    ----------
    path
        The directory of an artifact, or of one engine in it; or any .onnx file.
    verify
        Read every file again instead of trusting its size and times.
    placement
        Load the graph and show which provider runs which nodes, and what fell to the CPU.
    graph
        Which of several graphs is placed; empty for the first.
    provider
        Execution providers in order of preference, for --placement: tensorrt,cuda,cpu. Empty: what
        the variable ENGINERY_PROVIDERS says, and else cpu.
    provider_option
        An option of a provider, cuda.gpu_mem_limit=2GiB; repeat it for several.
    allow_fallback
        Take the next provider where the first cannot be had, and say so.
    """
    from enginery.core.artifact.engine_record import ENGINE_FILE

    if not placement and (provider or provider_option or allow_fallback or graph):
        named = "a graph" if graph else "a provider"
        raise OptionError(f"{named} is named, and nothing is to be placed.", do="Add --placement.")
    if (path / ENGINE_FILE).is_file():
        _inspect_engine(path, verify=verify, output=output)
        return
    from enginery.cli import render as show
    from enginery.cli import render_engines as show_engines
    from enginery.core.artifact.artifact import Artifact

    console = output.console()
    is_bare = path.suffix == ".onnx"
    if is_bare:
        from enginery.bench.target import artifact_from_onnx

        opened = artifact_from_onnx(path)
    else:
        opened = Artifact.open(path, verify=verify)
    engines = [] if is_bare else show_engines.engines_of(opened)
    found, reason = None, ""
    if placement:
        from enginery.runtime.onnxruntime.runner import OrtRunner
        from enginery.runtime.providers.specification import parse_providers

        specs = parse_providers(provider, provider_option, default="cpu")
        with (
            console.task("loading the graph"),
            OrtRunner(
                opened, graph=graph, providers=specs, allow_fallback=allow_fallback
            ) as runner,
        ):
            found, reason = runner.placement(), runner.providers[0].reason
    placed = {"placement": {**found.as_json(), "reason": reason}} if found else {}
    if is_bare:
        graphs = [record.model_dump(mode="json") for record in opened.manifest.graphs]
        console.json({"path": str(path), "graphs": graphs} | placed)
    else:
        console.json(show_engines.artifact_json(opened, engines) | placed)
        console.table(str(path), show.artifact_rows(opened))
    console.table("Inputs and outputs", show.interface_rows(opened))
    if not is_bare:
        console.table("Made by", show.stage_rows(opened))
        console.table("Files", show.file_rows(opened))
        console.table("Engines", show_engines.list_rows(engines))
    if found:
        console.table("Placement", found.rows())
        console.table("Compute on the CPU", found.node_rows())
        for note in (f"{found.head}: {reason}", *found.notes):
            console.line(note)


def _inspect_engine(path: Path, *, verify: bool, output: Output) -> None:
    from enginery.cli import render_engines as show_engines
    from enginery.core.artifact.engine import Engine

    console = output.console()
    engine = Engine.open(path, verify=verify)
    console.json(show_engines.engine_json(engine))
    console.table(str(path), show_engines.engine_rows(engine))
    console.table("Layers by kind and precision", show_engines.count_rows(engine))
    # A person sees what is multiplied; a pipe, and -v, every layer.
    every = console.verbose or not console.is_terminal
    console.table("Layers", show_engines.layer_rows(engine, every=every))


@app.command(name="provider-options")
def show_provider_options(
    artifact: Path,
    *,
    provider: str = "tensorrt",
    graph: str = "",
    profile: tuple[str, ...] = (),
    fp16: Flag = False,
    save_context: Flag = False,
    output: Output = OUTPUT,
) -> None:
    """Print ONNX Runtime's options for TensorRT to build and cache by itself, as Python or JSON.

    For Optimum and plain sessions; an engine of `enginery build` needs none. No GPU has been given
    them by this project yet.

    Parameters
    ----------
    artifact
        The artifact's directory.
    provider
        tensorrt or tensorrt-rtx.
    graph
        Which of several graphs; empty for the first.
    profile
        A profile, batch=1:8:32,sequence=8:128:512; repeat it for several. Those of the artifact's
        engines where none is named.
    fp16
        Let TensorRT 10 choose FP16 for an FP32 graph by itself.
    save_context
        Leave the engine's ONNX wrapper beside it; of the provider tensorrt alone.
    """
    import json

    from enginery.core.artifact.artifact import Artifact
    from enginery.engine.provider_options import provider_options, to_json, to_python

    console = output.console()
    options = provider_options(
        Artifact.open(artifact),
        provider,
        graph=graph,
        profiles=profile,
        fp16=fp16,
        save_context=save_context,
    )
    console.json(json.loads(to_json(provider, options)))
    console.line(to_python(provider, options).rstrip())


@app.command
def doctor(
    *, config: Annotated[DoctorConfig, Parameter(name="*")] = _DOCTOR, output: Output = OUTPUT
) -> None:
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
