"""The table of deliberate breaks fits the code: each can be made, and has a recorded result."""

from __future__ import annotations

import difflib
from collections import Counter

import pytest

from tests.breaks import AREAS, BREAKS, LEVELS, ROOT, TABLE, broken_source, read_table


@pytest.mark.parametrize("fault", BREAKS, ids=lambda fault: fault.breaks)
def test_break_changes_one_line(fault):
    source = (ROOT / "enginery" / fault.file).read_text(encoding="utf-8")
    changed = broken_source(fault, source)
    lines = list(difflib.unified_diff(source.splitlines(), changed.splitlines(), n=0))[3:]
    assert [line[0] for line in lines] in (["-", "+"], ["-"])
    compile(changed, fault.file, "exec")


def test_text_that_is_not_there_once_is_an_error():
    broken = BREAKS[0]
    with pytest.raises(ValueError, match="found 2 times, expected once"):
        broken_source(broken, broken.old * 2)


def test_each_area_has_ten_breaks():
    assert Counter(fault.area for fault in BREAKS) == dict.fromkeys(AREAS, 10)


def test_tests_of_a_break_exist():
    files = [name.partition("::")[0] for fault in BREAKS for name in fault.tests.split()]
    assert [name for name in files if not (ROOT / name).is_file()] == []


def test_table_has_a_row_for_each_break():
    rows = read_table(TABLE)
    assert list(rows) == [(fault.file, fault.breaks) for fault in BREAKS]
    assert {row.noticed_by for row in rows.values()} <= {*LEVELS, "nothing"}
    assert all(bool(row.test) == (row.noticed_by != "nothing") for row in rows.values())
