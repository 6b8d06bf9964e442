"""Valid and invalid notations of requested providers."""

import re

import pytest
import yaml

from enginery.core.errors import OptionError, ProviderError
from enginery.runtime.model import load_model
from enginery.runtime.onnxruntime.runner import OrtRunner, RunnerOptions
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


def third_version(**settings):
    """The settings of RapidOCR 3.10, with others in the section of ONNX Runtime."""
    onnxruntime = {
        "intra_op_num_threads": -1,
        "inter_op_num_threads": -1,
        "enable_cpu_mem_arena": False,
        "cpu_ep_cfg": {"arena_extend_strategy": "kSameAsRequested"},
        "use_cuda": False,
        "cuda_ep_cfg": {"device_id": 1},
        "use_dml": False,
        "dml_ep_cfg": None,
        "use_cann": False,
        "cann_ep_cfg": {"device_id": 0},
        "use_coreml": False,
        "coreml_ep_cfg": {"MLComputeUnits": "ALL"},
    }
    return {
        "Global": {"use_det": True, "use_cls": True},
        "Det": {"engine_type": "onnxruntime", "use_dilation": True},
        "Cls": {"engine_type": "onnxruntime"},
        "Rec": {"engine_type": "onnxruntime"},
        "EngineConfig": {
            "mnn": {},
            "onnxruntime": onnxruntime | settings,
            "torch": {"use_cuda": False, "use_mps": False},
            "tensorrt": {"use_fp16": True, "use_int8": False},
        },
    }


@pytest.mark.parametrize("read", [yaml.safe_dump, dict])
@pytest.mark.parametrize(
    "part",
    [
        lambda file: file,
        lambda file: {"EngineConfig": file["EngineConfig"]},
        lambda file: file["EngineConfig"],
        lambda file: {"onnxruntime": file["EngineConfig"]["onnxruntime"]},
        lambda file: file["EngineConfig"]["onnxruntime"],
    ],
)
def test_rapidocrs_third_version_is_read_whole_and_in_parts(part, read):
    assert parse_providers(read(part(third_version(use_cuda=True)))) == (
        ProviderSpec("cuda", {"device_id": "1"}),
        ProviderSpec("cpu", {"enable_cpu_mem_arena": "0"}),
    )


def test_rapidocrs_switches_name_the_providers_in_its_own_order():
    switches = dict.fromkeys(("use_cuda", "use_dml", "use_cann", "use_coreml"), True)
    specs = parse_providers(third_version(**switches))
    assert [spec.name for spec in specs] == ["coreml", "cann", "directml", "cuda", "cpu"]
    assert specs[0].options == {"MLComputeUnits": "ALL"}
    dml = third_version(use_dml=True, dml_ep_cfg={"device_id": 2})
    assert parse_providers(dml)[0] == ProviderSpec("directml", {"device_id": "2"})


@pytest.mark.parametrize(
    ("settings", "words", "do"),
    [
        ({"use_tensorrt": True}, "use_tensorrt is true, but no execution provider", "use_cuda"),
        ({"use_mps": "maybe"}, "use_mps: found 'maybe', expected true or false", ""),
        ({"intra_op_num_threads": 4}, "intra_op_num_threads is 4", "--threads 4"),
        ({"inter_op_num_threads": 2}, "inter_op_num_threads is 2", "one after the other"),
        ({"enable_cpu_mem_arena": "maybe"}, "found 'maybe', expected true or false", ""),
        ({"log_severity": 1}, "onnxruntime: unknown key 'log_severity'", "Leave it out"),
        ({"coreml_ep_cfg": 3}, "coreml_ep_cfg: found '3', expected the options of coreml", ""),
    ],
)
@pytest.mark.parametrize("read", [yaml.safe_dump, dict])
def test_settings_of_rapidocr_that_have_no_effect_are_an_error(settings, words, do, read):
    with pytest.raises(OptionError, match=re.escape(words)) as error:
        parse_providers(read(third_version(**settings)))
    assert do in error.value.do


def test_switches_and_threads_of_version_one_are_checked_too():
    with pytest.raises(OptionError, match="Det: use_npu is true, but no execution provider"):
        parse_providers(whole_file(Det={"use_npu": True}))
    with pytest.raises(OptionError, match="Global: intra_op_num_threads is 2"):
        parse_providers(whole_file() | {"Global": {"intra_op_num_threads": 2}})
    with pytest.raises(OptionError, match="use_npu is true, but no execution provider"):
        parse_providers({"use_npu": True})


