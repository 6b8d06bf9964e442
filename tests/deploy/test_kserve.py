"""KServe manifests: checked with KServe's schema, Kubernetes' rules, and the options of `serve`."""

import dataclasses
import json
import os
from pathlib import Path

import jsonschema_rs
import pytest
import yaml

from enginery.api import export_kserve
from enginery.cli import main
from enginery.core.artifact.artifact import Artifact, commit_artifact
from enginery.core.errors import ArtifactError, OptionError, RejectedArtifactError
from enginery.deploy.kserve.options import KserveConfig
from enginery.deploy.kserve.stage import service_name
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
    """Return a function that writes, checks and reads a manifest: `manifest(gpus=2)`."""

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
    (container,) = predictor["containers"]
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
    found = manifest(provider="cpu", replicas=3)
    (container,) = found["spec"]["predictor"]["containers"]
    assert container["name"] == "kserve-container", "KServe looks for that name"
    assert container["image"] == IMAGE
    env = {entry["name"]: entry["value"] for entry in container["env"]}
    assert (env["PROTOCOL"], env["STORAGE_URI"]) == ("v2", URI)
    assert container["args"][:2] == ["serve", "name=/mnt/models"]
    predictor = found["spec"]["predictor"]
    assert (predictor["minReplicas"], predictor["maxReplicas"]) == (3, 3)
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


@pytest.mark.parametrize("scheme", ["pvc", "s3", "https", "oci", "oci+native", "hf"])
def test_every_storage_scheme_of_kserve_is_supported(manifest, scheme):
    manifest(storage_uri=f"{scheme}://org/models/minilm")


# Refused


def test_tensorrt_needs_an_engine(exported, tmp_path):
    plain = exported("bert", "fill-mask")
    of_rtx = with_engines(plain, tmp_path / "built", {})
    options = {"storage_uri": URI, "image": IMAGE, "provider": "tensorrt"}
    for artifact in (plain, of_rtx):
        with pytest.raises(ArtifactError, match=r"has no engine of TensorRT 10, found (none|\w+-)"):
            export_kserve(artifact, tmp_path / "out", **options)
    options["provider"] = "tensorrt-rtx"
    with pytest.raises(ArtifactError, match=r"no engine of TensorRT for RTX 1, found none") as e:
        export_kserve(plain, tmp_path / "out", **options)
    assert f"enginery build {plain.path}" in e.value.do
    options["provider"] = "tensorrt"
    assert not (tmp_path / "out").exists()
    built = with_engines(plain, tmp_path / "classic", CLASSIC)
    assert export_kserve(built, tmp_path / "out", **options).path.is_file()


def test_provider_follows_from_the_artifact(artifact, tmp_path):
    options = {"storage_uri": URI, "image": IMAGE}
    dynamic = made_for(artifact, tmp_path / "dynamic", target="cpu")
    found = export_kserve(dynamic, tmp_path / "out", **options).path.read_text()
    assert "nvidia.com/gpu" not in found
    for_tensorrt = made_for(artifact, tmp_path / "int8")
    with pytest.raises(OptionError, match=r"option 'provider' is cuda, but the artifact is int8"):
        export_kserve(for_tensorrt, tmp_path / "out", **options, provider="cuda")
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
        ({"name": "1st"}, "option 'name'"),
        ({"image": ""}, "option 'image' is '', expected the name"),
        ({"image": "a b"}, "option 'image' is 'a b'"),
        ({"gpus": 0}, "option 'gpus' is 0, expected 1 or more"),
        ({"cpu": "many"}, "option 'cpu' is 'many', expected a value such as 2 or 500m"),
        ({"memory": "400m"}, "option 'memory' is '400m', expected a value such as 4Gi, or auto"),
        ({"replicas": 0}, "option 'replicas' is 0"),
    ],
)
def test_options_that_a_cluster_rejects_are_errors(artifact, tmp_path, options, said):
    with pytest.raises(OptionError) as error:
        export_kserve(artifact, tmp_path / "out", **{"storage_uri": URI, "image": IMAGE, **options})
    assert said in str(error.value)
    assert not (tmp_path / "out").exists()


def test_task_without_a_route_in_serve_is_an_error(artifact, tmp_path):
    manifest = artifact.manifest.model_copy(update={"task": "text-generation"})
    commit_artifact(artifact.path, manifest)
    other = Artifact.open(artifact.path)
    with pytest.raises(OptionError, match="`enginery serve` supports"):
        export_kserve(other, tmp_path, storage_uri=URI, image=IMAGE)


def test_model_that_generates_is_served_by_enginery(artifact, tmp_path):
    manifest = artifact.manifest.model_copy(update={"task": "text-generation-with-past"})
    commit_artifact(artifact.path, manifest)
    export_kserve(Artifact.open(artifact.path), tmp_path, storage_uri=URI, image=IMAGE)
    assert (tmp_path / "inferenceservice.yaml").is_file()


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
    export_kserve(artifact, tmp_path, storage_uri="s3://a/b", image=IMAGE)
    assert "s3://a/b" in file.read_text()
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
    assert KserveConfig(URI, image=IMAGE, name=name).name == name


def test_command_prints_the_result(artifact, tmp_path, capsys):
    words = ["export-kserve", str(artifact.path), str(tmp_path / "out"), "--storage-uri", URI]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--image", IMAGE, "--json"])
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)
    assert (found["name"], found["model"]) == ("name", "name")
    assert Path(found["path"]).is_file()
