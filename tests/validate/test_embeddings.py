"""Pooled sentence embeddings: cosine, nearest neighbours, and ties between equal texts."""

import json

import numpy as np
import pytest

from enginery.runtime.text.pooling import Pooling
from enginery.validate.embeddings import EmbeddingComparison
from enginery.validate.reference import ReferenceOutputs

MEAN = Pooling(("mean",), normalize=True, include_prompt=True, note="")


@pytest.fixture
def compared(tmp_path):
    def make(mine, theirs, min_cosine=1 - 1e-7, **options):
        comparison = EmbeddingComparison(MEAN)
        np.save(tmp_path / "0.npy", theirs)
        mask = np.ones(theirs.shape[:2], np.int64)
        comparison.add(
            {"attention_mask": mask},
            {"last_hidden_state": mine},
            ReferenceOutputs({"last_hidden_state": tmp_path / "0.npy"}),
        )
        return comparison.metrics(min_cosine=min_cosine, **options)

    return make


def tokens(seed=0, rows=6):
    return np.random.default_rng(seed).standard_normal((rows, 5, 8)).astype(np.float32)


def test_equal_tokens_agree(compared):
    found = compared(tokens(), tokens())
    assert (found.sentences, found.neighbour_agreement, found.problem) == (6, 1.0, "")
    assert found.min_cosine == pytest.approx(1.0)


def test_different_embedding_fails(compared):
    other = tokens()
    other[3] = -other[3]
    found = compared(other, tokens())
    assert "cosine -1.0" in found.problem


def test_changed_neighbour_fails_unless_it_is_a_tie(compared):
    assert compared(tokens(seed=1), tokens(), min_cosine=-1.0).neighbour_agreement == 1.0
    # The third of three vectors turns, by less than the cosine asked for, from the first to the
    # second; in the reference it is clearly nearer to the first.
    angles = np.radians([0, 90, 40])
    turned = np.radians([0, 90, 50])
    mine, theirs = (
        np.stack([np.cos(a), np.sin(a)], axis=1)[:, None].astype(np.float32)
        for a in (turned, angles)
    )
    found = compared(mine, theirs, min_cosine=0.98)
    assert found.min_cosine == pytest.approx(np.cos(np.radians(10)), abs=1e-6)
    assert found.problem == ""  # 10° are within what a cosine of 0.98 allows
    strict = compared(mine, theirs, min_cosine=0.99999)
    assert strict.neighbour_agreement == pytest.approx(2 / 3)


def test_equal_texts_are_ties(compared):
    same = np.repeat(tokens(rows=2), 4, axis=0)
    noise = 1e-6 * tokens(seed=3, rows=8)
    assert compared(same + noise, same).neighbour_agreement == 1.0


def test_without_a_limit_the_metrics_are_reported(compared):
    other = tokens(rows=10)
    other[3] = tokens(seed=4)[0]
    assert compared(other, tokens(rows=10), min_cosine=0.8).problem
    found = compared(other, tokens(rows=10), min_cosine=None)
    assert found.min_cosine < 0.8 < found.mean_cosine
    assert found.problem == ""
    assert found.neighbour_agreement < 1.0, "counted, without the tie that a loose limit makes"


def test_nan_fails(compared):
    broken = tokens()
    broken[0] = np.nan
    assert compared(broken, tokens()).problem
    # A single row has no neighbours that could differ.
    assert "cosine nan" in compared(broken[:1], tokens()[:1]).problem


@pytest.mark.more
def test_unsupported_module_is_noted_and_fails_where_the_source_has_none(exported, copied):
    from enginery import validate_model
    from tests.validate.faults import edits as faults

    artifact = copied(exported("bert", "feature-extraction"))
    modules = [{"type": "sentence_transformers.models.LSTM", "path": "1"}]
    (artifact.path / "modules.json").write_text(json.dumps(modules))
    faults.break_graph(artifact, lambda model: None)
    report = validate_model(artifact.path)
    assert report.embeddings is None
    assert any("no pooled embeddings" in note and "LSTM" in note for note in report.notes)
    (failed,) = [case for case in report.cases if not case.passed]
    assert failed.problem.startswith("load_model cannot answer: ")
    assert "LSTM" in failed.problem
