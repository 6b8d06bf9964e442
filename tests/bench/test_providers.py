"""Providers and their options, from the command to each backend's process and into the result."""

from __future__ import annotations

import json
from dataclasses import asdict, replace

import numpy as np
import pytest

from enginery.bench import stage
from enginery.bench.backends import backend
from enginery.bench.backends import plan as plan_module
from enginery.bench.backends.backend import BackendPlan, EngineryBackend, OrtSessionBackend
from enginery.bench.backends.plan import plan_backends
from enginery.bench.config import BenchConfig
from enginery.bench.stage import run
from enginery.bench.target import Target
from enginery.core.errors import OptionError, ProviderError
from enginery.runtime.providers.known import CPU
from enginery.runtime.providers.selection import Provider
from enginery.runtime.providers.specification import ProviderSpec, parse_providers
from tests.bench.sample_results import QUICK, save_detector

CUDA = "cuda; cuda.gpu_mem_limit=2147483648; cuda.device_id=1"


@pytest.fixture
def detector(tmp_path):
    return Target.open(save_detector(tmp_path / "detector.onnx"), "", allow_failed=False)


@pytest.fixture
def bert(exported):
    return Target.open(exported("bert", "feature-extraction"), "", allow_failed=False)


@pytest.fixture(autouse=True)
def _any_provider(monkeypatch):
    """Make every requested provider available."""

    def choose(artifact, record, specs, **_):
        return [Provider(specs[0].full_name, "requested", specs[0].options)], []

    monkeypatch.setattr(plan_module, "choose_with_engines", choose)


def plans_of(target, **options):
    plans, _ = plan_backends([target], BenchConfig(**options))
    return {plan.kind: plan for plan in plans}


def json_round_trip(plan):
    return BackendPlan.from_json(json.loads(json.dumps(asdict(plan))))


def test_plans_have_the_providers_with_their_options(bert):
    plans = plans_of(
        bert,
        providers="cuda",
        provider_option=("cuda.gpu_mem_limit=2GiB", "cuda.device_id=1"),
        cuda_graph=True,
    )
    for kind in ("enginery", "onnxruntime", "optimum"):
        plan = json_round_trip(plans[kind])
        assert plan == plans[kind]
        assert plan.providers == parse_providers(CUDA)
        assert (plan.io_binding, plan.cuda_graph) == (True, True)
    # PyTorch runs on the same GPU. The CPU backend has neither options nor CUDA graphs.
    assert {plans[kind].device for kind in ("pytorch", "pytorch-fp16")} == {"cuda:1"}
    on_cpu = plans["enginery-cpu"]
    assert (on_cpu.providers, on_cpu.cuda_graph) == ((ProviderSpec("cpu"),), False)


def test_environment_variable_is_used_without_options(detector, monkeypatch):
    monkeypatch.setenv("ENGINERY_PROVIDERS", CUDA)
    assert plans_of(detector)["enginery"].providers == parse_providers(CUDA)
    assert plans_of(detector, providers="cpu")["enginery"].providers == (ProviderSpec("cpu"),)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"cuda_graph": True}, ProviderError, "cuda_graph is set, but cpu has no CUDA graphs"),
        ({"providers": "cuda", "cuda_graph": True, "io_binding": False}, OptionError, "bound"),
        ({"providers": "cuda", "cuda_graph": True, "shrink_arena": True}, OptionError, "arena"),
        ({"providers": "cuda", "provider_option": ("cuda.memory=1",)}, OptionError, "'memory'"),
        ({"provider_option": ("cuda.device_id=1",)}, OptionError, "is for cuda, which is not"),
        (
            {"providers": "cuda", "provider_option": ("cuda.enable_cuda_graph=1",)},
            OptionError,
            "pass --cuda-graph",
        ),
        ({"providers": "cudaa"}, ProviderError, "did you mean 'cuda'"),
    ],
)
def test_invalid_options_are_errors_before_anything_runs(
    tmp_path, monkeypatch, options, kind, message
):
    monkeypatch.setattr(stage, "BenchmarkProcess", None)
    model = save_detector(tmp_path / "detector.onnx")
    with pytest.raises(kind, match=message):
        run([model], BenchConfig(shape=("batch=1,height=32,width=32",), **options))


