"""The reference answers as transformers does, and rejects in words."""

import json

import numpy as np
import pytest

from enginery.core.errors import ArtifactError, ExportError, InputError
from enginery.core.model.feeds import FeedLimits, make_feeds
from enginery.core.model.source import resolve_record
from enginery.core.trust.resource_limits import MEMORY_VARIABLE
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.pytorch.reference import TorchReference
from enginery.runtime.pytorch.runner import TorchOptions, TorchRunner, load_pytorch
from tests.tiny import save_tiny, tiny_artifact
from tests.tolerances import OUTPUTS


def runner(artifact, *, graph="", precision="fp32"):
    source, options = resolve_record(artifact.manifest.source), TorchOptions(precision=precision)
    return TorchRunner(source, artifact.manifest, options, graph=graph)


def feeds_for(artifact, graph=0, **sizes):
    record = artifact.manifest.graphs[graph]
    limits = FeedLimits(vocab_size=90, type_vocab_size=2)
    return make_feeds(record.inputs, {"batch": 2, "sequence": 7, **sizes}, limits, seed=0)


@pytest.fixture
def bert(exported):
    return exported("bert", "text-classification")


@pytest.mark.more
def test_answers_are_transformers_own(bert, tiny_model):
    import torch
    from transformers import AutoModelForSequenceClassification

    feeds = feeds_for(bert)
    model = AutoModelForSequenceClassification.from_pretrained(
        tiny_model("bert", "text-classification")
    ).eval()
    with torch.no_grad():
        expected = model(**{name: torch.tensor(array) for name, array in feeds.items()})
    with runner(bert) as reference:
        found = reference(feeds)
    assert list(found) == ["logits"]
    assert found["logits"].dtype == np.float32
    np.testing.assert_allclose(found["logits"], expected.logits.numpy(), atol=OUTPUTS)


def test_process_that_takes_more_memory_than_its_files_explain_is_ended(bert, monkeypatch):
    monkeypatch.setenv(MEMORY_VARIABLE, "0.001")
    with pytest.raises(ExportError, match=r"PyTorch: .* needed more than 0\.001 GiB") as error:
        TorchReference(resolve_record(bert.manifest.source), bert.manifest)
    assert MEMORY_VARIABLE in error.value.do


def test_precisions_differ_by_about_their_roundoff(bert):
    feeds = feeds_for(bert)
    answers = {}
    for precision in ("fp64", "fp32", "fp16", "bf16"):
        with runner(bert, precision=precision) as reference:
            answers[precision] = reference(feeds)["logits"]
    assert answers["fp64"].dtype == np.float64
    assert answers["bf16"].dtype == np.float32, "numpy has no bfloat16"
    errors = [np.abs(answers[p] - answers["fp64"]).max() for p in ("fp32", "fp16", "bf16")]
    assert errors == sorted(errors)
    assert 0 < errors[0] < 1e-4 < errors[1] < errors[2] < 1


def test_inputs_that_the_model_rejects_are_an_error_with_their_shapes(bert):
    with (
        runner(bert) as reference,
        pytest.raises(InputError, match=r"PyTorch rejects the inputs input_ids \(2, 200\)"),
    ):
        reference(feeds_for(bert, sequence=200))


def test_unknown_graph_names_the_known_ones(bert):
    with pytest.raises(ArtifactError, match=r"no graph 'x\.onnx', expected one of model\.onnx"):
        runner(bert, graph="x.onnx")


def test_model_that_cannot_be_loaded_is_an_error(tmp_path):
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ExportError, match=r"PyTorch cannot load .* for fill-mask"):
        load_pytorch(tmp_path, "fill-mask")


@pytest.fixture
def gpt2(tiny_model, home):
    from enginery import export_model

    source = tiny_model("gpt2", "text-generation")
    return export_model(str(source), task="text-generation-with-past", layout="optimum")


@pytest.fixture
def t5(tiny_model, home):
    from enginery import export_model

    source = tiny_model("t5", "text2text-generation")
    return export_model(str(source), task="text2text-generation-with-past")


