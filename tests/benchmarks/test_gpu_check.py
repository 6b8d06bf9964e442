"""`make gpu-check`: a dry run on the CPU, runs that are killed, and parts that fail."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from contextlib import ExitStack
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks.gpu_check import __main__ as command
from benchmarks.gpu_check import goals, processes, results
from benchmarks.gpu_check.inputs import sentences, text_feeds
from benchmarks.gpu_check.parts import (
    agreement,
    compiled,
    convolutions,
    embed,
    models,
    placement,
    serve,
    tensorrt,
)
from benchmarks.gpu_check.results import Results
from benchmarks.gpu_check.server import Server
from benchmarks.gpu_check.settings import (
    PARTS,
    TEXT_MODELS,
    Part,
    Unit,
    chosen_units,
    settings_for,
)
from benchmarks.gpu_check.work import OutOfTimeError, Work
from enginery import optimize_model
from enginery.core.errors import ProviderError
from enginery.runtime.onnxruntime.placement import PlacedNode, Placement
from enginery.runtime.providers import gpus
from enginery.runtime.providers.gpus import CudaGpu
from enginery.runtime.providers.known import CPU, CUDA
from enginery.runtime.tensorrt.options import RTX
from enginery.runtime.text.tokenizer import TextTokenizer

H200 = CudaGpu("NVIDIA H200", "9.0", 141 << 30)


@pytest.fixture
def begin(tmp_path):
    """Return a function that begins or continues a run."""

    def make(*, gpu="", fresh=False, **fields):
        request = {
            "device": "cpu",
            "quick": True,
            "models": str(tmp_path / "models"),
            "reuse": False,
            **fields,
        }
        (tmp_path / "models").mkdir(exist_ok=True)
        found, _ = Results.begin(tmp_path, request, gpu=gpu, fresh=fresh)
        found.write()
        return found

    return make


@pytest.fixture
def work(begin):
    def make(name="speed:minilm", *, seconds=60.0, artifacts=None, **fields):
        found = begin(fresh=True, **fields)
        for model, made in (artifacts or {}).items():
            found.unit(f"models:{model}")["cases"]["made"] = case(artifacts=made)
        return Work(found, name, seconds)

    return make


def case(**values):
    """Return the record of a case that passed."""
    return {"finished": True, "command": 1, "seconds": 1.0, "checks": [], "notes": [], **values}


def checks_of(work):
    return [check for one in work.record["cases"].values() for check in one["checks"]]


@pytest.fixture(scope="module")
def dry_run(tmp_path_factory):
    """Run all parts on the CPU; return the exit status, the document and the page."""
    root = tmp_path_factory.mktemp("gpu-check")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ENGINERY_HOME", str(root / "home"))
        # Not from the repository's root: the processes of the parts find their modules anyway.
        patch.chdir(root)
        status = command.main(["--device", "cpu", "--quick", "--max-minutes", "40"])
    out = root / "home" / "gpu-check" / "dry-run"
    (text,) = (file.read_text() for file in out.glob("*.md"))
    (document,) = (json.loads(file.read_text()) for file in out.glob("*.json"))
    return SimpleNamespace(status=status, text=text, document=document, root=root)


@pytest.mark.slow
def test_every_check_of_a_dry_run_passes(dry_run):
    found = dry_run.document
    assert (dry_run.status, found["failures"], found["complete"]) == (0, [], True)
    assert list(found["parts"]) == [unit.name for unit in chosen_units()]
    assert {part["status"] for part in found["parts"].values()} == {"done"}
    cases = [one for part in found["parts"].values() for one in part["cases"].values()]
    assert all(one["finished"] for one in cases)


@pytest.mark.slow
def test_every_shape_compares_enginery_with_pytorch_and_onnxruntime(dry_run):
    settings = settings_for(quick=True)
    for model in TEXT_MODELS:
        cases = dry_run.document["parts"][f"speed:{model}"]["cases"]
        points = [point for one in cases.values() for point in one["points"]]
        assert [(p["batch"], p["sequence"]) for p in points] == list(settings.points)
        for point in points:
            places = {(r["place"], r["ours"], r["theirs"]) for r in point["ratios"]}
            for rival in ("PyTorch eager", "PyTorch SDPA", "PyTorch eager FP32"):
                assert ("host", "enginery, IOBinding", rival) in places
                assert ("host", "enginery, no IOBinding", rival) in places
                assert ("device", "enginery, IOBinding", rival) in places
            for rival in ("ONNX Runtime", "ONNX Runtime, exported FP32"):
                assert ("host", "enginery, no IOBinding", rival) in places
            # Rounds end by their number in a dry run, so that there are enough of them.
            assert all(ratio["interval"] for ratio in point["ratios"])
            assert "no CUDA graphs" in point["left out"]["enginery, CUDA graph"]


@pytest.mark.slow
def test_dry_run_is_marked_and_writes_nothing_beside_the_results(dry_run):
    assert dry_run.text.startswith("# GPU check: on the CPU: a dry run, ")
    assert "**Every figure is on the CPU: a dry run.**" in dry_run.text
    assert dry_run.text.count("median in ms, on the CPU: a dry run") == 4
    assert not (dry_run.root / "benchmarks").exists()
    verdicts = {goal["verdict"] for goal in dry_run.document["goals"]}
    assert verdicts == {"no verdict: goals apply to an H100 or H200"}


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
        (["--only", "speed:resnet"], "unknown part 'speed:resnet'"),
        (["--max-minutes", "0"], "--max-minutes is 0"),
        (["--out", "{file}"], "File exists"),
    ],
)
def test_exit_status_is_2_for_invalid_options(words, said, capsys, tmp_path):
    (tmp_path / "file").write_text("")
    words = [word.format(file=tmp_path / "file") for word in words]
    assert command.main(["--device", "cpu", "--quick", *words]) == 2
    assert said in capsys.readouterr().err


def test_models_are_made_before_the_first_part_that_needs_them():
    def names(only=""):
        return [unit.name for unit in chosen_units(only)]

    assert names("speed:minilm, doctor") == ["doctor", "models:minilm", "speed:minilm"]
    assert names("doctor") == ["doctor"]
    assert names("models")[:3] == ["models:minilm", "models:bert-base", "models:resnet"]
    assert names("streams,generate:llama") == [
        "models:llama",
        "generate:llama",
        "models:gpt2",
        "streams:gpt2",
    ]
    every = names()
    assert len(every) == len(set(every))
    assert every[:4] == ["doctor", "models:minilm", "smoke:minilm", "agreement:minilm"]
    of_parts = [name.partition(":")[0] for name in every if not name.startswith("models")]
    order = [part.name for part in PARTS]
    assert of_parts == sorted(of_parts, key=order.index)


CHILD = """
import json, os, sys, time
from pathlib import Path
from benchmarks.gpu_check.results import Results
from benchmarks.gpu_check.work import Work

