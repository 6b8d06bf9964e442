"""`inspect --placement` of any .onnx file, and of one of several graphs."""

from __future__ import annotations

import json

import pytest

from enginery import cli
from tests.bench.sample_results import save_detector


def said(capsys, *words):
    with pytest.raises(SystemExit) as ended:
        cli.main([str(word) for word in words])
    return ended.value.code, capsys.readouterr()


def test_an_onnx_file_is_placed_where_it_lies(tmp_path, capsys):
    model = save_detector(tmp_path / "detector.onnx")
    status, shown = said(capsys, "inspect", model, "--placement", "--json")
    assert status == 0
    found = json.loads(shown.out)
    (part,) = found["placement"]["providers"]
    # Two convolutions of 224 by 224 pixels, the first of every second one.
    assert part["multiply_adds"] == 112 * 112 * (8 * 27 + 72)
    assert found["graphs"][0]["inputs"][0]["dims"] == ["batch", 3, "height", "width"]
    status, shown = said(capsys, "inspect", model)
    assert (status, "scores" in shown.out, "Placement" in shown.out) == (0, True, False)
    assert [path.name for path in tmp_path.iterdir()] == ["detector.onnx"]


def test_a_graph_is_named_for_the_placement_alone(exported, capsys):
    artifact = exported("bert", "feature-extraction").path
    words = ("inspect", artifact, "--graph", "model.onnx")
    assert said(capsys, *words, "--placement")[0] == 0
    status, shown = said(capsys, "inspect", artifact, "--placement", "--graph", "decoder.onnx")
    assert status == 2
    assert "has no graph 'decoder.onnx'; it has model.onnx" in shown.err
    status, shown = said(capsys, *words)
    assert (status, "--graph was given without --placement" in shown.err) == (2, True)


def test_a_file_names_the_providers(tmp_path, capsys):
    model = save_detector(tmp_path / "detector.onnx")
    words = ("inspect", model, "--placement", "--json", "--providers", tmp_path / "config.yaml")
    status, shown = said(capsys, *words)
    assert status == 2
    assert "config.yaml does not exist" in shown.err
    (tmp_path / "config.yaml").write_text("cpu: {enable_cpu_mem_arena: false}\n")
    status, shown = said(capsys, *words)
    (part,) = json.loads(shown.out)["placement"]["providers"]
    assert (status, part["name"]) == (0, "CPUExecutionProvider")
    (tmp_path / "config.yaml").write_text("[coreml, cpu]\n")
    status, shown = said(capsys, *words)
    assert status == 2
    assert "coreml requested, but " in shown.err
