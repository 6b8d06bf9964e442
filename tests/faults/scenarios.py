"""The operations that faults strike: each starts from a small tree of files and leaves another.

    scenario.prepare(root)     # the files before
    scenario.run(root)         # the operation, as a person runs it
    scenario.results(root)     # name -> digest of each result; "" for one that is not there

`results` opens everything that can be opened, verifies it, and raises AssertionError for a result
that opens but is neither the earlier nor the new one.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from enginery import build_engine, export_model, optimize_model, validate_model
from enginery.core.artifact.artifact import Artifact, commit_artifact, staging
from enginery.core.artifact.engine import Engine
from enginery.core.artifact.engine_record import engine_directories
from enginery.core.artifact.fingerprint import Fingerprint
from enginery.core.artifact.manifest import GraphRecord
from enginery.core.errors import ArtifactError
from enginery.core.shapes import TensorSpec
from enginery.core.store.store import ARTIFACTS, ENGINES, Store
from enginery.optimize.config import OptimizeConfig
from enginery.predict import stage as predict
from enginery.predict.config import PredictConfig
from enginery.predict.journal import Journal, remove_leftovers
from enginery.predict.report import sidecar
from enginery.publish.config import PublishConfig
from enginery.publish.stage import pull
from enginery.publish.stage import run as publish
from enginery.publish.targets.folder import read_latest, read_versions
from enginery.reports.validation import ValidationReport
from enginery.runtime.pytorch import reference as torch_reference
from enginery.stages import run_cached
from tests.core.artifacts import FINGERPRINT, make, manifest, publishable, validated, verdict
from tests.export.test_onnx_file import linear

OTHER = Fingerprint("export", {"model": "org/name", "opset": "17"})


class Scenario:
    """An operation, its files before, and its results."""

    name = ""
    """Distinguishes the scenarios in the names of tests."""
    step = 1
    """The quick suite cuts the power after every `4 * step`-th change."""

    def prepare(self, root: Path) -> None:
        """Write the files that the operation starts from."""
        raise NotImplementedError

    def run(self, root: Path) -> None:
        """Run the operation."""
        raise NotImplementedError

    def results(self, root: Path) -> dict[str, str]:
        """Return the digest of each result; empty for one that does not open."""
        raise NotImplementedError


class Optimize(Scenario):
    """`enginery optimize` into the store and to a new --out."""

    name, step = "optimize", 40

    def prepare(self, root: Path) -> None:
        linear_artifact(root / "source")

    def run(self, root: Path) -> None:
        config = OptimizeConfig(target="tensorrt", precision="fp16")
        run_cached(Artifact.open(root / "source"), config, out=root / "build" / "out")

    def results(self, root: Path) -> dict[str, str]:
        return {"out": opened(root / "build" / "out"), **stored()}


class OptimizeAgain(Optimize):
    """`enginery optimize` to an --out that has another artifact."""

    name, step = "optimize over another artifact", 50

    def prepare(self, root: Path) -> None:
        super().prepare(root)
        make(root / "build" / "out")


class Obtain(Scenario):
    """An entry of the store is made."""

    name, step = "store", 4

    def prepare(self, root: Path) -> None:
        obtain(OTHER)

    def run(self, root: Path) -> None:
        obtain(FINGERPRINT)

    def results(self, root: Path) -> dict[str, str]:
        return stored()


class Repair(Obtain):
    """An entry of the store is damaged, and made again."""

    name, step = "store with a damaged entry", 5

    def prepare(self, root: Path) -> None:
        path = obtain(FINGERPRINT)
        (path / "model.onnx").write_bytes(b"grape")


class Replace(Obtain):
    """An entry of the store is made again with --force, and gets other content."""

    name, step = "store with --force", 4

    def prepare(self, root: Path) -> None:
        obtain(FINGERPRINT)

    def run(self, root: Path) -> None:
        def build(out: Path) -> Artifact:
            return make(out, graph=b"newer", fingerprint=FINGERPRINT)

        Store().obtain(ARTIFACTS, FINGERPRINT, "m", build, force=True)


class Annotate(Scenario):
    """A verdict and its report are added to an artifact."""

    name, step = "annotate", 3

    def prepare(self, root: Path) -> None:
        validated(make(root / "artifact"), report=b'{"old": 1}')

    def run(self, root: Path) -> None:
        artifact = Artifact.open(root / "artifact")
        artifact.annotate(verdict(artifact, summary="new"), b'{"new": 1}')

    def results(self, root: Path) -> dict[str, str]:
        try:
            artifact = Artifact.open(root / "artifact", verify=True)
        except ArtifactError:
            return {"verdict": ""}
        report = artifact.report("validate.json")
        kept = artifact.manifest.verdict("validate")
        assert kept
        # A killed run may lose the report, which the stage writes again, but no verdict.
        if report is not None and "new" in report.read_text():
            assert kept.summary == "new"
        return {"verdict": kept.summary}


class Predict(Scenario):
    """`enginery predict` to a new file."""

    name, step = "predict", 15
    suffix = ".jsonl"

    def __init__(self, model: Path) -> None:
        self.model = model

    def prepare(self, root: Path) -> None:
        lines = [f"{n},the pump {n} is warm\n" for n in range(24)]
        (root / "in.csv").write_text("id,text\n" + "".join(lines))

    def run(self, root: Path, **options: int) -> None:
        config = PredictConfig(**{"window": 8, "part_rows": 8, "workers": 1, **options})
        predict.run(Artifact.open(self.model), str(root / "in.csv"), self.output(root), config)

    def output(self, root: Path) -> Path:
        return root / "made" / f"out{self.suffix}"

    def results(self, root: Path) -> dict[str, str]:
        output = self.output(root)
        if not output.exists():
            return {"output": ""}
        found = digest(output)
        if sidecar(output).exists():
            assert json.loads(sidecar(output).read_bytes())["sha256"] == found
        return {"output": found}


class PredictParquet(Predict):
    """`enginery predict` to a Parquet file."""

    name, step = "predict to Parquet", 20
    suffix = ".parquet"


class Resume(Predict):
    """`enginery predict` continues after two finished parts."""

    name, step = "resumed predict", 15

    def prepare(self, root: Path) -> None:
        super().prepare(root)
        write = Journal._write_part

        def ending(journal: Journal, number: int, *others: Any) -> Any:
            if number == 2:
                raise KeyboardInterrupt
            return write(journal, number, *others)

        Journal._write_part = ending
        try:
            self.run(root)
        except KeyboardInterrupt:
            pass
        finally:
            Journal._write_part = write
        assert len(list(root.glob("made/out.jsonl.parts/part-*"))) == 2


class PredictForced(Predict):
    """`enginery predict --force` replaces an output."""

    name, step = "predict over an older output", 20

    def prepare(self, root: Path) -> None:
        super().prepare(root)
        text = (root / "in.csv").read_text()
        (root / "in.csv").write_text(text.replace("pump", "engine"))
        super().run(root)
        (root / "in.csv").write_text(text)

    def run(self, root: Path, **options: int) -> None:
        config = PredictConfig(window=8, part_rows=8, workers=1)
        artifact = Artifact.open(self.model)
        predict.run(artifact, str(root / "in.csv"), self.output(root), config, force=True)


class PredictTensors(Predict):
    """`enginery predict` of a graph's own outputs."""

    name, step = "predict to .npz", 15
    suffix = ".npz"

    def prepare(self, root: Path) -> None:
        self.write_input(root, 3)

    def write_input(self, root: Path, token: int) -> None:
        inputs = Artifact.open(self.model).manifest.graphs[0].inputs
        ids = {spec.name: np.full((6, 4), token % 2, np.int64) for spec in inputs}
        np.savez(root / "in.npz", **{**ids, "input_ids": np.full((6, 4), token, np.int64)})

    def run(self, root: Path, *, force: bool = False) -> None:
        config = PredictConfig(batch_rows=2)
        artifact = Artifact.open(self.model)
        predict.run(artifact, str(root / "in.npz"), self.output(root), config, force=force)

    def results(self, root: Path) -> dict[str, str]:
        # Its report is written first, and beside an earlier output it is another's.
        output = self.output(root)
        return {"output": digest(output) if output.exists() else ""}


