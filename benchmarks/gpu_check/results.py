"""The results of a check: a JSON file, and the page that is written from it.

    results = Results.begin(out, request, gpu="NVIDIA H200")    # or continue an earlier run
    results.unit("speed:minilm")["cases"]["1×128"]["finished"]  # True

The file is written after every case by the process that ran it, so a run that is killed keeps all
finished cases, and the next one continues with the others. It continues a file with the same GPU,
options, versions and source code only.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.goals import judge
from benchmarks.gpu_check.page import page
from benchmarks.gpu_check.records import failures
from benchmarks.gpu_check.settings import chosen_units
from enginery.bench.measurement.machine import describe_machine
from enginery.core.artifact.fingerprint import sha256_of
from enginery.core.json_file import json_bytes
from enginery.core.scratch import write_atomically

Record = dict[str, Any]
DRY_RUN = "on the CPU: a dry run"
FINISHED = ("done", "failed")
"""Statuses of a unit of which no case is left."""

_ROOT = Path(__file__).resolve().parents[2]
_CODE = ("enginery", "benchmarks/gpu_check")


class Results:
    """The document of a run, in memory and in its file."""

    def __init__(self, path: Path, document: Record) -> None:
        self.path = path
        self.document = document

    @classmethod
    def read(cls, path: Path) -> Results:
        """Read the file of a run."""
        return cls(path, json.loads(path.read_bytes()))

    @classmethod
    def begin(
        cls, out: Path, request: Mapping[str, Any], *, gpu: str, fresh: bool = False
    ) -> tuple[Results, str]:
        """Continue the newest run in a directory, or begin one; return it and a sentence about it.

        Args:
            out: directory of the files.
            request: the options `device`, `quick`, `models` and `reuse` of the command.
            gpu: name of the GPU; empty for a dry run.
            fresh: True to begin a new run in any case.
        """
        machine = describe_machine()
        options = {name: request[name] for name in ("device", "quick")}
        key = {"gpu": gpu, **options, "versions": machine["tools"], "code": code_digest()}
        kind = f"gpu-check-{slug(gpu or 'cpu')}{'-quick' if request['quick'] else ''}"
        pattern = re.compile(rf"{kind}-\d{{4}}-\d\d-\d\d(-\d+)?\.json")
        files = [file for file in out.glob("*.json") if pattern.fullmatch(file.name)]
        said = ""
        if files and not fresh:
            newest = cls.read(max(files, key=lambda file: file.stat().st_mtime_ns))
            before = newest.document["key"]
            changed = [name for name in key if before.get(name) != key[name]]
            if not changed:
                newest.document |= {**request, "command": newest.document["command"] + 1}
                done = sum(len(newest.finished(name)) for name in newest.document["parts"])
                return newest, f"continuing {newest.path}: {done} cases are finished"
            said = f"{newest.path} is not continued: different {' and '.join(changed)}; "
        now = datetime.now(UTC)
        path = out / f"{kind}-{now:%Y-%m-%d}.json"
        number = 2
        while path.exists():
            path = out / f"{kind}-{now:%Y-%m-%d}-{number}.json"
            number += 1
        document = {
            "key": key,
            **request,
            "dry_run": "" if gpu else DRY_RUN,
            "gpu": gpu,
            "started": now.isoformat(timespec="seconds"),
            "seconds": 0.0,
            "command": 1,
            "machine": machine,
            "parts": {},
        }
        return cls(path, document), f"{said}beginning {path}"

    def unit(self, name: str) -> Record:
        """Return the record of a unit, which is added if it has none."""
        new = {"status": "unfinished", "problem": "", "seconds": 0.0, "cases": {}}
        found: Record = self.document["parts"].setdefault(name, new)
        return found

    def finished(self, unit: str) -> list[str]:
        """Return the cases of a unit that need not run: those that passed, or failed just now."""
        return [
            name
            for name, case in self.unit(unit)["cases"].items()
            if case["finished"]
            and (
                case["command"] == self.document["command"]
                or all(check["passed"] for check in case["checks"])
            )
        ]

    def artifacts(self, model: str) -> dict[str, str]:
        """Return the paths of a model's artifacts by precision; those that were made."""
        cases = self.document["parts"].get(f"models:{model}", {}).get("cases", {})
        made = (case.get("artifacts", {}) for case in cases.values())
        return {name: path for one in made for name, path in one.items() if Path(path).exists()}

    def write(self) -> None:
        """Judge the goals, and write the JSON file and the page."""
        parts = self.document["parts"]
        names = [unit.name for unit in chosen_units()]
        self.document |= {
            "complete": all(parts.get(n, {}).get("status") in FINISHED for n in names),
            "failures": failures(parts),
            "goals": [vars(goal) for goal in judge(parts, gpu=self.document["gpu"])],
        }
        write_atomically(self.path, json_bytes(self.document))
        write_atomically(self.path.with_suffix(".md"), page(self.document).encode())


def slug(name: str) -> str:
    """Return a name for files: `nvidia-h200` for `NVIDIA H200`."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unnamed"


def code_digest() -> str:
    """Return a digest of the source code that is measured and that measures."""
    files = sorted(file for top in _CODE for file in (_ROOT / top).rglob("*.py"))
    lines = [f"{file.relative_to(_ROOT)} {sha256_of(file)}" for file in files]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]
