"""What a run reuses, what it leaves where, and which verdict holds."""

import os

import pytest

from enginery import Artifact, Recipe, export_model, run_recipe, stages, validate_model
from enginery.core.artifact.artifact import MANIFEST
from enginery.core.errors import ArtifactError, OptionError, RejectedArtifactError
from enginery.core.progress import SILENT
from enginery.core.scratch import locked
from enginery.core.store.store import Store
from enginery.export.config import ExportConfig
from enginery.recipe import Step
from enginery.recipe.steps import LintStage
from enginery.validate.config import ValidateConfig
from tests.progress import Said

EXPORT = Step("export", ExportConfig(task="text-classification"))
VALIDATE = Step("validate", ValidateConfig())
STRICT = Step("validate", ValidateConfig(max_abs_error=1e-12))
LINT = Step("lint", LintStage(target="cuda"))


@pytest.fixture
def model(tiny_model):
    return str(tiny_model("bert", "text-classification"))


@pytest.fixture
def own_home(tmp_path, monkeypatch):
    """Use a store of its own: a verdict that has failed is not for other tests."""
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))


def export(model, out, **options):
    return export_model(model, out=out, task="text-classification", **options)


def deliver(artifact, out):
    return stages.deliver(artifact, out, SILENT)


def test_same_artifact_where_nothing_can_be_written_needs_no_lock(exported, tmp_path, monkeypatch):
    out = tmp_path / "out"
    present = deliver(artifact := exported("bert", "fill-mask"), out)
    monkeypatch.setattr(os, "access", lambda *_: False)
    with locked(out):
        assert deliver(artifact, out) == present


def state(directory):
    """Every file with its content and times."""
    return {
        file: (file.read_bytes(), file.stat().st_mtime_ns)
        for file in sorted(directory.rglob("*"))
        if file.is_file()
    }


def test_second_export_to_the_same_place_does_nothing(model, tmp_path):
    export(model, tmp_path / "out")
    before = state(tmp_path / "out")
    listener = Said()
    export(model, tmp_path / "out", progress=listener)
    assert state(tmp_path / "out") == before
    assert any("nothing to do" in line for line in listener.messages)
    assert not any("wrote" in line for line in listener.messages)


def test_another_artifact_at_the_same_place_is_named(model, tiny_model, tmp_path):
    out = tmp_path / "out"
    listener = Said()
    export_model(str(tiny_model("bert", "feature-extraction")), out=out)
    export(model, out, progress=listener)
    (line,) = [line for line in listener.messages if line.startswith("wrote")]
    assert line.startswith(f"wrote {out}, in place of ")
    assert line.endswith(" for feature-extraction (export)")
    listener.messages.clear()
    export(model, out, opset=18, progress=listener)
    assert f"wrote {out}" in listener.messages


def test_artifact_that_another_stage_continued_is_not_named_as_replaced(model, copied, tmp_path):
    made = export(model, tmp_path / "out")
    continued = copied(made)
    (record,) = made.manifest.stages
    records = (record, record.model_copy(update={"stage": "optimize"}))
    manifest = continued.manifest.model_copy(update={"stages": records})
    (continued.path / MANIFEST).write_bytes(manifest.to_bytes())
    listener = Said()
    stages.deliver(Artifact.open(continued.path), made.path, listener)
    assert listener.messages == [f"wrote {made.path}"]


@pytest.mark.more
def test_export_keeps_the_verdict_that_the_copy_has_come_by(model, tmp_path):
    out = tmp_path / "out"
    export(model, out)
    validate_model(out, max_abs_error=1e-12)
    before = state(out)
    assert export(model, out).failed_verdict()
    assert state(out) == before
    with pytest.raises(RejectedArtifactError):
        Artifact.open(out).require_passed(allow_failed=False)
    # The store's artifact then gets an older or a newer verdict of its own; the newest holds.
    run_recipe(Recipe(model, (EXPORT, VALIDATE)))
    stored = export_model(model, task="text-classification")
    mine = Artifact.open(out).manifest.verdict("validate")
    theirs = stored.manifest.verdict("validate")
    kept = export(model, out).manifest.verdict("validate")
    assert kept == (theirs if theirs.finished > mine.finished else mine)


def made_again(artifact, path):
    """The same files by another run of the exporter, which took longer."""
    again = artifact.copy_to(path)
    (stage,) = again.manifest.stages
    longer = stage.model_copy(update={"seconds": stage.seconds + 1})
    manifest = again.manifest.model_copy(update={"stages": (longer,), "verdicts": ()})
    (path / MANIFEST).write_bytes(manifest.to_bytes())
    return Artifact.open(again.path)


@pytest.mark.more
def test_export_anew_keeps_the_verdict_of_the_same_content(model, tmp_path):
    out = tmp_path / "out"
    first = export(model, out)
    report = validate_model(out, max_abs_error=1e-12)
    again = deliver(made_again(first, tmp_path / "again"), out)
    assert again.manifest.stages != first.manifest.stages
    assert again == Artifact.open(out)
    assert again.failed_verdict()
    assert (out / "reports/validation.json").read_bytes() == report.to_json()

    (out / "reports/validation.json").unlink()
    assert deliver(made_again(first, tmp_path / "third"), out).failed_verdict(), (
        "a report is not a verdict"
    )


