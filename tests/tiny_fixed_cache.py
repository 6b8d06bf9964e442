"""Decoders with a cache of fixed size, written by hand from the weights of GPT-2 and BART.

    model = fixed_gpt2(AutoModelForCausalLM.from_pretrained(directory), grouped=True)

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

    def norm(self, state: dict[str, Any], name: str, hidden: str) -> str:
        scale = self.weight(f"{name}.weight", state[f"{name}.weight"])
        bias = self.weight(f"{name}.bias", state[f"{name}.bias"])
        return self.add("LayerNormalization", [hidden, scale, bias], f"{name}.out", epsilon=1e-5)

    def linear(self, state: dict[str, Any], name: str, hidden: str, *, turned: bool = False) -> str:
        """Add a linear layer; `turned` for weights of (outputs, inputs)."""
        array = state[f"{name}.weight"].T if turned else state[f"{name}.weight"]
        bias = self.weight(f"{name}.bias", state[f"{name}.bias"])
        product = self.add("MatMul", [hidden, self.weight(f"{name}.weight", array)], f"{name}.mul")
        return self.add("Add", [product, bias], f"{name}.out")

    def output(self, name: str, element: int, dims: list[Any]) -> None:
        self.outputs.append(helper.make_tensor_value_info(name, element, dims))


def fixed_gpt2(model: Any, *, grouped: bool) -> ModelProto:
    """Return the graph of GPT-2 in FP32.

    Args:
        model: a GPT2LMHeadModel of transformers.
        grouped: attend with GroupQueryAttention; else write the cache with ScatterND into
            (batch, buffer, width) and attend with MultiHeadAttention and a bias.
    """
    config = model.config
    heads, width = config.n_head, config.n_embd
    state = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    graph = _begin()
    if grouped:
        graph.input("seqlens_k", TensorProto.INT32, ["batch"])
        graph.input("total_sequence_length", TensorProto.INT32, [1])
        cache = ["batch", heads, "buffer", width // heads]
    else:
        cache = ["batch", "buffer", width]
        _add_attention_bias(graph)
    tokens = graph.add(
        "Gather", [graph.weight("wte", state["transformer.wte.weight"]), "input_ids"], "tokens"
    )
    table = graph.weight("wpe", state["transformer.wpe.weight"])
    places = graph.add("Gather", [table, "position_ids"], "places")
    hidden = graph.add("Add", [tokens, places], "embedded")
    for layer in range(config.n_layer):
        hidden = _add_gpt2_layer(graph, state, layer, hidden, heads, cache)
    hidden = graph.norm(state, "transformer.ln_f", hidden)
    return _finish(graph, hidden, state["lm_head.weight"].T)


def fixed_bart(model: Any) -> ModelProto:
    """Return the decoder of BART in FP32; its encoder is the exported one.

    Args:
        model: a BartForConditionalGeneration of transformers.
    """
    config = model.config
    heads, width = config.decoder_attention_heads, config.d_model
    state = {name: value.detach().numpy() for name, value in model.state_dict().items()}
    graph = _begin()
    _add_attention_bias(graph)
    graph.input("encoder_attention_mask", TensorProto.INT64, ["batch", "encoder_sequence"])
    graph.add("Cast", ["encoder_attention_mask"], "encoder.mask", to=TensorProto.INT32)
    table = graph.weight("tokens.weight", state["model.shared.weight"])
    tokens = graph.add("Gather", [table, "input_ids"], "tokens")
    table = graph.weight("places.weight", state["model.decoder.embed_positions.weight"])
    graph.add("Add", ["position_ids", "two"], "places.index")
    places = graph.add("Gather", [table, "places.index"], "places")
    hidden = graph.add("Add", [tokens, places], "embedded")
    hidden = graph.norm(state, "model.decoder.layernorm_embedding", hidden)
    sizes = (heads, width)
    for layer in range(config.decoder_layers):
        hidden = _add_bart_layer(graph, state, layer, hidden, sizes)
    bias = state["final_logits_bias"][0]
    return _finish(graph, hidden, state["model.shared.weight"].T, bias)


def _begin() -> _Graph:
    """Return a graph with the inputs and constants of all."""
    graph = _Graph()
    graph.input("input_ids", TensorProto.INT64, ["batch", "sequence"])
    graph.input("position_ids", TensorProto.INT64, ["batch", "sequence"])
    graph.input("last_token", TensorProto.INT64, ["batch"])
    graph.input("rows", TensorProto.INT64, ["batch"])
    for name, value in (("zero", [0]), ("one", [1]), ("two", [2])):
        graph.weight(name, np.array(value, np.int64))
    graph.add("Unsqueeze", ["rows", "one"], "rows.2")
    graph.add("Unsqueeze", ["last_token", "one"], "last.2")
    return graph


def _finish(graph: _Graph, hidden: str, head: Any, bias: Any = None) -> ModelProto:
    """Add the logits of the last tokens and the choice of the next; return the model."""
    indices = graph.add("Concat", ["rows.2", "last.2"], "last.index", axis=1)
    last = graph.add("GatherND", [hidden, indices], "last")
    product = graph.add("MatMul", [last, graph.weight("head", head)], "product")
    graph.weight("head.bias", np.zeros(head.shape[1], np.float32) if bias is None else bias)
    graph.add("Add", [product, "head.bias"], "logits")
    graph.add("ArgMax", ["logits"], "next_ids", axis=1, keepdims=1)
    position = graph.add("GatherND", ["position_ids", indices], "last.position")
    graph.add("Add", [position, "one"], "after")
    graph.add("Unsqueeze", ["after", "one"], "next_position_ids")
    graph.output("logits", TensorProto.FLOAT, ["batch", head.shape[1]])
    graph.output("next_ids", TensorProto.INT64, ["batch", 1])
    graph.output("next_position_ids", TensorProto.INT64, ["batch", 1])
    if any(value.name == "seqlens_k" for value in graph.inputs):
        graph.weight("one.32", np.array([1], np.int32))
        graph.add("Add", ["seqlens_k", "one.32"], "next_seqlens_k")
        graph.output("next_seqlens_k", TensorProto.INT32, ["batch"])
    return helper.make_model(
        helper.make_graph(graph.nodes, "decoder", graph.inputs, graph.outputs, graph.weights),
        opset_imports=[helper.make_opsetid("", 20), helper.make_opsetid(_CONTRIB, 1)],
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
    return GraphRecord(file=file, opset=20, inputs=inputs, outputs=outputs, data_files=())


def _add_gpt2_layer(
    graph: _Graph,
    state: dict[str, Any],
    layer: int,
    hidden: str,
    heads: int,
    cache: list[Any],
) -> str:
    name = f"transformer.h.{layer}"
    normed = graph.norm(state, f"{name}.ln_1", hidden)
    joined = graph.linear(state, f"{name}.attn.c_attn", normed)
    keys, values = f"{layer}.key", f"{layer}.value"
    for part in (keys, values):
        graph.input(f"past_key_values.{part}", TensorProto.FLOAT, cache)
        graph.output(f"present.{part}", TensorProto.FLOAT, cache)
    if len(cache) == 4:
        pasts = [f"past_key_values.{part}" for part in (keys, values)]
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
        attended = _add_own_attention(graph, name, (keys, values), parts, heads)
    projected = graph.linear(state, f"{name}.attn.c_proj", attended)
    hidden = graph.add("Add", [hidden, projected], f"{name}.middle")
    normed = graph.norm(state, f"{name}.ln_2", hidden)
    wide = graph.linear(state, f"{name}.mlp.c_fc", normed)
    active = graph.add("FastGelu", [wide], f"{name}.active", domain=_CONTRIB)
    narrow = graph.linear(state, f"{name}.mlp.c_proj", active)
    return graph.add("Add", [hidden, narrow], f"{name}.end")


def _add_bart_layer(
    graph: _Graph, state: dict[str, Any], layer: int, hidden: str, sizes: tuple[int, int]
) -> str:
    heads, width = sizes
    name = f"model.decoder.layers.{layer}"
    keys, values = f"{layer}.decoder.key", f"{layer}.decoder.value"
    for part in (keys, values):
        graph.input(f"past_key_values.{part}", TensorProto.FLOAT, ["batch", "buffer", width])
        graph.output(f"present.{part}", TensorProto.FLOAT, ["batch", "buffer", width])
    parts = [
        graph.linear(state, f"{name}.self_attn.{part}_proj", hidden, turned=True) for part in "qkv"
    ]
    attended = _add_own_attention(graph, name, (keys, values), parts, heads)
    projected = graph.linear(state, f"{name}.self_attn.out_proj", attended, turned=True)
    summed = graph.add("Add", [hidden, projected], f"{name}.sum")
    hidden = graph.norm(state, f"{name}.self_attn_layer_norm", summed)
    crossed = [f"past_key_values.{layer}.encoder.{part}" for part in ("key", "value")]
    for part in crossed:
        dims = ["batch", heads, "encoder_sequence", width // heads]
        graph.input(part, TensorProto.FLOAT, dims)
    query = graph.linear(state, f"{name}.encoder_attn.q_proj", hidden, turned=True)
    attended = graph.add(
        "MultiHeadAttention",
        [query, *crossed, "", "encoder.mask"],
        f"{name}.crossed",
        domain=_CONTRIB,
        num_heads=heads,
    )
    projected = graph.linear(state, f"{name}.encoder_attn.out_proj", attended, turned=True)
    summed = graph.add("Add", [hidden, projected], f"{name}.sum.2")
    hidden = graph.norm(state, f"{name}.encoder_attn_layer_norm", summed)
    wide = graph.linear(state, f"{name}.fc1", hidden, turned=True)
    active = graph.add("Gelu", [wide], f"{name}.active")
    narrow = graph.linear(state, f"{name}.fc2", active, turned=True)
    summed = graph.add("Add", [hidden, narrow], f"{name}.sum.3")
    return graph.norm(state, f"{name}.final_layer_norm", summed)


def _add_own_attention(
    graph: _Graph, name: str, parts: tuple[str, str], projected: list[str], heads: int
) -> str:
    """Add the writing of new keys and values, and the attention to all."""
    query, *new = projected
    for part, value in zip(parts, new, strict=True):
        graph.add("ScatterND", [f"past_key_values.{part}", "written", value], f"present.{part}")
    return graph.add(
        "MultiHeadAttention",
        [query, *(f"present.{part}" for part in parts), "", "", "bias"],
        f"{name}.attended",
        domain=_CONTRIB,
        num_heads=heads,
    )


def _add_attention_bias(graph: _Graph) -> None:
    """Add what is written where, and the bias that leaves out later positions."""
    graph.input("buffer_positions", TensorProto.INT64, ["buffer"])
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
