"""The model card, `README.md` of a package: Markdown with YAML metadata.

>>> facts = CardFacts(artifact, "minilm", Rights(), Reports.of(artifact), ())
>>> model_card(facts).splitlines()[:2]
['---', 'library_name: enginery']

The text is in card.md.jinja. The metadata follows https://huggingface.co/docs/hub/model-cards. The
card has no dates, so that the same package has the same card.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path, PurePath, PurePosixPath
from typing import TYPE_CHECKING, Any

from enginery.core.artifact.artifact import GRAPHS, Artifact
from enginery.core.artifact.engine_record import EngineRecord
from enginery.core.artifact.manifest import SourceRecord
from enginery.core.errors import ArtifactError
from enginery.core.model.files import ModelConfig
from enginery.core.table import NOTHING, Row, human_bytes
from enginery.publish.card.figures import Reports, metrics
from enginery.publish.card.snippets import CPU, loading_snippets, optimum_loader, python_text
from enginery.publish.layout import variant_name
from enginery.publish.publication import Rights
from enginery.reports.base import named_versions
from enginery.reports.benchmark import gpu_names
from enginery.reports.validation import ValidationReport
from enginery.runtime.tasks import manifest_task
from enginery.runtime.tasks.embed import SENTENCE_OUTPUT, Embed, vector_output
from enginery.runtime.text.pooling import read_pooling

if TYPE_CHECKING:
    from huggingface_hub import EvalResult, ModelCardData

_LICENSE_ID = re.compile(r"[a-z0-9][a-z0-9.+-]*")
_TRANSFORMERS_JS = "transformers.js"
"""The reader whose folders and names `--layout hub` has."""
_TARGETS = {
    "onnx": "any ONNX runtime",
    "cuda": "ONNX Runtime on CUDA",
    "cpu": "ONNX Runtime on a CPU",
    "tensorrt": "TensorRT",
}
_LOADER_TITLES = {
    "enginery": "enginery: results, without PyTorch",
    "Optimum": "Optimum: tensors, with transformers",
    "onnxruntime": "ONNX Runtime: tensors",
}


@dataclass(frozen=True)
class CardFacts:
    """Facts that the card states."""

    artifact: Artifact
    name: str
    rights: Rights
    """Rights from the source's card or from the options."""
    reports: Reports
    engines: tuple[EngineRecord, ...]
    problem: str = ""
    """Reason why publishing needed --allow-failed; empty if it did not."""
    variants: Mapping[str, Artifact] = field(default_factory=dict)
    """Artifacts of other precisions in the same folder, by name."""


