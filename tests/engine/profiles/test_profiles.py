import itertools

import numpy as np
import pytest

from enginery.core.errors import ShapeError
from enginery.core.shapes import Profile, TensorSpec
from enginery.engine.profiles.check import (
    ProfileReport,
    check_profiles,
    choose_profile,
    read_profiles,
)
from tests.core.test_shapes import DECODER, TEXT

FIXED = (TensorSpec("input_ids", "int64", (1, 16)),)
LIMITS = {"sequence": 512}
FULL = "batch=1:8:32,sequence=8:128:512"


def parsed(*texts):
    return [Profile.parse(text) for text in texts]


def read(*texts, inputs=TEXT):
    return [str(profile) for profile in read_profiles(texts, inputs)]


def refusal(texts, inputs=TEXT, limits=LIMITS):
    with pytest.raises(ShapeError) as error:
        check_profiles(read_profiles(texts, inputs), inputs, limits)
    return str(error.value)


# Reading


def test_profiles_are_in_the_graphs_order():
    assert read("sequence_length=8:128:512, batch_size=1:8:32", FULL) == [FULL, FULL]


def test_graph_with_fixed_shapes_has_no_profile():
    assert read(inputs=FIXED) == read("batch=1,sequence=16", inputs=FIXED) == []
    assert check_profiles([], FIXED, LIMITS) == ProfileReport((), ())


def test_both_notations_give_the_same_profile():
    shapes = {
        "min_shapes": "input_ids:1x8,attention_mask:1x8",
        "opt_shapes": "input_ids:8x128,attention_mask:8x128",
        "max_shapes": "input_ids:32x512,attention_mask:32x512",
    }
    assert read_profiles([], TEXT, **shapes) == read_profiles([FULL], TEXT)
    both = read_profiles(["batch=1,sequence=4"], TEXT, **shapes)
    assert [str(profile) for profile in both] == ["batch=1,sequence=4", FULL]


# What is wrong with one profile


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "input_ids=1x8:4x64:8x128",
            "profile 'input_ids=1x8:4x64:8x128': found "
            "the input shape 'input_ids=1x8:4x64:8x128', expected name=min:opt:max of a dim. "
            "Write batch=1:4:8,sequence=8:64:128, or --min-shapes input_ids:1x8 --opt-shapes "
            "input_ids:4x64 --max-shapes input_ids:8x128.",
        ),
        (
            "input_ids:1x8,attention_mask:1x8",
            "profile 'input_ids:1x8,attention_mask:1x8': found "
            "the input shape 'input_ids:1x8', expected name=min:opt:max of a dim. Write "
            "batch=1,sequence=8, or --min-shapes input_ids:1x8 --opt-shapes input_ids:1x8 "
            "--max-shapes input_ids:1x8.",
        ),
        (
            "images=1x8",
            "profile 'images=1x8': found the input shape 'images=1x8', expected "
            "name=min:opt:max of a dim. Name the graph's dims, for example "
            "batch=1:8:32,sequence=8:128:512.",
        ),
    ],
)
def test_shape_of_an_input_is_an_error_that_names_the_dims(text, message):
    assert refusal([text]) == message


def test_graph_with_dynamic_dims_needs_a_profile():
    assert refusal([]) == (
        "the graph has the dynamic dims batch, sequence, but no profile was given. "
        "Add one, for example --profile batch=1:8:32,sequence=1:8:32."
    )


def test_past_and_present_share_the_models_positions():
    assert refusal(["batch=1,sequence=1:8:300,past_sequence=1:8:213"], inputs=DECODER) == (
        "profile 'batch=1,sequence=1:8:300,past_sequence=1:8:213': past_sequence + sequence goes "
        "up to 213 + 300 = 513, but the model's positions end at 512. Lower the maxima of "
        "past_sequence and sequence, so that past_sequence + sequence is at most 512."
    )
    fits = read_profiles(["batch=1,sequence=1:8:300,past_sequence=1:8:212"], DECODER)
    assert check_profiles(fits, DECODER, LIMITS) == ProfileReport((), ())
    assert check_profiles(parsed("batch=1,sequence=900,past_sequence=900"), DECODER, {})


def test_mask_one_longer_than_the_past_shares_the_positions():
    step = (
        TensorSpec("input_ids", "int64", ("batch", 1)),
        TensorSpec("attention_mask", "int64", ("batch", "past_sequence + 1")),
    )
    assert refusal(["batch=1,past_sequence=1:8:512"], inputs=step) == (
        "profile 'batch=1,past_sequence=1:8:512': past_sequence + 1 goes up to 512 + 1 = 513, but "
        "the model's positions end at 512. Lower the maxima of past_sequence, so that "
        "past_sequence + 1 is at most 512."
    )
    check_profiles(parsed("batch=1,past_sequence=1:8:511"), step, LIMITS)


def test_every_profile_is_checked():
    assert "goes up to 513" in refusal([FULL, "batch=1,sequence=513"])


# Profiles together


def test_adjacent_profiles_have_no_notes():
    assert check_profiles(
        parsed("batch=1:8:32,sequence=1:16:32", "batch=1:8:32,sequence=33:64:512"), TEXT, LIMITS
    ) == ProfileReport((), ())


