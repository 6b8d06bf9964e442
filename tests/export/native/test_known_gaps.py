"""Models that cannot be exported by PyTorch's exporters."""

import pytest

from enginery.core.errors import ExportError
from enginery.core.versions import OPTIMUM, TRANSFORMERS5
from enginery.export.native import known_gaps
from enginery.export.native.known_gaps import require_supported


def test_type_that_cannot_be_exported_is_refused_with_the_reason():
    with pytest.raises(ExportError, match=r"moonshine.*without Optimum: its encoder shortens"):
        require_supported("moonshine_streaming", "automatic-speech-recognition-with-past")
    with pytest.raises(ExportError, match=r"^informer cannot .* exporters: each step"):
        require_supported("informer", "time-series-forecasting")


def test_scans_need_transformers_5(monkeypatch):
    monkeypatch.setattr(known_gaps, "transformers_family", lambda: OPTIMUM)
    with pytest.raises(ExportError, match=r"^mamba cannot .*its scan is a loop.*transformers5"):
        require_supported("mamba", "text-generation")
    monkeypatch.setattr(known_gaps, "transformers_family", lambda: TRANSFORMERS5)
    require_supported("mamba", "text-generation")


def test_task_of_several_parts_is_refused_with_a_remedy():
    with pytest.raises(ExportError, match=r"text-to-audio.*in parts.*enginery\[export\]"):
        require_supported("speecht5", "text-to-audio")


def test_other_models_are_tried():
    require_supported("bert", "text-classification")
