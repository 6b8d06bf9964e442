"""Wishes and options: what is read, what is refused, and what ONNX Runtime's own parsers take."""

import json
import os
import re
import shutil
import subprocess
import sys
from dataclasses import fields

import onnxruntime as ort
import pytest
import yaml

from enginery.core.errors import OptionError, ProviderError
from enginery.doctor.one_op import one_op_model
from enginery.runtime.cuda_provider_options import CudaOptions
from enginery.runtime.onnxruntime_build import provider_library
from enginery.runtime.option_fields import parse_size, parse_whole
from enginery.runtime.provider_names import CUDA, SHORT_NAMES
from enginery.runtime.provider_options import changed_options, read_options, typed_names
from enginery.runtime.provider_table import TABLE, known_provider
from enginery.runtime.provider_wish import ProviderWish, parse_wishes, wish_text
from enginery.runtime.rtx_provider_options import TensorrtRtxOptions
from enginery.runtime.tensorrt_provider_options import TensorrtOptions

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


@pytest.fixture(autouse=True)
def _no_environment(monkeypatch):
    monkeypatch.delenv("ENGINERY_PROVIDERS", raising=False)


def test_names_and_options_of_the_command_line_are_read_in_order():
    wishes = parse_wishes("TensorRT,cuda,CPUExecutionProvider", ["cuda.gpu_mem_limit=2GiB"])
    assert wishes == (
        ProviderWish("tensorrt"),
        ProviderWish("cuda", {"gpu_mem_limit": "2147483648"}),
        ProviderWish("cpu"),
    )


def test_a_recipes_list_is_read_and_a_name_in_it_may_stand_alone():
    text = """[{cuda: {device_id: 0, arena_extend_strategy: kNextPowerOfTwo, gpu_mem_limit: 2 GiB,
    cudnn_conv_algo_search: HEURISTIC, do_copy_in_default_stream: true}}, cpu]"""
    expected = (
        ProviderWish("cuda", RAPIDOCR_OPTIONS | {"cudnn_conv_algo_search": "HEURISTIC"}),
        ProviderWish("cpu"),
    )
    assert parse_wishes(text) == expected
    assert parse_wishes(yaml.safe_load(text)) == expected


@pytest.mark.parametrize("read", [str, yaml.safe_load])
def test_rapidocrs_own_keys_are_read_as_they_are(read):
    assert parse_wishes(read(RAPIDOCR)) == (
        ProviderWish("cuda", RAPIDOCR_OPTIONS),
        ProviderWish("cpu"),
    )


def test_rapidocr_without_cuda_is_the_cpu_and_its_options_are_checked_all_the_same():
    assert parse_wishes(RAPIDOCR.replace("use_cuda: true", "use_cuda: false")) == (
        ProviderWish("cpu"),
    )
    with pytest.raises(OptionError, match="did you mean 'device_id'"):
        parse_wishes({"use_cuda": False, "CUDAExecutionProvider": {"devise_id": 0}})
    with pytest.raises(OptionError, match="use_cuda: found 'maybe', expected true or false"):
        parse_wishes({"use_cuda": "maybe"})


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
    assert parse_wishes(config) == (ProviderWish("cuda", {"device_id": "1"}), ProviderWish("cpu"))


def whole_file(**sections):
    """A config.yaml of version 1, with what a section says of providers."""
    names = ("Det", "Cls", "Rec")
    parts = {name: {"model_path": "x.onnx", "use_cuda": False, **sections.get(name, {})}
             for name in names}  # fmt: skip
    return {"Global": {"text_score": 0.5, "use_det": True}, **parts}


@pytest.mark.parametrize("read", [yaml.safe_dump, dict])
def test_rapidocrs_whole_file_of_version_one_is_read(read):
    cuda = {"use_cuda": True, "CUDAExecutionProvider": {"device_id": 1}}
    expected = (ProviderWish("cuda", {"device_id": "1"}), ProviderWish("cpu"))
    assert parse_wishes(read(whole_file(Det=cuda, Cls=cuda, Rec=cuda))) == expected
    assert parse_wishes(read(whole_file())) == (ProviderWish("cpu"),)
    # The third version has such sections too, and the providers elsewhere.
    third = {
        "Det": {"engine_type": "onnxruntime"},
        "EngineConfig": {"onnxruntime": {"use_cuda": True, "cuda_ep_cfg": {"device_id": 1}}},
    }
    assert parse_wishes(read(third)) == expected
    assert parse_wishes({"Global": {"text_score": 0.5}, "Det": {"model_path": "x"}}) == (
        ProviderWish("cpu"),
    )


