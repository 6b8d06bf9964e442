"""What counts between two tokenizers depends on who makes them, and for what."""

import pytest

from enginery.runtime.text.tokenizer_comparison import TokenizerDifferences

MOVED = TokenizerDifferences(state=["model (set by the vocabulary)"], offsets=["'a' moved"])


def test_offsets_count_between_equal_versions():
    assert MOVED.problem == "'a' moved"


@pytest.mark.parametrize(("spans", "problem"), [(True, "'a' moved"), (False, "")])
def test_offsets_count_between_major_versions_for_spans_alone(spans, problem):
    assert MOVED.problem_of_version(spans=spans) == problem


def test_tokens_count_between_major_versions():
    differences = TokenizerDifferences(answers=["'a' has the token ids 1"], offsets=["'a' moved"])
    assert differences.problem_of_version(spans=False) == "'a' has the token ids 1"
