"""What an attention sees, read from the scores of a short and a long run."""

import numpy as np
import pytest

from enginery.passes.generation.visibility import _SHORT, _own_visibility

LONG = 64


def masked(queries, keys, window):
    """Return what a sliding window adds to the scores: (1, 1, queries, keys)."""
    distance = queries[:, None] - np.arange(keys)
    return np.where((distance >= 0) & (distance < window), 0.0, -np.inf)[None, None]


@pytest.mark.parametrize(("window", "measured"), [(1, 1), (3, 3), (LONG, None)])
def test_a_window_counts_the_query_itself(window, measured):
    short = masked(np.arange(_SHORT.past, _SHORT.total), _SHORT.total, window)
    long = masked(np.array([LONG - 1]), LONG, window)
    assert _own_visibility("scores", 1.0, 0.0, short, long, None).window == measured
