"""Engines at run time: which is opened, which request goes where. No engine runs here.

A session of the plain graph on the CPU stands in for the one over an engine, and the GPU's identity
is made up; the last test is for a machine that has one.
"""

import numpy as np
import pytest

from enginery.core.artifact.artifact import Artifact
from enginery.core.errors import ArtifactError, EngineryError, ProviderError, ShapeError
from enginery.core.shapes import Profile, TensorSpec
from enginery.runtime.engines import compatibility as engine_fit
from enginery.runtime.engines import selection as engines
from enginery.runtime.engines.padding import dim_sizes, max_rows, padded_sizes
from enginery.runtime.model import load_model
from enginery.runtime.onnxruntime import runner as ort_runner
from enginery.runtime.onnxruntime.runner import OrtRunner, open_session
from enginery.runtime.providers import selection
from enginery.runtime.providers.gpus import CudaGpu, visible_gpus
from enginery.runtime.providers.known import CPU, CUDA, TENSORRT, TENSORRT_RTX
from enginery.runtime.providers.selection import Provider
from enginery.runtime.providers.specification import parse_providers
from enginery.runtime.tensorrt.options import CLASSIC, RTX
from tests.core.artifacts import edit_manifest
from tests.engine.made import engine_record, with_engines, write_engine
from tests.tolerances import SCORES

TEXTS = [
    "The engine is warm and the pump runs again.",
    "A cat.",
    "Who built the bridge over the river in London?",
    "Nobody knows, but Ada Lovelace wrote about it.",
    "rain",
    "The bell rings at noon; the rain is cold.",
    "Marie Curie lived in Paris, not far from the Seine.",
]


@pytest.fixture
def bert(tiny):
    return tiny.artifact("bert", "text-classification")


@pytest.fixture
def made(bert, tmp_path):
    """`made({...}, {...})`: the artifact with an engine for each dict of changes."""
    return lambda *changes: with_engines(bert, tmp_path / "artifact", *changes)


class Machine:
    """What a test says of the GPU and of TensorRT, and what sessions were asked to run."""

    def __init__(self):
        self.gpu = CudaGpu("NVIDIA L4", "8.9", 24 << 30)
        self.others = ()
        self.tensorrt = "1.7.1"
        self.opened = []
        self.ran = []


@pytest.fixture
def machine(monkeypatch):
    """A GPU on which every provider can be had; the CPU stands in for its sessions."""
    machine = Machine()

    def open_engine(engine, given, **_):
        machine.opened.append(engine.name)
        artifact = Artifact.open(engine.path.parent.parent)
        session = open_session(artifact.path / engine.record.graph, [Provider(CPU, "a double")])

        class Recorded:
            def run(self, names, feeds):
                machine.ran.append((engine.record.profiles, feeds["input_ids"].shape))
                return session.run(names, feeds)

        return Recorded()

    monkeypatch.setattr(ort_runner, "open_engine", open_engine)
    monkeypatch.setattr(engines, "visible_gpus", lambda: (machine.gpu, *machine.others))
    monkeypatch.setattr(engines, "loaded_version", lambda flavor: machine.tensorrt)
    monkeypatch.setattr(selection, "unavailable_reason", lambda name, options: None)
    monkeypatch.setattr(selection, "provider_warning", lambda name: "")
    return machine


def chosen(artifact, *, requested=("tensorrt-rtx",), **options):
    with OrtRunner(artifact, providers=requested, **options) as runner:
        return [engine.record for engine in runner.engines], runner.providers


def feeds(rows, tokens):
    ids = np.full((rows, tokens), 7, np.int64)
    return {
        "input_ids": ids,
        "attention_mask": np.ones_like(ids),
        "token_type_ids": np.zeros_like(ids),
    }


def test_engine_for_this_gpu_is_opened_with_the_reason(made, machine):
    artifact = made({"capabilities": ("8.0",)}, {"capabilities": ("8.6", "8.9")})
    (record,), (head, *_) = chosen(artifact)
    assert record.capabilities == ("8.6", "8.9")
    assert machine.opened == [record.directory_name]
    assert head.name == TENSORRT_RTX
    assert head.reason == (
        f"NVIDIA L4 (8.9) runs the engine {record.directory_name} (TensorRT 1.7.1.116 for 8.6, "
        "8.9) with the profile batch=1:2:4,sequence=1:16:64"
    )


