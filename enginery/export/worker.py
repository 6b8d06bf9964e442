"""The child process of the export stage.

It reads a request file, writes graphs and side files to the staging directory, and writes a result
file.

    $ python -m enginery.export.worker request.json result.json
"""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from enginery.core.errors import ExportError
from enginery.core.subprocess import peak_rss_bytes, report_phase, worker_main
from enginery.core.trust.confinement import stay_offline
from enginery.core.versions import (
    OPTIMUM,
    TRANSFORMERS5,
    installed_version,
    transformers_family,
)
from enginery.export.config import ExportConfig
from enginery.export.stage import WorkerRequest, WorkerResult

if TYPE_CHECKING:
    from enginery.export.graphs import ExportedModel


def handle_request(values: dict[str, Any]) -> dict[str, Any]:
    """Export a model, then check the graphs and correct their dims.

    Takes the fields of a `WorkerRequest` and returns those of a `WorkerResult`, as JSON data.
    """
    from enginery.export.graphs import finish_graphs

    request = WorkerRequest(**{**values, "config": ExportConfig(**values["config"])})
    out = Path(request.out)
    exported = _trace(request, out)
    gc.collect()
    report_phase("checking the graphs")
    records, precision = finish_graphs(exported, out)
    opset = request.config.opset
    if request.kind == "onnx" and isinstance(opset, int) and opset > records[0].opset:
        from enginery.export.onnx_file import convert_import

        report_phase(f"converting from opset {records[0].opset} to {opset}")
        records = [convert_import(exported, out, records[0], opset)]
    result = WorkerResult(
        task=exported.task,
        model_type=exported.model_type,
        library=exported.library,
        precision=precision,
        graphs=[record.model_dump(mode="json") for record in records],
        notes=exported.notes,
        exporter=exported.exporter or request.config.exporter,
        length_limit=exported.length_limit,
        peak_rss_bytes=peak_rss_bytes(),
    )
    return asdict(result)


def _trace(request: WorkerRequest, out: Path) -> ExportedModel:
    """Write the graphs and the files beside them to `out`."""
    source, config = Path(request.path), request.config
    if request.kind == "onnx":
        from enginery.export import onnx_file

        report_phase("importing the ONNX file")
        return onnx_file.import_onnx(source, config, out)
    has_optimum = transformers_family() == OPTIMUM
    report_phase(f"loading PyTorch and {'Optimum' if has_optimum else 'transformers'}")
    if not config.trust_remote_code:
        # All files are local. Trusted code may be in another repository, which needs the Hub.
        stay_offline()
    exporters = _import_exporters(config)
    from enginery.runtime.pytorch.runner import guarded

    gc.freeze()  # modules are never freed, so later collections need not scan them
    vocoder = Path(request.vocoder) if request.vocoder else None
    read = [source, vocoder] if vocoder else [source]
    with guarded(*read, trust_remote_code=config.trust_remote_code, writable=[out]):
        name, reason = _choose_exporter(source, config, exporters)
        options = {"vocoder": vocoder} if name == "optimum" else {}
        exported = exporters[name](source, config, out, pickled=request.pickled, **options)
    exported.exporter = name
    if reason:
        exported.notes.append(f"exporter {name}: {reason}")
    return exported


def _import_exporters(config: ExportConfig) -> dict[str, Callable[..., ExportedModel]]:
    """Import the exporters that the options allow here, the preferred one first.

    transformers is imported as if scikit-learn were not installed: it needs that only for assisted
    generation but imports it for every model, which takes 40 MB and 0.4 s.

    Raises:
        ExportError: this environment does not have the exporter.
    """
    family, version = transformers_family(), installed_version("transformers")
    if config.exporter == "optimum" and family == TRANSFORMERS5:
        raise ExportError(
            f"Optimum needs transformers below 5, found {version}.",
            do="Leave --exporter out, or use an environment with enginery[export].",
            option="exporter",
        )
    if config.exporter == "transformers" and family != TRANSFORMERS5:
        raise ExportError(
            f"transformers has an exporter since version 5, found {version}.",
            do="Leave --exporter out, or use an environment with enginery[transformers5].",
            option="exporter",
        )
    sys.modules["sklearn"] = None  # type: ignore[assignment]  # what import_module documents
    try:
        import transformers  # noqa: F401
    finally:
        del sys.modules["sklearn"]
    from enginery.export.native.export import export_with_transformers

    exporters: dict[str, Callable[..., ExportedModel]] = {}
    if config.exporter == "optimum" or (config.exporter == "auto" and family == OPTIMUM):
        from enginery.export.optimum import export_with_optimum

        exporters["optimum"] = export_with_optimum
    if family == TRANSFORMERS5:
        exporters["transformers"] = export_with_transformers
    exporters["dynamo"] = export_with_transformers
    return exporters


def _choose_exporter(
    source: Path, config: ExportConfig, exporters: Iterable[str]
) -> tuple[str, str]:
    """Return the exporter that the options name or `auto` stands for, and why."""
    if config.exporter != "auto":
        return config.exporter, ""
    preferred = next(iter(exporters))
    if preferred != "optimum":
        return preferred, "the environment that exports has no Optimum"
    if (config.dtype, config.device) == ("bf16", "cpu"):
        return "dynamo", "Optimum runs the graph while it exports, which BF16 on the CPU does not"
    from enginery.export.optimum import obstacle_of_type

    if reason := obstacle_of_type(source, config):
        return "dynamo", reason
    return preferred, ""


if __name__ == "__main__":
    # Loading torch and transformers creates a hundred thousand lasting objects. To collect garbage
    # after every 700 new ones would take a tenth of the loading time.
    gc.set_threshold(20_000)
    os.environ["TOKENIZERS_PARALLELISM"] = "false"  # else tokenizers warns about forks
    worker_main(handle_request, description="exporting")
