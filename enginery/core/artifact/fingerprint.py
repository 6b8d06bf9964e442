"""Fingerprints: the inputs of a finished artifact as named fields and one digest.

>>> fingerprint = Fingerprint("export", {"source": "9c1f", "opset": "20"})
>>> fingerprint.changes({"source": "9c1f", "opset": "17"})
['opset: 17 → 20']

Hashes of files are cached in `$ENGINERY_HOME/hashes.sqlite` by path, size, inode, mtime and ctime,
so that a large artifact is read only when it is opened for the first time.
"""

from __future__ import annotations

import hashlib
import json
import re
import sqlite3
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from enginery.core.artifact.inputs import (
    InputFiles,
    note_digest,
    note_input,
    note_listing,
    recorded_inputs,
)
from enginery.core.home import enginery_home
from enginery.core.json_file import require_regular_file
from enginery.core.onnxruntime_builds import installed_onnxruntimes
from enginery.core.options import key_parts, options_dict
from enginery.core.paths import list_tree

# The clock of file times ticks every 1 to 10 ms, so two quick edits may have equal times. Editing a
# file that is at least this old changes its times.
_SETTLED_NS = 20_000_000
_DIGEST = re.compile(r"\b([0-9a-f]{12})[0-9a-f]{52}\b")


@dataclass(frozen=True)
class Fingerprint:
    """The inputs of one run of a stage, by content."""

    stage: str
    fields: dict[str, str]
    inputs: InputFiles = field(default_factory=recorded_inputs, compare=False, repr=False)
    """The files that the fields were computed from, if they were recorded."""

    @cached_property
    def key(self) -> str:
        """sha256 of the stage and its fields, 64 hex digits."""
        canonical = json.dumps([self.stage, self.fields], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def changes(self, before: Mapping[str, str]) -> list[str]:
        """Return the fields that differ from an earlier run, as `name: before → now`."""
        names = list(dict.fromkeys([*before, *self.fields]))
        return [
            f"{name}: {_short(before.get(name, 'none'))} → {_short(self.fields.get(name, 'none'))}"
            for name in names
            if before.get(name) != self.fields.get(name)
        ]


def _short(value: str) -> str:
    """Shorten the digests in a value to their first 12 digits."""
    return _DIGEST.sub(r"\1", value)


def stage_fingerprint(
    stage: str,
    version: str,
    inputs: Mapping[str, str],
    options: Mapping[str, str],
    tools: Mapping[str, str],
) -> Fingerprint:
    """Return the fingerprint of a stage's run, its cache key.

    Args:
        stage: name of the stage.
        version: its `STAGE_VERSION`.
        inputs: what it starts from, by content, and what else decides its result.
        options: result of `option_fields`.
        tools: result of `stage_tools`.
    """
    fields = {**inputs, **options, **tools, "stage version": version}
    return Fingerprint(stage, fields)


def option_fields(options: Any, **contents: str) -> dict[str, str]:
    """Return the options of a stage as fields of its fingerprint.

    Each option counts as it says where it is declared: by its value, by the content of what it
    names, or not at all; see `core.options`.

    Args:
        options: the dataclass.
        contents: option -> content, for those that do not name a file or a folder of data, or of
            which the stage reads only a part.
    """
    parts = key_parts(options)
    if extra := [name for name in contents if parts.get(name) != "content"]:
        raise ValueError(f"{type(options).__name__} does not declare {extra} as by_content")
    fields: dict[str, str] = {}
    for name, value in options_dict(options).items():
        if parts[name] == "value":
            fields[name] = value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        elif parts[name] == "content":
            fields[name] = contents.get(name) or data_content(value)
    return fields


def data_content(name: str | Path, is_counted: Callable[[str], bool] = lambda _: True) -> str:
    """Return the kind and the digest of a data file or a folder; `none` for an empty name.

    The suffix of a file's name is its kind: it decides how the file is read. Of a folder, the files
    count whose path below it `is_counted` accepts.

    >>> _ = (tmp_path / "reviews.csv").write_text("text")
    >>> data_content(tmp_path / "reviews.csv")[:16]
    'csv 8542e4f98281'
    """
    if not name:
        return "none"
    path = Path(name).expanduser()
    kind = "folder" if path.is_dir() else path.suffix.lower().removeprefix(".") or "file"
    return f"{kind} {data_sha256(path, is_counted)}"


def tool_versions(packages: Iterable[str]) -> dict[str, str]:
    """Return the installed version of each distribution; `none` if it is not installed."""
    versions = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "none"
    return versions


def runtime_version() -> dict[str, str]:
    """Return name and version of each installed distribution of ONNX Runtime."""
    # The first one on the import path is the one that is imported, so it is written last.
    versions = {build.name: build.version for build in reversed(installed_onnxruntimes())}
    return versions or {"onnxruntime": "none"}


def stage_tools(packages: Iterable[str]) -> dict[str, str]:
    """Return the versions of what a stage works with: ONNX Runtime and these distributions.

    ONNX Runtime runs or loads what every stage writes, so that its version is in every key.
    """
    return {**runtime_version(), **tool_versions(packages)}


def sha256_of(path: Path, *, trust_stat: bool = True) -> str:
    """Return the sha256 of a file, 64 hex digits.

    With `trust_stat`, a cached hash is returned if path, size, inode, mtime and ctime are
    unchanged. Programs cannot set ctime, so every edit is noticed.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    require_regular_file(path)
    note_input(path)  # before its state counts as known
    name, stat = str(path.resolve()), _settled_stat(path)
    select = "select sha256 from file_hashes where path=? and stat=?"
    digest = _query_cache(select, name, stat) if trust_stat else None
    if digest is None:
        with path.open("rb") as stream:
            digest = hashlib.file_digest(stream, "sha256").hexdigest()
        _query_cache("insert or replace into file_hashes values (?, ?, ?)", name, stat, digest)
    note_digest(path, digest)
    return digest


def _settled_stat(path: Path) -> str:
    """Return size, inode, mtime and ctime, once the file is so old that an edit changes them."""
    age_ns = time.time_ns() - path.stat().st_ctime_ns
    if age_ns < _SETTLED_NS:
        time.sleep(min(_SETTLED_NS - age_ns, _SETTLED_NS) / 1e9)
    stat = path.stat()
    return f"{stat.st_size} {stat.st_ino} {stat.st_mtime_ns} {stat.st_ctime_ns}"


def data_sha256(data: Path, is_counted: Callable[[str], bool] = lambda _: True) -> str:
    """Return one digest of a data file, or of the names and contents of all files in a folder.

    Of a folder, the files count whose path below it `is_counted` accepts.
    """
    if not data.is_dir():
        return combined_sha256({".": sha256_of(data)} if data.is_file() else {})

    def list_names() -> list[str]:
        names = (str(path.relative_to(data)) for path in list_tree(data) if path.is_file())
        return sorted(filter(is_counted, names))

    note_listing(data, list_names)
    return combined_sha256({name: sha256_of(data / name) for name in list_names()})


def combined_sha256(files: Mapping[str, str]) -> str:
    """Return one digest of names and digests, independent of their order.

    It is the sha256 of the output of `sha256sum` for the files, sorted by name.
    """
    lines = []
    for name, digest in sorted(files.items()):
        # Else a name with a newline could look like two lines of the list.
        escaped = name.replace("\\", "\\\\").replace("\n", "\\n")
        lines.append(f"{digest}  {escaped}\n")
    return hashlib.sha256("".join(lines).encode()).hexdigest()


def _query_cache(statement: str, *values: str) -> str | None:
    """Run a statement on the table of cached hashes; return the hash that it finds, or None."""
    home = enginery_home()
    try:
        home.mkdir(parents=True, exist_ok=True)
        with closing(sqlite3.connect(home / "hashes.sqlite", timeout=10)) as connection, connection:
            # The stat is text: inodes go up to 2**64, SQLite's integers to 2**63.
            connection.execute(
                "create table if not exists file_hashes "
                "(path text primary key, stat text not null, sha256 text not null)"
            )
            row = connection.execute(statement, values).fetchone()
    except (sqlite3.Error, OSError, UnicodeError):
        return None  # the cache only saves time, so a damaged, locked or read-only one is ignored
    return str(row[0]) if row else None
