"""Valid and invalid notations of requested providers."""

import re

import pytest
import yaml

from enginery.core.errors import OptionError, ProviderError
from enginery.runtime.model import load_model
from enginery.runtime.onnxruntime.runner import OrtRunner
from enginery.runtime.providers.options import CudaOptions, TensorrtOptions, TensorrtRtxOptions
from enginery.runtime.providers.specification import (
    ProviderSpec,
    check_run_options,
    format_providers,
    parse_providers,
)

# The page of RapidOCR on slow GPUs has this file and this list.
RAPIDOCR = """\
use_cuda: true
CUDAExecutionProvider:
    device_id: 0
    arena_extend_strategy: kNextPowerOfTwo
    gpu_mem_limit: 2 * 1024 * 1024 * 1024
    cudnn_conv_algo_search: EXHAUSTIVE
    do_copy_in_default_stream: true
"""


RAPIDOCR_OPTIONS = {
    "device_id": "0",
    "arena_extend_strategy": "kNextPowerOfTwo",
    "gpu_mem_limit": "2147483648",
    "cudnn_conv_algo_search": "EXHAUSTIVE",
    "do_copy_in_default_stream": "1",
}


def test_names_and_options_of_the_command_line_are_read_in_order():
    specs = parse_providers("TensorRT,cuda,CPUExecutionProvider", ["cuda.gpu_mem_limit=2GiB"])
    assert specs == (
        ProviderSpec("tensorrt"),
        ProviderSpec("cuda", {"gpu_mem_limit": "2147483648"}),
        ProviderSpec("cpu"),
    )


def test_a_recipes_list_is_read_and_a_name_in_it_may_stand_alone():
    text = """[{cuda: {device_id: 0, arena_extend_strategy: kNextPowerOfTwo, gpu_mem_limit: 2 GiB,
    cudnn_conv_algo_search: HEURISTIC, do_copy_in_default_stream: true}}, cpu]"""
    expected = (
        ProviderSpec("cuda", RAPIDOCR_OPTIONS | {"cudnn_conv_algo_search": "HEURISTIC"}),
        ProviderSpec("cpu"),
    )
    assert parse_providers(text) == expected
    assert parse_providers(yaml.safe_load(text)) == expected


@pytest.mark.parametrize("read", [str, yaml.safe_load])
def test_rapidocrs_own_keys_are_read_as_they_are(read):
    assert parse_providers(read(RAPIDOCR)) == (
        ProviderSpec("cuda", RAPIDOCR_OPTIONS),
        ProviderSpec("cpu"),
    )


def test_rapidocr_without_cuda_is_the_cpu_and_its_options_are_checked_all_the_same():
    assert parse_providers(RAPIDOCR.replace("use_cuda: true", "use_cuda: false")) == (
        ProviderSpec("cpu"),
    )
    with pytest.raises(OptionError, match="did you mean 'device_id'"):
        parse_providers({"use_cuda": False, "CUDAExecutionProvider": {"devise_id": 0}})
    with pytest.raises(OptionError, match="use_cuda: found 'maybe', expected true or false"):
        parse_providers({"use_cuda": "maybe"})


def test_rapidocrs_third_version_is_read_too():
    config = {
        "EngineConfig": {
            "onnxruntime": {
                "intra_op_num_threads": -1,
                "use_cuda": True,
                "cuda_ep_cfg": {"device_id": 1},
                "use_dml": False,
                "dm_ep_cfg": None,
            }
        }
    }
    assert parse_providers(config) == (
        ProviderSpec("cuda", {"device_id": "1"}),
        ProviderSpec("cpu"),
    )


def whole_file(**sections):
    """A config.yaml of version 1, with what a section says of providers."""
    names = ("Det", "Cls", "Rec")
    parts = {
        name: {"model_path": "x.onnx", "use_cuda": False, **sections.get(name, {})}
        for name in names
    }
    return {"Global": {"text_score": 0.5, "use_det": True}, **parts}


@pytest.mark.parametrize("read", [yaml.safe_dump, dict])
def test_rapidocrs_whole_file_of_version_one_is_read(read):
    cuda = {"use_cuda": True, "CUDAExecutionProvider": {"device_id": 1}}
    expected = (ProviderSpec("cuda", {"device_id": "1"}), ProviderSpec("cpu"))
    assert parse_providers(read(whole_file(Det=cuda, Cls=cuda, Rec=cuda))) == expected
    assert parse_providers(read(whole_file())) == (ProviderSpec("cpu"),)
    # The third version has such sections too, and the providers elsewhere.
    third = {
        "Det": {"engine_type": "onnxruntime"},
        "EngineConfig": {"onnxruntime": {"use_cuda": True, "cuda_ep_cfg": {"device_id": 1}}},
    }
    assert parse_providers(read(third)) == expected
    assert parse_providers({"Global": {"text_score": 0.5}, "Det": {"model_path": "x"}}) == (
        ProviderSpec("cpu"),
    )


