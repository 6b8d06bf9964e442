"""One built TensorRT engine on disk: its plan, its layers and its record (`engine.json`).

    engine = Engine.open(Path("minilm/engines/tensorrt-rtx-sm89-3f2a91c04be7d815"))
    engine.plan.name                  # 'model.plan'
    engine.record.fused_attentions    # 6
    len(engine.layers())              # 75

The directory may be in an artifact or in the store.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from pydantic import TypeAdapter, ValidationError

from enginery.core.artifact.engine_record import ENGINE_FILE, EngineRecord, LayerRecord
from enginery.core.artifact.fingerprint import Fingerprint, sha256_of
from enginery.core.errors import ArtifactError
from enginery.core.json_file import first_problem, read_document
from enginery.core.paths import resolve_inside

_REMEDY = "Do not use it. Build the artifact again; undamaged engines are taken from the store."
_LAYERS = TypeAdapter(list[LayerRecord])


@dataclass(frozen=True)
class Engine:
    """A verified engine on disk."""

    path: Path
    record: EngineRecord

    @classmethod
    def open(cls, path: Path, *, verify: bool = False) -> Engine:
        """Open an engine; check the sha256 of its plan and the number of its layers.

        Args:
            path: directory of the engine.
            verify: hash the plan again even if a cached hash is valid; see `sha256_of`.

        Raises:
            ArtifactError: the directory is not an engine, or one of its files is missing,
                truncated or altered.
        """
        path = Path(path)
        engine = cls(path, EngineRecord.read(path))
        record = engine.record
        for name in (record.plan, record.wrapper, record.layer_list):
            file = resolve_inside(path, name, what=f"the engine {path}")
            # Reading a named pipe would block, and a device may have no end.
            if file.exists() and not file.is_file():
                raise ArtifactError(f"{file} is not a regular file.", do=_REMEDY)
        _check_record(path, record)
        try:
            size_bytes = engine.plan.stat().st_size
            digest = sha256_of(engine.plan, trust_stat=not verify)
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
        if digest != record.plan_sha256:
            raise ArtifactError(
                f"{engine.plan} was altered: its sha256 is {digest[:12]}…, {ENGINE_FILE} says "
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
        """Path of the serialized engine."""
        return self.path / self.record.plan

    @property
    def fingerprint(self) -> Fingerprint:
        """Fingerprint of the build."""
        return Fingerprint(self.record.flavor, self.record.fields)

    def layers(self) -> list[LayerRecord]:
        """Read all layers in execution order.

        Raises:
            ArtifactError: the list is missing or invalid.
        """
        file = self.path / self.record.layer_list
        try:
            return _LAYERS.validate_json(read_document(file))
        except OSError as error:
            raise ArtifactError(f"{file} cannot be read: {error}.", do=_REMEDY) from error
        except ValidationError as error:
            raise ArtifactError(
                f"{file} is not a list of layers: {first_problem(error)}.", do=_REMEDY
            ) from error


def _check_record(path: Path, record: EngineRecord) -> None:
    """Raise ArtifactError if the record does not match the fields of its fingerprint."""
    stated = {
        "graph": record.graph_sha256,
        "capabilities": ",".join(record.capabilities) or "portable",
        "profiles": "; ".join(record.profiles) or "none",
    }
    altered = [name for name, value in stated.items() if record.fields.get(name, value) != value]
    if Fingerprint(record.flavor, record.fields).key != record.key:
        altered.append("key")
    if altered:
        raise ArtifactError(
            f"{path / ENGINE_FILE} was altered: its {altered[0]} is not what the engine was "
            "built from.",
            do=_REMEDY,
        )
