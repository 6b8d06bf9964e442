import numpy as np
import pytest

from enginery.core.errors import InputError
from enginery.passes.graph_file import read_graph
from enginery.passes.layers import find_layers
from enginery.passes.qdq import ActivationQuantParams
from enginery.passes.scheme import INT8
from enginery.quantize.calibration import (
    Channels,
    observe_channels,
    observe_magnitudes,
    unpadded_rows,
)
from enginery.quantize.data import Batch
from enginery.quantize.smoothing import with_scale

GENERATOR = np.random.default_rng(0)


def test_channels_keep_their_size_whatever_goes_in():
    made = Channels(width=64, seed=0)
    for _ in range(30):
        made.add(GENERATOR.normal(size=(100, 64)).astype(np.float32))
    assert made.rows == 3000
    assert made.sample.shape == (made.capacity, 64)
    assert made.smallest.shape == made.largest.shape == (64,)


def test_the_sample_is_even_over_the_stream():
    made = Channels(width=2, seed=0)
    for number in range(100):
        made.add(np.full((100, 2), number, np.float32))
    # Half of 512 rows from each half of the stream, within four standard deviations.
    assert abs((made.sample[:, 0] < 50).sum() - 256) < 4 * np.sqrt(128)


def test_extremes_are_those_of_each_channel():
    made = Channels(width=2, seed=0)
    made.add(np.float32([[1, -5], [3, 0]]))
    made.add(np.float32([[-2, 4]]))
    assert made.smallest.tolist() == [-2, -5]
    assert made.largest.tolist() == [3, 4]


@pytest.mark.parametrize("flat", [False, True])
def test_padding_positions_do_not_count(flat):
    value = np.ones((2, 4, 3), np.float32)
    mask = np.array([[1, 1, 1, 1], [0, 0, 1, 1]])
    value[mask == 0] = 99
    shown = value.reshape(8, 3) if flat else value
    rows = unpadded_rows(shown, {"attention_mask": mask}, by_channel=True)
    assert rows.shape == (6, 3)
    assert rows.max() == 1


def test_one_vector_a_row_is_no_sequence_and_counts_whole():
    value = np.ones((2, 3), np.float32)
    mask = np.array([[1, 1], [1, 0]])
    assert unpadded_rows(value, {"attention_mask": mask}, by_channel=True).shape == (2, 3)


def batches(artifact, *, padding):
    """The same three texts, bare or padded with ids of another token."""
    specs = artifact.manifest.graphs[0].inputs
    made = []
    for length in (3, 5, 8):
        ids = np.arange(10, 10 + length)[None]
        mask = np.ones_like(ids)
        ids = np.pad(ids, ((0, 0), (0, padding)), constant_values=33)
        mask = np.pad(mask, ((0, 0), (0, padding)))
        both = {"input_ids": ids, "attention_mask": mask, "token_type_ids": 0 * ids}
        made.append({spec.name: both[spec.name].astype(spec.dtype) for spec in specs})
    return [Batch((i,), lambda feeds=feeds: feeds) for i, feeds in enumerate(made)]


def test_padded_rows_calibrate_as_bare_ones_do(tiny):
    artifact = tiny("bert", "token-classification")
    layers = [x for x in find_layers(read_graph(artifact.model)) if not x.skip_reason]
    bare = observe_channels(artifact.model, layers, batches(artifact, padding=0), seed=0)
    padded = observe_channels(artifact.model, layers, batches(artifact, padding=6), seed=0)
    for name, channels in bare.items():
        assert padded[name].rows == channels.rows == 16
        np.testing.assert_allclose(padded[name].largest, channels.largest, atol=1e-4)
        np.testing.assert_allclose(padded[name].smallest, channels.smallest, atol=1e-4)


def test_histograms_cover_exactly_what_was_seen(tiny):
    artifact = tiny("bert", "token-classification")
    layers = [x for x in find_layers(read_graph(artifact.model)) if not x.skip_reason]
    inputs = batches(artifact, padding=0)
    seen = observe_channels(artifact.model, layers, inputs, seed=0)
    plain = {
        name: with_scale(channels, ActivationQuantParams(1.0), INT8)
        for name, channels in seen.items()
    }
    histograms = observe_magnitudes(artifact.model, layers, inputs, seen, plain)
    for name, histogram in histograms.items():
        assert histogram.counts.sum() == 16 * seen[name].width
        assert histogram.counts[-1] > 0
        assert histogram.largest == pytest.approx(127 * plain[name].scale)


def test_an_activation_that_is_not_finite_is_an_error_that_names_it(tiny):
    artifact = tiny("vit", "image-classification")
    layers = [x for x in find_layers(read_graph(artifact.model)) if not x.skip_reason]
    pixels = np.full((1, 3, 32, 32), np.nan, np.float32)
    with pytest.raises(InputError, match="is not finite on the calibration inputs"):
        observe_channels(
            artifact.model, layers, [Batch((0,), lambda: {"pixel_values": pixels})], seed=0
        )