def test_export_of_another_model_takes_no_verdict_along(model, exported, tmp_path):
    out = tmp_path / "out"
    export(model, out)
    validate_model(out, max_abs_error=1e-12)
    other = deliver(exported("bert", "fill-mask"), out)
    assert other.manifest.task == "fill-mask"
    assert other.failed_verdict() is None


@pytest.mark.more
def test_verdict_of_a_run_goes_before_the_one_at_its_out(model, tmp_path):
    out = tmp_path / "out"
    run_recipe(Recipe(model, (EXPORT, VALIDATE), out=str(out)))
    validate_model(out, max_abs_error=1e-12)
    result = run_recipe(Recipe(model, (EXPORT, VALIDATE), out=str(out)))
    assert result.passed
    assert result.artifact.path == out
    assert Artifact.open(out).failed_verdict() is None


def test_second_run_works_nowhere_and_writes_nothing(model, tmp_path):
    plan = Recipe(model, (EXPORT, VALIDATE), out=str(tmp_path / "out"))
    run_recipe(plan)
    before = state(tmp_path / "out")
    listener = Said()
    result = run_recipe(plan, progress=listener)
    assert [stage.worked for stage in result.stages] == [False, False]
    assert state(tmp_path / "out") == before
    assert len([line for line in listener.messages if "nothing to do" in line]) == 2
    assert result.stages[1].report.passed


@pytest.mark.more
def test_force_works_everywhere(model, monkeypatch, tmp_path):
    # In a store that nobody else reads while what is in it is replaced.
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    result = run_recipe(Recipe(model, (EXPORT, VALIDATE)), force=True)
    assert [stage.worked for stage in result.stages] == [True, True]


def test_changed_option_is_named_in_words(model):
    run_recipe(Recipe(model, (EXPORT, VALIDATE)))
    listener = Said()
    run_recipe(Recipe(model, (EXPORT, Step("validate", ValidateConfig(seed=3)))), progress=listener)
    assert any("validating again: seed: 0 → 3" in line for line in listener.messages), (
        listener.messages
    )


@pytest.mark.more
def test_failed_check_marks_the_store_and_out_and_refuses_what_follows(model, tmp_path, own_home):
    listener = Said()
    plan = Recipe(model, (EXPORT, STRICT, LINT), out=str(tmp_path / "out"))
    result = run_recipe(plan, progress=listener)
    assert not result.passed
    assert result.refused == ("lint",)
    assert [stage.stage for stage in result.stages] == ["export", "validate"]
    assert "differ from PyTorch" in result.failure
    assert Artifact.open(tmp_path / "out").failed_verdict().summary == result.failure
    assert result.stages[0].artifact.path.parent == Store().artifacts
    assert Artifact.open(result.stages[0].artifact.path).failed_verdict()
    assert any("lint: refused" in line for line in listener.messages)

    again = run_recipe(plan)
    assert (again.passed, again.refused) == (False, ("lint",)), "a verdict is taken, not lost"
    forgiven = run_recipe(plan, allow_failed=True)
    assert (forgiven.passed, forgiven.refused, len(forgiven.stages)) == (False, (), 3)


@pytest.mark.more
def test_looser_tolerance_lets_a_failed_artifact_pass(model, own_home):
    assert not run_recipe(Recipe(model, (EXPORT, STRICT))).passed
    assert run_recipe(Recipe(model, (EXPORT, VALIDATE))).passed


def test_foreign_directory_is_refused_before_any_work(model, tmp_path, monkeypatch):
    (tmp_path / "thesis.txt").write_text("years of work")
    monkeypatch.setattr(stages, "resolve_source", lambda *_, **__: pytest.fail("it worked"))
    with pytest.raises(ArtifactError, match="not an enginery artifact"):
        run_recipe(Recipe(model, (EXPORT,), out=str(tmp_path)))
    with pytest.raises(ArtifactError, match="not an enginery artifact"):
        export(model, tmp_path)


def test_unknown_option_of_either_stage_names_the_nearest(model, tmp_path):
    with pytest.raises(OptionError, match="'opsets' for export; did you mean 'opset'"):
        export_model(model, opsets=17)
    with pytest.raises(OptionError, match="'profiles' for validate; did you mean 'profile'"):
        validate_model(tmp_path, profiles=())


# Options


@pytest.mark.more
def test_config_and_keywords_are_the_same_options(model):
    listener = Said()
    by_keywords = export_model(model, task="text-classification", opset=18)
    config = ExportConfig(task="text-classification", opset=18)
    by_config = export_model(model, config=config, progress=listener)
    assert by_config.path == by_keywords.path
    assert "nothing to do" in listener.messages[-1]


def test_config_beside_keywords_is_an_error(model):
    with pytest.raises(OptionError, match="export: both config and options were given: opset"):
        export_model(model, config=ExportConfig(), opset=18)
