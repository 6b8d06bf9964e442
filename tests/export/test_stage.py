"""The artifacts of the export stage, and its errors."""

import errno
import json
import os
import shutil
import sys

import numpy as np
import onnx
import pytest

from enginery import export_model, validate_model
from enginery.core.errors import ExportError, OptionError, ProviderError, SourceError
from enginery.export.generation import arrange_for_generation
from enginery.export.graphs import list_graphs
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.pytorch.config import load_config
from tests.transformers5.models import ANSWERS, auto_class, prompt, set_weights


def edited_config(source, out, **changes):
    shutil.copytree(source, out)
    config = json.loads((out / "config.json").read_text())
    (out / "config.json").write_text(json.dumps({**config, **changes}))
    return str(out)


@pytest.mark.parametrize("uses_list", [list_graphs, arrange_for_generation])
def test_directory_of_graphs_that_cannot_be_listed_is_not_taken_for_an_empty_one(
    tmp_path, monkeypatch, uses_list
):
    (tmp_path / "model.onnx").write_bytes(b"graph")

    def refuse(path):
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(os, "scandir", refuse)
    monkeypatch.setattr(os, "listdir", refuse)
    with pytest.raises(PermissionError):
        uses_list(tmp_path)


def test_tokenizer_files_are_copied_byte_for_byte(exported, tiny_model):
    artifact = exported("bert", "text-classification")
    source = tiny_model("bert", "text-classification")
    for name in ("tokenizer.json", "tokenizer_config.json"):
        assert (artifact.path / name).read_bytes() == (source / name).read_bytes()


@pytest.mark.more
def test_generation_keeps_its_past_when_the_task_is_inferred(tiny_model):
    artifact = export_model(str(tiny_model("gpt2", "text-generation")))
    assert artifact.manifest.task == "text-generation-with-past"
    names = [spec.name for spec in artifact.manifest.graphs[0].inputs]
    assert "past_key_values.0.key" in names


def test_image_size_is_fixed_where_the_model_rejects_others(exported):
    graph = exported("vit", "image-classification").manifest.graphs[0]
    assert graph.inputs[0].dims == ("batch", 3, 32, 32)


def test_feature_map_of_a_convolutional_model_has_named_dims(exported):
    graph = exported("resnet", "feature-extraction").manifest.graphs[0]
    assert graph.inputs[0].dims == ("batch", 3, "height", "width")
    assert graph.outputs[0].dims[2:] == ("last_hidden_state_height", "last_hidden_state_width")


@pytest.mark.more
def test_opset_and_precision_follow_the_options(tiny_model):
    artifact = export_model(str(tiny_model("bert", "fill-mask")), opset=19, dtype="fp16")
    assert artifact.manifest.graphs[0].opset == 19
    assert artifact.manifest.precision == "fp16"
    report = validate_model(artifact)
    assert report.passed, report.summary
    floors = [o.noise_floor for case in report.cases for o in case.outputs]
    assert min(floors) > 1e-5, "an FP16 model has FP16's noise"


@pytest.mark.more
def test_bf16_is_exported_with_a_note_that_the_cpu_cannot_run_it(tiny_model):
    model = str(tiny_model("bert", "fill-mask"))
    with pytest.raises(OptionError, match=r"no BF16 kernels.*leave --exporter out"):
        export_model(model, dtype="bf16", exporter="optimum")
    artifact = export_model(model, dtype="bf16")
    assert artifact.manifest.precision == "bf16"
    assert any("no BF16 kernels" in note for note in artifact.manifest.stages[0].notes)
    with pytest.raises(ProviderError, match="has no BF16 kernels on the CPU"):
        validate_model(artifact)


@pytest.mark.more
def test_head_that_the_files_lack_is_an_error_and_not_random_numbers(tiny_model, tmp_path):
    model = str(tiny_model("bert", "feature-extraction"))
    for task in ("text-classification", "question-answering"):
        with pytest.raises(ExportError, match=r"has no weights for .*would be random numbers"):
            export_model(model, task=task, out=tmp_path / task)
        assert not (tmp_path / task).exists()
    # Its head has no bias, and the tracer renames the matrix that it transposes.
    decoder = str(tiny_model("gpt2", "text-generation"))
    with pytest.raises(ExportError, match=r"has no weights for text-classification: score.weight"):
        export_model(decoder, task="text-classification", out=tmp_path / "decoder")
    # These files have no pooler, which no output of the bare model reads.
    whole = str(tiny_model("bert", "fill-mask"))
    assert export_model(whole, task="feature-extraction").manifest.task == "feature-extraction"


