"""The model card: metadata, text, and snippets that run."""

import ast
import json
import math
import re
from dataclasses import replace

import numpy as np
import pytest
from huggingface_hub import ModelCard
from markdown_it import MarkdownIt

from enginery.core.accuracy import AccuracyMetrics, measure_accuracy
from enginery.core.artifact.artifact import Artifact, commit_artifact
from enginery.core.artifact.manifest import SourceRecord
from enginery.core.errors import ArtifactError
from enginery.core.shapes import TensorSpec
from enginery.publish.card import source as card_source
from enginery.publish.card.figures import Reports, metrics
from enginery.publish.card.model_card import (
    CardFacts,
    card_metadata,
    describe_hardware_target,
    model_card,
)
from enginery.publish.card.snippets import loading_snippets, optimum_loader
from enginery.publish.card.source import SourceCard, parse_card, read_source_card
from enginery.publish.config import PublishConfig
from enginery.publish.layout import arrange
from enginery.publish.package import Package
from enginery.publish.publication import Rights
from enginery.reports.quantization import (
    CalibrationRecord,
    LayerCounts,
    MultiplyAdds,
    QuantizationReport,
)
from enginery.reports.validation import (
    EmbeddingMetrics,
    OutputMetrics,
    ValidationCaseResult,
    ValidationReport,
)
from enginery.reports.weights import WeightMetrics
from tests.bench.sample_results import make_backend_record, make_case, make_result
from tests.core.artifacts import edit_manifest, publishable, validated, verdict
from tests.engine.made import engine_record
from tests.engine.products import product
from tests.export.test_sentence_modules import add_modules
from tests.tiny import tiny_artifact

SOURCE_CARD = """---
license: apache-2.0
language:
- en
- no
tags: [sentence-similarity]
base_model: org/teacher
---
# A model

## Usage
Use it.

## Limitations
It knows **no French**.

### Bias
It has some.

```
# Not a heading
```

## Training
On data.

## Intended uses
Search.
"""


def output(name, max_abs, limit, cosine, problem=""):
    return OutputMetrics(
        name, (1, 2), max_abs, max_abs, max_abs, cosine, 1.0, 0, 1e-7, limit, 0.99, problem
    )


VALIDATION = ValidationReport(
    passed=True,
    summary="fine",
    precision="fp32",
    providers=[{"name": "CPUExecutionProvider", "reason": "asked for"}],
    reference={"as": "PyTorch FP32"},
    tolerance={},
    cases=[
        ValidationCaseResult(
            "model.onnx",
            "one",
            "sweep",
            {},
            [
                output("logits", 1e-6, 1e-5, 0.999999),
                output("hidden|state", math.nan, math.nan, math.nan, "NaN"),
            ],
            "",
        ),
        ValidationCaseResult("model.onnx", "two", "sweep", {}, [], "", "PyTorch rejects it"),
    ],
    embeddings=EmbeddingMetrics(8, 0.99999, 1.0, 1.0),
    weights=WeightMetrics(0, 0, {}, [], [], []),
    effort="normal",
    coverage=[],
    notes=["a note"],
    tools={"torch": "2.13"},
    seconds=1.0,
)
QUANTIZATION = QuantizationReport(
    summary="36 of 36",
    scheme="int8",
    residual="fp16",
    notes=[],
    fields={},
    layers=LayerCounts(36, 38),
    left_out={"/pooler": "one row"},
    calibration=CalibrationRecord("512 texts", "texts", "percentile"),
    multiply_adds=MultiplyAdds("all", 1, 1, 1, 0.975, 0.8),
    accuracy=AccuracyMetrics(64, 0.9987, 0.99, 0.98, None, 0.91),
)
BENCHMARK = make_result(
    contenders=[replace(make_backend_record("enginery int8"), label="our runner")],
    cases=[
        make_case(
            {"batch": 1, "sequence": 16},
            {"enginery int8": 1.0, "pytorch": 3.0},
            pairs=[("enginery int8", "pytorch")],
        )
    ],
)