def test_sizes_between_profiles_are_a_warning():
    report = check_profiles(
        parsed(
            "batch=1:8:32,sequence=64:128:256",
            "batch=1:8:32,sequence=1:16:32",
            "batch=1:8:32,sequence=258:300:512",
        ),
        TEXT,
        LIMITS,
    )
    assert report.warnings == (
        "sequence 33 to 63 is in no profile: the ranges end at 32 and start again at 64.",
        "sequence 257 is in no profile: the ranges end at 256 and start again at 258.",
    )
    assert report.notes == ()


def test_ranges_inside_a_wide_one_leave_no_gap():
    report = check_profiles(
        parsed("batch=1,sequence=1:8:512", "batch=1,sequence=2:2:4", "batch=1,sequence=8:8:16"),
        TEXT,
        LIMITS,
    )
    assert report.warnings == ()


def test_uncovered_combinations_are_noted():
    report = check_profiles(
        parsed("batch=1:4:8,sequence=1:8:16", "batch=1:1:4,sequence=17:32:64"), TEXT, LIMITS
    )
    assert report == ProfileReport(
        (),
        (
            "no profile covers batch 5 to 8 with sequence 17 to 64, although each of these sizes "
            "is in one.",
        ),
    )


def test_uncovered_combinations_are_merged():
    report = check_profiles(
        parsed(
            "batch=1:4:8,sequence=1:8:16",
            "batch=1:1:4,sequence=17:32:32",
            "batch=1:1:4,sequence=33:64:64",
        ),
        TEXT,
        LIMITS,
    )
    assert report.notes[0].startswith("no profile covers batch 5 to 8 with sequence 17 to 64, ")


def test_profile_within_another_is_noted_and_used_for_its_shapes():
    both = parsed(FULL, "batch=1,sequence=8:16:32")
    assert check_profiles(both, TEXT, LIMITS) == ProfileReport(
        (),
        (
            "profile 'batch=1,sequence=8:16:32' lies within 'batch=1:8:32,sequence=8:128:512' and "
            "is used for the shapes in both, batch 1, sequence 8 to 32: its largest shape is "
            "smaller.",
        ),
    )
    assert choose_profile(both, {"batch": 1, "sequence": 32}) == 1


def test_overlapping_profiles_are_noted_with_the_one_used():
    report = check_profiles(
        parsed("batch=8:16:32,sequence=8", "batch=1:2:16,sequence=8"), TEXT, LIMITS
    )
    assert report.notes == (
        "profile 'batch=1:2:16,sequence=8' overlaps 'batch=8:16:32,sequence=8' and is used for "
        "the shapes in both, batch 8 to 16, sequence 8: its largest shape is smaller.",
    )


@pytest.mark.parametrize(
    ("first", "second", "reason"),
    [
        (
            "batch=8:8:32,sequence=8",
            "batch=1:8:32,sequence=8",
            "their largest shapes are equally large, and it has fewer shapes.",
        ),
        (
            "batch=1:2:4,sequence=1:2:8",
            "batch=1:2:8,sequence=1:2:4",
            "both are equally large, and it was given first.",
        ),
    ],
)
def test_a_tie_between_overlapping_profiles_has_its_reason(first, second, reason):
    notes = check_profiles(parsed(first, second), TEXT, LIMITS).notes
    assert notes[0].startswith(f"profile '{first}' ")
    assert notes[0].endswith(reason)


def test_profiles_with_the_same_shapes_are_an_error():
    assert refusal([FULL, "batch=1:1:32,sequence=8:16:512"]) == (
        "profiles 'batch=1:8:32,sequence=8:128:512' and 'batch=1:1:32,sequence=8:16:512' cover the "
        "same shapes, so the second is never chosen. Remove one of them."
    )


def test_profile_covered_by_smaller_ones_is_an_error():
    assert refusal(
        ["batch=1,sequence=1:16:32", "batch=1,sequence=1:8:16", "batch=1,sequence=17:18:32"]
    ) == (
        "profile 'batch=1,sequence=1:16:32' is never chosen: all its shapes are in a smaller "
        "profile, 'batch=1,sequence=1:8:16' and 'batch=1,sequence=17:18:32'. Remove it."
    )


def test_never_chosen_agrees_with_the_choice_at_run_time():
    """Compare over all shapes of small random profiles."""
    generator = np.random.default_rng(0)
    found = set()
    for _ in range(300):
        texts = []
        for _ in range(generator.integers(2, 5)):
            (a, b), (c, d) = np.sort(generator.integers(1, 4, (2, 2)), axis=1)
            texts.append(f"batch={a}:{a}:{b},sequence={c}:{c}:{d}")
        profiles = parsed(*texts)
        chosen = set()
        for batch, sequence in itertools.product(range(1, 4), repeat=2):
            try:
                chosen.add(choose_profile(profiles, {"batch": batch, "sequence": sequence}))
            except ShapeError:
                continue
        all_used = len(chosen) == len(profiles)
        found.add(all_used)
        if all_used:
            check_profiles(profiles, TEXT, {})
        else:
            with pytest.raises(ShapeError, match="never chosen"):
                check_profiles(profiles, TEXT, {})
    assert found == {True, False}
