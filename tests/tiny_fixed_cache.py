"""Graphs of GPT-2 with a cache of fixed size, written by hand from its weights.

    model = fixed_cache_model(AutoModelForCausalLM.from_pretrained(directory), grouped=True)

They have the inputs and outputs of the graphs that `optimize --target cuda` adds to a decoder.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from onnx import ModelProto, TensorProto, helper, numpy_helper

from enginery.core.artifact.manifest import GraphRecord
from enginery.core.shapes import TensorSpec

_CONTRIB = "com.microsoft"
_DTYPES = {
    TensorProto.FLOAT: "float32",
    TensorProto.INT64: "int64",
    TensorProto.INT32: "int32",
}


class _Graph:
    def __init__(self) -> None:
        self.nodes: list[Any] = []
        self.weights: list[Any] = []
        self.inputs: list[Any] = []
        self.outputs: list[Any] = []

    def weight(self, name: str, array: Any) -> str:
        self.weights.append(numpy_helper.from_array(np.ascontiguousarray(array), name))
        return name

    def add(self, op: str, inputs: list[str], outputs: str | list[str], **attributes: Any) -> str:
        names = [outputs] if isinstance(outputs, str) else outputs
        self.nodes.append(helper.make_node(op, inputs, names, **attributes))
        return names[0]

    def input(self, name: str, element: int, dims: list[Any]) -> None:
        self.inputs.append(helper.make_tensor_value_info(name, element, dims))

    def output(self, name: str, element: int, dims: list[Any]) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, element, dims))


def fixed_cache_model(model: Any, *, grouped: bool) -> ModelProto:
    """Return a graph of GPT-2 in FP32.

    Args:
        model: a GPT2LMHeadModel of transformers.
        grouped: attend with GroupQueryAttention; else write the cache with ScatterND into
            (batch, buffer, width) and attend with MultiHeadAttention and a bias.
    """
    config = model.config
    heads, width = config.n_head, config.n_embd
    state = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    graph = _Graph()
    graph.input("input_ids", TensorProto.INT64, ["batch", "sequence"])
    graph.input("position_ids", TensorProto.INT64, ["batch", "sequence"])
    graph.input("last_token", TensorProto.INT64, ["batch"])
    if grouped:
        graph.input("seqlens_k", TensorProto.INT32, ["batch"])
        graph.input("total_sequence_length", TensorProto.INT32, [1])
        cache = ["batch", heads, "buffer", width // heads]
    else:
        graph.input("buffer_positions", TensorProto.INT64, ["buffer"])
        cache = ["batch", "buffer", width]
        _add_attention_bias(graph)
    graph.input("rows", TensorProto.INT64, ["batch"])
    for name, value in (("zero", [0]), ("one", [1]), ("two", [2])):
        graph.weight(name, np.array(value, np.int64))
    tokens = graph.add(
        "Gather", [graph.weight("wte", state["transformer.wte.weight"]), "input_ids"], "tokens"
    )
    places = graph.add(
        "Gather", [graph.weight("wpe", state["transformer.wpe.weight"]), "position_ids"], "places"
    )
    hidden = graph.add("Add", [tokens, places], "embedded")
    for layer in range(config.n_layer):
        hidden = _add_layer(graph, state, layer, hidden, heads, cache, grouped=grouped)
    hidden = _add_norm(graph, state, "transformer.ln_f", hidden)
    indices = graph.add("Concat", ["rows.2", "last.2"], "last.index", axis=1)
    last = graph.add("GatherND", [hidden, indices], "last")
    graph.add("MatMul", [last, graph.weight("head", state["lm_head.weight"].T)], "logits")
    chosen = graph.add("ArgMax", ["logits"], "chosen", axis=1, keepdims=1)
    graph.add("Identity", [chosen], "next_ids")
    position = graph.add("GatherND", ["position_ids", "last.index"], "last.position")
    after = graph.add("Add", [position, "one"], "after")
    graph.add("Unsqueeze", [after, "one"], "next_position_ids")
    graph.nodes.insert(0, helper.make_node("Unsqueeze", ["last_token", "one"], ["last.2"]))
    graph.nodes.insert(0, helper.make_node("Unsqueeze", ["rows", "one"], ["rows.2"]))
    graph.output("logits", TensorProto.FLOAT, ["batch", config.vocab_size])
    graph.output("next_ids", TensorProto.INT64, ["batch", 1])
    graph.output("next_position_ids", TensorProto.INT64, ["batch", 1])
    if grouped:
        graph.weight("one.32", np.array([1], np.int32))
        graph.add("Add", ["seqlens_k", "one.32"], "next_seqlens_k")
        graph.output("next_seqlens_k", TensorProto.INT32, ["batch"])
    return helper.make_model(
        helper.make_graph(graph.nodes, "gpt2", graph.inputs, graph.outputs, graph.weights),
        opset_imports=[helper.make_opsetid("", 17), helper.make_opsetid(_CONTRIB, 1)],
        ir_version=9,
    )


def graph_record(model: ModelProto, file: str) -> GraphRecord:
    """Return what a manifest says of a graph."""
    inputs, outputs = (
        tuple(
            TensorSpec(
                value.name,
                _DTYPES[value.type.tensor_type.elem_type],
                tuple(d.dim_param or d.dim_value for d in value.type.tensor_type.shape.dim),
            )
            for value in values
        )
        for values in (model.graph.input, model.graph.output)
    )
    return GraphRecord(file=file, opset=17, inputs=inputs, outputs=outputs, data_files=())


def _add_norm(graph: _Graph, state: dict[str, Any], name: str, hidden: str) -> str:
    scale = graph.weight(f"{name}.weight", state[f"{name}.weight"])
    bias = graph.weight(f"{name}.bias", state[f"{name}.bias"])
    return graph.add("LayerNormalization", [hidden, scale, bias], f"{name}.out", epsilon=1e-5)


def _add_linear(graph: _Graph, state: dict[str, Any], name: str, hidden: str) -> str:
    weight = graph.weight(f"{name}.weight", state[f"{name}.weight"])
    bias = graph.weight(f"{name}.bias", state[f"{name}.bias"])
    product = graph.add("MatMul", [hidden, weight], f"{name}.product")
    return graph.add("Add", [product, bias], f"{name}.out")


def _add_layer(
    graph: _Graph,
    state: dict[str, Any],
    layer: int,
    hidden: str,
    heads: int,
    cache: list[Any],
    *,
    grouped: bool,
) -> str:
    name = f"transformer.h.{layer}"
    joined = _add_linear(
        graph, state, f"{name}.attn.c_attn", _add_norm(graph, state, f"{name}.ln_1", hidden)
    )
    keys, values = f"{layer}.key", f"{layer}.value"
    pasts = [f"past_key_values.{part}" for part in (keys, values)]
    for part in (keys, values):
        graph.input(f"past_key_values.{part}", TensorProto.FLOAT, cache)
        graph.output(f"present.{part}", TensorProto.FLOAT, cache)
    if grouped:
        attended = graph.add(
            "GroupQueryAttention",
            [joined, "", "", *pasts, "seqlens_k", "total_sequence_length"],
            [f"{name}.attended", f"present.{keys}", f"present.{values}"],
            domain=_CONTRIB,
            num_heads=heads,
            kv_num_heads=heads,
        )
    else:
        parts = [f"{name}.{part}" for part in "qkv"]
        graph.weight(f"{name}.sizes", np.full(3, cache[-1], np.int64))
        graph.add("Split", [joined, f"{name}.sizes"], parts, axis=2)
        for part, new in ((keys, parts[1]), (values, parts[2])):
            graph.add("ScatterND", [f"past_key_values.{part}", "written", new], f"present.{part}")
        attended = graph.add(
            "MultiHeadAttention",
            [parts[0], f"present.{keys}", f"present.{values}", "", "", "bias"],
            f"{name}.attended",
            domain=_CONTRIB,
            num_heads=heads,
        )
    projected = _add_linear(graph, state, f"{name}.attn.c_proj", attended)
    hidden = graph.add("Add", [hidden, projected], f"{name}.middle")
    wide = _add_linear(
        graph, state, f"{name}.mlp.c_fc", _add_norm(graph, state, f"{name}.ln_2", hidden)
    )
    active = graph.add("FastGelu", [wide], f"{name}.active", domain=_CONTRIB)
    narrow = _add_linear(graph, state, f"{name}.mlp.c_proj", active)
    return graph.add("Add", [hidden, narrow], f"{name}.end")


def _add_attention_bias(graph: _Graph) -> None:
    """Add what is written where, and the bias that leaves out later positions."""
    graph.weight("none", np.array(0, np.float32))
    graph.weight("never", np.array(-1e9, np.float32))
    graph.add("Unsqueeze", ["position_ids", "two"], "positions.3")
    graph.add("Unsqueeze", ["rows.2", "one"], "rows.3")
    graph.add("Mul", ["positions.3", "zero"], "no.rows")
    graph.add("Add", ["no.rows", "rows.3"], "rows.all")
    graph.add("Concat", ["rows.all", "positions.3"], "written", axis=2)
    graph.add("LessOrEqual", ["buffer_positions", "positions.3"], "seen")
    graph.add("Where", ["seen", "none", "never"], "bias.3")
    graph.add("Unsqueeze", ["bias.3", "one"], "bias")