def test_unsupported_task_lists_the_supported_ones(tiny_model):
    with pytest.raises(ExportError, match=r"Optimum exports bert for .*fill-mask.*not for"):
        export_model(str(tiny_model("bert", "fill-mask")), task="image-classification")


def test_error_for_an_unknown_model_type_recommends_dynamo(tiny_model, tmp_path):
    model = edited_config(
        tiny_model("bert", "fill-mask"),
        tmp_path / "m",
        model_type="fnet",
        architectures=["FNetForMaskedLM"],
    )
    with pytest.raises(ExportError, match=r"no model type 'fnet'.*--exporter dynamo"):
        export_model(model, exporter="optimum")


@pytest.mark.more
def test_dynamo_exports_what_optimum_does_not_know(tmp_path):
    import torch
    from transformers import FNetConfig, FNetModel

    torch.manual_seed(0)
    config = FNetConfig(vocab_size=200, hidden_size=32, num_hidden_layers=2, intermediate_size=64)
    FNetModel(config).save_pretrained(tmp_path / "fnet")
    artifact = export_model(str(tmp_path / "fnet"))
    assert any("no model type 'fnet'" in note for note in artifact.manifest.stages[0].notes)
    graph = artifact.manifest.graphs[0]
    assert graph.inputs[0].dims == ("batch", "sequence")
    assert graph.outputs[0].dims == ("batch", "sequence", 32)
    assert validate_model(artifact).passed


@pytest.mark.more
def test_dynamo_exports_a_vision_model(tmp_path):
    import torch
    from transformers import Dinov2WithRegistersConfig, Dinov2WithRegistersModel

    torch.manual_seed(0)
    config = Dinov2WithRegistersConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, image_size=32, patch_size=8
    )
    Dinov2WithRegistersModel(config).save_pretrained(tmp_path / "dino")
    artifact = export_model(str(tmp_path / "dino"), exporter="dynamo")
    assert artifact.manifest.graphs[0].inputs[0].dims == ("batch", 3, "height", "width")
    assert validate_model(artifact, effort="quick").passed


@pytest.mark.more
def test_pickled_weights_are_rejected_unless_allowed(tiny_model, tmp_path):
    import safetensors.torch
    import torch

    model = tmp_path / "pickled"
    shutil.copytree(tiny_model("bert", "feature-extraction"), model)
    weights = safetensors.torch.load_file(model / "model.safetensors")
    torch.save(weights, model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    with pytest.raises(SourceError, match=r"only pickled weights.*--allow-pickle"):
        export_model(str(model))
    artifact = export_model(str(model), allow_pickle=True)
    assert validate_model(artifact, allow_pickle=True).passed


def test_damaged_weights_are_an_error_with_a_log(tiny_model, tmp_path):
    model = tmp_path / "damaged"
    shutil.copytree(tiny_model("bert", "feature-extraction"), model)
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:1000])
    with pytest.raises(ExportError, match=r"PyTorch cannot load .*: .*The whole log"):
        export_model(str(model))


def test_killed_exporter_is_an_error_that_names_the_signal(tiny_model, tmp_path, monkeypatch):
    from enginery.core.model.source import resolve_source
    from enginery.export import stage
    from enginery.export.config import ExportConfig

    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho about to die\nkill -9 $$\n")
    python.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(python))
    source = resolve_source(str(tiny_model("bert", "fill-mask")))
    with pytest.raises(ExportError, match=r"killed \(signal 9\).*memory ran out.*log"):
        stage.run(source, ExportConfig(), tmp_path / "out")
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".tmp-*"))


def test_peak_memory_of_the_child_is_recorded(exported):
    record = exported("bert", "fill-mask").manifest.stages[0]
    assert record.peak_rss_bytes > 100e6, "torch alone takes that much"
    assert record.seconds > 0


@pytest.mark.slow
def test_model_over_two_gigabytes_uses_external_data(tmp_path):
    import torch
    from transformers import BertConfig, BertModel

    config = BertConfig(
        vocab_size=560_000,
        hidden_size=1024,
        num_hidden_layers=1,
        num_attention_heads=4,
        intermediate_size=64,
    )
    with torch.device("cpu"):
        BertModel(config).save_pretrained(tmp_path / "large")
    artifact = export_model(str(tmp_path / "large"), out=tmp_path / "out")
    graph = artifact.manifest.graphs[0]
    assert graph.data_files
    size = sum((artifact.path / name).stat().st_size for name in graph.data_files)
    assert size > 2**31
    assert (artifact.path / "model.onnx").stat().st_size < 10e6
    assert onnx.load(str(artifact.model), load_external_data=False).graph.node
    assert validate_model(artifact).passed


