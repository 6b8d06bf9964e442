"""Packages: their files, rejected artifacts, and when two packages have the same content."""

import json
from dataclasses import replace

import pytest

from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import ArtifactError, OptionError, RejectedArtifactError
from enginery.publish.config import PublishConfig
from enginery.publish.package import Package
from tests.core.artifacts import publishable, validated, verdict
from tests.engine.made import with_engines
from tests.engine.products import product

CONFIG = PublishConfig(license="mit")


@pytest.fixture
def artifact(tmp_path):
    """Return a complete and validated artifact."""
    return validated(publishable(tmp_path / "minilm"))


@pytest.fixture
def packed(tmp_path):
    """Return a function that makes a package: `packed(artifact, name="x")`."""
    numbers = iter(range(100))

    def of(artifact, config=CONFIG, **options):
        scratch = tmp_path / f"scratch-{next(numbers)}"
        scratch.mkdir()
        return Package.of(artifact, replace(config, **options), scratch)

    return of


def card_of(package):
    return next(file.path for file in package.files if file.name == "README.md").read_text()


def test_package_has_the_artifact_with_card_and_listing(artifact, packed):
    package = packed(artifact)
    assert [file.name for file in package.files] == [
        "README.md",
        "config.json",
        "manifest.json",
        "model.onnx",
        "reports/publication.json",
    ]
    assert (package.name, package.problem) == ("name", "")


def test_weights_tokenizer_and_engines_go_along(tmp_path, packed):
    source = product(tmp_path / "source", external=True)
    made = with_engines(source, tmp_path / "made", {"capabilities": ("8.0", "8.9")}, {})
    (made.path / "tokenizer.json").write_text("{}")
    from enginery.core.artifact.artifact import commit_artifact

    commit_artifact(made.path, made.manifest)
    package = packed(Artifact.open(made.path), allow_failed=True)
    assert {engine.capabilities for engine in package.engines} == {("8.9",), ("8.0", "8.9")}
    names = {file.name for file in package.files}
    assert {"model.onnx", "model.onnx.data", "tokenizer.json"} <= names
    assert sum(name.endswith("engine.json") for name in names) == 2


# Refusals


def test_changed_file_of_equal_size_and_times_is_an_error_with_its_name(artifact, packed):
    import os

    model = artifact.path / "model.onnx"
    before = model.stat()
    model.write_bytes(model.read_bytes().replace(b"graph", b"grapH"))
    os.utime(model, ns=(before.st_atime_ns, before.st_mtime_ns))
    with pytest.raises(ArtifactError, match=r"model\.onnx was altered"):
        packed(artifact)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (
            lambda a: a.annotate(verdict(passed=False, summary="2 differ"), b"{}"),
            "failed: 2 differ",
        ),
        (lambda a: publishable(a.path.with_name("never")), "it was never validated"),
        (
            lambda a: a.annotate(
                verdict().model_copy(update={"fields": {"artifact": "0" * 64}}), b"{}"
            ),
            "its validation was of other content",
        ),
        (
            lambda a: a.annotate(verdict(stage="optimize", passed=False, summary="NaN"), b"{}"),
            "its validation failed: NaN",
        ),
    ],
    ids=["failed", "missing", "other content", "another check"],
)
def test_artifact_that_is_not_validated_needs_the_option_and_the_card_says_so(
    artifact, packed, change, said
):
    changed = change(artifact)
    with pytest.raises(RejectedArtifactError, match=said) as refused:
        packed(changed)
    assert "--allow-failed" in str(refused.value)
    package = packed(changed, allow_failed=True)
    assert said in package.problem
    assert "**Not validated.**" in card_of(package)
    assert said in card_of(package)
    listing = next(f for f in package.files if f.name == "reports/publication.json")
    assert json.loads(listing.path.read_text())["validated"] is False


def test_card_of_a_validated_artifact_does_not_mention_the_option(artifact, packed):
    assert "Not validated" not in card_of(packed(artifact, allow_failed=True))


def test_damaged_report_is_an_error_with_its_name(artifact, packed):
    broken = artifact.annotate(reports={"reports/validation.json": b"{"})
    with pytest.raises(ArtifactError, match=r"validation\.json cannot be read"):
        packed(broken)