@pytest.fixture
def artifact(tmp_path):
    return validated(publishable(tmp_path / "artifact"), summary="all agree", report=b"{}")


@pytest.fixture
def reported(artifact):
    """Return an artifact with all three reports."""
    made = (VALIDATION, QUANTIZATION, BENCHMARK)
    return artifact.annotate(
        reports={f"reports/{report.FILE}": report.to_json() for report in made}
    )


def with_files(artifact, *names):
    """Return the artifact with additional, empty files in the manifest."""
    for name in names:
        (artifact.path / name).write_text("{}")
    commit_artifact(artifact.path, artifact.manifest)
    return Artifact.open(artifact.path)


def facts(artifact, rights=None, engines=(), **options):
    rights = parse_card(SOURCE_CARD, "org/name").rights if rights is None else rights
    return CardFacts(artifact, "minilm", rights, Reports.of(artifact), engines, **options)


# Metadata


def test_metadata_is_read_by_the_hub(reported):
    data = ModelCard(model_card(facts(reported))).data
    assert data.library_name == "enginery"
    assert (data.license, data.base_model) == ("apache-2.0", "org/name")
    assert data.pipeline_tag == "feature-extraction"
    assert data.language == ["en", "no"]
    assert {"onnx", "fp32", "int8", "sentence-similarity"} <= set(data.tags)
    assert data.to_dict()["base_model_relation"] == "quantized"


def test_licence_without_an_identifier_is_other_with_a_name(artifact):
    card = SourceCard(Rights()).with_options(PublishConfig(license="Our Company's Own"))
    data = card_metadata(facts(artifact, card.rights)).to_dict()
    assert (data["license"], data["license_name"]) == ("other", "Our Company's Own")
    assert "base_model" not in data


def test_unknown_licence_is_stated_and_not_guessed(artifact):
    card = model_card(facts(artifact, Rights()))
    assert ModelCard(card).data.license is None
    assert "**The licence is not known**" in card


# The source's card


def test_limitations_of_the_source_are_repeated(artifact):
    card = model_card(facts(artifact))
    assert "Licence: apache-2.0" in card
    assert "### Limitations\n\nIt knows **no French**." in card
    assert "#### Bias\nIt has some." in card
    assert "### Intended uses\n\nSearch." in card
    assert "On data." not in card
    assert "Use it." not in card


def test_source_card_of_a_directory_is_read(tiny_model):
    from enginery.core.model.source import resolve_source

    directory = tiny_model("bert", "fill-mask")
    record = resolve_source(str(directory)).record
    assert "no card" in read_source_card(record).notes[0]
    try:
        (directory / "README.md").write_text(SOURCE_CARD)
        found = read_source_card(record)
    finally:
        (directory / "README.md").unlink()
    assert (found.rights.license, found.rights.base_model) == ("apache-2.0", "org/teacher")
    assert [heading for heading, _ in found.rights.sections] == ["Limitations", "Intended uses"]


def test_card_of_a_package_with_weights_is_read(minilm):
    from enginery.core.model.source import resolve_source

    found = read_source_card(resolve_source(minilm).record).rights
    assert (found.license, found.language) == ("apache-2.0", ("en",))
    assert [heading for heading, _ in found.sections] == ["Intended uses"]
    assert "sentence-similarity" in found.tags


def test_missing_source_is_a_note(tmp_path):
    record = SourceRecord(
        kind="directory", id=str(tmp_path / "gone"), revision="", sha256="0", files={}
    )
    found = read_source_card(record)
    assert found.rights.license == ""
    assert "cannot be read" in found.notes[0]


def test_hub_card_is_read_at_the_commit(monkeypatch, tmp_path):
    import huggingface_hub

    (tmp_path / "README.md").write_text(SOURCE_CARD)
    asked = []

    def download(*words, **options):
        asked.append((*words, options["revision"]))
        return str(tmp_path / "README.md")

    record = SourceRecord(kind="hub", id="org/name@v1", revision="abc", sha256="0", files={})
    assert "cannot be downloaded, so the licence" in read_source_card(record).notes[0]
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    found = read_source_card(record)
    assert asked == [("org/name", "README.md", "abc")]
    assert (found.rights.license, found.rights.base_model) == ("apache-2.0", "org/name")


