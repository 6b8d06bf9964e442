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
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from functools import cached_property
from importlib import metadata
from pathlib import Path
from typing import Any

from enginery.core.home import enginery_home


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
    return {name: value if isinstance(value, str) else json.dumps(value, sort_keys=True)
            for name, value in options.items()}  # fmt: skip


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
    stat = path.stat()
    identity = (
        str(path.resolve()), stat.st_size, stat.st_ino, stat.st_mtime_ns, stat.st_ctime_ns,
    )  # fmt: skip
    if trust_stat and (known := _remembered(identity)):
        return known
    with path.open("rb") as stream:
        digest = hashlib.file_digest(stream, "sha256").hexdigest()
    _remember(identity, digest)
    return digest


def combined_sha256(files: Mapping[str, str]) -> str:
    """One digest over names and digests, independent of order."""
    lines = "".join(f"{digest}  {name}\n" for name, digest in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


_Identity = tuple[str, int, int, int, int]


def _hashes() -> sqlite3.Connection:
    home = enginery_home()
    home.mkdir(parents=True, exist_ok=True)
    connection = sqlite3.connect(home / "hashes.sqlite", timeout=10)
    connection.execute(
        "create table if not exists hashes (path text primary key, size integer, inode integer, "
        "mtime_ns integer, ctime_ns integer, sha256 text)"
    )
    return connection


def _remembered(identity: _Identity) -> str | None:
    # The table only saves time: a broken or read-only one must not stop anybody.
    try:
        with closing(_hashes()) as connection:
            row = connection.execute(
                "select sha256 from hashes where path=? and size=? and inode=? "
                "and mtime_ns=? and ctime_ns=?",
                identity,
            ).fetchone()
    except (sqlite3.Error, OSError):
        return None
    return str(row[0]) if row else None


def _remember(identity: _Identity, digest: str) -> None:
    try:
        with closing(_hashes()) as connection, connection:
            connection.execute(
                "insert or replace into hashes values (?, ?, ?, ?, ?, ?)", (*identity, digest)
            )
    except (sqlite3.Error, OSError):
        return
