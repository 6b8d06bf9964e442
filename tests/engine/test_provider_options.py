"""Options for ONNX Runtime's TensorRT providers, as far as they can be tried without a GPU."""

import json
import shutil
from pathlib import Path

import onnxruntime as ort
import pytest

from enginery.core.artifact.artifact import Artifact, commit_artifact
from enginery.core.errors import OptionError, ShapeError
from enginery.engine.provider_options import provider_options, to_json, to_python
from tests.engine.made import with_engines

PROFILE = "batch=1:8:32,sequence=8:32:128"


@pytest.fixture
def artifact(exported):
    return exported("bert", "text-classification")


@pytest.fixture
def parsed(monkeypatch, artifact):
    """`parsed(options)`: whether ONNX Runtime's own option parser takes them.

    The parser is in its Python module and runs before the provider's library is loaded, once the
    plugins of that library are left out.
    """
    monkeypatch.setattr(ort.InferenceSession, "_register_ep_custom_ops", lambda *_: None)

    def parse(options):
        settings = ort.SessionOptions()
        settings.log_severity_level = 4  # it says at once that CUDA's libraries are missing
        providers = [("TensorrtExecutionProvider", options)]
        ort.InferenceSession(str(artifact.model), settings, providers=providers, enable_fallback=0)

    return parse


def test_tensorrt_gets_a_cache_and_the_profile_shapes(artifact):
    options = provider_options(artifact, "tensorrt", profiles=[PROFILE])
    cache = options["trt_engine_cache_path"]
    assert cache.rpartition("/")[2].startswith("tensorrt-model-")
    assert options == {
        "trt_engine_cache_enable": "True",
        "trt_engine_cache_path": cache,
        "trt_engine_cache_prefix": "model",
        "trt_timing_cache_enable": "True",
        "trt_timing_cache_path": cache,
        "trt_profile_min_shapes": "input_ids:1x8,attention_mask:1x8,token_type_ids:1x8",
        "trt_profile_opt_shapes": "input_ids:8x32,attention_mask:8x32,token_type_ids:8x32",
        "trt_profile_max_shapes": "input_ids:32x128,attention_mask:32x128,token_type_ids:32x128",
    }


def test_rtx_gets_all_profiles_with_repeated_inputs(artifact):
    options = provider_options(
        artifact, "NvTensorRTRTXExecutionProvider", profiles=["batch=1,sequence=8:16:32", PROFILE]
    )
    assert options.pop("nv_runtime_cache_path").rpartition("/")[2].startswith("tensorrt-rtx-model-")
    assert options["nv_profile_min_shapes"] == (
        "input_ids:1x8,attention_mask:1x8,token_type_ids:1x8,"
        "input_ids:1x8,attention_mask:1x8,token_type_ids:1x8"
    )
    assert options["nv_profile_max_shapes"].startswith("input_ids:1x32,attention_mask:1x32,")
    assert options["nv_profile_max_shapes"].endswith(",token_type_ids:32x128")
    assert options["nv_multi_profile_enable"] == "1"
    assert len(options) == 4


def test_onnxruntime_accepts_every_option(artifact, parsed):
    parsed(provider_options(artifact, "tensorrt", profiles=[PROFILE]))
    parsed(provider_options(artifact, "tensorrt", profiles=[PROFILE], fp16=True, save_context=True))


def test_onnxruntime_rejects_unknown_options(parsed):
    with pytest.raises(RuntimeError, match="Invalid TensorRT EP option: trt_engine_cash_path"):
        parsed({"trt_engine_cash_path": "/tmp"})
    with pytest.raises(RuntimeError, match="should be 'True' or 'False'"):
        parsed({"trt_engine_cache_enable": "1"})


def test_optimum_passes_the_options_on(artifact, monkeypatch):
    from optimum.onnxruntime import ORTModelForSequenceClassification

    given = []
    real = ort.InferenceSession

    def session(path, *args, **kwargs):
        given.append((kwargs["providers"], kwargs["provider_options"]))
        return real(path, *args, **{**kwargs, "enable_fallback": 0})

    monkeypatch.setattr(ort, "InferenceSession", session)
    monkeypatch.setattr("optimum.onnxruntime.modeling.InferenceSession", session, raising=False)
    options = provider_options(artifact, "tensorrt", profiles=[PROFILE])
    with pytest.raises(RuntimeError, match="Please install TensorRT libraries"):
        ORTModelForSequenceClassification.from_pretrained(
            artifact.path, provider="TensorrtExecutionProvider", provider_options=options
        )
    assert given == [(["TensorrtExecutionProvider"], [options])]


def cache_of(artifact, **given):
    return provider_options(artifact, "tensorrt", **{"profiles": [PROFILE], **given})[
        "trt_timing_cache_path"
    ]


def test_the_cache_is_found_again_and_exists(artifact, copied):
    first = cache_of(artifact)
    assert first == cache_of(copied(artifact))  # the same content elsewhere
    assert Path(first).is_dir()


