"""What the server says of itself, and what it can be told."""

import shutil

import pytest
from prometheus_client.parser import text_string_to_metric_families

from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import OptionError
from enginery.runtime.tasks.generate import Generate
from enginery.serve.app import make_app
from enginery.serve.config import ServeConfig
from tests.core.artifacts import verdict as verdict_of
from tests.serve.conftest import TINY, Running
from tests.serve.doubles import StandInModel, StandInModels, application, ask
from tests.tolerances import SCORES

KEY = {"x-api-key": "one"}


@pytest.mark.more
def test_health_has_each_models_state_provider_and_precision(running):
    found = running("GET", "/health")
    assert (found.status, found.json["status"]) == (200, "ready")
    mood = found.json["models"]["mood"]
    assert (mood["state"], mood["precision"]) == ("ready", "fp32")
    assert mood["providers"][0]["name"] == "CPUExecutionProvider"


@pytest.mark.parametrize("state", ["loading", "stuck", "failed"])
def test_health_tells_which_model_is_not_ready_and_why(state):
    good, bad = StandInModel("good"), StandInModel("bad")
    bad.state, bad.reason = state, "the GPU is gone"
    app = application(good, bad)
    found = ask(app, "GET", "/health")
    assert (found.status, found.json["status"]) == (503, state)
    assert found.json["models"]["bad"]["reason"] == "the GPU is gone"
    assert found.json["models"]["good"]["state"] == "ready"
    assert ask(app, "GET", "/health/ready").status == 503
    assert ask(app, "GET", "/health/live").status == 200
    ready = ask(app, "GET", "/v2/models/good/ready")
    assert (ready.status, ready.json) == (200, {"name": "good", "ready": True})
    assert ask(app, "GET", "/v2/models/bad/ready").status == 503


def test_draining_server_is_live_but_not_ready():
    models = StandInModels(StandInModel())
    app = application(models)
    found = ask(app, "GET", "/v2/health/ready")
    assert (found.status, found.json) == (200, {"ready": True, "live": True})
    models.draining = True
    found = ask(app, "GET", "/v2/health/ready")
    assert (found.status, found.json) == (503, {"ready": False, "live": True})


def validated(source, directory, *, passed):
    """A copy of an artifact with a verdict; without one for None."""
    shutil.copytree(source, directory)
    if passed is not None:
        artifact = Artifact.open(directory)
        found = verdict_of(artifact, passed=passed, summary="1 of 9 cases differs.")
        artifact.annotate(found, b"{}")
    return directory


@pytest.mark.parametrize(
    ("passed", "verdict"), [(True, "passed"), (False, "failed"), (None, "none")]
)
def test_health_has_the_validation_verdict(tiny_paths, tmp_path, passed, verdict):
    path = validated(tiny_paths("mood")["mood"], tmp_path / "mood", passed=passed)
    with Running({"mood": path}, ServeConfig(allow_failed=True, access_log="off")) as server:
        assert server("GET", "/health").json["models"]["mood"]["verdict"] == verdict
        assert server("GET", "/info").json["models"][0]["verdict"] == verdict
        assert server("GET", "/models/mood/info").json["verdict"] == verdict


def test_source_path_is_not_revealed(running):
    found = running("GET", "/models/mood/info")
    source = running.models.get("mood").artifact.manifest.source
    assert source.kind == "directory"
    assert (found.json["model_id"], found.json["source"]) == (source.name, source.name)
    assert source.id.encode() not in found.body + running("GET", "/info").body


def test_info_has_every_model(running):
    found = running("GET", "/info").json
    models = {model["name"]: model for model in found["models"]}
    assert set(models) == set(running.models.names)
    assert models["mood"]["task"] == "text-classification"
    assert "batching" in models["mood"]
    assert "model_id" not in found  # whose would it be?


@pytest.mark.parametrize("name", TINY)
def test_example_of_info_is_answered(running, name):
    found = running("GET", f"/models/{name}/info").json
    assert any(not field["optional"] for field in found["fields"])
    task = running.models.get(name).task
    schemas = task.option_schemas() if isinstance(task, Generate) else task.Options.schemas()
    assert found["options"].keys() == schemas.keys()
    answer = running("POST", f"/predict/{name}", found["example"])
    assert answer.status == 200, answer.body


def test_example_of_a_model_of_another_task_is_its_tensors(tiny_paths, tmp_path):
    path = shutil.copytree(tiny_paths("mood")["mood"], tmp_path / "raw")
    manifest = Artifact.open(path).manifest.model_copy(update={"task": "audio-xvector"})
    (path / "manifest.json").write_bytes(manifest.to_bytes())
    with Running({"raw": path}, ServeConfig(access_log="off")) as server:
        (found,) = server("GET", "/info").json["models"]
        assert found["fields"] == []
        assert {tensor["datatype"] for tensor in found["example"]["inputs"]} == {"INT64"}
        assert server("POST", "/v2/models/raw/infer", found["example"]).status == 200