@pytest.mark.more
def test_past_of_a_decoder_changes_its_answer_and_comes_back(gpt2):
    feeds = feeds_for(gpt2, past_sequence=5)
    with runner(gpt2) as reference:
        assert reference.notes == []
        found = reference(feeds)
        past = {n: np.zeros_like(a) if n.startswith("past_") else a for n, a in feeds.items()}
        other = reference(past)
    key = feeds["past_key_values.0.key"]
    assert found["present.0.key"].shape == (2, 4, 12, 8)
    np.testing.assert_array_equal(found["present.0.key"][:, :, :5], key)
    assert np.abs(found["logits"] - other["logits"]).max() > 1e-3


def test_cache_is_the_models_own(gpt2):
    """Tokens decoded one by one get the logits that they have together."""
    ids = np.arange(12).reshape(2, 6)
    mask = np.ones((2, 6), np.int64)
    mask[1, :3] = 0  # padded on the left
    positions = np.maximum(mask.cumsum(1) - 1, 0)
    parts = [slice(0, 4), slice(4, 5), slice(5, 6)]
    with runner(gpt2) as reference:
        steps = [
            reference.decode(
                {
                    "input_ids": ids[:, part],
                    "attention_mask": mask[:, : part.stop],
                    "position_ids": positions[:, part],
                },
                resume=part.start > 0,
            )
            for part in parts
        ]
        whole = {"input_ids": ids, "attention_mask": mask, "position_ids": positions}
        expected = reference.decode(whole, resume=False)["logits"]
        found = np.concatenate([step["logits"] for step in steps], axis=1)
        real = mask != 0
        np.testing.assert_allclose(found[real], expected[real], atol=OUTPUTS)
        assert np.abs(found[real] - np.roll(expected, 1, axis=1)[real]).max() > 1e-2
        with pytest.raises(InputError, match="PyTorch rejects the inputs input_ids"):
            reference.decode({**whole, "input_ids": ids + 10_000}, resume=False)
        with pytest.raises(InputError, match="the tokens before were rejected"):
            reference.decode(whole, resume=True)


@pytest.mark.more
@pytest.mark.parametrize("kind", ["gpt2", "t5"])
def test_exporter_takes_no_part_in_the_reference_of_decoders(kind, request, monkeypatch):
    from optimum.exporters.onnx import model_patcher

    def fail(self):
        raise AssertionError("the exporter's patches are in use")

    artifact = request.getfixturevalue(kind)
    monkeypatch.setattr(model_patcher.ModelPatcher, "__enter__", fail)
    sizes = {"encoder_sequence": 6, "decoder_sequence": 3, "past_decoder_sequence": 4}
    for index, record in enumerate(artifact.manifest.graphs):
        feeds = feeds_for(artifact, graph=index, past_sequence=5, **sizes)
        with runner(artifact, graph=record.file) as reference:
            assert reference.notes == []
            missing = {spec.name for spec in record.outputs} - set(reference(feeds))
        assert not missing


def test_fault_of_the_exporters_patches_shows(tiny_model, tmp_path, monkeypatch):
    """Optimum replaces how transformers' cache grows; here its way puts new keys first."""
    import torch
    from optimum.exporters.onnx import model_patcher

    def put_first(self, keys, values, _=None):
        self.keys, self.values = (
            (keys, values)
            if self.keys is None
            else (torch.cat([keys, self.keys], -2), torch.cat([values, self.values], -2))
        )
        self.is_initialized = True
        return self.keys, self.values

    monkeypatch.setattr(model_patcher, "patched_dynamic_layer_update", put_first)
    source = tiny_model("gpt2", "text-generation")
    task = "text-generation-with-past"
    artifact = tiny_artifact("gpt2", task, tmp_path / "artifact", source=source)
    feeds = feeds_for(artifact, past_sequence=5)
    with runner(artifact) as reference, OrtRunner(artifact) as graph:
        found, expected = graph(feeds), reference(feeds)
    key = feeds["past_key_values.0.key"]
    np.testing.assert_array_equal(found["present.0.key"][:, :, -5:], key)
    np.testing.assert_array_equal(expected["present.0.key"][:, :, :5], key)
    assert np.abs(found["logits"] - expected["logits"]).max() > 1e-3


