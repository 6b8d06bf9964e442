"""The process of one unit: it runs the cases that are left, and writes the results after each.

    $ python -m benchmarks.gpu_check.work RESULTS.json speed:minilm 120

Each unit has its own process, because an error on a GPU (an illegal access, a crash in a driver)
corrupts everything that the process does afterwards.
"""

from __future__ import annotations

import importlib
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.results import Record, Results
from benchmarks.gpu_check.settings import Settings, settings_for
from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import ArtifactError, EngineryError


class OutOfTimeError(Exception):
    """A case cannot finish in the time that is left; a later run begins it again."""


@dataclass
class Work:
    """A unit, its time limit and its results."""

    results: Results
    name: str
    """Such as `speed:minilm`."""
    seconds: float
    began: float = field(default_factory=time.monotonic)
    left_out: list[str] = field(default_factory=list)
    """Cases for which there was no time."""
    _case: Record = field(default_factory=dict)

    @property
    def model(self) -> str:
        return self.name.partition(":")[2]

    @property
    def device(self) -> str:
        """cuda, or cpu for a dry run."""
        return str(self.results.document["device"])

    @property
    def quick(self) -> bool:
        return bool(self.results.document["quick"])

    @property
    def settings(self) -> Settings:
        return settings_for(quick=self.quick)

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def provider(self) -> str:
        return self.device

    @property
    def models(self) -> Path:
        """Directory of the models."""
        return Path(self.results.document["models"])

    @property
    def reuse(self) -> bool:
        """True to keep artifacts in that directory, and to use those that are there."""
        return bool(self.results.document["reuse"])

    @property
    def carried(self) -> bool:
        """True to make no model, and to use those that are in the directory."""
        return bool(self.results.document.get("carried", False))

    @property
    def prototypes(self) -> str:
        """Directory of the prototype scripts; empty for none."""
        return str(self.results.document.get("prototypes", ""))

    @property
    def record(self) -> Record:
        """The results of this unit."""
        return self.results.unit(self.name)

    def left(self) -> float:
        """Return the seconds until the time limit."""
        return self.seconds - (time.monotonic() - self.began)

    def case(self, name: str, action: Callable[[], None], *, seconds: float = 1.0) -> None:
        """Run a case, unless an earlier run has finished it without a failed check.

        An error is a failed check, so that the next case can run.

        Args:
            name: name of the case, unique in the unit.
            action: runs it; its checks, notes and values go to the case.
            seconds: time that it needs; with less, it is left for a later run.
        """
        if name in self.results.finished(self.name):
            return
        if self.left() < seconds:
            self.left_out.append(name)
            return
        before = time.monotonic()
        self._case = {
            "finished": False,
            "command": self.results.document["command"],
            "seconds": 0.0,
            "checks": [],
            "notes": [],
        }
        self.record["cases"][name] = self._case
        self.results.write()
        try:
            action()
        except OutOfTimeError as error:
            self._say(f"{name}: {error}")
            self.left_out.append(name)
            del self.record["cases"][name]
            self.results.write()
            return
        except Exception as error:
            if not isinstance(error, EngineryError):
                traceback.print_exc()
            self.check(name, passed=False, found=describe_error(error))
        self._case |= {"finished": True, "seconds": time.monotonic() - before}
        self.results.write()

    def check(self, name: str, *, passed: bool, found: str) -> None:
        """Record the result of a check of the current case."""
        self._case["checks"].append({"check": name, "passed": passed, "found": found})
        self._say(f"{'ok' if passed else 'FAILED'}: {name}: {found}")
        self.results.write()

    def note(self, text: str) -> None:
        """Record something that was left out, with the reason."""
        self._case["notes"].append(text)
        self._say(text)

    def add(self, key: str, row: Any) -> None:
        """Add a row of results to the current case."""
        self._case.setdefault(key, []).append(row)

    def set(self, key: str, value: Any) -> None:
        """Set a value of the current case."""
        self._case[key] = value

    def artifact(self, precision: str, model: str = "") -> Artifact:
        """Return an artifact of a model, by default this unit's.

        Raises:
            ArtifactError: it was not made.
        """
        made = self.results.artifacts(model or self.model)
        if precision not in made:
            raise ArtifactError(f"{model or self.model} in {precision} was not made.")
        return Artifact.open(made[precision])

    def _say(self, text: str) -> None:
        print(f"{self.name}: {text}", flush=True)


def describe_error(error: BaseException) -> str:
    """Describe an error on one line: its message if it is expected, otherwise with its type."""
    text = " ".join(str(error).split())[:2000]
    if isinstance(error, EngineryError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def exit_with_parent() -> None:
    """End this process within a second after its parent, so that the GPU is free again."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(path: str, name: str, seconds: str) -> None:
    """Run the cases of a unit."""
    exit_with_parent()
    work = Work(Results.read(Path(path)), name, float(seconds))
    record = work.record
    try:
        part = name.partition(":")[0]
        importlib.import_module(f"benchmarks.gpu_check.parts.{part}").run(work)
    except Exception as error:
        traceback.print_exc()
        record |= {"status": "failed", "problem": describe_error(error)}
    else:
        checks = [check for case in record["cases"].values() for check in case["checks"]]
        passed = all(check["passed"] for check in checks)
        record |= {"status": "done" if passed else "failed", "problem": ""}
        if work.left_out:
            problem = f"no time was left for {', '.join(work.left_out)}"
            record |= {"status": "unfinished", "problem": problem}
    work.results.write()


if __name__ == "__main__":
    main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # taking down CUDA, TensorRT and compile workers one by one may hang or crash
