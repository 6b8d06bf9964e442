import hashlib
import json

import pytest

from enginery.core.errors import SourceError
from enginery.core.json_file import read_json
from enginery.core.model.source import resolve_record, resolve_source
from tests.core.artifacts import start
from tests.publish.targets.hub_server import Repository, hub_server

RESOLVE = """
import json, sys
from enginery.core.errors import EngineryError
from enginery.core.model.source import resolve_source
try:
    source = resolve_source(sys.argv[1], **json.loads(sys.argv[2]))
except EngineryError as error:
    print(json.dumps({"error": type(error).__name__, "message": str(error)}))
else:
    record = source.record.model_dump(mode="json")
    print(json.dumps({**record, "path": str(source.path), "name": source.name}))
"""


def model_directory(path, weights="model.safetensors"):
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text('{"model_type": "bert"}')
    (path / "tokenizer.json").write_text("{}")
    (path / weights).write_bytes(b"weights")
    return path


def test_a_directory_is_found_with_the_hash_of_every_file_that_matters(tmp_path):
    path = model_directory(tmp_path / "minilm")
    (path / "1_Pooling").mkdir()
    (path / "1_Pooling" / "config.json").write_text("{}")
    (path / "README.md").write_text("card")
    (path / "pytorch_model.bin").write_bytes(b"pickle")
    source = resolve_source(str(path))
    assert (source.record.kind, source.record.id, source.name) == ("directory", str(path), "minilm")
    assert source.path == path
    assert sorted(source.record.files) == [
        "1_Pooling/config.json",
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    digest = hashlib.sha256(b"weights").hexdigest()
    assert source.record.files["model.safetensors"] == digest


@pytest.mark.parametrize(
    "name",
    [
        "config.4.0.0.json",
        "tokenizer.4.0.0.json",
        "adapter_config.json",
        "chat_template.jinja",
        "additional_chat_templates/tool_use.jinja",
        "audio_tokenizer_config.json",
    ],
)
def test_every_file_that_a_loader_may_take_in_anothers_place_has_a_hash(tmp_path, name):
    root = model_directory(tmp_path / "model")
    (root / name).parent.mkdir(exist_ok=True)
    (root / name).write_text("{}")
    assert name in resolve_source(str(root)).record.files


def test_the_same_files_elsewhere_are_the_same_source(tmp_path):
    one, two = model_directory(tmp_path / "a"), model_directory(tmp_path / "b")
    assert resolve_source(str(one)).record.sha256 == resolve_source(str(two)).record.sha256
    (two / "tokenizer.json").write_text("[]")
    assert resolve_source(str(one)).record.sha256 != resolve_source(str(two)).record.sha256


def test_git_data_is_no_part_of_a_model_but_a_model_may_lie_below_it(tmp_path):
    path = model_directory(tmp_path / ".git" / "minilm")
    (path / ".git").mkdir()
    (path / ".git" / "hooks.txt").write_text("")
    assert sorted(resolve_source(str(path)).record.files) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]


def test_a_directory_without_config_is_no_model(tmp_path):
    with pytest.raises(
        SourceError, match=r"has no config\.json, so it is not a Hugging Face model"
    ):
        resolve_source(str(tmp_path))


def test_directory_without_weights_is_an_error(tmp_path):
    path = model_directory(tmp_path / "minilm")
    (path / "model.safetensors").unlink()
    with pytest.raises(
        SourceError, match=r"has no weights: expected model\.safetensors or .*, found none"
    ):
        resolve_source(str(path))
    (path / "training_args.bin").write_bytes(b"not weights")
    with pytest.raises(SourceError, match="has no weights"):
        resolve_source(str(path), allow_pickle=True)


@pytest.mark.parametrize("beside", [(), ("decoy.safetensors", "model.pt")])
def test_pickled_weights_are_rejected_unless_allowed(tmp_path, beside):
    path = model_directory(tmp_path / "minilm", weights="pytorch_model.bin")
    for name in beside:
        (path / name).write_bytes(b"")
    said = r"only pickled weights \(pytorch_model\.bin\).*--allow-pickle"
    with pytest.raises(SourceError, match=said):
        resolve_source(str(path))
    source = resolve_source(str(path), allow_pickle=True)
    assert source.pickled
    assert "pytorch_model.bin" in source.record.files
    assert not source.record.files.keys() & {*beside}


