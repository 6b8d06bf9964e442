"""Tensors of a checkpoint that no parameter of the model took."""

import json
import re

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from enginery.core.errors import ExportError
from enginery.runtime.torch_checkpoint import UnusedTensor, find_renamed
from enginery.runtime.torch_runner import TorchOptions, load_pytorch
from tests.tiny import save_tiny

QUERY = "bert.encoder.layer.0.attention.self.query"
WEIGHTS = re.compile(r"encoder\.layer\..*\.weight$")


@pytest.fixture(scope="module")
def bert(tmp_path_factory):
    return save_tiny("bert", "text-classification", tmp_path_factory.mktemp("model") / "bert")


@pytest.fixture
def changed(bert, tmp_path):
    """Return a function: a copy of the model with other tensors and settings, in a format."""

    def make(edit, *, form="safetensors", config=None, files=None):
        tensors = edit(load_file(bert / "model.safetensors"))
        for file in bert.iterdir():
            if file.name != "model.safetensors":
                (tmp_path / file.name).write_bytes(file.read_bytes())
        document = json.loads((bert / "config.json").read_text(encoding="utf-8"))
        (tmp_path / "config.json").write_text(json.dumps({**document, **(config or {})}))
        for name, content in (files or {}).items():
            (tmp_path / name).write_text(json.dumps(content))
        if form == "bin":
            torch.save(tensors, tmp_path / "pytorch_model.bin")
        elif form == "safetensors":
            save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        else:  # two files, of which the index may not name everything
            names = sorted(tensors)
            parts = {"a": names[::2], "b": names[1::2]}
            for part, listed in parts.items():
                shard = {name: tensors[name] for name in listed}
                save_file(shard, tmp_path / f"model-{part}.safetensors", metadata={"format": "pt"})
            weight_map = {
                name: f"model-{part}.safetensors"
                for part, listed in parts.items()
                for name in listed
            }
            if form == "unlisted":
                weight_map = {n: f for n, f in weight_map.items() if "lora" not in n}
            index = {"metadata": {}, "weight_map": weight_map}
            (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
        return tmp_path

    return make


def load(path, task="text-classification"):
    pickled = not list(path.glob("*.safetensors"))
    return load_pytorch(path, task, TorchOptions(pickled=pickled))


def quantized(dtype, largest, *parts, weight="weight"):
    """Return an edit that stores every layer's matrices at another precision, with more tensors."""

    def edit(tensors):
        stored = {}
        for name, tensor in tensors.items():
            if tensor.ndim != 2 or not WEIGHTS.search(name):
                stored[name] = tensor
                continue
            scale = tensor.abs().max() / largest
            values = tensor / scale
            values = values if dtype.is_floating_point else values.round()
            module = name.removesuffix("weight")
            stored[module + weight] = values.to(dtype)
            stored |= {module + part: scale.reshape(1).clone() for part in parts}
        return stored

    return edit


def more(**tensors):
    return lambda stored: stored | {f"{QUERY}.{name}": value for name, value in tensors.items()}


QUANTIZED = {
    "modelopt fp8": quantized(torch.float8_e4m3fn, 448, "weight_scale", "input_scale"),
    "fine-grained fp8": quantized(torch.float8_e4m3fn, 448, "weight_scale_inv"),
    "fp8 with scales of other names": quantized(torch.float8_e5m2, 448, "scale_weight"),
    "fp8 with scales of unknown names": quantized(torch.float8_e4m3fn, 448, "multiplier"),
    "int8": quantized(torch.int8, 127, "weight_scale"),
    "int8 without scales": quantized(torch.int8, 127),
    "uint8": quantized(torch.uint8, 127, "weight_scale", "weight_zero_point"),
    "compressed-tensors": quantized(torch.int8, 127, "weight_scale", weight="weight_packed"),
    "bitsandbytes int8": quantized(torch.int8, 127, "SCB", "weight_format"),
    "bitsandbytes nf4": quantized(torch.uint8, 127, "weight.absmax", "weight.quant_map"),
    "gptq": quantized(torch.int32, 127, "qzeros", "scales", "g_idx", weight="qweight"),
    "awq": quantized(torch.int32, 127, "qzeros", "scales", weight="qweight"),
    "quanto": quantized(torch.int8, 127, "weight._scale", weight="weight._data"),
    "fake quantization": quantized(torch.float32, 127, "weight_quantizer._amax"),
}


@pytest.mark.parametrize("form", ["safetensors", "bin", "sharded"])
@pytest.mark.parametrize("name", QUANTIZED)
def test_quantized_weights_are_refused(changed, name, form):
    path = changed(QUANTIZED[name], form=form)
    with pytest.raises(ExportError, match=r"holds quantized weights.*bert\.encoder.*dequantized"):
        load(path)


@pytest.mark.parametrize(
    "method", ["modelopt", "fp8", "bitsandbytes", "gptq", "compressed-tensors"]
)
def test_method_that_config_names_is_in_the_message(changed, method):
    settings = {"quant_method": method, "load_in_8bit": True, "bits": 4, "quant_algo": "FP8"}
    path = changed(QUANTIZED["modelopt fp8"], config={"quantization_config": settings})
    with pytest.raises(ExportError, match=rf"quantized weights \(config\.json says {method}\)"):
        load(path)


def test_fp8_without_scales_needs_that_nothing_says_quantized(changed):
    plain = quantized(torch.float8_e4m3fn, 1.0)
    assert load(changed(plain)).unused_tensors == []
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "FP8"}}
    with pytest.raises(ExportError, match="modelopt"):
        load(changed(plain, files={"hf_quant_config.json": settings}))