def on_second_gpu(provider):
    return parse_providers(provider, [f"{provider}.device_id=1"])


def test_engines_are_judged_by_the_gpu_that_is_requested(made, machine):
    machine.others = (CudaGpu("NVIDIA A10", "8.6", 1),)
    artifact = made({"capabilities": ("8.6",)}, {"capabilities": ("8.9",)})
    (record,), (head, *_) = chosen(artifact, requested=on_second_gpu("tensorrt-rtx"))
    assert record.capabilities == ("8.6",)
    assert head.reason.startswith("NVIDIA A10 (8.6) runs the engine ")
    assert head.options == {"device_id": "1"}
    (record,), _ = chosen(artifact)
    assert record.capabilities == ("8.9",)


@pytest.mark.parametrize(
    ("visible", "number"), [("", "1"), ("4,6", "6"), ("GPU-a, GPU-b", "GPU-b")]
)
def test_engine_for_another_gpu_is_built_where_that_is_the_first(
    made, machine, monkeypatch, visible, number
):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    machine.others = (CudaGpu("NVIDIA A10", "8.6", 1),)
    with pytest.raises(ProviderError, match="this GPU, NVIDIA A10 of") as error:
        chosen(made({"capabilities": ("8.9",)}), requested=on_second_gpu("tensorrt-rtx"))
    assert error.value.do.startswith(f"Build one: CUDA_VISIBLE_DEVICES={number} enginery build ")


def test_missing_gpu_is_an_error_with_the_visible_gpus(made, machine):
    with pytest.raises(ProviderError, match="device_id is 1, but this process sees the GPUs 0 NV"):
        chosen(made({}), requested=on_second_gpu("tensorrt"))


@pytest.mark.parametrize("requested", [("tensorrt-rtx",), ("tensorrt-rtx", "cuda", "cpu")])
def test_nothing_but_the_cpu_is_beneath_an_engine(made, machine, requested):
    _, given = chosen(made({}), requested=requested)
    assert [provider.name for provider in given] == [TENSORRT_RTX, CPU]


def test_cuda_is_not_put_beneath_a_plugin_which_takes_no_other_names(made, machine, monkeypatch):
    monkeypatch.setattr(ort_runner, "open_session", lambda *_, **__: None)
    _, given = chosen(made(), allow_build=True)
    assert [provider.name for provider in given] == [TENSORRT_RTX, CPU]


def test_an_engine_for_this_gpu_goes_before_one_for_many_and_before_a_portable_one(made, machine):
    artifact = made(
        {"capabilities": ()}, {"capabilities": ("8.0", "8.6", "8.9")}, {"capabilities": ("8.9",)}
    )
    (record,), _ = chosen(artifact)
    assert record.capabilities == ("8.9",)
    machine.gpu = CudaGpu("NVIDIA A10", "8.6", 1)
    (record,), _ = chosen(artifact)
    assert record.capabilities == ("8.0", "8.6", "8.9")
    machine.gpu = CudaGpu("NVIDIA RTX PRO 6000", "12.0", 1)
    (record,), _ = chosen(artifact)
    assert record.capabilities == ()


def test_artifact_without_engines_is_an_error_with_the_build_command(made, machine):
    artifact = made()
    with pytest.raises(ProviderError) as error:
        load_model(artifact, providers="tensorrt-rtx")
    assert error.value.message == (
        f"{artifact.path} has no engine of model.onnx that TensorRT for RTX runs on this GPU, "
        "NVIDIA L4 of compute capability 8.9, it has none."
    )
    assert error.value.do == (
        f"Build one: enginery build {artifact.path} --flavor tensorrt-rtx --capability current "
        "--profile batch=1:8:32,sequence=1:8:32"
    )
    assert machine.opened == []


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"capabilities": ("8.0",)}, "it is not for compute capability 8.9"),
        ({"flavor": "tensorrt"}, "it is for the flavor tensorrt"),
        ({"tensorrt": "1.6.9.1"}, "this machine has TensorRT 1.7.1"),
        ({"graph_sha256": "0" * 64}, "it was built from another model.onnx"),
    ],
)
def test_incompatible_engine_is_named_with_the_reason(made, machine, changes, problem):
    artifact = made(changes)
    name = engine_record(artifact, **changes).directory_name
    with pytest.raises(ProviderError) as error:
        chosen(artifact)
    assert f": {name} (TensorRT " in error.value.message
    assert f"): {problem}" in error.value.message
    assert machine.opened == []


