"""Every supported architecture: exported by the stage, validated, and loaded by other libraries."""

import pytest

from enginery import Artifact, validate_model
from enginery.core.shapes import dynamic_dims
from tests.tiny import IMAGE_KINDS, IMAGE_TASKS, TEXT_KINDS, TEXT_TASKS

CASES = [
    *((kind, task) for kind in TEXT_KINDS for task in TEXT_TASKS),
    *((kind, task) for kind in IMAGE_KINDS for task in IMAGE_TASKS),
    ("wav2vec2", "audio-classification"),
    ("gpt2", "text-generation-with-past"),
    ("t5", "text2text-generation-with-past"),
]
QUICK = {
    ("bert", "feature-extraction"),
    ("resnet", "image-classification"),
    ("gpt2", "text-generation-with-past"),
}
# Every task at least once; the others take minutes.
LONGER = {
    ("distilbert", "text-classification"),
    ("roberta", "token-classification"),
    ("albert", "question-answering"),
    ("electra", "fill-mask"),
    ("vit", "image-classification"),
    ("convnext", "feature-extraction"),
    ("t5", "text2text-generation-with-past"),
}

NOT_IN_OPTIMUM = [("modernbert", "question-answering")]

ORT_CLASSES = {
    "feature-extraction": "ORTModelForFeatureExtraction",
    "text-classification": "ORTModelForSequenceClassification",
    "token-classification": "ORTModelForTokenClassification",
    "question-answering": "ORTModelForQuestionAnswering",
    "fill-mask": "ORTModelForMaskedLM",
    "image-classification": "ORTModelForImageClassification",
    "audio-classification": "ORTModelForAudioClassification",
    "text-generation-with-past": "ORTModelForCausalLM",
    "text2text-generation-with-past": "ORTModelForSeq2SeqLM",
}


def mark_of(case):
    if case in QUICK:
        return ()
    return pytest.mark.more if case in LONGER else pytest.mark.slow


# Readable names; `sequence` may have the prefix `encoder_`, `decoder_` or `past_`.
DIMS = {"batch", "sequence", "height", "width"}


@pytest.mark.parametrize(
    ("kind", "task"), [pytest.param(*case, marks=mark_of(case)) for case in CASES]
)
def test_architecture_exports_validates_and_loads(kind, task, tiny_model):
    from enginery import export_model

    base = task.removesuffix("-with-past")
    exporter = "dynamo" if (kind, task) in NOT_IN_OPTIMUM else "optimum"
    # Optimum's class of encoder-decoders opens only Optimum's own graphs.
    layout = "optimum" if kind == "t5" else "enginery"
    artifact = export_model(
        str(tiny_model(kind, base)), task=task, exporter=exporter, layout=layout
    )

    assert artifact.manifest.task == task
    assert artifact.manifest.graphs[0].opset == 20
    for graph in artifact.manifest.graphs:
        names = {name.rpartition("_")[2] for name in dynamic_dims(graph.inputs)}
        assert names <= DIMS, names

    report = validate_model(artifact, effort="quick")
    assert report.passed, report.summary
    # Swin's relative positions, a thirteenth of this tiny model, are computed from a parameter.
    assert report.weights.compared > 0.9 * report.weights.elements
    kinds = {case.kind for case in report.cases if case.outputs}
    assert "sweep" in kinds
    if kind in (*TEXT_KINDS, *IMAGE_KINDS):
        assert "real" in kinds

    _loads_elsewhere(artifact)


def _loads_elsewhere(artifact: Artifact):
    import onnxruntime
    import optimum.onnxruntime as ort

    for graph in artifact.manifest.graphs:
        session = onnxruntime.InferenceSession(
            str(artifact.path / graph.file), providers=["CPUExecutionProvider"]
        )
        assert [i.name for i in session.get_inputs()] == [spec.name for spec in graph.inputs]
    model_class = getattr(ort, ORT_CLASSES[artifact.manifest.task])
    assert model_class.from_pretrained(artifact.path) is not None
