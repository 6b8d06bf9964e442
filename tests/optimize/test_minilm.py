"""The accuracy of all-MiniLM-L6-v2 in FP16."""

import json

import pytest

from enginery import export_model, optimize_model
from enginery.optimize import stage


@pytest.mark.more
def test_minilm_in_fp16_keeps_its_cosine_and_needs_no_fp32_nodes(minilm, home):
    source = export_model(minilm, task="feature-extraction")
    made = optimize_model(source, target="tensorrt", precision="fp16")
    (graph,) = json.loads((made.path / stage.REPORT).read_bytes())["graphs"]
    assert graph["islands"] == []
    assert [agreement["output"] for agreement in graph["agreements"]] == ["last_hidden_state"]
    assert all(agreement["cosine"] >= 0.9999 for agreement in graph["agreements"])
    assert all(agreement["nonfinite"] == 0 for agreement in graph["agreements"])
