"""Providers with options, from the command to every contender's process, and into the result."""

from __future__ import annotations

import json

import numpy as np
import pytest

from enginery.bench import stage
from enginery.bench.backends import backend as opened
from enginery.bench.backends import plan as contenders
from enginery.bench.backends.backend import BareSession, OurRunner
from enginery.bench.backends.plan import plan_contenders
from enginery.bench.config import BenchConfig
from enginery.bench.stage import run
from enginery.bench.target import Subject
from enginery.core.errors import OptionError, ProviderError
from enginery.runtime.providers.known import CPU
from enginery.runtime.providers.selection import Provider
from enginery.runtime.providers.specification import ProviderSpec, parse_providers
from tests.bench.made import QUICK, save_detector

CUDA = "cuda; cuda.gpu_mem_limit=2147483648; cuda.device_id=1"


@pytest.fixture
def detector(tmp_path):
    return Subject.of(save_detector(tmp_path / "detector.onnx"), "", allow_failed=False)


@pytest.fixture
def bert(exported):
    return Subject.of(exported("bert", "feature-extraction"), "", allow_failed=False)


@pytest.fixture(autouse=True)
def _had(monkeypatch):
    """Whatever is asked for can be had: there is no GPU to ask."""

    def choose(artifact, record, specs, **_):
        return [Provider(specs[0].full_name, "requested", specs[0].options)], []

    monkeypatch.setattr(contenders, "choose_with_engines", choose)


def plans_of(subject, **options):
    plans, _ = plan_contenders([subject], BenchConfig(**options))
    return {plan.kind: plan for plan in plans}


def through_a_pipe(plan):
    return json.loads(json.dumps(plan.as_json()))


def test_plans_carry_the_providers_with_their_options_and_the_ways_of_running(bert):
    plans = plans_of(
        bert,
        provider="cuda",
        provider_option=("cuda.gpu_mem_limit=2GiB", "cuda.device_id=1"),
        cuda_graph=True,
    )
    for kind in ("enginery", "onnxruntime", "optimum"):
        plan = through_a_pipe(plans[kind])
        assert opened.providers_of_plan(plan) == parse_providers(CUDA)
        assert (plan["io_binding"], plan["cuda_graph"]) == (True, True)
    # PyTorch has to run on the same GPU, and the CPU beside it has neither options nor graphs.
    assert {plans[kind].device for kind in ("pytorch", "pytorch-fp16")} == {"cuda:1"}
    on_cpu = plans["enginery-cpu"]
    assert (on_cpu.providers, on_cpu.cuda_graph) == ((ProviderSpec("cpu"),), False)


def test_the_environment_asks_where_the_options_do_not(detector, monkeypatch):
    monkeypatch.setenv("ENGINERY_PROVIDERS", CUDA)
    assert plans_of(detector)["enginery"].providers == parse_providers(CUDA)
    assert plans_of(detector, provider="cpu")["enginery"].providers == (ProviderSpec("cpu"),)


@pytest.mark.parametrize(
    ("options", "kind", "message"),
    [
        ({"cuda_graph": True}, ProviderError, "cuda_graph is set, but cpu has no CUDA graphs"),
        ({"provider": "cuda", "cuda_graph": True, "io_binding": False}, OptionError, "bound"),
        ({"provider": "cuda", "cuda_graph": True, "shrink_arena": True}, OptionError, "arena"),
        ({"provider": "cuda", "provider_option": ("cuda.memory=1",)}, OptionError, "'memory'"),
        ({"provider_option": ("cuda.device_id=1",)}, OptionError, "is for cuda, which is not"),
        (
            {"provider": "cuda", "provider_option": ("cuda.enable_cuda_graph=1",)},
            OptionError,
            "pass --cuda-graph",
        ),
        ({"provider": "cudaa"}, ProviderError, "did you mean 'cuda'"),
    ],
)
def test_what_does_not_fit_is_an_error_before_anything_runs(
    tmp_path, monkeypatch, options, kind, message
):
    monkeypatch.setattr(stage, "Contender", None)
    model = save_detector(tmp_path / "detector.onnx")
    with pytest.raises(kind, match=message):
        run([model], BenchConfig(shape=("batch=1,height=32,width=32",), **options))