CLASSIC_HERE = {"flavor": "tensorrt", "tensorrt": "10.13.2.6", "capabilities": ("8.9",)}


@pytest.mark.parametrize(
    ("compatibility", "gpu", "problem"),
    [
        ("none", CudaGpu("NVIDIA L4", "8.9", 1), ""),
        ("none", CudaGpu("NVIDIA L40S", "8.9", 1), "it was built on NVIDIA L4 and runs only there"),
        ("same-compute-capability", CudaGpu("NVIDIA L40S", "8.9", 1), ""),
        ("same-compute-capability", CudaGpu("NVIDIA A10", "8.6", 1), "it is not for compute"),
        ("ampere-plus", CudaGpu("NVIDIA B200", "10.0", 1), ""),
        ("ampere-plus", CudaGpu("NVIDIA T4", "7.5", 1), "it needs 8.0 or newer"),
    ],
)
def test_a_classic_engine_runs_where_it_was_built_for(made, machine, compatibility, gpu, problem):
    machine.gpu, machine.tensorrt = gpu, "10.13.2"
    built_on = {"name": "NVIDIA L4", "driver": "580.65.06"}
    artifact = made({**CLASSIC_HERE, "hardware_compatibility": compatibility, "gpu": built_on})
    if problem:
        with pytest.raises(ProviderError, match=problem):
            chosen(artifact, requested=("tensorrt",))
    else:
        (record,), (head, *_) = chosen(artifact, requested=("tensorrt",))
        assert (record.flavor, head.name) == ("tensorrt", TENSORRT)


def test_unsupported_gpu_gets_the_alternatives(made, machine):
    machine.gpu = CudaGpu("NVIDIA H200", "9.0", 1)
    with pytest.raises(ProviderError) as error:
        chosen(made({"capabilities": ()}))
    assert "TensorRT for RTX does not support compute capability 9.0" in error.value.message
    assert error.value.do == (
        "TensorRT for RTX supports 7.5, 8.0, 8.6, 8.9, 12.0, 12.1. On this GPU use --providers "
        "tensorrt with an engine of that flavor, or --providers cuda."
    )


def test_a_portable_plan_needs_ampere(made, machine):
    machine.gpu = CudaGpu("NVIDIA T4", "7.5", 1)
    with pytest.raises(ProviderError, match=r"a portable plan needs compute capability 8\.0"):
        chosen(made({"capabilities": ()}))


def test_an_engine_that_the_manifest_does_not_list_is_not_trusted(bert, tmp_path, machine):
    artifact = with_engines(bert, tmp_path / "artifact")
    record = engine_record(artifact)
    write_engine(artifact.path / "engines" / record.directory_name, record)
    with pytest.raises(ArtifactError, match=r"engine\.json is not listed in manifest"):
        Artifact.open(artifact.path)


def test_a_plan_that_the_manifest_does_not_list_is_not_trusted(made, machine):
    artifact = made({})
    files = artifact.manifest.model_dump(mode="json")["files"]
    edit_manifest(
        artifact.path, files={n: f for n, f in files.items() if not n.endswith("model.plan")}
    )
    with pytest.raises(ProviderError, match=r"model\.plan is not listed in the artifact"):
        chosen(Artifact.open(artifact.path))


def test_an_altered_plan_is_an_error(made, machine):
    artifact = made({})
    (plan,) = artifact.path.glob("engines/*/model.plan")
    plan.write_bytes(plan.read_bytes()[:-1] + b"!")
    with pytest.raises(ArtifactError, match=r"model\.plan was altered"):
        chosen(artifact)


def test_unknown_version_is_reported_but_accepted(made, machine):
    machine.tensorrt = ""
    _, (head, *_) = chosen(made({"tensorrt": "1.6.0.1"}))
    assert head.reason.endswith("; the version of TensorRT could not be read")


