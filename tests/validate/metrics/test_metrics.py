"""Comparison of one output: values, masks, ties, NaN and infinity."""

import math
from dataclasses import replace

import numpy as np
import pytest

from enginery.core.shapes import TensorSpec
from enginery.core.tolerance import QuantizedTolerance, Tolerance
from enginery.reports.validation import EmbeddingMetrics, ValidationCaseResult, ValidationReport
from enginery.reports.weights import WeightMetrics
from enginery.validate.cases.padding import find_padding_mask
from enginery.validate.metrics.outputs import NoiseFloor, OutputLimits, compare_output, noise_floor
from enginery.validate.report import summarize

FP32 = Tolerance.for_precision("fp32")
QUIET = NoiseFloor(1e-6, 1.0)


def judged(actual, reference, output="logits", noise=QUIET, tolerance=FP32, padding=None, **limits):
    actual = np.asarray(actual)
    return compare_output(
        TensorSpec(output, actual.dtype.name, ()),
        actual,
        np.asarray(reference, np.float32),
        OutputLimits(noise, tolerance, **limits),
        padding=padding,
    )


def normal(*shape, seed=0):
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def test_metrics_of_a_small_example():
    reference = np.float32([[1, -4, 2, 0]])
    actual = np.float32([[1, -4, 2, 0.5]])
    found = judged(actual, reference, noise=NoiseFloor(1.0, 1.0))
    assert found.max_abs == 0.5
    assert found.max_rel == 0.125
    assert found.p99_abs == pytest.approx(np.quantile([0, 0, 0, 0.5], 0.99))
    assert found.cosine == pytest.approx(21 / math.sqrt(21 * 21.25))
    assert found.argmax_agreement == 1.0


def test_error_is_measured_over_every_row():
    reference = normal(5, 7, 3)
    for row in range(5):
        actual = reference.copy()
        actual[row, 6, 2] += 0.25
        assert judged(actual, reference).max_abs == pytest.approx(0.25, rel=1e-6)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_nan_or_infinity_on_one_side_fails(value):
    reference = normal(2, 3)
    actual = reference.copy()
    actual[1, 1] = value
    found = judged(actual, reference)
    assert found.problem == "1 elements are NaN or infinite on one side only"
    assert judged(reference, actual).problem
    assert found.limit_ratio == math.inf


def test_nan_in_pytorch_fails():
    reference = np.full((2, 3), np.nan, np.float32)
    assert judged(reference, reference).problem == "6 elements are NaN in PyTorch itself"


@pytest.mark.parametrize("mine", [-np.inf, np.finfo(np.float32).min, -65504.0])
@pytest.mark.parametrize("theirs", [-np.inf, np.finfo(np.float32).min])
def test_fill_values_of_different_dtypes_agree(mine, theirs):
    reference, actual = normal(4, 6), normal(4, 6)
    reference[:, 2], actual[:, 2] = theirs, mine
    found = judged(actual, reference)
    assert found.passed
    assert found.limit < 1e-4, "the filling is no magnitude"


@pytest.mark.parametrize("mine", [0.0, 5.0, np.inf, np.nan])
def test_missing_fill_value_fails(mine):
    reference, actual = normal(4, 6), normal(4, 6)
    reference[0, 2], actual[0, 2] = np.finfo(np.float32).min, mine
    assert not judged(actual, reference).passed


def test_error_beside_a_masked_score_fails():
    reference = normal(4, 6)
    reference[:, 2] = np.finfo(np.float32).min
    actual = reference.copy()
    actual[1, 1] += 0.01
    assert "largest error 0.01" in judged(actual, reference).problem


def test_limit_scales_with_large_outputs():
    large = 1e4 * normal(4, 6)
    assert judged(large * (1 + 2e-7), large).passed
    assert not judged(large * (1 + 1e-5), large).passed
    small = 1e-2 * normal(4, 6)
    assert not judged(small + np.float32(1e-4), small).passed


def test_argmax_may_differ_only_for_ties():
    loose = {"max_abs_error": 0.1, "min_cosine": -1.0}
    reference = np.float32([[1.0, 0.95], [1.0, 0.0]])
    tie = np.float32([[0.97, 0.98], [1.0, 0.0]])
    assert judged(tie, reference, **loose).argmax_agreement == 1.0
    other = np.float32([[1.0, 0.95], [0.4, 0.6]])
    found = judged(other, reference, max_abs_error=0.2, min_cosine=-1.0)
    assert found.argmax_agreement == 0.5
    wide = judged(other, reference, max_abs_error=0.7, min_cosine=-1.0)
    assert wide.passed, "within the error that was allowed"


def test_argmax_of_segmentation_is_over_the_classes():
    reference = np.zeros((1, 2, 2, 2), np.float32)
    reference[0, 0] = 1.0
    swapped = reference[:, ::-1].copy()
    found = judged(swapped, reference, max_abs_error=0.4, min_cosine=-1.0)
    assert found.argmax_agreement == 0.0


