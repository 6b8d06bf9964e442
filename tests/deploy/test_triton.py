"""Export to Triton: its proto, results equal to load_model's, and updates of a repository.

`test_triton_server` has what a server does with them.
"""

import json
import math
import os
import runpy
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import numpy as np
import pytest

from enginery.api import export_triton, quantize_model
from enginery.cli import main
from enginery.core.artifact.artifact import Artifact, commit_artifact
from enginery.core.errors import (
    ArtifactError,
    CheckFailedError,
    InputError,
    OptionError,
    RejectedArtifactError,
    ShapeError,
)
from enginery.core.shapes import Profile, TensorSpec
from enginery.deploy.triton import steps as triton_steps
from enginery.deploy.triton.engines import largest_batch
from enginery.deploy.triton.options import TritonConfig
from enginery.deploy.triton.steps import TextSteps, graph_outputs, open_text_task
from enginery.deploy.triton.tensors import has_batch_dim, tensor_fields
from enginery.deploy.triton.text_format import EnumValue, config_text, map_entries
from enginery.runtime.providers.options import read_options
from enginery.runtime.tasks import find_task
from enginery.runtime.tasks.tag import TokenSpan
from tests.core.artifacts import made_for, start, verdict
from tests.deploy.triton_answers import ASKED, check_answers
from tests.deploy.triton_repository import PROTO, dtype_name, read_config, run_ensemble, texts
from tests.engine.made import with_engines
from tests.engine.products import product
from tests.publish.products import large
from tests.tiny import TEXT, TEXT_TASKS
from tests.tolerances import SCORES

CLASSIC = {"flavor": "tensorrt", "tensorrt": "10.16.1.11"}


@pytest.fixture
def models(tmp_path):
    return tmp_path / "models"


@pytest.fixture
def mood(exported):
    return exported("bert", "text-classification")


# Texts in, answers out


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_steps_have_the_results_of_load_model(exported, models, task):
    artifact = exported("bert", task)
    found = export_triton(artifact, models, name="m", provider="cpu")
    assert found.models == ("m-graph", "m-tokenizer", "m-answers", "m")
    check_answers(artifact, lambda inputs: run_ensemble(models, "m", inputs))


@pytest.mark.more
def test_real_model_has_the_same_embeddings(minilm, models):
    from enginery import export_model

    artifact = export_model(minilm, task="feature-extraction")
    export_triton(artifact, models, name="m", provider="cpu")
    check_answers(artifact, lambda inputs: run_ensemble(models, "m", inputs), atol=SCORES)
    options = {"dimensions": 64, "normalize": True}
    short = run_ensemble(models, "m", {"text": texts(ASKED)}, options)["embedding"]
    assert short.shape == (3, 64)
    np.testing.assert_allclose(np.linalg.norm(short, axis=1), 1, atol=1e-6)
    assert list(read_config(models / "m").output[0].dims) == [-1, -1]


@pytest.mark.more
@pytest.mark.parametrize("kind", ["roberta", "distilbert", "deberta-v2"])
def test_other_architectures(exported, models, kind):
    artifact = exported(kind, "token-classification")
    export_triton(artifact, models, name="m", provider="cpu")
    check_answers(artifact, lambda inputs: run_ensemble(models, "m", inputs))


def test_second_text_is_an_optional_input(mood, models):
    export_triton(mood, models, name="m")
    assert [tensor.optional for tensor in read_config(models / "m").input] == [False, True]


def test_texts_are_padded_to_common_shapes_for_batching(mood):
    steps = text_steps(mood, pad_multiple=48)
    shapes = [
        steps.tokenize({"text": texts([text])}, {})["input_ids"].shape
        for text in (ASKED[0], ASKED[2], " ".join(ASKED * 30))
    ]
    assert shapes == [(1, 48), (1, 48), (1, 128)], "never beyond what the model takes"


def text_steps(artifact, **changes):
    graph = artifact.manifest.graphs[0]
    made = TextSteps(open_text_task(artifact, graph), pad_multiple=16, max_rows=32)
    return replace(made, **changes)


def asked_of(task, graph, **changes):
    """Return inputs for postprocessing: two texts, and outputs of zeros."""
    asked = texts([f"{text} [MASK]" for text in ASKED[:2]])
    inputs = {field.name: asked for field in find_task(task).inputs if not field.optional}
    width = text_steps(graph).tokenize(inputs, {})["input_ids"].shape[1]
    specs = [
        s
        for s in graph.manifest.graphs[0].outputs
        if s.name in graph_outputs(text_steps(graph).task)
    ]
    sizes = {
        spec.name: [d if isinstance(d, int) else width for d in spec.dims[1:]] for spec in specs
    }
    return inputs | {n: np.zeros((2, *size), np.float32) for n, size in sizes.items()}


