"""Lay out artifacts of one model as the readers of the Hugging Face Hub expect them.

>>> made = arrange([artifact], tmp_path / "minilm")
>>> made.manifest.graphs[0].file, variant_name(made.manifest)
('onnx/model.onnx', 'fp32')

The folder is an artifact: its manifest is that of the FP32 artifact, or else of the first one. The
manifests and reports of the others, its variants, are in folders of `reports/`:

    config.json  tokenizer.json  …      the same for all
    manifest.json                       lists all files
    onnx/model.onnx                     FP32
    onnx/model_fp16.onnx                FP16
    onnx/model_fp16.onnx_data           external data
    reports/validation.json             of FP32
    reports/fp16/manifest.json          of FP16: lists the files of this variant
    reports/fp16/validation.json
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path, PurePosixPath

from enginery.core.artifact.artifact import (
    GRAPHS,
    MANIFEST,
    REPORTS,
    Artifact,
    commit_artifact,
    copy_file,
)
from enginery.core.artifact.external_data import (
    external_data_files,
    load_graph,
    rename_external_data,
)
from enginery.core.artifact.fingerprint import Fingerprint, sha256_of
from enginery.core.artifact.manifest import FileRecord, GraphRecord, Manifest, Verdict
from enginery.core.errors import ArtifactError, OptionError, nearest
from enginery.core.json_file import load_json
from enginery.core.paths import is_portable_name, list_tree
from enginery.core.scratch import temporary_directory

_FP32 = "fp32"
_CONFIG = "config.json"


def variant_name(manifest: Manifest) -> str:
    """Return the name of an artifact among those of its model, such as `fp32` or `quantized`.

    transformers.js loads `model_NAME.onnx` for the dtypes `fp16` and `int8`, and
    `model_quantized.onnx` for `q8`, its default in a browser. That has to run on a CPU, so it is
    dynamic INT8. It has no dtype for Q/DQ nodes between FP16 tensors, which are for TensorRT.
    """
    if manifest.precision == "int8":
        if manifest.target == "cpu":
            return "quantized"
        return "int8" if manifest.residual == _FP32 else "q8f16"
    if manifest.precision == _FP32 and manifest.target in ("cuda", "cpu"):  # fused by Optimum
        options = {
            name: value for stage in manifest.stages for name, value in stage.options.items()
        }
        # As sentence-transformers calls the graphs of Optimum's levels.
        return str(options.get("level", manifest.target))
    return manifest.precision


def arrange(artifacts: Sequence[Artifact], out: Path) -> Artifact:
    """Write the artifacts of one model into a new directory, without their engines.

    A verdict on an artifact's content becomes one on its files here: they are the same, apart from
    their names.

    Args:
        artifacts: artifacts of the same source, each of another precision.
        out: the directory, which must not exist.

    Raises:
        ArtifactError: the artifacts are of different models, two have the same precision, a file
            is missing or was changed.
    """
    opened = _by_name([Artifact.open(artifact.path, verify=True) for artifact in artifacts])
    root_name = _FP32 if _FP32 in opened else next(iter(opened))
    root = opened[root_name]
    out.mkdir(parents=True)
    root.copy_side_files(out)
    graphs = {
        name: _move_graphs(artifact, out, folder=f"{GRAPHS}/", added=_suffix(name))
        for name, artifact in opened.items()
    }
    _declare_external_data(out, [record for records in graphs.values() for record in records])
    files = _records(out)
    graph_files = {n for records in graphs.values() for r in records for n in _files(r)}
    for name, artifact in opened.items():
        folder = "" if name == root_name else f"{name}/"
        # Other processes may write reports meanwhile.
        with temporary_directory("reports") as kept:
            current = artifact.copy_reports(kept)
            for report in current.manifest.reports:
                copy_file(kept / report, out / _report_path(report, folder))
        if not folder:
            root = current
            continue
        variant_graphs = {n for record in graphs[name] for n in _files(record)}
        variant_files = {
            n: r for n, r in files.items() if n in variant_graphs or n not in graph_files
        }
        manifest = _moved(current, graphs[name], variant_files)
        (out / REPORTS / name).mkdir(parents=True, exist_ok=True)
        (out / REPORTS / name / MANIFEST).write_bytes(manifest.to_bytes())
    commit_artifact(out, _moved(root, graphs[root_name], files))
    return Artifact.open(out)


def read_variants(artifact: Artifact) -> dict[str, Artifact]:
    """Return the artifacts of other precisions in an artifact's folder by name; most have none.

    Raises:
        ArtifactError: a manifest is damaged, or lists files that are not the artifact's.
    """
    variants = {}
    for report in sorted(artifact.manifest.reports):
        parts = PurePosixPath(report).parts
        if len(parts) != 3 or parts[-1] != MANIFEST:
            continue
        try:
            manifest = Manifest.from_bytes((artifact.path / report).read_bytes())
        except (OSError, ValueError) as error:
            raise ArtifactError(f"{artifact.path / report} is damaged: {error}") from error
        graphs = {name for graph in manifest.graphs for name in _files(graph)}
        reports = {
            _report_path(name, f"{parts[1]}/"): file for name, file in manifest.reports.items()
        }
        is_listed = (
            artifact.manifest.files.items() >= manifest.files.items()
            and artifact.manifest.reports.items() >= reports.items()
        )
        if not graphs or not graphs <= manifest.files.keys() or not is_listed:
            raise ArtifactError(
                f"{artifact.path / report} lists files that {artifact.path / MANIFEST} does not.",
                do="It cannot be trusted: publish the model again.",
            )
        variants[parts[1]] = Artifact(artifact.path, manifest)
    return variants


def extract_variant(artifact: Artifact, name: str, out: Path) -> None:
    """Write one of the artifacts that `arrange` has put together, with its graphs in the root.

    Args:
        artifact: what `arrange` made.
        name: `fp32`, `fp16`, …; see `variant_name`.
        out: directory of the artifact, which must not exist.

    Raises:
        OptionError: there is no such variant.
    """
    own_name, others = variant_name(artifact.manifest), read_variants(artifact)
    names = [own_name, *others]
    if name not in names:
        raise OptionError(
            f"there is no variant '{name}'{nearest(name, names)}", do=f"It has {', '.join(names)}."
        )
    chosen = others.get(name, artifact)
    out.mkdir()
    chosen.copy_side_files(out)
    graphs = _move_graphs(chosen, out, removed=_suffix(name))
    manifest = _moved(chosen, graphs, _records(out))
    folder = f"{name}/" if name in others else ""
    inside = tuple(f"{REPORTS}/{other}/" for other in others)
    for report in chosen.manifest.reports:
        if folder or not report.startswith(inside):
            copy_file(artifact.path / _report_path(report, folder), out / report)
    commit_artifact(out, manifest)


def _by_name(artifacts: Sequence[Artifact]) -> dict[str, Artifact]:
    """Return the artifacts by `variant_name`; raise ArtifactError if they do not go together."""
    first, by_name = artifacts[0], dict[str, Artifact]()
    shared = _shared_facts(first)
    for artifact in artifacts:
        if read_variants(artifact):
            raise ArtifactError(
                f"{artifact.path} has several precisions already.",
                do="Publish it as it is, without --layout, or pull each with --variant.",
            )
        facts = _shared_facts(artifact)
        names = [n for n in {**shared, **facts} if shared.get(n) != facts.get(n)]
        if names:
            raise ArtifactError(
                f"{first.path} and {artifact.path} are not of one model: they differ in "
                f"{names[0]}.",
                do="Publish artifacts of one export together, and others by themselves.",
            )
        name = variant_name(artifact.manifest)
        if not is_portable_name(name):
            raise ArtifactError(
                f"{artifact.path / MANIFEST}: unknown precision or level {name!r}; expected "
                "fp32, fp16, bf16, int8, fp8, or a level such as O2.",
                do="Make the artifact again.",
            )
        if name in by_name:
            raise ArtifactError(
                f"{by_name[name].path} and {artifact.path} would both be "
                f"{GRAPHS}/model{_suffix(name)}.onnx.",
                do="Publish one of them.",
            )
        by_name[name] = artifact
    return by_name


def _shared_facts(artifact: Artifact) -> dict[str, object]:
    """Return what all artifacts of a folder share by name, tokenizer and configuration included."""
    source = artifact.manifest.source
    named = {f"the source's {name}": getattr(source, name) for name in ("id", "revision", "sha256")}
    return {**named, "the task": artifact.manifest.task, **artifact.side_files()}


def _suffix(name: str) -> str:
    return "" if name == _FP32 else f"_{name}"


def _files(record: GraphRecord) -> tuple[str, ...]:
    return record.file, *record.data_files


def _report_path(report: str, folder: str) -> str:
    """Return where a report is in the layout: in the folder of its variant."""
    return f"{REPORTS}/{folder}{report.removeprefix(f'{REPORTS}/')}"


def _records(directory: Path) -> dict[str, FileRecord]:
    return {
        path.relative_to(directory).as_posix(): FileRecord(
            sha256=sha256_of(path), size_bytes=path.stat().st_size
        )
        for path in sorted(list_tree(directory))
        if path.is_file()
    }


def _move_graphs(
    artifact: Artifact,
    out: Path,
    *,
    folder: str = "",
    removed: str = "",
    added: str = "",
) -> tuple[GraphRecord, ...]:
    """Write an artifact's graphs with their external data under other names.

    Args:
        artifact: the artifact.
        out: directory of the new artifact.
        folder: folder of the graphs, with a slash at the end.
        removed: end of each graph's name that is left out.
        added: what is added to each graph's name.
    """
    records = []
    moved_data: dict[str, str] = {}
    for record in artifact.manifest.graphs:
        stem = PurePosixPath(record.file).stem.removesuffix(removed)
        file = f"{folder}{stem}{added}.onnx"
        # The names that transformers.js looks for.
        for index, old in enumerate(record.data_files):
            if old not in moved_data:  # two graphs may share their weights
                moved_data[old] = f"{file}_data{f'_{index}' if index else ''}"
                copy_file(artifact.path / old, out / moved_data[old])
        data = [moved_data[old] for old in record.data_files]
        moved = record.model_copy(update={"file": file, "data_files": tuple(data)})
        if record.data_files:
            _rewrite(artifact, record, moved, out)
        else:
            # A link that is removed again would look like a change to whoever reads the graph.
            copy_file(artifact.path / record.file, out / file)
        records.append(moved)
    return tuple(records)


def _rewrite(artifact: Artifact, before: GraphRecord, after: GraphRecord, out: Path) -> None:
    """Write a graph that names its external data anew."""
    model = load_graph(artifact.path / before.file)
    here = PurePosixPath(before.file).parent
    used = {
        str(here / name): name for name in external_data_files(artifact.path / before.file, model)
    }
    if used.keys() != set(before.data_files):
        raise ArtifactError(
            f"{artifact.path / before.file} has the external data {', '.join(used) or 'none'}, but "
            f"{MANIFEST} lists {', '.join(before.data_files) or 'none'}.",
            do="Make the artifact again.",
        )
    moved = zip(before.data_files, after.data_files, strict=True)
    rename_external_data(model, {used[old]: PurePosixPath(new).name for old, new in moved})
    (out / after.file).parent.mkdir(exist_ok=True)
    # External data are not loaded, so this writes the graph only.
    (out / after.file).write_bytes(model.SerializeToString())


def _declare_external_data(out: Path, graphs: Sequence[GraphRecord]) -> None:
    """List the graphs with external data in config.json: transformers.js reads it from there."""
    chunks = {PurePosixPath(r.file).name: len(r.data_files) for r in graphs if r.data_files}
    if not chunks or not (out / _CONFIG).is_file():
        return
    config = load_json(out / _CONFIG, error=ArtifactError)
    settings = {**config.get("transformers.js_config", {}), "use_external_data_format": chunks}
    config["transformers.js_config"] = settings
    (out / _CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def _moved(
    artifact: Artifact, graphs: tuple[GraphRecord, ...], files: dict[str, FileRecord]
) -> Manifest:
    """Return the manifest of an artifact whose files were moved, with verdicts on the new ones."""
    manifest = artifact.manifest.model_copy(update={"graphs": graphs, "files": files})
    before, after = artifact.content_sha256(), Artifact(artifact.path, manifest).content_sha256()

    def moved(verdict: Verdict) -> Verdict:
        if verdict.fields.get("artifact") != before:
            return verdict
        fields = {**verdict.fields, "artifact": after}
        key = Fingerprint(verdict.stage, fields).key
        return verdict.model_copy(update={"fields": fields, "key": key})

    return manifest.model_copy(update={"verdicts": tuple(map(moved, manifest.verdicts))})
