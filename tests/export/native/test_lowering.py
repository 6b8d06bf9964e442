"""Graphs of PyTorch modules: their names, their dims, and what they compute at other sizes."""

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from transformers.utils import torch_int

from enginery.core.errors import ExportError
from enginery.export.native import lowering
from enginery.export.native.lowering import Signature, available_routes, lower
from tests.environments import needs_transformers5

TOKENS = {0: "batch", 1: "sequence"}


class Step(torch.nn.Module):
    """A layer over the past and the new positions."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 2)

    def forward(self, **inputs):
        past, new = inputs["past_key_values.0.key"], inputs["x"]
        keys = torch.cat([past, new], dim=1) * inputs["attention_mask"][..., None]
        return {"logits": self.layer(keys), "present.0.key": keys, "unused": new}


class Scaled(torch.nn.Module):
    """Multiplies with a function of the example's shape."""

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def forward(self, x):
        return {"y": x * self.scale(x)}


def dims_of(path):
    graph = onnx.load(path).graph
    return {
        value.name: [dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim]
        for value in (*graph.input, *graph.output)
    }


@pytest.mark.parametrize("route", available_routes())
def test_names_and_dims_are_those_that_were_asked_for(tmp_path, route):
    feeds = {
        "x": torch.randn(3, 5, 4),
        "past_key_values.0.key": torch.randn(3, 7, 4),
        "attention_mask": torch.ones(3, 12),
    }
    dims = {
        "x": TOKENS,
        "past_key_values.0.key": {0: "batch", 1: "past_sequence"},
        "attention_mask": {0: "batch", 1: "past_sequence + sequence"},
    }
    path = tmp_path / "model.onnx"
    module = Step()
    lowered = lower(
        module, Signature(feeds, dims, ["logits", "present.0.key"]), path, opset=20, routes=(route,)
    )
    assert lowered.route == route
    names = dims_of(path)
    assert names["x"] == ["batch", "sequence", 4]
    assert names["past_key_values.0.key"] == ["batch", "past_sequence", 4]
    assert names["attention_mask"] == ["batch", "past_sequence + sequence"]
    assert list(names) == [*feeds, "logits", "present.0.key"]
    # The module takes its inputs by their own names again, and the graph other sizes of them.
    other = {"x": torch.randn(1, 1, 4), "past_key_values.0.key": torch.randn(1, 20, 4)}
    other["attention_mask"] = torch.ones(1, 21)
    session = onnxruntime.InferenceSession(path)
    (logits,) = session.run(["logits"], {name: t.numpy() for name, t in other.items()})
    np.testing.assert_allclose(logits, module(**other)["logits"].detach(), rtol=1e-5, atol=1e-6)


def test_no_path_of_this_machine_is_in_the_graph(tmp_path):
    path = tmp_path / "model.onnx"
    lower(
        Scaled(lambda _: 2),
        Signature({"x": torch.randn(3, 5)}, {"x": TOKENS}, ["y"]),
        path,
        opset=20,
    )
    assert b".py" not in path.read_bytes()


def test_output_that_is_an_input_or_another_output_keeps_its_name(tmp_path):
    class Same(torch.nn.Module):
        def forward(self, x):
            doubled = x * 2
            return {"a": doubled, "b": doubled, "c": x}

    path = tmp_path / "model.onnx"
    lower(
        Same(), Signature({"x": torch.randn(3, 5)}, {"x": TOKENS}, ["a", "b", "c"]), path, opset=20
    )
    assert list(dims_of(path)) == ["x", "a", "b", "c"]


@pytest.mark.parametrize("route", available_routes())
def test_length_of_a_tensor_is_a_dim(tmp_path, route):
    class Length(torch.nn.Module):
        def forward(self, x):
            return {"y": x * torch.ones(len(x), 1), "z": x.new_zeros(len([1, 2]))}

    feeds, path = {"x": torch.randn(3, 5)}, tmp_path / "model.onnx"
    lowered = lower(
        Length(), Signature(feeds, {"x": TOKENS}, ["y", "z"]), path, opset=20, routes=(route,)
    )
    assert lowered.dims == "named"
    assert "len" not in globals()


@pytest.mark.parametrize("route", available_routes())
def test_integer_of_a_dim_is_a_dim(tmp_path, route):
    class Halved(torch.nn.Module):
        def forward(self, x):
            length = int(x.shape[1] // 2 * 2) if isinstance(2, int) else 0
            ones = x.new_ones(torch_int(x.shape[0]), length)
            return {"y": x[:, :length] * ones + int("3")}

    feeds, path = {"x": torch.randn(3, 6)}, tmp_path / "model.onnx"
    lower(Halved(), Signature(feeds, {"x": TOKENS}, ["y"]), path, opset=20, routes=(route,))
    value = np.ones((5, 11), np.float32)
    (result,) = onnxruntime.InferenceSession(path).run(None, {"x": value})
    assert result.shape == (5, 10)
    assert "int" not in globals()


@needs_transformers5
def test_model_without_a_mask_computes_none(tmp_path):
    from transformers import ViTConfig, ViTModel

    config = ViTConfig(
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        image_size=8,
        patch_size=4,
    )
    feeds, path = {"pixel_values": torch.randn(3, 3, 8, 8)}, tmp_path / "model.onnx"
    signature = Signature(feeds, {"pixel_values": {0: "batch"}}, ["last_hidden_state"])
    lower(ViTModel(config).eval(), signature, path, opset=20)
    assert not {node.op_type for node in onnx.load(path).graph.node} & {"Where", "Less"}


@pytest.mark.parametrize("route", available_routes())
def test_number_of_rows_that_a_module_takes_for_a_constant_is_an_error(tmp_path, route):
    class Rows(torch.nn.Module):
        def forward(self, x):
            return {"y": torch.stack([x[index] * 2 for index in range(len(x))])}

    feeds, path = {"x": torch.randn(3, 5)}, tmp_path / "model.onnx"
    with pytest.raises(ExportError, match=r"cannot be lowered to ONNX.*with auto dims: the graph"):
        lower(Rows(), Signature(feeds, {"x": TOKENS}, ["y"]), path, opset=20, routes=(route,))


def test_dim_that_the_exporter_fixes_is_an_error(tmp_path, monkeypatch):
    right = lowering._with_torch
    monkeypatch.setattr(lowering, "_with_torch", lambda *args: right(*args[:2], {"x": None}, 20))
    feeds, path = {"x": torch.randn(3, 5)}, tmp_path / "model.onnx"
    with pytest.raises(ExportError, match="fixed batch at 3, which must vary"):
        lower(
            Scaled(lambda _: 2),
            Signature(feeds, {"x": TOKENS}, ["y"]),
            path,
            opset=20,
            routes=("dynamo",),
        )


def test_graph_that_computes_with_the_size_of_the_example_is_refused(tmp_path, monkeypatch):
    right = lowering._with_torch

    def with_torch(module, arguments, shapes, opset):
        length = arguments["x"].shape[1]
        return right(Scaled(lambda _: length), arguments, shapes, opset)

    monkeypatch.setattr(lowering, "_with_torch", with_torch)
    feeds, path = {"x": torch.randn(3, 5)}, tmp_path / "m.onnx"
    module = Scaled(lambda x: x.shape[1])
    with pytest.raises(ExportError, match=r"y differs from PyTorch's by .* for x \(2, 3\)"):
        lower(module, Signature(feeds, {"x": TOKENS}, ["y"]), path, opset=20, routes=("dynamo",))