@pytest.mark.parametrize("name", ["model.pt", "weights.safetensors", "model.ckpt"])
def test_weights_that_transformers_does_not_look_for_are_none(tmp_path, name):
    path = model_directory(tmp_path / "minilm", weights=name)
    with pytest.raises(SourceError, match=rf"has no weights: .*, found {name}"):
        resolve_source(str(path), allow_pickle=True)


def sharded(path, shards, *, index="model.safetensors.index.json"):
    (path / index).write_text(json.dumps({"weight_map": shards}))
    return path


def test_weights_are_found_in_the_loaders_order(tmp_path):
    path = model_directory(tmp_path / "minilm")
    (path / "pytorch_model.bin").write_bytes(b"older")
    (path / "shard-1.safetensors").write_bytes(b"a")
    sharded(path, {"x": "shard-1.safetensors"})
    one = resolve_source(str(path)).record.files
    assert [name for name in one if name.endswith((".safetensors", ".bin"))] == [
        "model.safetensors"
    ]
    (path / "model.safetensors").unlink()
    two = resolve_source(str(path)).record.files
    assert [name for name in two if name.endswith((".safetensors", ".bin"))] == [
        "shard-1.safetensors"
    ]
    (path / "model.safetensors.index.json").unlink()
    assert resolve_source(str(path), allow_pickle=True).pickled


def test_weights_that_the_configuration_names_are_those(tmp_path):
    path = model_directory(tmp_path / "minilm")
    (path / "best.safetensors").write_bytes(b"best")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(
        json.dumps({**config, "transformers_weights": "best.safetensors"})
    )
    files = resolve_source(str(path)).record.files
    assert "best.safetensors" in files
    assert "model.safetensors" not in files


@pytest.mark.parametrize(
    ("shards", "said"),
    [
        ({"x": "../other.safetensors"}, "expected the name of a file in the same"),
        ({"x": "/etc/passwd"}, "expected the name of a file in the same"),
        ({"x": 3}, "expected the name of a file in the same"),
        ({"x": "missing.safetensors"}, "names missing.safetensors, which is missing"),
        ({"x": "pytorch_model.bin"}, "which has another format"),
        ([], "weight_map is list"),
        ({}, "weight_map is dict"),
        (None, "weight_map is NoneType"),
    ],
)
def test_an_index_that_names_no_shards_beside_it_is_rejected(tmp_path, shards, said):
    path = sharded(model_directory(tmp_path / "minilm", weights="pytorch_model.bin"), shards)
    with pytest.raises(SourceError, match=said):
        resolve_source(str(path), allow_pickle=True)


def test_an_installed_package_is_found_without_importing_it(tmp_path, monkeypatch):
    root = tmp_path / "site" / "weights_package"
    model_directory(root / "deep" / "other")
    model = model_directory(root / "model")
    (root / "__init__.py").write_text("raise RuntimeError('imported')")
    monkeypatch.syspath_prepend(root.parent)
    source = resolve_source("package:weights_package")
    assert (source.record.kind, source.record.id) == ("package", "package:weights_package")
    assert (source.path, source.name) == (model, "weights_package")
    assert resolve_record(source.record).record == source.record


def test_the_first_of_several_models_in_a_package_is_always_the_same(tmp_path, monkeypatch):
    root = tmp_path / "site" / "two_models"
    for name in ("zeta", "alpha", "mid"):
        model_directory(root / name)
    (root / "__init__.py").touch()
    monkeypatch.syspath_prepend(root.parent)
    rglob = type(root).rglob
    for order in (sorted, lambda paths: sorted(paths, reverse=True)):
        monkeypatch.setattr(type(root), "rglob", lambda path, what, by=order: by(rglob(path, what)))
        assert resolve_source("package:two_models").path.name == "alpha"


