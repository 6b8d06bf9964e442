"""The bench stage: measure an artifact against PyTorch, plain ONNX Runtime and Optimum.

    result = run([Artifact.open("minilm")], BenchConfig(batch="1,8", sequence="128"))
    result.cases[0].comparisons[0].words  # '1.21x as fast (1.18x to 1.24x)'

The stage writes `reports/benchmark.json`, figures and `reports/report.html` into each artifact (for
an .onnx file: into `out`) and changes nothing else.

Each backend runs in its own process, so that its peak memory can be measured. The processes take
turns: each round contains one turn of every backend, so that a drift of the machine affects all of
them, and ratios are paired by round. All backends read inputs from host memory and write outputs to
host memory.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import cast

from enginery.bench.backends.backend import BackendPlan
from enginery.bench.backends.plan import (
    keep_image_backends,
    plan_backends,
    providers_of,
)
from enginery.bench.backends.process import BenchmarkProcess
from enginery.bench.config import BenchConfig, check_options
from enginery.bench.measurement.accuracy import LabelledTexts
from enginery.bench.measurement.cases import sweep
from enginery.bench.measurement.image_passes import measure_images
from enginery.bench.measurement.images import ImageInputs
from enginery.bench.measurement.machine import describe_machine
from enginery.bench.measurement.padding import measure_padding
from enginery.bench.measurement.shapes import measure_case, on_gpu
from enginery.bench.notes import advise, fallback_notes, stage_notes
from enginery.bench.report.page import store_reports, write_report
from enginery.bench.target import Target, number_duplicate_names
from enginery.core.artifact.artifact import REPORTS, Artifact
from enginery.core.artifact.fingerprint import (
    Fingerprint,
    option_fields,
    stage_fingerprint,
)
from enginery.core.artifact.inputs import InputFiles
from enginery.core.errors import ArtifactError, EngineryError, OptionError
from enginery.core.options import options_dict
from enginery.core.progress import SILENT, Progress
from enginery.core.scratch import temporary_directory
from enginery.reports.benchmark import (
    BenchCase,
    BenchResult,
    ContenderFacts,
    ContenderRecord,
    ImagesResult,
)
from enginery.runtime.onnxruntime.binding import BUCKETS
from enginery.runtime.providers.specification import format_providers

STAGE = "bench"
STAGE_VERSION = "1"
"""Incremented when the same inputs are measured in another way; part of the fingerprint."""
REPORT = f"{REPORTS}/{BenchResult.FILE}"


def fingerprint(targets: Sequence[Target], config: BenchConfig) -> Fingerprint:
    """Return the key of a measurement: the models, the options and the machine.

    A new verdict on a model changes nothing of its speed, so it is left out.

    Raises:
        ProviderError: the providers cannot be parsed.
        OptionError: an option of a provider cannot be used.
    """
    providers = format_providers(providers_of(config))
    machine = {name: fact for name, fact in describe_machine().items() if name != "load"}
    tools = cast("Mapping[str, str]", machine.pop("tools"))
    models = "; ".join(target.content_sha256() for target in targets)
    return stage_fingerprint(
        STAGE,
        STAGE_VERSION,
        {"models": models, "machine": json.dumps(machine, sort_keys=True)},
        option_fields(config, providers=providers),
        tools,
    )


def run(
    models: Sequence[Artifact | str | Path],
    config: BenchConfig,
    *,
    out: str | Path = "",
    progress: Progress = SILENT,
) -> BenchResult:
    """Measure models, write the report, and return the result.

    Args:
        models: artifacts, their directories, or .onnx files; several are compared on the same
            shapes.
        config: the options.
        out: directory for `reports/`, instead of the artifacts. Without it, the result for .onnx
            files is returned but not written.
        progress: receives progress messages.

    Raises:
        OptionError: an option has a value that cannot be used, or names a dim that the model lacks;
            or a model does not classify labelled texts.
        ShapeError: the model does not accept a shape.
        EngineryError: a model cannot be opened, or a backend named in `against` cannot run.
    """
    started = time.monotonic()
    check_options(config)
    config = _with_resolved_providers(config)
    if not models:
        raise OptionError("no model is given.", do="Name an artifact or an .onnx file.")
    read_files = InputFiles()
    with read_files.recording():
        targets = number_duplicate_names(
            [Target.open(model, config.graph, allow_failed=config.allow_failed) for model in models]
        )
        for target in targets:
            target.artifact.check_files()
        key = fingerprint(targets, config)
    by_name = {target.name: target for target in targets}
    inputs = ImageInputs.open(targets[0], config) if config.images else None
    if inputs:
        _check_same_images(targets, inputs, config)
    cases = [] if inputs else sweep(targets, config)
    # Buckets for all shapes of the sweep, so that none loses its buffers or CUDA graph to another.
    # Images use the default number, as in production.
    plans, left_out = plan_backends(targets, config, buckets=max(BUCKETS, len(cases)))
    if inputs:
        plans = keep_image_backends(plans, left_out)
    labelled = LabelledTexts.read(targets, config)
    padding = measure_padding(targets[0], config)
    machine = describe_machine()
    results: list[BenchCase] = []
    images: ImagesResult | None = None
    with (
        temporary_directory("bench") as scratch,
        _start_processes(plans, by_name, left_out, scratch, progress) as processes,
    ):
        with progress.task(
            "measuring", total=len(cases) or len(inputs.files if inputs else ())
        ) as advance:
            if inputs:
                images = measure_images(inputs, processes, config, scratch, advance)
            for case in cases:
                results.append(measure_case(case, processes, by_name, config, scratch))
                progress.say(f"measured {case}: {results[-1].rounds_ended}")
                advance()
        records = [_record(process) for process in processes.values()]
        unknown = _unknown(processes, records, results)
    labels = labelled.measure(config, progress) if labelled else None
    result = BenchResult(
        subjects=[target.as_json() for target in targets],
        machine=machine,
        options=options_dict(config),
        fields=key.fields,
        contenders=records,
        left_out=left_out,
        cases=results,
        images=images,
        padding=padding,
        labels=labels,
        advice=[],
        unknown=unknown,
        notes=stage_notes(machine, results, records, config),
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - started, 3),
    )
    result = replace(result, advice=advise(result))
    read_files.check()
    _write(result, targets, out, progress)
    return result


def find_finished(
    artifact: Artifact, config: BenchConfig, *, out: str | Path = ""
) -> BenchResult | None:
    """Return the stored result if it has the same fingerprint, or None.

    Raises:
        ProviderError: the providers cannot be parsed.
        OptionError: an option of a provider cannot be used.
    """
    try:
        stored = BenchResult.below(Path(out) if out else artifact.path)
    except ArtifactError:  # damaged, or written by another version
        return None
    if stored is None:
        return None
    target = Target.open(artifact, config.graph, allow_failed=True)
    return stored if stored.fields == fingerprint([target], config).fields else None


def _with_resolved_providers(config: BenchConfig) -> BenchConfig:
    """Write the providers into the options, so that the result has those of ENGINERY_PROVIDERS."""
    return replace(config, providers=format_providers(providers_of(config)), provider_option=())


@contextmanager
def _start_processes(
    plans: Sequence[BackendPlan],
    targets: Mapping[str, Target],
    left_out: dict[str, str],
    scratch: Path,
    progress: Progress,
) -> Iterator[dict[str, BenchmarkProcess]]:
    """Start the backends' processes and load the models; end the processes on exit.

    Yields:
        Name -> process. Optional backends that cannot run go to `left_out` with the reason.
    """
    with ExitStack() as stack:
        processes: dict[str, BenchmarkProcess] = {}
        for index, plan in enumerate(plans):
            try:
                process = BenchmarkProcess(plan, targets[plan.target], scratch / f"{index}.log")
            except EngineryError as error:
                if plan.required:
                    raise
                left_out[plan.name] = error.message.rstrip(".")
                progress.say(f"{plan.name} is left out: {error.message}")
                continue
            processes[plan.name] = stack.enter_context(process)
        for note in fallback_notes(
            [(n, process.loaded["providers"]) for n, process in processes.items()]
        ):
            progress.say(note)
        yield processes


def _record(process: BenchmarkProcess) -> ContenderRecord:
    """Return the record of a backend after its last shape."""
    plan, loaded = process.plan, process.loaded
    notes: list[str] = loaded["notes"]
    try:
        memory = process.request("memory")
    except EngineryError as error:  # the result reports the failure with its shape
        if plan.required:
            raise
        memory = {
            "facts": {},
            "peak_rss_bytes": loaded["rss_bytes"],
            "device_memory": error.message,
        }
        notes = [*notes, f"peak memory was measured after loading only: {error.message}"]
    return ContenderRecord(
        name=plan.name,
        kind=plan.kind,
        label=plan.label,
        subject=plan.target,
        providers=loaded["providers"],
        tools=loaded["tools"],
        start_seconds=loaded["start_seconds"],
        load_seconds=loaded["load_seconds"],
        peak_rss_bytes=memory["peak_rss_bytes"],
        device_memory_bytes=memory.get("device_memory_bytes"),
        device_memory=memory.get("device_memory", ""),
        facts=cast("ContenderFacts", memory["facts"]),
        notes=notes,
    )


def _unknown(
    processes: Mapping[str, BenchmarkProcess],
    records: Sequence[ContenderRecord],
    cases: Sequence[BenchCase],
) -> dict[str, str]:
    """Return what could not be measured -> reason."""
    if not any(on_gpu(process) for process in processes.values()):
        reason = "nothing ran on an NVIDIA GPU"
        return {"device memory": reason, "energy": reason}
    hidden = [r.device_memory for r in records if on_gpu(processes[r.name]) and r.device_memory]
    unknown = {"device memory": hidden[0]} if hidden else {}
    return unknown | {quantity: why for case in cases for quantity, why in case.unknown.items()}


def _check_same_images(targets: Sequence[Target], inputs: ImageInputs, config: BenchConfig) -> None:
    for other in targets[1:]:
        other_inputs = ImageInputs.open(other, config)
        if (other_inputs.spec, other_inputs.processor) != (inputs.spec, inputs.processor):
            raise OptionError(
                f"option 'images': {other.name} takes {other_inputs.spec}, {targets[0].name} "
                f"{inputs.spec}, so they cannot be compared on the same images."
            )


def _write(
    result: BenchResult, targets: Sequence[Target], out: str | Path, progress: Progress
) -> None:
    if out:
        directories = [Path(out)]
    else:
        directories = list(dict.fromkeys(t.artifact.path for t in targets if not t.is_onnx_file))
    for directory in directories:
        store_reports(directory, {REPORT: result.to_json()}, replacing_figures=True)
        page = write_report(directory)
        progress.say(f"wrote {page}")
