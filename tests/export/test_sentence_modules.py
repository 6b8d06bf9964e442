"""Modules of sentence-transformers after the pooling are applied as it applies them."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer

from enginery import export_model, load_model, validate_model
from enginery.core.errors import ArtifactError, EngineryError, ExportError, SourceError
from enginery.export.sentence_modules import write_module_weights
from enginery.runtime.text.pooling import read_pooling
from tests.tiny_encoders import save_encoder

TEXTS = ["The engine is warm.", "a", "", "A cat that sits on a very long bench beside the river."]
ACTIVATIONS = {
    "linear.Identity": torch.nn.Identity(),
    "activation.Tanh": torch.nn.Tanh(),
    "activation.ReLU": torch.nn.ReLU(),
    "activation.Sigmoid": torch.nn.Sigmoid(),
    "activation.SiLU": torch.nn.SiLU(),
    "activation.GELU": torch.nn.GELU(),
}


def add_modules(directory, *kinds, pooling="mean", save=save_file, file="model.safetensors"):
    """Write a Pooling and modules to a model's directory, and return the layers in PyTorch."""
    torch.manual_seed(3)
    described = [("", "Transformer"), ("1_Pooling", "Pooling")]
    (directory / "1_Pooling").mkdir(parents=True)
    (directory / "1_Pooling" / "config.json").write_text(json.dumps({"pooling_mode": pooling}))
    layers, size = [], 32
    for index, kind in enumerate(kinds, start=2):
        name, _, activation = kind.partition(":")
        folder = directory / f"{index}_{name}"
        described.append((folder.name, name))
        if name == "Dense":
            linear = torch.nn.Linear(size, size // 2, bias=activation != "linear.Identity")
            config = {
                "in_features": size,
                "out_features": size // 2,
                "bias": linear.bias is not None,
                "activation_function": f"torch.nn.modules.{activation}",
            }
            weights = {"linear.weight": linear.weight, "linear.bias": linear.bias}
            layers += [linear, ACTIVATIONS.get(activation, torch.nn.ELU())]
            size //= 2
        elif name == "LayerNorm":
            norm = torch.nn.LayerNorm(size)
            norm.weight.data.normal_(1, 0.3)
            norm.bias.data.normal_()
            config, weights = (
                {"dimension": size},
                {"norm.weight": norm.weight, "norm.bias": norm.bias},
            )
            layers.append(norm)
        else:
            config, weights = {}, {}
            layers.append(lambda x: torch.nn.functional.normalize(x, dim=1))
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        if weights:
            save({n: w.detach() for n, w in weights.items() if w is not None}, folder / file)
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (path, kind) in enumerate(described)
    ]
    (directory / "modules.json").write_text(json.dumps(modules))
    return layers


def applied(layers, vectors):
    with torch.no_grad():
        for layer in layers:
            vectors = layer(vectors)
    return vectors.numpy()


@pytest.mark.parametrize(
    "kinds",
    [
        *[(f"Dense:{name}",) for name in ACTIVATIONS],
        ("Dense:activation.Tanh", "Normalize"),
        ("Normalize", "Dense:linear.Identity"),
        ("LayerNorm", "Normalize"),
        ("Dense:linear.Identity", "Dense:linear.Identity", "LayerNorm", "Dropout"),
    ],
    ids="+".join,
)
def test_vectors_are_those_of_the_layers_in_pytorch(kinds, tmp_path):
    shown = [kind for kind in kinds if kind != "Dropout"]
    layers = add_modules(tmp_path / "source", *kinds)
    layers = layers[: len(layers) - (len(kinds) - len(shown))]
    out = tmp_path / "out"
    shutil.copytree(tmp_path / "source", out)
    write_module_weights(tmp_path / "source", out)
    pooling = read_pooling(out)
    rng = np.random.default_rng(0)
    tokens = rng.standard_normal((3, 5, 32)).astype(np.float32)
    expected = applied(layers, torch.from_numpy(tokens.mean(axis=1)))
    found = pooling(tokens, np.ones((3, 5), np.int64))
    assert found.dtype == np.float32
    assert found == pytest.approx(expected, abs=2e-6)
    assert found.shape[1] == pooling.size(32)
    assert pooling.normalize == (kinds[-1] == "Normalize")


