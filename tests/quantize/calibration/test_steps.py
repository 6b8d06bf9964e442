"""An encoder and its decoder are calibrated on what they run with when they generate."""

import json

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from enginery import export_model, load_model, quantize_model, validate_model
from enginery.core.artifact.artifact import Artifact, commit_artifact
from enginery.core.errors import ArtifactError, InputError, OptionError, ShapeError
from enginery.quantize import stage
from enginery.quantize.calibration.batches import make_batches
from enginery.quantize.calibration.data import CalibrationData
from enginery.runtime.builtin_inputs import synthetic_images, synthetic_sounds
from enginery.runtime.onnxruntime.runner import OrtRunner
from tests.image_to_text import save_image_to_text
from tests.sounds import wav
from tests.speech import save_whisper
from tests.tiny import TEXT, save_tiny

TASK = "text2text-generation-with-past"
ENCODER, DECODER = "encoder_model.onnx", "decoder_with_past_model.onnx"
TEXTS = [" ".join(TEXT[start : start + 1 + start % 3]) for start in range(len(TEXT))]


@pytest.fixture(scope="module", params=["marian", pytest.param("t5", marks=pytest.mark.slow)])
def translator(request, tmp_path_factory):
    """The artifact of a tiny model with two graphs."""
    directory = tmp_path_factory.mktemp(request.param)
    source = save_tiny(request.param, TASK, directory / "model")
    return export_model(str(source), task=TASK, out=directory / "artifact")


def report_of(artifact):
    return json.loads((artifact.path / stage.REPORT).read_bytes())


@pytest.mark.more
def test_each_text_is_the_first_step_and_a_later_one(translator):
    texts = TEXTS[:6]
    data = CalibrationData("texts", texts, (), "", "")
    encoder, decoder = (translator.graph(file) for file in (ENCODER, DECODER))
    sources, _ = make_batches(translator, encoder, data, seed=0)
    steps, _ = make_batches(translator, decoder, data, seed=0)
    assert sorted(row for batch in sources for row in batch.rows) == list(range(len(texts)))
    assert [batch.rows for batch in steps[::2]] == [batch.rows for batch in sources]
    lengths = set()
    with (
        OrtRunner(translator, graph=ENCODER) as encode,
        OrtRunner(translator, graph=DECODER) as run,
    ):
        for source, first, later in zip(sources, steps[::2], steps[1::2], strict=True):
            given, start, feeds = source.load(), first.load(), later.load()
            assert set(feeds) == {spec.name for spec in decoder.inputs}
            own = [name for name in feeds if ".decoder." in name]
            assert {start[name].shape[2] for name in own} == {0}
            (length,) = {feeds[name].shape[2] for name in own}
            lengths.add(length)
            np.testing.assert_array_equal(feeds["encoder_attention_mask"], given["attention_mask"])
            encoded = encode(given)
            for name in (name for name in feeds if ".encoder." in name):
                found = encoded[name.replace("past_key_values", "present")]
                np.testing.assert_allclose(feeds[name], found, atol=1e-6)
            # The later step follows from the first by greedy search.
            state = start
            for _ in range(length):
                found = run(state)
                past = {n: found[n.replace("past_key_values", "present")] for n in own}
                state = {**state, **past, "input_ids": found["logits"][:, -1].argmax(-1)[:, None]}
            for name in own:
                np.testing.assert_allclose(state[name], feeds[name], atol=1e-5)
    assert len(lengths) > 1


@pytest.mark.more
def test_static_int8_of_a_translator_generates(translator, quantized, home):
    artifact = quantized(translator, TEXTS, min_cosine=0.98)
    report = report_of(artifact)
    assert set(report["layers_by_graph"]) == {ENCODER, DECODER}
    assert report["layers"]["all"] == 33
    assert sum(map(len, report["layers_by_graph"].values())) == report["layers"]["quantized"] > 20
    assert min(report[name]["cosine"] for name in ("accuracy", "encoder_accuracy")) >= 0.98
    verdict = validate_model(artifact, effort="quick")
    assert verdict.passed, verdict.summary
    assert verdict.generation.agreement > 0.4  # of a vocabulary of hundreds, with random weights
    assert verdict.accuracy.found.rows == 16  # the encoder's, of built-in sentences
    assert verdict.layers.layers, verdict.notes
    with load_model(artifact) as model:
        (found,) = model.generate([TEXT[0]], max_new_tokens=4, min_new_tokens=4)
    assert len(found.tokens) == 4


