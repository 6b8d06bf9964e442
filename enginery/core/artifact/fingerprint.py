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
import sqlite3
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from enginery.core.home import enginery_home
from enginery.core.json_file import require_regular_file
from enginery.core.paths import list_tree

# The clock of file times ticks every 1 to 10 ms, so two quick edits may have equal times. Editing a
# file that is at least this old changes its times.
_SETTLED_NS = 20_000_000


@dataclass(frozen=True)
class Fingerprint:
    """The inputs of one run of a stage, by content."""

    stage: str
    fields: dict[str, str]

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
    """Shorten a digest to its first 12 digits; return other values unchanged."""
    is_digest = len(value) == 64 and all(c in "0123456789abcdef" for c in value)
    return value[:12] if is_digest else value


def option_fields(options: Mapping[str, Any]) -> dict[str, str]:
    """Return options as fields of a fingerprint."""
    return {
        name: value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        for name, value in options.items()
    }


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
    """Return name and version of the installed ONNX Runtime distribution."""
    found = tool_versions(["onnxruntime-gpu", "onnxruntime"])
    return {name: version for name, version in found.items() if version != "none"} or {
        "onnxruntime": "none"
    }


def sha256_of(path: Path, *, trust_stat: bool = True) -> str:
    """Return the sha256 of a file, 64 hex digits.

    With `trust_stat`, a cached hash is returned if path, size, inode, mtime and ctime are
    unchanged. Programs cannot set ctime, so every edit is noticed.

    Raises:
        OSError: the file cannot be read, or is not a regular file.
    """
    require_regular_file(path)
    name, stat = str(path.resolve()), _settled_stat(path)
    select = "select sha256 from file_hashes where path=? and stat=?"
    if trust_stat and (known := _query_cache(select, name, stat)):
        return known
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    _query_cache("insert or replace into file_hashes values (?, ?, ?)", name, stat, digest)
    return digest


def _settled_stat(path: Path) -> str:
    """Return size, inode, mtime and ctime, once the file is so old that an edit changes them."""
    age_ns = time.time_ns() - path.stat().st_ctime_ns
    if age_ns < _SETTLED_NS:
        time.sleep(min(_SETTLED_NS - age_ns, _SETTLED_NS) / 1e9)
    stat = path.stat()
    return f"{stat.st_size} {stat.st_ino} {stat.st_mtime_ns} {stat.st_ctime_ns}"


def data_sha256(data: Path) -> str:
    """Return one digest of a data file, or of the names and contents of all files in a folder."""
    files = sorted(path for path in list_tree(data) if path.is_file()) if data.is_dir() else [data]
    return combined_sha256(
        {str(path.relative_to(data)): sha256_of(path) for path in files if path.is_file()}
    )


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