def test_sections_of_rapidocr_that_differ_are_both_named():
    cuda = {"use_cuda": True, "CUDAExecutionProvider": {"device_id": 1}}
    with pytest.raises(OptionError, match=r"Det requests 'cuda,cpu; cuda\.device_id=1' and Cls"):
        parse_providers(whole_file(Det=cuda, Rec=cuda))
    with pytest.raises(OptionError, match="Rec: unknown option 'devise_id' for cuda"):
        parse_providers(whole_file(Rec={"CUDAExecutionProvider": {"devise_id": 1}}))


def test_onnxruntimes_own_list_of_names_and_pairs_is_read():
    limit = 2 * 1024 * 1024 * 1024
    given = [("CUDAExecutionProvider", {"gpu_mem_limit": limit}), "CPUExecutionProvider"]
    assert parse_providers(given) == (
        ProviderSpec("cuda", {"gpu_mem_limit": "2147483648"}),
        ProviderSpec("cpu"),
    )


def test_typed_options_pass_on_only_changed_values():
    (spec, _) = parse_providers([CudaOptions(gpu_mem_limit=1 << 30, use_tf32=False), "cpu"])
    assert spec == ProviderSpec("cuda", {"gpu_mem_limit": "1073741824", "use_tf32": "0"})
    assert parse_providers(
        [TensorrtOptions(trt_engine_cache_enable=True), TensorrtRtxOptions()]
    ) == (
        ProviderSpec("tensorrt", {"trt_engine_cache_enable": "True"}),
        ProviderSpec("tensorrt-rtx"),
    )


def test_the_environment_holds_where_nothing_is_named(monkeypatch):
    monkeypatch.setenv("ENGINERY_PROVIDERS", "cuda, cpu; cuda.device_id=1; cuda.use_tf32=off")
    assert parse_providers() == (
        ProviderSpec("cuda", {"device_id": "1", "use_tf32": "0"}),
        ProviderSpec("cpu"),
    )
    assert parse_providers("cpu") == (ProviderSpec("cpu"),)
    assert parse_providers(default="cpu")[0].name == "cuda"
    monkeypatch.setenv("ENGINERY_PROVIDERS", "cudaa")
    with pytest.raises(ProviderError, match="ENGINERY_PROVIDERS: unknown execution provider"):
        parse_providers()
    monkeypatch.setenv("ENGINERY_PROVIDERS", "cuda; cuda.device=1")
    with pytest.raises(OptionError, match="ENGINERY_PROVIDERS: unknown option 'device' for cuda"):
        parse_providers()


def test_default_provider_is_used_and_no_provider_is_an_error():
    assert parse_providers(default="cpu") == (ProviderSpec("cpu"),)
    with pytest.raises(ProviderError, match="no execution provider was requested"):
        parse_providers()


def test_an_option_of_the_command_line_goes_before_the_same_one_of_a_recipe():
    specs = parse_providers([{"cuda": {"device_id": 0}}], ["CUDAExecutionProvider.device_id=1"])
    assert specs[0].options == {"device_id": "1"}


def test_a_specification_as_text_is_read_again_the_same():
    specs = parse_providers(
        "tensorrt,cuda,cpu", ["cuda.gpu_mem_limit=2GiB", "tensorrt.device_id=1"]
    )
    text = "tensorrt,cuda,cpu; tensorrt.device_id=1; cuda.gpu_mem_limit=2147483648"
    assert format_providers(specs) == text
    assert parse_providers(text) == parse_providers(specs) == specs
    several = parse_providers("tensorrt", ["tensorrt.trt_extra_plugin_lib_paths=a.so;b.so"])
    assert parse_providers(format_providers(several)) == several


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        ("cuda", ["cuda.gpu_mem_limits=1"], "did you mean 'gpu_mem_limit'?"),
        ("cpu", ["cuda.device_id=0"], "is for cuda, which is not requested; requested: cpu"),
        ("cuda", ["device_id=0"], "expected provider.option=value"),
        ("cuda", ["cuda.device_id"], "expected provider.option=value"),
        ("cpu", ["cpu.threads=2"], "the CPU provider takes no options"),
        ("cuda; cuda.device_id=0; cuda.device_id=1", [], "given twice: '0' and '1'"),
        ([{"cuda": {"device_id": 0}}, {"cuda": {"device_id": 1}}], [], "given twice: '0' and '1'"),
        ([{"cuda": 3}], [], "provider 'cuda': found '3', expected its options"),
        ([3], [], "found a int in the list"),
        (3, [], "found a int, expected names"),
        ([{"openvino": {"device_type": ["CPU"]}}], [], "found a list, expected one value"),
    ],
)
def test_invalid_specification_is_an_error_with_the_reason(given, options, words):
    with pytest.raises(OptionError, match=re.escape(words)):
        parse_providers(given, options)


