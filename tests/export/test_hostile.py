"""Hostile models that try to run their author's code, or to have other files copied.

The tests run the real stages; a marker file shows whether code ran.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys

import pytest

from enginery import bench_model, export_model, validate_model
from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import ArtifactError, EngineryError, SourceError, UntrustedModelError
from enginery.core.trust.confinement import stay_offline
from enginery.core.versions import TRANSFORMERS5, transformers_family
from tests.environments import needs_transformers5
from tests.export.test_stage import save_own_model


@pytest.fixture
def marker(tmp_path, monkeypatch):
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    return tmp_path / "ran"


@pytest.fixture
def bert(tiny_model, tmp_path):
    """Return a function that copies a tiny model and sets keys in its config.json."""

    def make(name="model", **changes):
        out = tmp_path / name
        shutil.copytree(tiny_model("bert", "text-classification"), out)
        edit(out / "config.json", **changes)
        return out

    return make


def edit(file, **changes):
    found = json.loads(file.read_text()) if file.exists() else {}
    file.write_text(json.dumps({**found, **changes}))


def payload(marker):
    return f"open({str(marker)!r}, 'a').write('ran')\n"


OWN_TYPE = {
    "model_type": "mine",
    "auto_map": {
        "AutoConfig": "evil.Config",
        "AutoModelForSequenceClassification": "evil.Model",
        "AutoModel": "evil.Model",
    },
}


@pytest.mark.parametrize("exporter", ["optimum", pytest.param("dynamo", marks=pytest.mark.more)])
def test_own_code_does_not_run_without_consent(bert, marker, exporter):
    model = bert(**OWN_TYPE)
    (model / "evil.py").write_text(payload(marker))
    with pytest.raises(UntrustedModelError, match=r"evil\.py.*--trust-remote-code"):
        export_model(str(model), task="text-classification", exporter=exporter)
    assert not marker.exists()


@pytest.mark.more
@pytest.mark.parametrize("exporter", ["optimum", pytest.param("dynamo", marks=pytest.mark.more)])
def test_code_beside_a_type_of_transformers_is_not_used(bert, marker, exporter):
    """Many published models have both; transformers' own class is sufficient and safe."""
    model = bert(auto_map={"AutoModelForSequenceClassification": "evil.Model"})
    (model / "evil.py").write_text(payload(marker))
    edit(model / "tokenizer_config.json", auto_map={"AutoTokenizer": ["evil.T", "evil.T"]})
    artifact = export_model(str(model), task="text-classification", exporter=exporter)
    assert validate_model(artifact).passed
    assert not marker.exists()
    assert not (artifact.path / "evil.py").exists()


def test_code_of_a_nested_configuration_does_not_run(tmp_path, marker):
    """CVE-2026-5241: a configuration that grants itself trust for code elsewhere on the disk."""
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "evil.py").write_text(payload(marker))
    (elsewhere / "config.json").write_text(
        json.dumps({"model_type": "notreal", "auto_map": {"AutoConfig": "evil.Config"}})
    )
    model = tmp_path / "model"
    model.mkdir()
    (model / "model.safetensors").write_bytes(b"")
    nested = {"model_type": "notreal", "_name_or_path": str(elsewhere)}
    config = {"model_type": "lightglue", "keypoint_detector_config": nested}
    for trust, exporter in (({"trust_remote_code": True}, "optimum"), ({}, "dynamo")):
        (model / "config.json").write_text(json.dumps({**config, **trust}))
        with pytest.raises(UntrustedModelError) as caught:
            export_model(str(model), task="feature-extraction", exporter=exporter)
        assert "dynamo" not in str(caught.value)
    assert not marker.exists()


@pytest.mark.parametrize("key", ["_attn_implementation", "_attn_implementation_internal"])
def test_attention_of_a_repository_is_not_loaded(bert, key):
    """CVE-2026-4372."""
    model = bert(**{key: "org/kernel"})
    with pytest.raises(UntrustedModelError, match=f"{key} is 'org/kernel'"):
        export_model(str(model))