@pytest.mark.parametrize("wrong", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("task", TEXT_TASKS)
def test_outputs_that_are_not_finite_are_errors(exported, task, wrong):
    artifact = exported("bert", task)
    steps, given = text_steps(artifact), asked_of(task, artifact)
    assert steps.answer(given, {}), "zeros are"
    *_, spoiled = given
    given[spoiled][1] = wrong
    with pytest.raises(CheckFailedError, match=f"output {spoiled} has NaN or infinity in row 1"):
        steps.answer(given, {})


@pytest.mark.parametrize("task", TEXT_TASKS)
def test_one_nan_is_an_error(exported, task):
    artifact = exported("bert", task)
    steps, given = text_steps(artifact), asked_of(task, artifact)
    *_, spoiled = given
    row = given[spoiled][1]
    where = list(text_steps(artifact).task.tokenizer.encode([f"{ASKED[1]} [MASK]"])[0].tokens)
    at = where.index("[MASK]")
    row[at if row.ndim == 2 else 1] = math.nan
    with pytest.raises(CheckFailedError, match="NaN or infin"):
        steps.answer(given, {})


def test_score_of_minus_infinity_among_finite_ones_is_valid(exported):
    """Models use -inf to exclude tokens."""
    artifact = exported("bert", "fill-mask")
    given = asked_of("fill-mask", artifact)
    given["logits"][..., :7] = -math.inf
    found = text_steps(artifact).answer(given, {})["fillings"]
    (best, *_), *_ = json.loads(found[0])["masks"]
    assert best["score"] == pytest.approx(1 / (given["logits"].shape[-1] - 7))


def test_nan_in_padding_is_ignored(mood, exported):
    logits = np.zeros((3, 3), np.float32)
    logits[2] = math.nan
    steps = text_steps(mood)
    assert steps.answer({"text": texts(ASKED[:2]), "logits": logits}, {})["score"].shape == (2, 3)
    tagged = exported("bert", "token-classification")
    given = asked_of("token-classification", tagged)
    given["logits"][:, -1] = math.nan
    assert text_steps(tagged).answer(given, {})


def test_results_in_json_have_no_nan(exported, monkeypatch):
    artifact = exported("bert", "token-classification")
    steps, given = text_steps(artifact), asked_of("token-classification", artifact)
    span = TokenSpan("PER", math.nan, 0, 1, "x")
    monkeypatch.setattr(steps.task, "postprocess", lambda *_: [[], [span]])
    with pytest.raises(CheckFailedError, match="result 1 is NaN or infinite"):
        steps.answer(given, {})


@pytest.mark.parametrize("value", [5, 1 << 40, -1, None, 1.5, [b"a"]])
def test_value_that_is_not_text_is_an_error(mood, value):
    given = texts(ASKED)
    given[1] = value
    with pytest.raises(InputError, match=r"text 1 is a \w+, expected a text"):
        text_steps(mood).tokenize({"text": given}, {})


def test_failed_request_does_not_fail_others_of_its_call(monkeypatch, capsys):
    backend = Mock()
    monkeypatch.setitem(sys.modules, "triton_python_backend_utils", backend)
    path = Path(triton_steps.__file__).with_name("python_model.py")
    model = runpy.run_path(str(path))["TritonPythonModel"]()
    model.inputs, model.step = ["text"], Mock(side_effect=[{}, ZeroDivisionError, {}])
    request = Mock(parameters=str, requested_output_names=list)
    assert len(model.execute([request] * 3)) == 3
    responses = [list(call.kwargs) for call in backend.InferenceResponse.call_args_list]
    assert responses == [["output_tensors"], ["error"], ["output_tensors"]]
    (error,) = backend.TritonError.call_args_list
    message = "internal error: ZeroDivisionError; see the server's log."
    assert error.args == (message, backend.TritonError.INTERNAL)
    assert "Traceback" in capsys.readouterr().err


def test_outputs_with_too_few_rows_are_an_error(mood):
    with pytest.raises(InputError, match=r"3 rows, but the graph's outputs are logits \(2, 3\)"):
        text_steps(mood).answer({"text": texts(ASKED), "logits": np.zeros((2, 3), np.float32)}, {})


def test_rows_that_fit_no_profile_are_an_error(mood):
    profiles = tuple(map(Profile.parse, ("batch=1:1:4,sequence=24:32:40",)))
    steps = text_steps(mood, profiles=profiles)
    assert steps.tokenize({"text": texts(ASKED[2:])}, {})["input_ids"].shape == (1, 24)
    widths = {
        steps.tokenize({"text": texts(["rain " * n])}, {})["input_ids"].shape[1]
        for n in range(1, 38)
    }
    assert widths == {24, 32, 40}, "a multiple of 16, within the profile"
    long = " ".join(ASKED * 3)
    tokens = len(steps.task.tokenizer.encode([long])[0])
    with pytest.raises(ShapeError, match=f"sequence {tokens} is above its maximum 40"):
        steps.tokenize({"text": texts([long])}, {})


def test_fixed_batch_is_filled_and_the_filling_is_removed(mood):
    steps = text_steps(mood)
    graph = steps.task.record
    inputs = tuple(TensorSpec(s.name, s.dtype, (4, "sequence")) for s in graph.inputs)
    task = replace(steps.task, record=graph.model_copy(update={"inputs": inputs}))
    fixed = replace(steps, task=task, max_rows=4)
    assert fixed.tokenize({"text": texts(ASKED)}, {})["input_ids"].shape[0] == 4
    logits = np.arange(12, dtype=np.float32).reshape(4, 3)
    assert fixed.answer({"text": texts(ASKED), "logits": logits}, {})["label"].shape == (3, 3)


# The graph's configuration


def test_batching_follows_profiles_and_options(mood, models):
    export_triton(
        mood,
        models,
        name="m",
        tokenizer=False,
        threads=2,
        max_queue_size=7,
        queue_timeout_us=5,
        max_queue_delay_us=9,
        instances=3,
        profile=("batch=1:4:16,sequence=8:32:64", "batch=1:8:8,sequence=64:96:128"),
    )
    config = read_config(models / "m")
    assert config.max_batch_size == 16
    assert [list(tensor.dims) for tensor in config.input] == [[-1]] * 3
    assert [dtype_name(t.data_type) for t in config.input] == ["TYPE_INT64"] * 3
    batching = config.dynamic_batching
    assert list(batching.preferred_batch_size) == [4, 8]
    assert batching.max_queue_delay_microseconds == 9
    policy = batching.default_queue_policy
    assert (policy.max_queue_size, policy.default_timeout_microseconds) == (7, 5)
    assert policy.timeout_action == policy.REJECT
    (group,) = config.instance_group
    assert (group.count, group.kind) == (3, group.KIND_GPU)
    assert config.parameters["intra_op_thread_count"].string_value == "2"
    assert config.parameters["cudnn_conv_algo_search"].string_value == "1"
    assert [(s.batch_size, s.inputs["input_ids"].dims[0]) for s in config.model_warmup] == [
        (4, 32),
        (8, 96),
    ]
    first = config.model_warmup[0].inputs
    assert all(given.input_data_file for given in first.values()), "random bytes are no token ids"
    ids = np.fromfile(models / "m/warmup" / first["input_ids"].input_data_file, np.int64)
    assert len(ids) == 32
    assert 0 <= ids.min() < ids.max() < 600
    assert (models / "m/1/model.onnx").is_file()
    assert [path.name for path in models.iterdir()] == ["m"]


def test_labels_are_a_file_for_triton(mood, models):
    export_triton(mood, models, name="m", tokenizer=False)
    config = read_config(models / "m")
    assert config.output[0].label_filename == "labels.txt"
    assert (models / "m/labels.txt").read_text().split() == ["calm", "angry", "glad"]


@pytest.mark.more
def test_audio_model_exports_only_the_graph(exported, models):
    artifact = exported("wav2vec2", "audio-classification")
    found = export_triton(artifact, models, name="m", provider="cpu")
    assert "exported only the graph: the model takes audio" in found.notes


def test_image_model_exports_only_the_graph(exported, models):
    found = export_triton(exported("vit", "image-classification"), models, name="m", provider="cpu")
    assert found.models == ("m",)
    assert "exported only the graph: the model takes images" in found.notes
    assert (models / "m/labels.txt").read_text().split() == ["cat", "boat", "tree"]


def test_fixed_batch_is_not_batched_by_triton(tmp_path, models):
    fixed = product(tmp_path / "fixed", batch=4)
    found = export_triton(fixed, models, name="m", provider="cpu")
    config = read_config(models / "m")
    assert (config.max_batch_size, list(config.input[0].dims)) == (0, [4, 64])
    assert found.max_batch_size == 0
    assert any("Triton cannot batch requests" in note for note in found.notes)


def test_graph_of_several_files_is_a_folder(exported, tmp_path, models):
    artifact = large(exported("bert", "text-classification"), tmp_path / "large")
    (artifact.path / "model.onnx.data").chmod(0o664)
    export_triton(artifact, models, name="m", provider="cpu")
    folder = models / "m-graph/1/model.onnx"
    assert sorted(path.name for path in folder.iterdir()) == ["model.onnx", "model.onnx.data"]
    data = (folder / "model.onnx.data").stat()
    assert data.st_nlink > 1, "a large file is linked, not copied"
    assert data.st_mode & 0o777 == 0o664, "a hard link shares its mode with the artifact's file"


def test_one_of_several_graphs_must_be_chosen(exported, models):
    artifact = exported("t5", "text2text-generation")
    with pytest.raises(OptionError, match="a Triton model has one"):
        export_triton(artifact, models)
    (encoder, *_) = (g.file for g in artifact.manifest.graphs if "encoder" in g.file)
    export_triton(artifact, models, graph=encoder, name="encoder", provider="cpu")
    assert read_config(models / "encoder").max_batch_size == 32


def test_unsupported_data_type_is_an_error(tmp_path, models):
    artifact = product(tmp_path / "source")
    graph = artifact.manifest.graphs[0]
    bf16 = tuple(TensorSpec(s.name, "bfloat16", s.dims) for s in graph.inputs)
    changed = graph.model_copy(update={"inputs": bf16})
    commit_artifact(artifact.path, artifact.manifest.model_copy(update={"graphs": (changed,)}))
    with pytest.raises(ArtifactError, match="ONNX Runtime backend does not support bfloat16"):
        export_triton(artifact.path, models)
    with pytest.raises(ArtifactError, match="Triton does not support float8e4m3fn"):
        tensor_fields(TensorSpec("x", "float8e4m3fn", (1,)), batched=False)


def test_batch_dim_is_the_first_dim_of_every_tensor(mood):
    graph = mood.manifest.graphs[0]
    assert has_batch_dim(graph)
    for dims in (("rows", 3), (3,), (), ("past + batch", 3), (-1, 3)):
        outputs = (TensorSpec("logits", "float32", dims),)
        assert not has_batch_dim(graph.model_copy(update={"outputs": outputs})), dims
    assert tensor_fields(TensorSpec("loss", "float32", ()), batched=False)["dims"] == [1]
    one_number = tensor_fields(TensorSpec("score", "float32", ("batch",)), batched=True)
    assert (one_number["dims"], one_number["reshape"]) == ([1], {"shape": []})


def test_config_text_is_parsed_to_the_same_values():
    name = 'a "name" of \\ letters\n\tünd 引擎'
    config = config_text(
        {
            "name": name,
            "max_batch_size": 3,
            "input": [{"data_type": EnumValue("TYPE_BOOL"), "dims": [-1]}],
            "parameters": map_entries({name: {"string_value": ""}}),
            "output": [],
            "backend": None,
            "dynamic_batching": {"preserve_ordering": True},
        }
    )
    from google.protobuf import text_format

    found = text_format.Parse(config, PROTO.ModelConfig())
    assert (found.name, found.max_batch_size, list(found.parameters)) == (name, 3, [name])
    assert (found.dynamic_batching.preserve_ordering, list(found.input[0].dims)) == (True, [-1])
    with pytest.raises(TypeError, match="a protobuf field cannot be"):
        config_text({"name": object()})


# Engines


PROFILES = ("batch=1:8:32,sequence=8:64:128", "batch=1:2:4,sequence=128")


def test_tensorrt_backend_has_the_plan_with_all_profiles(mood, tmp_path, models):
    artifact = with_engines(mood, tmp_path / "built", {**CLASSIC, "profiles": PROFILES})
    found = export_triton(artifact, models, name="m", backend="tensorrt", tokenizer=False)
    config = read_config(models / "m")
    assert (config.platform, config.max_batch_size) == ("tensorrt_plan", 32)
    (group,) = config.instance_group
    assert list(group.profile) == ["0", "1"]
    assert list(config.dynamic_batching.preferred_batch_size) == [2, 8]
    assert len(config.model_warmup) == 2
    plan = next(artifact.path.glob("engines/*/model.plan"))
    assert (models / "m/1/model.plan").read_bytes() == plan.read_bytes()
    assert not list(models.rglob("*.onnx"))
    assert any("hardware-bound: tensorrt 10.16.1.11" in note for note in found.notes)


def test_plans_of_several_gpus_are_selected_by_capability(mood, tmp_path, models):
    engines = [{**CLASSIC, "profiles": PROFILES, "capabilities": (c,)} for c in ("8.0", "8.9")]
    artifact = with_engines(mood, tmp_path / "built", *engines)
    export_triton(artifact, models, name="m", backend="tensorrt", tokenizer=False)
    config = read_config(models / "m")
    assert dict(config.cc_model_filenames) == {"8.0": "model-8.0.plan", "8.9": "model-8.9.plan"}
    assert sorted(path.name for path in (models / "m/1").iterdir()) == [
        "model-8.0.plan",
        "model-8.9.plan",
    ]


def test_onnxruntime_loads_an_engine_through_its_wrapper(mood, tmp_path, models):
    artifact = with_engines(mood, tmp_path / "built", {**CLASSIC, "profiles": PROFILES})
    found = export_triton(artifact, models, name="m", provider="tensorrt")
    config = read_config(models / "m-graph")
    (accelerator,) = config.optimization.execution_accelerators.gpu_execution_accelerator
    assert accelerator.name == "tensorrt"
    folder = models / "m-graph/1/model.onnx"
    assert sorted(path.name for path in folder.iterdir()) == ["model.onnx", "model.plan"]
    assert b"EPContext" in (folder / "model.onnx").read_bytes()
    assert not config.instance_group[0].profile
    assert any("uses only the first profile" in note for note in found.notes)
    profiles = read_config(models / "m-tokenizer").parameters["profiles"].string_value
    assert profiles == PROFILES[0]


def test_engine_of_tensorrt_for_rtx_is_an_error(mood, tmp_path, models):
    artifact = with_engines(mood, tmp_path / "built", {})
    name = next(artifact.path.glob("engines/*")).name
    for options in ({"backend": "tensorrt"}, {"engine": name}):
        with pytest.raises(ArtifactError, match=r"has no engine of model.onnx for Triton"):
            export_triton(artifact, models, **options)
    with pytest.raises(ArtifactError, match="found none"):
        export_triton(mood, models, backend="tensorrt")
    assert not models.exists()


# The provider that an artifact is made for


def accelerator_of(directory):
    """Return the parameters of TensorRT's execution accelerator; None without one."""
    found = read_config(directory).optimization.execution_accelerators.gpu_execution_accelerator
    for accelerator in found:
        assert accelerator.name == "tensorrt"
        # Except for precision_mode and the workspace, the backend passes the names on.
        read_options("tensorrt", dict(accelerator.parameters))
        return dict(accelerator.parameters)
    return None


@pytest.fixture
def int8(mood):
    """A classifier in INT8 for TensorRT, with FP16 elsewhere."""
    return quantize_model(mood, TEXT, capability=(), curve=False, min_cosine=-1)


def test_int8_for_tensorrt_is_built_by_the_server(int8, models):
    found = export_triton(int8, models, name="m")
    assert accelerator_of(models / "m-graph") == {
        "trt_engine_cache_enable": "0",
        "trt_profile_min_shapes": "input_ids:1x1,attention_mask:1x1,token_type_ids:1x1",
        "trt_profile_opt_shapes": "input_ids:8x128,attention_mask:8x128,token_type_ids:8x128",
        "trt_profile_max_shapes": "input_ids:32x128,attention_mask:32x128,token_type_ids:32x128",
    }
    config = read_config(models / "m-graph")
    assert list(config.dynamic_batching.preferred_batch_size) == [8]
    assert config.model_warmup[0].batch_size == 8
    assert (models / "m-graph/1/model.onnx").read_bytes() == (int8.path / "model.onnx").read_bytes()
    (said,) = (note for note in found.notes if "the server builds one" in note)
    assert "for batch=1:8:32,sequence=1:128:128 (--profile sets other shapes) at every load" in said
    command = f"enginery build {int8.name} --flavor tensorrt --capability current --profile"
    assert f"{command} batch=1:8:32,sequence=1:128:128 --out {int8.name}" in said


def test_profile_and_cache_of_the_engine_that_the_server_builds(int8, mood, models, tmp_path):
    options = {"profile": ("batch=1:4:8,sequence=16:32:64",), "engine_cache": "/opt/engines"}
    found = export_triton(int8, models, name="m", **options)
    parameters = accelerator_of(models / "m-graph")
    assert parameters["trt_profile_min_shapes"].startswith("input_ids:1x16,")
    assert parameters["trt_profile_max_shapes"].startswith("input_ids:8x64,")
    assert parameters["trt_engine_cache_enable"] == "1"
    assert parameters["trt_engine_cache_path"] == "/opt/engines"
    assert read_config(models / "m-graph").max_batch_size == 8
    profiles = read_config(models / "m-tokenizer").parameters["profiles"].string_value
    assert profiles == options["profile"][0], "texts that do not fit would build another engine"
    (said,) = (note for note in found.notes if "the server builds one" in note)
    assert "at its first load, and keeps it in /opt/engines" in said
    export_triton(mood, tmp_path / "fp32", name="m", provider="tensorrt", **options)
    other = accelerator_of(tmp_path / "fp32/m-graph")
    assert other["trt_engine_cache_prefix"] != parameters["trt_engine_cache_prefix"]


def test_classic_engine_is_used_instead_of_a_build_in_the_server(int8, tmp_path, models):
    built = with_engines(int8, tmp_path / "built", {**CLASSIC, "profiles": PROFILES[:1]})
    found = export_triton(built, models, name="m")
    assert accelerator_of(models / "m-graph") == {"trt_engine_cache_enable": "0"}
    assert (models / "m-graph/1/model.onnx/model.plan").is_file()
    assert not any("the server builds" in note for note in found.notes)
    name = next(built.path.glob("engines/*")).name
    with pytest.raises(OptionError) as error:
        export_triton(built, models, profile=PROFILES[:1], engine_cache="/opt/engines")
    assert "found 2 problems:\n- option 'profile' is set" in str(error.value)
    assert f"- option 'engine_cache' is set, but the artifact has the engine {name}" in str(
        error.value
    )


def test_server_builds_for_one_profile_that_covers_every_request(int8, models, tmp_path):
    said = r"set 2 times.*Use one that covers them all: --profile batch=1:8:32,sequence=8:64:128"
    with pytest.raises(OptionError, match=said):
        export_triton(int8, models, profile=PROFILES)
    with pytest.raises(ShapeError, match="needs at least 2 rows"):
        export_triton(int8, models, profile=("batch=2:4:8,sequence=8:16:64",))
    assert not models.exists()
    relative = shutil.copytree(int8.path, tmp_path / "relative")
    settings = json.loads((relative / "config.json").read_text())
    (relative / "config.json").write_text(json.dumps({**settings, "model_type": "t5"}))
    commit_artifact(relative, int8.manifest)
    with pytest.raises(ShapeError, match=r"the largest size of the dim 'sequence' is unknown"):
        export_triton(relative, models)
    assert not models.exists()
    fixed = product(tmp_path / "fixed", batch=4)
    found = export_triton(fixed, models, name="m", provider="tensorrt")
    assert accelerator_of(models / "m") == {"trt_engine_cache_enable": "0"}
    assert any("the server builds one at every load" in note for note in found.notes)


@pytest.mark.parametrize(
    ("made", "provider", "said"),
    [
        ({}, "cuda", "is int8, fp32 elsewhere, made for TensorRT: ONNX Runtime's CUDA provider"),
        ({"residual": "fp16"}, "cuda", "multiplies it in floating point. Leave out --provider"),
        ({"precision": "fp8"}, "cuda", "is fp8, fp32 elsewhere, made for TensorRT"),
        ({"precision": "fp8"}, "cpu", "has no FP8 products on the CPU"),
        ({"target": "cpu"}, "cuda", "is dynamic int8, fp32 elsewhere: ONNX Runtime has these"),
        ({"target": "cpu"}, "tensorrt", "TensorRT cannot parse its operators"),
    ],
)
def test_provider_that_the_artifact_is_not_made_for_is_an_error(
    mood, tmp_path, models, made, provider, said
):
    artifact = made_for(mood, tmp_path / "made", **made)
    with pytest.raises(OptionError) as error:
        export_triton(artifact, models, provider=provider)
    assert said in str(error.value)
    assert not models.exists()


def test_provider_follows_from_the_artifact(mood, int8, tmp_path, models):
    def kind():
        export_triton(made, models, name="m")
        accelerated = accelerator_of(models / "m-graph") is not None
        group = read_config(models / "m-graph").instance_group[0]
        return "tensorrt" if accelerated else group.Kind.Name(group.kind)

    made = mood
    assert kind() == "KIND_GPU"
    made = made_for(mood, tmp_path / "dynamic", target="cpu")
    assert kind() == "KIND_CPU"
    made = made_for(mood, tmp_path / "fp8", precision="fp8", residual="fp16")
    assert kind() == "tensorrt"
    fp16 = mood.manifest.model_copy(update={"precision": "fp16", "target": "tensorrt"})
    shutil.copytree(mood.path, tmp_path / "fp16")
    commit_artifact(tmp_path / "fp16", fp16)
    made = Artifact.open(tmp_path / "fp16")
    assert kind() == "KIND_GPU", "its operators are standard ones"


def test_int8_on_the_cpu_says_how_it_multiplies(mood, int8, tmp_path, models):
    found = export_triton(int8, models, name="m", provider="cpu")
    assert any("multiplies INT8 with FP16 elsewhere in floating point" in n for n in found.notes)
    full = made_for(mood, tmp_path / "full")
    found = export_triton(full, models, name="m", provider="cpu")
    assert any("without VNNI, ONNX Runtime's INT8 products saturate" in n for n in found.notes)
    found = export_triton(mood, models, name="m", provider="cpu")
    assert not any("INT8" in note for note in found.notes)


def test_one_of_several_engines_must_be_chosen(mood, tmp_path, models):
    engines = [{**CLASSIC, "profiles": (profile,)} for profile in PROFILES]
    artifact = with_engines(mood, tmp_path / "built", *engines)
    with pytest.raises(ArtifactError, match="has other profiles than") as error:
        export_triton(artifact, models, backend="tensorrt")
    name = str(error.value).rpartition(" ")[2]
    export_triton(artifact, models, backend="tensorrt", engine=name, name="m", tokenizer=False)
    assert len(read_config(models / "m").instance_group[0].profile) == 1
    with pytest.raises(OptionError, match=r"ONNX Runtime's backend loads only one"):
        export_triton(artifact, models, provider="tensorrt")
    with pytest.raises(OptionError, match="has no engine 'nothing'"):
        export_triton(artifact, models, backend="tensorrt", engine="nothing")
    with pytest.raises(OptionError, match="has its own profiles"):
        export_triton(artifact, models, backend="tensorrt", engine=name, profile=PROFILES[:1])


@pytest.mark.parametrize(
    ("profiles", "largest"),
    [
        (["batch=1:8:32,sequence=8:64:128"], 32),
        # A batch of 32 long texts is in no profile.
        (["batch=1:8:32,sequence=8:64:128", "batch=1:2:4,sequence=128:256:512"], 4),
        # The second covers all that the first does.
        (["batch=1:1:1,sequence=8:16:64", "batch=1:8:16,sequence=8:64:128"], 16),
        (["batch=1,sequence=8:16:64", "batch=2:8:16,sequence=8:16:64"], 16),
        (["batch=1,sequence=8:16:64", "batch=4:8:16,sequence=8:16:64"], 1),
        ([], 0),
    ],
)
def test_largest_batch_is_covered_by_every_profile(profiles, largest):
    assert largest_batch([Profile.parse(text) for text in profiles], "batch") == largest


def test_profile_without_a_single_row_is_an_error():
    with pytest.raises(ShapeError, match="needs at least 2 rows"):
        largest_batch([Profile.parse("batch=2:4:8,sequence=8")], "batch")


# The repository


def tree(directory: Path) -> dict[str, bytes]:
    """Return a folder's files, without the byte code of model.py."""
    return {
        str(p.relative_to(directory)): p.read_bytes()
        for p in directory.rglob("*")
        if p.is_file() and p.suffix != ".pyc"
    }


def test_export_replaces_its_models_and_keeps_others(mood, models):
    (models / "other/1").mkdir(parents=True)
    (models / "other/config.pbtxt").write_text("mine")
    export_triton(mood, models, name="m")
    first = tree(models)
    export_triton(mood, models, name="m")
    assert tree(models) == first
    assert (models / "other/config.pbtxt").read_text() == "mine"
    found = export_triton(mood, models, name="m", tokenizer=False)
    assert sorted(path.name for path in models.iterdir()) == ["m", "other"]
    assert not list(models.parent.glob(".tmp-*"))
    (said,) = (note for note in found.notes if "earlier export" in note)
    assert said.startswith("removed m-graph, m-tokenizer, m-answers, which an earlier export wrote")


@pytest.mark.skipif(sys.platform == "win32", reason="modes are of POSIX")
def test_all_users_can_read_the_repository(exported, tmp_path, models):
    artifact = large(exported("bert", "text-classification"), tmp_path / "large")
    for path in artifact.path.iterdir():
        path.chmod(0o700 if path.is_dir() else 0o600)
    before = os.umask(0o077)
    try:
        export_triton(artifact, models, name="m", provider="cpu")
    finally:
        os.umask(before)
    for path in (path for part in models.iterdir() for path in (part, *part.rglob("*"))):
        assert path.stat().st_mode & 0o777 == (0o755 if path.is_dir() else 0o644), path
    assert (artifact.path / "tokenizer.json").stat().st_mode & 0o777 == 0o600
    assert (artifact.path / "model.onnx.data").stat().st_mode & 0o777 == 0o600


def test_other_folder_is_never_overwritten(mood, models):
    (models / "m-tokenizer").mkdir(parents=True)
    (models / "m-tokenizer/config.pbtxt").write_text("mine")
    before = tree(models)
    with pytest.raises(ArtifactError, match="was not written by export-triton"):
        export_triton(mood, models, name="m")
    assert tree(models) == before


def test_edited_folder_is_never_overwritten(mood, models):
    export_triton(mood, models, name="m")
    config = models / "m-graph/config.pbtxt"
    config.write_text(config.read_text() + "# tuned by hand\n")
    with pytest.raises(ArtifactError, match=r"edited after its export: config.pbtxt"):
        export_triton(mood, models, name="m")
    assert "# tuned by hand" in config.read_text()


def test_name_of_another_exports_model_is_an_error(mood, models):
    export_triton(mood, models, name="m")
    with pytest.raises(ArtifactError, match="belongs to the export 'm'"):
        export_triton(mood, models, name="m-graph", tokenizer=False)


def test_failure_while_writing_keeps_the_old_models(mood, models, monkeypatch):
    from enginery.deploy.triton import repository as triton_repository

    export_triton(mood, models, name="m")
    before = tree(models)

    def full(source, target):
        raise OSError(28, "No space left on device", str(target))

    monkeypatch.setattr(triton_repository, "link_or_copy", full)
    with pytest.raises(ArtifactError, match="No space left on device"):
        export_triton(mood, models, name="m")
    assert tree(models) == before
    assert not list(models.parent.glob(".tmp-*"))


def test_leftovers_of_this_repository_only_are_removed(mood, models):
    names = [
        f".tmp-{repository}-0123456789ab"
        for repository in ("models", "models-b", "models-triton", "model.")
    ]
    for name in names:
        (models.parent / name / "new").mkdir(parents=True)
    export_triton(mood, models, name="m")
    assert sorted(path.name for path in models.parent.glob(".tmp-*")) == sorted(names[1:])


EXPORT = """
import os, sys
from pathlib import Path
artifact, models, name, home, pause = sys.argv[1:]
os.environ["ENGINERY_HOME"] = home
from enginery.api import export_triton, quantize_model
from enginery.deploy.triton import repository as triton_repository
from enginery.deploy.triton import stage as triton
write, place = triton_repository._write, triton.install_models
def wait(*arguments):
    write(*arguments)
    if pause and arguments[0].name == name:
        print("staged", flush=True)
        sys.stdin.readline()
def ask(*arguments, **options):
    print("asking", flush=True)
    return place(*arguments, **options)
triton_repository._write, triton.install_models = wait, ask
export_triton(artifact, models, name=name, provider="cpu")
"""


@pytest.mark.more
@pytest.mark.skipif(sys.platform == "win32", reason="Windows locks no directories")
def test_exports_with_different_stores_are_serialized(mood, models, tmp_path):
    first = start(EXPORT, mood.path, models, "one", tmp_path / "home-one", "pause")
    assert [first.stdout.readline() for _ in range(2)] == ["asking\n", "staged\n"]
    second = start(EXPORT, mood.path, models, "two", tmp_path / "home-two", "")
    assert second.stdout.readline() == "asking\n"
    with pytest.raises(subprocess.TimeoutExpired):
        second.wait(timeout=1)
    assert [child.communicate("go\n")[1] for child in (first, second)] == ["", ""]
    assert (first.returncode, second.returncode) == (0, 0)
    parts = ("", "-graph", "-tokenizer", "-answers")
    names = sorted(n + p for n in ("one", "two") for p in parts)
    assert sorted(read_config(directory).name for directory in models.iterdir()) == names
    assert not list(models.parent.glob(".tmp-*"))


KILLED = """
import os, sys
from enginery.core import scratch
artifact, models = sys.argv[1:]
exchanged = scratch._exchange
def killed_after(one, other):
    found = exchanged(one, other)
    if "/.tmp-models-" in f"{one}{other}":
        os._exit(9)
    return found
scratch._exchange = killed_after
from enginery.api import export_triton
export_triton(artifact, models, name="m", provider="cpu")
"""


@pytest.mark.skipif(sys.platform != "linux", reason="other systems cannot exchange names")
def test_killed_export_keeps_every_model(mood, models):
    export_triton(mood, models, name="m", provider="cpu")
    before = tree(models)
    with start(KILLED, mood.path, models) as child:
        assert child.wait() == 9
    assert tree(models) == before
    assert list(models.parent.glob(".tmp-*"))
    export_triton(mood, models, name="m", provider="cpu")
    assert not list(models.parent.glob(".tmp-*"))


def test_artifact_or_file_cannot_be_a_repository(mood, copied, tmp_path):
    with pytest.raises(ArtifactError, match="is an artifact, as it has a"):
        export_triton(mood, copied(mood).path)
    (tmp_path / "file").write_text("")
    with pytest.raises(ArtifactError, match="is a file"):
        export_triton(mood, tmp_path / "file")


def test_changed_or_failed_artifact_is_not_exported(mood, copied, models):
    artifact = copied(mood)
    failed = artifact.annotate(verdict(passed=False), b"")
    with pytest.raises(RejectedArtifactError, match="failed its validation"):
        export_triton(failed, models)
    export_triton(failed, models, allow_failed=True)
    (artifact.path / "tokenizer.json").write_text("{}")
    with pytest.raises(ArtifactError, match=r"tokenizer.json"):
        export_triton(artifact, models)


def test_artifact_without_tokenizer_exports_only_the_graph(mood, copied, models):
    artifact = copied(mood)
    (artifact.path / "tokenizer.json").unlink()
    commit_artifact(artifact.path, artifact.manifest)
    found = export_triton(Artifact.open(artifact.path), models, name="m")
    assert found.models == ("m",)
    assert any("no tokenizer.json" in note for note in found.notes)


# Options


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"name": "../up"}, "option 'name' is '../up'"),
        ({"instances": 0}, "option 'instances' is 0, expected a whole number from 1"),
        ({"max_batch_size": 2**31}, "option 'max_batch_size' is 2147483648"),
        ({"backend": "tensorrt", "provider": "cpu"}, "needs a GPU"),
        (
            {"engine": "e", "provider": "cuda"},
            "'engine' is set, but provider 'cuda' uses no engine",
        ),
        ({"engine_cache": "/e"}, "'engine_cache' is set, but provider 'cuda' uses no engine"),
        ({"engine_cache": "/e", "backend": "tensorrt"}, "gets an engine and builds none"),
        ({"engine_cache": "/e\n", "provider": "tensorrt"}, "expected one line of text"),
        ({"execution_env": " /env"}, "expected one line of text"),
        ({"profile": ("batch=1,seq=8",)}, "no dynamic dim 'seq'"),
        ({"profile": ("batch=1,sequence=8:16:500",)}, "positions end at 128"),
        ({"tokenizers": True}, "did you mean 'tokenizer'?"),
    ],
)
def test_options_that_triton_rejects_are_errors(mood, models, options, said):
    with pytest.raises((OptionError, ShapeError)) as error:
        export_triton(mood, models, **options)
    assert said in str(error.value)
    assert not models.exists()