def test_yaml_with_tags_is_rejected_and_not_executed(monkeypatch):
    monkeypatch.setattr("os.system", lambda _: pytest.fail("ran"))
    with pytest.raises(OptionError, match="provider 'cuda': found a list, expected its options"):
        parse_providers("[{cuda: !!python/object/apply:os.system [ls]}]")


@pytest.mark.parametrize("text", ["[cuda", "[{cuda: {device_id: 0, device_id: 1}}]"])
def test_providers_that_are_no_yaml_are_an_error_and_no_traceback(text):
    with pytest.raises(OptionError, match="providers are not YAML: "):
        parse_providers(text)


def test_names_are_taken_short_full_and_in_any_case_each_once():
    specs = parse_providers("TensorRT, cuda,CPUExecutionProvider,CUDAExecutionProvider,oneDNN")
    assert [spec.name for spec in specs] == ["tensorrt", "cuda", "cpu", "dnnl"]


@pytest.mark.parametrize("given", [" , ", (), {}])
def test_naming_no_provider_is_an_error(given):
    with pytest.raises(ProviderError, match="no execution provider was requested"):
        parse_providers(given)


# Ways of running


@pytest.mark.parametrize("text", ["cpu", "openvino,cuda", "directml"])
def test_cuda_graphs_are_nvidias(text):
    with pytest.raises(ProviderError, match=r"but \w+ has no CUDA graphs") as error:
        check_run_options(parse_providers(text), cuda_graph=True)
    assert error.value.do == "Leave it out, or run on cuda, tensorrt or tensorrt-rtx."


@pytest.mark.parametrize("text", ["cuda", "tensorrt,cuda,cpu", "tensorrt-rtx"])
def test_valid_run_options_pass(text):
    specs = parse_providers(text)
    check_run_options(specs, cuda_graph=True)
    check_run_options(specs, io_binding=False, shrink_arena=True)
    check_run_options(parse_providers("cpu"), io_binding=False, shrink_arena=True)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"io_binding": False}, "a CUDA graph replays on bound buffers"),
        ({"shrink_arena": True}, "a CUDA graph replays in the arena's memory"),
    ],
)
def test_cuda_graphs_exclude_shrink_arena_and_unbound_runs(other, message):
    with pytest.raises(OptionError, match=message):
        check_run_options(parse_providers("cuda"), cuda_graph=True, **other)


@pytest.mark.parametrize(
    "text",
    [
        "cuda; cuda.enable_cuda_graph=1",
        "tensorrt; tensorrt.trt_cuda_graph_enable=true",
        "tensorrt-rtx; tensorrt-rtx.enable_cuda_graph=yes",
        "tensorrt,cuda; cuda.enable_cuda_graph=1",
    ],
)
@pytest.mark.parametrize("cuda_graph", [False, True])
def test_providers_own_cuda_graph_option_is_rejected_with_the_alternative(text, cuda_graph):
    with pytest.raises(OptionError, match="is set by itself") as error:
        check_run_options(parse_providers(text), cuda_graph=cuda_graph)
    assert "--cuda-graph" in error.value.do
    check_run_options(
        parse_providers(text.replace("=1", "=0").replace("=true", "=no").replace("=yes", "=off"))
    )


def test_runner_rejects_invalid_run_options(tiny, monkeypatch):
    artifact = tiny.artifact("bert", "text-classification")
    with pytest.raises(OptionError, match="a CUDA graph replays in the arena's memory"):
        OrtRunner(artifact, providers=["cuda"], cuda_graph=True, shrink_arena=True)
    with pytest.raises(OptionError, match="is set by itself"):
        OrtRunner(artifact, providers=parse_providers("cuda; cuda.enable_cuda_graph=1"))
    monkeypatch.setenv("ENGINERY_PROVIDERS", "cuda; cuda.enable_cuda_graph=1")
    with pytest.raises(OptionError, match="is set by itself"):
        load_model(artifact)


def test_a_model_is_given_the_ways_it_is_to_run(tiny, monkeypatch):
    artifact = tiny.artifact("bert", "text-classification")
    given = {}

    class Stopped(Exception):  # noqa: N818  nothing is wrong
        pass

    def runner(_, **options):
        given.update(options)
        raise Stopped

    monkeypatch.setattr("enginery.runtime.model.OrtRunner", runner)
    with pytest.raises(Stopped):
        load_model(
            artifact,
            provider="cuda",
            provider_options=["cuda.gpu_mem_limit=2GiB"],
            io_binding=False,
            shrink_arena=True,
            allow_fallback=True,
        )
    assert given["providers"] == parse_providers("cuda; cuda.gpu_mem_limit=2147483648")
    ways = ("io_binding", "cuda_graph", "shrink_arena", "allow_fallback")
    assert [given[name] for name in ways] == [False, False, True, True]
    monkeypatch.undo()
    with pytest.raises(ProviderError, match="cpu has no CUDA graphs"):
        load_model(artifact, providers="cpu", cuda_graph=True)
    with load_model(artifact, providers=["cpu"]) as model:
        assert model.classify(["warm"])