def test_fallback_uses_the_next_provider_and_reports_the_missing_engine(made, machine, monkeypatch):
    artifact = made({"capabilities": ("8.0",)})
    opened = []
    monkeypatch.setattr(ort_runner, "open_session", lambda path, *_, **__: opened.append(path))
    records, (head, *_) = chosen(artifact, requested=("tensorrt-rtx", "cuda"), allow_fallback=True)
    assert (records, head.name) == ([], CUDA)
    assert head.reason.startswith(f"tensorrt-rtx requested, but {artifact.path} has no engine")
    assert opened == [artifact.path / "model.onnx"]
    with pytest.raises(ProviderError, match="has no engine of"):
        chosen(artifact, requested=("tensorrt-rtx", "cuda"))


def test_online_build_needs_an_option_and_is_reported(made, machine, monkeypatch):
    artifact = made()
    opened = []
    monkeypatch.setattr(ort_runner, "open_session", lambda path, *_, **__: opened.append(path))
    _, (head, *_) = chosen(artifact, allow_build=True)
    assert head.name == TENSORRT_RTX
    assert head.reason.endswith("ONNX Runtime builds an engine while it loads (allow_build)")
    assert opened == [artifact.path / "model.onnx"]


def test_the_cpu_asks_no_gpu_and_opens_no_engine(made, monkeypatch):
    monkeypatch.setattr(engines, "visible_gpus", lambda: pytest.fail("the GPU was asked"))
    with OrtRunner(made({}), providers=("cpu",)) as runner:
        assert runner.engines == runner.profiles == []
        runner.warm_up()
        assert runner(feeds(9, 70))["logits"].shape == (9, 3)


def test_a_request_beyond_the_profile_is_an_error_and_nothing_runs(made, machine):
    runner = OrtRunner(made({}), providers=("tensorrt-rtx",))
    with runner, pytest.raises(ShapeError) as error:
        runner(feeds(5, 70))
    assert error.value.message == (
        "batch 5, sequence 70 is outside the profile 'batch=1:2:4,sequence=1:16:64': batch 5 is "
        "above its maximum 4 by 1; sequence 70 is above its maximum 64 by 6."
    )
    assert error.value.do.endswith("rebuild with --profile batch=1:2:5,sequence=1:16:70")
    assert machine.ran == []


def test_a_text_longer_than_every_profile_is_an_error(made, machine):
    with load_model(made({}), providers="tensorrt-rtx") as model:
        machine.ran.clear()
        with pytest.raises(ShapeError, match=r"sequence \d+ is above its maximum 64"):
            model.classify([" ".join(TEXTS * 2)])
    assert machine.ran == []


def scores(classifications):
    """(inputs, labels), the labels by name."""
    by_name = [sorted(c.labels, key=lambda label: label.label) for c in classifications]
    return np.array([[label.score for label in labels] for labels in by_name])


def test_texts_are_split_at_the_profiles_maximum_and_padded_to_its_minimum(bert, made, machine):
    artifact = made({"profiles": ("batch=2:2:3,sequence=24:32:64",)})
    with load_model(bert) as plain, load_model(artifact, providers="tensorrt-rtx") as model:
        machine.ran.clear()
        expected, found = plain.classify(TEXTS), model.classify(TEXTS)
        one = model.classify(TEXTS[4:5])
    np.testing.assert_allclose(scores(found), scores(expected), atol=SCORES)
    np.testing.assert_allclose(scores(one), scores(expected)[4:5], atol=SCORES)
    shapes = [shape for _, shape in machine.ran]
    assert [rows for rows, _ in shapes] == [3, 3, 2, 2]
    assert all(24 <= tokens <= 64 for _, tokens in shapes)


