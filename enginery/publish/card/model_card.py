"""The model card: `README.md` of a package, for people and for the Hub.

Takes what a package knows; leaves Markdown with YAML on top.

    >>> card = model_card(CardFacts(artifact, "minilm", rights, reports, engines))
    >>> card.splitlines()[:3]
    ['---', 'library_name: enginery', 'tags:']

The metadata is what https://huggingface.co/docs/hub/model-cards describes. There is no date in it:
the same package has the same card.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import PurePath
from typing import Any

import yaml

from enginery.core.artifact import Artifact
from enginery.core.engine_record import EngineRecord
from enginery.core.manifest import StageRecord
from enginery.publish.card.measured import (
    benchmark_section,
    quantization_section,
    table,
    validation_section,
)
from enginery.publish.card.paths import without_path
from enginery.publish.card.reports import Reports
from enginery.publish.card.snippets import CPU, loading_snippets
from enginery.publish.card.source import SourceCard

_LICENSE_ID = re.compile(r"[a-z0-9][a-z0-9.+-]*")


@dataclass(frozen=True)
class CardFacts:
    """What a card says."""

    artifact: Artifact
    name: str
    rights: SourceCard
    """Taken over from the source's card, or said by the options."""
    reports: Reports
    engines: tuple[EngineRecord, ...]
    problem: str = ""
    """Why the artifact would have been refused without --allow-unvalidated."""


def model_card(facts: CardFacts) -> str:
    """The text of the card."""
    metadata = yaml.safe_dump(card_metadata(facts), sort_keys=False, allow_unicode=True, width=1000)
    body = "\n\n".join(part for part in _parts(facts) if part)
    return f"---\n{metadata}---\n\n{body}\n"


def card_metadata(facts: CardFacts) -> dict[str, Any]:
    """The YAML on top, as the Hub reads it."""
    manifest, rights = facts.artifact.manifest, facts.rights
    quantization = facts.reports.quantization
    ours = ["onnx", "onnxruntime", "optimum", "enginery", manifest.precision]
    if quantization:
        ours.append(quantization.scheme)
    if facts.engines or manifest.target == "tensorrt":
        ours.append("tensorrt")
    found: dict[str, Any] = {"library_name": "enginery"}
    if rights.language:
        found["language"] = list(rights.language)
    found |= _license(rights)
    if rights.base_model:
        found["base_model"] = rights.base_model
        if quantization:
            found["base_model_relation"] = "quantized"
    found["pipeline_tag"] = manifest.task
    found["tags"] = list(dict.fromkeys([*ours, *rights.tags]))
    return found


def engine_words(record: EngineRecord) -> str:
    """What an engine is bound to, in one line."""
    targets = ", ".join(record.capabilities)
    where = f"compute capability {targets}" if targets else "any RTX GPU from Ampere on"
    if record.gpu.name:
        where += f", built on {record.gpu.name}"
    if record.hardware_compatibility != "none":
        where += f", hardware compatibility {record.hardware_compatibility}"
    version = "or a later minor version" if record.version_compatible else "and no other version"
    return f"{record.flavor}, TensorRT {record.tensorrt} {version}; {where}"


def _license(rights: SourceCard) -> dict[str, str]:
    """A licence that has no identifier of the Hub's is `other`, with its name."""
    if not rights.license:
        return {}
    if not _LICENSE_ID.fullmatch(rights.license):
        found = {"license": "other", "license_name": rights.license}
    else:
        found = {"license": rights.license}
    if rights.license_name:
        found["license_name"] = rights.license_name
    if rights.license_link:
        found["license_link"] = rights.license_link
    return found


def _parts(facts: CardFacts) -> Iterator[str]:
    artifact, manifest = facts.artifact, facts.artifact.manifest
    yield f"# {facts.name}"
    if facts.problem:
        problem = without_path(facts.problem, manifest.source)
        yield (
            f"> **Not validated.** This was published with `--allow-unvalidated`: {problem}. "
            "Nothing says that its outputs are PyTorch's."
        )
    yield (
        f"{_source(facts)} as ONNX for {manifest.task}, {manifest.precision}, for "
        f"{_TARGETS.get(manifest.target, manifest.target)}. Made and published by enginery; the "
        "directory is an Optimum model directory as well."
    )
    yield table(["Graph", "Inputs", "Outputs", "Opset"], _graph_rows(artifact))
    yield "## How it was made"
    yield table(["Stage", "Options", "Tools"], [_stage_row(stage) for stage in manifest.stages])
    # Where things lay on the machine that published is nobody else's business.
    yield without_path(_notes(manifest.stages), manifest.source)
    yield from validation_section(manifest, facts.reports.validation)
    yield from quantization_section(facts.reports.quantization)
    yield from benchmark_section(facts.reports.benchmark, manifest.source)
    yield from _engines(facts)
    yield from _loading(facts)
    yield from _rights(facts)