@pytest.mark.parametrize(
    "text",
    ["", "---\n", "---\nlicense: [\n---\nx", "---\n- a\n---\n", "# no metadata", "\ufeff---\n---"],
)
def test_broken_card_has_no_licence(text):
    found = parse_card(text)
    assert found.rights.license == ""
    assert found.notes


# What was done and measured


def test_card_has_stages_validation_and_metrics(reported):
    card = model_card(facts(reported))
    assert "| export | none |" in card
    assert "validate: passed. all agree." in card
    assert "| `logits` | sweep: one | 1.0e-06 | 1.0e-05 | 0.999999 | 0.990000 | ok |" in card
    assert "`hidden\\|state`" in card, "a bar does not end a cell"
    assert "| NaN |" in card
    assert "1 of 2 inputs were skipped" in card
    assert "36 of 38 layers are INT8" in card
    assert "| Share of multiply-adds in INT8 | 97.5% |" in card
    assert "| Accuracy on labels | 91.0% |" in card
    assert "| `/pooler` | one row |" in card
    assert "Measured on A \\<processor\\>, 4 cores, 8 usable CPUs; no GPU" in card
    assert "| enginery int8 | our runner | cpu |" in card
    assert "| 1×16 | enginery int8 | 1.00 ms | – | 1,000.0 |" in card
    assert "3.00x as fast" in card


def test_card_names_the_source_file_and_the_accuracy_on_labels(artifact):
    labels = measure_accuracy(
        "label",
        {"the source file": [True] * 9 + [False], "this artifact": [True] * 8 + [False] * 2},
    )
    reference = {"as": "ONNX Runtime FP32, source file", "name": "the source file"}
    report = replace(VALIDATION, labels=labels, reference=reference)
    validated = artifact.annotate(reports={f"reports/{report.FILE}": report.to_json()})
    card = model_card(facts(validated))
    assert "Compared with ONNX Runtime FP32, source file; " in card
    assert "- accuracy of this artifact: 80.0 % (49.0 to 94.3 %)" in card
    assert "1 rows right → wrong, 0 wrong → right" in card
    assert "PyTorch's outputs" not in card
    names = {each.metric_name for each in ModelCard(card).data.eval_results}
    assert "Minimum cosine to the source file's outputs" in names
    assert metrics(Reports.of(validated))["validation.label_accuracy"] == 0.8


def test_card_of_a_bare_artifact_has_no_empty_sections(artifact):
    card = model_card(facts(artifact))
    for title in ("Benchmark", "Accuracy", "Engines"):
        assert f"## {title}" not in card


HOSTILE = [
    "<script>alert(1)</script> & <b>",
    "![x](https://example.org/x.png) [y](javascript:z)",
    "*a* _b_ `c` ~~d~~ \\*e*",
    "a | b\n\n# c\n\n- d\n\n```\ne\n```\n",
    "`` ` `` ```",
    "# c",
    "1. d",
    "> e",
    "---",
]


