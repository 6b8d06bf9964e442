"""Graphs that draw random numbers are compared on those that PyTorch drew."""

import numpy as np
import onnx
import pytest
import torch
from onnx import helper

from benchmarks.model_types import save_companions, save_model
from enginery import export_model, validate_model
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ArtifactError, SourceError
from enginery.core.shapes import TensorSpec
from enginery.runtime.onnxruntime.tracing import GraphTracer
from enginery.runtime.pytorch.random import RandomNumbers
from enginery.validate.cases.sweep import ValidationCase
from enginery.validate.random_numbers import give_random_numbers
from enginery.validate.reference import ReferenceOutputs, ReferenceRun
from tests.core.artifacts import edit_manifest
from tests.validate.faults.edits import break_graph


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("random")


@pytest.fixture(scope="module")
def vits(folder):
    source = save_model("vits", "text-to-audio", folder / "vits")
    return export_model(str(source), task="text-to-audio")


@pytest.fixture(scope="module")
def speecht5(folder):
    source = save_model("speecht5", "text-to-audio", folder / "speecht5")
    return export_model(
        str(source), task="text-to-audio", model_kwargs=save_companions("speecht5", folder)
    )


@pytest.mark.more
def test_noise_and_masks_are_pytorchs(vits, folder):
    source = save_model("vit_mae", "feature-extraction", folder / "vit_mae")
    for artifact in (vits, export_model(str(source), task="feature-extraction")):
        report = validate_model(artifact, effort="quick")
        assert report.passed, report.summary
        assert "model.onnx was compared on the random numbers that PyTorch drew" in report.notes
        assert all(case.outputs for case in report.cases)


@pytest.mark.slow
def test_values_that_are_dropped_in_inference_are_pytorchs(speecht5):
    report = validate_model(speecht5, effort="quick")
    assert report.passed, report.summary
    compared = {case.graph for case in report.cases if case.outputs}
    assert compared == {record.file for record in speecht5.manifest.graphs}
    with_past = next(g for g in speecht5.manifest.graphs if "with_past" in g.file)
    assert {spec.dims[0] for spec in with_past.inputs} == {1}


@pytest.mark.slow
def test_noise_of_another_size_fails(vits, copied):
    def shrink(model):
        """Multiply what is drawn last."""
        node = next(n for n in reversed(model.graph.node) if n.op_type == "RandomNormalLike")
        index = list(model.graph.node).index(node)
        drawn = node.output[0]
        node.output[0] = "drawn"
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.float32(0.97), "factor"))
        model.graph.node.insert(index + 1, helper.make_node("Mul", ["drawn", "factor"], [drawn]))

    report = validate_model(break_graph(copied(vits), shrink), effort="quick")
    assert not report.passed
    assert "differ from PyTorch" in report.summary


GRAPH = """<ir_version: 10, opset_import: ["" : 20]>
g (float[batch, 4] x) => (float[batch, 4] y) {
    NODES
}"""
PLAIN = "n = RandomNormalLike(x)\n u = RandomUniformLike(x)\n m = Mul(n, u)\n y = Add(x, m)"
DRAWN = {"enginery.random.0.normal": (2, 4), "enginery.random.1.uniform": (2, 4)}


@pytest.fixture
def give(tmp_path):
    """Return a function that gives a graph the numbers of a reference."""

    def run(nodes, shapes=DRAWN):
        path = tmp_path / "graph.onnx"
        onnx.save(onnx.parser.parse_model(GRAPH.replace("NODES", nodes)), path)
        record = GraphRecord(
            file="model.onnx",
            opset=20,
            inputs=(TensorSpec("x", "float32", ("batch", 4)),),
            outputs=(TensorSpec("y", "float32", ("batch", 4)),),
            data_files=(),
        )
        numbers = {name: np.full(shape, 0.5, np.float32) for name, shape in shapes.items()}
        np.savez(tmp_path / "drawn.npz", **numbers)
        expected = ReferenceOutputs({"y": tmp_path / "y.npy"}, random=tmp_path / "drawn.npz")
        case = ValidationCase("small", "sweep", lambda: {"x": np.ones((2, 4), np.float32)})
        reference = ReferenceRun("PyTorch", [expected], {}, [])
        return give_random_numbers(path, record, [case], reference, tmp_path / "given")

    return run


