"""Sizes, batches and outputs of model types that their config.json says nothing of."""

import functools
import shutil

import pytest
from onnx import numpy_helper

from benchmarks.model_types import save_companions, save_model
from enginery import export_model, load_model, validate_model
from enginery.core.errors import EngineryError, SourceError
from tests.validate.faults.edits import break_graph


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    """Return a function that writes a tiny model of a type for a task, once."""
    folder = tmp_path_factory.mktemp("types")

    @functools.cache
    def write(kind, task):
        return save_model(kind, task, folder / f"{kind}-{task}")

    return write


@pytest.fixture
def exported_type(sources, home):
    """Return a function that exports a tiny model of a type for a task."""

    def export(kind, task):
        return export_model(str(sources(kind, task)), task=task)

    return export


def dims(artifact):
    record = artifact.manifest.graphs[0]
    return {spec.name: spec.dims for spec in (*record.inputs, *record.outputs)}


def notes(artifact):
    return " ".join(artifact.manifest.stages[0].notes)


def test_a_length_that_only_pytorch_rejects_is_fixed(exported_type):
    artifact = exported_type("patchtsmixer", "time-series-forecasting")
    assert dims(artifact)["past_values"] == ("batch", 32, 3)
    assert "sequence is fixed at 32: the model rejects other sizes" in notes(artifact)
    assert validate_model(artifact, effort="quick").passed


@pytest.mark.more
def test_channels_of_a_vision_part_are_fixed(exported_type):
    found = dims(exported_type("clip", "zero-shot-image-classification"))
    assert found["pixel_values"] == ("batch", 3, 30, 30)
    assert found["input_ids"] == ("text_batch", "sequence")
    assert found["logits_per_image"] == ("batch", "text_batch")


@pytest.mark.more
def test_a_detector_of_texts_takes_several_for_each_image(exported_type):
    found = dims(exported_type("owlvit", "zero-shot-object-detection"))
    assert found["input_ids"] == ("text_batch", "sequence")
    assert found["logits"][:2] == ("batch", 256)
    assert isinstance(found["logits"][2], str)
    assert found["text_embeds"][0] == "batch"


@pytest.mark.more
def test_the_only_batch_has_the_usual_name(exported_type):
    found = dims(exported_type("vits", "text-to-audio"))
    assert found["input_ids"] == ("batch", "sequence")


@pytest.mark.more
def test_sounds_that_need_a_length_are_as_long_as_in_the_trace(exported_type):
    artifact = exported_type("moonshine", "automatic-speech-recognition-with-past")
    encoder = next(g for g in artifact.manifest.graphs if "encoder" in g.file)
    length = encoder.inputs[0].dims[1]
    assert encoder.sample_sizes[length] == 16000
    assert encoder.outputs[0].dims[1] == "last_hidden_state_sequence"


def test_a_model_with_fewer_positions_than_optimum_traces(exported_type):
    artifact = exported_type("albert", "text-classification")
    assert dims(artifact)["input_ids"] == ("batch", "sequence")


@pytest.mark.more
def test_a_model_whose_generator_wants_a_processor_needs_none(exported_type):
    artifact = exported_type("perceiver", "text-classification")
    assert not (artifact.path / "preprocessor_config.json").exists()
    assert not (artifact.path / "processor_config.json").exists()


@pytest.mark.more
def test_outputs_that_only_the_exporter_names_are_compared(exported_type):
    artifact = exported_type("mgp-str", "feature-extraction")
    assert "char_logits, bpe_logits, wp_logits are not those of feature-ext" in notes(artifact)
    report = validate_model(artifact, effort="quick")
    assert report.passed
    assert any("reference of char_logits, bpe_logits, wp_logits" in note for note in report.notes)


