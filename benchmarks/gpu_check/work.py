"""The process of one part: it has a time limit, and writes its results after every step.

The request and the result are JSON files; the result exists from the first step on:

    $ python -m benchmarks.gpu_check.work request.json

Each part has its own process, because an error on a GPU (an illegal access, a crash in a driver)
corrupts everything that the process does afterwards.
"""

from __future__ import annotations

import importlib
import json
import os
import sys
import threading
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.settings import Settings, settings_for
from enginery.core.artifact.artifact import Artifact
from enginery.core.artifact.staging import write_atomically
from enginery.core.errors import EngineryError
from enginery.core.json_file import json_bytes

Found = dict[str, Any]


@dataclass
class Work:
    """The request of a part, its time limit and its results."""

    part: str
    result: Path
    device: str
    """cuda, or cpu for a dry run."""
    quick: bool
    seconds: float
    models: Path
    """Directory of the models."""
    reuse: bool
    """True to use finished artifacts in that directory."""
    artifacts: dict[str, dict[str, str]] = field(default_factory=dict)
    """Model -> precision -> path of the artifact, from the part `models`."""
    only_model: str = ""
    began: float = field(default_factory=time.monotonic)
    found: Found = field(default_factory=lambda: {"checks": [], "notes": []})

    @property
    def settings(self) -> Settings:
        return settings_for(quick=self.quick)

    @property
    def on_gpu(self) -> bool:
        return self.device == "cuda"

    @property
    def provider(self) -> str:
        return self.device

    def left(self) -> float:
        """Return the seconds until the time limit."""
        return self.seconds - (time.monotonic() - self.began)

    def save(self) -> None:
        """Write the results so far."""
        write_atomically(self.result, json_bytes(self.found))

    def check(self, name: str, *, passed: bool, found: str) -> None:
        """Record the result of a check."""
        self.found["checks"].append({"check": name, "passed": passed, "found": found})
        self._say(f"{'ok' if passed else 'FAILED'}: {name}: {found}")
        self.save()

    def note(self, text: str) -> None:
        """Record something that was left out, with the reason."""
        self.found["notes"].append(text)
        self._say(text)
        self.save()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Turn an error in the block into a failed check, so that the next step can run."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, EngineryError):
                traceback.print_exc()
            self.check(name, passed=False, found=describe_error(error))

    def artifact(self, model: str, precision: str) -> Artifact | None:
        """Return an artifact; None with a note if the part `models` has not made it."""
        path = self.artifacts.get(model, {}).get(precision)
        if path is None:
            self.note(f"{model} in {precision}: left out, it was not made")
            return None
        return Artifact.open(path)

    def _say(self, text: str) -> None:
        print(f"{self.part}: {text}", flush=True)


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


def main(request: Path) -> None:
    """Run one part."""
    exit_with_parent()
    given = json.loads(request.read_text(encoding="utf-8"))
    paths = {name: Path(given.pop(name)) for name in ("result", "models")}
    work = Work(**given, **paths)
    work.save()
    module = importlib.import_module(f"benchmarks.gpu_check.{work.part}")
    with work.step(work.part):
        module.run(work)
        work.found["finished"] = True
    work.save()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
    sys.stdout.flush()
    os._exit(0)  # taking down CUDA, TensorRT and compile workers one by one may hang or crash