def test_sections_of_rapidocr_that_differ_are_both_named():
    cuda = {"use_cuda": True, "CUDAExecutionProvider": {"device_id": 1}}
    with pytest.raises(OptionError, match=r"Det asks for 'cuda,cpu; cuda\.device_id=1' and Cls"):
        parse_wishes(whole_file(Det=cuda, Rec=cuda))
    with pytest.raises(OptionError, match="Rec: unknown option 'devise_id' for cuda"):
        parse_wishes(whole_file(Rec={"CUDAExecutionProvider": {"devise_id": 1}}))


def test_onnxruntimes_own_list_of_names_and_pairs_is_read():
    limit = 2 * 1024 * 1024 * 1024
    given = [("CUDAExecutionProvider", {"gpu_mem_limit": limit}), "CPUExecutionProvider"]
    assert parse_wishes(given) == (
        ProviderWish("cuda", {"gpu_mem_limit": "2147483648"}),
        ProviderWish("cpu"),
    )


def test_typed_options_are_a_wish_and_only_what_differs_is_handed_on():
    (wish, _) = parse_wishes([CudaOptions(gpu_mem_limit=1 << 30, use_tf32=False), "cpu"])
    assert wish == ProviderWish("cuda", {"gpu_mem_limit": "1073741824", "use_tf32": "0"})
    assert changed_options(TensorrtOptions(trt_engine_cache_enable=True)) == {
        "trt_engine_cache_enable": "True"
    }
    assert changed_options(TensorrtRtxOptions()) == {}


def test_the_environment_holds_for_those_who_wish_nothing(monkeypatch):
    monkeypatch.setenv("ENGINERY_PROVIDERS", "cuda, cpu; cuda.device_id=1; cuda.use_tf32=off")
    assert parse_wishes() == (
        ProviderWish("cuda", {"device_id": "1", "use_tf32": "0"}),
        ProviderWish("cpu"),
    )
    assert parse_wishes("cpu") == (ProviderWish("cpu"),)
    assert parse_wishes(default="cpu")[0].name == "cuda"
    monkeypatch.setenv("ENGINERY_PROVIDERS", "cudaa")
    with pytest.raises(ProviderError, match="ENGINERY_PROVIDERS: unknown execution provider"):
        parse_wishes()
    monkeypatch.setenv("ENGINERY_PROVIDERS", "cuda; cuda.device=1")
    with pytest.raises(OptionError, match="ENGINERY_PROVIDERS: unknown option 'device' for cuda"):
        parse_wishes()


def test_without_a_wish_the_default_holds_and_without_a_default_there_is_an_error():
    assert parse_wishes(default="cpu") == (ProviderWish("cpu"),)
    with pytest.raises(ProviderError, match="no execution provider is named"):
        parse_wishes()


def test_an_option_of_the_command_line_goes_before_the_same_one_of_a_recipe():
    wishes = parse_wishes([{"cuda": {"device_id": 0}}], ["CUDAExecutionProvider.device_id=1"])
    assert wishes[0].options == {"device_id": "1"}


def test_a_wish_as_text_is_read_again_the_same():
    wishes = parse_wishes("tensorrt,cuda,cpu", ["cuda.gpu_mem_limit=2GiB", "tensorrt.device_id=1"])
    text = "tensorrt,cuda,cpu; tensorrt.device_id=1; cuda.gpu_mem_limit=2147483648"
    assert wish_text(wishes) == text
    assert parse_wishes(text) == parse_wishes(wishes) == wishes
    several = parse_wishes("tensorrt", ["tensorrt.trt_extra_plugin_lib_paths=a.so;b.so"])
    assert parse_wishes(wish_text(several)) == several


