"""The child process of `runtime.tensorrt`.

Takes a request file; leaves a result file, and the plan in the scratch directory. What TensorRT
says goes to standard output as it comes, so that a log has its last words if it crashes.

    $ python -m enginery.runtime.tensorrt_worker request.json result.json
"""

from __future__ import annotations

import json
import os
import sys
import traceback
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from enginery.core.errors import EngineryError
from enginery.core.shapes import Profile
from enginery.runtime.tensorrt_build import build_here, parse_here


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Does what the request asks for."""
    path = Path(request["path"])
    if request["action"] == "parse":
        return asdict(parse_here(path, follow=[_write]))
    built = build_here(
        path,
        [Profile.parse(text) if text else Profile({}) for text in request["profiles"]],
        capabilities=request["capabilities"],
        workspace_bytes=request["workspace_bytes"],
        limits=request["limits"],
        follow=[_write],
    )
    (Path(request["scratch"]) / "plan").write_bytes(built.plan)
    found = asdict(built)
    del found["plan"]
    return found


def _write(level: str, text: str) -> None:
    sys.stdout.write(f"{level}: {text}\n")


def main(request_file: str, result_file: str) -> int:
    """Runs one request; expected errors are written into the result file, too."""
    request = json.loads(Path(request_file).read_text(encoding="utf-8"))
    try:
        found = answer(request)
    except EngineryError as error:
        found = {"error": {"type": type(error).__name__, "message": error.message, "do": error.do}}
    except Exception as error:
        traceback.print_exc()
        message = f"{request['path']}: TensorRT failed in {type(error).__name__}: {error}"
        found = {"error": {"type": "ProviderError", "message": message, "do": ""}}
    Path(result_file).write_text(json.dumps(found), encoding="utf-8")
    return 0


if __name__ == "__main__":
    status = main(*sys.argv[1:])
    sys.stdout.flush()
    os._exit(status)  # a TensorRT that is taken down late may crash after all is done
