"""KServe manifests: checked with KServe's schema, Kubernetes' rules, and the options of `serve`."""

import dataclasses
import json
import os
from pathlib import Path

import jsonschema_rs
import pytest
import yaml

from enginery.api import export_kserve, export_triton
from enginery.cli import main
from enginery.core.artifact.artifact import Artifact, commit_artifact
from enginery.core.errors import ArtifactError, OptionError, RejectedArtifactError
from enginery.deploy.kserve.options import KserveConfig
from enginery.deploy.kserve.stage import service_name
from enginery.deploy.triton.options import TritonConfig
from enginery.serve.config import ServeConfig
from tests.core.artifacts import made_for, make, verdict
from tests.engine.made import with_engines
from tests.publish.products import large

SCHEMA = json.loads((Path(__file__).parent / "inferenceservice.v1beta1.json").read_text())
VALIDATOR = jsonschema_rs.Draft202012Validator(SCHEMA)
IMAGE = "registry.example.com/enginery-serve:cuda"
URI = "pvc://models/minilm"
CLASSIC = {"flavor": "tensorrt", "tensorrt": "10.16.1.11"}


@pytest.fixture
def artifact(tmp_path):
    return make(tmp_path / "artifact")


@pytest.fixture
def manifest(artifact, tmp_path):
    """Return a function that writes, checks and reads a manifest: `manifest(runtime="triton")`."""

    def read(**options):
        options = {"storage_uri": URI, "image": IMAGE, **options}
        found = yaml.safe_load(
            export_kserve(artifact, tmp_path / "out", **options).path.read_text()
        )
        check(found)
        return found

    return read


def check(manifest):
    """Check a manifest with the schema, and with rules that the schema cannot express."""
    problems = [f"{e.instance_path}: {e.message}" for e in VALIDATOR.iter_errors(manifest)]
    assert not problems
    assert (manifest["apiVersion"], manifest["kind"]) == (
        "serving.kserve.io/v1beta1",
        "InferenceService",
    )
    predictor = manifest["spec"]["predictor"]
    assert ("model" in predictor) != ("containers" in predictor)
    container = predictor.get("model") or predictor["containers"][0]
    resources = container["resources"]
    # An extended resource is not overcommitted, memory neither; the CPU has no limit.
    for name, limit in resources["limits"].items():
        assert resources["requests"][name] == limit
    assert "cpu" not in resources["limits"]
    mounted = {mount["name"] for mount in container.get("volumeMounts", ())}
    assert mounted == {volume["name"] for volume in predictor.get("volumes", ())}
    for value in manifest["metadata"]["labels"].values():
        assert len(value) <= 63


def test_schema_rejects_misspelled_fields(manifest):
    for spoil in (
        lambda m: m["spec"]["predictor"].update(minReplica=1),
        lambda m: m["spec"]["predictor"]["containers"][0].update(image=7),
        lambda m: m["spec"]["predictor"]["containers"][0].pop("name"),
        lambda m: m["spec"].pop("predictor"),
    ):
        wrong = manifest()
        spoil(wrong)
        assert not VALIDATOR.is_valid(wrong)


def test_container_serves_the_model_that_kserve_mounts(manifest):
    found = manifest(model_name="MiniLM", provider="cpu", gpus=0)
    (container,) = found["spec"]["predictor"]["containers"]
    assert container["name"] == "kserve-container", "KServe looks for that name"
    assert container["image"] == IMAGE
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    assert (env["PROTOCOL"], env["STORAGE_URI"]) == ("v2", URI)
    assert container["args"][:2] == ["serve", "MiniLM=/mnt/models"]
    assert [port["containerPort"] for port in container["ports"]] == [8080]
    assert "nvidia.com/gpu" not in container["resources"]["limits"]
    home = [m["mountPath"] for m in container["volumeMounts"] if not m.get("readOnly")]
    assert env["ENGINERY_HOME"] in home, "the root is read-only"
    security = container["securityContext"]
    assert (security["runAsNonRoot"], security["readOnlyRootFilesystem"]) == (True, True)