def test_given_numbers_are_inputs_of_a_copy(give):
    given = give(PLAIN)
    assert [str(spec) for spec in given.record.inputs[1:]] == [
        f"{name}: float32 ({name}.0, {name}.1)" for name in DRAWN
    ]
    with GraphTracer(given.path, ["y"]) as run:
        np.testing.assert_allclose(run(given.cases[0].make())["y"], 1.25)


@pytest.mark.parametrize(
    ("nodes", "reason"),
    [
        (
            PLAIN.replace("RandomUniformLike(x)", "RandomUniformLike(one)").replace(
                "n =",
                "starts = Constant<value_ints = [0]>()\n ends = Constant<value_ints = [1]>()"
                "\n one = Slice(x, starts, ends)\n n =",
            ),
            "the graph draws (1, 4) for 'small', expected (2, 4)",
        ),
        (
            PLAIN.replace("Uniform", "Normal"),
            "the graph draws normal, normal, but PyTorch draws normal, uniform",
        ),
        (
            PLAIN.replace("n = RandomNormalLike(x)", "n = Identity(x)"),
            "the graph draws uniform, but PyTorch draws normal, uniform",
        ),
        (PLAIN.replace("Like(x)", "Like<scale = 1.5>(x)", 1), "scale 1.5, expected 1"),
        (PLAIN.replace("RandomUniformLike(x)", "Bernoulli(x)"), "Bernoulli is not supported"),
    ],
    ids=["shape", "distribution", "count", "scale", "op"],
)
def test_other_draws_are_named(give, nodes, reason):
    assert reason in give(nodes)


class Drawing(torch.nn.Module):
    def forward(self, x):
        kept = torch.bernoulli(x, p=0.5)
        return torch.randn_like(x) + torch.rand(x.shape, dtype=x.dtype) + kept


def test_a_run_in_fp64_gets_the_same_numbers():
    model, x = Drawing(), torch.zeros(3, 4)
    with torch.inference_mode(), RandomNumbers() as drawn:
        first = model(x)
    assert list(drawn.arrays) == [
        "enginery.random.0.uniform",
        "enginery.random.1.normal",
        "enginery.random.2.uniform",
    ]
    with torch.inference_mode(), RandomNumbers(drawn.arrays):
        second = model(x.double())
    assert second.dtype == torch.float64
    np.testing.assert_allclose(second, first, atol=1e-6)


def test_a_run_that_draws_other_numbers_is_an_error():
    with RandomNumbers() as drawn:
        torch.randn(2, 3)
    with (
        pytest.raises(ValueError, match="draws other random numbers than in the run before"),
        RandomNumbers(drawn.arrays),
    ):
        torch.randn(3, 2)


@pytest.mark.slow
def test_rows_of_codebooks_validate(folder):
    """MusicGen's tokens have four rows for each row of the batch."""
    source = save_model("musicgen", "text-to-audio", folder / "musicgen")
    artifact = export_model(str(source), task="text-to-audio")
    report = validate_model(artifact, effort="quick")
    assert report.passed, report.summary
    ids = {case.shapes["input_ids"][0] for case in report.cases if case.graph.startswith("decoder")}
    assert ids == {4, 8, 12, 16}


@pytest.mark.more
def test_a_vocoder_that_is_gone_or_has_changed_is_an_error(speecht5, copied):
    artifact = copied(speecht5)
    (stage,) = artifact.manifest.stages
    for changes, error, problem in (
        ({"fields": {**stage.fields, "model_kwargs": "0" * 64}}, SourceError, "has changed since"),
        (
            {"options": {**stage.options, "model_kwargs": {"vocoder": "/nowhere"}}},
            SourceError,
            "/nowhere",
        ),
        ({"options": {**stage.options, "model_kwargs": ["x"]}}, ArtifactError, "not its name"),
    ):
        changed = stage.model_copy(update=changes).model_dump(mode="json")
        edit_manifest(artifact.path, stages=[changed])
        with pytest.raises(error, match=problem):
            validate_model(artifact.path, effort="quick")
