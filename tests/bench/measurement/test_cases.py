from __future__ import annotations

import pytest

from enginery.bench.backends import plan as plan_module
from enginery.bench.backends.plan import keep_image_backends, plan_backends
from enginery.bench.config import BenchConfig, backend_names, check_options, read_sizes
from enginery.bench.measurement.cases import rows_of, sweep, tokens_of
from enginery.bench.measurement.shapes import compare_pairs
from enginery.bench.target import Target, image_layout
from enginery.core.errors import ArtifactError, OptionError, ProviderError, ShapeError
from enginery.core.shapes import TensorSpec
from enginery.runtime.providers.known import CPU
from enginery.runtime.providers.selection import Provider
from enginery.runtime.providers.specification import ProviderSpec
from tests.bench.sample_results import save_detector


@pytest.fixture
def bert(exported):
    return Target.open(exported("bert", "feature-extraction"), "", allow_failed=False)


@pytest.fixture
def vit(exported):
    return Target.open(exported("vit", "image-classification"), "", allow_failed=False)


@pytest.fixture
def detector(tmp_path):
    path = save_detector(tmp_path / "detector.onnx")
    return Target.open(path, "", allow_failed=False)


def shapes(target, **options):
    return [str(case) for case in sweep([target], BenchConfig(**options))]


@pytest.mark.more
def test_sweep_is_every_batch_with_every_sequence(bert):
    found = shapes(bert, batch="8,1", sequence="16,64")
    assert found == [f"batch {b}, sequence {s}" for b in (1, 8) for s in (16, 64)]


def test_auto_sequences_end_at_the_maximum_length(bert):
    assert shapes(bert, batch="1") == ["batch 1, sequence 16", "batch 1, sequence 128"]


def test_feeds_have_the_shape_and_are_reproducible(bert):
    (case,) = sweep([bert], BenchConfig(batch="3", sequence="17"))
    feeds, again = case.feeds(bert, seed=0), case.feeds(bert, seed=0)
    assert feeds["input_ids"].shape == (3, 17)
    assert (feeds["input_ids"] == again["input_ids"]).all()
    assert (rows_of(case.sizes, bert), tokens_of(case.sizes, bert)) == (3, 51)


def test_sequence_beyond_the_maximum_length_is_an_error(bert):
    with pytest.raises(ShapeError, match=r"sequence 129 is too long .*at most 128") as e:
        shapes(bert, sequence="16,129")
    assert e.value.do == "Measure up to 128: --sequence 16,128"
    with pytest.raises(ShapeError, match="at most 128"):
        shapes(bert, shape=("batch=1,sequence=512",))


@pytest.mark.more
def test_error_on_sequence_for_an_image_model_lists_its_dims(vit):
    message = r"no dynamic dim 'sequence'.*pixel_values: float32 \(batch"
    with pytest.raises(OptionError, match=message):
        shapes(vit, sequence="128")
    assert shapes(vit, batch="1,2")[0].startswith("batch 1")
    assert not any("sequence" in case for case in shapes(vit))


def test_shape_sets_some_dims_and_the_other_options_the_rest(detector):
    found = shapes(
        detector, batch="1,2", shape=("height=64,width=96", "batch=4,height=32,width=32")
    )
    assert found == [
        "batch 1, height 64, width 96",
        "batch 2, height 64, width 96",
        "batch 4, height 32, width 32",
    ]


@pytest.mark.parametrize(
    ("shape", "error", "words"),
    [
        ("heigth=64,width=64", OptionError, "no dim 'heigth'; did you mean 'height'"),
        ("height=0,width=64", OptionError, "found '0', expected whole numbers of 1 or more"),
        ("height", OptionError, "found 'height', expected name=size"),
        ("height=1,height=2,width=3", OptionError, "'height' is given twice"),
        ("channels=4,height=64,width=64", ShapeError, "no dim 'channels'|channels is fixed"),
        ("height=64", ShapeError, "dim 'width' of detector has no size. Set it: --shape width"),
    ],
)
def test_invalid_shape_is_an_error(detector, shape, error, words):
    with pytest.raises((error, OptionError), match=words):
        shapes(detector, shape=(shape,))


def test_models_with_different_dims_cannot_be_compared(bert, vit):
    with pytest.raises(ShapeError, match="cannot be compared on the same shapes"):
        sweep([bert, vit], BenchConfig())


def test_image_dims_of_an_onnx_file_get_their_usual_names(detector):
    assert detector.record.inputs[0].dims == ("batch", 3, "height", "width")
    assert detector.is_onnx_file


def test_missing_or_damaged_onnx_file_is_an_error(tmp_path):
    with pytest.raises(ArtifactError, match="was not found"):
        Target.open(tmp_path / "absent.onnx", "", allow_failed=False)
    broken = tmp_path / "broken.onnx"
    broken.write_bytes(b"no protobuf")
    with pytest.raises(ArtifactError, match="is not an ONNX model, or a damaged one"):
        Target.open(broken, "", allow_failed=False)


def test_position_of_the_channels():
    assert image_layout(TensorSpec("x", "float32", (1, 3, "h", "w"))) == "first"
    assert image_layout(TensorSpec("x", "uint8", ("b", "h", "w", 3))) == "last"
    with pytest.raises(OptionError, match="is not an image"):
        image_layout(TensorSpec("input_ids", "int64", ("batch", "sequence")))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"against": "pytorhc"}, "unknown backend 'pytorhc'; did you mean 'pytorch'"),
        ({"against": "auto,pytorch"}, "unknown backend 'auto'"),
        ({"threads": -1}, "'threads' is -1, expected 0 or more"),
        ({"max_rounds": 3}, "'max_rounds' is 3, expected 10 or more: 'min_rounds' is 10. Lower"),
        ({"confidence": 1.0}, "'confidence' is 1, expected more than 0.5 and less than 1"),
        ({"precision": float("nan")}, "'precision' is nan"),
        ({"images": "photos", "shape": ("a=1",)}, "cannot be combined"),
    ],
)
def test_invalid_option_is_an_error(options, words):
    with pytest.raises(OptionError, match=words):
        check_options(BenchConfig(**options))


