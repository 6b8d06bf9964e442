"""Valid and invalid provider options, compared with ONNX Runtime's own parsers."""

import json
import os
import re
import shutil
import subprocess
import sys

import onnxruntime as ort
import pytest

from enginery.core.errors import OptionError
from enginery.doctor.probe import ONE_OP_MODEL
from enginery.runtime.providers.availability import provider_library
from enginery.runtime.providers.known import CUDA, SHORT_NAMES
from enginery.runtime.providers.options import CHECKED_OPTIONS, Number, parse_size, read_options


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
        ("device_id", None, "found no value"),
    ],
)
def test_invalid_value_names_the_expected_one(option, value, words):
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
    ],
)
def test_sizes_are_read_with_units(text, size):
    assert parse_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "1.5", "0.3 B", "2 * 1024", "True"])
def test_other_texts_are_no_sizes(text):
    with pytest.raises(ValueError):  # noqa: PT011
        parse_size(text)


def test_options_of_other_providers_are_handed_on_as_they_are():
    given = {"device_type": "CPU", "num_of_threads": 2, "its_own": "x"}
    assert read_options("openvino", given) == {
        "device_type": "CPU",
        "num_of_threads": "2",
        "its_own": "x",
    }


def a_value(kind):
    """A value that an option of this kind takes."""
    if isinstance(kind, Number):
        return kind.minimum
    return kind[0] if isinstance(kind, tuple) else {bool: False, str: "x"}[kind]


@pytest.mark.parametrize("provider", ["cpu", "cuda", "tensorrt", "tensorrt-rtx"])
def test_every_option_takes_a_value_of_its_kind(provider):
    options = {name: a_value(kind) for name, kind in checked(provider).items()}
    assert set(read_options(provider, options)) == set(options)


def checked(provider):
    return CHECKED_OPTIONS[SHORT_NAMES[provider]]


@pytest.fixture
def tensorrts_parser(monkeypatch):
    """The parser is in ONNX Runtime's Python module and runs before the library is loaded."""
    monkeypatch.setattr(ort.InferenceSession, "_register_ep_custom_ops", lambda *_: None)

    def parse(options):
        settings = ort.SessionOptions()
        settings.log_severity_level = 4
        providers = [("TensorrtExecutionProvider", options)]
        ort.InferenceSession(ONE_OP_MODEL, settings, providers=providers, enable_fallback=0)

    return parse


def test_onnxruntimes_tensorrt_parser_takes_every_option_that_is_known(tensorrts_parser):
    texts = {name: a_value(kind) for name, kind in checked("tensorrt").items()}
    del texts["user_compute_stream"]  # an address, which it follows
    tensorrts_parser(read_options("tensorrt", texts))
    with pytest.raises(RuntimeError, match="Invalid TensorRT EP option: trt_fp17_enable"):
        tensorrts_parser({"trt_fp17_enable": "True"})


_STUBS = """
import json, sys
import onnxruntime as ort
from enginery.doctor.probe import ONE_OP_MODEL
said = []
for options in json.loads(sys.argv[1]):
    settings = ort.SessionOptions()
    settings.log_severity_level = 4
    try:
        ort.InferenceSession(ONE_OP_MODEL, settings,
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
            [
                "gcc",
                "-shared",
                "-fPIC",
                "-w",
                f"-Wl,-soname,{soname}",
                *versioned,
                "-o",
                places / soname,
                source,
            ],
            check=True,
        )

    def parse(*options):
        path = os.pathsep.join(entry for entry in sys.path if entry)
        done = subprocess.run(
            [sys.executable, "-c", _STUBS, json.dumps(options)],
            env=os.environ | {"LD_LIBRARY_PATH": str(places), "PYTHONPATH": path},
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return json.loads(done.stdout.splitlines()[-1])

    return parse


@pytest.mark.skipif(sys.platform != "linux", reason="the stand-ins are ELF libraries")
def test_onnxruntimes_cuda_parser_takes_every_option_that_is_known(cudas_parser):
    kinds = {name: kind for name, kind in checked("cuda").items() if name != "device_id"}
    given = [read_options("cuda", {name: a_value(kind)}) for name, kind in kinds.items()]
    for options, said in zip(given, cudas_parser(*given), strict=True):
        assert "no library" not in said, "the stand-ins were not loaded"
        assert "provider option" not in said, (options, said)


@pytest.mark.skipif(sys.platform != "linux", reason="the stand-ins are ELF libraries")
def test_onnxruntimes_cuda_parser_rejects_the_same_options(cudas_parser):
    unknown, wrong, device = cudas_parser(
        {"gpu_mem_limits": "1"}, {"cudnn_conv_algo_search": "FAST"}, {"device_id": "0"}
    )
    assert 'Unknown provider option: "gpu_mem_limits"' in unknown
    assert 'Failed to parse provider option "cudnn_conv_algo_search"' in wrong
    assert 'Failed to parse provider option "device_id"' in device  # it asks for the GPUs
