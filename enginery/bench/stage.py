"""The bench stage: how fast an artifact is, beside PyTorch, bare ONNX Runtime and Optimum.

Takes artifacts or .onnx files; leaves `reports/benchmark.json`, figures and `reports/report.html`
in each artifact (in `out` for an .onnx file), and changes nothing else of it.

    >>> result = run([Artifact.open("minilm")], BenchConfig(batch="1,8", sequence="128"))
    >>> result.cases[0].comparisons[0].words
    '1.21 times as fast (1.18 to 1.24)'

Each contender has a process of its own, for its own peak of memory, and they take turns on command:
every round holds one turn of each, so that times are interleaved, and ratios are paired by round.
All of them take inputs from the host's memory and leave the outputs there.
"""

from __future__ import annotations

import json
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, cast

from enginery.bench.backends.plan import Plan, for_images, plan_contenders, providers_of
from enginery.bench.backends.process import Contender
from enginery.bench.config import OURS, BenchConfig, check_options
from enginery.bench.measurement.cases import sweep
from enginery.bench.measurement.image_passes import measure_images
from enginery.bench.measurement.images import ImageInputs
from enginery.bench.measurement.machine import describe_machine
from enginery.bench.measurement.padding import measure_padding
from enginery.bench.measurement.shapes import measure_case, on_gpu
from enginery.bench.report.advice import advise
from enginery.bench.report.notes import fallback_notes, stage_notes
from enginery.bench.report.page import store_reports, write_report
from enginery.bench.target import Subject, with_unique_names
from enginery.core.artifact.artifact import REPORTS, Artifact
from enginery.core.artifact.reports import (
    BenchCase,
    BenchResult,
    ContenderFacts,
    ContenderRecord,
    ImagesResult,
    Machine,
)
from enginery.core.errors import ArtifactError, EngineryError, OptionError
from enginery.core.options import options_dict
from enginery.core.progress import SILENT, Progress
from enginery.runtime.onnxruntime.binding import BUCKETS
from enginery.runtime.providers.specification import format_providers

STAGE = "bench"
REPORT = f"{REPORTS}/{BenchResult.FILE}"


def run(
    models: Sequence[Artifact | str | Path],
    config: BenchConfig,
    *,
    out: str | Path = "",
    progress: Progress = SILENT,
) -> BenchResult:
    """Measures, and writes what was found.

    Args:
        models: artifacts, their directories, or .onnx files; several are compared on the same
            shapes.
        config: what is measured, beside what, how long.
        out: a directory for `reports/`, in place of the artifacts' own. Without it, what is found
            of .onnx files alone is returned, and written nowhere.
        progress: receives progress messages.

    Raises:
        OptionError: an option cannot be used, or the model has no such dim.
        ShapeError: a shape is beyond the model.
        EngineryError: a model cannot be opened, or a contender that was named cannot run.
    """
    started = time.monotonic()
    check_options(config)
    config = _understood(config)
    if not models:
        raise OptionError("no model is named.", do="Name an artifact or an .onnx file.")
    subjects = with_unique_names(
        [Subject.of(model, config.graph, allow_failed=config.allow_failed) for model in models]
    )
    by_name = {subject.name: subject for subject in subjects}
    inputs = ImageInputs.of(subjects[0], config) if config.images else None
    if inputs:
        _require_same_images(subjects, inputs, config)
    cases = [] if inputs else sweep(subjects, config)
    # Every shape keeps its buffers and its CUDA graph; images come as they would in use.
    plans, left_out = plan_contenders(subjects, config, buckets=max(BUCKETS, len(cases)))
    if inputs:
        plans = for_images(plans, left_out)
    padding = measure_padding(subjects[0], config)
    machine = describe_machine()
    results: list[BenchCase] = []
    images: ImagesResult | None = None
    with (
        tempfile.TemporaryDirectory(prefix="enginery-bench-") as scratch,
        _started(plans, by_name, config, left_out, Path(scratch), progress) as contenders,
    ):
        with progress.task(
            "measuring", total=len(cases) or len(inputs.files if inputs else ())
        ) as advance:
            if inputs:
                images = measure_images(inputs, contenders, config, Path(scratch), advance)
            for case in cases:
                results.append(measure_case(case, contenders, by_name, config, Path(scratch)))
                progress.say(f"measured {case}: {results[-1].rounds_ended}")
                advance()
        records = [_record(one, by_name[one.plan.subject]) for one in contenders.values()]
        unknown = _unknown(contenders, records, results)
    result = BenchResult(
        subjects=[subject.as_json() for subject in subjects],
        machine=machine,
        options=options_dict(config),
        contenders=records,
        left_out=left_out,
        cases=results,
        images=images,
        padding=padding,
        advice=[],
        unknown=unknown,
        notes=stage_notes(machine, results, records, config),
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
        seconds=round(time.monotonic() - started, 3),
    )
    result = replace(result, advice=advise(result))
    _write(result, subjects, out, progress)
    return result


