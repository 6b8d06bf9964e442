"""Decoders with a cache of fixed size choose the tokens of those from which they are made."""

import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from enginery import export_model, load_model
from enginery.core.model.feeds import FeedLimits
from enginery.passes.generation.fixed_cache import add_choice, fix_cache, measure_decoder
from enginery.passes.generation.sizes import Sizes, UnsuitableGraphError
from enginery.passes.ir.graph_file import check_graph
from enginery.runtime.decoder_graphs import DecoderGraphs, is_cross_attention, is_past, present_name

GROUPED, SCATTERED = "GroupQueryAttention", "MultiHeadAttention"
STEPS = 6
ENCODER = 6
# Longer than the window of the models that have one, 8 positions.
LENGTHS = (13, 9)
ENCODER_DECODERS = ("t5", "mt5", "bart", "m2m_100", "marian", "whisper")
QUICK = [("gpt2", True), ("gpt2", False), ("llama", True), ("t5", False)]
SLOW = [
    *(
        (kind, grouped)
        for kind in ("qwen2", "qwen3", "mistral", "gemma", "gemma3_text", "opt", "phi", "phi3")
        for grouped in (True, False)
    ),
    *((kind, True) for kind in ("gpt_neox", "stablelm")),
    ("llama", False),
    *((kind, True) for kind in ("bart", "m2m_100", "marian", "whisper", "mt5")),
    ("marian", False),
]


def task_of(kind):
    if kind == "whisper":
        return "automatic-speech-recognition"
    return "text2text-generation" if kind in ENCODER_DECODERS else "text-generation"


@pytest.fixture
def decoder(tiny_model, home):
    """Return a function: `decoder("gpt2")` is the path of a tiny decoder, and its facts."""

    def make(kind):
        task = task_of(kind)
        artifact = export_model(str(tiny_model(kind, task)), task=f"{task}-with-past")
        (graphs,) = DecoderGraphs.find_all(artifact.manifest.graphs)
        path = artifact.path / graphs.later.file
        return artifact, path, measure_decoder(path, FeedLimits.from_artifact(artifact))

    return make


def fixed(facts, path, *, grouped):
    made = fix_cache(facts, grouped=grouped)
    add_choice(made.model)
    ir.save(made.model, path)
    check_graph(path)
    return made.model, made.attentions


def session(path):
    options = ort.SessionOptions()
    options.log_severity_level = 3
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def encoder_feeds(facts):
    feeds = facts.sizes.feeds(Sizes(len(LENGTHS), 1, 0, ENCODER))
    taken = {n: a for n, a in feeds.items() if is_cross_attention(n) or n.startswith("encoder_")}
    if "encoder_attention_mask" in taken:
        taken["encoder_attention_mask"][1, -2:] = 0
    return taken


def decode_fixed(path, prompts, encoder, steps=STEPS):
    """Greedy tokens of prompts, padded on the right, that go on from each other's outputs."""
    run = session(path)
    names = {value.name: value for value in run.get_inputs()}
    rows, width = len(prompts), max(map(len, prompts))
    buffer = width + steps
    lengths = np.array([len(prompt) for prompt in prompts])
    ids = np.full((rows, width), 5, np.int64)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    cache = {
        name: np.full((rows, value.shape[1], buffer, value.shape[3]), 7.0, np.float32)
        for name, value in names.items()
        if is_past(name) and not is_cross_attention(name)
    }
    state = {
        "input_ids": ids,
        "position_ids": np.tile(np.arange(width), (rows, 1)),
        "seqlens_k": (lengths - 1).astype(np.int32),
        "total_sequence_length": np.array([width], np.int32),
        "last_token": lengths - 1,
        "rows": np.arange(rows),
        "buffer_positions": np.arange(buffer),
        **encoder,
    }
    tokens = []
    for _ in range(steps):
        feeds = {name: array for name, array in {**state, **cache}.items() if name in names}
        outputs = dict(
            zip([value.name for value in run.get_outputs()], run.run(None, feeds), strict=True)
        )
        np.testing.assert_array_equal(outputs["next_ids"][:, 0], outputs["logits"].argmax(axis=-1))
        cache = {name: outputs[present_name(name)] for name in cache}
        state |= {
            "input_ids": outputs["next_ids"],
            "position_ids": outputs["next_position_ids"],
            "total_sequence_length": np.array([buffer], np.int32),
            "last_token": np.zeros(rows, np.int64),
        }
        if "next_seqlens_k" in outputs:
            state["seqlens_k"] = outputs["next_seqlens_k"]
        tokens.append(outputs["next_ids"][:, 0])
    return np.stack(tokens, axis=1).tolist()