def test_cache_of_another_layout_goes_through_optimum_and_is_noted(gpt2):
    """The graph's keys are (batch, positions, heads, head_dim) here, not PyTorch's."""
    graph = gpt2.manifest.graphs[0]
    inputs = tuple(
        type(spec)(spec.name, spec.dtype, ("batch", "past_sequence", *spec.dims[1::2]))
        if spec.name.startswith("past_")
        else spec
        for spec in graph.inputs
    )
    other = graph.model_copy(update={"inputs": inputs})
    manifest = gpt2.manifest.model_copy(update={"graphs": (other,)})
    with TorchRunner(resolve_record(manifest.source), manifest) as reference:
        (note,) = reference.notes
    assert note.startswith(
        "model.onnx: the reference is PyTorch through Optimum's submodels, because Sizes of tensors"
    )


@pytest.mark.parametrize(
    "kind",
    [
        "bert",
        "resnet",
        *(
            pytest.param(kind, marks=pytest.mark.slow)
            for kind in ("deberta-v2", "modernbert", "mpnet", "vit", "swin")
        ),
    ],
)
def test_weights_upcast_on_use_equal_fp64(tiny_model, kind, monkeypatch):
    """A large model's weights are never in memory in FP64; its answers are the same."""
    import torch

    from enginery import export_model
    from enginery.runtime.pytorch import runner as reference

    task = "image-classification" if kind in ("vit", "resnet") else "feature-extraction"
    artifact = export_model(str(tiny_model(kind, task)), task=task)
    feeds = feeds_for(artifact, height=64, width=64)
    with runner(artifact, precision="fp64") as whole:
        expected = whole(feeds)
    monkeypatch.setattr(reference, "_UPCAST_ON_USE_BYTES", 0)
    with runner(artifact, precision="fp64") as widened:
        assert widened._model.dtype == torch.float32
        found = widened(feeds)
    with runner(artifact) as narrow:
        other = narrow(feeds)
    for name, array in expected.items():
        assert found[name].dtype == np.float64
        np.testing.assert_allclose(found[name], array, rtol=1e-13, atol=1e-13)
        assert np.abs(other[name] - array).max() > 1e-9, "FP32 would have shown"


@pytest.mark.parametrize("on_use", [False, True])
def test_a_model_may_fill_a_mask_with_fp64s_smallest_number(bert, monkeypatch, on_use):
    """As TrOCR's does, without naming the type: FP32, the default, cannot hold that number."""
    import torch
    from transformers import BertForSequenceClassification as Model

    from enginery.runtime.pytorch import runner as reference

    forward, feeds = Model.forward, feeds_for(bert)
    with runner(bert, precision="fp64") as whole:
        expected = whole(feeds)["logits"]

    def masked(self, *args, **options):
        torch.full((2, 2), torch.finfo(self.classifier.weight.dtype).min)
        return forward(self, *args, **options)

    monkeypatch.setattr(Model, "forward", masked)
    monkeypatch.setattr(reference, "_UPCAST_ON_USE_BYTES", 0 if on_use else 1 << 30)
    with runner(bert, precision="fp64") as masking:
        for _ in range(2):
            np.testing.assert_allclose(masking(feeds)["logits"], expected, rtol=1e-12, atol=1e-12)
            assert torch.get_default_dtype() == torch.float32
        with pytest.raises(InputError, match="PyTorch rejects the inputs"):
            masking({**feeds, "input_ids": feeds["input_ids"] + 10_000})
        assert torch.get_default_dtype() == torch.float32


def test_classifier_without_a_padding_id_takes_the_tokenizers(tmp_path):
    """Those of decoders read the token before the padding."""
    path = save_tiny("gpt2", "text-classification", tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    expected = config.pop("pad_token_id")
    (path / "config.json").write_text(json.dumps(config))
    assert load_pytorch(path, "text-classification").config.pad_token_id == expected
    (path / "tokenizer.json").unlink()
    for file in ("vocab.json", "merges.txt", "tokenizer_config.json", "special_tokens_map.json"):
        (path / file).unlink(missing_ok=True)
    assert load_pytorch(path, "text-classification").config.pad_token_id is None