class PredictTensorsForced(PredictTensors):
    """`enginery predict --force` of a graph's own outputs replaces older ones."""

    name, step = "predict to an older .npz", 15

    def prepare(self, root: Path) -> None:
        self.write_input(root, 5)
        super().run(root)
        self.write_input(root, 3)

    def run(self, root: Path, *, force: bool = True) -> None:
        super().run(root, force=force)


class Publish(Scenario):
    """`enginery publish` of a first version to a folder."""

    name, step = "publish", 15

    def prepare(self, root: Path) -> None:
        validated(publishable(root / "artifact"), report=b"{}")

    def run(self, root: Path) -> None:
        publish(Artifact.open(root / "artifact"), str(root / "registry"), PublishConfig(name="m"))

    def results(self, root: Path) -> dict[str, str]:
        folder = root / "registry" / "m"
        latest, versions = read_latest(folder), read_versions(folder)
        assert not latest or latest in versions
        for version, listing in versions.items():
            listing.verify(folder / version, version)
        contents = {version: listing.content_sha256 for version, listing in versions.items()}
        return {"1": "", "2": "", **contents, "latest": latest}


class PublishSecond(Publish):
    """`enginery publish` of a second version, which `latest` moves to."""

    name, step = "publish of a second version", 20

    def prepare(self, root: Path) -> None:
        super().prepare(root)
        super().run(root)
        made = publishable(root / "artifact", graph=b"newer")
        validated(made, report=b"{}")


