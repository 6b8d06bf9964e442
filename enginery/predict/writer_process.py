"""Assemble parts to an output in a child process; see `writer.OutputProcess`."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

from enginery.core.errors import InputError, os_errors_as
from enginery.core.subprocess import serve_requests
from enginery.predict.writer import FinishedPart, OutputFile


class _Assembler:
    """Handles the requests `open`, `add` and `finish`, in this order."""

    def __init__(self) -> None:
        self._output: OutputFile

    def __call__(self, request: dict[str, Any]) -> dict[str, Any]:
        """Handle a request and return its result.

        Raises:
            InputError: the output cannot be written.
        """
        import pyarrow as pa

        with os_errors_as(InputError, "the output cannot be written"):
            if request["do"] == "open":
                schema = pa.ipc.read_schema(pa.py_buffer(base64.b64decode(request["schema"])))
                self._output = OutputFile(Path(request["path"]), request["kind"], schema)
            elif request["do"] == "add":
                self._output.add(
                    FinishedPart(Path(request["part"]), request["sha256"], request["rows"])
                )
            else:
                return {"sha256": self._output.finish()}
        return {}


if __name__ == "__main__":
    serve_requests(_Assembler())