def decode_alone(path, facts, prompts, encoder, steps=STEPS):
    """Greedy tokens of each prompt alone, each step from the beginning."""
    run = session(path)
    found = []
    for row, prompt in enumerate(prompts):
        ids = list(prompt)
        for _ in range(steps):
            feeds = facts.sizes.feeds(Sizes(1, len(ids), 0, ENCODER))
            feeds |= {name: array[row : row + 1] for name, array in encoder.items()}
            feeds["input_ids"] = np.array([ids])
            ids.append(int(run.run(["logits"], feeds)[0][0, -1].argmax()))
        found.append(ids[len(prompt) :])
    return found


@pytest.mark.more
@pytest.mark.parametrize(
    ("kind", "grouped"), [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]
)
def test_tokens_are_those_of_the_decoder(decoder, tmp_path, kind, grouped):
    _, path, facts = decoder(kind)
    _, counts = fixed(facts, tmp_path / "fixed.onnx", grouped=grouped)
    # T5 adds a bias to its scores, which GroupQueryAttention does not.
    expected = GROUPED if grouped and kind != "mt5" else SCATTERED
    assert dict(counts) == {expected: 2}
    encoder = encoder_feeds(facts)
    ids = facts.sizes.token_ids((len(LENGTHS), max(LENGTHS)), seed=4)
    prompts = [ids[row, :length].tolist() for row, length in enumerate(LENGTHS)]
    assert decode_fixed(tmp_path / "fixed.onnx", prompts, encoder) == decode_alone(
        path, facts, prompts, encoder
    )


@pytest.mark.more
def test_tokens_are_those_of_generate(decoder, tmp_path):
    from transformers import AutoTokenizer

    artifact, _, facts = decoder("gpt2")
    fixed(facts, tmp_path / "fixed.onnx", grouped=True)
    texts = ["The engine is warm and the pump runs again.", "Who?"]
    with load_model(artifact) as model:
        expected = [found.tokens for found in model.generate(texts, max_new_tokens=STEPS)]
    tokenizer = AutoTokenizer.from_pretrained(artifact.path)
    prompts = [tokenizer(text)["input_ids"] for text in texts]
    found = decode_fixed(tmp_path / "fixed.onnx", prompts, {})
    assert [row[: len(wanted)] for row, wanted in zip(found, expected, strict=True)] == [
        list(wanted) for wanted in expected
    ]


@pytest.mark.more
@pytest.mark.parametrize("kind", ["llama", pytest.param("t5", marks=pytest.mark.slow)])
def test_nothing_is_left_that_computes_sizes(decoder, tmp_path, kind):
    _, _, facts = decoder(kind)
    model, _ = fixed(facts, tmp_path / "fixed.onnx", grouped=True)
    operators = {node.op_type for node in model.graph}
    assert not operators & {"Shape", "Range", "ConstantOfShape", "If", "Loop", "NonZero"}
    assert "attention_mask" not in {value.name for value in model.graph.inputs}
    shapes = {value.name: str(value.shape) for value in (*model.graph.inputs, *model.graph.outputs)}
    past = "past_key_values.0.key" if kind == "llama" else "past_key_values.0.decoder.key"
    assert shapes[past] == shapes[present_name(past)]
    assert shapes[past].startswith("[batch,")
    assert ",buffer," in shapes[past]
    assert shapes["next_ids"] == shapes["next_position_ids"] == "[batch,1]"


