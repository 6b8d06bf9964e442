import numpy as np
import pytest

from enginery.core.errors import InputError
from enginery.passes.ir.graph_file import read_graph
from enginery.passes.qdq.layers import find_layers, quantized_tensors
from enginery.passes.qdq.scales import ActivationQuantParams
from enginery.passes.qdq.scheme import INT8
from enginery.quantize.calibration.activation_statistics import (
    ChannelStatistics,
    collect_channel_statistics,
    collect_histograms,
    unpadded_rows,
)
from enginery.quantize.calibration.data import Batch
from enginery.quantize.calibration.smoothing import with_observed_range

GENERATOR = np.random.default_rng(0)


def test_statistics_have_a_fixed_size():
    made = ChannelStatistics(width=64, seed=0)
    for _ in range(30):
        made.add(GENERATOR.normal(size=(100, 64)).astype(np.float32))
    assert made.rows == 3000
    assert made.sample.shape == (made.capacity, 64)
    assert made.smallest.shape == made.largest.shape == (64,)


def test_sample_is_uniform_over_the_stream():
    made = ChannelStatistics(width=2, seed=0)
    for number in range(100):
        made.add(np.full((100, 2), number, np.float32))
    # Half of 512 rows from each half of the stream, within four standard deviations.
    assert abs((made.sample[:, 0] < 50).sum() - 256) < 4 * np.sqrt(128)


def test_minimum_and_maximum_are_kept_per_channel():
    made = ChannelStatistics(width=2, seed=0)
    made.add(np.float32([[1, -5], [3, 0]]))
    made.add(np.float32([[-2, 4]]))
    assert made.smallest.tolist() == [-2, -5]
    assert made.largest.tolist() == [3, 4]


@pytest.mark.parametrize("flat", [False, True])
def test_padded_positions_are_ignored(flat):
    value = np.ones((2, 4, 3), np.float32)
    mask = np.array([[1, 1, 1, 1], [0, 0, 1, 1]])
    value[mask == 0] = 99
    shown = value.reshape(8, 3) if flat else value
    rows = unpadded_rows(shown, {"attention_mask": mask}, by_channel=True)
    assert rows.shape == (6, 3)
    assert rows.max() == 1


def test_mask_does_not_apply_to_one_vector_per_row():
    value = np.ones((2, 3), np.float32)
    mask = np.array([[1, 1], [1, 0]])
    assert unpadded_rows(value, {"attention_mask": mask}, by_channel=True).shape == (2, 3)


def batches(artifact, *, padding):
    """Make batches of the same three texts, unpadded or padded with ids of another token."""
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


def activations(artifact):
    layers = find_layers(read_graph(artifact.model))
    return quantized_tensors([x for x in layers if not x.skip_reason], outputs=False)


def test_padding_does_not_change_the_statistics(tiny):
    artifact = tiny("bert", "token-classification")
    tensors = activations(artifact)
    bare = collect_channel_statistics(artifact.model, tensors, batches(artifact, padding=0), seed=0)
    padded = collect_channel_statistics(
        artifact.model, tensors, batches(artifact, padding=6), seed=0
    )
    for name, channels in bare.items():
        assert padded[name].rows == channels.rows == 16
        np.testing.assert_allclose(padded[name].largest, channels.largest, atol=1e-4)
        np.testing.assert_allclose(padded[name].smallest, channels.smallest, atol=1e-4)


def test_histograms_count_every_value_in_range(tiny):
    artifact = tiny("bert", "token-classification")
    tensors = activations(artifact)
    inputs = batches(artifact, padding=0)
    seen = collect_channel_statistics(artifact.model, tensors, inputs, seed=0)
    plain = {
        name: with_observed_range(channels, ActivationQuantParams(1.0), INT8)
        for name, channels in seen.items()
    }
    histograms = collect_histograms(artifact.model, tensors, inputs, seen, plain)
    for name, histogram in histograms.items():
        assert histogram.counts.sum() == 16 * seen[name].width
        assert histogram.counts[-1] > 0
        assert histogram.largest == pytest.approx(127 * plain[name].scale)


def test_error_names_an_activation_that_is_not_finite(tiny):
    artifact = tiny("vit", "image-classification")
    tensors = activations(artifact)
    pixels = np.full((1, 3, 32, 32), np.nan, np.float32)
    with pytest.raises(InputError, match="NaN or infinite values on the calibration inputs"):
        collect_channel_statistics(
            artifact.model, tensors, [Batch((0,), lambda: {"pixel_values": pixels})], seed=0
        )