def test_outputs_other_than_logits_have_no_argmax():
    reference = np.float32([[1.0, 0.0]])
    found = judged(np.float32([[0, 1]]), reference, output="last_hidden_state")
    assert found.argmax_agreement == 1.0


def test_output_below_the_noise_has_no_cosine_limit():
    found = judged(np.float32([[-2e-8]]), [[3e-8]], noise=NoiseFloor(1e-7, 1.0))
    assert found.passed
    assert found.cosine == pytest.approx(-1.0)


def test_cosine_limit_follows_the_noise():
    bf16 = Tolerance.for_precision("bf16")
    assert bf16.cosine_limit(noise_cosine=1.0) > 0.99
    noisy = bf16.cosine_limit(noise_cosine=0.999)
    assert 0.9 < noisy < bf16.min_cosine


def test_wrong_cosine_fails_within_the_error_limit():
    reference = normal(2, 64)
    actual = reference + 0.2 * normal(2, 64, seed=1)
    found = judged(actual, reference, output="x", max_abs_error=1.0)
    assert "cosine 0.9" in found.problem
    assert found.limit_ratio > 1, "it ranks above outputs that pass"


def test_limit_of_zero_passes_only_equal_outputs():
    reference = normal(2, 3)
    assert judged(reference, reference, max_abs_error=0.0).passed
    assert judged(reference, reference, max_abs_error=0.0).limit_ratio == 0
    assert not judged(reference + np.float32(1e-6), reference, max_abs_error=0.0).passed


@pytest.mark.parametrize("shape", [(0, 3), (2, 0), ()])
def test_empty_and_scalar_outputs_are_compared(shape):
    assert judged(np.ones(shape, np.float32), np.ones(shape)).passed


def test_noise_floor_ignores_values_that_are_not_finite():
    wide = normal(2, 3)
    narrow = wide.copy()
    narrow[0, 0], narrow[1, 1] = np.inf, wide[1, 1] + 0.5
    assert noise_floor(narrow, wide, None).max_abs == pytest.approx(0.5)


MASK = TensorSpec("attention_mask", "int64", ("batch", "sequence"))
IDS = TensorSpec("input_ids", "int64", ("batch", "sequence"))
PAST_MASK = TensorSpec("attention_mask", "int64", ("batch", "past_sequence + sequence"))


def feeds(mask, new=None):
    mask = np.array(mask)
    return {"attention_mask": mask, "input_ids": np.ones((len(mask), new or mask.shape[1]))}


def test_padding_is_not_compared():
    spec = TensorSpec("logits", "float32", ("batch", "sequence", 4))
    padding = find_padding_mask(spec, [IDS, MASK], feeds([[1, 1, 1], [1, 0, 0]]))
    reference = normal(2, 3, 4)
    actual = reference.copy()
    actual[1, 1:] = np.nan
    assert judged(actual, reference, padding=padding).passed
    actual[0, 2] = np.nan
    assert judged(actual, reference, padding=padding).nonfinite == 4


def test_labels_are_not_positions_even_if_equally_many():
    spec = TensorSpec("logits", "float32", ("batch", 3))
    assert find_padding_mask(spec, [IDS, MASK], feeds([[1, 1, 1], [1, 0, 0]])) is None


def test_padded_positions_are_ignored_by_the_argmax():
    spec = TensorSpec("start_logits", "float32", ("batch", "sequence"))
    padding = find_padding_mask(spec, [IDS, MASK], feeds([[1, 1, 0]]))
    found = judged(np.float32([[1, 2, 9]]), [[1, 2, -9]], output="start_logits", padding=padding)
    assert found.passed


def test_padding_of_decoder_caches_and_new_tokens_is_ignored():
    keys = TensorSpec("present.0.key", "float32", ("batch", 2, "past_sequence + sequence", 4))
    logits = TensorSpec("logits", "float32", ("batch", "sequence", 5))
    given = feeds([[1, 1, 1, 1], [0, 0, 0, 1]], new=2)
    padding = find_padding_mask(keys, [IDS, PAST_MASK], given)
    assert padding.axis == 2
    assert padding.mask.tolist() == [[True] * 4, [False, False, False, True]]
    assert find_padding_mask(logits, [IDS, PAST_MASK], given).mask.tolist() == [
        [True, True],
        [False, True],
    ]
    reference = normal(2, 2, 4, 4)
    actual = reference.copy()
    actual[1, :, :3] = np.inf
    assert judged(actual, reference, output="present.0.key", padding=padding).passed


def case(name, outputs, **options):
    return ValidationCaseResult(
        graph="model.onnx",
        name=name,
        kind="sweep",
        shapes={"x": [1]},
        outputs=outputs,
        **{"problem": "", **options},
    )


