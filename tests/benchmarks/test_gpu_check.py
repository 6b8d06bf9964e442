"""`make gpu-check`: a dry run on the CPU, and parts that fail."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.gpu_check import __main__ as command
from benchmarks.gpu_check import agreement, convolutions, goals, models, parts, placement, tensorrt
from benchmarks.gpu_check.compiling import FALLBACK, STRONGEST, Compiler, within
from benchmarks.gpu_check.page import page
from benchmarks.gpu_check.settings import PARTS, TEXT_MODELS, Part, settings_for
from benchmarks.gpu_check.work import Work
from enginery.core.errors import ProviderError
from enginery.runtime.onnxruntime.placement import PlacedNode, Placement
from enginery.runtime.providers import gpus
from enginery.runtime.providers.gpus import CudaGpu
from enginery.runtime.providers.known import CPU, CUDA
from enginery.runtime.tensorrt.options import CLASSIC, RTX

H200 = CudaGpu("NVIDIA H200", "9.0", 141 << 30)


@pytest.fixture
def work(tmp_path):
    def make(part="speed", **fields):
        given = {
            "device": "cpu",
            "quick": True,
            "seconds": 60.0,
            "models": tmp_path / "models",
            "reuse": False,
            **fields,
        }
        (tmp_path / "models").mkdir(exist_ok=True)
        return Work(part=part, result=tmp_path / f"{part}.json", **given)

    return make


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """Run all parts on the CPU; return the exit status, the document and the page."""
    root = tmp_path_factory.mktemp("gpu-check")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENGINERY_HOME", str(root / "home"))
        # Not from the repository's root: the processes of the parts find their modules anyway.
        patch.chdir(root)
        status = command.main(["--device", "cpu", "--quick"])
    out = root / "home" / "gpu-check" / "dry-run"
    (text,) = (file.read_text() for file in out.glob("*.md"))
    (document,) = (json.loads(file.read_text()) for file in out.glob("*.json"))
    return SimpleNamespace(status=status, text=text, document=document, root=root)


@pytest.mark.slow
def test_every_check_of_a_dry_run_passes(dry_run):
    found = dry_run.document
    assert (dry_run.status, found["failures"], found["complete"]) == (0, [], True)
    names = [part.name for part in PARTS if not part.by_model]
    assert [n for n in found["parts"] if not n.startswith("speed")] == names
    assert [n for n in found["parts"] if n.startswith("speed")] == [
        "speed minilm",
        "speed bert-base",
    ]
    assert {part["status"] for part in found["parts"].values()} == {"done"}
    assert all(part["found"]["finished"] for part in found["parts"].values())


@pytest.mark.slow
def test_every_shape_compares_enginery_with_pytorch_on_host_and_device(dry_run):
    settings = settings_for(quick=True)
    for model in TEXT_MODELS:
        points = dry_run.document["parts"][f"speed {model}"]["found"]["points"]
        assert [(p["batch"], p["sequence"]) for p in points] == list(settings.points)
        for point in points:
            places = {(r["place"], r["ours"], r["theirs"]) for r in point["ratios"]}
            rivals = ("PyTorch eager", "PyTorch SDPA", "torch.compile")
            for rival in rivals:
                assert ("host", "enginery, IOBinding", rival) in places
                assert ("host", "enginery, no IOBinding", rival) in places
                assert ("device", "enginery, IOBinding", rival) in places
            # Rounds end by their number in a dry run, so that there are enough of them.
            assert all(ratio["interval"] for ratio in point["ratios"])
            assert "no CUDA graphs" in point["left out"]["enginery, CUDA graph"]
            assert point["compile"]["mode"] == "aot_eager"


@pytest.mark.slow
def test_dry_run_is_marked_and_writes_nothing_to_the_docs(dry_run):
    assert dry_run.text.startswith("# GPU check: on the CPU: a dry run, ")
    assert "**Every figure is on the CPU: a dry run.**" in dry_run.text
    assert dry_run.text.count("median in ms, on the CPU: a dry run") == 4
    assert not (dry_run.root / "docs").exists()
    verdicts = {goal["verdict"] for goal in dry_run.document["goals"]}
    assert verdicts == {"not measured", "no verdict: goals apply to an H200"}


def test_exit_status_is_2_without_a_gpu(monkeypatch, capsys, tmp_path):
    driver = gpus.CudaDriver(problem="there is no NVIDIA driver: libcuda.so.1 was not found")
    monkeypatch.setattr(gpus, "cuda_driver", lambda: driver)
    assert command.main(["--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert "needs an NVIDIA GPU" in said
    assert "libcuda.so.1 was not found" in said
    assert "--device cpu --quick" in said
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--only", "speeds"], "unknown part 'speeds', expected one of doctor, models"),
        (["--max-minutes", "0"], "--max-minutes is 0"),
        (["--out", "{file}"], "File exists"),
    ],
)
def test_exit_status_is_2_for_invalid_options(words, said, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    words = [word.format(file=tmp_path / "file") for word in words]
    assert command.main(["--device", "cpu", "--quick", *words]) == 2
    assert said in capsys.readouterr().err


def test_parts_are_in_order_with_those_they_need():
    assert [part.name for part in parts.chosen_parts("speed, doctor")] == [
        "doctor",
        "models",
        "speed",
    ]
    assert [part.name for part in parts.chosen_parts("doctor")] == ["doctor"]
    assert parts.chosen_parts("") == list(PARTS)


WAIT = "; import time; time.sleep(60)"
CHILDREN = """
import json, os, sys, time
request = json.load(open(sys.argv[1]))
def leave(**found):
    open(request["result"], "w").write(json.dumps({"checks": [], "notes": [], **found}))
