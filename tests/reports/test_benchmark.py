"""Tables of a benchmark."""

from __future__ import annotations

from dataclasses import replace

from tests.bench.sample_results import (
    make_backend_record,
    make_case,
    make_result,
)


def tables(result):
    return {table.title: table.rows for table in result.tables()}


def test_comparisons_mention_a_busy_machine():
    case = make_case({"batch": 1}, {"a": 1.0, "b": 2.0}, pairs=[("a", "b")])
    result = make_result(
        contenders=[make_backend_record("a"), make_backend_record("b")], cases=[case]
    )
    (row,) = tables(result)["Comparison"]
    assert row["result"] == "2.00x as fast (2.00x to 2.00x)"
    busy = replace(result, machine={**result.machine, "load": 8.1})
    (row,) = tables(busy)["Comparison"]
    assert row["result"] == "2.00x as fast (2.00x to 2.00x); on a busy machine"


def test_energy_is_a_column_where_a_gpu_reports_it():
    case = make_case({"batch": 1}, {"a": 1.0, "b": 2.0})
    assert "J/run" not in tables(make_result(contenders=[], cases=[case]))["Latency"][0]
    first, second = case.measurements
    measured = replace(case, measurements=[replace(first, joules_per_run=0.1234), second])
    rows = tables(make_result(contenders=[], cases=[measured]))["Latency"]
    assert [row["J/run"] for row in rows] == ["0.123", "–"]