_TARGETS = {"onnx": "any ONNX runtime", "cuda": "ONNX Runtime on CUDA", "cpu": "ONNX Runtime on a "
            "CPU", "tensorrt": "TensorRT"}  # fmt: skip


def _source(facts: CardFacts) -> str:
    """Where the model came from."""
    source = facts.artifact.manifest.source
    if source.kind == "hub":
        name = source.id.partition("@")[0]
        return f"[{name}](https://huggingface.co/{name}) at commit `{source.revision}`"
    if source.kind == "package":
        return f"The model in the Python package `{source.id.partition(':')[2]}`"
    return f"The model `{source.name}` (sha256 `{source.sha256[:12]}…`)"


def _graph_rows(artifact: Artifact) -> list[list[str]]:
    return [
        [
            f"`{graph.file}`",
            ", ".join(f"`{spec}`" for spec in graph.inputs),
            ", ".join(f"`{spec}`" for spec in graph.outputs),
            str(graph.opset),
        ]
        for graph in artifact.manifest.graphs
    ]


def _stage_row(stage: StageRecord) -> list[str]:
    options = [
        f"`{n}={_value(v)}`" for n, v in stage.options.items() if v not in ("", [], (), None)
    ]
    tools = [f"{tool} {version}" for tool, version in stage.tools.items()]
    return [stage.stage, ", ".join(options) or "none", ", ".join(tools)]


def _value(value: Any) -> str:
    """An option's value; of a path on the machine that published, the last part."""
    if isinstance(value, str):
        return PurePath(value).name if PurePath(value).is_absolute() else value
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_value(item)}" for name, item in value.items())
    if isinstance(value, Sequence):
        return "; ".join(_value(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def _notes(stages: Sequence[StageRecord]) -> str:
    return "\n".join(f"- {stage.stage}: {note}" for stage in stages for note in stage.notes)


def _engines(facts: CardFacts) -> Iterator[str]:
    if not facts.engines:
        return
    yield "## Engines and their profiles"
    yield (
        "**Engines are bound to their hardware.** Each runs on the GPUs and with the TensorRT "
        "version that it was built for, and answers the shapes of its profiles. On any other "
        "machine the ONNX graphs of this package run."
    )
    rows = [
        [f"`engines/{record.directory_name}`", engine_words(record),
         "; ".join(f"`{profile}`" for profile in record.profiles) or "fixed shapes",
         f"{record.plan_size_bytes / 1e6:.1f} MB"]
        for record in facts.engines
    ]  # fmt: skip
    yield table(["Engine", "Hardware-bound to", "Profiles", "Plan"], rows)
    flavors = dict.fromkeys(record.flavor for record in facts.engines)
    loads = " or ".join(f'`load_model("{facts.name}", provider="{name}")`' for name in flavors)
    yield f"On such a GPU: {loads}."


def _loading(facts: CardFacts) -> Iterator[str]:
    """Snippets run on the provider that the validation ran on: of a BF16 graph, no CPU."""
    validation = facts.reports.validation
    providers = validation.providers if validation else ()
    provider = str(providers[0].get("name", CPU)) if providers else CPU
    yield "## How to load it"
    yield f"With `{facts.name}` as the directory that `enginery pull` or a download left:"
    for way, code in loading_snippets(facts.artifact, facts.name, provider=provider).items():
        yield f"### {_WAYS[way]}"
        yield f"```python\n{code}\n```"


_WAYS = {
    "enginery": "enginery: answers, without torch",
    "Optimum": "Optimum: tensors, with transformers",
    "onnxruntime": "ONNX Runtime alone",
}


def _rights(facts: CardFacts) -> Iterator[str]:
    rights = facts.rights
    yield "## Licence and limitations"
    stated = rights.license_name or rights.license
    link = f" ({rights.license_link})" if rights.license_link else ""
    yield (
        f"Licence: {stated}{link}. That of the model this was made from holds for it, too."
        if stated
        else "**The licence is not known**: the source states none, or its card could not be read. "
        "Ask its authors before you use it."
    )
    yield (
        "What limits the model that this was made from limits this one as well; the conversion "
        "adds the numerical differences above."
    )
    if rights.sections:
        yield "From the source's own card:"
    for heading, text in rights.sections:
        yield f"### {heading}\n\n{text}"