EXTRA = {
    "lora of loralib": (more(lora_A=torch.ones(4, 32), lora_B=torch.ones(32, 4)), "adapter"),
    "lora of peft": (
        lambda t: t | {f"{QUERY}.lora_A.default.weight": torch.ones(4, 32)},
        "adapter",
    ),
    "adapter": (
        lambda t: t | {"bert.encoder.layer.0.adapter.down.weight": torch.ones(4, 32)},
        "adapter",
    ),
    "prompt": (lambda t: t | {"prompt_encoder.embedding.weight": torch.ones(4, 32)}, "adapter"),
    "gate": (more(gate=torch.ones(32)), "extra"),
    "layer": (
        lambda t: t | {n.replace("layer.1.", "layer.2."): v.clone() for n, v in t.items()},
        "extra",
    ),
    "projection": (lambda t: t | {"linear.weight": torch.ones(8, 32)}, "extra"),
    "normalization": (lambda t: t | {"bert.encoder.norm.weight": torch.ones(32)}, "extra"),
}


@pytest.mark.parametrize(
    ("name", "form"),
    [
        *((name, form) for name in EXTRA for form in ("safetensors", "bin", "sharded")),
        ("lora of loralib", "unlisted"),
    ],
)
def test_tensors_that_change_answers_are_told_from_others(changed, name, form):
    edit, kind = EXTRA[name]
    unused = load(changed(edit, form=form)).unused_tensors
    # A layer has biases of zeros, too.
    assert {tensor.kind for tensor in unused} - {"zeros"} == {kind}


HARMLESS = {
    "position ids": lambda t: t | {"bert.embeddings.position_ids": torch.arange(128)[None]},
    "batches": lambda t: t | {"bert.encoder.num_batches_tracked": torch.tensor(3)},
    "mask of attention": lambda t: (
        t | {"bert.h.0.attn.bias": torch.ones(1, 1, 8, 8).to(torch.uint8)}
    ),
    "inverse frequencies": lambda t: t | {"bert.encoder.rotary_emb.inv_freq": torch.ones(4)},
    "head of masked language": lambda t: t | {"cls.predictions.bias": torch.ones(600)},
    "old names": lambda t: t | {"cls.predictions.transform.LayerNorm.gamma": torch.ones(32)},
    "head of answers": lambda t: t | {"qa_outputs.weight": torch.ones(2, 32)},
    "head of rewards": lambda t: t | {"v_head.summary.weight": torch.ones(1, 32)},
    "bias of zeros": lambda t: t | {"bert.embeddings.word_embeddings.bias": torch.zeros(32)},
}


@pytest.mark.parametrize("name", HARMLESS)
def test_heads_of_other_tasks_and_constants_are_notes(changed, name):
    kinds = {tensor.kind for tensor in load(changed(HARMLESS[name])).unused_tensors}
    assert kinds <= {"head", "constant", "zeros"}


@pytest.mark.parametrize("task", ["feature-extraction", "token-classification", "fill-mask"])
def test_head_of_another_class_has_its_name(bert, task):
    unused = load(bert, task).unused_tensors
    assert {tensor.name.split(".")[0] for tensor in unused} <= {"classifier", "bert"}
    assert {tensor.kind for tensor in unused} <= {"head"}
    assert all(tensor.owner.startswith("Bert") for tensor in unused)


def test_encoder_of_t5_leaves_its_decoder(tmp_path):
    config = transformers.T5Config(
        d_model=16, d_kv=8, d_ff=24, num_heads=2, num_layers=1, vocab_size=32
    )
    transformers.T5ForConditionalGeneration(config).save_pretrained(tmp_path)
    model = load_pytorch(tmp_path, "feature-extraction", TorchOptions())
    assert {tensor.kind for tensor in model.unused_tensors} <= {"head"}


@pytest.mark.parametrize(
    ("stored", "missing"),
    [
        ("module.bert.pooler.dense.weight", "bert.pooler.dense.weight"),
        ("_orig_mod.bert.pooler.dense.weight", "bert.pooler.dense.weight"),
        ("bert._orig_mod.pooler.dense.weight", "bert.pooler.dense.weight"),
        ("model.pooler.dense.weight", "pooler.dense.weight"),
        ("encoder.model.pooler.dense.weight", "pooler.dense.weight"),
        ("pooler.dense.base_layer.weight", "pooler.dense.weight"),
    ],
)
def test_renamed_weights_are_recognized(stored, missing):
    unused = [UnusedTensor(stored, (2, 2), "extra")]
    assert find_renamed([missing, "other.weight"], unused) == {stored: missing}
    assert find_renamed(["other.weight"], unused) == {}