def test_each_request_runs_in_the_engine_whose_profile_takes_it(bert, made, machine):
    short, long = "batch=1:4:4,sequence=1:8:16", "batch=1:1:2,sequence=17:32:64"
    artifact = made({"profiles": (short,)}, {"profiles": (long,)})
    with load_model(bert) as plain, load_model(artifact, providers="tensorrt-rtx") as model:
        machine.ran.clear()
        texts = [" ".join(TEXTS[:3]), *TEXTS[4:5] * 4]
        np.testing.assert_allclose(
            scores(model.classify(texts)), scores(plain.classify(texts)), atol=SCORES
        )
    assert [(profiles[0], shape[0]) for profiles, shape in machine.ran] == [(long, 2), (short, 3)]


def test_loading_runs_every_engine_at_its_optimum(made, machine):
    short, long = "batch=1:4:8,sequence=1:8:16", "batch=1:2:2,sequence=17:32:64"
    artifact = made({"profiles": (short,)}, {"profiles": (long,)})
    with load_model(artifact, providers="tensorrt-rtx"):
        assert sorted(machine.ran) == sorted([((short,), (4, 8)), ((long,), (2, 32))])


def test_warm_up_runs_each_engine_even_if_another_is_preferred(made, machine):
    wide, narrow = "batch=1,sequence=1:16:64", "batch=1,sequence=1:32:48"
    artifact = made({"profiles": (wide,)}, {"profiles": (narrow,)})
    with load_model(artifact, providers="tensorrt-rtx"):
        assert sorted(machine.ran) == sorted([((wide,), (1, 16)), ((narrow,), (1, 32))])


def test_an_engine_that_fails_at_its_optimum_is_never_ready(made, machine, monkeypatch):
    class Broken:
        def run(self, names, feeds):
            raise RuntimeError("CUDA failure 700")

    monkeypatch.setattr(ort_runner, "open_engine", lambda engine, given, **_: Broken())
    with pytest.raises(ProviderError, match=r"does not run at its own optimum.*CUDA failure 700"):
        load_model(made({}), providers="tensorrt-rtx")


def test_first_of_several_profiles_is_used_and_reported(made, machine):
    artifact = made({"profiles": ("batch=1,sequence=1:8:16", "batch=1:8:32,sequence=1:8:16")})
    with OrtRunner(artifact, providers=("tensorrt-rtx",)) as runner:
        assert [str(profile) for profile in runner.profiles] == ["batch=1,sequence=1:8:16"]
        assert runner.providers[0].reason.endswith(
            "the profile batch=1,sequence=1:8:16, the first of 2: ONNX Runtime cannot use others"
        )
        with pytest.raises(ShapeError, match="batch 2 is above its maximum 1"):
            runner(feeds(2, 8))


def test_images_are_split_and_padded_as_texts_are(tiny, tmp_path, machine, monkeypatch):
    vit = tiny.artifact("vit", "image-classification")
    profile = "batch=2:2:3,height=32,width=32"
    artifact = with_engines(vit, tmp_path / "artifact", {"profiles": (profile,)})
    ran = []

    def open_engine(engine, given, **_):
        session = open_session(vit.model, [Provider(CPU, "a double")])

        class Recorded:
            def run(self, names, given):
                ran.append(len(given["pixel_values"]))
                return session.run(names, given)

        return Recorded()

    monkeypatch.setattr(ort_runner, "open_engine", open_engine)
    images = [np.full((40, 40, 3), shade, np.uint8) for shade in (0, 60, 120, 180)]
    with load_model(vit) as plain, load_model(artifact, providers="tensorrt-rtx") as model:
        expected, found = plain.classify_images(images), model.classify_images(images)
    np.testing.assert_allclose(scores(found), scores(expected), atol=SCORES)
    assert ran == [2, 3, 2]  # the first is the warm-up


def test_a_closed_runner_runs_nothing(made, machine):
    runner = OrtRunner(made({}), providers=("tensorrt-rtx",))
    runner.close()
    with pytest.raises(ProviderError, match="the runner is closed"):
        runner(feeds(1, 8))


INPUTS = (
    TensorSpec("input_ids", "int64", ("batch", "sequence")),
    TensorSpec("attention_mask", "int64", ("batch", "past_sequence + sequence")),
    TensorSpec("past", "float32", ("batch", 4, "past_sequence", 8)),
)


def arrays(ids, mask, past):
    return {"input_ids": np.ones(ids), "attention_mask": np.ones(mask), "past": np.ones(past)}