@pytest.mark.parametrize(
    "given", [{"profiles": ["batch=1,sequence=8"]}, {"fp16": True}, {"save_context": True}]
)
def test_different_inputs_use_different_caches(artifact, given):
    assert cache_of(artifact, **given) != cache_of(artifact)


def test_two_fine_tunes_of_one_architecture_never_share_a_cache(artifact, tmp_path):
    import onnx

    shutil.copytree(artifact.path, tmp_path / "other")
    model = onnx.load(tmp_path / "other" / "model.onnx")
    weights = next(t for t in model.graph.initializer if t.data_type == onnx.TensorProto.FLOAT)
    weights.CopyFrom(
        onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(weights) + 1, weights.name)
    )
    onnx.save(model, tmp_path / "other" / "model.onnx")
    commit_artifact(tmp_path / "other", artifact.manifest)
    assert cache_of(Artifact.open(tmp_path / "other")) != cache_of(artifact)


def test_default_profiles_are_those_of_the_engines(artifact, tmp_path):
    built = with_engines(
        artifact,
        tmp_path / "built",
        {"flavor": "tensorrt", "profiles": ("batch=2,sequence=16",), "capabilities": ("8.9",)},
        {"profiles": ("batch=4,sequence=16",)},
    )
    tensorrt = provider_options(built, "tensorrt")
    assert tensorrt["trt_profile_opt_shapes"].startswith("input_ids:2x16,")
    rtx = provider_options(built, "tensorrt-rtx")
    assert rtx["nv_profile_opt_shapes"].startswith("input_ids:4x16,")


def test_missing_profile_is_an_error_with_an_example(artifact):
    with pytest.raises(ShapeError, match="no profile was given") as error:
        provider_options(artifact, "tensorrt")
    assert "batch=1:8:32,sequence=1:8:32" in error.value.do


def test_a_profile_beyond_the_models_positions_is_an_error(artifact):
    with pytest.raises(ShapeError, match="sequence goes up to 512"):
        provider_options(artifact, "tensorrt", profiles=["batch=1,sequence=1:8:512"])


def test_several_profiles_for_classic_tensorrt_are_an_error_with_one_that_covers_them(artifact):
    with pytest.raises(ShapeError, match="uses only the first") as error:
        provider_options(artifact, "tensorrt", profiles=["batch=1,sequence=1:8:16", PROFILE])
    assert error.value.do.endswith("--profile batch=1:1:32,sequence=1:8:128")


def test_fp16_is_only_for_fp32_graphs(artifact):
    half = Artifact(artifact.path, artifact.manifest.model_copy(update={"precision": "fp16"}))
    with pytest.raises(OptionError, match="the graph is already fp16, and its own dtypes hold"):
        provider_options(half, "tensorrt", profiles=[PROFILE], fp16=True)
    assert "trt_fp16_enable" not in provider_options(half, "tensorrt", profiles=[PROFILE])
    whole = provider_options(artifact, "tensorrt", profiles=[PROFILE], fp16=True)
    assert whole["trt_fp16_enable"] == "True"


@pytest.mark.parametrize("option", ["fp16", "save_context"])
def test_rtx_has_neither_of_these_options(artifact, option):
    with pytest.raises(OptionError, match=f"option '{option}' is set, but the provider of"):
        provider_options(artifact, "tensorrt-rtx", profiles=[PROFILE], **{option: True})


def test_saved_context_replaces_the_cache_path(artifact):
    options = provider_options(artifact, "tensorrt", profiles=[PROFILE], save_context=True)
    assert "trt_engine_cache_path" not in options
    assert options["trt_ep_context_file_path"] == options["trt_timing_cache_path"]
    assert options["trt_dump_ep_context_model"] == "True"
    assert options["trt_ep_context_embed_mode"] == "0"


def test_a_provider_that_builds_no_engines_is_an_error(artifact):
    with pytest.raises(OptionError, match="provider 'cuda' builds no engines"):
        provider_options(artifact, "cuda")


def test_python_and_json_have_the_same_options(artifact):
    options = provider_options(artifact, "tensorrt", profiles=[PROFILE])
    names = {}
    exec(to_python("tensorrt", options), names)
    assert names["providers"] == [("TensorrtExecutionProvider", options)]
    assert json.loads(to_json("tensorrt", options)) == {
        "provider": "TensorrtExecutionProvider",
        "provider_options": options,
    }


def test_gpt2_without_cache_has_the_shapes_of_optimums_guide(exported):
    gpt2 = exported("gpt2", "text-generation")
    options = provider_options(gpt2, "tensorrt", profiles=["batch=1,sequence=1:1:64"])
    shapes = [options[f"trt_profile_{end}_shapes"] for end in ("min", "opt", "max")]
    assert [sorted(text.split(",")) for text in shapes] == [
        [f"attention_mask:{shape}", f"input_ids:{shape}", f"position_ids:{shape}"]
        for shape in ("1x1", "1x1", "1x64")
    ]