class Pull(Publish):
    """`enginery pull` to a new directory."""

    name, step = "pull", 10

    def prepare(self, root: Path) -> None:
        super().prepare(root)
        super().run(root)

    def run(self, root: Path) -> None:
        pull(f"{root}/registry/m", root / "pulled", PublishConfig())

    def results(self, root: Path) -> dict[str, str]:
        return {"pulled": opened(root / "pulled")}


class PullAgain(Pull):
    """`enginery pull` over another artifact."""

    name, step = "pull over another artifact", 12

    def prepare(self, root: Path) -> None:
        super().prepare(root)
        make(root / "pulled", graph=b"older")


class Prune(Scenario):
    """`enginery store prune` of a store with a damaged entry and leftovers."""

    name, step = "prune", 6

    def prepare(self, root: Path) -> None:
        obtain(FINGERPRINT)
        path = obtain(OTHER)
        (path / "model.onnx").write_bytes(b"grape")
        (path.parent / ".tmp-export-m-0123456789ab").mkdir()
        (path.parent / ".tmp-export-m-0123456789ab" / "half").write_bytes(b"half")

    def run(self, root: Path) -> None:
        Store().prune(max_size_bytes=1 << 40)
        remove_leftovers()

    def results(self, root: Path) -> dict[str, str]:
        return stored()


class Export(Scenario):
    """`enginery export` of a text classifier; a child process writes the files."""

    name = "export"

    def __init__(self, model: Path) -> None:
        self.model = model

    def prepare(self, root: Path) -> None:
        shutil.copytree(Artifact.open(self.model).manifest.source.id, root / "model")

    def run(self, root: Path) -> None:
        export_model(str(root / "model"), task="text-classification")

    def results(self, root: Path) -> dict[str, str]:
        return stored()


class ExportOnnx(Export):
    """`enginery export` of an ONNX file with external data, to an --out that has an artifact."""

    name = "export of an ONNX file"

    def prepare(self, root: Path) -> None:
        linear(root / "mine.onnx", external="mine.bin")
        make(root / "out")

    def run(self, root: Path) -> None:
        export_model(str(root / "mine.onnx"), out=root / "out")

    def results(self, root: Path) -> dict[str, str]:
        return {"out": opened(root / "out"), **stored()}


