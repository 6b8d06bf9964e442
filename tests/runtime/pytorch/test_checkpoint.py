"""Tensors of a checkpoint that no parameter of the model took."""

import json

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from enginery.core.errors import ExportError
from enginery.runtime.pytorch.checkpoint import UnusedTensor, find_renamed
from enginery.runtime.pytorch.runner import TorchOptions, load_pytorch
from tests.tiny import save_tiny
from tests.validate.faults.checkpoints import EXTRA, HARMLESS, QUANTIZED, quantized


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


@pytest.mark.parametrize("name", HARMLESS)
def test_heads_of_other_tasks_and_constants_are_notes(changed, name):
    kinds = {tensor.kind for tensor in load(changed(HARMLESS[name])).unused_tensors}
    assert kinds <= {"head", "constant", "zeros"}


@pytest.mark.parametrize("task", ["feature-extraction", "token-classification", "fill-mask"])
def test_head_of_another_class_has_its_name(bert, task):
    unused = load(bert, task).unused_tensors
    assert {tensor.name.split(".")[0] for tensor in unused} <= {"classifier", "bert"}
    assert {tensor.kind for tensor in unused} <= {"head"}
    owners = {t.owner for t in unused if t.name.startswith("classifier")}
    assert owners <= {"BertForSequenceClassification"}


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
