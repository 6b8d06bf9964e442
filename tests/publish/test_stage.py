"""Publishing and pulling from Python."""

import pytest

from enginery import publish_model, pull_model
from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import (
    ArtifactError,
    MissingPackageError,
    OptionError,
    RejectedArtifactError,
)
from enginery.core.extras import missing_packages
from enginery.engine import stage as build
from enginery.publish import destination
from enginery.publish.config import PublishConfig
from enginery.publish.destination import open_destination
from enginery.publish.targets.folder import FolderRegistry
from enginery.runtime.tensorrt.library import has_tensorrt
from tests.core.artifacts import publishable, validated
from tests.engine.conftest import build_config
from tests.engine.products import product
from tests.progress import Said


@pytest.fixture
def artifact(tmp_path):
    return validated(publishable(tmp_path / "artifact"))


# Addresses


@pytest.mark.parametrize(
    ("url", "said"),
    [
        ("mlfow:/name", "unknown scheme 'mlfow'; did you mean 'mlflow'?"),
        ("s3://bucket/name", "unknown scheme 's3'"),
        ("  ", "is empty"),
        ("file://host/path", "names the host"),
    ],
)
def test_invalid_address_is_an_error_with_the_supported_kinds(artifact, url, said):
    with pytest.raises(OptionError) as error:
        publish_model(artifact, url)
    assert said in str(error.value)
    with pytest.raises(OptionError):
        pull_model(url, artifact.path.with_name("out"))


def test_client_library_is_imported_only_for_its_address(monkeypatch):
    asked = []

    def absent(module):
        asked.append(module)
        raise missing_packages("Publishing to MLflow", ["mlflow"])

    monkeypatch.setattr(destination, "import_module", absent)
    with pytest.raises(MissingPackageError, match=r"enginery\[mlflow\]"):
        open_destination("mlflow:/name", PublishConfig())
    assert asked == ["enginery.publish.targets.mlflow.registry"]


# Both ways


@pytest.mark.more
def test_pulled_model_has_the_same_results(exported, copied, tmp_path):
    from enginery import load_model, validate_model

    artifact = copied(exported("bert", "text-classification"))
    with pytest.raises(RejectedArtifactError, match="it was never validated"):
        publish_model(artifact, tmp_path / "registry")
    assert not (tmp_path / "registry").exists(), "a refusal touches no registry"
    assert validate_model(artifact).passed
    said = Said()
    published = publish_model(artifact, tmp_path / "registry", progress=said)
    assert any(message.startswith("publish: wrote ") for message in said.messages)
    pulled = pull_model(published.url, tmp_path / "out")
    assert pulled.manifest == Artifact.open(artifact.path).manifest
    with load_model(artifact) as before, load_model(pulled) as after:
        assert before.classify(["The pump runs."]) == after.classify(["The pump runs."])
    assert publish_model(pulled, tmp_path / "registry").is_new is False


CARD = """---
license: apache-2.0
language: en
---
## Limitations
bad at sums
"""


@pytest.fixture
def with_a_card(tmp_path):
    """Return an artifact with its source in `tmp_path/source`, whose card states rights."""
    from enginery.core.artifact.artifact import commit_artifact
    from enginery.core.model.source import resolve_source

    source = tmp_path / "source"
    source.mkdir()
    for name, text in (("config.json", "{}"), ("model.safetensors", "x"), ("README.md", CARD)):
        (source / name).write_text(text)
    made = publishable(tmp_path / "artifact")
    record = resolve_source(str(source)).record
    commit_artifact(made.path, made.manifest.model_copy(update={"source": record}))
    return validated(Artifact.open(made.path))


