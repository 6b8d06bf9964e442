"""What a finished artifact depends on, as named fields and one digest.

    >>> fingerprint = Fingerprint("export", {"source": "9c1f…", "opset": "20"})
    >>> fingerprint.changes({"source": "9c1f…", "opset": "17"})
    ['opset: 17 → 20']

File hashes are remembered by path, size, inode and both times in `$ENGINERY_HOME/hashes.sqlite`,
so that opening a large artifact twice reads it once.
"""

from __future__ import annotations

import hashlib
import json
import sqlite3
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from enginery.core.home import enginery_home
from enginery.core.json_file import require_regular_file

# Kernels stamp files with a clock that ticks every 1 to 10 ms: an edit right after another one can
# leave all times as they were. A file this old can only be edited into a later tick.
_SETTLED_NS = 20_000_000


@dataclass(frozen=True)
class Fingerprint:
    """The inputs of one stage's run, by content."""

    stage: str
    fields: dict[str, str]

    @cached_property
    def key(self) -> str:
        """sha256 over the stage and its fields, 64 hex digits."""
        canonical = json.dumps([self.stage, self.fields], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(canonical.encode()).hexdigest()

    def changes(self, before: Mapping[str, str]) -> list[str]:
        """Which fields differ from an earlier run's, as `name: before → now`."""
        names = list(dict.fromkeys([*before, *self.fields]))
        return [
            f"{name}: {_short(before.get(name, 'none'))} → {_short(self.fields.get(name, 'none'))}"
            for name in names
            if before.get(name) != self.fields.get(name)
        ]


def _short(value: str) -> str:
    """Digests by their first 12 digits, as git shows them."""
    is_digest = len(value) == 64 and all(c in "0123456789abcdef" for c in value)
    return value[:12] if is_digest else value


def option_fields(options: Mapping[str, Any]) -> dict[str, str]:
    """Options as fingerprint fields."""
    return {
        name: value if isinstance(value, str) else json.dumps(value, sort_keys=True)
        for name, value in options.items()
    }


def tool_versions(packages: Iterable[str]) -> dict[str, str]:
    """Installed versions by distribution name; `none` where a package is absent."""
    versions = {}
    for package in packages:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "none"
    return versions


def runtime_version() -> dict[str, str]:
    """The ONNX Runtime distribution that is installed, by its own name."""
    found = tool_versions(["onnxruntime-gpu", "onnxruntime"])
    return {name: version for name, version in found.items() if version != "none"} or {
        "onnxruntime": "none"
    }


def sha256_of(path: Path, *, trust_stat: bool = True) -> str:
    """sha256 of a file, 64 hex digits.

    With `trust_stat`, a hash computed earlier is taken again while the file's path, size, inode,
    mtime and ctime are all unchanged; ctime cannot be set by hand, so an edit is always seen.
    """
    require_regular_file(path)
    name, stat = str(path.resolve()), _settled_stat(path)
    if trust_stat and (known := _remembered(name, stat)):
        return known
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    _remember(name, stat, digest)
    return digest


def _settled_stat(path: Path) -> str:
    """Size, inode, mtime and ctime of a file; an edit from here on changes them."""
    age_ns = time.time_ns() - path.stat().st_ctime_ns
    if age_ns < _SETTLED_NS:
        time.sleep(min(_SETTLED_NS - age_ns, _SETTLED_NS) / 1e9)
    stat = path.stat()
    return f"{stat.st_size} {stat.st_ino} {stat.st_mtime_ns} {stat.st_ctime_ns}"


def data_sha256(data: Path) -> str:
    """Over the names and contents of a data file, or of everything in a folder."""
    files = sorted(path for path in data.rglob("*") if path.is_file()) if data.is_dir() else [data]
    return combined_sha256(
        {str(path.relative_to(data)): sha256_of(path) for path in files if path.is_file()}
    )


def combined_sha256(files: Mapping[str, str]) -> str:
    """One digest over names and digests, independent of order.

    It is the sha256 of what `sha256sum` lists for the files, sorted by name.
    """
    lines = "".join(f"{digest}  {_one_line(name)}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def _one_line(name: str) -> str:
    """A file name that cannot pass for two lines of the listing."""
    return name.replace("\\", "\\\\").replace("\n", "\\n")


# The table only saves time: a broken, locked or read-only one must not stop anybody.
_NO_TABLE = (sqlite3.Error, OSError, UnicodeError)


@contextmanager
def _hashes() -> Iterator[sqlite3.Connection]:
    home = enginery_home()
    home.mkdir(parents=True, exist_ok=True)
    with closing(sqlite3.connect(home / "hashes.sqlite", timeout=10)) as connection, connection:
        # The stat is text: inodes go up to 2**64, SQLite's integers to 2**63.
        connection.execute(
            "create table if not exists file_hashes "
            "(path text primary key, stat text not null, sha256 text not null)"
        )
        yield connection


def _remembered(path: str, stat: str) -> str | None:
    try:
        with _hashes() as connection:
            row = connection.execute(
                "select sha256 from file_hashes where path=? and stat=?", (path, stat)
            ).fetchone()
    except _NO_TABLE:
        return None
    return str(row[0]) if row else None


def _remember(path: str, stat: str, digest: str) -> None:
    try:
        with _hashes() as connection:
            connection.execute(
                "insert or replace into file_hashes values (?, ?, ?)", (path, stat, digest)
            )
    except _NO_TABLE:
        return