def test_arguments_are_options_of_serve(manifest):
    options = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(ServeConfig)}
    (container,) = manifest(allow_failed=True)["spec"]["predictor"]["containers"]
    words = [word.partition("=") for word in container["args"][2:]]
    assert {name for name, _, _ in words} <= options
    given = {name: value for name, _, value in words}
    assert int(given["--port"]) == container["readinessProbe"]["httpGet"]["port"]
    # Kubernetes ends a pod 30 seconds after SIGTERM.
    assert float(given["--drain-delay"]) + float(given["--grace"]) < 30
    assert "--allow-failed" in given
    assert container["readinessProbe"]["httpGet"]["path"] == "/v2/health/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/v2/health/live"


def test_published_image_is_mounted_as_a_volume(manifest):
    found = manifest(storage_uri="oci://ghcr.io/org/minilm@sha256:5f0e")
    predictor = found["spec"]["predictor"]
    (volume,) = (v for v in predictor["volumes"] if v["name"] == "model")
    assert volume["image"] == {"reference": "ghcr.io/org/minilm@sha256:5f0e"}
    (container,) = predictor["containers"]
    assert {"name": "model", "mountPath": "/mnt/models", "readOnly": True} in container[
        "volumeMounts"
    ]
    assert "STORAGE_URI" not in {entry["name"] for entry in container["env"]}
    annotations = found["metadata"]["annotations"]
    assert annotations == {"serving.kserve.io/deploymentMode": "Standard"}


def test_triton_uses_kserves_runtime_with_protocol_v2(manifest):
    found = manifest(
        runtime="triton",
        image="",
        service_account="reader",
        min_replicas=0,
        max_replicas=3,
        gpus=2,
    )
    predictor = found["spec"]["predictor"]
    model = predictor["model"]
    assert model["modelFormat"] == {"name": "triton", "version": "2"}
    assert (model["runtime"], model["protocolVersion"]) == ("kserve-tritonserver", "v2")
    assert model["storageUri"] == URI
    assert "image" not in model
    assert model["resources"]["limits"]["nvidia.com/gpu"] == "2"
    assert (predictor["minReplicas"], predictor["maxReplicas"]) == (0, 3)
    assert predictor["serviceAccountName"] == "reader"
    assert manifest(runtime="triton")["spec"]["predictor"]["model"]["image"] == IMAGE


def test_triton_image_without_enginery_is_noted(artifact, tmp_path):
    found = export_kserve(artifact, tmp_path, storage_uri=URI, runtime="triton")
    assert any("has no enginery" in note for note in found.notes)
    named = export_kserve(artifact, tmp_path, storage_uri=URI, runtime="triton", image=IMAGE)
    assert named.notes == ("each replica requests a GPU; --provider cpu requests none",)


def test_triton_model_has_the_name_from_export_triton(artifact, tmp_path):
    repository = export_triton(artifact, tmp_path / "models", tokenizer=False)
    found = export_kserve(artifact, tmp_path, storage_uri=URI, runtime="triton")
    assert found.model == repository.name


def test_memory_grows_with_the_weights(artifact, tmp_path):
    def memory(artifact, **options):
        found = export_kserve(artifact, tmp_path / "out", storage_uri=URI, image=IMAGE, **options)
        predictor = yaml.safe_load(found.path.read_text())["spec"]["predictor"]
        return predictor["containers"][0]["resources"]["limits"]["memory"]

    assert memory(artifact) == "2Gi", "1 GiB and a little, in whole ones"
    assert memory(artifact, memory="700Mi") == "700Mi"
    os.truncate(artifact.path / "model.onnx", 400 << 20)
    commit_artifact(artifact.path, artifact.manifest)
    assert memory(artifact) == "3Gi", "1 GiB and three times 0.4 GiB, in whole ones"


def test_memory_includes_engines_with_tensorrt_only(artifact, exported, tmp_path):
    built = with_engines(exported("bert", "fill-mask"), tmp_path / "built", CLASSIC)
    found = export_kserve(built, tmp_path, storage_uri=URI, image=IMAGE, provider="tensorrt")
    assert "--providers=tensorrt" in found.path.read_text()
    weighty = large(exported("bert", "fill-mask"), tmp_path / "large")
    assert export_kserve(weighty, tmp_path, storage_uri=URI, image=IMAGE).path.is_file()


