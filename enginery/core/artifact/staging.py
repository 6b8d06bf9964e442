"""Write artifacts atomically: a directory appears complete or not at all.

>>> with staging(tmp_path / "out") as directory:
...     _ = (directory / "model.onnx").write_bytes(b"graph")
>>> [path.name for path in (tmp_path / "out").iterdir()]
['model.onnx']

How is in `core/scratch.py`; here is what may be overwritten.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from enginery.core.artifact.inputs import InputFiles
from enginery.core.errors import ArtifactError, os_errors_as
from enginery.core.json_file import load_json, parse_json, read_document
from enginery.core.paths import list_tree
from enginery.core.scratch import PREFIX, Scratch, make_directory, replace_synced

MANIFEST = "manifest.json"
CARD = "README.md"
"""The model card that `publish` adds to an artifact; not a file of the model."""
LISTING = "reports/publication.json"
"""The list of all files, with their hashes, that `publish` adds to an artifact."""


@contextmanager
def staging(out: Path, inputs: InputFiles | None = None) -> Iterator[Path]:
    """Yield an empty directory that is renamed to `out` at the end of the block.

    If the block raises, or the process is killed, nothing is left that looks finished. If `out` is
    a symbolic link, the directory that it points to is replaced and the link stays.

    Args:
        out: the final path.
        inputs: what the directory is made from; it must be the same at the end of the block.

    Raises:
        ArtifactError: `out` exists and is not an artifact (it is never overwritten then), or its
            parent cannot be written, or was removed meanwhile.
        InputError: an input was changed, replaced or removed while it was read.
    """
    inputs = inputs or InputFiles()
    with os_errors_as(ArtifactError, f"{out} cannot be written", do="Choose another --out."):
        check_overwritable(out)
        out = out.resolve()
        make_directory(out.parent)
        with Scratch.beside(out) as scratch:
            with _still_there(scratch.path), inputs.unchanged():
                yield scratch.path
            replace_synced(scratch.path, out)


@contextmanager
def _still_there(directory: Path) -> Iterator[None]:
    """Raise ArtifactError for an error of the block if somebody removed the directory meanwhile."""
    try:
        yield
    except Exception as error:
        if directory.is_dir():
            raise
        raise ArtifactError(
            f"{directory.parent} was removed while the command wrote to it.",
            do="Run it again, and keep --out and ENGINERY_HOME until it ends.",
        ) from error


def check_overwritable(out: Path) -> None:
    """Raise ArtifactError if `out` is not an artifact, or has files that do not belong to it."""
    if not out.exists():
        return
    if _is_manifest(out / MANIFEST):
        if untracked := _untracked_files(out):
            remainder = f" and {len(untracked) - 3} more" if len(untracked) > 3 else ""
            raise ArtifactError(
                f"{out} is an artifact with files that do not belong to it and would be lost: "
                f"{', '.join(untracked[:3])}{remainder}.",
                do="Move them elsewhere, or choose another --out.",
            )
        return
    if out.is_dir() and not any(out.iterdir()):
        return
    raise ArtifactError(
        f"{out} exists and is not an enginery artifact, so it is not overwritten.",
        do="Choose another --out, or remove it yourself.",
    )


def _is_manifest(manifest: Path) -> bool:
    """Return True for an artifact's manifest.json of any version; web apps have such a file too.

    Raises:
        OSError: there is a file that cannot be read.
    """
    try:
        document = parse_json(read_document(manifest))
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError, ValueError):
        return False
    if (
        not isinstance(document, dict)
        or not {"source", "graphs", "stages", "files"} <= document.keys()
    ):
        return False
    return isinstance(document["files"], dict)


def _untracked_files(artifact: Path) -> list[str]:
    """Return the files of an artifact that are neither in its manifest nor reports."""
    try:
        recorded = load_json(artifact / MANIFEST, error=ArtifactError)["files"]
    except (ArtifactError, KeyError):
        return []
    names = (path.relative_to(artifact) for path in list_tree(artifact) if path.is_file())
    return sorted(
        name.as_posix()
        for name in names
        if name.as_posix() not in recorded
        and name.as_posix() not in (MANIFEST, *_published_card(artifact))
        and name.parts[0] != "reports"
        and not name.name.startswith(PREFIX)
    )


def _published_card(artifact: Path) -> tuple[str, ...]:
    """Return (CARD,) if the README.md is the unchanged card that `publish` wrote, else ()."""
    try:
        listed = load_json(artifact / LISTING, error=ArtifactError)["files"]
        digest = hashlib.sha256(read_document(artifact / CARD)).hexdigest()
        return (CARD,) if listed[CARD]["sha256"] == digest else ()
    except (ArtifactError, OSError, KeyError, TypeError):
        return ()
