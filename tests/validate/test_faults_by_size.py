"""Faults that depend on sizes and ids, planted in tiny models: those with an effect fail.

    $ pytest -m slow -rP tests/validate/test_faults_by_size.py

The effect is measured with ONNX Runtime on ragged batches that no verdict sees, by the outputs of
the sound artifact: a fault has one if it changes an output more than a hundred times as much as
the precision's rounding. `-rP` prints a line for each.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import onnx
import pytest

from enginery import export_model, optimize_model, quantize_model, validate_model
from enginery.core.artifact.artifact import Artifact, commit_artifact
from enginery.core.errors import EngineryError
from enginery.core.model.feeds import FeedLimits, make_feeds
from enginery.core.shapes import dynamic_dims, is_batch
from enginery.runtime.onnxruntime.runner import OrtRunner
from tests.validate.faults.graph_editor import GraphEditor
from tests.validate.faults.sizes import CROSS_ATTENTION, DECODER, ENCODER, IDS, SOUND, SOUND_DECODER

_LENGTH, _VOCABULARY = 512, 1000
_POSITIONS = 256
_HIDDEN_BY_A_COSINE = (
    "scaled: ",
    "logits scaled: ",
    "mask_ignored: rows of more than 100 tokens in batches over 8",
)
"""Faults that a graph in dynamic INT8 hides: docs/validate.md says so. Beside its rounding, the
cosine of all rows hardly changes, and there is no graph without quantization to compare."""
_EFFECT = {"fp32": 1e-3, "fp16": 0.05, "int8": 0.3}
"""Share of the largest output from which on a difference is an effect of a fault."""


def save_model(kind: str, directory: Path) -> None:
    """Save a model with random weights and enough positions for every fault."""
    import torch
    import transformers as hf

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if kind == "bert":
            sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4}
            config = hf.BertConfig(
                vocab_size=_VOCABULARY,
                intermediate_size=64,
                max_position_embeddings=_LENGTH,
                initializer_range=0.3,
                **sizes,
            )
            model = hf.BertModel(config)
        elif kind == "gpt2":
            config = hf.GPT2Config(
                vocab_size=500,
                n_positions=_POSITIONS,
                n_embd=32,
                n_layer=2,
                n_head=4,
                initializer_range=0.3,
                bos_token_id=0,
                eos_token_id=0,
            )
            model = hf.GPT2LMHeadModel(config)
        else:
            sizes = {"d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
            config = hf.T5Config(vocab_size=500, decoder_start_token_id=0, **sizes)
            model = hf.T5ForConditionalGeneration(config)
    model.eval().save_pretrained(directory)


MODELS = {
    "bert": ("feature-extraction", "model.onnx"),
    "gpt2": ("text-generation-with-past", "model.onnx"),
    "t5": ("text2text-generation-with-past", "decoder_with_past_model.onnx"),
}
FAULTS = {"bert": ENCODER | IDS, "gpt2": DECODER, "t5": CROSS_ATTENTION}


@pytest.fixture(scope="module")
def sound(tmp_path_factory, shared_directory):
    """Return a function: `sound("bert", "fp16")` is an artifact without a fault."""
    held: dict[tuple[str, str], Artifact] = {}

    def make(kind: str, precision: str) -> Artifact:
        if (kind, precision) not in held:
            folder = tmp_path_factory.mktemp(f"{kind}-{precision}")
            save_model(kind, folder / "source")
            artifact = export_model(str(folder / "source"), task=MODELS[kind][0])
            if precision == "fp16":
                artifact = optimize_model(artifact, target="tensorrt", precision="fp16")
            elif precision == "int8":
                artifact = quantize_model(artifact, scheme="dynamic", target="cpu")
            held[kind, precision] = artifact
        return held[kind, precision]

    return make


def plant(artifact: Artifact, edit, graph: str, folder: Path) -> Artifact:
    """Return a copy of an artifact with a fault."""
    shutil.copytree(artifact.path, folder)
    shutil.rmtree(folder / "reports", ignore_errors=True)
    (folder / graph).unlink()
    editor = GraphEditor(onnx.load(str(artifact.path / graph)))
    edit(editor)
    editor.finish()
    onnx.save(editor.model, str(folder / graph))
    bare = artifact.manifest.model_copy(update={"verdicts": (), "reports": {}})
    commit_artifact(folder, bare)
    return Artifact.open(folder)


def batches(record, limits):
    """Yield ragged batches of many sizes, up to 300 rows and all positions."""
    generator = np.random.default_rng(1)
    dims = dynamic_dims(record.inputs)
    longest = min(limits.max_positions, _LENGTH)
    for rows, length in ((3, 0.9), (24, 0.05), (50, 0.1), (130, 0.04), (300, 0.03), (18, 0.5)):
        for past in (0, 40, 110):
            sizes = {}
            for dim in dims:
                if is_batch(dim):
                    sizes[dim] = rows
                elif dim.startswith("past_"):
                    sizes[dim] = past
                else:
                    size = max(1, int(longest * length * generator.uniform(0.5, 1)))
                    sizes[dim] = min(size, longest - past)
            yield make_feeds(record.inputs, sizes, limits, seed=rows, ragged=True)


def effect(broken: Artifact, artifact: Artifact, graph: str) -> float:
    """Return the largest change of an output at real positions, by its largest value."""
    record = artifact.graph(graph)
    largest = 0.0
    with OrtRunner(artifact, graph=graph) as right, OrtRunner(broken, graph=graph) as wrong:
        for feeds in batches(record, FeedLimits.from_artifact(artifact)):
            expected = next(iter(right(feeds).values()))
            try:
                changed = next(iter(wrong(feeds).values()))
            except EngineryError:
                return np.inf
            difference = np.abs(changed - expected)
            mask = feeds.get("attention_mask")
            if mask is not None and mask.shape == difference.shape[:2]:
                difference = difference[mask != 0]
            largest = max(largest, float(difference.max() / np.abs(expected).max()))
    return largest


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("kind", list(MODELS))
def test_faults_with_an_effect_fail(sound, tmp_path, kind, precision):
    artifact = sound(kind, precision)
    graph = MODELS[kind][1]
    missed = []
    for index, (name, edit) in enumerate(FAULTS[kind].items()):
        broken = plant(artifact, edit, graph, tmp_path / str(index))
        try:
            report = validate_model(broken)
            passed, summary = report.passed, report.summary
        except EngineryError as error:
            passed, summary = False, error.message
        change = effect(broken, artifact, graph)
        print(f"{name:60} {change:9.3g} {passed} {summary[:100]}")  # noqa: T201 for `-rP`
        hidden = precision == "int8" and name.startswith(_HIDDEN_BY_A_COSINE)
        if passed and not hidden and change > _EFFECT[precision]:
            missed.append(f"{name}: {change:.3g}")
        shutil.rmtree(tmp_path / str(index))
    assert not missed, "with an effect, but passed:\n" + "\n".join(missed)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["fp32", "fp16", "int8"])
@pytest.mark.parametrize("kind", list(MODELS))
def test_sound_artifacts_pass(sound, kind, precision):
    report = validate_model(sound(kind, precision))
    assert report.passed, report.summary


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "rewritings"), [("bert", SOUND), ("gpt2", SOUND_DECODER)])
def test_sound_rewritings_pass(sound, tmp_path, kind, rewritings):
    failed = []
    for index, (name, edit) in enumerate(rewritings.items()):
        other = plant(sound(kind, "fp32"), edit, "model.onnx", tmp_path / str(index))
        report = validate_model(other)
        if not report.passed:
            failed.append(f"{name}: {report.summary}")
        shutil.rmtree(tmp_path / str(index))
    assert not failed, "sound, but failed:\n" + "\n".join(failed)


@pytest.mark.more
@pytest.mark.parametrize("name", ["rows_exchanged: batch > 70", "scaled: length from 150 to 199"])
def test_fault_beyond_the_usual_sizes_fails(sound, tmp_path, name):
    broken = plant(sound("bert", "fp32"), ENCODER[name], "model.onnx", tmp_path / "broken")
    report = validate_model(broken, effort="quick")
    assert not report.passed
    assert "decision at batch" in report.summary or "padded to" in report.summary


@pytest.mark.more
def test_ids_that_are_replaced_fail(sound, tmp_path):
    broken = plant(sound("bert", "fp32"), IDS["one id replaced"], "model.onnx", tmp_path / "broken")
    report = validate_model(broken, effort="quick")
    assert not report.passed
    failed = [case.name for case in report.cases if not case.passed]
    assert "id 711, told apart" in failed
    assert any("input_ids is changed before its table for 1 of 1000" in n for n in report.notes)


def test_sound_artifact_passes_quickly(sound):
    report = validate_model(sound("bert", "fp32"), effort="quick")
    assert report.passed, report.summary
