"""The child process of `tensorrt.process`.

    $ python -m enginery.runtime.tensorrt.worker request.json result.json

It writes the plan to the file in the request, and TensorRT's messages to standard output as they
come, so that the log is complete even if TensorRT crashes.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from enginery.core.subprocess import worker_main
from enginery.runtime.tensorrt.build import BuildRequest, build_in_process
from enginery.runtime.tensorrt.options import get_flavor
from enginery.runtime.tensorrt.parse import cover_in_process, parse_in_process


def handle_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Parse, check coverage or build, as the request says."""
    path, flavor = Path(request["path"]), get_flavor(request["flavor"])
    if request["action"] == "parse":
        return asdict(parse_in_process(path, flavor=flavor, follow=[_write]))
    if request["action"] == "cover":
        return asdict(cover_in_process(path, flavor=flavor, follow=[_write]))
    built = build_in_process(
        path,
        BuildRequest.from_json(request),
        plan_path=Path(request["plan_path"]),
        follow=[_write],
    )
    result = asdict(built)
    del result["held"]  # empty bytes, which JSON cannot hold: the plan is in its file
    return result


def _write(level: str, text: str) -> None:
    sys.stdout.write(f"{level}: {text}\n")


if __name__ == "__main__":
    worker_main(handle_request, description="{path}: TensorRT")