@pytest.mark.more
def test_dense_of_an_embedder_is_applied_and_validated(tiny_model, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(tiny_model("bert", "feature-extraction"), source)
    layers = add_modules(source, "Dense:activation.Tanh", "Normalize", pooling="cls")
    artifact = export_model(str(source), out=tmp_path / "artifact")
    assert artifact.manifest.task == "feature-extraction"
    tokens = AutoTokenizer.from_pretrained(source)(TEXTS, return_tensors="pt", padding=True)
    with torch.no_grad():
        states = AutoModel.from_pretrained(source).eval()(**tokens).last_hidden_state
    expected = applied(layers, states[:, 0])
    with load_model(artifact) as model:
        assert model.embed(TEXTS) == pytest.approx(expected, abs=1e-5)
        raw = applied(layers[:-1], states[:, 0])
        assert model.embed(TEXTS, normalize=False) == pytest.approx(raw, abs=1e-5)
        assert model.embed([]).shape == (0, 16)
        assert model.notes[-1] == "pooling from 1_Pooling/config.json: cls, Dense"
    # Another weight of the module is another model.
    weights = source / "2_Dense" / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[-1] ^= 1
    weights.write_bytes(content)
    assert export_model(str(source)).manifest.source.sha256 != artifact.manifest.source.sha256


@pytest.mark.more
def test_embedder_with_a_dense_module_is_validated(tiny_model, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(tiny_model("bert", "feature-extraction"), source)
    add_modules(source, "Dense:activation.Tanh", "Normalize")
    assert validate_model(export_model(str(source), out=tmp_path / "a").path, effort="quick").passed


@pytest.mark.more
def test_t5_of_sentence_transformers_is_its_encoder(tiny_model, tmp_path):
    source = tmp_path / "source"
    whole = save_encoder("T5ForConditionalGeneration", tiny_model("bert", "fill-mask"), source)
    layers = add_modules(source, "Dense:linear.Identity", "Normalize")
    artifact = export_model(str(source), out=tmp_path / "artifact")
    assert [graph.file for graph in artifact.manifest.graphs] == ["model.onnx"]
    tokens = AutoTokenizer.from_pretrained(source)(TEXTS, return_tensors="pt", padding=True)
    mask = tokens["attention_mask"]
    with torch.no_grad():
        states = whole.encoder(input_ids=tokens["input_ids"], attention_mask=mask)[0]
    weights = mask.unsqueeze(-1).float()
    expected = applied(layers, (states * weights).sum(1) / weights.sum(1))
    with load_model(artifact) as model:
        assert model.embed(TEXTS) == pytest.approx(expected, abs=1e-5)


def test_weights_become_float32_whatever_their_file(tmp_path):
    def save_half(tensors, file):
        torch.save({name: tensor.bfloat16() for name, tensor in tensors.items()}, file)

    source, out = tmp_path / "source", tmp_path / "out"
    kinds = ("Dense:activation.Tanh", "LayerNorm")
    layers = add_modules(source, *kinds, save=save_half, file="pytorch_model.bin")
    shutil.copytree(source, out)
    notes = write_module_weights(source, out)
    assert notes == [
        f"the module {n} runs after the graph, in FP32" for n in ("2_Dense", "3_LayerNorm")
    ]
    tokens = np.ones((1, 2, 32), np.float32)
    expected = applied([layer.bfloat16().float() for layer in layers], torch.ones(1, 32))
    assert read_pooling(out)(tokens, np.ones((1, 2), np.int64)) == pytest.approx(expected, abs=1e-5)


def test_pickled_weights_of_a_module_are_rejected_unless_allowed(tiny_model, tmp_path):
    source = tmp_path / "source"
    shutil.copytree(tiny_model("bert", "feature-extraction"), source)
    add_modules(source, "Dense:activation.Tanh", save=torch.save, file="pytorch_model.bin")
    with pytest.raises(SourceError, match="only pickled weights for the module 2_Dense"):
        export_model(str(source))


@pytest.mark.parametrize("folder", ["2_Dense_a", "Dense", "2_LSTM", "2_Dense/inner", "../2_Dense"])
def test_folder_whose_weights_were_not_screened_is_refused(folder, tmp_path):
    source = tmp_path / "source"
    add_modules(source, "Dense:activation.Tanh")
    (source / folder).parent.mkdir(parents=True, exist_ok=True)
    shutil.copytree(source / "2_Dense", source / folder)
    file = source / "modules.json"
    file.write_text(file.read_text().replace('"2_Dense"', json.dumps(folder)))
    with pytest.raises(EngineryError, match=re.escape(folder)):
        write_module_weights(source, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_settings_that_are_not_supported_are_named(tmp_path):
    source = tmp_path / "source"
    add_modules(source, "Dense:activation.ELU")
    with pytest.raises(ExportError, match=r"2_Dense/config\.json has activation_function '.*ELU'"):
        write_module_weights(source, tmp_path)
    file = source / "2_Dense" / "config.json"
    settings = json.loads(file.read_text()) | {"activation_function": "torch.nn.Tanh"}
    for changes in (
        {"module_input_name": "token_embeddings"},
        {"module_output_name": "other"},
        {"use_residual": True},
    ):
        file.write_text(json.dumps(settings | changes))
        with pytest.raises(ExportError, match=next(iter(changes))):
            write_module_weights(source, tmp_path)
    file.write_text(json.dumps(settings))
    (source / "2_Dense" / "model.safetensors").unlink()
    with pytest.raises(
        ExportError, match=r"2_Dense has no weights: expected model\.safetensors or"
    ):
        write_module_weights(source, tmp_path)


def test_weights_that_do_not_fit_their_settings_are_an_error(tmp_path):
    add_modules(tmp_path, "Dense:activation.Tanh")
    file = tmp_path / "2_Dense" / "config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"out_features": 8}))
    with pytest.raises(ArtifactError, match=r"expected linear\.weight \(8, 32\) and linear\.bias"):
        read_pooling(tmp_path)