@pytest.mark.parametrize("text", HOSTILE)
def test_untrusted_text_is_escaped(artifact, text):
    (case, *_) = VALIDATION.cases
    case = replace(case, graph=text, kind=text, outputs=[output(text, 1.0, 1.0, 1.0)])
    found = [
        replace(
            VALIDATION,
            cases=[case],
            notes=[text],
            tools={text: text},
            reference={"as": text},
            providers=[{"name": text, "reason": text}],
        ),
        replace(
            QUANTIZATION,
            scheme=text,
            residual=text,
            left_out={text: text},
            calibration=CalibrationRecord(text, text, text),
        ),
        replace(
            BENCHMARK,
            machine={**BENCHMARK.machine, "cpu": text, "driver": text},
            contenders=[replace(BENCHMARK.contenders[0], label=text)],
            notes=[text],
        ),
    ]
    reports = Reports(*found, benchmark_sha256="")
    (stage,) = artifact.manifest.stages
    stage = stage.model_copy(
        update={"stage": text, "notes": (text,), "options": {text: text}, "tools": {text: text}}
    )
    source = SourceRecord(kind="hub", id=text, revision=text, sha256="0", files={})
    said = verdict(summary=text).model_copy(update={"stage": text})
    manifest = artifact.manifest.model_copy(
        update={
            "source": source,
            "stages": (stage,),
            "verdicts": (said,),
            "task": text,
            "precision": text,
            "target": text,
        }
    )
    rights = Rights(license=text, license_link=text, sections=((text, "Its own *words*."),))
    named = Artifact(artifact.path, manifest)
    card = model_card(CardFacts(named, "minilm", rights, reports, (), problem=text))
    body = ModelCard(card).text
    blocks = MarkdownIt("commonmark").enable(["table", "strikethrough"]).parse(body)
    tokens = blocks + [token for block in blocks for token in block.children or ()]
    kinds = {token.type for token in tokens}
    assert not kinds & {"html_block", "html_inline", "image", "s_open", "hr"}
    assert [token.type for token in tokens].count("link_open") == 1, "that to the source"
    assert [token.type for token in tokens].count("em_open") == 1, "the source's own words"
    assert [token.tag for token in tokens if token.type == "heading_open"].count("h1") == 1
    rows = [
        len(line.replace("\\|", "").split("|")) for line in body.splitlines() if line[:1] == "|"
    ]
    assert set(rows) <= {4, 5, 6, 7, 8}
    shown = " ".join(text.split())
    words = "".join(token.content for token in tokens if token.type == "text")
    assert words.count(shown) > 10


def test_dynamic_quantization_has_a_card(artifact):
    found = QuantizationReport(
        summary="dynamic INT8 for the CPU: 36 integer products in model.onnx",
        scheme="dynamic",
        notes=[],
        fields={},
        products={"model.onnx": {"MatMulInteger": 36}},
    )
    reported = artifact.annotate(reports={f"reports/{found.FILE}": found.to_json()})
    card = model_card(facts(reported))
    assert "## Accuracy in DYNAMIC\n\ndynamic INT8 for the CPU: 36 integer products in" in card
    assert "model-index" not in card


def test_evaluation_results_are_read_by_the_hub(reported):
    data = ModelCard(model_card(facts(reported))).data
    found = {(r.dataset_type, r.metric_type): r.metric_value for r in data.eval_results}
    assert found == {
        ("validation", "max_abs_error"): 1e-6,
        ("validation", "cosine_similarity"): 0.999999,
        ("quantization", "cosine_similarity"): 0.9987,
        ("quantization", "accuracy"): 0.91,
    }


def test_metrics_have_valid_names_and_finite_values(reported):
    found = metrics(Reports.of(reported))
    assert all(re.fullmatch(r"[A-Za-z0-9_.-]+", name) for name in found)
    assert all(np.isfinite(value) for value in found.values())
    assert found["validation.max_abs_error"] == 1e-6
    assert found["quantization.multiply_adds_share"] == 0.975
    assert found["latency_ms_p50.enginery_int8.batch_1-sequence_16"] == 1.0
    assert found["speedup.enginery_int8_beside_pytorch.batch_1-sequence_16"] == 3.0


