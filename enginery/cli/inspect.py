"""The command inspect."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, cast

from enginery.cli.app import OUTPUT, Flag, Output
from enginery.cli.app import application as app
from enginery.core.errors import OptionError

if TYPE_CHECKING:
    from enginery.reports.placement import PlacementRecord


@app.command
def inspect(
    path: Path,
    *,
    verify: Flag = False,
    placement: Flag = False,
    graph: str = "",
    providers: str = "",
    provider_option: tuple[str, ...] = (),
    allow_fallback: bool = False,
    output: Output = OUTPUT,
) -> None:
    """Show what an artifact or an engine is, how it was made, and the verdicts on it.

    Parameters
    ----------
    path
        The directory of an artifact, or of one engine in it; or any .onnx file.
    verify
        Hash every file again instead of trusting its size and times.
    placement
        Load the graph and show which provider runs which nodes, and which fell back to the CPU.
    graph
        With --placement, one of several graphs; empty for the first.
    providers
        Execution providers in order of preference, for --placement: tensorrt,cuda,cpu; or a YAML
        or JSON file of them. Empty: the value of the variable ENGINERY_PROVIDERS, or cpu.
    provider_option
        An option of a provider, cuda.gpu_mem_limit=2GiB; repeat it for several.
    allow_fallback
        Use the next provider if the first is unavailable, and say so.
    """
    from enginery.core.artifact.engine_record import ENGINE_FILE

    if not placement and (providers or provider_option or allow_fallback or graph):
        option = "--graph" if graph else "a provider"
        raise OptionError(f"{option} was given without --placement.", do="Add --placement.")
    if (path / ENGINE_FILE).is_file():
        _inspect_engine(path, verify=verify, output=output)
        return
    from enginery.cli import render
    from enginery.core.artifact.artifact import Artifact
    from enginery.reports.artifact import artifact_rows, file_rows, interface_rows
    from enginery.reports.engines import built_engine, engine_rows
    from enginery.reports.placement import fallback_rows, provider_rows

    console = output.console()
    is_bare = path.suffix == ".onnx"
    if is_bare:
        from enginery.bench.target import artifact_from_onnx

        opened = artifact_from_onnx(path)
    else:
        opened = Artifact.open(path, verify=verify)
    engines = [] if is_bare else render.open_engines(opened)
    report, reason, options, notes = None, "", {}, []
    if placement:
        from enginery.runtime.onnxruntime.runner import OrtRunner, RunnerOptions
        from enginery.runtime.providers.specification import parse_providers

        specs = parse_providers(providers, provider_option, default="cpu")
        with (
            console.task("loading the graph"),
            OrtRunner(
                opened,
                RunnerOptions(ladder=True),
                graph=graph,
                providers=specs,
                allow_fallback=allow_fallback,
            ) as runner,
        ):
            report, notes = runner.placement(), runner.notes
            reason, options = runner.providers[0].reason, runner.providers[0].options
    placement_json = (
        {"placement": {**report.as_json(), "reason": reason, "options": options, "choices": notes}}
        if report
        else {}
    )
    if is_bare:
        graphs = [record.model_dump(mode="json") for record in opened.manifest.graphs]
        console.json({"path": str(path), "graphs": graphs} | placement_json)
    else:
        console.json(render.artifact_json(opened, engines) | placement_json)
        console.table(str(path), artifact_rows(opened))
    console.table("Inputs and outputs", interface_rows(opened.manifest))
    if not is_bare:
        render.show_stages(console, opened)
        console.table("Files", file_rows(opened.manifest))
        console.table("Engines", engine_rows([built_engine(engine) for engine in engines]))
    if report:
        placed = cast("PlacementRecord", report.as_json())
        console.table("Placement", provider_rows(placed))
        console.table("Compute on the CPU", fallback_rows(placed))
        chosen = ", ".join(f"{name}={value}" for name, value in options.items())
        for note in (
            f"{report.head}: {reason}",
            *([f"options: {chosen}"] if chosen else []),
            *notes,
            *report.notes,
        ):
            console.line(note)


def _inspect_engine(path: Path, *, verify: bool, output: Output) -> None:
    from enginery.cli import render
    from enginery.core.artifact.engine import Engine
    from enginery.reports.engines import engine_facts, layer_count_rows, layer_rows

    console = output.console()
    engine = Engine.open(path, verify=verify)
    console.json(render.engine_json(engine))
    console.table(str(path), engine_facts(engine))
    console.table("Layers by kind and precision", layer_count_rows(engine.record.layers))
    # A terminal shows the layers that multiply; a pipe, and -v, all.
    every = console.verbose or not console.is_terminal
    console.table("Layers", layer_rows(engine, every=every))
