"""Run a probe in a subprocess, so that a crashing provider cannot crash the doctor."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

_ANSI = re.compile(r"\x1b\[[0-9;]*m")
_ORT_ERROR = re.compile(r"\[E:onnxruntime[^\]]*\] (.*)")
_ORT_STATUS = re.compile(r"^.*\[ONNXRuntimeError\] : \d+ : \w+ : ")


@dataclass(frozen=True)
class ProbeResult:
    """Result of a probe, or the reason why there is none."""

    values: dict[str, Any] = field(default_factory=dict)
    reason: str = ""
    """Reason why there are no values; empty otherwise."""
    log: str = ""
    """Last error that ONNX Runtime logged."""


def run_probe(
    arguments: Sequence[str],
    *,
    timeout_seconds: float,
    module: str = "enginery.doctor.probe_worker",
) -> ProbeResult:
    """Run `python -m module arguments…` with this process's packages; read the JSON it prints."""
    # The subprocess has the same import path; -P excludes the working directory.
    path = os.pathsep.join(entry for entry in sys.path if entry)
    try:
        process = subprocess.run(
            [sys.executable, "-P", "-m", module, *arguments],
            env=os.environ | {"PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=timeout_seconds,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return ProbeResult(reason=f"no answer within {timeout_seconds:g} seconds")
    except OSError as error:
        return ProbeResult(reason=f"Python could not be started: {error}")
    log = last_error(process.stderr.decode(errors="replace"))
    if process.returncode < 0:
        return ProbeResult(
            reason=f"the process died of {_signal_name(-process.returncode)}", log=log
        )
    lines = process.stdout.decode(errors="replace").strip().splitlines()
    try:
        values = json.loads(lines[-1]) if lines else None
    except json.JSONDecodeError:
        values = None
    if process.returncode or not isinstance(values, dict):
        return ProbeResult(reason=f"the process ended with status {process.returncode}", log=log)
    return ProbeResult(values, log=log)


def last_error(stderr: str) -> str:
    """Return ONNX Runtime's last logged error, else the last line of a traceback, else nothing."""
    text = _ANSI.sub("", stderr)
    if errors := _ORT_ERROR.findall(text):
        return _ORT_STATUS.sub("", errors[-1]).strip()
    lines = [line for line in text.splitlines() if line.strip()]
    return lines[-1].strip() if lines and "Traceback" in text else ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