def test_engines_have_flavor_version_capability_and_profiles(tmp_path):
    source = product(tmp_path / "source")
    records = (
        engine_record(source),
        engine_record(source, capabilities=(), profiles=()),
        engine_record(
            source,
            flavor="tensorrt",
            tensorrt="10.14.1",
            gpu={"name": "H200", "driver": "580"},
            hardware_compatibility="ampere-plus",
            capabilities=("9.0",),
        ),
    )
    card = model_card(facts(source, engines=records))
    assert "**Engines are bound to their hardware.**" in card
    for record in records:
        assert describe_hardware_target(record) in card
        assert f"engines/{record.directory_name}" in card
    assert "tensorrt-rtx, TensorRT 1.7.1.116 and no other version; compute capability 8.9" in card
    assert "any RTX GPU from Ampere on" in card
    assert "hardware compatibility ampere-plus" in card
    assert 'load_model("minilm", providers="tensorrt")' in card
    assert "tensorrt" in card_metadata(facts(source, engines=records))["tags"]


def test_paths_of_the_publishing_machine_are_not_in_the_card(artifact, tmp_path):
    home = str(tmp_path / "home/alice/my-model")
    source = SourceRecord(kind="directory", id=home, revision="", sha256="0" * 64, files={})
    (stage,) = artifact.manifest.stages
    stage = stage.model_copy(
        update={"options": {"data": "/srv/secret/reviews.csv"}, "notes": (f"read {home}",)}
    )
    manifest = artifact.manifest.model_copy(update={"source": source, "stages": (stage,)})
    card = model_card(facts(Artifact(artifact.path, manifest)))
    assert "alice" not in card
    assert "/srv/secret" not in card
    assert "data=reviews.csv" in card


def test_short_source_path_is_not_replaced_in_code_and_tables(artifact):
    source = SourceRecord(kind="directory", id="/model", revision="", sha256="0" * 64, files={})
    (stage,) = artifact.manifest.stages
    notes = ("read /model, then /model/config.json", "wrote /srv/model.onnx and minilm/model.onnx")
    stage = stage.model_copy(update={"notes": notes})
    said = verdict(summary="as /model says in /model.onnx.")
    manifest = artifact.manifest.model_copy(
        update={"source": source, "stages": (stage,), "verdicts": (said,)}
    )
    card = model_card(facts(Artifact(artifact.path, manifest)))
    assert "read model, then model/config.json" in card
    assert "wrote /srv/model.onnx and minilm/model.onnx" in card
    assert "validate: passed. as model says in /model.onnx." in card
    assert 'InferenceSession("minilm/model.onnx"' in card


# Code


TEXTS = [
    ("bert", task)
    for task in (
        "feature-extraction",
        "text-classification",
        "token-classification",
        "question-answering",
        "fill-mask",
    )
]
OTHERS = [
    ("roberta", "fill-mask"),
    ("vit", "image-classification"),
    ("vit", "feature-extraction"),
    ("gpt2", "text-generation"),
    ("t5", "text2text-generation"),
]


@pytest.mark.parametrize(("kind", "task"), TEXTS + OTHERS)
def test_every_snippet_of_the_card_runs(kind, task, tmp_path, monkeypatch, capsys):
    artifact = tiny_artifact(kind, task, tmp_path / "my-model")
    run_snippets(artifact, "my-model", task, tmp_path, monkeypatch, capsys)


def test_card_names_optimum_only_if_a_class_of_it_opens_the_folder(tmp_path):
    artifact = tiny_artifact("bert", "feature-extraction", tmp_path / "my-model")
    (graph,) = artifact.manifest.graphs
    text = TensorSpec("text_embeds", "float32", ("batch", 8))
    image = TensorSpec("image_embeds", "float32", ("batch", 8))
    pooled = TensorSpec("pooler_output", "float32", ("batch", 8))
    pixels = TensorSpec("pixel_values", "float32", ("batch", 3, 8, 8))

    def altered(task="feature-extraction", files=("model.onnx",), **update):
        graphs = tuple(graph.model_copy(update={**update, "file": file}) for file in files)
        manifest = artifact.manifest.model_copy(update={"task": task, "graphs": graphs})
        return Artifact(artifact.path, manifest)

    seq2seq = "text2text-generation-with-past"
    parts = ("encoder_model.onnx", "decoder_with_past_model.onnx")
    loaders = {
        "ORTModelForFeatureExtraction": [
            artifact,
            altered(outputs=(*graph.outputs, pooled)),  # BERT's pooler is no embedding
        ],
        "ORTModelForSeq2SeqLM": [altered(seq2seq, (*parts, "decoder_model.onnx"))],
        "ORTModelForCustomTasks": [altered(inputs=(pixels,), outputs=(image,))],
        "": [
            altered(outputs=(text, *graph.outputs)),
            altered(outputs=(pooled,)),
            altered(inputs=(*graph.inputs, pixels), outputs=(text, image)),
            altered(seq2seq, parts),
        ],
    }
    for loader, artifacts in loaders.items():
        assert [optimum_loader(made) for made in artifacts] == [loader] * len(artifacts)
        for made in artifacts:
            card = model_card(CardFacts(made, "my-model", Rights(), Reports.of(made), ()))
            assert ("also an Optimum model directory" in card) == bool(loader)
            assert ("- optimum\n" in card) == bool(loader)