def open_with_doubles(monkeypatch, given):
    def new_session(path, providers, *, threads=0):
        given["session"] = providers
        return "session"

    def choose(artifact, record, specs, **_):
        given["specs"] = specs
        return [Provider(specs[0].full_name, "a double", specs[0].options)], []

    class Runner:
        def __init__(self, artifact, **options):
            given.update(options)
            self.providers, self.engines, self.profiles = [], [], []

        def __call__(self, feeds):
            return {}

        def is_captured(self, feeds):
            return feeds["x"].shape[0] == 1

    monkeypatch.setattr(opened, "choose_with_engines", choose)
    monkeypatch.setattr(opened, "open_session", new_session)
    monkeypatch.setattr(opened, "OrtRunner", Runner)


def test_our_runner_and_the_bare_session_are_given_the_same(detector, monkeypatch):
    given = {}
    open_with_doubles(monkeypatch, given)
    plans = plans_of(detector, provider=CUDA, cuda_graph=True)
    record = detector.record
    ours = through_a_pipe(plans["enginery"])
    runner = OurRunner(detector.artifact, record, ours, threads=0, allow_fallback=False)
    assert given["providers"] == parse_providers(CUDA)
    assert given["buckets"] == 8
    # A shape that came when all graphs were taken is told.
    assert runner.note_on({"x": np.zeros((1, 3, 32, 32))}) == ""
    assert "ran without a CUDA graph" in runner.note_on({"x": np.zeros((2, 3, 32, 32))})
    assert (given["io_binding"], given["cuda_graph"], given["shrink_arena"]) == (True, True, False)
    bare = BareSession(
        detector.artifact,
        record,
        through_a_pipe(plans["onnxruntime"]),
        threads=0,
        allow_fallback=False,
    )
    assert given["specs"] == parse_providers(CUDA)
    options = {"gpu_mem_limit": "2147483648", "device_id": "1"}
    assert [provider.options for provider in given["session"]] == [options]
    assert bare.providers[0]["options"] == options
    assert bare.notes == ["without a CUDA graph, which session.run has no fixed buffers for"]


def test_bare_session_shrinks_the_arena_after_each_run(detector):
    plan = through_a_pipe(plans_of(detector, shrink_arena=True)["onnxruntime"])
    bare = BareSession(detector.artifact, detector.record, plan, threads=0, allow_fallback=False)
    (session,), entries = bare._sessions, []

    class Recorded:
        get_providers, get_provider_options = session.get_providers, session.get_provider_options

        def run(self, names, feeds, options):
            entries.append(options.get_run_config_entry("memory.enable_memory_arena_shrinkage"))
            return session.run(names, feeds, options)

    bare._sessions = [Recorded()]
    (scores,) = bare.prepared({"x": np.ones((1, 3, 32, 32), "float32")})()
    assert scores.shape == (1, 1, 16, 16)
    assert entries == ["cpu:0"]


def test_optimum_is_given_the_options_through_its_own_argument(bert, monkeypatch):
    from enginery.bench.backends import frameworks

    given = {}

    class Model:
        providers = ("CUDAExecutionProvider", CPU)
        use_io_binding = False

        @classmethod
        def from_pretrained(cls, path, **options):
            given.update(options)
            return cls()

    monkeypatch.setattr(frameworks.optimum_ort, "ORTModelForFeatureExtraction", Model)
    model = frameworks.OptimumModel(
        bert.artifact,
        bert.record,
        parse_providers(CUDA),
        threads=0,
        io_binding=False,
        trust_remote_code=False,
    )
    assert given["provider"] == "CUDAExecutionProvider"
    assert given["provider_options"] == {"gpu_mem_limit": "2147483648", "device_id": "1"}
    assert given["use_io_binding"] is False
    assert model.notes == ["IOBinding off, as requested"]
    assert [found["options"] for found in model.providers] == [given["provider_options"], {}]
    frameworks.OptimumModel(
        bert.artifact,
        bert.record,
        parse_providers("cuda"),
        threads=0,
        io_binding=True,
        trust_remote_code=False,
    )
    assert given["use_io_binding"] is None


def test_the_result_says_what_was_asked_for_as_it_was_understood(tmp_path, monkeypatch):
    monkeypatch.setenv("ENGINERY_PROVIDERS", "CPUExecutionProvider")
    model = save_detector(tmp_path / "detector.onnx")
    config = BenchConfig(
        **QUICK, shape=("batch=1,height=32,width=32",), shrink_arena=True, io_binding=False
    )
    result = run([model], config)
    options = result.options
    assert (options["provider"], options["provider_option"]) == ("cpu", [])
    assert (options["io_binding"], options["shrink_arena"]) == (False, True)
    assert [record.name for record in result.contenders] == ["enginery", "onnxruntime"]
    assert all(record.providers[0]["options"] == {} for record in result.contenders)
