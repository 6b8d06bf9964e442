"""What became INT8, how near the answers are, and what TensorRT made of it, as numbers.

>>> report = QuantizationReport.of(layers, recorded, measured, accuracy, trials, …)
>>> report.summary
'36 of 36 layers in INT8, 100.0 % of their multiply-adds; mean cosine 0.9985 …'
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from enginery.passes.layers import Layer
from enginery.quantize.accuracy import Accuracy
from enginery.quantize.calibrate import Measured
from enginery.quantize.config import QuantizeConfig
from enginery.quantize.data import CalibrationData
from enginery.quantize.recorded import Recorded
from enginery.quantize.trial import EngineTrial

COUNTED = (
    "multiply-adds of MatMul, Gemm and Conv with stored weights, for one calibration input of mean "
    "length; with attention: products of two activations are counted in the whole, too"
)


@dataclass(frozen=True)
class QuantizationReport:
    """The content of `reports/quantization.json`."""

    summary: str
    document: Mapping[str, Any]

    @classmethod
    def of(
        cls,
        layers: Sequence[Layer],
        recorded: Recorded,
        measured: Measured | None,
        accuracy: Accuracy | None,
        trials: Sequence[EngineTrial],
        config: QuantizeConfig,
        data: CalibrationData | None,
        notes: Sequence[str],
        fields: Mapping[str, str],
    ) -> QuantizationReport:
        """Puts together what the stage found.

        `measured` and `accuracy` are None where ranges were reused.
        """
        int8 = [layer.name for layer in recorded.quantized(layers)]
        document: dict[str, Any] = {
            "scheme": f"{config.scheme} static symmetric, the rest {config.residual}",
            "layers": {"int8": len(int8), "all": len(layers)},
            "int8_layers": int8,
            "left_out": recorded.left_out,
            "fp32_nodes": recorded.fp32_nodes,
            "calibration": {
                "inputs": data.description if data else "none, ranges were reused",
                "kind": data.kind if data else "none",
                "method": config.method,
            },
            "activations": _activations(recorded),
            "engines": [asdict(trial) for trial in trials],
            "notes": list(notes),
            "fields": dict(fields),
        }
        said = [f"{len(int8)} of {len(layers)} layers in INT8"]
        if measured is not None:
            document["multiply_adds"] = _multiply_adds(measured, int8)
            said[0] += f", {measured.arithmetic.share(int8):.1%} of their multiply-adds"
            document["search"] = _search(measured)
        if accuracy is not None:
            document["accuracy"] = asdict(accuracy)
            said.append(_words(accuracy))
        said += [
            f"TensorRT {trial.tensorrt} for {trial.capability}: {trial.int8_layers} of {len(int8)} "
            f"multiplied in INT8, {trial.fused_attentions} fused attentions"
            for trial in trials
        ]
        summary = "; ".join(said)
        return cls(summary, {"summary": summary, **document})

    def to_json(self) -> bytes:
        """For programs."""
        text = json.dumps(self.document, indent=2, ensure_ascii=False)
        return text.encode() + b"\n"


def _words(accuracy: Accuracy) -> str:
    words = f"mean cosine {accuracy.cosine:.5f} to FP32 on {accuracy.rows} held-out rows"
    for name, value in (
        ("nearest neighbours", accuracy.neighbour_agreement),
        ("largest scores", accuracy.argmax_agreement),
    ):
        if value is not None:
            words += f", {value:.1%} of the {name} agree"
    if accuracy.label_accuracy is not None:
        words += f", accuracy {accuracy.label_accuracy:.1%}"
    return words


def _activations(recorded: Recorded) -> dict[str, Any]:
    """Scale and smoothing by activation; the vectors themselves are in ranges.json."""
    return {
        name: {
            "scale": ready.scale,
            "largest": 127 * ready.scale,
            **(asdict(recorded.smoothed[name]) if name in recorded.smoothed else {}),
        }
        for name, ready in recorded.ranges.items()
    }


def _multiply_adds(measured: Measured, int8: Sequence[str]) -> dict[str, Any]:
    work = measured.arithmetic
    return {
        "counted": COUNTED,
        "positions": work.positions,
        "all": sum(work.by_layer.values()),
        "attention": work.attention,
        "int8_share": work.share(int8),
        "int8_share_with_attention": work.share(int8, with_attention=True),
    }


def _search(measured: Measured) -> dict[str, Any]:
    found = measured.search
    return {
        "budget": str(measured.budget),
        "reference_accuracy": measured.budget.reference_accuracy,
        "simulated": asdict(found.accuracy),
        "effects": found.effects,
        "curve": [
            {"left_out": p.left_out, "int8_share": p.int8_share, **asdict(p.accuracy)}
            for p in found.curve
        ],
    }
