"""Every step of the README for a model over 2 GB, each from `--out`."""

import shutil

import pytest

from benchmarks import large_model

GIGABYTE = 1e9


@pytest.mark.slow
def test_model_over_2_gb_goes_through_every_step_of_the_readme(tmp_path, monkeypatch, capsys):
    if shutil.disk_usage(tmp_path).free < 30 * GIGABYTE:
        pytest.skip("it needs 30 GB of disk")
    monkeypatch.setenv("ENGINERY_HOME", str(tmp_path / "home"))
    with capsys.disabled():
        steps = {step.name: step for step in large_model.main(tmp_path)}  # raises where one fails
    weights = (tmp_path / "large-bert/model.safetensors").stat().st_size
    assert weights > 2 * GIGABYTE
    assert len(steps) == 13
    assert steps["validate"].peak_bytes < 2.2 * weights
    assert (tmp_path / "pulled-fp16/manifest.json").is_file()
