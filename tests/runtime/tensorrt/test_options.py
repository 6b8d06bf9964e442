"""Flavors, options, capabilities and cache keys of engines."""

from __future__ import annotations

import sys
from dataclasses import replace

import pytest

from enginery.core.errors import OptionError, ProviderError
from enginery.core.shapes import Profile
from enginery.runtime.providers import gpus
from enginery.runtime.providers.gpus import CudaDriver, CudaGpu, driver_version, visible_gpus
from enginery.runtime.providers.known import TENSORRT, TENSORRT_RTX
from enginery.runtime.tensorrt import capabilities, engine_key, library
from enginery.runtime.tensorrt.capabilities import resolve_capabilities
from enginery.runtime.tensorrt.engine_key import key_fields
from enginery.runtime.tensorrt.library import has_tensorrt
from enginery.runtime.tensorrt.options import CLASSIC, RTX, BuildOptions, check_options, get_flavor

needs_rtx = pytest.mark.skipif(not has_tensorrt(RTX), reason="pip install 'enginery[tensorrt-rtx]'")
L4 = CudaGpu("NVIDIA L4", "8.9", 24 << 30)
H200 = CudaGpu("NVIDIA H200", "9.0", 141 << 30)


@pytest.fixture
def gpu(monkeypatch):
    """`gpu(L4)`: the GPU of this machine."""

    def use(found):
        monkeypatch.setattr(capabilities, "visible_gpus", lambda: (found,))

    return use


def test_flavors_name_the_providers_that_load_their_engines():
    assert (RTX.provider, CLASSIC.provider) == (TENSORRT_RTX, TENSORRT)
    assert (RTX.needs_gpu, CLASSIC.needs_gpu) == (False, True)
    assert get_flavor("tensorrt") is CLASSIC


def test_unknown_flavor_is_an_error_with_the_nearest():
    with pytest.raises(OptionError, match="did you mean 'tensorrt-rtx'"):
        get_flavor("tensort-rtx")


@needs_rtx
def test_capabilities_of_rtx_are_those_of_the_installed_version():
    trt = library.load_tensorrt()
    assert tuple(library.capability_names(trt)) == RTX.capabilities
    assert library.tensorrt_version() == trt.__version__


@needs_rtx
def test_version_is_read_without_loading_tensorrt(monkeypatch):
    monkeypatch.delitem(sys.modules, RTX.module, raising=False)
    assert library.tensorrt_version().startswith("1.")
    assert RTX.module not in sys.modules


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimization_level": 5}, "is 5, but the optimization level has no effect"),
        ({"hardware_compatibility": "ampere-plus"}, "hardware compatibility has no effect"),
        ({"tf32": False}, "TF32 has no effect"),
    ],
)
def test_option_that_rtx_lacks_is_an_error_naming_the_other_flavor(changes, words):
    check_options(CLASSIC, BuildOptions(**changes))
    with pytest.raises(OptionError) as found:
        check_options(RTX, BuildOptions(**changes))
    assert f"option '{next(iter(changes))}'" in found.value.message
    assert f"{words} in TensorRT for RTX; TensorRT has it." in found.value.message
    assert found.value.do == "Leave it out, or build with --flavor tensorrt."


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"optimization_level": 6}, "'optimization_level' is 6, expected 0 to 5"),
        ({"optimization_level": -1}, "'optimization_level' is -1, expected 0 to 5"),
        ({"workspace_bytes": 0}, "'workspace_bytes' is 0, expected 1 or more"),
    ],
)
def test_value_that_means_nothing_is_an_error(changes, words):
    with pytest.raises(OptionError, match=words):
        check_options(CLASSIC, BuildOptions(**changes))


@pytest.mark.parametrize(
    ("names", "found"),
    [
        ("8.0,8.9,12.0", ("8.0", "8.9", "12.0")),
        ("12.0, 8.9,8.9", ("8.9", "12.0")),
        ("sm_89,120,sm80", ("8.0", "8.9", "12.0")),
        (["8.6"], ("8.6",)),
        ("portable", ()),
        ([], ()),
        ("current", ("8.9",)),
        ("current,8.0", ("8.0", "8.9")),
    ],
)
def test_capabilities_are_ordered_and_each_named_once(gpu, names, found):
    gpu(L4)
    assert resolve_capabilities(RTX, names) == found


@pytest.mark.parametrize("names", ["9.0", "", "8.9,,8.6", "sm_90", "8.9;8.6", "11.0"])
def test_unknown_capability_is_an_error_that_lists_the_known(names):
    with pytest.raises(OptionError, match=r"It builds for 7\.5, 8\.0, 8\.6, 8\.9, 12\.0, 12\.1"):
        resolve_capabilities(RTX, names)


def test_portable_stands_alone():
    with pytest.raises(OptionError, match="'portable' is for all GPUs, found portable, 8"):
        resolve_capabilities(RTX, "portable,8.9")


