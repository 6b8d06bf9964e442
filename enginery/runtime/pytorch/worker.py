"""The child process of `TorchReference`, which holds one model at a time."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginery.core.artifact.manifest import Manifest
from enginery.core.model.source import ModelSource
from enginery.core.subprocess import WorkerResult, peak_rss_bytes, serve_requests
from enginery.core.trust.confinement import Confinement, stay_offline
from enginery.runtime.pytorch.reference import join_arrays, load_array, save_arrays

if TYPE_CHECKING:
    from enginery.runtime.pytorch.runner import TorchRunner


class _Worker:
    """Handles the requests of a `TorchReference`."""

    def __init__(self) -> None:
        self._held = ExitStack()
        self._runner: TorchRunner | None = None
        self._confinement: Confinement | None = None

    def handle(self, request: WorkerResult) -> WorkerResult:
        """Return the result of a request."""
        handlers = {
            "load": self._load,
            "call": self._call,
            "describe_side_files": self._describe_side_files,
            "unload": self._unload,
        }
        return handlers[request["do"]](request)

    def _load(self, request: WorkerResult) -> WorkerResult:
        if not request["trust_remote_code"]:
            stay_offline()
        from enginery.runtime.pytorch.runner import TorchOptions, TorchRunner, guarded

        manifest = Manifest.model_validate(request["manifest"])
        path, trust = Path(request["path"]), request["trust_remote_code"]
        vocoder = Path(request["vocoder"]) if request["vocoder"] else None
        read = [path, vocoder] if vocoder else [path]
        with ExitStack() as stack:
            self._confinement = stack.enter_context(guarded(*read, trust_remote_code=trust))
            self._runner = runner = stack.enter_context(
                TorchRunner(
                    ModelSource(path, manifest.source, pickled=request["pickled"]),
                    manifest,
                    TorchOptions(precision=request["precision"], trust_remote_code=trust),
                    graph=request["graph"],
                    vocoder=vocoder,
                )
            )
            _require_harmless(self._confinement)
            # Only a model that is loaded stays open; any error above closes what was opened.
            self._held = stack.pop_all()
        return {"notes": runner.notes}

    def _call(self, request: WorkerResult) -> WorkerResult:
        """Call a method of the runner; see `TorchReference`."""
        directory = Path(request["directory"])
        arguments = join_arrays(request["arguments"], directory / "arguments", load_array)
        runner = self._runner
        if runner is None:
            raise AssertionError("a model is loaded before it is asked for anything")
        result = getattr(runner, request["method"])(*arguments, **request["options"])
        _require_harmless(self._confinement)
        return {"result": save_arrays(result, directory), "notes": runner.notes}

    def _describe_side_files(self, request: WorkerResult) -> WorkerResult:
        trust = request["trust_remote_code"]
        if not trust:
            stay_offline()
        from enginery.runtime.pytorch.runner import guarded
        from enginery.runtime.pytorch.side_files import describe_side_files

        path = Path(request["path"])
        with guarded(path, trust_remote_code=trust) as confinement:
            described: dict[str, Any] = describe_side_files(
                path, **request["question"], trust_remote_code=trust
            )
            _require_harmless(confinement)
        return described

    def _unload(self, _request: WorkerResult) -> WorkerResult:
        self._runner = self._confinement = None
        self._held.close()
        return {"peak_rss_bytes": peak_rss_bytes()}


def _require_harmless(confinement: Confinement | None) -> None:
    """Raise UntrustedModelError for a blocked operation even if the model caught the error."""
    if confinement is not None and confinement.blocked:
        raise confinement.error()


if __name__ == "__main__":
    serve_requests(_Worker().handle)