@pytest.mark.parametrize(
    ("kind", "window", "biased"),
    [
        ("llama", None, False),
        ("t5", None, True),
        pytest.param("mistral", 8, False, marks=pytest.mark.slow),
    ],
)
def test_what_a_query_sees_is_measured(decoder, kind, window, biased):
    _, _, facts = decoder(kind)
    own = [seen for key, seen in facts.visibility.items() if key.startswith("present")]
    assert [(seen.window, not seen.is_plain) for seen in own] == [(window, biased)] * 2
    cross = [seen for key, seen in facts.visibility.items() if ".encoder." in key]
    assert all(seen.masks_encoder for seen in cross)


def altered(path, out, edit):
    model = ir.load(path)
    edit(model.graph)
    model.graph.sort()
    ir.save(model, out)
    return out


def insert(graph, value, op_type, others=()):
    """Insert a node behind a value."""
    node = ir.node(op_type, [value, *others], name=f"inserted {op_type} {len(graph)}")
    node.outputs[0].name = f"{value.name}/altered"
    node.outputs[0].type = value.type
    value.replace_all_uses_with(node.outputs[0])
    node.replace_input_with(0, value)
    graph.append(node)


@pytest.mark.parametrize(
    ("op_type", "message"), [("Relu", "inserted Relu"), ("Softplus", "inserted Softplus")]
)
def test_unknown_attention_is_named(decoder, tmp_path, op_type, message):
    artifact, path, _ = decoder("gpt2")

    def edit(graph):
        softmax = next(node for node in graph if node.op_type == "Softmax")
        insert(graph, softmax.inputs[0], op_type)

    changed = altered(path, tmp_path / "changed.onnx", edit)
    with pytest.raises(UnsuitableGraphError, match=message):
        measure_decoder(changed, FeedLimits.from_artifact(artifact))


def add_bias(graph, power):
    """Add the number of a key, raised to a power, to each score, as ALiBi does with the number."""
    mask = next(value for value in graph.inputs if value.name == "attention_mask")
    cast = ir.node("Cast", [mask], {"to": 1}, name="cast")
    count = ir.node("CumSum", [cast.outputs[0], constant(graph, np.array(1))], name="count")
    raised = ir.node("Pow", [count.outputs[0], constant(graph, np.array(power))], name="raised")
    shape = constant(graph, np.array([1, 2]))
    apart = ir.node("Unsqueeze", [raised.outputs[0], shape], name="apart")
    for node in (cast, count, raised, apart):
        graph.append(node)
    for softmax in [node for node in graph if node.op_type == "Softmax"]:
        insert(graph, softmax.inputs[0], "Add", [apart.outputs[0]])


@pytest.mark.more
def test_bias_that_grows_with_distance_is_added(decoder, tmp_path):
    artifact, path, _ = decoder("gpt2")
    changed = altered(path, tmp_path / "changed.onnx", lambda graph: add_bias(graph, 1))
    facts = measure_decoder(changed, FeedLimits.from_artifact(artifact))
    _, counts = fixed(facts, tmp_path / "fixed.onnx", grouped=True)
    assert dict(counts) == {SCATTERED: 2}
    prompts = facts.sizes.token_ids((2, 12), seed=5).tolist()
    assert decode_fixed(tmp_path / "fixed.onnx", prompts, {}) == decode_alone(
        changed, facts, prompts, {}
    )


def test_bias_that_depends_on_more_than_distance_is_refused(decoder, tmp_path):
    artifact, path, _ = decoder("gpt2")
    changed = altered(path, tmp_path / "changed.onnx", lambda graph: add_bias(graph, 2))
    with pytest.raises(UnsuitableGraphError, match="does not follow from distances"):
        measure_decoder(changed, FeedLimits.from_artifact(artifact))


def constant(graph, array):
    value = ir.Value(
        name=f"constant {len(graph.initializers)}", const_value=ir.tensor(array.astype(np.int64))
    )
    value.type, value.shape = ir.TensorType(ir.DataType.INT64), ir.Shape(array.shape)
    graph.register_initializer(value)
    return value
