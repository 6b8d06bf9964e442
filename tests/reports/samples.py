"""Reports of every kind with made-up figures, and an artifact that has them."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path

from enginery.api import RunResult
from enginery.core.accuracy import AccuracyMetrics, measure_accuracy
from enginery.core.artifact.artifact import Artifact, commit_artifact
from enginery.core.artifact.engine import Engine
from enginery.core.artifact.manifest import Verdict
from enginery.deploy.kserve.stage import KserveExport
from enginery.deploy.triton.stage import TritonExport
from enginery.doctor.report import (
    DoctorReport,
    Finding,
    Gpu,
    MachineStatus,
    NvidiaStatus,
    PackageStatus,
    ProviderStatus,
)
from enginery.passes.lint.findings import LintFinding, LintReport, LintReports
from enginery.predict.report import Counts, PredictReport
from enginery.publish.destination import Published
from enginery.reports.base import StageOutput
from enginery.reports.benchmark import Advice, BenchResult, Padding
from enginery.reports.engines import BuildReport, built_engine
from enginery.reports.quantization import (
    CalibrationRecord,
    LayerCounts,
    MixAccuracy,
    MultiplyAdds,
    QuantizationReport,
    SearchRecord,
)
from enginery.reports.validation import (
    EmbeddingMetrics,
    GenerationMetrics,
    GraphCoverage,
    OutputMetrics,
    QuantizedAccuracy,
    ValidationCaseResult,
    ValidationReport,
)
from enginery.reports.weights import (
    LayerComparison,
    LayerMetrics,
    UntracedWeight,
    WeightDifference,
    WeightMetrics,
)
from enginery.runtime.onnxruntime.placement import PlacedNode, Placement
from enginery.runtime.providers.known import AZURE, CPU, CUDA
from enginery.stages import StageResult
from tests.bench.sample_results import (
    CUDA as ON_CUDA,
)
from tests.bench.sample_results import (
    make_backend_record,
    make_case,
    make_image_result,
    make_result,
)
from tests.core.artifacts import FINGERPRINT, make
from tests.engine.made import engine_record, write_engine


def output(name: str, max_abs: float, limit: float, **changes) -> OutputMetrics:
    values = {"cosine": 0.999999, "nonfinite": 0, "cosine_limit": 0.99, "problem": ""} | changes
    return OutputMetrics(
        output=name,
        shape=(1, 2),
        max_abs=max_abs,
        p99_abs=max_abs,
        max_rel=0.1,
        argmax_agreement=1.0,
        noise_floor=1e-7,
        limit=limit,
        **values,
    )


def case(name: str, *outputs: OutputMetrics, graph: str = "encoder.onnx", **changes):
    values = {"kind": "sweep", "problem": "", "skipped": ""} | changes
    return ValidationCaseResult(
        graph=graph, name=name, shapes={"input_ids": [1, 2]}, outputs=list(outputs), **values
    )


def validation() -> ValidationReport:
    """Return a report of two graphs that fails, with every part that a report can have."""
    accuracy = AccuracyMetrics(64, 0.9708, 0.91, None, None, 0.75)
    return ValidationReport(
        passed=False,
        summary="1 of 7 outputs differ from PyTorch; worst: present.1.key",
        precision="int8",
        providers=[
            {"name": CUDA, "reason": "requested"},
            {"name": CPU, "reason": "for the rest", "options": {"threads": "4"}},
        ],
        reference={"as": "PyTorch FP32", "id": "org/name"},
        tolerance={"floor_factor": 8.0},
        cases=[
            case("one", output("last_hidden_state", 1.4e-6, 1.1e-5)),
            case("two", output("last_hidden_state", 2.5e-6, 1.1e-5)),
            case("three", kind="real", problem="ONNX Runtime fails"),
            case("four", skipped="longer than 512"),
            case(
                "five",
                output("logits", 0.02, math.inf, cosine=0.98),
                output("present.0.key", 0.03, math.inf, cosine_limit=-1.0),
                output("present.1.key", 0.5, 0.1, problem="largest error 0.5 exceeds 0.1"),
                graph="decoder.onnx",
            ),
            case(
                "six",
                output("logits", math.nan, 0.1, nonfinite=1, problem="1 NaN | here"),
                graph="decoder.onnx",
            ),
        ],
        embeddings=EmbeddingMetrics(8, 0.999987, 0.999991, 0.875),
        weights=WeightMetrics(
            elements=22_600_000,
            compared=22_500_000,
            kinds={"as is": 22_500_000},
            differences=[
                WeightDifference(
                    "encoder.onnx", f"w{i}", f"layer.{i}.weight", 4, 2, 0.1, 0.9, f"rows {i} differ"
                )
                for i in range(5)
            ],
            untraced=[UntracedWeight("decoder.onnx", f"mask{i}", (10, 20), "bool") for i in "abcd"],
            unused=["pooler.bias"],
        ),
        effort="normal",
        coverage=[
            GraphCoverage(
                "encoder.onnx", "sequence", [(1, 8), (2, 16)], [(4, 30), (8, 64)], [(3, 9)]
            ),
            GraphCoverage("decoder.onnx", "", [(1, 0)], [], [], "it keeps a cache"),
        ],
        notes=["the tokenizer was truncated at 512"],
        tools={"torch": "2.13.0", "onnxruntime": "1.31.1"},
        seconds=12.5,
        accuracy=QuantizedAccuracy(accuracy, accuracy, 0.9635, 0.9, None),
        not_proven=["a constant would pass", "PyTorch rejects 3 of 4 inputs"],
        layers=LayerMetrics(64, [LayerComparison("/dense/MatMul", 0.019, 0.011, 0.012)], ["/out"]),
        labels=measure_accuracy(
            "stars",
            {
                "PyTorch": [True] * 7 + [False] * 3,
                "this artifact": [True] * 6 + [False] * 3 + [True],
            },
        ),
        generation=GenerationMetrics("sentences", 8, 32, 250, 240, 7, 1, 4, 8, 0.998, 0),
    )


def passed_validation() -> ValidationReport:
    """Return a report of one graph that passes, with only what every report has."""
    return replace(
        validation(),
        passed=True,
        summary="2 outputs agree with PyTorch",
        precision="fp32",
        cases=[case("one", output("logits", 1.4e-6, 1.1e-5), graph="model.onnx")],
        embeddings=None,
        weights=WeightMetrics(22_600_000, 22_600_000, {}, [], [], []),
        coverage=[],
        notes=[],
        accuracy=None,
        not_proven=[],
        layers=None,
        labels=None,
        generation=None,
    )


def quantization() -> QuantizationReport:
    measured = AccuracyMetrics(64, 0.9987, 0.99, 0.98, None, 0.91, box_f1=0.88)
    return QuantizationReport(
        summary="36 of 38 layers in INT8",
        scheme="int8",
        residual="fp16",
        notes=["a note on ranges"],
        fields={},
        layers=LayerCounts(36, 38),
        left_out={"/pooler/Gemm": "one row"},
        calibration=CalibrationRecord("512 rows of reviews.csv", "texts", "percentile"),
        multiply_adds=MultiplyAdds("all", 128, 10**9, 10**7, 0.975, 0.8),
        accuracy=measured,
        search=SearchRecord(
            budget="accuracy at least 90.0%",
            about="accuracy",
            reference=0.92,
            allowed=0.02,
            simulated=measured,
            effects={"/pooler/Gemm": 0.01},
            curve=[
                MixAccuracy(64, 0.9999, 0.999, None, None, 0.92, left_out=18, share=0.5),
                MixAccuracy(64, 0.9987, 0.990, None, None, None, left_out=2, share=0.975),
            ],
        ),
    )


def build_report(engines: list[Engine]) -> BuildReport:
    return BuildReport(
        summary=f"{len(engines)} engines",
        notes=["ONNX Runtime uses only the first profile of an engine"],
        engines=[built_engine(engine) for engine in engines],
    )


PLACED = Placement(
    CUDA,
    (
        PlacedNode("MatMul_1", "MatMul", "", CUDA, 90, False),
        PlacedNode("Gather_2", "Gather", "", CPU, 0, True),
        PlacedNode("norm", "LpNormalization", "", CPU, 10, False),
    ),
    copies=tuple(f"Memcpy_token_{index}" for index in range(9)),
    counted=True,
)


def benchmark() -> BenchResult:
    """Return a benchmark of two models at two shapes, with every table that it can have."""
    names = ("enginery", "int8: enginery", "pytorch")
    contenders = [
        make_backend_record("enginery", provider=ON_CUDA, placement=PLACED.as_json()),
        make_backend_record(
            "int8: enginery", kind="enginery", subject="int8", no_placement="it failed."
        ),
        replace(make_backend_record("pytorch"), providers=[], device_memory_bytes=12 * 10**6),
    ]
    contenders[0] = replace(contenders[0], notes=["ran with a CUDA graph"])
    pairs = [("enginery", "pytorch"), ("int8: enginery", "enginery")]
    times = {"enginery": 1.5, "int8: enginery": 0.25, "pytorch": 2345.0}
    cases = [
        make_case({"batch": 1, "sequence": 16}, times, pairs=pairs),
        make_case({"batch": 8, "sequence": 16}, dict.fromkeys(names, 40.0), pairs=pairs, rounds=3),
    ]
    first, *rest = cases[1].measurements
    noted = [replace(first, notes=["ran without a CUDA graph"], tokens_per_second=3200.0), *rest]
    cases[1] = replace(cases[1], measurements=noted, problems={"optimum": "it fails"})
    result = make_result(
        contenders=contenders,
        cases=cases,
        images=make_image_result().images,
        padding=[Padding(8, 0.4, 0.05)],
        precisions={"int8": "int8"},
        batch="1,8",
    )
    return replace(
        result,
        images=replace(result.images, problems={"pytorch": "0.png: it failed."}),
        labels=measure_accuracy("stars", {"model": [True, True], "int8": [True, False]}),
        advice=[Advice("INT8 is slower", "int8: enginery compared", "Use FP16.")],
        left_out={"tensorrt": "libnvinfer.so.10 was not found"},
        notes=["the machine was busy"],
        machine={**result.machine, "load": 9.0, "driver": "580.65"},
    )


def sample_artifact(out: Path) -> Artifact:
    """Return an artifact of two stages with a verdict."""
    artifact = make(out)
    (export,) = artifact.manifest.stages
    stages = (
        export.model_copy(
            update={
                "options": {"opset": 20, "task": "", "trust_remote_code": False, "data": None},
                "changed_options": ("opset",),
                "tools": {"torch": "2.13.0", "onnx": "1.22"},
                "peak_rss_bytes": 512 * 10**6,
            }
        ),
        export.model_copy(
            update={
                "stage": "quantize",
                "options": {"scheme": "int8", "exclude": ["/pooler/Gemm"]},
                "notes": ("the ranges were reused", "1 layer is not quantized"),
            }
        ),
    )
    verdict = Verdict(
        stage="validate",
        key=FINGERPRINT.key,
        fields={},
        passed=True,
        summary="23 outputs agree with PyTorch",
        report="reports/validation.json",
        finished="2026-01-02T00:00:00+00:00",
    )
    graph = artifact.manifest.graphs[0]
    scalar = graph.outputs[0].__class__("loss", "float32", ())
    graphs = (graph.model_copy(update={"outputs": (*graph.outputs, scalar)}),)
    changes = {"stages": stages, "verdicts": (verdict,), "graphs": graphs}
    changes |= {"precision": "int8", "residual": "fp16"}
    commit_artifact(out, artifact.manifest.model_copy(update=changes))
    return Artifact.open(out)


def engines(artifact: Artifact) -> list[Engine]:
    """Write two engines of an artifact and return them."""
    records = [
        engine_record(
            artifact,
            layers={"gemm int8": 1},
            profiles=("batch=1:8:32", "batch=64"),
            gpu={"name": "NVIDIA L4", "driver": "580.65.06"},
            hardware_compatibility="ampere-plus",
            warnings=("a weight was clipped",),
        ),
        engine_record(artifact, capabilities=(), profiles=(), layers={"other fp32": 1}),
    ]
    paths = [artifact.path / "engines" / record.directory_name for record in records]
    for path, record in zip(paths, records, strict=True):
        write_engine(path, record)
    commit_artifact(artifact.path, artifact.manifest)
    return [Engine(path, record) for path, record in zip(paths, records, strict=True)]


def reported_artifact(out: Path) -> Artifact:
    """Return an artifact with a report of every stage."""
    artifact = sample_artifact(out)
    built = build_report(engines(artifact))
    reports = (validation(), quantization(), built, benchmark())
    return Artifact.open(out).annotate(
        reports={f"reports/{report.FILE}": report.to_json() for report in reports}
    )


def prediction() -> PredictReport:
    return PredictReport(
        output="out.parquet",
        task="text-classification",
        worked=True,
        counts=Counts(2000, 3, 5, 64_000, 80_000, 0.5, 8.0),
        resumed_rows=100,
        first_bad="row 7: the text is empty.",
        workers=2,
        providers=(CPU,),
        notes=("a note",),
        start_seconds=1.25,
        total_seconds=10.0,
        peak_rss_bytes=2**28,
        size_bytes=100,
        sha256="0" * 64,
        fingerprint={},
        key="0",
    )


def lint_reports() -> LintReports:
    findings = tuple(
        LintFinding(rule, severity, node, problem, remedy)
        for rule, severity, node, problem, remedy in (
            ("types", "error", "/a/Cast", "INT16 is not supported", "Store it as INT32."),
            ("types", "error", "/b/Cast", "INT16 is not supported", "Store it as INT32."),
            ("scales", "warning", "", "a scale is 0", ""),
        )
    )
    return LintReports(
        [
            LintReport("minilm/encoder.onnx", "tensorrt", findings, "TensorRT rejects the graph"),
            LintReport("minilm/decoder.onnx", "tensorrt", (), "TensorRT accepts the graph"),
        ]
    )


PUBLISHED = Published("file:///srv/models/minilm/1", "1", is_new=True, notes=("a note",))
TRITON = TritonExport(Path("models"), "minilm", ("minilm-graph", "minilm"), 8, ("a hint",))
KSERVE = KserveExport(Path("out/inferenceservice.yaml"), "minilm", "minilm", ("a hint",))


def stage_outputs() -> list[StageOutput]:
    """Return what the stages return that make no artifact."""
    return [benchmark(), lint_reports(), prediction(), PUBLISHED, TRITON, KSERVE]


def doctor_report() -> DoctorReport:
    gib = 1 << 30
    machine = MachineStatus(
        python="3.11.7",
        platform="Linux",
        cpu="A processor",
        physical_cores=4,
        usable_cpus=8,
        cpu_features=("avx2", "fma"),
        memory_total_bytes=16 * gib,
        memory_available_bytes=8 * gib,
        store="/srv/store",
        store_free_bytes=gib,
        temporary="/srv/tmp",
        temporary_free_bytes=gib,
    )
    nvidia = NvidiaStatus(
        "580.65.06",
        "13.0",
        "",
        (Gpu("NVIDIA L4", "8.9", 24 * gib, 20 * gib),),
        {"cuDNN": "9.1"},
        "13",
    )
    packages = (
        PackageStatus("numpy", "2.0", ">=2", "", fits=True),
        PackageStatus("onnxruntime-gpu", "", "", "", fits=False, replaced_by="onnxruntime"),
        PackageStatus("oras", "", ">=0.2", "oci", fits=False),
    )
    providers = (
        ProviderStatus(CPU, "runs", "", ""),
        ProviderStatus(CUDA, "unavailable", "libcublas.so.13 was not found", "pip install"),
        ProviderStatus(AZURE, "not built in", "", ""),
    )
    finding = Finding("warning", "no CUDA", "libcublas.so.13 was not found", "pip install")
    return DoctorReport(
        "0.1.0", machine, "transformers 5.24.0", nvidia, packages, providers, (finding,)
    )


def run_result(artifact: Artifact) -> RunResult:
    """Return a run of all kinds of stages; one of them failed, and one was refused."""
    # `quantize` reads its report from the artifact.
    artifact = artifact.annotate(reports={"reports/quantization.json": quantization().to_json()})
    stages = [
        StageResult("export", artifact, True, 5.25),
        StageResult("quantize", artifact, False, 0.5),
        StageResult("validate", artifact, True, 3.0, validation()),
        StageResult("validate", artifact, True, 3.0, passed_validation()),
        StageResult("lint", artifact, True, 0.1, output=lint_reports(), problem="it does not suit"),
        StageResult("bench", artifact, True, 60.0, output=benchmark()),
        StageResult("publish", artifact, False, 1.0, output=PUBLISHED),
    ]
    return RunResult(artifact, stages, ("predict",), ())
