"""`py.typed` is true: type checkers know every result, and see the mistakes of users."""

import inspect
import os
import subprocess
import sys
from pathlib import Path

import pytest

import enginery
from enginery.runtime.tasks import TASKS

ROOT = Path(__file__).parents[2]
USER_CODE = Path(__file__).with_name("user_code.py")
PYRIGHT = os.environ.get("PYRIGHT", "")


def check(*command):
    result = subprocess.run(
        [*command, str(USER_CODE)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


def test_user_code_calls_every_function_and_method():
    source = USER_CODE.read_text(encoding="utf-8")
    functions = [name for name in enginery.__all__ if inspect.isfunction(getattr(enginery, name))]
    calls = [*functions, *(f"model.{verb}" for verb in TASKS)]
    assert [call for call in calls if f"{call}(" not in source] == []


def test_mypy_accepts_the_code_and_sees_its_mistakes():
    check(sys.executable, "-m", "mypy")


@pytest.mark.more
@pytest.mark.skipif(not PYRIGHT, reason="set PYRIGHT, see CONTRIBUTING.md")
def test_pyright_accepts_the_code_and_sees_its_mistakes():
    check(PYRIGHT, "--pythonpath", sys.executable)