@pytest.mark.parametrize("runtime", ["enginery", "triton"])
@pytest.mark.parametrize("scheme", ["pvc", "s3", "https", "oci", "oci+native", "hf"])
def test_every_storage_scheme_of_kserve_is_supported(manifest, scheme, runtime):
    manifest(storage_uri=f"{scheme}://org/models/minilm", runtime=runtime)


# Refused


def test_tensorrt_needs_an_engine_except_in_triton(exported, tmp_path):
    plain = exported("bert", "fill-mask")
    of_rtx = with_engines(plain, tmp_path / "built", {})
    options = {"storage_uri": URI, "image": IMAGE, "provider": "tensorrt"}
    for artifact in (plain, of_rtx):
        with pytest.raises(ArtifactError, match=r"has no engine of TensorRT 10, found (none|\w+-)"):
            export_kserve(artifact, tmp_path / "out", **options)
    options["provider"] = "tensorrt-rtx"
    with pytest.raises(ArtifactError, match=r"no engine of TensorRT for RTX 1, found none") as e:
        export_kserve(plain, tmp_path / "out", **options)
    assert "on any machine, enginery build" in e.value.do
    options["provider"] = "tensorrt"
    assert not (tmp_path / "out").exists()
    built = with_engines(plain, tmp_path / "classic", CLASSIC)
    assert export_kserve(built, tmp_path / "out", **options).path.is_file()
    triton = export_kserve(plain, tmp_path / "triton", **options, runtime="triton")
    assert "nvidia.com/gpu" in triton.path.read_text(), "Triton can build the engine"


@pytest.mark.parametrize("runtime", ["enginery", "triton"])
def test_provider_follows_from_the_artifact(artifact, tmp_path, runtime):
    options = {"storage_uri": URI, "image": IMAGE, "runtime": runtime}
    dynamic = made_for(artifact, tmp_path / "dynamic", target="cpu")
    found = export_kserve(dynamic, tmp_path / "out", **options).path.read_text()
    assert "nvidia.com/gpu" not in found
    with pytest.raises(OptionError, match="option 'gpus' is 2, but provider 'cpu' uses no GPU"):
        export_kserve(dynamic, tmp_path / "out", **options, gpus=2)
    for_tensorrt = made_for(artifact, tmp_path / "int8")
    with pytest.raises(OptionError, match=r"option 'provider' is cuda, but the artifact is int8"):
        export_kserve(for_tensorrt, tmp_path / "out", **options, provider="cuda")
    if runtime == "triton":
        found = export_kserve(for_tensorrt, tmp_path / "out", **options).path.read_text()
        assert "nvidia.com/gpu" in found
    else:
        expected = r"has no engine of TensorRT 10 or TensorRT for RTX 1, found none"
        with pytest.raises(ArtifactError, match=expected):
            export_kserve(for_tensorrt, tmp_path / "out", **options)
        assert "--providers=cuda" in export_kserve(artifact, tmp_path, **options).path.read_text()


@pytest.mark.parametrize(
    ("flavors", "provider", "chosen"),
    [
        (({},), "tensorrt-rtx", "tensorrt-rtx"),
        (({},), "auto", "tensorrt-rtx"),
        (({}, CLASSIC), "auto", "tensorrt"),
        ((CLASSIC,), "auto", "tensorrt"),
        (({}, CLASSIC), "tensorrt-rtx", "tensorrt-rtx"),
    ],
)
def test_provider_is_the_flavor_of_an_engine(exported, tmp_path, flavors, provider, chosen):
    int8 = made_for(exported("bert", "fill-mask"), tmp_path / "int8")
    built = with_engines(int8, tmp_path / "built", *flavors)
    found = export_kserve(
        built, tmp_path / "out", storage_uri=URI, image=IMAGE, provider=provider
    ).path.read_text()
    check(yaml.safe_load(found))
    assert f"--providers={chosen}\n" in found
    assert "nvidia.com/gpu" in found