def test_another_engine_of_rapidocr_is_an_error():
    file = third_version(use_cuda=True)
    file["EngineConfig"]["torch"]["use_mps"] = True
    assert parse_providers(file)[0].name == "cuda"  # engine_type says that torch is not used
    with pytest.raises(OptionError, match="torch: use_mps is true, but only the section onnx"):
        parse_providers(file["EngineConfig"])
    file["Rec"]["engine_type"] = "torch"
    with pytest.raises(OptionError, match="Rec: engine_type is 'torch'"):
        parse_providers(file)
    with pytest.raises(OptionError, match="onnxruntime: found '3', expected a section"):
        parse_providers({"EngineConfig": {"onnxruntime": 3}})
    assert parse_providers({"EngineConfig": {"onnxruntime": None}}) == (ProviderSpec("cpu"),)


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


FILES = {
    "config.yaml": yaml.safe_dump(third_version(use_cuda=True)),
    "providers.yml": "- cuda: {device_id: 1}\n- cpu: {enable_cpu_mem_arena: no}",
    "Providers.JSON": '{\n\t"cuda": {"device_id": 1},\n\t"cpu": {"enable_cpu_mem_arena": false}}',
    "marked.json": '\ufeff[{"cuda": {"device_id": 1}}, {"cpu": {"enable_cpu_mem_arena": 0}}]',
}


@pytest.mark.parametrize("name", FILES)
def test_a_file_that_is_named_is_read(name, tmp_path, monkeypatch):
    (tmp_path / name).write_text(FILES[name], encoding="utf-8")
    expected = (
        ProviderSpec("cuda", {"device_id": "1"}),
        ProviderSpec("cpu", {"enable_cpu_mem_arena": "0"}),
    )
    assert parse_providers(tmp_path / name) == parse_providers(str(tmp_path / name)) == expected
    monkeypatch.chdir(tmp_path)
    assert parse_providers(name) == expected
    monkeypatch.setenv("ENGINERY_PROVIDERS", name)
    assert parse_providers() == expected
    assert parse_providers(options=["cuda.device_id=0"])[0].options == {"device_id": "0"}


def test_a_file_that_is_missing_or_invalid_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(OptionError, match=r"providers: the file config\.yaml does not exist"):
        parse_providers("config.yaml")
    (tmp_path / "config.yaml").write_text("config.yaml")  # a file is not followed to another
    with pytest.raises(ProviderError, match=r"config\.yaml: unknown execution provider"):
        parse_providers("config.yaml")
    (tmp_path / "config.yaml").write_text("cuda: {devise_id: 0}")
    with pytest.raises(OptionError, match=r"config\.yaml: unknown option 'devise_id' for cuda"):
        parse_providers("config.yaml")
    (tmp_path / "config.yaml").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(OptionError, match=r"the file config\.yaml cannot be read: "):
        parse_providers("config.yaml")
    (tmp_path / "folder.json").mkdir()
    with pytest.raises(OptionError, match=r"the file folder\.json cannot be read: "):
        parse_providers("folder.json")


def test_an_option_with_the_name_of_a_file_is_no_file():
    text = "openvino; openvino.load_config=missing.json"
    assert parse_providers(text)[0].options == {"load_config": "missing.json"}
    assert parse_providers('[{openvino: {load_config: "missing.json"}}]\n')[0].name == "openvino"


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
        ("cpu", ["cpu.threads=2"], "unknown option 'threads' for cpu"),
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


def test_there_is_no_arena_to_shrink_if_it_is_off():
    specs = parse_providers("cuda,cpu; cpu.enable_cpu_mem_arena=false")
    check_run_options(specs)
    with pytest.raises(OptionError, match="there is no arena to shrink"):
        check_run_options(specs, shrink_arena=True)


def test_runner_rejects_invalid_run_options(tiny, monkeypatch):
    artifact = tiny.artifact("bert", "text-classification")
    with pytest.raises(OptionError, match="a CUDA graph replays in the arena's memory"):
        OrtRunner(artifact, RunnerOptions(cuda_graph=True, shrink_arena=True), providers=["cuda"])
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

    def runner(_, options, **chosen):
        given.update({**vars(options), **chosen})
        raise Stopped

    monkeypatch.setattr("enginery.runtime.model.OrtRunner", runner)
    with pytest.raises(Stopped):
        load_model(
            artifact,
            providers="cuda",
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
