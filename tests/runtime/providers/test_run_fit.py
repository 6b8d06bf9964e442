"""Ways of running that do not fit are refused before anything is opened."""

import pytest

from enginery.core.errors import OptionError, ProviderError
from enginery.runtime.model import load_model
from enginery.runtime.ort import OrtRunner
from enginery.runtime.providers.run_fit import require_fit
from enginery.runtime.providers.specification import parse_wishes


@pytest.mark.parametrize("wish", ["cpu", "openvino,cuda", "directml"])
def test_cuda_graphs_are_nvidias(wish):
    with pytest.raises(ProviderError, match=r"and \w+ has no CUDA graphs") as error:
        require_fit(parse_wishes(wish), cuda_graph=True)
    assert error.value.do == "Leave it out, or run on cuda, tensorrt or tensorrt-rtx."


@pytest.mark.parametrize("wish", ["cuda", "tensorrt,cuda,cpu", "tensorrt-rtx"])
def test_what_fits_passes(wish):
    wishes = parse_wishes(wish)
    require_fit(wishes, cuda_graph=True)
    require_fit(wishes, io_binding=False, shrink_arena=True)
    require_fit(parse_wishes("cpu"), io_binding=False, shrink_arena=True)


@pytest.mark.parametrize(
    ("other", "message"),
    [
        ({"io_binding": False}, "a CUDA graph replays on bound buffers"),
        ({"shrink_arena": True}, "a CUDA graph replays in the arena's memory"),
    ],
)
def test_cuda_graphs_exclude_what_takes_their_memory(other, message):
    with pytest.raises(OptionError, match=message):
        require_fit(parse_wishes("cuda"), cuda_graph=True, **other)


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
def test_a_providers_own_option_for_graphs_is_refused_with_the_way_to_them(text, cuda_graph):
    with pytest.raises(OptionError, match="is set by itself") as error:
        require_fit(parse_wishes(text), cuda_graph=cuda_graph)
    assert "--cuda-graph" in error.value.do
    require_fit(parse_wishes(text.replace("=1", "=0").replace("=true", "=no")
                             .replace("=yes", "=off")))  # fmt: skip


def test_a_runner_itself_refuses_what_does_not_fit(tiny, monkeypatch):
    artifact = tiny.artifact("bert", "text-classification")
    with pytest.raises(OptionError, match="a CUDA graph replays in the arena's memory"):
        OrtRunner(artifact, providers=["cuda"], cuda_graph=True, shrink_arena=True)
    with pytest.raises(OptionError, match="is set by itself"):
        OrtRunner(artifact, providers=parse_wishes("cuda; cuda.enable_cuda_graph=1"))
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
            artifact, provider="cuda", provider_options=["cuda.gpu_mem_limit=2GiB"],
            io_binding=False, shrink_arena=True, allow_fallback=True,
        )  # fmt: skip
    assert given["providers"] == parse_wishes("cuda; cuda.gpu_mem_limit=2147483648")
    ways = ("io_binding", "cuda_graph", "shrink_arena", "allow_fallback")
    assert [given[name] for name in ways] == [False, False, True, True]
    monkeypatch.setattr("enginery.runtime.model.OrtRunner", None)
    with pytest.raises(ProviderError, match="cpu has no CUDA graphs"):
        load_model(artifact, provider="cpu", cuda_graph=True)


def test_the_arena_is_shrunk_on_the_cpu_too(tiny):
    artifact = tiny.artifact("bert", "text-classification")
    with load_model(artifact) as plain, load_model(artifact, shrink_arena=True) as shrinking:
        texts = ["The engine is warm."]
        assert plain.classify(texts) == shrinking.classify(texts)
