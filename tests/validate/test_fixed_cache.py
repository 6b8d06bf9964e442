"""Validation decodes with a cache of fixed size, too, and compares each step with PyTorch."""

import onnx
import pytest

from enginery import export_model, optimize_model, validate_model
from enginery.core.artifact.artifact import Artifact, commit_artifact


@pytest.fixture
def optimized(tiny_model, home, tmp_path):
    """An artifact for CUDA in FP16."""
    source = export_model(
        str(tiny_model("gpt2", "text-generation")), task="text-generation-with-past"
    )
    return optimize_model(source, target="cuda", precision="fp16", out=tmp_path / "optimized")


def steps_of(report, file):
    return [case for case in report.cases if case.graph == file]


@pytest.mark.slow
def test_each_step_is_compared_and_a_wrong_scale_is_found(optimized):
    file = optimized.manifest.graphs[-1].file
    report = validate_model(optimized, effort="quick", force=True)
    assert report.passed
    steps = steps_of(report, file)
    assert any("the prompt" in case.name for case in steps)
    assert any("token 5" in case.name for case in steps)
    assert {output.output for case in steps for output in case.outputs} == {"logits"}

    model = onnx.load(optimized.path / file)
    for node in model.graph.node:
        if node.op_type == "GroupQueryAttention":
            (scale,) = (each for each in node.attribute if each.name == "scale")
            scale.f *= 1.5
    onnx.save(model, optimized.path / file)
    commit_artifact(optimized.path, optimized.manifest)
    report = validate_model(Artifact.open(optimized.path), effort="quick", force=True)
    assert not report.passed
    failed = {case.graph for case in report.cases if not case.passed}
    assert failed == {file}
