"""Break the package on purpose, a line at a time: the test that `breaks.json` names notices it.

    $ python -m pytest -m slow tests/test_breaks.py -k validate    # those of enginery/validate

A suite that becomes faster must notice what it noticed before. So run this after tests were removed
or made smaller, and name the test that notices a break now. Each break is made in a copy.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BREAKS = json.loads((ROOT / "tests" / "breaks.json").read_text(encoding="utf-8"))

every_break = pytest.mark.parametrize(
    "fault", BREAKS, ids=lambda fault: f"{fault['file']}: {fault['breaks']}"
)


def broken_source(fault):
    """Return the text of the module with the break; `old` is in it once."""
    source = (ROOT / "enginery" / fault["file"]).read_text(encoding="utf-8")
    assert source.count(fault["old"]) == 1, "the code has changed: write the break anew"
    return source.replace(fault["old"], fault["new"])


@every_break
def test_break_can_be_made_and_its_test_exists(fault):
    compile(broken_source(fault), fault["file"], "exec")
    path, _, name = fault["test"].partition("::")
    tests = (ROOT / path).read_text(encoding="utf-8")
    assert not name or f"def {name.partition('[')[0]}(" in tests


@pytest.mark.slow
@every_break
def test_break_is_noticed(fault, tmp_path):
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name != "enginery":
            (tmp_path / path.name).symlink_to(path)
    shutil.copytree(ROOT / "enginery", tmp_path / "enginery")
    (tmp_path / "enginery" / fault["file"]).write_text(broken_source(fault), encoding="utf-8")
    options = ["-q", "-x", "--tb=line", "-p", "no:cacheprovider", "-m", "slow or not slow"]
    result = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "-k", fault.get("select", ""), fault["test"]],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 1, f"not noticed:\n{result.stdout[-2000:]}"