def test_all_wrong_options_are_in_one_message(mood, models, capsys):
    with pytest.raises(OptionError) as error:
        export_triton(mood, models, name="a b", threads=-1, execution_env=" /env")
    first, *listed = str(error.value).splitlines()
    assert first == "found 3 problems:"
    assert [line.split("'")[1] for line in listed] == ["name", "threads", "execution_env"]
    with pytest.raises(SystemExit) as ended:
        main(["export-triton", "--threads=-1"])
    assert ended.value.code == 2
    said = capsys.readouterr().err
    assert "ARTIFACT, OUT are missing" in said
    assert "option 'threads' is -1" in said


def test_python_models_import_neither_onnxruntime_nor_a_framework():
    code = (
        "import sys, enginery.deploy.triton.steps;"
        "print(sorted({'onnxruntime', 'torch', 'transformers', 'onnx', 'pyarrow', 'PIL', 'mlflow'}"
        " & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "[]"


def test_model_reports_that_enginery_is_missing(mood, models, tmp_path):
    export_triton(mood, models, name="m")
    (tmp_path / "triton_python_backend_utils.py").write_text("")
    code = (
        "import runpy, sys; sys.path.insert(0, sys.argv[2]); sys.modules['enginery'] = None;"
        "runpy.run_path(sys.argv[1])"
    )
    words = [sys.executable, "-c", code, models / "m-tokenizer/1/model.py", tmp_path]
    found = subprocess.run([*map(str, words)], capture_output=True, text=True, check=False)
    assert "needs the package 'enginery' in Triton's Python" in found.stderr


def test_execution_env_is_in_the_python_models(mood, models):
    export_triton(mood, models, name="m", execution_env="/opt/env.tar.gz", tokenizer_instances=5)
    for part in ("tokenizer", "answers"):
        config = read_config(models / f"m-{part}")
        assert config.parameters["EXECUTION_ENV_PATH"].string_value == "/opt/env.tar.gz"
        assert config.instance_group[0].count == 5


def test_command_prints_the_result(mood, models, capsys):
    words = ["export-triton", str(mood.path), str(models), "--name", "m", "--provider", "cpu"]
    with pytest.raises(SystemExit) as ended:
        main([*words, "--json"])
    assert not ended.value.code
    found = json.loads(capsys.readouterr().out)
    assert found["models"] == ["m-graph", "m-tokenizer", "m-answers", "m"]
    assert TritonConfig().max_batch_size == found["max_batch_size"]
