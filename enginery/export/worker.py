"""The child process of the export stage.

Takes a request file; leaves the graphs and side files in the staging directory and a result file.

    $ python -m enginery.export.worker request.json result.json
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from enginery.core.child import answer_parent
from enginery.core.feeds import FeedLimits
from enginery.core.memory import peak_rss_bytes
from enginery.export.config import ExportConfig
from enginery.export.protocol import PHASE, ExportedModel, WorkerRequest, WorkerResult


def report_phase(name: str) -> None:
    """Tells the parent what happens now."""
    print(f"{PHASE}{name}", flush=True)  # noqa: T201  the parent reads this line


def export(request: WorkerRequest) -> WorkerResult:
    """Exports as the request says and checks what came out."""
    source, out = Path(request.path), Path(request.out)
    exported = _trace(request, source, out)
    gc.collect()
    # Not before: the trace is where memory peaks.
    from enginery.export import graphs
    from enginery.export.probe import probe_dims

    report_phase("checking the graphs")
    limits = FeedLimits.from_config(exported.config)
    records, precisions = [], []
    for path in (out / file for file in exported.files):
        model = graphs.name_dims(path, exported.fixed_dims)
        graphs.check_exported_graph(path, model)
        record = graphs.record_graph(path, out, model)
        precisions.append(graphs.float_precision(path, model))
        del model  # its weights and the probing session's would be in memory together
        if precisions[-1] == "bf16":
            notes = [f"{path.name} was not run: ONNX Runtime has no BF16 kernels on the CPU"]
        else:
            record, notes = probe_dims(path, record, limits)
        records.append(record)
        exported.notes.extend(notes)
    graphs.check_task_outputs(exported.task, records)
    return WorkerResult(
        task=exported.task,
        model_type=exported.model_type,
        library=exported.library,
        precision=precisions[0],
        graphs=[record.model_dump(mode="json") for record in records],
        notes=exported.notes,
        peak_rss_bytes=peak_rss_bytes(),
    )


def _trace(request: WorkerRequest, source: Path, out: Path) -> ExportedModel:
    if request.kind == "onnx":
        from enginery.export import onnx_file

        report_phase("importing the ONNX file")
        return onnx_file.import_onnx(source, request.config, out)
    report_phase("loading PyTorch and Optimum")
    if not request.config.trust_remote_code:
        # All files are here. With trust, the model's code may lie in another repository.
        os.environ["HF_HUB_OFFLINE"] = "1"
    _load_transformers()
    config = request.config
    exporter = _import_exporter(config.exporter)
    from enginery.runtime.torch import guarded

    gc.freeze()  # modules stay to the end: no collection need look through them again
    with guarded(source, trust_remote_code=config.trust_remote_code, writable=[out]):
        return exporter(source, config, out, report_phase, pickled=request.pickled)


def _import_exporter(name: str) -> Callable[..., ExportedModel]:
    if name == "dynamo":
        from enginery.export.dynamo import export_with_dynamo

        return export_with_dynamo
    from enginery.export.optimum import export_with_optimum

    return export_with_optimum


def _load_transformers() -> None:
    """Imports transformers as if scikit-learn were not installed.

    It wants it for assisted generation alone, and imports it for every model: 40 MB, 0.4 s.
    """
    sys.modules["sklearn"] = None  # type: ignore[assignment]  # what import_module documents
    with suppress(ImportError):  # the exporter that is asked for says what is missing
        import transformers  # noqa: F401
    del sys.modules["sklearn"]


def handle_request(request: dict[str, Any]) -> dict[str, Any]:
    """Runs one request, from JSON and to JSON."""
    return asdict(export(WorkerRequest(**{**request, "config": ExportConfig(**request["config"])})))


if __name__ == "__main__":
    # A hundred thousand objects come to stay while torch and transformers load; looking through
    # them after every 700 new ones takes a tenth of the time of loading.
    gc.set_threshold(20_000)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # it warns about forks, which nobody makes
    answer_parent(handle_request, what="exporting")
