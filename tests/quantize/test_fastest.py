"""The choice between static and dynamic INT8, on made-up speeds and artifacts."""

from types import SimpleNamespace

import pytest

from enginery.core.errors import CheckFailedError, InputError
from enginery.core.progress import SILENT
from enginery.quantize import fastest
from enginery.quantize.config import QuantizeConfig
from enginery.quantize.job import QuantizeJob, QuantizeResult
from enginery.reports.quantization import QuantizationReport

MISSED = CheckFailedError("no combination meets the budget")


@pytest.fixture
def choose(tmp_path, monkeypatch):
    """Return a function: the scheme that is chosen for the speeds of each, and its notes.

    In place of its speeds, a scheme may have the error that quantizing with it raises.
    """

    def choose(*, graph_bytes=0, **outcomes):
        source = SimpleNamespace(
            path=tmp_path,
            manifest=SimpleNamespace(graphs=("model.onnx",)),
            graph_bytes=lambda record: graph_bytes,
        )

        def make(job):
            scheme = job.config.scheme
            if isinstance(outcomes[scheme], Exception):
                raise outcomes[scheme]
            (job.directory / "model.onnx").write_text(scheme)
            return QuantizeResult((), QuantizationReport("measured", scheme, [], {}), [])

        def measure(job, folders):
            return {scheme: outcomes[scheme] for scheme in folders}

        monkeypatch.setattr(fastest, "_measure", measure)
        out = tmp_path / "out"
        out.mkdir()
        job = QuantizeJob(source, QuantizeConfig(), None, {}, out, tmp_path, SILENT)
        scheme, result = fastest.quantize_to_fastest(dict.fromkeys(outcomes, make), job)
        assert [path.name for path in out.iterdir() if path.is_file()] == ["model.onnx"]
        assert (out / "model.onnx").read_text() == scheme
        return scheme, " ".join(result.report.notes)

    return choose


def test_a_scheme_that_is_faster_in_every_round_is_chosen(choose):
    scheme, notes = choose(int8=[2.0, 2.1], dynamic=[2.2, 2.5])
    assert scheme == "dynamic"
    assert "static INT8 2.05, dynamic INT8 2.35" in notes


def test_a_scheme_that_is_not_faster_in_every_round_is_not_chosen(choose):
    scheme, notes = choose(int8=[2.0, 2.1], dynamic=[2.05, 2.5])
    assert scheme == "int8"
    assert "dynamic INT8 was not chosen: it was not faster in every round" in notes


def test_dynamic_int8_of_a_large_graph_is_not_tried(choose):
    scheme, notes = choose(int8=[2.0], dynamic=[9.0], graph_bytes=3 << 30)
    assert scheme == "int8"
    assert "dynamic INT8 was not chosen: its quantizer would hold" in notes


@pytest.mark.parametrize(
    ("outcomes", "chosen", "note"),
    [
        (
            {"int8": MISSED, "dynamic": [0.9]},
            "dynamic",
            "static INT8 was not chosen: no combination meets the budget",
        ),
        (
            {"int8": [0.9], "dynamic": ValueError("no such node")},
            "int8",
            "dynamic INT8 was not chosen: it failed: no such node",
        ),
    ],
    ids=["static misses the budget", "the dynamic quantizer fails"],
)
def test_the_other_scheme_is_kept_if_one_fails(choose, outcomes, chosen, note):
    scheme, notes = choose(**outcomes)
    assert scheme == chosen
    assert note in notes
    assert "slower than FP32 on this machine" in notes


@pytest.mark.parametrize(
    "outcomes",
    [
        {"int8": InputError("no such input"), "dynamic": [1.0]},
        {"int8": CheckFailedError("no such input"), "dynamic": MISSED},
    ],
)
def test_an_error_of_the_first_scheme_is_raised(choose, outcomes):
    with pytest.raises((CheckFailedError, InputError), match="no such input"):
        choose(**outcomes)