def test_sizes_are_read_from_the_arrays():
    found = dim_sizes(INPUTS, arrays((2, 1), (2, 6), (2, 4, 5, 8)))
    assert found == {"batch": 2, "sequence": 1, "past_sequence": 5}


@pytest.mark.parametrize(
    ("shapes", "message"),
    [
        (((2, 1), (3, 6), (2, 4, 5, 8)), "attention_mask: batch is 3, but 2 in the inputs before"),
        (((2, 1), (2, 7), (2, 4, 5, 8)), "attention_mask: found 7 where past_sequence . sequence"),
        (((2, 1), (2, 6), (2, 3, 5, 8)), r"past: found shape \(2, 3, 5, 8\), expected past:"),
    ],
)
def test_arrays_that_do_not_go_together_are_an_error(shapes, message):
    with pytest.raises(ShapeError, match=message):
        dim_sizes(INPUTS, arrays(*shapes))


def test_padding_goes_to_the_profile_with_the_least_to_compute():
    wide, narrow = (
        Profile.parse("batch=8:8:8,sequence=1:8:64"),
        Profile.parse("batch=1,sequence=64"),
    )
    assert padded_sizes([wide, narrow], {"batch": 1, "sequence": 4}) == {"batch": 8, "sequence": 4}
    assert padded_sizes([wide, narrow], {"batch": 1, "sequence": 40}) == {
        "batch": 1,
        "sequence": 64,
    }
    assert padded_sizes([wide], {"batch": 9, "sequence": 1}) == {"batch": 9, "sequence": 1}


def test_rows_are_bounded_by_the_profiles_that_take_the_length():
    profiles = [Profile.parse("batch=1:8:32,sequence=1:32:64")]
    profiles.append(Profile.parse("batch=1:1:4,sequence=1:128:512"))
    assert max_rows(profiles, "batch", {"sequence": 64}) == 32
    assert max_rows(profiles, "batch", {"sequence": 65}) == 4
    assert max_rows(profiles, "batch", {"sequence": 513}) == 0


def test_the_version_is_that_of_a_library_already_loaded():
    assert engine_fit.loaded_version(CLASSIC) == ""
    pytest.importorskip("tensorrt_rtx_bindings")
    major, minor, patch = engine_fit.loaded_version(RTX).split(".")
    assert (major, minor) == ("1", "7")
    assert patch.isdigit()


@pytest.mark.more
def test_engines_really_built_are_chosen_and_warmed_up(bert, tmp_path, machine):
    pytest.importorskip("tensorrt_rtx_bindings")
    from enginery import build_engine

    out, short, long = (
        tmp_path / "built",
        "batch=1:2:4,sequence=1:8:16",
        "batch=1,sequence=17:32:64",
    )
    build_engine(bert, out=out, capability="8.9", profile=(short,))
    build_engine(out, out=out, capability="8.9", profile=(long,))
    machine.tensorrt = engine_fit.loaded_version(RTX) or machine.tensorrt
    with load_model(bert) as plain, load_model(out, providers="tensorrt-rtx") as model:
        assert sorted(shape for _, shape in machine.ran) == [(1, 32), (2, 8)]
        np.testing.assert_allclose(
            scores(model.classify(TEXTS)), scores(plain.classify(TEXTS)), atol=SCORES
        )


@pytest.mark.gpu
def test_an_engine_built_here_answers_as_the_cpu_does(bert, tmp_path):
    from enginery import build_engine

    try:
        gpu = visible_gpus()[0]
    except ProviderError as error:
        pytest.skip(error.message)
    build = {"flavor": "tensorrt-rtx", "profile": ("batch=1:4:8,sequence=1:16:64",)}
    if gpu.compute_capability not in RTX.capabilities:
        with pytest.raises(EngineryError, match=gpu.compute_capability) as error:
            build_engine(bert, capability="current", **build)
        assert "8.9" in str(error.value)
        return
    built = build_engine(bert, out=tmp_path / "built", capability="current", **build)
    with load_model(bert) as plain, load_model(built, providers="tensorrt-rtx") as model:
        np.testing.assert_allclose(
            scores(model.classify(TEXTS)), scores(plain.classify(TEXTS)), atol=1e-2
        )