@pytest.mark.parametrize("name", ["no_such_package", "json.no_such", "", ".", "os", "a b"])
def test_missing_package_gives_the_install_command(name):
    with pytest.raises(
        SourceError, match=r"is not installed\. Install it with: pip install"
    ) as caught:
        resolve_source(f"package:{name}")
    assert f"package:{name}" in str(caught.value)


def test_package_without_a_model_is_an_error():
    with pytest.raises(SourceError, match=r"has no config\.json"):
        resolve_source("package:json")


def test_an_onnx_file_is_a_source(tmp_path):
    path = _onnx_file(tmp_path / "model.onnx")
    source = resolve_source(str(path))
    assert (source.record.kind, source.record.id) == ("onnx", str(path))
    assert source.name == tmp_path.name, "model.onnx tells nothing"
    assert resolve_source(str(_onnx_file(tmp_path / "detector.onnx"))).name == "detector"
    assert list(source.record.files) == ["model.onnx"]
    with pytest.raises(SourceError, match=r"missing\.onnx': no such file"):
        resolve_source(str(tmp_path / "missing.onnx"))


def _onnx_file(path):
    from onnx import TensorProto, helper, save

    value = [helper.make_tensor_value_info(n, TensorProto.FLOAT, [1]) for n in ("x", "y")]
    graph = helper.make_graph([helper.make_node("Identity", ["x"], ["y"])], "g", *_each(value))
    save(helper.make_model(graph), str(path))
    return path


def _each(values):
    return [[value] for value in values]


@pytest.mark.parametrize(
    "model", ["", "a/b/c", "/no/such/directory", "-x", "org/name with spaces", "~no_such_user/x"]
)
def test_invalid_model_name_lists_valid_kinds(model):
    with pytest.raises(SourceError, match=rf"model '{model}': (expected a Hub id|no such)"):
        resolve_source(model)


def test_file_that_is_not_onnx_is_rejected(tmp_path):
    (tmp_path / "model.bin").write_bytes(b"")
    with pytest.raises(SourceError, match="expected a Hub id"):
        resolve_source(str(tmp_path / "model.bin"))


def test_a_source_that_changed_since_the_export_names_the_files(tmp_path):
    path = model_directory(tmp_path / "minilm")
    record = resolve_source(str(path)).record
    assert resolve_record(record).record == record
    (path / "model.safetensors").write_bytes(b"trained")
    (path / "vocab.txt").write_text("a")
    (path / "tokenizer.json").unlink()
    with pytest.raises(
        SourceError, match=r"since the export: model.safetensors, tokenizer.json, vo"
    ):
        resolve_record(record)


def test_pickled_source_must_be_allowed_each_time(tmp_path):
    path = model_directory(tmp_path / "minilm", weights="pytorch_model.bin")
    record = resolve_source(str(path), allow_pickle=True).record
    with pytest.raises(SourceError, match="--allow-pickle"):
        resolve_record(record)
    assert resolve_record(record, allow_pickle=True).record == record


@pytest.mark.parametrize(
    ("content", "message"),
    [(b"{", "is not valid JSON"), (b"\xff", "is not valid JSON"), (b"[]", "holds a list")],
)
def test_json_that_is_no_object_is_named(tmp_path, content, message):
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(SourceError, match=message):
        read_json(tmp_path / "config.json")
    assert read_json(tmp_path / "absent.json") == {}


# The Hub, in a child process: its library reads HF_ENDPOINT when it is imported.

TOKEN = "hf_" + "Secret" * 6


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    for name in ("HF_HUB_OFFLINE", "HF_HUB_CACHE", "TRANSFORMERS_OFFLINE"):
        monkeypatch.delenv(name, raising=False)
    with hub_server() as server:
        server.repositories["org/name"] = Repository(private=False)
        monkeypatch.setenv("HF_ENDPOINT", server.endpoint)
        yield server


@pytest.fixture
def repository(hub):
    """Return the repository org/name, whose first commit has the tag v1."""
    files = {
        "config.json": b"{}",
        "tokenizer.json": b'{"a": 1}',
        "model.safetensors": b"weights",
        "README.md": b"card",
        "onnx/model.onnx": b"graph",
    }
    made = hub.repositories["org/name"]
    made.tags["v1"] = made.commit("main", files, "first")
    return made