@pytest.mark.slow
def test_frozen_normalizations_are_compared_as_they_are_folded(exported_type, copied):
    artifact = exported_type("detr", "object-detection")
    report = validate_model(artifact, effort="quick")
    assert report.passed, report.summary
    assert report.weights.kinds["folded"] > 0

    def scale_more(model):
        scale = next(t for t in model.graph.initializer if list(t.dims) == [1, 64, 1, 1])
        values = numpy_helper.to_array(scale).copy()
        values[0, 5] *= 1.02
        scale.CopyFrom(numpy_helper.from_array(values, scale.name))

    damaged = break_graph(copied(artifact), scale_more)
    report = validate_model(damaged, effort="quick")
    assert not report.passed
    (difference,) = report.weights.differences
    assert "normalization.weight" in difference.parameter


@pytest.mark.more
def test_a_mask_that_overflows_in_fp64_leaves_a_limit(exported_type):
    report = validate_model(exported_type("splinter", "question-answering"), effort="quick")
    assert report.passed, report.summary


@pytest.mark.parametrize("kind", ["bart", pytest.param("pegasus", marks=pytest.mark.more)])
def test_texts_do_not_depend_on_their_batch_where_padding_counts(exported_type, kind):
    artifact = exported_type(kind, "text-generation-with-past")
    texts = ["a", "the cat sat", "on", "dogs and cats", "it"]
    with load_model(artifact.path, providers="cpu") as model:
        together = model.generate(texts, max_new_tokens=5)
        alone = [model.generate([text], max_new_tokens=5)[0] for text in texts]
    assert [found.tokens for found in together] == [found.tokens for found in alone]
    assert len({found.tokens for found in alone}) > 1


@pytest.mark.more
def test_one_of_several_texts_is_chosen_in_each_row(exported_type):
    artifact = exported_type("bert", "multiple-choice")
    assert dims(artifact)["input_ids"] == ("batch", "num_choices", "sequence")
    report = validate_model(artifact, effort="quick")
    assert report.passed, report.summary
    assert any(case.name == "questions 13–16" for case in report.cases)


@pytest.mark.more
def test_outputs_without_a_name_are_dropped(exported_type):
    artifact = exported_type("metaclip_2", "zero-shot-image-classification")
    assert not [name for name in dims(artifact) if ":" in name]
    assert "dropped the outputs onnx::" in notes(artifact)
    assert validate_model(artifact, effort="quick").passed


@pytest.fixture(scope="module")
def vocoder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("speech")
    return save_companions("speecht5", folder)["vocoder"]


@pytest.mark.slow
def test_speecht5_is_exported_with_its_vocoder(sources, vocoder, home):
    source = str(sources("speecht5", "text-to-audio"))
    artifact = export_model(source, task="text-to-audio", model_kwargs={"vocoder": vocoder})
    files = {graph.file: graph for graph in artifact.manifest.graphs}
    (spectrogram,) = files["decoder_postnet_and_vocoder.onnx"].inputs
    assert spectrogram.dims == ("n_spectrums_x_reduction_factor", 80)
    assert len(artifact.manifest.stages[0].fields["model_kwargs"]) == 64
    assert "decoder_model.onnx draws random numbers" in notes(artifact)


def test_a_vocoder_with_pickled_weights_is_refused(sources, vocoder, tmp_path, home):
    import torch
    from safetensors.torch import load_file

    pickled = tmp_path / "vocoder"
    shutil.copytree(vocoder, pickled)
    torch.save(load_file(pickled / "model.safetensors"), pickled / "pytorch_model.bin")
    (pickled / "model.safetensors").unlink()
    with pytest.raises(SourceError, match="only pickled weights"):
        export_model(
            str(sources("speecht5", "text-to-audio")), model_kwargs={"vocoder": str(pickled)}
        )


@pytest.mark.parametrize(
    ("kind", "task", "given", "problem"),
    [
        ("speecht5", "text-to-audio", {}, "exported together with a vocoder"),
        ("clip", "zero-shot-image-classification", {"vocoder": "."}, "clip has none"),
        ("clip", "zero-shot-image-classification", {"output_attentions": "1"}, "only have"),
    ],
)
def test_model_kwargs_suit_the_model(kind, task, given, problem, sources, vocoder, home):
    given = {name: vocoder if name == "vocoder" else value for name, value in given.items()}
    with pytest.raises(EngineryError, match=problem):
        export_model(str(sources(kind, task)), task=task, model_kwargs=given)
