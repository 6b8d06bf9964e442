"""Valid and invalid notations of requested providers."""

import re

import pytest
import yaml

from enginery.core.errors import OptionError, ProviderError
from enginery.runtime.model import load_model
from enginery.runtime.onnxruntime.runner import OrtRunner, RunnerOptions
from enginery.runtime.providers.specification import (
    ProviderSpec,
    check_run_options,
    format_providers,
    parse_providers,
)

CUDA_OPTIONS = {
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
        ProviderSpec("cuda", CUDA_OPTIONS | {"cudnn_conv_algo_search": "HEURISTIC"}),
        ProviderSpec("cpu"),
    )
    assert parse_providers(text) == expected
    assert parse_providers(yaml.safe_load(text)) == expected


def test_onnxruntimes_own_list_of_names_and_pairs_is_read():
    limit = 2 * 1024 * 1024 * 1024
    given = [("CUDAExecutionProvider", {"gpu_mem_limit": limit}), "CPUExecutionProvider"]
    assert parse_providers(given) == (
        ProviderSpec("cuda", {"gpu_mem_limit": "2147483648"}),
        ProviderSpec("cpu"),
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
    "config.yaml": "cuda:\n  device_id: 1\ncpu:\n  enable_cpu_mem_arena: false\n",
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
    specs = parse_providers("TensorRT, cuda,CPUExecutionProvider,CUDAExecutionProvider,DNNL")
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