match request["part"]:
    case "hangs":
        leave(points=["kept"])
        time.sleep(60)
    case "dies":
        leave(notes=["kept"])
        os.kill(os.getpid(), 11)
    case "silent":
        pass
    case "fails":
        leave(checks=[{"check": "a", "passed": False, "found": "it is not"}])
    case "models":
        leave(artifacts={"minilm": {"fp16": "there"}})
    case other:
        leave(seen=request["artifacts"], model=request["only_model"], seconds=request["seconds"])
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Write a module that replaces the processes of the parts."""
    (tmp_path / "made_child.py").write_text(CHILDREN)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "made_child"


def run_made(child, tmp_path, *made, seconds=60.0, done=lambda outcomes: None):
    return parts.run_parts(
        list(made),
        {},
        tmp_path,
        until=time.monotonic() + seconds,
        models=("m", "n"),
        done=done,
        module=child,
    )


def test_failed_part_keeps_its_results_and_the_others_continue(child, tmp_path):
    written = []
    found = run_made(
        child,
        tmp_path,
        Part("dies", 1),
        Part("hangs", 0.1),
        Part("silent", 2),
        Part("fails", 2),
        Part("well", 2),
        seconds=12,
        done=lambda outcomes: written.append(list(outcomes)),
    )
    assert {name: one["status"] for name, one in found.items()} == {
        "dies": "crashed",
        "hangs": "stopped",
        "silent": "crashed",
        "fails": "failed",
        "well": "done",
    }
    assert found["dies"]["found"]["notes"] == ["kept"]
    assert found["dies"]["problem"] == "the process crashed with signal 11"
    assert found["hangs"]["found"]["points"] == ["kept"]
    assert "stopped after" in found["hangs"]["problem"]
    assert "no result" in found["silent"]["problem"]
    said = parts.failures(found)
    assert len(said) == 4
    assert said[-1] == "a: it is not"
    assert [len(names) for names in written] == [1, 2, 3, 4, 5]


def test_parts_get_the_artifacts_and_a_share_of_the_time(child, tmp_path):
    found = run_made(
        child,
        tmp_path,
        Part("models", 1),
        Part("each", 10, by_model=True),
        Part("last", 10),
        seconds=30,
    )
    assert list(found) == ["models", "each m", "each n", "last"]
    assert found["each m"]["found"]["seen"] == {"minilm": {"fp16": "there"}}
    assert [found[f"each {m}"]["found"]["model"] for m in "mn"] == ["m", "n"]
    # 30 s, of which the last part keeps 10, and the second model half of the rest.
    assert 8 < found["each m"]["found"]["seconds"] <= 10
    assert 16 < found["each n"]["found"]["seconds"] <= 20


def test_part_ends_with_its_parent():
    part = (
        "from benchmarks.gpu_check.work import exit_with_parent as e; e(); print('on', flush=True)"
    )
    started = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {part!r} + {WAIT!r}])"
    with subprocess.Popen([sys.executable, "-c", started], stdout=subprocess.PIPE) as parent:
        assert parent.stdout.readline() == b"on\n"
        parent.kill()
        began = time.monotonic()
        assert parent.stdout.read() == b""  # it ends when the last that could write has
    assert time.monotonic() - began < 30


def test_no_part_starts_without_time(child, tmp_path):
    found = run_made(child, tmp_path, Part("well", 10), seconds=0.5)
    assert found["well"]["problem"] == "it was not begun: no time was left"
    assert parts.failures(found) == ["well: it was not begun: no time was left"]


def test_every_part_reports_a_missing_cuda_and_finishes(work, tmp_path):
    artifact = models.source_of(work("models"), "resnet")[1]
    given = work("convolutions", device="cuda", artifacts={"resnet": {"source": str(artifact)}})
    convolutions.run(given)
    assert given.found["notes"] == ["resnet in onnx: left out, it was not made"]
    for name in ("doctor", "speed", "agreement"):
        one = work(name, device="cuda", only_model="minilm")
        with one.step(name):
            __import__(f"benchmarks.gpu_check.{name}", fromlist=["run"]).run(one)
        assert [check["passed"] for check in one.found["checks"]] == [False]
        saved = json.loads(one.result.read_text())
        assert saved["checks"][0]["found"]


def test_cpu_is_measured_although_every_search_on_the_gpu_fails(work, exported, monkeypatch):
    monkeypatch.setattr(
        gpus, "cuda_driver", lambda: gpus.CudaDriver(problem="there is no NVIDIA driver")
    )
    resnet = exported("resnet", "image-classification")
    given = work("convolutions", device="cuda", artifacts={"resnet": {"onnx": str(resnet.path)}})
    convolutions.run(given)
    assert len(given.found["searches"]["cpu"]["ms"]) == len(given.settings.images)
    checks = given.found["checks"]
    assert [check["check"].rpartition(" ")[2] for check in checks] == [
        "DEFAULT",
        "HEURISTIC",
        "EXHAUSTIVE",
    ]
    assert all("there is no NVIDIA driver" in check["found"] for check in checks)


class Stale:
    """A runner that ignores host arrays after a run with device tensors."""

    def __init__(self, _artifact, *, providers, io_binding=True):
        self._bound, self._kept = io_binding, None

    def __enter__(self):
        return self

    def __exit__(self, *_):
        pass

    def __call__(self, feeds):
        if self._bound and self._kept is not None:
            return self._kept
        return {"y": feeds["input_ids"].astype(np.float32)}

    def run_on_device(self, tensors):
        self._kept = {"y": tensors["input_ids"].float().numpy()}
        return {"y": tensors["input_ids"].float()}


def test_outputs_of_earlier_inputs_fail_the_check(work, exported, monkeypatch):
    given = work("agreement")
    monkeypatch.setattr(agreement, "OrtRunner", Stale)
    agreement._compare_ways(given, "minilm", exported("bert", "feature-extraction"))
    assert [(c["check"].rpartition(", ")[2], c["passed"]) for c in given.found["checks"]] == [
        ("host", True),
        ("device", True),
        ("host and device by turns", False),
    ]


def test_outputs_of_each_search_are_compared_with_the_cpu(work):
    given = work("convolutions")
    expected = [np.arange(8.0), np.ones(8)]
    wrong = [expected[0], np.linspace(1.0, 1.5, 8)]
    for found in (expected, expected[:1], wrong, []):
        convolutions._compare(given, "DEFAULT", expected, found)
    checks = given.found["checks"]
    assert [check["passed"] for check in checks] == [True, True, False, False]
    assert "over 1 sizes" in checks[1]["found"]


def node(name, op_type, provider, *, for_shapes=False):
    return PlacedNode(name, op_type, "", provider, 0, for_shapes)


def test_compute_node_on_the_cpu_fails_the_check():
    well = Placement(CUDA, (node("a", "MatMul", CUDA), node("s", "Shape", CPU, for_shapes=True)))
    assert placement.judge(well)[0]
    fallen = Placement(CUDA, (*well.nodes, node("norm", "SkipLayerNormalization", CPU)))
    passed, words = placement.judge(fallen)
    assert not passed
    assert "norm (SkipLayerNormalization)" in words
    assert not placement.judge(Placement(CUDA, well.nodes[1:]))[0]


def point(model, batch, sequence, speedups, *, ms=0.4, width=0.0):
    """Return a point at which enginery has these speedups over the others."""
    side = "enginery, CUDA graph"
    return {
        "model": model,
        "batch": batch,
        "sequence": sequence,
        "compile": {},
        "left out": {},
        "latency": {
            f"{side}, {place}": {"median_ms": ms, "interval_ms": (ms - 0.02, ms + 0.02)}
            for place in ("host", "device")
        },
        "ratios": [
            {
                "place": place,
                "ours": side,
                "theirs": rival,
                "speedup": speedup,
                "interval": (speedup - width, speedup + width),
                "words": f"{speedup} times",
            }
            for place in ("host", "device")
            for rival, speedup in speedups.items()
        ],
    }


def judged(points, *, gpu="NVIDIA H200", seconds=400.0):
    found = goals.judge(points, ["minilm"], seconds=seconds, gpu=gpu, max_minutes=8, shapes=2)
    return {goal.goal: goal for goal in found}


EAGER = "minilm at 1×128, host: 2 × PyTorch's eager mode"
BEHIND = "minilm, host: at most 5 % slower than torch.compile at every point"


def test_goals_use_the_faster_of_pytorchs_eager_modes():
    speedups = {"PyTorch eager": 3.0, "PyTorch SDPA": 2.1, "torch.compile": 0.96}
    found = judged([point("minilm", 1, 128, speedups)])
    assert found[EAGER].verdict == "reached"
    assert found[EAGER].figure.startswith("2.10 × PyTorch SDPA")
    assert found[BEHIND].verdict == "reached at 1 of 2 points"
    assert found["minilm at 1×128, host: at most 0.5 ms"].verdict == "reached"
    assert found["minilm at 32×128, host: 1.3 × PyTorch's eager mode"].verdict == "not measured"
    slower = judged([point("minilm", 1, 128, {**speedups, "PyTorch SDPA": 1.9}, ms=0.6)])
    assert slower[EAGER].verdict == "missed"
    assert slower["minilm at 1×128, host: at most 0.5 ms"].verdict == "missed"


def test_one_point_slower_than_torch_compile_misses_the_goal():
    near, far = ({"torch.compile": speedup} for speedup in (1.4, 0.94))
    found = judged([point("minilm", 1, 128, near), point("minilm", 8, 16, far)])
    assert found[BEHIND].verdict == "missed"
    assert "at 8×16, of 2 points compared" in found[BEHIND].figure
    both = judged([point("minilm", 1, 128, near), point("minilm", 8, 16, near)])
    assert both[BEHIND].verdict == "reached"


def test_goal_within_the_interval_is_not_decided():
    eager, compiled = "PyTorch eager", "torch.compile"
    wide = judged([point("minilm", 1, 128, {eager: 2.1, compiled: 1.0}, ms=0.49, width=0.2)])
    held = "not decided: the interval contains the goal"
    assert wide[EAGER].verdict == held
    assert wide[BEHIND].verdict == "reached at 0 of 2 points"
    assert wide["minilm at 1×128, host: at most 0.5 ms"].verdict == held
    few = point("minilm", 1, 128, {eager: 3.0})
    for ratio in few["ratios"]:
        ratio["interval"] = None
    assert judged([few])[EAGER].verdict == "not decided: too few rounds"


def test_goals_have_verdicts_only_on_an_h200():
    points = [point("minilm", 1, 128, {"PyTorch eager": 3.0})]
    assert judged(points, gpu="NVIDIA L4")[EAGER].verdict == "no verdict: goals apply to an H200"
    assert judged(points, seconds=481)["the whole run in 8 minutes"].verdict == "missed"


def test_page_has_a_row_for_each_shape_and_mentions_an_incomplete_run():
    found = {
        "checks": [{"check": "c|d", "passed": False, "found": "broken"}],
        "notes": [],
        "points": [point("minilm", 1, 128, {"PyTorch eager": 3.0})],
    }
    document = {
        "gpu": "NVIDIA H200",
        "dry_run": "",
        "started": "2026-11-21T10:00:00",
        "seconds": 3.0,
        "complete": False,
        "failures": ["one"],
        "goals": [],
        "machine": {
            "tools": {"torch": "2.11"},
            "gpus": [vars(H200)],
            "no_gpu": "",
            "cpu": "x",
            "driver": "580.1",
            "physical_cores": 2,
            "system": "s",
            "python": "3.12",
        },
        "parts": {
            "speed minilm": {
                "status": "stopped",
                "problem": "stopped after 9 s",
                "seconds": 9.0,
                "found": found,
            }
        },
    }
    text = page(document)
    assert text.startswith("# GPU check: NVIDIA H200, 2026-11-21\n")
    assert "| 1×128 | 0.4 | 3.00 × PyTorch eager (3.00 to 3.00) |" in text
    assert "**This page was written before the run ended.**" in text
    assert "| c\\|d | **failed** | broken |" in text
    assert "| speed minilm | stopped | 9 | stopped after 9 s |" in text
    assert "driver 580.1" in text


def test_tensorrt_must_reject_an_unsupported_capability(work, monkeypatch):
    given = work("tensorrt")
    monkeypatch.setattr(tensorrt, "visible_gpus", lambda: (H200,))
    assert tensorrt.unsupported(RTX) == H200
    assert tensorrt.unsupported(CLASSIC) is None
    refused = ProviderError("NVIDIA H200 has compute capability 9.0, and there is no support.")

    def build(*_, **__):
        raise refused

    monkeypatch.setattr(tensorrt, "build_engine", build)
    assert tensorrt._refusal(given, None, RTX, H200) == f"rejected: {refused.message}"
    monkeypatch.setattr(tensorrt, "build_engine", lambda *_, **__: None)
    tensorrt._refusal(given, None, RTX, H200)
    refused = ProviderError("the disk is full.")  # refused, and not for the GPU
    monkeypatch.setattr(tensorrt, "build_engine", build)
    tensorrt._refusal(given, None, RTX, H200)
    assert [check["passed"] for check in given.found["checks"]] == [True, False, False]


def test_build_stage_rejects_an_h200_for_rtx(exported, monkeypatch, work):
    monkeypatch.setattr(tensorrt, "visible_gpus", lambda: (H200,))
    monkeypatch.setattr("enginery.runtime.tensorrt.capabilities.visible_gpus", lambda: (H200,))
    given = work("tensorrt")
    said = tensorrt._refusal(given, exported("bert", "feature-extraction"), RTX, H200)
    assert "no support for 9.0" in said
    assert given.found["checks"][0]["passed"]


def test_slow_compile_mode_is_stopped_and_the_next_is_tried(monkeypatch):
    compiler = Compiler("inductor")
    begun = []

    def compiled(self, model, mode, feeds, device):
        begun.append(mode)
        if mode == STRONGEST:
            time.sleep(30)
        return model

    monkeypatch.setattr(Compiler, "_compiled", compiled)
    monkeypatch.setattr("benchmarks.gpu_check.compiling._LEAST_SECONDS", {})
    found = compiler.compile("model", {}, "cpu", seconds=1.0)
    assert (found.mode, begun) == (FALLBACK, [STRONGEST, FALLBACK])
    assert "longer than" in found.tried[0]
    compiler.compile("model", {}, "cpu", seconds=60.0)
    assert begun == [STRONGEST, FALLBACK, FALLBACK]


def test_mode_is_not_tried_in_less_time_than_it_took_before():
    compiler = Compiler("inductor", took={FALLBACK: 20.0})
    with pytest.raises(ProviderError, match=r"25 s are left, expected 26 s"):
        compiler.compile(None, {}, "cpu", seconds=25.0)


def test_time_limit_ends_with_its_block():
    with pytest.raises(TimeoutError), within(0.05):
        time.sleep(5)
    with within(0.1):
        pass
    time.sleep(0.2)


def test_copied_artifacts_are_reused_with_their_own_weights(work, exported, monkeypatch, tmp_path):
    given = work("models", reuse=True)
    for model in (*TEXT_MODELS, "resnet"):
        made = exported("bert", "feature-extraction")
        shutil.copytree(made.manifest.source.id, given.models / f"{model}-tiny-source")
        for precision in ("onnx", "fp16", "fp32", "bf16"):
            made.copy_to(given.models / f"{model}-{precision}")
    for stage in ("export_model", "optimize_model"):
        monkeypatch.setattr(models, stage, None)
    models.run(given)
    assert all(check["passed"] for check in given.found["checks"])
    assert given.found["artifacts"]["minilm"]["bf16"] == str(given.models / "minilm-bf16")
    assert "minilm-fp16: reused" in " ".join(given.found["notes"])
    weights = given.models / "bert-base-tiny-source" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    again = work("models", reuse=True)
    models.run(again)
    (failed,) = (check for check in again.found["checks"] if not check["passed"])
    assert "was made from a model.safetensors that differs" in failed["found"]
    assert "bert-base" not in again.found["artifacts"]


def test_error_in_a_step_is_a_failed_check(work):
    given = work("agreement")
    with given.step("one"):
        raise ProviderError("there is none.", do="Install it.")
    with given.step("two"):
        raise KeyError("logits")
    saved = json.loads(given.result.read_text())["checks"]
    assert [check["found"] for check in saved] == [
        "there is none. Install it.",
        "KeyError: 'logits'",
    ]


def test_full_run_has_every_shape_once_those_with_goals_first():
    full = settings_for(quick=False)
    assert full.points[: full.must_points] == tuple(at for at, _ in goals.OVER_EAGER)
    assert sorted(full.points) == [(b, s) for b in (1, 8, 32) for s in (16, 128, 512)]
    assert len(full.images) == 12
    assert command.slug("NVIDIA H200") == "nvidia-h200"