def test_info_of_one_model_is_found_by_its_name(running):
    found = running("GET", "/models/names/info").json
    assert (found["name"], found["served_model_name"]) == ("names", "names")
    assert running("GET", "/models/nobody/info").status == 404


def test_loading_models_have_no_guessed_properties():
    class Loading(StandInModel):
        @property
        def artifact(self):
            raise AssertionError("it is not there yet")

        @artifact.setter
        def artifact(self, value):
            pass

        def info(self):
            return {}

    model = Loading()
    model.state, model.reason = "loading", "the model is being loaded"
    app = application(model)
    assert ask(app, "GET", "/info").json["models"] == [{"name": "minilm", "state": "loading"}]
    assert ask(app, "GET", "/models/minilm/info").status == 200
    assert ask(app, "GET", "/health").status == 503


def test_metrics_are_prometheus_text(running):
    running("POST", "/predict/mood", {"inputs": "a"})
    found = running("GET", "/metrics")
    families = {f.name for f in text_string_to_metric_families(found.body.decode())}
    assert "enginery_request_duration_seconds" in families
    odd = {"accept": "application/openmetrics-text; version=abc"}
    assert running("GET", "/metrics", headers=odd).status == 200
    openmetrics = running("GET", "/metrics", headers={"accept": "application/openmetrics-text"})
    assert openmetrics.content_type.startswith("application/openmetrics-text")


def test_page_has_its_policy(running):
    found = running("GET", "/")
    assert found.content_type.startswith("text/html")
    assert "default-src 'none'" in found.headers["content-security-policy"]


def test_reload_is_off_without_a_key():
    models = StandInModels(StandInModel())
    found = ask(application(models), "POST", "/admin/reload")
    assert (found.status, "has no API key" in found.json["error"]) == (403, True)
    assert models.reloaded == []


def test_reload_swaps_one_model_or_all():
    models = StandInModels(StandInModel("a"), StandInModel("b"))
    app = application(models, keys=(b"one",))
    assert ask(app, "POST", "/admin/reload").status == 401
    one = ask(app, "POST", "/admin/reload", {"model": "b"}, KEY)
    assert one.json == {"models": {"b": "reloaded"}}
    every = ask(app, "POST", "/admin/reload", headers=KEY)
    assert every.json == {"models": {"a": "reloaded", "b": "reloaded"}}
    assert ask(app, "POST", "/admin/reload", {"model": "c"}, KEY).status == 404
    assert ask(app, "POST", "/admin/reload", {"modle": "a"}, KEY).status == 422
    assert models.reloaded == ["b", "a", "b"]


def test_reload_that_fails_is_409_and_names_the_model(caplog):
    models = StandInModels(StandInModel("a"), StandInModel("b"))
    models.broken["b"] = "build/b has no manifest.json."
    app = application(models, keys=(b"one",))
    found = ask(app, "POST", "/admin/reload", headers=KEY)
    assert (found.status, found.json) == (
        409,
        {
            "error": "not reloaded: b, which keeps serving as before.",
            "failed": ["b"],
            "models": {"a": "reloaded", "b": "not reloaded: build/b has no manifest.json."},
        },
    )
    (record,) = caplog.records
    assert record.getMessage() == "b: not reloaded: build/b has no manifest.json."
    assert ask(app, "POST", "/admin/reload", {"model": "a"}, KEY).status == 200
    assert ask(app, "POST", "/admin/reload", {"model": "b"}, KEY).status == 409


def test_real_model_is_reloaded_and_answers_again(running_one):
    key = {"x-api-key": "s3cret"}
    before = running_one("POST", "/embed", {"inputs": "warm"}, headers=key).json
    found = running_one("POST", "/admin/reload", {"model": "vectors"}, headers=key)
    assert (found.status, list(found.json["models"])) == (200, ["vectors"])
    after = running_one("POST", "/embed", {"inputs": "warm"}, headers=key).json
    assert after[0] == pytest.approx(before[0], abs=SCORES)
    tokens = running_one("POST", "/tokenize", {"inputs": "warm"}, headers=key)
    assert tokens.status == 200


def test_keys_are_read_when_the_server_starts(tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINERY_API_KEY", "from-outside")
    app = make_app({}, ServeConfig(access_log="off"))
    app.state.registry = StandInModels(StandInModel())
    assert ask(app, "GET", "/info").status == 401
    assert ask(app, "GET", "/info", headers={"x-api-key": "from-outside"}).status == 200
    with pytest.raises(OptionError):
        make_app({}, ServeConfig(api_key_file=str(tmp_path / "none")))
