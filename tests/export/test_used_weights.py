"""Weights of a model that no output of its graphs depends on."""

import numpy as np
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper, save

from enginery.core.errors import ExportError
from enginery.export.used_weights import UsedWeights, require_used


class Tower(torch.nn.Module):
    """Features, their projection, and an index that no gradient passes."""

    def __init__(self, projection="projection"):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 4)
        self.choice = torch.nn.Linear(4, 4, bias=False)
        self.name = projection
        self.add_module(projection, torch.nn.Linear(4, 3))

    def forward(self, x):
        features = self.layer(x)
        chosen = self.choice(features)
        index = chosen.argmax(-1, keepdim=True)
        features = features + features.gather(1, index)
        return {
            "features": features,
            "scores": chosen,
            "vector": getattr(self, self.name)(features),
        }


def traced(model, *outputs):
    """Return what was collected of a graph with some of the model's outputs."""
    used = UsedWeights()
    whole = Tower.forward
    model.forward = lambda x: {name: whole(model, x)[name] for name in outputs}  # as Optimum does
    with torch.no_grad():
        used.add(model, {"x": torch.ones(2, 4)}, "model.onnx")
    return used


@pytest.fixture
def graph(tmp_path):
    """A graph with the weights of the layer and the choice, transposed as tracing leaves them."""

    def write(model):
        weights = [numpy_helper.from_array(model.choice.weight.detach().numpy().T.copy(), "val_1")]
        x = helper.make_tensor_value_info("x", TensorProto.FLOAT, ["batch", 4])
        made = helper.make_graph([], "g", [x], [x], weights)
        save(helper.make_model(made), tmp_path / "model.onnx")
        return [tmp_path / "model.onnx"]

    return write


def test_projection_whose_output_the_graph_lacks_is_refused_by_name(graph):
    model = Tower()
    used = traced(model, "features")
    files = graph(model)
    # The weights of the choice are in the graph, though no gradient comes to them.
    assert used.left_out(model, files) == (["projection.bias", "projection.weight"], [])
    with pytest.raises(ExportError, match=r"in no graph: projection\.bias, projection\.weight\."):
        require_used(model, used, files, do="Ask for it.")
    off = UsedWeights(is_on=False)  # a task has outputs of its own
    off.add(model, {"x": torch.ones(2, 4)}, "model.onnx")
    assert require_used(model, off, files, do="Ask for it.") == []


def test_pooler_is_noted_unless_the_files_lack_it(graph):
    model = Tower("pooler")
    used = traced(model, "features")
    files = graph(model)
    assert require_used(model, used, files, do="Ask for it.") == [
        "left out, because no output depends on it: pooler.bias, pooler.weight"
    ]
    model.untrained_weights = ("pooler.bias", "pooler.weight")
    assert require_used(model, used, files, do="Ask for it.") == []


class Images(torch.nn.Module):
    """A last hidden state, and a vector behind a layer that is not named pooler: ConvNeXT."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(4, 4)
        self.layernorm = torch.nn.LayerNorm(4)
        torch.nn.init.normal_(self.layernorm.weight)

    def forward(self, x):
        hidden = self.layer(x)
        return {"last_hidden_state": hidden, "pooler_output": self.layernorm(hidden)}


def test_pooler_of_another_name_is_noted(graph):
    model = Images()
    used, whole = UsedWeights(), Images.forward
    model.forward = lambda x: {"last_hidden_state": whole(model, x)["last_hidden_state"]}
    used.add(model, {"x": torch.ones(2, 4)}, "model.onnx")
    assert require_used(model, used, [], do="Ask for it.") == [
        "left out, because no output depends on it: layernorm.bias, layernorm.weight"
    ]


def test_graph_with_all_outputs_leaves_nothing_out(graph):
    model = Tower()
    used = traced(model, "features", "scores", "vector")
    assert require_used(model, used, graph(model), do="Ask for it.") == []


def test_model_that_cannot_run_is_noted(graph):
    model = Tower()
    used = UsedWeights()
    used.add(model, {"x": torch.ones(2, 5)}, "model.onnx")
    (note,) = require_used(model, used, graph(model), do="Ask for it.")
    assert note.startswith("model.onnx: which weights are in use is not known: mat1 and mat2")
    assert np.isfinite(model.layer.weight.detach().numpy()).all()