def downloads(hub):
    return sorted({path.split("/resolve/")[1] for path in hub.requests if "/resolve/" in path})


def resolve(model, **options):
    with start(RESOLVE, model, json.dumps(options)) as child:
        found, said = child.communicate()
    assert child.returncode == 0, said
    assert TOKEN not in found
    assert TOKEN not in said
    return json.loads(found)


def test_a_hub_model_is_downloaded_at_one_commit_even_when_main_moves(hub, repository):
    hub.on_info = lambda: repository.commit("main", {}, "next")
    found = resolve("org/name")
    commit = repository.tags["v1"]
    assert (found["kind"], found["id"], found["revision"]) == ("hub", "org/name", commit)
    assert sorted(found["files"]) == ["config.json", "model.safetensors", "tokenizer.json"]
    assert downloads(hub) == [f"{commit}/{name}" for name in sorted(found["files"])]
    assert found["name"] == "name"
    assert hub.tokens == {f"Bearer {TOKEN}"}


@pytest.mark.more
@pytest.mark.parametrize(
    ("model", "options"), [("org/name@v1", {}), ("org/name", {"revision": "v1"})]
)
def test_a_hub_revision_is_named_in_either_way(repository, model, options):
    repository.commit("main", {}, "next")
    found = resolve(model, **options)
    assert (found["id"], found["revision"]) == ("org/name", repository.tags["v1"])


@pytest.mark.more
def test_a_hub_model_with_pickled_weights_is_rejected_before_the_download(hub, repository):
    files = repository.commits[repository.tags["v1"]]
    files["pytorch_model.bin"] = files.pop("model.safetensors")
    found = resolve("org/name")
    assert found["error"] == "SourceError"
    assert "only pickled weights (pytorch_model.bin)" in found["message"]
    assert downloads(hub) == []
    assert "pytorch_model.bin" in resolve("org/name", allow_pickle=True)["files"]


@pytest.mark.more
@pytest.mark.parametrize(
    ("refusal", "reason"),
    [
        ((404, "RepoNotFound"), "the model does not exist or is private"),
        ((401, "RepoNotFound"), "the model does not exist or is private"),
        ((404, "RevisionNotFound"), "the model has no such revision"),
        ((403, "GatedRepo"), "it is gated, and this account has no access"),
        ((500, ""), "500 Server Error"),
    ],
)
def test_hub_errors_are_described_without_the_token(hub, refusal, reason):
    hub.refusal = (*refusal, "")
    found = resolve("org/name")
    assert found["error"] == "SourceError"
    assert found["message"].startswith(
        "model 'org/name' at revision 'main' cannot be downloaded from the"
    )
    assert reason in found["message"]
    assert "HF_TOKEN" in found["message"]


@pytest.mark.more
def test_without_a_network_an_earlier_download_serves_and_anything_else_is_an_error(
    repository, monkeypatch
):
    first = resolve("org/name")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")  # nobody listens there
    assert resolve("org/name") == first
    assert resolve("org/name", revision=repository.tags["v1"]) == first
    for model in ("org/name@v1", "org/other"):
        message = resolve(model)["message"]
        assert "cannot be downloaded from the Hub: http://127.0.0.1:9 cannot be reached" in message
        assert "Retr" not in message
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert "HF_HUB_OFFLINE is set" in resolve("org/other")["message"]


def test_downloads_go_where_cache_dir_says(repository, tmp_path):
    found = resolve("org/name", cache_dir=str(tmp_path / "elsewhere"))
    assert found["path"].startswith(str(tmp_path / "elsewhere"))


@pytest.mark.more
@pytest.mark.parametrize("model", ["org/na--me", "org/na..me", "org/name-", "o" * 97])
def test_an_id_that_the_hub_forbids_is_an_error_and_not_a_traceback(hub, model):
    found = resolve(model)
    assert found["error"] == "SourceError"
    assert f"model '{model}' is not a Hub id" in found["message"]
    assert hub.requests == []
