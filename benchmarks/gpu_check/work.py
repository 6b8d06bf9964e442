"""The process of one part: it is given its time, and leaves what it has found after every step.

Takes a request as JSON; leaves a result as JSON, which is there from the first step on:

    $ python -m benchmarks.gpu_check.work request.json

Parts run in processes of their own because a fault on a GPU (an illegal access, a crash in a
driver) spoils everything that the process does afterwards.
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
    """What a part is to do, how long it may take, and what it has found."""

    part: str
    result: Path
    device: str
    """cuda, or cpu for a dry run."""
    quick: bool
    seconds: float
    models: Path
    """Where made models are kept."""
    reuse: bool
    """Take finished artifacts from there as they are."""
    artifacts: dict[str, dict[str, str]] = field(default_factory=dict)
    """Model -> precision -> the artifact's path, as the part `models` left them."""
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
        """Seconds until the process is ended."""
        return self.seconds - (time.monotonic() - self.began)

    def save(self) -> None:
        """Leaves what is found so far."""
        write_atomically(self.result, json_bytes(self.found))

    def check(self, name: str, *, passed: bool, found: str) -> None:
        """Records a verdict."""
        self.found["checks"].append({"check": name, "passed": passed, "found": found})
        self._say(f"{'ok' if passed else 'FAILED'}: {name}: {found}")
        self.save()

    def note(self, text: str) -> None:
        """Records what is no verdict: something that was left out, with the reason."""
        self.found["notes"].append(text)
        self._say(text)
        self.save()

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Whatever goes wrong inside is a failed check, and the next step goes on."""
        try:
            yield
        except Exception as error:
            if not isinstance(error, EngineryError):
                traceback.print_exc()
            self.check(name, passed=False, found=in_words(error))

    def artifact(self, model: str, precision: str) -> Artifact | None:
        """A made artifact; None, and a note, where the part `models` has not made it."""
        path = self.artifacts.get(model, {}).get(precision)
        if path is None:
            self.note(f"{model} in {precision}: left out, it was not made")
            return None
        return Artifact.open(path)

    def _say(self, text: str) -> None:
        print(f"{self.part}: {text}", flush=True)


def in_words(error: BaseException) -> str:
    """What went wrong, on one line: an expected failure's own words, else its type, too."""
    text = " ".join(str(error).split())[:2000]
    if isinstance(error, EngineryError):
        return text
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def exit_with_parent() -> None:
    """Ends this process within a second of the one that started it: a GPU is not to be held on."""
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(0.5)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(request: Path) -> None:
    """Does one part."""
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