def test_card_says_which_readers_leave_out_modules_after_the_pooling(tmp_path):
    artifact = tiny_artifact("bert", "feature-extraction", tmp_path / "my-model")
    facts = CardFacts(artifact, "my-model", Rights(), Reports.of(artifact), ())
    assert "after the pooling" not in model_card(facts)
    add_modules(artifact.path, "Dense:activation.Tanh", "Normalize")
    card = model_card(facts)
    assert "**The vectors of a text need Dense after the pooling.**" in card
    assert "such as transformers.js and FastEmbed, return other vectors" in card


def test_snippet_for_a_model_that_generates_runs(tmp_path, monkeypatch, capsys):
    artifact = tiny_artifact("gpt2", "text-generation-with-past", tmp_path / "my-model")
    code = loading_snippets(artifact, "my-model")["enginery"]
    assert "model.generate([" in code
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "snippet", "exec"), {})
    assert "Generation(text=" in capsys.readouterr().out


@pytest.mark.parametrize("task", ["audio-classification", "automatic-speech-recognition"])
def test_snippets_for_audio_run(task, tmp_path, monkeypatch, capsys):
    artifact = tiny_artifact("wav2vec2", task, tmp_path / "my-model")
    ways = loading_snippets(artifact, "my-model")
    assert list(ways) == ["enginery", "onnxruntime"]
    monkeypatch.chdir(tmp_path)
    for code in ways.values():
        exec(compile(code, "snippet", "exec"), {})
        assert capsys.readouterr().out.strip()


@pytest.mark.parametrize(("kind", "task"), [TEXTS[0], TEXTS[1], *OTHERS[1:]])
def test_snippets_run_with_the_graphs_in_the_hubs_folder(kind, task, tmp_path, monkeypatch, capsys):
    made = arrange([tiny_artifact(kind, task, tmp_path / "my-model")], tmp_path / "hub")
    run_snippets(made, "hub", task, tmp_path, monkeypatch, capsys)


def run_snippets(artifact, name, task, tmp_path, monkeypatch, capsys):
    card = model_card(CardFacts(artifact, name, Rights(), Reports.of(artifact), ()))
    snippets = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    ways = loading_snippets(artifact, name)
    assert [code.strip() for code in snippets] == list(ways.values())
    answers = "generation" not in task
    assert ("enginery" in ways, "Optimum" in ways, "onnxruntime" in ways) == (answers, True, True)
    monkeypatch.chdir(tmp_path)
    for code in snippets:
        capsys.readouterr()
        exec(compile(code, "snippet", "exec"), {})
        assert capsys.readouterr().out.strip()


def test_snippet_of_a_failed_artifact_allows_it(tmp_path):
    made = with_files(publishable(tmp_path / "artifact"), "tokenizer.json")
    failed = made.annotate(verdict(passed=False), b"{}")
    assert "allow_failed=True" in loading_snippets(failed, "m")["enginery"]


