import pyarrow as pa
import pytest

from enginery.core.datasets.arrow_arrays import numeric_view, to_arrow, value_lengths

_SPAN = pa.struct([("label", pa.string()), ("score", pa.float32()), ("start", pa.int64())])


@pytest.mark.parametrize(
    ("kind", "values"),
    [
        (pa.string(), ["warm", None, "", "é🙂", *["x"] * 9]),
        (pa.string(), []),
        (pa.bool_(), [True, None, False, *[True] * 9]),
        (pa.int64(), [2**62 + 1, None, -(2**63)]),
        (pa.float32(), [0.5, None, float("inf")]),
        (pa.float64(), [0.1, 3, None]),
        (pa.list_(pa.string()), [["a", None], None, [], ["b"]]),
        (_SPAN, [{"label": "x", "score": 0.5, "start": 3}, None]),
        (pa.list_(pa.list_(_SPAN)), [[[{"label": "x", "score": 0.5, "start": None}], []], None]),
        (pa.list_(pa.float32(), 2), [[1.0, 2.0], None, [3.0, 4.0]]),
    ],
    ids=str,
)
def test_arrays_are_those_of_pyarrow(kind, values):
    found = to_arrow(values, kind)
    found.validate(full=True)
    assert found.equals(pa.array(values, kind))


def test_unsupported_types_and_values_are_errors():
    with pytest.raises(OverflowError):
        to_arrow([2**70], pa.int64())
    with pytest.raises(TypeError, match=r"arrays of date32.* are not supported"):
        to_arrow([1], pa.date32())


def test_numbers_and_sizes_of_a_slice():
    column = pa.array([1.5, 2.5, 3.5, 4.5], pa.float32())
    assert numeric_view(column.slice(1, 2)).tolist() == [2.5, 3.5]
    for kind in (pa.string(), pa.large_string(), pa.binary()):
        texts = pa.array(["a", "bc", "", "def"]).cast(kind)
        assert value_lengths(texts.slice(1, 3)).tolist() == [2, 0, 3]