@pytest.mark.more
def test_code_that_generates_is_not_loaded(tiny_model, tmp_path, marker):
    model = tmp_path / "model"
    shutil.copytree(tiny_model("gpt2", "text-generation"), model)
    (model / "custom_generate").mkdir()
    for name in ("custom_generate/generate.py", "evil.py"):
        (model / name).write_text(payload(marker))
    edit(model / "generation_config.json", custom_generate="custom_generate")
    edit(model / "config.json", auto_map={"AutoModelForCausalLM": "evil.Model"})
    if transformers_family() == TRANSFORMERS5:
        artifact = export_model(str(model))
        assert validate_model(artifact, effort="quick").passed
        assert not list(artifact.path.rglob("*.py"))
    else:  # transformers 4 looks for the file with every model
        with pytest.raises(UntrustedModelError, match=r"custom_generate/generate\.py"):
            export_model(str(model))
    assert not marker.exists()


def test_kernels_of_the_hub_are_switched_off(monkeypatch):
    for name in ("HF_HUB_OFFLINE", "USE_HUB_KERNELS"):
        monkeypatch.setenv(name, "1")
    stay_offline()
    assert (os.environ["HF_HUB_OFFLINE"], os.environ["USE_HUB_KERNELS"]) == ("1", "0")


@needs_transformers5
def test_transformers_takes_the_switch_for_kernels(monkeypatch):
    monkeypatch.setenv("USE_HUB_KERNELS", "0")
    look = "from transformers.integrations import hub_kernels; print(hub_kernels._kernels_enabled)"
    done = subprocess.run([sys.executable, "-c", look], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


class _Runs:
    def __init__(self, marker):
        self.marker = marker

    def __reduce__(self):
        return (exec, (payload(self.marker),))


def pickled(model, marker):
    import torch

    torch.save({"weight": _Runs(marker)}, model / "pytorch_model.bin")


def test_stray_safetensors_file_does_not_allow_pickled_weights(bert, marker):
    model = bert()
    (model / "model.safetensors").rename(model / "decoy.safetensors")
    pickled(model, marker)
    with pytest.raises(SourceError, match=r"only pickled weights \(pytorch_model\.bin\)"):
        export_model(str(model))
    # If allowed, they are read by an unpickler that runs no code.
    with pytest.raises(EngineryError, match="cannot load"):
        export_model(str(model), allow_pickle=True)
    assert not marker.exists()


def test_changed_weights_are_exported_again_whatever_is_beside_them(bert):
    import torch
    from safetensors.torch import load_file, save_file

    model = bert()
    weights = load_file(model / "model.safetensors")
    torch.save(weights, model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    save_file({"x": torch.zeros(1)}, model / "decoy.safetensors")
    first = export_model(str(model), allow_pickle=True)
    assert list(first.manifest.source.files) == sorted(first.manifest.source.files)
    assert "pytorch_model.bin" in first.manifest.source.files
    assert "decoy.safetensors" not in first.manifest.source.files
    torch.save({name: tensor * 2 for name, tensor in weights.items()}, model / "pytorch_model.bin")
    assert export_model(str(model), allow_pickle=True).path != first.path


def test_tensorflow_weights_do_not_replace_damaged_ones(bert):
    """Optimum would load tf_model.h5, which is not hashed, with Keras."""
    model = bert()
    (model / "model.safetensors").write_bytes(b"damaged")
    (model / "tf_model.h5").write_bytes(b"anything")
    with pytest.raises(EngineryError, match=r"cannot load .*: Error while deserializing header"):
        export_model(str(model))


@pytest.mark.parametrize("names", [["../model.safetensors"], ["/etc/passwd"], ["a/b.safetensors"]])
def test_shard_index_only_names_files_of_its_directory(bert, names):
    model = bert()
    (model / "model.safetensors").unlink()
    index = {"weight_map": {str(number): name for number, name in enumerate(names)}}
    (model / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(SourceError, match="expected the name of a file in the same"):
        export_model(str(model))


def test_linked_side_files_are_not_copied(bert, tmp_path):
    model = bert()
    (tmp_path / "secret").write_text("secret")
    (model / "added_tokens.json").symlink_to(tmp_path / "secret")
    with pytest.raises(UntrustedModelError, match=r"added_tokens\.json is a link"):
        export_model(str(model))


@pytest.mark.more
def test_code_in_the_working_directory_is_not_imported(bert, marker, tmp_path):
    """Users change into a downloaded model's directory and export it there."""
    model = bert()
    for name in ("torch", "transformers", "onnx", "json"):
        (model / f"{name}.py").write_text(payload(marker) + "raise ImportError\n")
    program = "from enginery import export_model; print(export_model('.', force=True).path)"
    found = subprocess.run(
        [sys.executable, "-P", "-c", program],
        cwd=model,
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 0, found.stderr
    assert not marker.exists()


@pytest.fixture
def own_code(tmp_path, marker):
    """Write a model of its own type, whose code works and creates a marker file."""
    return save_own_model(tmp_path / "own", before=payload(marker))


@pytest.mark.more
def test_an_artifact_grants_no_trust_to_its_own_source(own_code, marker):
    """Its manifest records that the export was allowed to run the code; that is no permission."""
    artifact = export_model(
        str(own_code), task="text-classification", exporter="dynamo", trust_remote_code=True
    )
    assert artifact.manifest.trust_remote_code
    marker.unlink()
    with pytest.raises(UntrustedModelError, match=r"modeling_mine\.py.*--trust-remote-code"):
        validate_model(artifact)
    with pytest.raises(UntrustedModelError, match=r"modeling_mine\.py.*--trust-remote-code"):
        bench_model(artifact, against="pytorch", batch="1", sequence="8", max_seconds=1)
    assert not marker.exists()
    assert validate_model(artifact, trust_remote_code=True, effort="quick").passed
    assert marker.exists()


@pytest.mark.more
def test_an_artifact_grants_nothing_to_pickled_weights(bert, marker):
    import torch
    from safetensors.torch import load_file

    model = bert()
    torch.save(load_file(model / "model.safetensors"), model / "pytorch_model.bin")
    (model / "model.safetensors").unlink()
    artifact = export_model(str(model), allow_pickle=True)
    with pytest.raises(SourceError, match=r"only pickled weights.*--allow-pickle"):
        validate_model(artifact)
    assert validate_model(artifact, allow_pickle=True).passed


def test_parent_package_is_not_imported(tiny_model, tmp_path, monkeypatch, marker):
    root = tmp_path / "site/evilp"
    shutil.copytree(tiny_model("bert", "text-classification"), root / "sub/model")
    (root / "__init__.py").write_text(payload(marker))
    (root / "sub/__init__.py").write_text(payload(marker))
    monkeypatch.syspath_prepend(root.parent)
    artifact = export_model("package:evilp.sub")
    assert artifact.manifest.source.id == "package:evilp.sub"
    assert not marker.exists()


@pytest.mark.parametrize("report", ["../victim.json", "/tmp/enginery-victim.json"])
def test_export_over_an_artifact_creates_nothing_outside(bert, tmp_path, report):
    """With a verdict whose report was elsewhere, `export --out` used to write there."""
    from tests.core.artifacts import edit_manifest, verdict

    model = bert()
    out = tmp_path / "deep/out"
    export_model(str(model), out=out)
    edit_manifest(out, verdicts=[{**verdict().model_dump(), "report": report}])
    with pytest.raises(ArtifactError):
        Artifact.open(out)
    export_model(str(model), out=out)
    assert Artifact.open(out, verify=True).manifest.verdicts == ()
    assert not (out / report).resolve().exists()


def test_bad_weights_are_an_error_about_the_weights(bert):
    model = bert()
    (model / "model.safetensors").unlink()
    (model / "pytorch_model.bin").write_bytes(b"no weights at all")
    with pytest.raises(EngineryError, match="cannot load") as caught:
        export_model(str(model), allow_pickle=True)
    assert "tensorflow" not in str(caught.value).lower()


@pytest.mark.more
def test_stopped_process_is_reported_as_a_hostile_model(tiny_model, tmp_path, marker):
    """The last defence after screening; the test plants a weakness in the loader."""
    model = tmp_path / "model"
    shutil.copytree(tiny_model("bert", "text-classification"), model)
    (model / "evil.py").write_text(payload(marker))
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(
        "import builtins, sys\n"
        "def weakness(event, arguments):\n"
        "    if event == 'open' and str(arguments[0]).endswith('config.json') and (\n"
        "            'enginery.export.worker' in sys.orig_argv):\n"
        "        try:\n"
        f"            exec(compile(open({str(model / 'evil.py')!r}).read(), 'x', 'exec'))\n"
        "        except Exception:\n"
        "            pass\n"
        "sys.addaudithook(weakness)\n"
    )
    path = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])])
    found = subprocess.run(
        [sys.executable, "-m", "enginery", "export", str(model), "--force"],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        check=False,
    )
    assert found.returncode == 2, found.stdout + found.stderr
    assert "the model tried to run" in found.stderr
    assert "Traceback" not in found.stderr