def test_triton_has_no_tensorrt_for_rtx(manifest):
    with pytest.raises(OptionError, match=r"Triton's ONNX Runtime has no TensorRT for RTX"):
        manifest(runtime="triton", provider="tensorrt-rtx")
    with pytest.raises(OptionError, match=r"Triton's ONNX Runtime has no TensorRT for RTX"):
        TritonConfig(provider="tensorrt-rtx")


def test_changed_artifact_is_an_error_even_if_it_is_already_open(artifact, tmp_path):
    (artifact.path / "model.onnx").write_bytes(b"another graph")
    with pytest.raises(ArtifactError, match=r"model\.onnx"):
        export_kserve(artifact, tmp_path / "out", storage_uri=URI, image=IMAGE)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"storage_uri": "build/minilm"}, "expected an address"),
        ({"storage_uri": "pvc://my models"}, "expected an address"),
        ({"name": "MiniLM_L6"}, "option 'name' is 'MiniLM_L6', expected at most"),
        ({"name": "m" * 54}, "expected at most 53 lowercase"),
        (
            {"name": "m" * 48, "min_replicas": 0},
            "with a letter first, for min_replicas 0",
        ),
        ({"name": "1st"}, "option 'name'"),
        ({"service_account": "a..b"}, "option 'service_account'"),
        ({"service_account": "Reader"}, "option 'service_account'"),
        ({"model_name": "a/b"}, "option 'model_name'"),
        ({"image": ""}, "the runtime enginery needs an image"),
        ({"image": "a b"}, "expected no spaces"),
        ({"memory": "4 GB"}, "option 'memory' is '4 GB', expected a Kubernetes quantity"),
        ({"memory": "0"}, "option 'memory' is '0'"),
        ({"memory": "0Gi"}, "option 'memory' is '0Gi'"),
        ({"memory": "400m"}, "option 'memory' is '400m'"),
        ({"memory": "4"}, "expected a Kubernetes quantity of at least 64Mi"),
        ({"cpu": "auto"}, "option 'cpu' is 'auto'"),
        ({"cpu": "1Gi"}, "option 'cpu' is '1Gi', expected CPU cores"),
        ({"cpu": "0"}, "option 'cpu' is '0'"),
        ({"cpu": "0m"}, "option 'cpu' is '0m'"),
        ({"cpu": "0.0001"}, "option 'cpu' is '0.0001'"),
        ({"provider": "cpu", "gpus": 4}, "option 'gpus' is 4, but provider 'cpu' uses no GPU"),
        ({"runtime": "triton", "model_name": "zz"}, "enginery export-triton --name zz"),
        ({"gpus": 0}, "provider 'cuda' needs a GPU"),
        ({"gpus": -1}, "option 'gpus' is -1"),
        ({"min_replicas": 2}, "option 'max_replicas' is 1, expected at least min_replicas, 2"),
    ],
)
def test_options_that_a_cluster_rejects_are_errors(artifact, tmp_path, options, said):
    with pytest.raises(OptionError) as error:
        export_kserve(artifact, tmp_path / "out", **{"storage_uri": URI, "image": IMAGE, **options})
    assert said in str(error.value)
    assert not (tmp_path / "out").exists()


def test_task_without_a_route_in_serve_needs_triton(artifact, tmp_path):
    manifest = artifact.manifest.model_copy(update={"task": "text-generation"})
    commit_artifact(artifact.path, manifest)
    other = Artifact.open(artifact.path)
    with pytest.raises(OptionError, match="Use --runtime triton"):
        export_kserve(other, tmp_path, storage_uri=URI, image=IMAGE)
    export_kserve(other, tmp_path, storage_uri=URI, runtime="triton")


def test_model_that_generates_is_served_by_enginery(artifact, tmp_path):
    manifest = artifact.manifest.model_copy(update={"task": "text-generation-with-past"})
    commit_artifact(artifact.path, manifest)
    export_kserve(Artifact.open(artifact.path), tmp_path, storage_uri=URI, image=IMAGE)
    assert "enginery serve's models" in (tmp_path / "inferenceservice.yaml").read_text()


