"""Batches that are padded to a rung give the outputs of the batch as it is."""

import numpy as np
import pytest

from enginery.core.model.feeds import FeedLimits, make_feeds
from enginery.runtime.onnxruntime.ladder import Ladder
from enginery.runtime.onnxruntime.runner import OrtRunner, RunnerOptions
from enginery.validate.cases.rungs import run_on_rungs
from tests.tolerances import OUTPUTS

LADDER = Ladder({"batch": (1, 2, 4), "sequence": (8, 16)}, max_tokens=64)


@pytest.mark.parametrize("pad_left", [False, True])
@pytest.mark.parametrize("sizes", [(1, 3), (3, 8), (4, 16), (3, 11), (5, 9)])
def test_outputs_are_those_of_the_feeds(exported, sizes, pad_left):
    artifact = exported("bert", "feature-extraction")
    limits = FeedLimits.from_artifact(artifact)
    shapes = []
    with OrtRunner(artifact) as plain, OrtRunner(artifact, RunnerOptions(ladder=LADDER)) as runner:
        named = dict(zip(("batch", "sequence"), sizes, strict=True))
        feeds = make_feeds(plain.record.inputs, named, limits, seed=0, ragged=True)
        real = runner._run
        runner._run = lambda index, arrays, outputs=(): (
            shapes.append(arrays["input_ids"].shape) or real(index, arrays, outputs)
        )
        found = run_on_rungs(runner, limits, pad_left=pad_left)(feeds)
        expected = plain(feeds)
    assert shapes == [tuple(LADDER.round_up(named).values())]
    for name, values in expected.items():
        real_tokens = feeds["attention_mask"].astype(bool)
        assert found[name].shape == values.shape
        if pad_left:  # BERT counts positions from the first column: another text than on the right
            continue
        np.testing.assert_allclose(
            found[name][real_tokens] if values.ndim == 3 else found[name],
            values[real_tokens] if values.ndim == 3 else values,
            rtol=1e-4,
            atol=OUTPUTS,
        )


def test_without_a_ladder_the_runner_runs(exported):
    with OrtRunner(exported("bert", "feature-extraction")) as runner:
        assert run_on_rungs(runner, FeedLimits(), pad_left=False) is runner
