"""Encoder-decoders that are exported without Optimum have today's two graphs, and generate as
PyTorch."""

import numpy as np
import onnx
import pytest

from benchmarks.model_types import save_model
from enginery import export_model, load_model, validate_model
from enginery.core.errors import ExportError
from enginery.core.versions import TRANSFORMERS5, transformers_family
from tests.image_to_text import save_image_to_text
from tests.runtime.generation import test_images, test_whisper
from tests.runtime.generation.test_encoder_decoders import TEXTS
from tests.speech import save_whisper
from tests.tiny import with_more
from tests.tiny_generators import reference_tokens

pytestmark = pytest.mark.skipif(
    transformers_family() != TRANSFORMERS5, reason="this exporter is that of transformers 5"
)

KINDS = ("t5", "bart", "marian", "m2m_100", "pegasus")
CASES = {"greedy": {}, "beams": {"num_beams": 4}}


@pytest.mark.parametrize("kind", with_more(KINDS, "t5"))
def test_tokens_are_those_of_pytorch_alone_and_in_a_padded_batch(tiny_model, home, kind):
    source = tiny_model(kind, "text2text-generation")
    with load_model(export_model(str(source))) as model:
        for name, case in CASES.items():
            options = {"max_new_tokens": 15, **case}
            tokens, _, pad = reference_tokens(source, TEXTS, **options)
            for size in (len(TEXTS), 1):
                results = model.generate(TEXTS, batch_size=size, **options)
                # transformers fills results of one input up to the longest.
                filled = [
                    [*result.tokens, *[pad] * (len(row) - len(result.tokens))]
                    for result, row in zip(results, tokens, strict=True)
                ]
                assert filled == tokens, (name, size)


@pytest.mark.parametrize("task", ["text2text-generation", "automatic-speech-recognition"])
def test_graphs_without_a_cache_are_those_of_optimum(tiny_model, tmp_path, home, task):
    source = tmp_path / "whisper"
    if task == "text2text-generation":
        source = tiny_model("t5", task)
    else:
        save_whisper(source)
    with pytest.raises(ExportError, match=f"--task {task}-with-past, with which enginery"):
        export_model(str(source), task=task)


def test_sounds_become_the_tokens_of_pytorch(tmp_path, home):
    source = save_whisper(tmp_path / "whisper")
    artifact = export_model(str(source))
    assert artifact.manifest.task == "automatic-speech-recognition-with-past"
    cases = {"language": {"language": "fr"}, "beams": {"num_beams": 4}}
    test_whisper.assert_equal(source, artifact, cases)


@pytest.mark.more
def test_waves_become_fewer_states(tmp_path, home):
    task = "automatic-speech-recognition-with-past"
    source = save_model("moonshine", task, tmp_path / "model")
    artifact = export_model(str(source), task=task)
    decoder, encoder = artifact.manifest.graphs
    assert [(spec.name, spec.dims) for spec in encoder.inputs] == [
        ("input_values", ("batch", "num_samples"))
    ]
    assert encoder.sample_sizes["num_samples"] >= 16_000
    cross = {spec.name: spec.dims for spec in decoder.inputs}["past_key_values.0.encoder.key"]
    assert cross[2] == "encoder_sequence"
    report = validate_model(artifact, effort="quick")
    assert report.passed, report.summary
    decoded = [case for case in report.cases if case.kind == "decoding"]
    assert decoded, "the decoder has not run with its cache"


def test_graphs_have_the_files_names_and_dims_of_arranged_ones(tiny_model, home):
    artifact = export_model(str(tiny_model("t5", "text2text-generation")))
    decoder, encoder = artifact.manifest.graphs
    past = ("batch", 4, "past_decoder_sequence", 8)
    cross = ("batch", 4, "encoder_sequence", 8)
    longer = ("batch", 4, "past_decoder_sequence + decoder_sequence", 8)
    kinds = [f"{layer}.{side}.{part}" for layer, side, part in _parts()]
    assert (decoder.file, encoder.file) == ("decoder_with_past_model.onnx", "encoder_model.onnx")
    assert [(spec.name, spec.dims) for spec in decoder.inputs] == [
        ("encoder_attention_mask", ("batch", "encoder_sequence")),
        ("input_ids", ("batch", "decoder_sequence")),
        *((f"past_key_values.{kind}", cross if "encoder" in kind else past) for kind in kinds),
    ]
    assert [(spec.name, spec.dims) for spec in decoder.outputs[1:]] == [
        (f"present.{kind}", longer) for kind in kinds if "decoder" in kind
    ]
    assert decoder.outputs[0].dims[:2] == ("batch", 1)
    assert [(spec.name, spec.dims) for spec in encoder.inputs] == [
        ("input_ids", ("batch", "encoder_sequence")),
        ("attention_mask", ("batch", "encoder_sequence")),
    ]
    assert [(spec.name, spec.dims) for spec in encoder.outputs] == [
        ("last_hidden_state", ("batch", "encoder_sequence", 32)),
        *((f"present.{kind}", cross) for kind in kinds if "encoder" in kind),
    ]
    graphs = [onnx.load(artifact.path / record.file).graph for record in (decoder, encoder)]
    first, second = ({n for node in g.node for n in (node.name, *node.output)} for g in graphs)
    assert not first & second  # quantization records ranges by name


def _parts():
    sides = ("decoder", "encoder")
    return [(n, side, part) for n in (0, 1) for side in sides for part in ("key", "value")]


@pytest.mark.more
def test_no_large_weight_is_in_two_graphs_or_unread(tiny_model, home):
    # The encoder is traced with a step of the decoder, and the decoder with states of an encoder.
    artifact = export_model(str(tiny_model("bart", "text2text-generation")))
    weights = []
    for file in ("encoder_model.onnx", "decoder_with_past_model.onnx"):
        graph = onnx.load(artifact.path / file).graph
        read = {name for node in graph.node for name in node.input}
        assert {tensor.name for tensor in graph.initializer} <= read
        arrays = [onnx.numpy_helper.to_array(tensor) for tensor in graph.initializer]
        # The embedding of tokens is one tensor in PyTorch, and both sides read it.
        weights.append({a.tobytes() for a in arrays if a.size >= 1000 and 600 not in a.shape})
    assert weights[0]
    assert weights[1]
    assert not weights[0] & weights[1]


@pytest.mark.more
@pytest.mark.parametrize("kind", ["vit-gpt2", "trocr"])
def test_images_become_the_tokens_of_pytorch(tmp_path, home, kind):
    source = save_image_to_text(kind, tmp_path / kind)
    with load_model(export_model(str(source))) as model:
        for beams in (1, 4):
            options = {"max_new_tokens": 10, "num_beams": beams}
            tokens = test_images.reference(source, **options)
            results = model.generate(test_images.IMAGES, **options)
            assert [list(result.tokens) for result in results] == tokens


@pytest.mark.more
def test_validation_compares_both_graphs_and_the_tokens(tiny_model, home):
    artifact = export_model(str(tiny_model("marian", "text2text-generation")))
    report = validate_model(artifact, effort="quick", force=True)
    assert report.passed
    assert report.generation.equal == report.generation.beams_equal == report.generation.inputs
    outputs = {found.output for case in report.cases for found in case.outputs}
    assert {"logits", "last_hidden_state", "present.0.encoder.key"} <= outputs
    assert np.isfinite(report.generation.agreement)