def patch_onnxruntime(monkeypatch, given):
    def new_session(path, providers, *, threads=0):
        given["session"] = providers
        return "session"

    def choose(artifact, record, specs, **_):
        given["specs"] = specs
        return [Provider(specs[0].full_name, "requested", specs[0].options)], []

    class Runner:
        def __init__(self, artifact, options, **chosen):
            given.update({**vars(options), **chosen})
            self.providers, self.engines, self.profiles = [], [], []

        def __call__(self, feeds):
            return {}

        def is_captured(self, feeds):
            return feeds["x"].shape[0] == 1

    monkeypatch.setattr(backend, "choose_with_engines", choose)
    monkeypatch.setattr(backend, "open_session", new_session)
    monkeypatch.setattr(backend, "OrtRunner", Runner)


def test_runner_and_plain_session_get_the_same_providers(detector, monkeypatch):
    given = {}
    patch_onnxruntime(monkeypatch, given)
    plans = plans_of(detector, providers=CUDA, cuda_graph=True)
    record = detector.record
    ours = json_round_trip(plans["enginery"])
    runner = EngineryBackend(detector.artifact, record, ours)
    assert given["providers"] == parse_providers(CUDA)
    assert given["buckets"] == 8
    # A shape for which no CUDA graph was left has a note.
    assert runner.note_for({"x": np.zeros((1, 3, 32, 32))}) == ""
    assert "ran without a CUDA graph" in runner.note_for({"x": np.zeros((2, 3, 32, 32))})
    assert (given["io_binding"], given["cuda_graph"], given["shrink_arena"]) == (True, True, False)
    bare = OrtSessionBackend(
        detector.artifact,
        record,
        json_round_trip(plans["onnxruntime"]),
    )
    assert given["specs"] == parse_providers(CUDA)
    options = {"gpu_mem_limit": "2147483648", "device_id": "1"}
    assert [provider.options for provider in given["session"]] == [options]
    assert bare.providers[0]["options"] == options
    assert bare.notes == ["no CUDA graph: session.run has no fixed buffers"]


def test_plain_session_shrinks_the_arena_after_each_run(detector):
    plan = json_round_trip(plans_of(detector, shrink_arena=True)["onnxruntime"])
    bare = OrtSessionBackend(detector.artifact, detector.record, plan)
    (session,), entries = bare._sessions, []

    class Recorded:
        get_providers, get_provider_options = session.get_providers, session.get_provider_options

        def run(self, names, feeds, options):
            entries.append(options.get_run_config_entry("memory.enable_memory_arena_shrinkage"))
            return session.run(names, feeds, options)

    bare._sessions = [Recorded()]
    (scores,) = bare.prepare({"x": np.ones((1, 3, 32, 32), "float32")})()
    assert scores.shape == (1, 1, 16, 16)
    assert entries == ["cpu:0"]


def test_optimum_gets_the_provider_options(bert, monkeypatch):
    import optimum.onnxruntime as optimum_ort

    from enginery.bench.backends import frameworks

    given = {}

    class Model:
        providers = ("CUDAExecutionProvider", CPU)
        use_io_binding = False

        @classmethod
        def from_pretrained(cls, path, **options):
            given.update(options)
            return cls()

    monkeypatch.setattr(optimum_ort, "ORTModelForFeatureExtraction", Model)
    plan = plans_of(bert, providers=CUDA, io_binding=False)["optimum"]
    model = frameworks.OptimumBackend(bert.artifact, bert.record, plan)
    assert given["provider"] == "CUDAExecutionProvider"
    assert given["provider_options"] == {"gpu_mem_limit": "2147483648", "device_id": "1"}
    assert given["use_io_binding"] is False
    assert model.notes == ["IOBinding off, as requested"]
    assert [found["options"] for found in model.providers] == [given["provider_options"], {}]
    frameworks.OptimumBackend(bert.artifact, bert.record, replace(plan, io_binding=True))
    assert given["use_io_binding"] is None


@pytest.mark.more
def test_result_has_the_resolved_options(tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINERY_PROVIDERS", "CPUExecutionProvider")
    model = save_detector(tmp_path / "detector.onnx")
    config = BenchConfig(
        **QUICK, shape=("batch=1,height=32,width=32",), shrink_arena=True, io_binding=False
    )
    result = run([model], config)
    options = result.options
    assert (options["providers"], options["provider_option"]) == ("cpu", [])
    assert (options["io_binding"], options["shrink_arena"]) == (False, True)
    assert [record.name for record in result.contenders] == ["enginery", "onnxruntime"]
    assert all(record.providers[0]["options"] == {} for record in result.contenders)