def test_failed_artifact_is_not_exported(artifact, tmp_path):
    failed = artifact.annotate(verdict(passed=False), b"")
    with pytest.raises(RejectedArtifactError):
        export_kserve(failed, tmp_path, storage_uri=URI, image=IMAGE)


def test_other_manifest_is_never_overwritten(artifact, tmp_path):
    file = tmp_path / "inferenceservice.yaml"
    file.write_text("kind: InferenceService\n")
    with pytest.raises(ArtifactError, match="was not written by export-kserve"):
        export_kserve(artifact, tmp_path, storage_uri=URI, image=IMAGE)
    assert file.read_text() == "kind: InferenceService\n"
    file.unlink()
    export_kserve(artifact, tmp_path, storage_uri=URI, image=IMAGE)
    export_kserve(artifact, tmp_path, storage_uri=URI, runtime="triton")
    assert "kserve-tritonserver" in file.read_text()
    with pytest.raises(ArtifactError, match="cannot be written"):
        export_kserve(artifact, file, storage_uri=URI, image=IMAGE)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("all-MiniLM-L6-v2", "all-minilm-l6-v2"),
        ("bert_base.uncased", "bert-base-uncased"),
        ("4x-model", "model-4x-model"),
        ("-", "model"),
        ("x" * 46 + "-y", "x" * 46),
        ("x" * 80, "x" * 47),
    ],
)
def test_service_name_is_valid_in_kubernetes(text, name):
    assert service_name(text) == name
    assert KserveConfig(URI, image=IMAGE, name=name, min_replicas=0).name == name


@pytest.mark.parametrize(
    "options",
    [
        {"name": "m" * 53},
        {"service_account": "1.reader.models"},
        {"cpu": "0.5", "memory": "64Mi"},
        {"cpu": "1500m", "memory": "1.5Gi"},
        {"memory": "4G"},
    ],
)
def test_valid_names_and_quantities_of_kubernetes(manifest, options):
    found = manifest(**options)
    assert all(str(value) in json.dumps(found) for value in options.values())


def test_names_too_long_for_some_clusters_are_noted(artifact, tmp_path):
    def notes(**options):
        options = {"storage_uri": URI, "image": IMAGE, "name": "m" * 48, **options}
        options.setdefault("provider", "cpu")
        return export_kserve(artifact, tmp_path, **options).notes

    (said,) = notes()
    assert "the name has 48 characters, but Knative allows 47" in said
    image = "oci://ghcr.io/org/minilm"
    assert not any("Knative" in note for note in notes(storage_uri=image)), "it is Standard"
    assert notes(name="m" * 47) == ()


def test_command_prints_the_result(artifact, tmp_path, capsys):
    words = ["export-kserve", str(artifact.path), str(tmp_path / "out"), "--storage-uri", URI]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--image", IMAGE, "--json"])
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)
    assert (found["name"], found["model"]) == ("name", "name")
    assert Path(found["path"]).is_file()


def test_all_missing_and_wrong_options_are_in_one_message(artifact, tmp_path, capsys):
    def said(*words):
        with pytest.raises(SystemExit) as ended:
            main(["export-kserve", *words])
        assert ended.value.code == 2
        return capsys.readouterr().err

    words = (str(artifact.path), str(tmp_path / "out"))
    found = said(*words)
    assert found.startswith("error: found 2 problems:\n- ")
    assert "--storage-uri is missing. See: enginery export-kserve" in found
    assert "option 'image' is empty" in found
    assert "ARTIFACT, OUT, --storage-uri are missing" in said("--cpu=0")
    assert "option 'cpu' is '0'" in said("--cpu=0")
    found = said(*words, "--storage-uri", URI)
    assert found.startswith("error: option 'image' is empty")
    assert found.count("enginery") == 2, "a single problem is as it was"
    assert "--storage-uri requires an argument" in said(*words, "--image=i", "--storage-uri")
    assert not (tmp_path / "out").exists()