OWN_CODE = """
import torch
from transformers import PretrainedConfig, PreTrainedModel
from transformers.modeling_outputs import SequenceClassifierOutput


class MyConfig(PretrainedConfig):
    model_type = "bag-of-words"

    def __init__(self, vocab_size=50, **kwargs):
        self.vocab_size = vocab_size
        super().__init__(**kwargs)


class MyModel(PreTrainedModel):
    config_class = MyConfig

    def __init__(self, config):
        super().__init__(config)
        self.words = torch.nn.Embedding(config.vocab_size, 8)
        self.head = torch.nn.Linear(8, 3)
        self.post_init()

    def forward(self, input_ids, attention_mask=None, return_dict=None):
        mask = attention_mask.unsqueeze(-1).to(self.words.weight.dtype)
        vectors = self.words(input_ids) * mask
        return SequenceClassifierOutput(logits=self.head(vectors.sum(1) / mask.sum(1)))
"""


def save_own_model(directory, *, before=""):
    """Write a model of its own type, whose code begins with some other."""
    import torch
    from safetensors.torch import save_file

    directory.mkdir()
    (directory / "modeling_mine.py").write_text(before + OWN_CODE)
    names = {"AutoConfig": "MyConfig", "AutoModelForSequenceClassification": "MyModel"}
    config = {
        "model_type": "bag-of-words",
        "architectures": ["MyModel"],
        "vocab_size": 50,
        "auto_map": {auto: f"modeling_mine.{name}" for auto, name in names.items()},
    }
    (directory / "config.json").write_text(json.dumps(config))
    shapes = {"words.weight": (50, 8), "head.weight": (3, 8), "head.bias": (3,)}
    generator = torch.Generator().manual_seed(0)
    weights = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@pytest.mark.more
def test_models_own_code_runs_once_it_is_trusted(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    model = save_own_model(tmp_path / "own")
    options = {"task": "text-classification", "exporter": "dynamo"}
    with pytest.raises(SourceError, match=r"modeling_mine\.py"):
        export_model(str(model), **options)
    artifact = export_model(str(model), trust_remote_code=True, **options)
    assert artifact.manifest.trust_remote_code
    assert artifact.manifest.graphs[0].outputs[0].dims == ("batch", 3)
    assert validate_model(artifact, trust_remote_code=True).passed


@pytest.mark.more
def test_model_of_transformers_5_gives_that_versions_logits(tmp_path):
    case = json.loads(ANSWERS.read_text(encoding="utf-8"))["cases"]["llama llama3"]
    source = tmp_path / "source"
    source.mkdir()
    (source / "config.json").write_text(json.dumps(case["config"]), encoding="utf-8")
    config = load_config(source, trust_remote_code=False).config
    model = auto_class(config).from_config(config)
    set_weights(model)
    model.save_pretrained(source)
    (source / "config.json").write_text(json.dumps(case["config"]), encoding="utf-8")
    artifact = export_model(str(source))
    (note,) = [n for n in artifact.manifest.stages[0].notes if "was translated" in n]
    assert "rope_theta 77.0" in note
    tokens = prompt().numpy()
    feeds = {
        "input_ids": tokens,
        "attention_mask": np.ones_like(tokens),
        "position_ids": np.tile(np.arange(tokens.shape[1]), (len(tokens), 1)),
    }
    with OrtRunner(artifact) as runner:
        sizes = {"batch": len(tokens), "past_sequence": 0}
        empty = {
            spec.name: np.zeros(spec.shape(sizes), dtype=np.float32)
            for spec in artifact.manifest.graphs[0].inputs
            if spec.name not in feeds
        }
        logits = runner({**feeds, **empty})["logits"][:, -1]
    expected = np.array(case["logits"])
    assert np.abs(logits - expected).max() < 1e-4 * expected.std()


def test_positions_that_cannot_be_translated_end_the_export(tiny_model, tmp_path):
    source = edited_config(
        tiny_model("bert", "text-classification"),
        tmp_path / "model",
        transformers_version="5.24.0",
        rope_parameters={"rope_type": "proportional", "rope_theta": 5.0},
    )
    with pytest.raises(SourceError, match=r"sets rope_parameters to .* cannot express for bert"):
        export_model(source)