class Fuse(Export):
    """`enginery optimize --target cuda`; a child process fuses the graph."""

    name = "optimize for CUDA"

    def prepare(self, root: Path) -> None:
        shutil.copytree(self.model, root / "model")

    def run(self, root: Path) -> None:
        optimize_model(root / "model", target="cuda", precision="fp32")


class Build(Scenario):
    """`enginery build` of an engine into its artifact; a child process runs TensorRT."""

    name = "build"

    def prepare(self, root: Path) -> None:
        linear_artifact(root / "model")

    def run(self, root: Path) -> None:
        model = root / "model"
        build_engine(model, out=model, profile=["batch=1:4:8"], capability="8.9")

    def results(self, root: Path) -> dict[str, str]:
        # The bytes of two builds differ in names that TensorRT generates.
        engines = [entry.path for entry in Store().entries() if entry.kind == ENGINES.folder]
        placed = engine_directories(root / "model")
        assert opened(root / "model")
        return {
            "store": "".join(engine_key(path) for path in engines),
            "model": "".join(engine_key(path) for path in placed),
        }


class Validate(Export):
    """`enginery validate`; a child process runs PyTorch."""

    name = "validate"

    def prepare(self, root: Path) -> None:
        super().prepare(root)
        export_model(str(root / "model"), task="text-classification", out=root / "artifact")

    def run(self, root: Path) -> None:
        try:
            validate_model(root / "artifact")
        finally:
            torch_reference._end_all_workers()  # or it would wait for another model

    def results(self, root: Path) -> dict[str, str]:
        artifact = Artifact.open(root / "artifact", verify=True)
        status = artifact.validation_status().replace("none", "")
        report = ValidationReport.of(artifact)
        return {"verdict": status, "notes": str(report.notes) if report else ""}


def engine_key(path: Path) -> str:
    """Return the key of an engine, which its files were checked for; empty if it does not open."""
    try:
        return Engine.open(path, verify=True).record.key
    except ArtifactError:
        return ""


def scenarios_with_children(model: Path) -> list[Scenario]:
    """Return a scenario for each kind of child process that writes or reads files."""
    return [Export(model), ExportOnnx(model), Fuse(model), Build(), Validate(model)]


def scenarios(model: Path) -> list[Scenario]:
    """Return the scenarios that need no child process, or a short one.

    `model` is the directory of a text classifier.
    """
    return [
        Optimize(),
        OptimizeAgain(),
        Obtain(),
        Repair(),
        Replace(),
        Annotate(),
        Predict(model),
        PredictParquet(model),
        PredictForced(model),
        Resume(model),
        PredictTensors(model),
        PredictTensorsForced(model),
        Publish(),
        PublishSecond(),
        Pull(),
        PullAgain(),
        Prune(),
    ]


def obtain(fingerprint: Fingerprint) -> Path:
    """Make an entry of the store, or take it from there; return its path."""
    artifact, _ = Store().obtain(
        ARTIFACTS, fingerprint, "m", lambda out: make(out, fingerprint=fingerprint)
    )
    return artifact.path


def stored() -> dict[str, str]:
    """Return the digest of each entry of the store that opens."""
    found = {}
    for entry in Store().entries():
        found[entry.path.name] = opened(entry.path)
    return found


def opened(path: Path) -> str:
    """Return the digest of an artifact's content; empty if it does not open."""
    try:
        return Artifact.open(path, verify=True).content_sha256()
    except ArtifactError:
        return ""


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def linear_artifact(out: Path) -> Artifact:
    """Write an artifact with a graph of one MatMul."""
    graph = GraphRecord(
        file="model.onnx",
        opset=20,
        inputs=(TensorSpec("x", "float32", ("batch", 4)),),
        outputs=(TensorSpec("logits", "float32", ("batch", 3)),),
        data_files=(),
    )
    with staging(out) as directory:
        linear(directory / "model.onnx")
        (directory / "config.json").write_text("{}")
        commit_artifact(directory, manifest().model_copy(update={"graphs": (graph,)}))
    return Artifact.open(out)