def test_reports_not_in_the_manifest_are_left_out(artifact, packed):
    (artifact.path / "reports").mkdir()
    (artifact.path / "reports/extra.json").symlink_to("/etc/passwd")
    (artifact.path / "reports/benchmark.json").write_text("{}")
    package = packed(artifact)
    assert not any(file.name.startswith("reports/e") for file in package.files)
    assert package.notes[0].endswith("reports/benchmark.json, reports/extra.json")


def test_model_file_with_the_cards_name_is_an_error(artifact, packed):
    from enginery.core.artifact.fingerprint import sha256_of
    from enginery.core.artifact.manifest import FileRecord

    (artifact.path / "README.md").write_text("mine")
    record = FileRecord(sha256=sha256_of(artifact.path / "README.md"), size_bytes=4)
    files = {**artifact.manifest.files, "README.md": record}
    manifest = artifact.manifest.model_copy(update={"files": files})
    (artifact.path / "manifest.json").write_bytes(manifest.to_bytes())
    with pytest.raises(ArtifactError, match=r"lists README\.md as a file of the model"):
        packed(artifact)


# Content


def test_dates_and_durations_are_not_content(artifact, packed):
    before = packed(artifact).content_sha256
    (stage,) = artifact.manifest.stages
    later = stage.model_copy(update={"finished": "2027-01-01T00:00:00+00:00", "seconds": 9.0})
    changed = artifact.manifest.model_copy(update={"stages": (later,)})
    (artifact.path / "manifest.json").write_bytes(changed.to_bytes())
    reopened = Artifact.open(artifact.path)
    again = reopened.annotate(
        verdict(reopened).model_copy(update={"finished": "2027-01-01T00:00:00+00:00"}), b""
    )
    assert packed(again).content_sha256 == before


def test_graph_verdict_benchmark_and_licence_are_content(artifact, packed, tmp_path):
    other = validated(publishable(tmp_path / "other", graph=b"another"))
    changed = [
        packed(artifact),
        packed(other),
        packed(artifact, license="apache-2.0"),
        packed(artifact, base_model="org/other"),
    ]
    changed.append(packed(validated(artifact, summary="other words")))
    assert len({package.content_sha256 for package in changed}) == 5


def test_validated_or_not_is_content(artifact, packed):
    """The verdicts of other content and of this content have the same words."""

    def of(artifact_sha256):
        fields = {"artifact": artifact_sha256}
        return artifact.annotate(verdict().model_copy(update={"fields": fields}), b"")

    stale = packed(of("0" * 64), allow_failed=True)
    fresh = packed(of(artifact.content_sha256()))
    assert (stale.problem, fresh.problem) == ("its validation was of other content", "")
    assert stale.content_sha256 != fresh.content_sha256


def test_unknown_rights_are_other_content(artifact, packed):
    """The source is a Hub model that cannot be reached."""
    stated, unread = packed(artifact), packed(artifact, license="")
    assert stated.publication.rights.license == "mit"
    assert unread.publication.rights is None
    assert not unread.matches(stated.publication)


def test_files_not_in_the_manifest_are_left_out_and_named(artifact, packed):
    (artifact.path / "secret.env").write_text("TOKEN=1")
    (artifact.path / "README.md").write_text("my own notes")
    package = packed(artifact)
    assert "secret.env" not in [file.name for file in package.files]
    assert "left out, because the manifest does not list them: secret.env" in package.notes
    assert card_of(package).startswith("---\n")


# Names and options


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("name", "a/b"),
        ("name", ".."),
        ("version", "latest"),
        ("alias", "latest"),
        ("alias", "two words"),
        ("license", "two\nlines"),
        ("version", "-1"),
        ("alias", "LATEST"),
        ("version", "1.0."),
        ("name", "CON"),
        ("name", "nul.txt"),
        ("alias", "Com1"),
    ],
)
def test_invalid_options_are_errors(option, value):
    with pytest.raises(OptionError, match=f"option '{option}'"):
        PublishConfig(**{option: value})