def model_card(facts: CardFacts) -> str:
    """Return the text of the card."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    artifact, manifest, reports = facts.artifact, facts.artifact.manifest, facts.reports
    environment = Environment(  # noqa: S701  # it is Markdown, which `finalize` escapes
        loader=FileSystemLoader(Path(__file__).parent),
        finalize=escape_markdown,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    environment.filters |= {
        "hardware_target": describe_hardware_target,
        "code": _code,
        "bytes": human_bytes,
        "codes": lambda texts, between=", ": Markdown(between.join(map(_code, texts))),
        "gpus": gpu_names,
        "local": lambda text: hide_source_path(text, manifest.source),
        "markdown": Markdown,
        "variant_name": variant_name,
        "options": _options,
        "py": python_text,
        "table": partial(_table, manifest.source),
        "versions": named_versions,
        "without": _without,
    }
    # Snippets use the provider of the validation: a BF16 graph does not run on a CPU, for example.
    validated_on = reports.validation.providers if reports.validation else []
    provider = validated_on[0]["name"] if validated_on else CPU
    snippets = loading_snippets(artifact, facts.name, provider=provider)
    body = environment.get_template("card.md.jinja").render(
        name=facts.name,
        problem=facts.problem,
        manifest=manifest,
        source=manifest.source,
        target=_TARGETS.get(manifest.target, manifest.target),
        targets=_TARGETS,
        variants=[manifest, *(other.manifest for other in facts.variants.values())],
        validation=reports.validation,
        not_compared=_outputs_not_compared(artifact, reports.validation),
        quantization=reports.quantization,
        benchmark=reports.benchmark,
        engines=facts.engines,
        optimum=optimum_loader(facts.artifact),
        after_pooling=_modules_after_pooling(facts.artifact),
        snippets=[(_LOADER_TITLES[way], code) for way, code in snippets.items()],
        rights=facts.rights,
    )
    return f"---\n{card_metadata(facts).to_yaml()}\n---\n\n{body}"


def _modules_after_pooling(artifact: Artifact) -> list[str]:
    """Return the modules of sentence-transformers after the pooling, such as Dense."""
    if manifest_task(artifact.manifest) is not Embed:
        return []
    vector = vector_output(artifact.manifest.graphs[0], ModelConfig.read(artifact.path))
    if vector not in ("", SENTENCE_OUTPUT):  # a projection, which nothing pools
        return []
    try:
        return [layer.kind for layer in read_pooling(artifact.path).layers]
    except ArtifactError:  # a module that the graph alone computes
        return []


def card_metadata(facts: CardFacts) -> ModelCardData:
    """Return the metadata of the card, as the Hub reads it."""
    from huggingface_hub import ModelCardData

    manifest, rights = facts.artifact.manifest, facts.rights
    quantization = facts.reports.quantization
    optimum = ["optimum"] if optimum_loader(facts.artifact) else []
    in_hub_layout = PurePosixPath(manifest.graphs[0].file).parent.name == GRAPHS
    readers = [_TRANSFORMERS_JS] if in_hub_layout else []
    tags = ["onnx", "onnxruntime", *optimum, *readers, "enginery", manifest.precision]
    if quantization:
        tags.append(quantization.scheme)
    if facts.engines or manifest.target == "tensorrt":
        tags.append("tensorrt")
    # A licence without an identifier of the Hub is `other`, with a name.
    is_known = not rights.license or _LICENSE_ID.fullmatch(rights.license)
    more: dict[str, Any] = {}
    if rights.base_model and quantization:
        more["base_model_relation"] = "quantized"
    if evaluations := list(_evaluations(facts)):
        more |= {"model_name": facts.name, "eval_results": evaluations}
    return ModelCardData(
        base_model=rights.base_model or None,
        language=list(rights.language) or None,
        # From it the Hub makes the code of "Use this model".
        library_name=_TRANSFORMERS_JS if in_hub_layout else "enginery",
        license=(rights.license or None) if is_known else "other",
        license_name=rights.license_name or (None if is_known else rights.license),
        license_link=rights.license_link or None,
        pipeline_tag=manifest.task,
        tags=[*tags, *rights.tags],
        **more,
    )


_EVAL_METRICS = {
    "validation.max_abs_error": ("max_abs_error", "Maximum absolute error against {reference}"),
    "validation.min_cosine": ("cosine_similarity", "Minimum cosine to {reference}'s outputs"),
    "quantization.cosine": ("cosine_similarity", "Mean cosine to FP32's outputs"),
    "quantization.label_accuracy": ("accuracy", "Accuracy on labels"),
}
"""Metrics for the Hub -> their types and names there, with the validation's reference."""


def _evaluations(facts: CardFacts) -> Iterator[EvalResult]:
    from huggingface_hub import EvalResult

    figures = metrics(facts.reports)
    quantization = facts.reports.quantization
    calibration = quantization.calibration if quantization else None
    validation = facts.reports.validation
    reference = validation.reference_name if validation else ""
    data = {
        "validation": f"inputs compared with {reference}",
        "quantization": f"rows of {calibration.inputs}" if calibration else "rows of the data",
    }
    for figure, (metric_type, metric_name) in _EVAL_METRICS.items():
        stage = figure.partition(".")[0]
        if figure in figures:
            yield EvalResult(
                task_type=facts.artifact.manifest.task,
                dataset_type=stage,
                dataset_name=data[stage],
                metric_type=metric_type,
                metric_name=metric_name.format(reference=reference),
                metric_value=figures[figure],
            )


# Markdown


class Markdown(str):
    """Markdown, which is not escaped when it is inserted."""

    __slots__ = ()