def test_snippets_need_the_files_that_prepare_inputs(tmp_path):
    bare = publishable(tmp_path / "artifact")
    assert list(loading_snippets(bare, "m")) == ["onnxruntime"]
    assert "enginery" in loading_snippets(with_files(bare, "tokenizer.json"), "m")
    (spec,) = bare.manifest.graphs[0].inputs
    pixels = bare.manifest.graphs[0].model_copy(
        update={"inputs": (replace(spec, name="pixel_values"),)}
    )
    images = Artifact(bare.path, bare.manifest.model_copy(update={"graphs": (pixels,)}))
    assert "enginery" not in loading_snippets(with_files(images, "tokenizer.json"), "m")
    assert "enginery" in loading_snippets(with_files(images, "preprocessor_config.json"), "m")


def test_snippets_use_the_provider_of_the_validation(artifact):
    whole = with_files(artifact, "tokenizer.json")
    snippets = loading_snippets(whole, "m", provider="CUDAExecutionProvider")
    assert 'providers="cuda"' in snippets["enginery"]
    assert 'providers=["CUDAExecutionProvider"]' in snippets["onnxruntime"] or (
        "CUDAExecutionProvider" in snippets["onnxruntime"]
    )


def test_long_section_of_the_source_card_is_shortened():
    found = parse_card("## Limitations\n" + "word\n" * 10_000)
    (text,) = [text for _, text in found.rights.sections]
    assert len(text) <= card_source._SECTION_CHARACTERS + 50
    assert text.endswith("(Shortened.)")


CODE = 'int64) if not __import__("os").system("touch canary") else (0'
"""What `np.array(…, dtype=np.CODE)` would have run."""


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("dtype", CODE),
        ("dtype", "int64\n"),
        ("dtype", "int65"),
        ("precision", CODE),
        ("target", "onnx`](x)"),
    ],
)
def test_text_of_a_manifest_is_one_of_a_list(tmp_path, key, value):
    artifact = publishable(tmp_path / "artifact")
    graphs = json.loads((artifact.path / "manifest.json").read_text())["graphs"]
    changes = {"graphs": graphs} if key == "dtype" else {key: value}
    if key == "dtype":
        graphs[0]["inputs"][0]["dtype"] = value
    edit_manifest(artifact.path, **changes)
    with pytest.raises(ArtifactError, match=key):
        Artifact.open(artifact.path)


@pytest.mark.parametrize(
    ("role", "change"),
    [
        ("inputs", {"dtype": "float32"}),
        ("inputs", {"dims": ["batch", 7, 7]}),
        ("inputs", {"name": "ids"}),
        ("outputs", {"dims": ["batch", 3]}),
    ],
)
def test_manifest_that_contradicts_its_graph_is_not_published(tmp_path, role, change):
    artifact = publishable(tmp_path / "artifact")
    graphs = json.loads((artifact.path / "manifest.json").read_text())["graphs"]
    graphs[0][role][0] |= change
    edit_manifest(artifact.path, graphs=graphs)
    with pytest.raises(ArtifactError, match=r"model\.onnx.*(differs from manifest|manifest.*says)"):
        Package.of(artifact, PublishConfig(allow_failed=True), tmp_path / "scratch")


@pytest.mark.parametrize(
    "word", ['x"]); boom(); ("', "```\n# boom", "{{ 7 * 7 }}", "\\", "a\u2028b"]
)
def test_names_are_quoted_in_every_snippet(tmp_path, word):
    """Snippets are parsed: each of these words is a string in them, and never code."""
    artifact = with_files(publishable(tmp_path / "artifact"), "tokenizer.json")
    code = loading_snippets(artifact, word)
    assert "onnxruntime" in code
    for snippet in code.values():
        texts = [n.value for n in ast.walk(ast.parse(snippet)) if isinstance(n, ast.Constant)]
        assert any(str(text).startswith(word) for text in texts)
        calls = {
            n.func.id
            for n in ast.walk(ast.parse(snippet))
            if isinstance(n, ast.Call) and isinstance(n.func, ast.Name)
        }
        assert "boom" not in calls