@pytest.mark.slow
def test_static_int8_of_a_translator_on_own_texts(translator, quantized, tmp_path, home):
    artifact = quantized(translator, TEXTS, min_cosine=0.98)
    report = report_of(artifact)
    data = tmp_path / "texts.txt"
    data.write_text("\n".join(TEXTS))
    own = validate_model(artifact, effort="quick", data=str(data))
    assert own.passed, own.summary
    assert not own.layers.missing  # the decoder's have no real inputs
    assert {layer.layer for layer in own.layers.layers} == set(report["layers_by_graph"][ENCODER])


@pytest.mark.slow
def test_wrong_scale_in_the_step_of_int8_fails(translator, tmp_path, home, quantized):
    """A cache that is made up has no limit, so a fault must show elsewhere."""
    artifact = quantized(translator, TEXTS[:8])
    path = artifact.path / DECODER
    model = onnx.load(path)
    scale = next(each for each in model.graph.initializer if each.name.endswith("/scale"))
    scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) * 4, scale.name))
    onnx.save(model, path)
    commit_artifact(artifact.path, artifact.manifest)
    verdict = validate_model(Artifact.open(artifact.path), effort="quick")
    assert not verdict.passed
    assert scale.name.removesuffix("/scale") in json.dumps(verdict.weights.differences, default=str)


@pytest.mark.more
def test_dynamic_int8_is_measured_in_both_graphs(translator, quantized):
    artifact = quantized(translator, TEXTS[:8], scheme="dynamic", target="cpu", min_cosine=0.9)
    report = report_of(artifact)
    assert report["accuracy"]["rows"] == 2 * report["encoder_accuracy"]["rows"] == 16
    assert 0.9 <= report["accuracy"]["cosine"] < 1
    assert 0.9 <= report["encoder_accuracy"]["cosine"] < 1


@pytest.mark.slow
def test_speech_and_images_calibrate_from_folders(tmp_path, home):
    """The decoder of each gets the tokens that its own prompt starts with."""
    sounds = tmp_path / "sounds"
    sounds.mkdir()
    for index, (samples, rate) in enumerate(synthetic_sounds(16000, 4)):
        (sounds / f"{index}.wav").write_bytes(wav(samples, rate))
    source = export_model(str(save_whisper(tmp_path / "whisper")), out=tmp_path / "speech")
    artifact = quantize_model(
        source, sounds, capability=(), min_cosine=0.5, out=tmp_path / "speech-int8", curve=False
    )
    assert report_of(artifact)["calibration"]["kind"] == "sounds"
    with load_model(artifact) as model:
        (found,) = model.generate([sounds / "0.wav"], max_new_tokens=4)
    assert found.tokens
    source = export_model(
        str(save_image_to_text("trocr", tmp_path / "trocr")), out=tmp_path / "reader"
    )
    artifact = quantize_model(
        source,
        synthetic_images(4),
        capability=(),
        min_cosine=0.5,
        out=tmp_path / "reader-int8",
        curve=False,
    )
    assert set(report_of(artifact)["layers_by_graph"]) == {ENCODER, DECODER}


def test_what_cannot_calibrate_is_an_error(translator, quantized, tiny, tmp_path):
    arrays = [{"input_ids": np.ones((1, 4), np.int64), "attention_mask": np.ones((1, 4), np.int64)}]
    with pytest.raises(InputError, match="arrays cannot calibrate an encoder with a decoder"):
        quantized(translator, arrays)
    with pytest.raises(ShapeError, match="sequence"):
        quantized(translator, TEXTS[:8], capability=("8.9",), profile=("batch=1,sequence=8",))
    with pytest.raises(OptionError, match="whose outputs are neither right nor wrong"):
        quantized(translator, TEXTS[:8], accuracy_budget="1%")
    with pytest.raises(ArtifactError, match="expected one, or an encoder and a decoder that"):
        quantized(tiny("t5", "text2text-generation"), TEXTS[:8])


@pytest.mark.slow
def test_engines_of_both_graphs_multiply_in_int8(translator, quantized):
    artifact = quantized(translator, TEXTS[:24], capability=("8.9",))
    trials = {trial["graph"]: trial for trial in report_of(artifact)["engines"]}
    assert set(trials) == {ENCODER, DECODER}
    for trial in trials.values():
        assert not trial["not_quantized"]
    assert "past_decoder_sequence=0:" in trials[DECODER]["profiles"][0]
