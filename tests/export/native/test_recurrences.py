"""Recurrences of state space models, lowered as a scan."""

import sys

import pytest
import torch
from torch import nn

from benchmarks.model_types import save_model
from enginery import export_model, validate_model
from enginery.export.native.recurrences import exportable_scans, scan_states
from tests.environments import needs_transformers5


def test_states_are_those_of_a_loop():
    generator = torch.Generator().manual_seed(0)
    decays, updates = torch.rand(2, 3, 7, 4, 5, generator=generator)
    states, state = [], torch.zeros(3, 4, 5)
    for position in range(7):
        state = decays[:, position] * state + updates[:, position]
        states.append(state)
    torch.testing.assert_close(scan_states(decays, updates), torch.stack(states, dim=1))


def test_layers_and_modules_are_as_before():
    layer = nn.Linear(1, 1)
    layer.use_mambapy = False
    before = set(sys.modules)
    with exportable_scans(nn.Sequential(layer)):
        from mambapy.pscan import pscan

        assert layer.use_mambapy
        assert pscan is scan_states
    assert not layer.use_mambapy
    assert not {"mambapy", "mambapy.pscan"} & (set(sys.modules) - before)


def test_other_models_are_left_alone():
    with exportable_scans(nn.Linear(1, 1)):
        assert "mambapy.pscan" not in sys.modules


@needs_transformers5
@pytest.mark.more
def test_graph_of_mamba_equals_pytorch_at_any_length(tmp_path, home):
    source = save_model("mamba", "text-generation", tmp_path / "model")
    artifact = export_model(str(source), task="text-generation")
    report = validate_model(artifact, effort="quick")
    assert report.passed, report.summary