@pytest.mark.parametrize(
    ("given", "options", "words"),
    [
        ("cuda", ["cuda.gpu_mem_limits=1"], "did you mean 'gpu_mem_limit'?"),
        ("cpu", ["cuda.device_id=0"], "is for cuda, which is not asked for; asked for: cpu"),
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
def test_a_wish_that_cannot_be_read_says_why(given, options, words):
    with pytest.raises(OptionError, match=re.escape(words)):
        parse_wishes(given, options)


def test_yaml_that_is_more_than_data_is_refused_and_nothing_is_run(monkeypatch):
    monkeypatch.setattr("os.system", lambda _: pytest.fail("ran"))
    with pytest.raises(OptionError, match="provider 'cuda': found a list, expected its options"):
        parse_wishes("[{cuda: !!python/object/apply:os.system [ls]}]")


@pytest.mark.parametrize("text", ["[cuda", "[{cuda: {device_id: 0, device_id: 1}}]"])
def test_providers_that_are_no_yaml_are_an_error_and_no_traceback(text):
    with pytest.raises(OptionError, match="providers are not YAML: "):
        parse_wishes(text)


@pytest.mark.parametrize(
    ("option", "value", "words"),
    [
        ("device_id", "-1", "found -1, expected 0 or more"),
        ("device_id", "first", "found 'first', expected a whole number"),
        ("device_id", True, "found 'True', expected a whole number"),
        ("device_id", 1.5, "found '1.5', expected a whole number"),
        ("gpu_mem_limit", "2GiBs", "found '2GiBs', expected a size such as 2GiB"),
        ("gpu_mem_limit", "0", "found 0, expected 1 or more"),
        ("use_tf32", "perhaps", "found 'perhaps', expected true or false"),
        ("cudnn_conv_algo_search", "FAST", "expected EXHAUSTIVE, HEURISTIC or DEFAULT"),
        ("arena_extend_strategy", "kDouble", "expected kNextPowerOfTwo or kSameAsRequested"),
        ("device_id", None, "has no value"),
    ],
)
def test_a_value_that_does_not_fit_says_what_was_expected(option, value, words):
    with pytest.raises(OptionError, match=f"option '{option}' for cuda.*{re.escape(words)}"):
        read_options("cuda", {option: value})


def test_a_range_of_two_small_ends_is_named():
    with pytest.raises(OptionError, match="found 6, expected 0 to 5"):
        read_options("tensorrt", {"trt_builder_optimization_level": 6})


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("2147483648", 1 << 31),
        ("2GiB", 1 << 31),
        ("2 GiB", 1 << 31),
        ("1.5 gib", 3 << 29),
        ("500 MB", 500_000_000),
        ("2 * 1024 * 1024 * 1024", 1 << 31),
        ("(1 << 30) + 2 ** 30", 1 << 31),
    ],
)
def test_sizes_are_read_with_units_and_as_calculations(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "9 ** 9 ** 9", "2 ** -1", "", "GiB", "1.5", "0.3 B", "1 // 0", "2 ** 1000",
        "1 << 100000", "9" * 99, "9" * 200, "__import__('os').getpid()", "len('aa')",
        "[1][0]", "True", "1 if 1 else 2", "x", "1;2",
        "(" * 50 + "1",
    ],
)  # fmt: skip
def test_what_is_no_calculation_with_whole_numbers_is_not_evaluated(text):
    with pytest.raises(ValueError):  # noqa: PT011
        parse_whole(text)
    with pytest.raises(ValueError):  # noqa: PT011
        parse_size(text)


def test_options_of_other_providers_are_handed_on_as_they_are():
    given = {"device_type": "CPU", "num_of_threads": 2, "its_own": "x"}
    assert read_options("openvino", given) == {
        "device_type": "CPU", "num_of_threads": "2", "its_own": "x"
    }  # fmt: skip


def test_every_provider_has_one_row_and_what_is_typed_is_listed():
    assert {row.name for row in TABLE} == set(SHORT_NAMES.values())
    assert len({row.name for row in TABLE}) == len(TABLE)
    assert known_provider("cuda").options == typed_names("cuda")
    assert [row.short_name for row in TABLE if row.typed] == ["cuda", "tensorrt", "tensorrt-rtx"]
    assert known_provider("directml").elsewhere("linux") == "it is made for Windows alone"
    assert known_provider("directml").elsewhere("win32") == ""


@pytest.mark.parametrize("kind", [CudaOptions, TensorrtOptions, TensorrtRtxOptions])
def test_every_default_is_a_value_that_the_option_takes(kind):
    provider = {CudaOptions: "cuda", TensorrtOptions: "tensorrt"}.get(kind, "tensorrt-rtx")
    given = {field.name: field.default for field in fields(kind)}
    assert set(read_options(provider, given)) == set(typed_names(provider))


@pytest.fixture
def tensorrts_parser(monkeypatch):
    """The parser is in ONNX Runtime's Python module and runs before the library is loaded."""
    monkeypatch.setattr(ort.InferenceSession, "_register_ep_custom_ops", lambda *_: None)

    def parse(options):
        settings = ort.SessionOptions()
        settings.log_severity_level = 4
        providers = [("TensorrtExecutionProvider", options)]
        ort.InferenceSession(one_op_model(), settings, providers=providers, enable_fallback=0)

    return parse