def finished(
    artifact: Artifact, config: BenchConfig, *, out: str | Path = ""
) -> BenchResult | None:
    """Return what an earlier run with the same options found of the artifact on this machine.

    Raises:
        ProviderError, OptionError: the providers cannot be read.
    """
    try:
        found = BenchResult.below(Path(out) if out else artifact.path)
    except ArtifactError:  # damaged, or of another version
        return None
    if found is None:
        return None
    subject = Subject.of(artifact, config.graph, allow_failed=True)
    now = (subject.as_json(), options_dict(_understood(config)), _without_load(describe_machine()))
    then = (*found.subjects, found.options, _without_load(found.machine))
    return found if json.loads(json.dumps(now)) == json.loads(json.dumps(then)) else None


def _without_load(machine: Machine) -> dict[str, Any]:
    return {name: fact for name, fact in machine.items() if name != "load"}


def _understood(config: BenchConfig) -> BenchConfig:
    """Write out the providers: ENGINERY_PROVIDERS may say them, and the result has to."""
    return replace(config, provider=format_providers(providers_of(config)), provider_option=())


@contextmanager
def _started(
    plans: Sequence[Plan],
    subjects: Mapping[str, Subject],
    config: BenchConfig,
    left_out: dict[str, str],
    scratch: Path,
    progress: Progress,
) -> Iterator[dict[str, Contender]]:
    """All contenders with their models loaded; those of `auto` that cannot run are left out."""
    with ExitStack() as stack:
        found: dict[str, Contender] = {}
        for index, plan in enumerate(plans):
            try:
                contender = Contender(
                    plan, subjects[plan.subject], config, scratch / f"{index}.log"
                )
            except EngineryError as error:
                if plan.asked:
                    raise
                left_out[plan.name] = error.message.rstrip(".")
                progress.say(f"{plan.name} is left out: {error.message}")
                continue
            found[plan.name] = stack.enter_context(contender)
        for note in fallback_notes([(n, one.loaded["providers"]) for n, one in found.items()]):
            progress.say(note)
        yield found


def _record(contender: Contender, subject: Subject) -> ContenderRecord:
    """What a contender says of itself at the end."""
    plan, loaded = contender.plan, contender.loaded
    notes: list[str] = loaded["notes"]
    try:
        found = contender.ask("memory")
    except EngineryError as error:  # it failed at a shape, which is told there
        if plan.asked:
            raise
        found = {"facts": {}, "peak_rss_bytes": loaded["rss_bytes"], "device_memory": error.message}
        notes = [*notes, f"peak memory is that after loading: {error.message}"]
    facts = cast("ContenderFacts", dict(found["facts"]))
    if plan.kind == OURS:
        facts["convolutions"] = subject.convolutions()
    return ContenderRecord(
        name=plan.name,
        kind=plan.kind,
        label=plan.label,
        subject=plan.subject,
        providers=loaded["providers"],
        tools=loaded["tools"],
        start_seconds=loaded["start_seconds"],
        load_seconds=loaded["load_seconds"],
        peak_rss_bytes=found["peak_rss_bytes"],
        device_memory_bytes=found.get("device_memory_bytes"),
        device_memory=found.get("device_memory", ""),
        facts=facts,
        notes=notes,
    )


def _unknown(
    contenders: Mapping[str, Contender],
    records: Sequence[ContenderRecord],
    cases: Sequence[BenchCase],
) -> dict[str, str]:
    """What was not measured, and why."""
    if not any(on_gpu(contender) for contender in contenders.values()):
        reason = "nothing ran on an NVIDIA GPU"
        return {"device memory": reason, "energy": reason, "host copies": reason}
    hidden = [r.device_memory for r in records if on_gpu(contenders[r.name]) and r.device_memory]
    found = {"device memory": hidden[0]} if hidden else {}
    return found | {what: why for case in cases for what, why in case.unknown.items()}


def _require_same_images(
    subjects: Sequence[Subject], inputs: ImageInputs, config: BenchConfig
) -> None:
    for other in subjects[1:]:
        found = ImageInputs.of(other, config)
        if (found.spec, found.processor) != (inputs.spec, inputs.processor):
            raise OptionError(
                f"option 'images': {other.name} takes {found.spec}, {subjects[0].name} "
                f"{inputs.spec}: they cannot be run on the same images."
            )


def _write(
    result: BenchResult, subjects: Sequence[Subject], out: str | Path, progress: Progress
) -> None:
    if out:
        places = [Path(out)]
    else:
        places = list(dict.fromkeys(s.artifact.path for s in subjects if not s.is_bare))
    for place in places:
        store_reports(place, {REPORT: result.to_json()}, replacing_figures=True)
        page = write_report(place)
        progress.say(f"wrote {page}")
