"""The child process of `tensorrt.process`.

Takes a request file; leaves a result file, and the plan in the file that the request names. What
TensorRT says goes to standard output as it comes, so that a log has its last words if it crashes.

    $ python -m enginery.runtime.tensorrt.worker request.json result.json
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from enginery.core.shapes import Profile
from enginery.core.subprocess import worker_main
from enginery.runtime.tensorrt.build import build_here
from enginery.runtime.tensorrt.options import BuildOptions, flavor_named
from enginery.runtime.tensorrt.parse import cover_here, parse_here


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Does what the request asks for."""
    path, flavor = Path(request["path"]), flavor_named(request["flavor"])
    if request["action"] == "parse":
        return asdict(parse_here(path, flavor=flavor, follow=[_write]))
    if request["action"] == "cover":
        return asdict(cover_here(path, flavor=flavor, follow=[_write]))
    built = build_here(
        path,
        [Profile.parse(text) if text else Profile({}) for text in request["profiles"]],
        flavor=flavor,
        capabilities=request["capabilities"],
        options=BuildOptions(**request["options"]),
        limits=request["limits"],
        plan_path=Path(request["plan_path"]),
        follow=[_write],
    )
    found = asdict(built)
    del found["held"]  # bytes, and empty: the plan is in its file
    return found


def _write(level: str, text: str) -> None:
    sys.stdout.write(f"{level}: {text}\n")


if __name__ == "__main__":
    worker_main(answer, description="{path}: TensorRT")