path, name, seconds = sys.argv[1:]
work = Work(Results.read(Path(path)), name, float(seconds))
record = work.record

def does(what):
    def action():
        print(f"{name} {what} begins", flush=True)
        match what:
            case "dies": os.kill(os.getpid(), 11)
            case "hangs": time.sleep(60)
            case "fails": work.check("a", passed=False, found="it is not")
            case _: work.check("a", passed=True, found=what)
    return action

part = name.partition(":")[0]
if part == "silent":
    sys.exit(0)
if part == "crashes":
    os.kill(os.getpid(), 11)
for what in part.split("_"):
    work.case(what, does(what))
failed = not all(check["passed"] for one in record["cases"].values() for check in one["checks"])
record.update(status="failed" if failed else "done", problem="")
work.results.write()
"""


@pytest.fixture
def child(tmp_path, monkeypatch):
    """Write a module that replaces the processes; a part named `a_dies_b` has these cases."""
    (tmp_path / "made_child.py").write_text(CHILD)
    monkeypatch.syspath_prepend(str(tmp_path))
    return "made_child"


def run_made(child, path, *parts, seconds=60.0):
    units = [Unit(part) for part in parts]
    until = time.monotonic() + seconds
    return processes.run_units(units, path, until=until, module=child).document["parts"]


@pytest.mark.more
def test_case_that_crashes_or_hangs_fails_and_the_next_one_runs(child, begin):
    found = run_made(
        child,
        begin().path,
        Part("a_dies_b"),
        Part("hangs_c", case_seconds=1.5),
        Part("silent"),
        Part("crashes"),
    )
    assert {name: one["status"] for name, one in found.items()} == {
        "a_dies_b": "failed",
        "hangs_c": "failed",
        "silent": "crashed",
        "crashes": "crashed",
    }
    assert [one["finished"] for one in found["a_dies_b"]["cases"].values()] == [True] * 3
    assert found["a_dies_b"]["cases"]["dies"]["checks"] == [
        {"check": "dies", "passed": False, "found": "the process crashed with signal 11"}
    ]
    assert found["a_dies_b"]["cases"]["b"]["checks"][0]["passed"]
    assert "without a result" in found["hangs_c"]["cases"]["hangs"]["checks"][0]["found"]
    assert found["hangs_c"]["cases"]["c"]["checks"][0]["passed"]
    assert found["crashes"]["problem"] == "the process crashed with signal 11"
    assert results.failures(found)[-1] == "crashes: the process crashed with signal 11"


RUN = """
import sys, time
from pathlib import Path
from benchmarks.gpu_check.processes import run_units
from benchmarks.gpu_check.settings import Part, Unit
units = [Unit(Part("a_b")), Unit(Part("c_hangs_d"))]
run_units(units, Path(sys.argv[1]), until=time.monotonic() + 60, module="made_child")
"""


@pytest.mark.more
def test_run_that_is_killed_keeps_every_finished_case_and_the_next_one_continues(
    child, begin, tmp_path
):
    path = begin().path
    with subprocess.Popen(
        [sys.executable, "-c", RUN, str(path)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as run:
        assert "c_hangs_d hangs begins\n" in iter(run.stdout.readline, "")
        os.killpg(run.pid, signal.SIGKILL)
    kept = Results.read(path).document["parts"]
    assert kept["a_b"]["status"] == "done"
    assert kept["c_hangs_d"]["status"] == "unfinished"
    assert [one["finished"] for one in kept["c_hangs_d"]["cases"].values()] == [True, False]
    assert path.with_suffix(".md").read_text().count("| a | ok |") == 3

    again = begin()
    assert again.path == path
    (tmp_path / "made_child.py").write_text(CHILD.replace("time.sleep(60)", "pass"))
    found = run_made(child, path, Part("a_b"), Part("c_hangs_d"))
    assert found["c_hangs_d"]["status"] == "done"
    assert [one["command"] for one in found["a_b"]["cases"].values()] == [1, 1]
    assert [one["command"] for one in found["c_hangs_d"]["cases"].values()] == [1, 2, 2]


@pytest.mark.more
def test_failed_cases_run_again_in_the_next_command(child, begin):
    run_made(child, begin().path, Part("a_fails"))
    found = run_made(child, begin().path, Part("a_fails"))
    assert [one["command"] for one in found["a_fails"]["cases"].values()] == [1, 2]


def test_case_without_time_is_left_for_the_next_run(work):
    given = work(seconds=5.0)
    begun = []
    given.case("short", lambda: begun.append("short"))
    given.case("long", lambda: begun.append("long"), seconds=10.0)

    def runs_out():
        raise OutOfTimeError("longer than 3 s")

    given.case("too long", runs_out)
    assert begun == ["short"]
    assert given.left_out == ["long", "too long"]
    assert list(Results.read(given.results.path).unit("speed:minilm")["cases"]) == ["short"]


def test_no_process_starts_without_time(child, begin):
    found = run_made(child, begin().path, Part("a"), seconds=0.5)
    assert (found["a"]["status"], found["a"]["problem"]) == ("unfinished", "no time was left")
    assert found["a"]["cases"] == {}


def test_only_a_run_with_the_same_gpu_options_and_code_is_continued(begin, monkeypatch):
    first = begin(gpu="NVIDIA L4")
    assert begin(gpu="NVIDIA L4").path == first.path
    assert begin(gpu="NVIDIA L4").document["command"] == 3
    assert begin(gpu="NVIDIA H200").path != first.path
    assert begin(gpu="NVIDIA L4", quick=False).path != first.path
    fresh = begin(gpu="NVIDIA L4", fresh=True).path
    assert fresh.name == first.path.stem + "-2.json"
    monkeypatch.setattr(results, "code_digest", lambda: "another")
    assert begin(gpu="NVIDIA L4").path.name == first.path.stem + "-3.json"


def test_models_are_made_again_if_their_files_are_gone(child, begin, tmp_path):
    made = tmp_path / "artifact"
    for there, commands in ((True, [1]), (False, [2])):
        run = begin(fresh=True)
        made.mkdir(exist_ok=True)
        run.unit("models")["status"] = "done"
        run.unit("models")["cases"]["models"] = case(artifacts={"onnx": str(made)})
        run.document["command"] = 2
        run.write()
        if not there:
            made.rmdir()
        found = run_made(child, run.path, Part("models"))
        assert [one["command"] for one in found["models"]["cases"].values()] == commands


WAIT = "; import time; time.sleep(60)"


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


@pytest.mark.more
def test_part_without_a_gpu_ends_with_the_reason(begin):
    run = begin(device="cuda")
    (unit,) = [unit for unit in chosen_units("agreement:minilm") if unit.part.name != "models"]
    found = processes.run_units([unit], run.path, until=time.monotonic() + 60).document
    part = found["parts"]["agreement:minilm"]
    assert part["status"] == "failed"
    assert "does not find a GPU" in part["problem"]
    assert found["failures"] == [f"agreement:minilm: {part['problem']}"]


def test_cpu_is_measured_although_every_search_on_the_gpu_fails(work, exported, monkeypatch):
    monkeypatch.setattr(
        gpus, "cuda_driver", lambda: gpus.CudaDriver(problem="there is no NVIDIA driver")
    )
    onnx = str(exported("resnet", "image-classification").path)
    given = work("convolutions:resnet", device="cuda", artifacts={"resnet": {"onnx": onnx}})
    convolutions.run(given)
    cases = given.record["cases"]
    assert list(cases) == ["cpu", "DEFAULT", "HEURISTIC", "EXHAUSTIVE"]
    (row,) = cases["cpu"]["searches"]
    assert len(row["ms"]) == len(row["first_ms"]) == len(given.settings.images)
    assert not any("searches" in cases[name] for name in list(cases)[1:])
    checks = checks_of(given)
    assert [check["passed"] for check in checks] == [False] * 3
    assert all("there is no NVIDIA driver" in check["found"] for check in checks)


def served_model(work, exported):
    made = exported("bert", "feature-extraction")
    return work("serve:minilm", artifacts={"minilm": {"fp16": str(made.path)}})


@pytest.mark.more
def test_answers_of_a_server_are_compared_with_load_model(work, exported, monkeypatch):
    given = served_model(work, exported)
    with ExitStack() as stack:
        shared = serve.SharedServer(given, stack)
        given.case("answers", lambda: serve._compare(given, shared))
        post = Server.post

        def halved(server, route, body):
            return (np.asarray(post(server, route, body)) / 2).tolist()

        monkeypatch.setattr(Server, "post", halved)
        given.case("halved", lambda: serve._compare(given, shared))
    assert [(c["check"].split()[2], c["passed"]) for c in checks_of(given)] == [
        ("normalized", True),
        ("raw", True),
        ("normalized", False),
        ("raw", False),
    ]


def test_sentence_transformers_is_compared_in_an_environment_of_its_own(
    work, exported, monkeypatch, tmp_path
):
    made = exported("bert", "feature-extraction")
    paths = {"fp16": str(made.path), "source": str(made.path)}
    given = work("embed:minilm", artifacts={"minilm": paths})
    given.case("load_model", lambda: embed._embed(given))
    given.case("missing", lambda: embed._embed_beside(given))
    (note,) = given.record["cases"]["missing"]["notes"]
    assert note.startswith("sentence-transformers: left out, ")

    script = tmp_path / "theirs.py"
    script.write_text(
        "import json, os, shutil, sys\n"
        "assert 'PYTHONPATH' not in os.environ\n"
        "job = json.load(open(sys.argv[1] + '/job.json'))\n"
        "shutil.copy(job['model'] + '/theirs.npy', sys.argv[1] + '/vectors.npy')\n"
        "print(json.dumps({'version': '6', 'batch': 64, 'rates': [1.0, 2.0]}))\n"
    )
    monkeypatch.setattr(embed, "_SCRIPT", script)
    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    theirs = np.load(embed.vectors_path(given))
    source = tmp_path / "source"
    source.mkdir()
    given.results.unit("models:minilm")["cases"]["made"]["artifacts"]["source"] = str(source)
    for name, vectors in (("equal", theirs), ("others", theirs[::-1])):
        np.save(source / "theirs.npy", vectors)
        given.case(name, lambda: embed._embed_beside(given))
    assert [check["passed"] for check in checks_of(given)] == [True, True, False]


class Stale:
    """A runner that ignores host arrays after a run with device tensors."""

    def __init__(self, _artifact, options, *, providers):
        self._bound, self._kept = options.io_binding, None

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
    fp16 = str(exported("bert", "feature-extraction").path)
    given = work("agreement:minilm", artifacts={"minilm": {"fp16": fp16}})
    monkeypatch.setattr(agreement, "OrtRunner", Stale)
    for places in ("host", "device", "host and device by turns"):
        given.case(places, lambda p=places: agreement._compare_ways(given, p, p, {}))
    assert [(c["check"].rpartition(": ")[2], c["passed"]) for c in checks_of(given)] == [
        ("host", True),
        ("device", True),
        ("host and device by turns", False),
    ]


@pytest.mark.more
def test_pooled_vectors_are_compared_with_pytorchs(work, exported, tiny_model, tmp_path):
    bert = exported("bert", "feature-extraction")
    pooled = optimize_model(bert, target="cuda", precision="fp32", out=tmp_path / "pooled")
    outputs = [spec.name for spec in pooled.manifest.graphs[0].outputs]
    assert "sentence_embedding" in outputs
    paths = {"fp32": str(pooled.path), "source": str(tiny_model("bert", "feature-extraction"))}
    given = work("agreement:minilm", artifacts={"minilm": paths})
    given.case("fp32", lambda: agreement._compare(given, "fp32"))
    (check,) = checks_of(given)
    assert check["passed"], check["found"]
    rows = given.record["cases"]["fp32"]["agreements"]
    assert len(rows) == len(outputs) * len(given.settings.agreement)


def test_text_inputs_are_real_tokens_with_padding(exported):
    artifact = exported("bert", "feature-extraction")
    feeds, others = text_feeds(artifact, (3, 12)), text_feeds(artifact, (3, 12), first=5)
    assert feeds["attention_mask"].sum(1).tolist() == [12, 10, 8]
    assert (feeds["input_ids"][:, 0] == feeds["input_ids"][0, 0]).all()  # [CLS]
    assert (feeds["input_ids"][feeds["attention_mask"] == 0] == 0).all()
    assert (feeds["input_ids"] != others["input_ids"]).any()


def test_text_models_have_a_tokenizer_without_the_package_of_minilm(work, monkeypatch):
    monkeypatch.setattr(models, "find_spec", lambda name: None)

    _, path = models.source_of(work(), "bert-base")

    tokenizer = TextTokenizer.open(path)
    for encoding in tokenizer.encode(list(sentences())):
        assert encoding.tokens[0] == "[CLS]"
        assert encoding.tokens[-1] == "[SEP]"
        assert "[UNK]" not in encoding.tokens
    assert tokenizer.encode(["zyxwv"])[0].tokens == [
        "[CLS]",
        "z",
        *(f"##{c}" for c in "yxwv"),
        "[SEP]",
    ]


def test_outputs_of_each_search_are_compared_with_the_cpu(work):
    given = work("convolutions:resnet")
    expected = [np.arange(8.0), np.ones(8)]
    wrong = [expected[0], np.linspace(1.0, 1.5, 8)]

    def compare():
        for found in (expected, wrong, []):
            convolutions._compare(given, "DEFAULT", expected, found)

    given.case("DEFAULT", compare)
    assert [check["passed"] for check in checks_of(given)] == [True, False, False]


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


def judged(points=(), compiled=(), *, gpu="NVIDIA H200", **records):
    ran = case(points=list(points), compiled=list(compiled), **records)
    return {goal.goal: goal for goal in goals.judge({"all": {"cases": {"one": ran}}}, gpu=gpu)}


EAGER = "minilm at 1×128, host: 2 × PyTorch's eager mode"
BEHIND = "minilm, host: at most 5 % slower than torch.compile at every point"


def test_goals_use_the_faster_of_pytorchs_eager_modes():
    speedups = {"PyTorch eager": 3.0, "PyTorch SDPA": 2.1, "PyTorch eager FP32": 1.2}
    found = judged([point("minilm", 1, 128, speedups)])
    assert found[EAGER].verdict == "reached"
    assert found[EAGER].figure.startswith("2.10 × PyTorch SDPA")
    slower = judged([point("minilm", 1, 128, {**speedups, "PyTorch SDPA": 1.9}, ms=0.6)])
    assert slower[EAGER].verdict == "missed"


def compiled_point(batch, sequence, speedup, mode="reduce-overhead", **fields):
    return {**point("minilm", batch, sequence, {"torch.compile": speedup}, **fields), "mode": mode}


def test_one_point_slower_than_torch_compile_misses_the_goal():
    found = judged(compiled=[compiled_point(1, 128, 1.4), compiled_point(8, 16, 0.94)])
    assert found[BEHIND].verdict == "missed"
    assert "at 8×16, of 2 points compared" in found[BEHIND].figure
    both = judged(compiled=[compiled_point(1, 128, 1.4), compiled_point(8, 16, 1.4)])
    assert both[BEHIND].verdict == "reached"


def test_goal_within_the_interval_is_not_decided():
    eager = "PyTorch eager"
    wide = judged(
        [point("minilm", 1, 128, {eager: 2.1}, width=0.2)],
        [compiled_point(1, 128, 1.0, width=0.2)],
    )
    held = "not decided: the interval contains the goal"
    assert wide[EAGER].verdict == held
    assert wide[BEHIND].verdict == "reached at 0 of 1 points"
    few = point("minilm", 1, 128, {eager: 3.0})
    for ratio in few["ratios"]:
        ratio["interval"] = None
    assert judged([few])[EAGER].verdict == "not decided: too few rounds"


def served(connections, rate, *, p50=0.8, p99=5.0, **fields):
    return {
        "model": "minilm",
        "connections": connections,
        "per_second": rate,
        "latency_ms": {"p50": p50, "p99": p99},
        "server_errors": 0,
        "lost": 0,
        "wrong": 0,
        "checked": 50,
        **fields,
    }


@pytest.mark.parametrize(
    ("row", "verdict"),
    [
        (served(64, 21_000), "reached"),
        (served(64, 19_000), "missed"),
        (served(64, 21_000, p99=6.5), "missed"),
        (served(64, 21_000, wrong=1), "missed"),
        (served(64, 21_000, server_errors=1), "missed"),
        (served(256, 31_000, p99=20.0), "reached"),
        (served(1, 800), "reached"),
        (served(1, 1500, p50=1.1), "missed"),
    ],
)
def test_load_of_the_server_is_judged_with_its_answers(row, verdict):
    (goal,) = judged(served=[row]).values()
    assert goal.verdict == verdict
    assert "of 50 wrong" in goal.figure


def shapes(new, seen):
    times = [{"p50": value, "p99": 2 * value, "max": 9.0} for value in (new, seen)]
    return [{"model": "minilm", "new_ms": times[0], "seen_ms": times[1]}]


def embedded(side, *rates):
    return {"side": side, "rows": 20_000, "per_second": list(rates)}


def generated(rate, speedup, rows=1, beams=1, model="gpt2"):
    return {
        "model": model,
        "rows": rows,
        "beams": beams,
        "per_second": rate,
        "speedup": speedup,
    }


def predicted(form, rows, rate):
    return {"way": form, "rows": rows, "per_second": rate}


@pytest.mark.parametrize(
    ("records", "verdicts"),
    [
        ({"shapes": shapes(1.4, 1.0)}, ["reached", "reached"]),
        ({"shapes": shapes(1.6, 1.0)}, ["missed", "missed"]),
        # The first turn is left out.
        ({"embedded": [embedded("enginery", 90_000, 56_000, 57_000)]}, ["reached"]),
        (
            {"embedded": [embedded("enginery", 1, 56_000), embedded("sentence-t", 1, 9_000)]},
            ["reached", "reached"],
        ),
        (
            {"embedded": [embedded("enginery", 1, 50_000), embedded("sentence-t", 1, 9_000)]},
            ["missed", "missed"],
        ),
        (
            {"predicted": [predicted("Parquet", 500, 46_000), predicted("Parquet", 50, 9_000)]},
            ["reached"],
        ),
        ({"predicted": [predicted("JSON lines", 500, 19_000)]}, ["missed"]),
        ({"generated": [generated(1600, 9)]}, ["reached"]),
        ({"generated": [generated(1600, 7)]}, ["missed"]),
        ({"generated": [generated(1400, 9)]}, ["missed"]),
        ({"generated": [generated(10, 5.5, beams=4, model="m2m100")]}, ["reached"]),
        ({"generated": [generated(10, 5.5, rows=8, model="m2m100")]}, []),
        (
            {
                "generated": [generated(40_000, 9, rows=32)],
                "streamed": [{"model": "gpt2", "streams": 32, "per_second": 24_000}],
            },
            ["reached", "reached"],
        ),
        ({"streamed": [{"model": "gpt2", "streams": 32, "per_second": 24_000}]}, []),
    ],
)
def test_goals_of_texts_in_bulk_and_of_generation(records, verdicts):
    assert [goal.verdict for goal in judged(**records).values()] == verdicts


def test_build_stage_rejects_an_h200_for_rtx(exported, monkeypatch, work):
    monkeypatch.setattr(tensorrt, "visible_gpus", lambda: (H200,))
    monkeypatch.setattr("enginery.runtime.tensorrt.capabilities.visible_gpus", lambda: (H200,))
    onnx = str(exported("bert", "feature-extraction").path)
    given = work("tensorrt:minilm", artifacts={"minilm": {"onnx": onnx}})
    given.case("rtx", lambda: tensorrt._try(given, RTX))
    ((flavor, said),) = given.record["cases"]["rtx"]["flavors"]
    assert flavor == RTX.name
    assert "no support for 9.0" in said
    assert checks_of(given)[0]["passed"]


@pytest.mark.parametrize(
    ("seconds", "longest", "left"),
    [(20.6, 240.0, ["1×8, aot_eager"]), (200.0, 0.3, [])],
    ids=["no time is left", "it takes too long"],
)
def test_slow_compilation_is_stopped_and_runs_again_only_for_want_of_time(
    work, exported, monkeypatch, seconds, longest, left
):
    made = exported("bert", "feature-extraction")
    paths = {"fp16": str(made.path), "source": made.manifest.source.id}
    given = work("compiled:minilm", seconds=seconds, artifacts={"minilm": paths})
    monkeypatch.setattr(compiled, "COMPILE_SECONDS", longest)
    monkeypatch.setattr(compiled, "compile_for", lambda *_: time.sleep(30))
    monkeypatch.setattr(Work, "quick", False)
    given.case("1×8, aot_eager", lambda: compiled._measure(given, "aot_eager", (1, 8)))
    assert given.left_out == left
    notes = [note for one in given.record["cases"].values() for note in one["notes"]]
    assert [note.startswith("not compiled: longer than") for note in notes] == [True] * (not left)


def test_time_limit_ends_with_its_block():
    with pytest.raises(TimeoutError), compiled.within(0.05):
        time.sleep(5)
    with compiled.within(0.1):
        pass
    time.sleep(0.2)


def test_copied_artifacts_are_reused_with_their_own_weights(work, exported, monkeypatch):
    given = work("models:bert-base", reuse=True)
    made = exported("bert", "feature-extraction")
    source = given.models / "bert-base-tiny-source"
    shutil.copytree(made.manifest.source.id, source)
    for precision in ("onnx", "fp16", "fp32", "bf16"):
        made.copy_to(given.models / f"bert-base-{precision}")
    for stage in ("export_model", "optimize_model"):
        monkeypatch.setattr(models, stage, None)
    models.run(given)
    assert all(check["passed"] for check in checks_of(given))
    found = given.results.artifacts("bert-base")
    assert found["bf16"] == str(given.models / "bert-base-bf16")
    notes = [note for one in given.record["cases"].values() for note in one["notes"]]
    assert "bert-base-fp16: reused" in " ".join(notes)
    weights = source / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1] + b"!")
    again = work("models:bert-base", reuse=True)
    models.run(again)
    (failed,) = again.record["cases"]["onnx"]["checks"]
    assert "was made from a model.safetensors that differs" in failed["found"]
    assert "onnx" not in again.results.artifacts("bert-base")


def test_carried_models_need_their_directory(capsys):
    assert command.main(["--device", "cpu", "--quick", "--carried"]) == 2
    assert "--models DIR" in capsys.readouterr().err


def test_error_in_a_case_is_a_failed_check(work):
    given = work("agreement:minilm")

    def fails(error):
        def action():
            raise error

        return action

    given.case("one", fails(ProviderError("there is none.", do="Install it.")))
    given.case("two", fails(KeyError("logits")))
    saved = Results.read(given.results.path).unit("agreement:minilm")["cases"]
    assert [check["found"] for one in saved.values() for check in one["checks"]] == [
        "there is none. Install it.",
        "KeyError: 'logits'",
    ]