def test_hopper_is_unsupported_by_rtx_with_the_alternatives(gpu):
    gpu(H200)
    with pytest.raises(ProviderError) as found:
        resolve_capabilities(RTX, "current")
    assert found.value.message == (
        "NVIDIA H200 has compute capability 9.0, but TensorRT for RTX has no support for 9.0: "
        "it supports 7.5, 8.0, 8.6, 8.9, 12.0, 12.1."
    )
    assert "--flavor tensorrt, or" in found.value.do
    assert "--providers cuda" in found.value.do
    assert resolve_capabilities(CLASSIC, "current") == ("9.0",)
    assert resolve_capabilities(RTX, "8.9") == ("8.9",)


def test_without_a_gpu_current_names_the_list(monkeypatch):
    monkeypatch.setattr(gpus, "cuda_driver", lambda: CudaDriver(problem="there is no driver"))
    with pytest.raises(ProviderError) as found:
        resolve_capabilities(RTX, "current")
    assert found.value.message == (
        "capability 'current' is that of this machine's GPU, but no GPU can be used: there is no "
        "driver."
    )
    assert "--capability 8.9" in found.value.do
    assert "7.5, 8.0, 8.6, 8.9, 12.0, 12.1" in found.value.do
    with pytest.raises(ProviderError, match=r"TensorRT builds on the GPU.*--flavor tensorrt-rtx"):
        resolve_capabilities(CLASSIC, "8.9")


def test_classic_only_builds_for_its_own_gpu(gpu):
    gpu(L4)
    assert resolve_capabilities(CLASSIC, ["8.9"]) == ("8.9",)
    with pytest.raises(
        OptionError, match=r"'8\.0': TensorRT builds only for the GPU.*capability 8\.9"
    ):
        resolve_capabilities(CLASSIC, "8.0")
    with pytest.raises(OptionError, match="'portable': TensorRT builds only for the GPU"):
        resolve_capabilities(CLASSIC, "portable")


def test_missing_driver_is_an_error(monkeypatch):
    monkeypatch.setattr(gpus, "DRIVER", "libcuda_that_is_not_there.so.1")
    with pytest.raises(ProviderError, match="no GPU can be used: there is no NVIDIA driver"):
        visible_gpus()


def test_driver_version_is_that_of_the_kernel_module(monkeypatch, tmp_path):
    monkeypatch.setattr(gpus, "_KERNEL_MODULE", tmp_path / "version")
    assert driver_version() == ""
    (tmp_path / "version").write_text("580.65.06\n")
    assert driver_version() == "580.65.06"


PROFILES = [Profile.parse("batch=1:8:32"), Profile.parse("batch=1")]


def fields(flavor=RTX, capabilities=("8.9",), profiles=PROFILES, **options):
    return key_fields(flavor, BuildOptions(**options), capabilities, profiles)


@needs_rtx
def test_key_of_rtx_has_exactly_the_fields_that_change_plans(monkeypatch):
    found = fields()
    assert found == {
        "flavor": "tensorrt-rtx",
        "tensorrt": library.tensorrt_version(),
        "capabilities": "8.9",
        "profiles": "batch=1:8:32; batch=1",
        "verbosity": "detailed",
        "workspace_bytes": str(8 << 30),
    }
    changed = [
        fields(capabilities=("8.9", "12.0")),
        fields(capabilities=()),
        fields(profiles=PROFILES[::-1]),
        fields(profiles=PROFILES[:1]),
        fields(profiles=[]),
        fields(workspace_bytes=1 << 30),
    ]
    monkeypatch.setattr(engine_key, "tensorrt_version", lambda flavor: "1.7.1.117")
    changed.append(fields())
    keys = {str(key) for key in (found, *changed)}
    assert len(keys) == len(changed) + 1


@pytest.fixture
def classic(monkeypatch, gpu):
    """Classic TensorRT on an L4."""
    pytest.importorskip("tensorrt_rtx_bindings", reason="pip install 'enginery[tensorrt-rtx]'")
    from tests.runtime.classic_tensorrt import ClassicTensorRT

    monkeypatch.setitem(sys.modules, "tensorrt", ClassicTensorRT([]))
    monkeypatch.setattr(engine_key, "driver_version", lambda: "580.65.06")
    gpu(L4)


def test_key_of_classic_has_the_gpu_and_how_it_searches(classic, gpu, monkeypatch):
    found = fields(CLASSIC)
    assert (found["gpu"], found["driver"], found["tensorrt"]) == (
        "NVIDIA L4",
        "580.65.06",
        "10.16.1.11",
    )
    changed = [
        fields(CLASSIC, optimization_level=5),
        fields(CLASSIC, hardware_compatibility="ampere-plus"),
        fields(CLASSIC, tf32=False),
        fields(CLASSIC, workspace_bytes=1 << 30),
        fields(CLASSIC, profiles=[]),
    ]
    gpu(replace(L4, name="NVIDIA L40S"))
    changed.append(fields(CLASSIC))
    gpu(L4)
    monkeypatch.setattr(engine_key, "driver_version", lambda: "590.1")
    changed.append(fields(CLASSIC))
    keys = {str(key) for key in (found, *changed)}
    assert len(keys) == len(changed) + 1


@needs_rtx
def test_key_rejects_options_that_the_flavor_lacks():
    with pytest.raises(OptionError, match="has no effect in TensorRT for RTX"):
        fields(optimization_level=1)