def report_on(cases):
    return ValidationReport(
        passed=False,
        summary="s",
        precision="fp32",
        providers=[{"name": "CPU", "reason": "r"}],
        reference={"id": "m"},
        tolerance={"floor_factor": 8.0, "max_abs_error set": None},
        cases=cases,
        embeddings=None,
        weights=WeightMetrics(0, 0, {}, [], [], []),
        effort="normal",
        coverage=[],
        notes=["n"],
        tools={"torch": "2"},
        seconds=1.5,
    )


def test_summary_names_the_worst_output_that_fails():
    fine = judged(np.float32([[1, 2.00001]]), [[1, 2]], noise=NoiseFloor(2e-6, 1.0))
    assert fine.passed
    assert fine.limit_ratio > 0.5
    bad = replace(judged([[1.0, 2.0]], [[1, 2]]), output="scores", problem="cosine 0.5")
    said = summarize(report_on([case("one", [fine]), case("odd", [bad])]))
    assert "1 of 2 outputs differ" in said
    assert "scores on sweep 'odd', cosine 0.5" in said


def test_summary_counts_what_was_skipped():
    fine = judged(np.float32([[1, 2]]), [[1, 2]])
    said = summarize(report_on([case("one", [fine]), case("longest", [], skipped="too long")]))
    assert "1 inputs skipped that PyTorch rejects" in said
    assert "could not be compared on any input: too long" in summarize(
        report_on([case("longest", [], skipped="too long")])
    )


def test_report_with_nan_survives_json():
    shape = judged(np.ones((2, 3), np.float32), np.ones((2, 4)))
    assert math.isnan(shape.max_abs)
    report = replace(
        report_on([case("one", [shape, judged([[1.0, np.nan]], [[1, 2]])])]),
        embeddings=EmbeddingMetrics(2, math.nan, math.nan, 0.0, "NaN"),
    )
    text = report.to_json()
    assert b"NaN," not in text
    assert b"Infinity" not in text
    again = ValidationReport.from_json(text)
    assert again.to_json() == text
    assert math.isnan(again.cases[0].outputs[0].max_abs)
    assert math.isnan(again.embeddings.min_cosine)
    assert again.worst()[1].limit_ratio == math.inf
    assert again.tolerance["max_abs_error set"] is None


@pytest.mark.parametrize("text", [b"", b"{}", b'{"passed": true}', b"\xff"])
def test_malformed_report_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"."):
        ValidationReport.from_json(text)


# Root mean square


def test_small_error_everywhere_fails_where_a_single_one_passes():
    """The largest error is within its limit in both; only the root mean square tells them apart."""
    fp16 = Tolerance.for_precision("fp16")
    noise = NoiseFloor(5e-3, 1.0, rms=1e-3)
    reference = normal(64, 64)
    everywhere, once = reference + np.float32(0.01), reference.copy()
    once[0, 0] += 0.01
    far = judged(everywhere, reference, "last_hidden_state", noise=noise, tolerance=fp16)
    assert far.max_abs < far.limit
    assert far.problem == f"root mean square error 0.01, allowed {far.rms_limit:.3g}"
    assert judged(once, reference, "last_hidden_state", noise=noise, tolerance=fp16).passed
    assert judged(
        everywhere, reference, "last_hidden_state", noise=noise, tolerance=fp16, max_abs_error=0.02
    ).passed, "the user's own limit replaces both"


def test_constant_that_only_the_root_mean_square_refuses_is_told_apart():
    """A near tie of the reference in one row raises the limit of the largest error beyond 1."""
    fp16 = Tolerance.for_precision("fp16")
    noise = NoiseFloor(0.5, 0.999, rms=1e-3)
    reference = np.eye(8, dtype=np.float32)
    found = judged(reference, reference, "probabilities", noise=noise, tolerance=fp16)
    assert found.passed
    assert found.limit > 1
    assert found.constant_ratio > 1
    best = np.broadcast_to(reference.mean(0), reference.shape)
    constant = judged(best, reference, "probabilities", noise=noise, tolerance=fp16)
    assert constant.problem.startswith("root mean square error")
    assert found.constant_ratio == pytest.approx(constant.rms_error / constant.rms_limit)


@pytest.mark.parametrize("rms", [1.0, np.inf])
def test_constant_within_both_limits_is_told(rms):
    fp16 = Tolerance.for_precision("fp16")
    reference = np.eye(8, dtype=np.float32)
    noise = NoiseFloor(0.5, 0.9, rms=rms)
    found = judged(reference, reference, "probabilities", noise=noise, tolerance=fp16)
    assert found.constant_ratio < 1


def test_constant_is_also_refused_in_a_quantized_graph():
    noise = NoiseFloor(0.5, 0.999, rms=1e-3)
    reference = np.eye(8, dtype=np.float32)
    tolerance = QuantizedTolerance("fp16")
    found = judged(reference, reference, "probabilities", noise=noise, tolerance=tolerance)
    assert found.constant_ratio > 1
