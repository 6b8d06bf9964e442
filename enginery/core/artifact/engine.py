"""One built engine on disk: its plan, the list of its layers, and what `engine.json` says of them.

Takes the directory of an engine, in an artifact or in the store:

    >>> engine = Engine.open(Path("minilm/engines/tensorrt-rtx-sm89-3f2a91c04be7d815"))
    >>> engine.plan.name, engine.record.fused_attentions, len(engine.layers())
    ('model.plan', 6, 75)
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from enginery.core.artifact.engine_record import ENGINE_FILE, EngineRecord, LayerRecord
from enginery.core.artifact.fingerprint import Fingerprint, sha256_of
from enginery.core.errors import ArtifactError
from enginery.core.json_file import read_document
from enginery.core.paths import resolve_inside

_REMEDY = "It cannot be trusted: make its artifact again; whole engines come from the store."
_LAYERS = TypeAdapter(list[LayerRecord])


@dataclass(frozen=True)
class Engine:
    """A whole engine on disk, its plan and its layers as its record says."""

    path: Path
    record: EngineRecord

    @classmethod
    def open(cls, path: Path, *, verify: bool = False) -> Engine:
        """Opens an engine and checks its plan by its sha256 and the number of its layers.

        A plan whose hash was computed earlier and whose size, inode and times are unchanged is
        not read again; `verify` reads it.

        Raises:
            ArtifactError: not an engine, or a file of it is missing, truncated or altered.
        """
        path = Path(path)
        engine = cls(path, EngineRecord.read(path))
        record = engine.record
        for name in (record.plan, record.wrapper, record.layer_list):
            file = resolve_inside(path, name, what=f"the engine {path}")
            if file.exists() and not file.is_file():
                raise ArtifactError(f"{file} is not a regular file.", do=_REMEDY)
        _check_record(path, record)
        try:
            size_bytes = engine.plan.stat().st_size
            found = sha256_of(engine.plan, trust_stat=not verify)
        except FileNotFoundError:
            raise ArtifactError(f"{engine.plan} is missing from the engine.", do=_REMEDY) from None
        except OSError as error:
            raise ArtifactError(f"{engine.plan} cannot be read: {error.strerror}.") from error
        if size_bytes != record.plan_size_bytes:
            raise ArtifactError(
                f"{engine.plan} has {size_bytes} bytes, {ENGINE_FILE} says "
                f"{record.plan_size_bytes}.",
                do=_REMEDY,
            )
        if found != record.plan_sha256:
            raise ArtifactError(
                f"{engine.plan} was altered: its sha256 is {found[:12]}…, {ENGINE_FILE} says "
                f"{record.plan_sha256[:12]}….",
                do=_REMEDY,
            )
        layers, expected = len(engine.layers()), sum(record.layers.values())
        if layers != expected:
            raise ArtifactError(
                f"{path / record.layer_list} lists {layers} layers, {ENGINE_FILE} counts "
                f"{expected}.",
                do=_REMEDY,
            )
        return engine

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def plan(self) -> Path:
        """The serialized engine."""
        return self.path / self.record.plan

    @property
    def fingerprint(self) -> Fingerprint:
        """What the engine was made from."""
        return Fingerprint(self.record.flavor, self.record.fields)

    def layers(self) -> list[LayerRecord]:
        """Read every layer in the order that they run.

        Raises:
            ArtifactError: the list is missing, or is no list of layers.
        """
        file = self.path / self.record.layer_list
        try:
            return _LAYERS.validate_json(read_document(file))
        except OSError as error:
            raise ArtifactError(f"{file} cannot be read: {error}.", do=_REMEDY) from error
        except ValidationError as error:
            first = error.errors()[0]
            where = ".".join(str(part) for part in first["loc"]) or "the document"
            raise ArtifactError(
                f"{file} is no list of layers: {where}: {first['msg']}.", do=_REMEDY
            ) from error


def _check_record(path: Path, record: EngineRecord) -> None:
    """What the record says of the engine must be what its key was made from."""
    said = {
        "graph": record.graph_sha256,
        "capabilities": ",".join(record.capabilities) or "portable",
        "profiles": "; ".join(record.profiles) or "none",
    }
    altered = [name for name, value in said.items() if record.fields.get(name, value) != value]
    if Fingerprint(record.flavor, record.fields).key != record.key:
        altered.append("key")
    if altered:
        raise ArtifactError(
            f"{path / ENGINE_FILE} was altered: its {altered[0]} is not what the engine was "
            "built from.",
            do=_REMEDY,
        )
