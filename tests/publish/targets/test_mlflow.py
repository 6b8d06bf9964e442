"""MLflow, tested with `mlflow server` and an SQLite store; without it, only addresses."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from dataclasses import asdict, replace

import numpy as np
import pytest

from enginery import load_model
from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import (
    ArtifactError,
    EngineryError,
    InputError,
    OptionError,
    RegistryError,
)
from enginery.publish import stage
from enginery.publish.pyfunc import PyfuncConfig, _load_pyfunc
from tests.publish.products import UNVALIDATED, Heard, altered, large, with_an_engine
from tests.publish.targets.servers import free_port, mlflow_server

pytest.importorskip("mlflow", reason="pip install 'enginery[mlflow]'")

from enginery.publish.package import CONTENT
from enginery.publish.targets.mlflow.model import signature
from enginery.publish.targets.mlflow.registry import (
    MlflowRegistry,
    redacted_message,
    without_password,
)

# MLflow's own modules, of their own type hints and of pandas.
pytestmark = [
    pytest.mark.filterwarnings("ignore::UserWarning:mlflow.*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:mlflow.*"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:mlflow.*"),
    pytest.mark.filterwarnings("ignore:Operation with range is deprecated"),
    pytest.mark.filterwarnings("ignore:.*type hint.*:UserWarning"),
]
TEXTS = ["The engine is warm.", "the rain is cold, the bell rings at noon", "0"]


@pytest.fixture(scope="module")
def tracking(tmp_path_factory):
    with mlflow_server(tmp_path_factory.mktemp("mlflow")) as address:
        yield address


@pytest.fixture
def server(tracking, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", tracking)
    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    return tracking


@pytest.fixture
def artifact(exported, copied) -> Artifact:
    """Use an empty store, without verdicts of other tests."""
    return copied(exported("bert", "feature-extraction"))


def client(server):
    from mlflow import MlflowClient

    return MlflowClient(server)


def opened(url):
    """Load a model with MLFLOW_TRACKING_URI; `set_tracking_uri` would affect other tests."""
    import mlflow

    return mlflow.pyfunc.load_model(url.replace("mlflow:", "models:"))


@pytest.mark.parametrize("url", ["mlflow:", "mlflow:/", "mlflow:/a/b", "mlflow:/a b", "mlflow:/a@"])
def test_invalid_address_is_an_error_with_an_example(url, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    with pytest.raises(OptionError, match="expected mlflow:/name"):
        MlflowRegistry(url, UNVALIDATED)


def test_missing_tracking_server_is_an_error_and_nothing_is_written(monkeypatch, tmp_path):
    import mlflow

    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setattr(mlflow, "is_tracking_uri_set", lambda: False)
    with pytest.raises(OptionError, match="MLFLOW_TRACKING_URI is not set"):
        MlflowRegistry("mlflow:/name", UNVALIDATED)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("login", ["ada:s3cr3t@", "ada:p@s3cr3t@", "ada:p%40s3cr3t@", ":s3cr3t@"])
def test_password_is_not_in_messages(artifact, monkeypatch, login):
    port = free_port()
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://{login}127.0.0.1:{port}")
    with pytest.raises(RegistryError) as refused:
        stage.run(artifact, "mlflow:/name", UNVALIDATED)
    assert f"the MLflow server http://127.0.0.1:{port} cannot be reached" in str(refused.value)
    assert "s3cr3t" not in str(refused.value)


def test_redacted_message_has_no_login():
    server = "https://ada:p@s%3D@mlflow.example.com"
    for said in (f"GET {server}/api failed", "p@s%3D is wrong", "p@s= is wrong", "ada:p@s= no"):
        found = redacted_message(ValueError(said), server)
        assert not {"p@s%3D", "p@s="} & set(found.replace(":", " ").split()), found
    assert redacted_message("https://x:y@z@host/a@b", "") == "https://host/a@b"
    assert without_password(server) == "https://mlflow.example.com"


@pytest.mark.parametrize(
    "server",
    [
        "http://",
        "http://127.0.0.1:port",
        "http://[::1",
        "http://ada:s3/cr3t@127.0.0.1:5000",
        "http:",
    ],
)
def test_invalid_server_address_is_an_error(artifact, server, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    with pytest.raises(RegistryError, match=r"cannot be reached: .* Check MLFLOW_TRACKING") as told:
        stage.run(artifact, "mlflow:/name", UNVALIDATED)
    assert "cr3t" not in str(told.value)


@pytest.mark.parametrize("server", ["sqlite:///ml.db", "postgresql+psycopg2://ada:s3cr3t@db/ml"])
def test_database_needs_the_whole_package(server, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MLFLOW_TRACKING_URI", server)
    with pytest.raises(OptionError, match="a database, but mlflow-skinny is installed") as told:
        MlflowRegistry("mlflow:/name", UNVALIDATED)
    assert "s3cr3t" not in str(told.value)
    assert not list(tmp_path.iterdir())


def test_server_without_http_is_an_error(artifact, monkeypatch):
    with socket.create_server(("127.0.0.1", 0)) as other:

        def greet():
            connection, _ = other.accept()
            with connection:
                connection.sendall(b"SSH-2.0-OpenSSH_9.2\r\n")
                connection.recv(4096)

        thread = threading.Thread(target=greet)
        thread.start()
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"http://127.0.0.1:{other.getsockname()[1]}")
        with pytest.raises(RegistryError, match=r"cannot be reached: .*(SSH|BadStatus|aborted)"):
            stage.run(artifact, "mlflow:/name", UNVALIDATED)
        thread.join()


@pytest.mark.parametrize("alias", ["v1", "V23"])
def test_reserved_alias_is_an_error_before_uploading(artifact, monkeypatch, alias):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    with pytest.raises(OptionError, match=f"alias '{alias}' has the form of a version"):
        stage.run(artifact, "mlflow:/name", replace(UNVALIDATED, alias=alias))


def test_version_number_is_an_error(artifact, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:1")
    for url, config in (
        ("mlflow:/name", replace(UNVALIDATED, version="7")),
        ("mlflow:/name/7", UNVALIDATED),
    ):
        with pytest.raises(
            OptionError, match="found the version or alias '7', but MLflow numbers versions"
        ):
            stage.run(artifact, url, config)


# What MLflow wraps, without MLflow.


@pytest.fixture
def in_mlflow(tmp_path):
    """`in_mlflow(artifact)`: the model as MLflow opens what is published."""
    from mlflow import pyfunc

    def save(artifact):
        path = tmp_path / "model"
        pyfunc.save_model(
            path=str(path),
            loader_module="enginery.publish.pyfunc",
            data_path=str(artifact.path),
            signature=signature(artifact.manifest),
            model_config=asdict(PyfuncConfig(allow_failed=True)),
            pip_requirements=[],
        )
        return pyfunc.load_model(str(path))

    return save


@pytest.mark.parametrize("task", ["feature-extraction", "text-classification"])
def test_texts_are_taken_in_every_form_that_mlflow_passes_on(task, exported, in_mlflow):
    import pandas as pd

    model = in_mlflow(exported("bert", task))
    forms = (
        [{"text": text} for text in TEXTS],
        {"text": TEXTS},
        pd.DataFrame({"text": TEXTS}),
        pd.Series(TEXTS),
        np.array(TEXTS),
    )
    expected = model.predict(TEXTS)
    assert len(expected) == len(TEXTS)
    for form in forms:
        np.testing.assert_array_equal(model.predict(form), expected)
    np.testing.assert_array_equal(model.predict(TEXTS[0]), expected[:1])


@pytest.mark.more
def test_provider_that_cannot_be_had_is_an_error_in_mlflow_too(server, artifact):
    from mlflow import pyfunc

    published = stage.run(artifact, "mlflow:/strict", UNVALIDATED)
    url = published.url.replace("mlflow:", "models:")
    for named, problem in (
        ("nonsense", "unknown execution provider"),
        ("tensorrt", "tensorrt requested"),
    ):
        with pytest.raises(EngineryError, match=problem):
            pyfunc.load_model(url, model_config={"providers": named})
    assert len(pyfunc.load_model(url).predict(TEXTS)) == len(TEXTS)


def test_row_that_is_no_text_is_named(exported, in_mlflow):
    model = in_mlflow(exported("bert", "text-classification"))
    for rows in (["a", 3], [{"text": "a"}, {"text": 3}]):
        with pytest.raises(InputError, match=r"row 1 is int 3, expected a text"):
            model.predict(rows)


def test_pairs_reach_a_classifier_in_every_form(exported, in_mlflow):
    import pandas as pd

    model = in_mlflow(exported("bert", "text-classification"))
    rows = [
        {"text": "The engine is warm.", "text_pair": "the rain is cold"},
        {"text": "The engine is warm."},
    ]
    expected = model.predict(rows)
    assert expected[0] != expected[1], "the second text counts"
    pair = tuple(rows[0].values())
    assert model.predict(pd.DataFrame(rows)) == expected
    assert model.predict([pair]) == model.predict([list(pair)]) == expected[:1]
    best = model.predict(rows, params={"top_k": 1})
    assert [len(answer["labels"]) for answer in best] == [1, 1]


def test_missing_column_or_value_is_an_error(exported):
    import pandas as pd

    model = _load_pyfunc(str(exported("bert", "question-answering").path))
    with pytest.raises(InputError, match=r"has the columns question, expected question, context"):
        model.predict(pd.DataFrame({"question": ["Who?"]}))
    texts = _load_pyfunc(str(exported("bert", "feature-extraction").path))
    with pytest.raises(InputError, match="row 1 has no text"):
        texts.predict(pd.DataFrame({"text": ["a", None]}))


def test_unknown_model_option_is_an_error(artifact):
    with pytest.raises(OptionError, match="did you mean 'providers'"):
        _load_pyfunc(str(artifact.path), {"provide": "cpu"})


def test_loading_the_model_does_not_import_torch(artifact):
    script = (
        "import sys\n"
        "from enginery.publish.pyfunc import _load_pyfunc\n"
        "_load_pyfunc(sys.argv[1]).predict(['a'])\n"
        "print({'torch', 'transformers', 'optimum', 'mlflow'} & set(sys.modules))\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", script, str(artifact.path)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ,
    )
    assert ran.stdout.strip() == "set()"


# The server.


@pytest.mark.more
@pytest.mark.parametrize(
    "task",
    [
        "feature-extraction",
        "text-classification",
        "token-classification",
        "question-answering",
        "fill-mask",
    ],
)
def test_loaded_model_has_the_results_of_the_artifact(server, exported, task):
    import pandas as pd

    artifact = exported("bert", task)
    published = stage.run(artifact, f"mlflow:/{task}", UNVALIDATED)
    model = opened(published.url)
    assert model.metadata.signature is not None
    inputs, table = {
        "question-answering": (
            [("Who built the bridge?", "Ada built the bridge in London.")],
            pd.DataFrame(
                {
                    "question": ["Who built the bridge?"],
                    "context": ["Ada built the bridge in London."],
                }
            ),
        ),
        "fill-mask": (["The engine is [MASK]."], ["The engine is [MASK]."]),
        "text-classification": (TEXTS, pd.DataFrame({"text": TEXTS})),
    }.get(task, (TEXTS, TEXTS))
    with load_model(artifact) as direct:
        expected = direct(inputs)
    answers = model.predict(table)
    if task == "text-classification":
        best = model.predict(table, params={"top_k": 1, "activation": "none"})
        with load_model(artifact) as direct:
            raw = direct.classify(inputs, top_k=1, activation="none")
        assert best == [answer.to_dict() for answer in raw]
    if task == "feature-extraction":
        np.testing.assert_array_equal(answers, expected)
    else:
        plain = [[s.to_dict() for s in a] if isinstance(a, list) else a.to_dict() for a in expected]
        assert answers == plain


def test_images_are_bytes_of_files(server, exported):
    import io

    import pandas as pd
    from PIL import Image

    artifact = exported("vit", "image-classification")
    published = stage.run(artifact, "mlflow:/images", UNVALIDATED)
    stream = io.BytesIO()
    Image.new("RGB", (40, 30), (200, 30, 30)).save(stream, "PNG")
    table = pd.DataFrame({"image": [stream.getvalue()]})
    with load_model(artifact) as direct:
        expected = [a.to_dict() for a in direct.classify_images([stream.getvalue()])]
    assert opened(published.url).predict(table) == expected


def test_same_content_is_one_version(server, artifact):
    first = stage.run(artifact, "mlflow:/once", UNVALIDATED)
    second = stage.run(artifact, "mlflow:/once", replace(UNVALIDATED, alias="production"))
    assert (first.url, first.is_new) == ("mlflow:/once/1", True)
    assert (second.url, second.is_new) == ("mlflow:/once/1", False)
    assert client(server).get_model_version_by_alias("once", "production").version == "1"


@pytest.mark.more
def test_pulled_package_equals_the_published_one(server, artifact, tmp_path):
    whole = large(artifact, tmp_path / "large")
    heard = Heard()
    config = replace(UNVALIDATED, alias="production")
    published = stage.run(whole, "mlflow:/back", config, progress=heard)
    assert any(name.startswith("uploading") for name in heard.tasks)
    for out, url in enumerate((published.url, "mlflow:/back@production", "mlflow:/back")):
        pulled = stage.pull(url, tmp_path / str(out), UNVALIDATED)
        assert pulled.content_sha256() == whole.content_sha256()


def test_version_has_tags_and_description(server, artifact, tmp_path):
    engines = with_an_engine(artifact, tmp_path / "engines")
    published = stage.run(engines, "mlflow:/tags", UNVALIDATED)
    version = client(server).get_model_version("tags", published.version)
    assert len(version.tags[CONTENT]) == 64
    assert version.tags["enginery.validated"] == "false"
    marks = [value for name, value in version.tags.items() if name.startswith("enginery.engine.")]
    assert marks == ["hardware-bound: tensorrt-rtx 1.7.1.116, compute capability 8.9"]
    assert marks[0] in version.description
    run = client(server).get_run(version.run_id)
    assert run.info.status == "FINISHED"
    assert run.data.params["export.opset"] == str(artifact.manifest.stages[0].options["opset"])


@pytest.mark.more
def test_run_has_metrics_and_plots(server, exported, tmp_path):
    from enginery import validate_model

    artifact = exported("bert", "fill-mask", out=str(tmp_path / "artifact"))
    validate_model(artifact)
    checked = Artifact.open(artifact.path)
    checked = checked.annotate(reports={"reports/latency.svg": b"<svg/>"})
    published = stage.run(checked, "mlflow:/metrics", replace(UNVALIDATED, allow_failed=False))
    version = client(server).get_model_version("metrics", published.version)
    metrics = client(server).get_run(version.run_id).data.metrics
    assert any(name.startswith("validation.") for name in metrics)
    assert version.tags["enginery.validated"] == "true"
    plots = [info.path for info in client(server).list_artifacts(version.run_id, "plots")]
    assert plots == ["plots/latency.svg"]


def logged_models(server, name):
    """Return the status of the logged models of this name, and those of their runs."""
    experiment = client(server).get_experiment_by_name("enginery")
    models = client(server).search_logged_models(
        [experiment.experiment_id], filter_string=f"name = '{name}'"
    )
    runs = [client(server).get_run(model.source_run_id) for model in models]
    return sorted(
        (str(model.status), run.info.status) for model, run in zip(models, runs, strict=True)
    )


@pytest.mark.more
@pytest.mark.parametrize("call", ["log_model_artifacts", "create_model_version"])
def test_killed_publish_leaves_no_version_and_the_next_one_is_whole(
    server, artifact, tmp_path, call
):
    """The process is killed after a part of the files, or before the version is registered."""
    name = f"killed-{call}"
    one = altered(artifact, tmp_path / "one", json.dumps({"killed": call}))
    script = (
        "import os, pathlib, signal, sys\n"
        "from mlflow import MlflowClient\n"
        "from enginery.core.artifact.artifact import Artifact\n"
        "from enginery.publish import stage\n"
        "from enginery.publish.config import PublishConfig\n"
        "def stuck(self, *args, **options):\n"
        "    if sys.argv[3] == 'log_model_artifacts':\n"
        "        path = pathlib.Path(args[1], 'data/artifact/model.onnx')\n"
        "        assert path.is_file()\n"
        "        self.log_model_artifact(args[0], str(path), 'data/artifact')\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
        "setattr(MlflowClient, sys.argv[3], stuck)\n"
        "stage.run(Artifact.open(sys.argv[1]), sys.argv[2],\n"
        "          PublishConfig(allow_failed=True))\n"
    )
    ended = subprocess.run(
        [sys.executable, "-c", script, str(one.path), f"mlflow:/{name}", call],
        check=False,
        env=os.environ,
    )
    assert ended.returncode == -9
    is_whole = call == "create_model_version"
    assert logged_models(server, name) == [("READY" if is_whole else "PENDING", "RUNNING")]
    with pytest.raises(RegistryError, match=f"{name} has no versions"):
        stage.pull(f"mlflow:/{name}", tmp_path / "none", UNVALIDATED)
    published = stage.run(one, f"mlflow:/{name}", UNVALIDATED)
    assert (published.version, published.is_new) == ("1", True)
    pulled = stage.pull(published.url, tmp_path / "out", UNVALIDATED)
    assert pulled.content_sha256() == one.content_sha256()


@pytest.mark.more
def test_failed_upload_leaves_no_version(server, artifact, tmp_path, monkeypatch):
    from mlflow import MlflowClient

    one = altered(artifact, tmp_path / "one", '{"failed": 1}')

    def end(*_, **__):
        raise ConnectionError("the network is down")

    with monkeypatch.context() as patch:
        patch.setattr(MlflowClient, "log_model_artifacts", end)
        with pytest.raises(RegistryError, match="the network is down"):
            stage.run(one, "mlflow:/failed", UNVALIDATED)
    assert logged_models(server, "failed") == [("FAILED", "FAILED")]
    assert stage.run(one, "mlflow:/failed", UNVALIDATED).version == "1"


def test_file_changed_while_publishing_leaves_no_version(server, artifact, tmp_path, monkeypatch):
    from mlflow import MlflowClient

    one = altered(artifact, tmp_path / "one", '{"changed": 1}')
    upload = MlflowClient.log_model_artifacts

    def changing(self, *args):
        (one.path / "notes.json").write_text('{"changed": 2}')
        upload(self, *args)

    monkeypatch.setattr(MlflowClient, "log_model_artifacts", changing)
    with pytest.raises(ArtifactError, match=r"notes\.json was changed while it was published"):
        stage.run(one, "mlflow:/changed", UNVALIDATED)
    with pytest.raises(RegistryError, match="changed has no versions"):
        stage.pull("mlflow:/changed", tmp_path / "none", UNVALIDATED)


@pytest.mark.more
def test_concurrent_publishes_of_this_machine_make_one_version(server, artifact, tmp_path):
    one = altered(artifact, tmp_path / "one", '{"twice": 1}')
    command = [sys.executable, "-m", "enginery", "publish", one.path, "mlflow:/twice"]
    children = [
        subprocess.Popen([*command, "--allow-failed"], stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    assert [child.communicate()[0] for child in children] == ["mlflow:/twice/1\n"] * 2


def test_active_run_of_the_caller_stays_active(server, artifact, tmp_path):
    import mlflow

    one = altered(artifact, tmp_path / "one", '{"nested": 1}')
    with mlflow.start_run() as run:
        published = stage.run(one, "mlflow:/nested", UNVALIDATED)
        assert mlflow.active_run().info.run_id == run.info.run_id
    version = client(server).get_model_version("nested", published.version)
    assert version.run_id != run.info.run_id


def test_changed_file_in_the_store_is_an_error_with_its_name(
    server, artifact, tmp_path, tmp_path_factory
):
    changed = altered(artifact, tmp_path / "a", '{"byte": 1}')
    published = stage.run(changed, "mlflow:/byte", UNVALIDATED)
    stored = [
        path
        for path in tmp_path_factory.getbasetemp().rglob("artifacts/**/notes.json")
        if path.read_text() == '{"byte": 1}' and "mlflow" in str(path)
    ]
    assert stored
    for path in stored:
        path.write_text('{"byte": 2}')
    with pytest.raises(ArtifactError, match=r"notes\.json was altered.* and its logged model"):
        stage.pull(published.url, tmp_path / "out", UNVALIDATED)
    assert not (tmp_path / "out").exists()


def test_full_disk_of_a_pull_is_an_error(server, artifact, tmp_path, monkeypatch):
    from enginery.publish.targets.mlflow import registry

    one = altered(artifact, tmp_path / "one", '{"disk": 1}')
    published = stage.run(one, "mlflow:/disk", UNVALIDATED)

    def full(source, target):
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(registry.shutil, "move", full)
    with pytest.raises(
        RegistryError, match=r"No space left on device.*Free disk space, or set TMPDIR"
    ):
        stage.pull(published.url, tmp_path / "out", UNVALIDATED)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("url", ["mlflow:/none", "mlflow:/none/3", "mlflow:/none@production"])
def test_missing_version_is_an_error(server, url, tmp_path):
    with pytest.raises(RegistryError, match="none"):
        stage.pull(url, tmp_path / "out", UNVALIDATED)


@pytest.mark.more
def test_nothing_is_printed_to_standard_output(server, artifact, tmp_path, capfd):
    stage.run(altered(artifact, tmp_path / "quiet", '{"q": 1}'), "mlflow:/quiet", UNVALIDATED)
    assert capfd.readouterr().out == ""
