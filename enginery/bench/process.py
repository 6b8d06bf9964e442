"""One contender's process, seen from the parent.

>>> with Contender.start(plan, subject, config, log) as contender:
...     contender.ask("turn", runs=10)
{'times_ms': [3.41, 3.38, …]}
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import IO, Any

from enginery.bench.config import BenchConfig
from enginery.bench.contenders import Plan
from enginery.bench.subject import Subject
from enginery.core import errors
from enginery.core.child import held_pipe, how_it_ended
from enginery.core.closing import Closing
from enginery.core.errors import EngineryError, ProviderError

Answer = dict[str, Any]


class Contender(Closing):
    """A contender that has loaded its model. A context manager; closing ends its process.

    So does the end of this process, however it comes, in the middle of a long run too.
    """

    def __init__(
        self, plan: Plan, process: subprocess.Popen[str], log: Path, held: ExitStack
    ) -> None:
        self.plan = plan
        self.loaded: Answer = {}
        self._process = process
        self._log = log
        self._held = held

    @classmethod
    def start(cls, plan: Plan, subject: Subject, config: BenchConfig, log: Path) -> Contender:
        """Starts the process and loads the model.

        Args:
            plan: who runs.
            subject: what.
            config: the threads, and whether another provider will do.
            log: where everything goes that it says.

        Raises:
            EngineryError: it cannot run, with its own reason.
        """
        log.parent.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack, log.open("w", encoding="utf-8") as stream:
            environment, descriptors = stack.enter_context(held_pipe())
            process = subprocess.Popen(
                [sys.executable, "-m", "enginery.bench.contestant"],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=stream,
                text=True, encoding="utf-8",
                env={**os.environ, **environment, "HF_HUB_DISABLE_PROGRESS_BARS": "1"},
                pass_fds=descriptors,
            )  # fmt: skip
            contender = cls(plan, process, log, stack.pop_all())
        try:
            contender.loaded = contender.ask(
                "load",
                plan=plan.as_json(),
                artifact=str(subject.artifact.path),
                manifest=subject.artifact.manifest.model_dump(mode="json"),
                graph=subject.record.file,
                threads=config.threads,
                allow_fallback=config.allow_fallback,
            )
        except BaseException:
            contender.close()
            raise
        return contender

    def ask(self, does: str, **values: Any) -> Answer:
        """One command and its answer.

        Raises:
            EngineryError: as the contender raised it, or ProviderError where it died.
        """
        commands, answers = _pipe(self._process.stdin), _pipe(self._process.stdout)
        line = ""
        try:
            commands.write(json.dumps({"do": does, **values}) + "\n")
            commands.flush()
            line = answers.readline()
        except BrokenPipeError:
            pass  # it has died; what follows says how
        if not line:
            status = self._process.wait()
            raise ProviderError(
                f"{self.plan.name}: the process {how_it_ended(status)}.",
                do=f"Its last words: {_last_words(self._log)}",
            )
        found: Answer = json.loads(line)
        if "error" in found:
            said = found["error"]
            kind = getattr(errors, said["type"], None)
            known = isinstance(kind, type) and issubclass(kind, EngineryError)
            if known and kind is not errors.MissingPackageError:
                raise kind(said["message"], do=said["do"])  # type: ignore[misc]
            raise ProviderError(said["message"], do=said["do"])
        return found

    def close(self) -> None:
        """Ends the process; closing twice is fine."""
        # It may be in the middle of a long run, and there is nothing in it to keep.
        self._process.kill()
        self._process.wait()
        self._held.close()
        for stream in (self._process.stdin, self._process.stdout):
            if stream:
                try:
                    stream.close()
                except BrokenPipeError:
                    continue


def _pipe(stream: IO[str] | None) -> IO[str]:
    if stream is None:
        raise ProviderError("the contender's process has no pipes.")
    return stream


def _last_words(log: Path) -> str:
    lines = [line for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1].strip()[:300] if lines else "none"