def test_onnxruntimes_tensorrt_parser_takes_every_option_that_is_known(tensorrts_parser):
    given = {field.name: field.default for field in fields(TensorrtOptions)}
    texts = {name: value if value != "" else "x" for name, value in given.items()}
    del texts["user_compute_stream"]  # an address, which it follows
    tensorrts_parser(read_options("tensorrt", texts))
    with pytest.raises(RuntimeError, match="Invalid TensorRT EP option: trt_fp17_enable"):
        tensorrts_parser({"trt_fp17_enable": "True"})


_STUBS = """
import json, sys
import onnxruntime as ort
from enginery.doctor.one_op import one_op_model
said = []
for options in json.loads(sys.argv[1]):
    settings = ort.SessionOptions()
    settings.log_severity_level = 4
    try:
        ort.InferenceSession(one_op_model(), settings,
                             providers=[("CUDAExecutionProvider", options)], enable_fallback=0)
        said.append("no library")
    except Exception as error:
        said.append(str(error))
print(json.dumps(said))
"""


def _stub(name):
    """A function that fails: 100 is cudaErrorNoDevice. Those that return text return some."""
    if name.endswith(("String", "Name")):
        return f'const char *{name}(void) {{ return "no device"; }}\n'
    return f"long {name}(void) {{ return 100; }}\n"


@pytest.fixture(scope="module")
def cudas_parser(tmp_path_factory):
    """ONNX Runtime's CUDA library over stand-ins for CUDA's: it parses, then finds no GPU."""
    library = provider_library(CUDA)
    if not library.is_file() or not shutil.which("gcc") or not shutil.which("nm"):
        pytest.skip("needs onnxruntime-gpu on Linux, gcc and nm")
    places = tmp_path_factory.mktemp("cuda")
    listed = subprocess.run(
        ["nm", "-D", "--undefined-only", library], capture_output=True, text=True, check=True
    ).stdout
    symbols = {}
    for line in listed.splitlines():
        name, _, version = line.split()[-1].partition("@")
        symbols.setdefault(version if version.startswith("libcu") else "", []).append(name)
    plain = [name for name in symbols.pop("") if name.startswith(("cu", "__cu"))]
    stubs = {**symbols, "libcuda.so.1": plain, "libcurand.so.10": [], "libcudnn.so.9": []}
    for soname, names in stubs.items():
        source = places / f"{soname}.c"
        source.write_text("".join(map(_stub, names)))
        versions = places / f"{soname}.map"
        versions.write_text(f"{soname} {{ global: *; }};\n")
        versioned = [f"-Wl,--version-script={versions}"] if soname in symbols else []
        subprocess.run(
            ["gcc", "-shared", "-fPIC", "-w", f"-Wl,-soname,{soname}", *versioned,
             "-o", places / soname, source],
            check=True,
        )  # fmt: skip

    def parse(*options):
        path = os.pathsep.join(entry for entry in sys.path if entry)
        done = subprocess.run(
            [sys.executable, "-c", _STUBS, json.dumps(options)],
            env=os.environ | {"LD_LIBRARY_PATH": str(places), "PYTHONPATH": path},
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    return parse


@pytest.mark.skipif(sys.platform != "linux", reason="the stand-ins are ELF libraries")
def test_onnxruntimes_cuda_parser_takes_every_option_that_is_known(cudas_parser):
    names = [name for name in typed_names("cuda") if name != "device_id"]
    defaults = {field.name: field.default for field in fields(CudaOptions)}
    given = [read_options("cuda", {name: defaults[name]}) for name in names]
    for options, said in zip(given, cudas_parser(*given), strict=True):
        assert "no library" not in said, "the stand-ins were not loaded"
        assert "provider option" not in said, (options, said)


@pytest.mark.skipif(sys.platform != "linux", reason="the stand-ins are ELF libraries")
def test_onnxruntimes_cuda_parser_refuses_what_is_refused_here(cudas_parser):
    unknown, wrong, device = cudas_parser(
        {"gpu_mem_limits": "1"}, {"cudnn_conv_algo_search": "FAST"}, {"device_id": "0"}
    )
    assert 'Unknown provider option: "gpu_mem_limits"' in unknown
    assert 'Failed to parse provider option "cudnn_conv_algo_search"' in wrong
    assert 'Failed to parse provider option "device_id"' in device  # it asks for the GPUs