def escape_markdown(value: object) -> str:
    r"""Escape text for Markdown, on one line, so that it can also be a cell of a table.

    >>> escape_markdown("<b> & [x](y) | snake_case _it_")
    '\\<b\\> \\& \\[x\\](y) \\| snake_case \\_it\\_'
    """
    if isinstance(value, Markdown):
        return value
    text = " ".join(str(value).split())
    # A `_` inside a word is not markup.
    text = re.sub(r"[\\`*\[\]<>|~$&]|(?<!\w)_|_(?!\w)", r"\\\g<0>", text)
    # Characters that start a heading, a list or a rule at the beginning of a line.
    return re.sub(r"^(\d*)(?=[#+=-]|(?<=\d)[.)](\s|$))", r"\1\\", text)


def _code(value: object) -> Markdown:
    """Return a code span, with a longer fence if the text has backticks."""
    text = " ".join(str(value).split()).replace("|", "\\|")
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * (longest + 1)
    return Markdown(f"{fence} {text} {fence}" if longest else f"{fence}{text}{fence}")


def _table(source: SourceRecord, rows: Sequence[Row], *, code: Collection[str] = ()) -> Markdown:
    """Return a table; cells of the columns in `code` are code spans."""

    def cell(column: str, text: str) -> str:
        if column in code and text != NOTHING:
            return _code(text)
        return escape_markdown(hide_source_path(text, source))

    cells = [list(map(escape_markdown, rows[0]))]
    cells += [[cell(column, text) for column, text in row.items()] for row in rows]
    head, *body = (f"| {' | '.join(texts)} |" for texts in cells)
    return Markdown("\n".join([head, f"|{'-|' * len(rows[0])}", *body]))


def _without(rows: Sequence[Row], *columns: str) -> list[Row]:
    return [{name: row[name] for name in row if name not in columns} for row in rows]


def _options(options: Mapping[str, Any]) -> Markdown:
    settings = [f"{n}={_value(v)}" for n, v in options.items() if v not in ("", [], (), None)]
    return Markdown(", ".join(map(_code, settings)) or "none")


def _value(value: Any) -> str:
    """Return an option's value as text; an absolute path becomes its last part."""
    if isinstance(value, str):
        return PurePath(value).name if PurePath(value).is_absolute() else value
    if isinstance(value, Mapping):
        return ", ".join(f"{name}: {_value(item)}" for name, item in value.items())
    if isinstance(value, Sequence):
        return "; ".join(_value(item) for item in value)
    return str(value).lower() if isinstance(value, bool) else str(value)


def hide_source_path(text: str, source: SourceRecord) -> str:
    """Replace the source's path on the publishing machine by the source's name.

    A longer path that contains it stays. This is used for sentences from stages only: elsewhere a
    short path such as `/model` may occur by chance.
    """
    if source.kind not in ("directory", "onnx"):
        return text
    # `/model` does not match in `minilm/model.onnx`, `/model-2` and `/srv/model`.
    pattern = rf"(?<![\w./-]){re.escape(source.id)}(?![\w-]|\.\w)"
    return re.sub(pattern, lambda _: source.name, text)


def _outputs_not_compared(artifact: Artifact, report: ValidationReport | None) -> list[str]:
    """Return the outputs that the validation did not compare."""
    compared = {output.output for case in report.cases for output in case.outputs} if report else {}
    names = (spec.name for graph in artifact.manifest.graphs for spec in graph.outputs)
    return [name for name in dict.fromkeys(names) if compared and name not in compared]


def describe_hardware_target(record: EngineRecord) -> str:
    """Return the hardware and the TensorRT version that an engine needs, in one line."""
    targets = ", ".join(record.capabilities)
    where = f"compute capability {targets}" if targets else "any RTX GPU from Ampere on"
    if record.gpu.name:
        where += f", built on {record.gpu.name}"
    if record.hardware_compatibility != "none":
        where += f", hardware compatibility {record.hardware_compatibility}"
    return f"{record.flavor}, TensorRT {record.tensorrt} and no other version; {where}"