def test_sizes_are_sorted_and_unique():
    assert read_sizes("32, 1,8,1", "batch") == (1, 8, 32)
    for text in ("", "1,,2", "-1", "1.5", "١"):
        with pytest.raises(OptionError, match="whole numbers"):
            read_sizes(text, "batch")
    assert backend_names(BenchConfig(against="none")) == ()


def test_auto_gives_a_reason_for_each_backend_that_it_leaves_out(bert, detector):
    plans, left_out = plan_backends([bert], BenchConfig())
    assert [plan.name for plan in plans] == ["enginery", "onnxruntime", "optimum", "pytorch"]
    assert set(left_out) == {"pytorch-compile", "pytorch-fp16", "enginery-cpu"}
    plans, left_out = plan_backends([detector], BenchConfig())
    assert [plan.name for plan in plans] == ["enginery", "onnxruntime"]
    assert left_out["pytorch"] == "an .onnx file has no PyTorch model"


def test_named_backend_that_cannot_run_is_an_error(detector):
    message = r"pytorch cannot be compared with detector: an \.onnx file"
    with pytest.raises(ProviderError, match=message):
        plan_backends([detector], BenchConfig(against="pytorch"))


def test_pytorch_runs_once_for_several_artifacts(bert):
    from dataclasses import replace

    plans, _ = plan_backends([bert, replace(bert, name="other")], BenchConfig(against="pytorch"))
    assert [plan.name for plan in plans] == [
        f"{bert.name}: enginery",
        "other: enginery",
        f"{bert.name}: pytorch",
    ]


@pytest.fixture
def any_provider(monkeypatch):
    """Make every requested provider available."""

    def choose(artifact, record, specs, **_):
        return [Provider(specs[0].full_name, "requested", specs[0].options)], []

    monkeypatch.setattr(plan_module, "choose_with_engines", choose)


def test_auto_compares_a_gpu_with_the_cpu(detector, any_provider):
    plans, _ = plan_backends([detector], BenchConfig(providers="cuda"))
    assert [(plan.kind, plan.providers) for plan in plans][-1] == (
        "enginery-cpu",
        (ProviderSpec("cpu"),),
    )


def test_pytorch_runs_on_the_cpu_beside_openvino(bert, any_provider):
    plans, left_out = plan_backends([bert], BenchConfig(providers="openvino"))
    assert plans[-1].kind == "enginery-cpu"
    assert {plan.device for plan in plans} == {"cpu"}
    assert {"pytorch-fp16", "pytorch-compile"} <= set(left_out)


def test_after_a_fallback_nothing_is_planned_for_the_gpu(bert, monkeypatch):
    def choose(artifact, record, specs, *, allow_fallback):
        assert allow_fallback
        return [Provider(CPU, "cuda requested, but not available")], []

    monkeypatch.setattr(plan_module, "choose_with_engines", choose)
    plans, left_out = plan_backends(
        [bert], BenchConfig(providers="cuda,cpu", allow_fallback=True, cuda_graph=True)
    )
    by_kind = {plan.kind: plan for plan in plans}
    assert set(by_kind) == {"enginery", "onnxruntime", "optimum", "pytorch"}
    assert {plan.device for plan in plans} == {"cpu"}
    assert not any(plan.cuda_graph for plan in plans)
    # enginery's runner falls back again and records the reason; Optimum has no fallback.
    assert [spec.name for spec in by_kind["enginery"].providers] == ["cuda", "cpu"]
    assert by_kind["optimum"].providers == (ProviderSpec("cpu"),)
    assert "enginery-cpu" in left_out


def test_compared_pairs(bert):
    from dataclasses import replace

    plans, _ = plan_backends(
        [bert, replace(bert, name="b")], BenchConfig(against="onnxruntime,optimum,pytorch")
    )
    names = [f"{bert.name}: {kind}" for kind in ("enginery", "onnxruntime", "optimum", "pytorch")]
    assert {plan.name for plan in plans} == {*names, "b: enginery", "b: onnxruntime"}
    turns = {plan.name: [[1.0]] * 6 for plan in plans}
    found = compare_pairs(turns, {plan.name: plan for plan in plans}, BenchConfig())
    ours, bare, optimum, pytorch = names
    assert {(c.contender, c.base) for c in found} == {
        (ours, pytorch),
        (bare, pytorch),
        (optimum, pytorch),
        ("b: enginery", pytorch),
        (bare, ours),
        (optimum, ours),
        ("b: enginery", ours),
        ("b: onnxruntime", "b: enginery"),
    }
    assert len(found) == 8


def test_frameworks_run_on_images_only_if_named(bert, any_provider):
    left_out = {}
    plans, _ = plan_backends([bert], BenchConfig(providers="cuda"))
    kept = [plan.kind for plan in keep_image_backends(plans, left_out)]
    assert kept == ["enginery", "onnxruntime", "enginery-cpu"]
    assert {"optimum", "pytorch"} <= set(left_out)
    plans, _ = plan_backends([bert], BenchConfig(against="pytorch"))
    assert [plan.kind for plan in keep_image_backends(plans, {})] == ["enginery", "pytorch"]