def test_pulled_artifact_keeps_its_rights_without_the_source(with_a_card, tmp_path):
    first = publish_model(with_a_card, tmp_path / "registry", name="m")
    pulled = pull_model(first.url, tmp_path / "pulled")
    (tmp_path / "source").rename(tmp_path / "gone")
    again = publish_model(pulled, tmp_path / "registry", name="m")
    assert (again.url, again.is_new) == (first.url, False)
    said = Said()
    other = publish_model(pulled, tmp_path / "other", name="m", progress=said)
    assert any("from the listing that it was pulled with" in message for message in said.messages)
    card = (pull_model(other.url, tmp_path / "again").path / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "bad at sums" in card


def test_rights_of_another_model_are_not_used(with_a_card, tmp_path):
    from enginery.core.artifact.artifact import commit_artifact

    pulled = pull_model(publish_model(with_a_card, tmp_path / "r").url, tmp_path / "pulled")
    (tmp_path / "source").rename(tmp_path / "gone")
    graph = pulled.path / "model.onnx"
    graph.write_bytes(graph.read_bytes().replace(b"graph", b"other"))
    commit_artifact(pulled.path, pulled.manifest)
    changed = validated(Artifact.open(pulled.path))
    published = publish_model(changed, tmp_path / "registry")
    card = (pull_model(published.url, tmp_path / "again").path / "README.md").read_text()
    assert "The licence is not known" in card


def test_notes_of_a_registry_are_reported(artifact, tmp_path, monkeypatch):
    from dataclasses import replace

    whole = FolderRegistry.publish

    def noting(self, package, config, progress):
        published = whole(self, package, config, progress)
        return replace(published, notes=(*published.notes, "1 pointed to abc before"))

    monkeypatch.setattr(FolderRegistry, "publish", noting)
    (artifact.path / "mine.txt").write_text("")
    said = Said()
    publish_model(artifact, tmp_path / "registry", progress=said)
    assert said.messages.count("publish: 1 pointed to abc before") == 1
    assert sum("mine.txt" in message for message in said.messages) == 1


def test_publishing_does_not_change_the_artifact(artifact, tmp_path):
    before = {p: p.read_bytes() for p in artifact.path.rglob("*") if p.is_file()}
    publish_model(artifact, tmp_path / "registry")
    assert {p: p.read_bytes() for p in artifact.path.rglob("*") if p.is_file()} == before


def test_pull_reports_a_version_that_was_not_validated(tmp_path):
    bare = publishable(tmp_path / "bare")
    published = publish_model(bare, tmp_path / "registry", allow_failed=True)
    said = Said()
    pull_model(published.url, tmp_path / "out", progress=said)
    assert any("published with --allow-failed" in message for message in said.messages)


def test_pull_leaves_out_additional_files_of_a_registry(artifact, tmp_path, monkeypatch):
    published = publish_model(artifact, tmp_path / "registry")
    whole = FolderRegistry.pull

    def with_more(self, out, progress):
        (out / ".cache/huggingface").mkdir(parents=True)
        (out / ".cache/huggingface/CACHEDIR.TAG").write_text("")
        (out / "MLmodel").write_text("")
        return whole(self, out, progress)

    monkeypatch.setattr(FolderRegistry, "pull", with_more)
    said = Said()
    pulled = pull_model(published.url, tmp_path / "out", progress=said)
    assert not (pulled.path / "MLmodel").exists()
    assert not (pulled.path / ".cache").exists()
    assert any("left out MLmodel" in message for message in said.messages)


def test_pulled_artifact_is_replaced_by_the_next_pull(artifact, tmp_path):
    published = publish_model(artifact, tmp_path / "registry")
    pull_model(published.url, tmp_path / "out")
    assert pull_model(published.url, tmp_path / "out").manifest == artifact.manifest
    (tmp_path / "out/README.md").write_text("my own")
    with pytest.raises(ArtifactError, match=r"would be lost: README\.md"):
        pull_model(published.url, tmp_path / "out")


def test_quantizing_a_pulled_artifact_does_not_use_the_card(tmp_path):
    if not has_tensorrt():
        pytest.skip("pip install 'enginery[tensorrt-rtx]'")
    source = validated(product(tmp_path / "source"))
    published = publish_model(source, tmp_path / "registry", name="product")
    pulled = pull_model(published.url, tmp_path / "out")
    built = build.run(pulled, build_config(), pulled.path)
    assert "README.md" not in built.manifest.files
    again = publish_model(built, tmp_path / "registry", name="product")
    assert (again.version, again.is_new) == ("2", True)
    assert pull_model(again.url, tmp_path / "out").manifest == built.manifest
