"""Faults of checkpoints: tensors that no parameter of the model takes. And tensors that are none.

They are edits of the tensors of a tiny BERT classifier, stored as the libraries that write such
files do.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import torch

Tensors = dict[str, Any]
Edit = Callable[[Tensors], Tensors]

QUERY = "bert.encoder.layer.0.attention.self.query"
WEIGHTS = re.compile(r"encoder\.layer\..*\.weight$")


def quantized(dtype, largest, *parts, weight="weight"):
    """Return an edit that stores every layer's matrices at another precision, with more tensors."""

    def edit(tensors):
        stored = {}
        for name, tensor in tensors.items():
            if tensor.ndim != 2 or not WEIGHTS.search(name):
                stored[name] = tensor
                continue
            scale = tensor.abs().max() / largest
            values = tensor / scale
            values = values if dtype.is_floating_point else values.round()
            module = name.removesuffix("weight")
            stored[module + weight] = values.to(dtype)
            stored |= {module + part: scale.reshape(1).clone() for part in parts}
        return stored

    return edit


def more(**tensors):
    return lambda stored: stored | {f"{QUERY}.{name}": value for name, value in tensors.items()}


QUANTIZED = {
    "modelopt fp8": quantized(torch.float8_e4m3fn, 448, "weight_scale", "input_scale"),
    "fine-grained fp8": quantized(torch.float8_e4m3fn, 448, "weight_scale_inv"),
    "fp8 with scales of other names": quantized(torch.float8_e5m2, 448, "scale_weight"),
    "fp8 with scales of unknown names": quantized(torch.float8_e4m3fn, 448, "multiplier"),
    "int8": quantized(torch.int8, 127, "weight_scale"),
    "int8 without scales": quantized(torch.int8, 127),
    "uint8": quantized(torch.uint8, 127, "weight_scale", "weight_zero_point"),
    "compressed-tensors": quantized(torch.int8, 127, "weight_scale", weight="weight_packed"),
    "bitsandbytes int8": quantized(torch.int8, 127, "SCB", "weight_format"),
    "bitsandbytes nf4": quantized(torch.uint8, 127, "weight.absmax", "weight.quant_map"),
    "gptq": quantized(torch.int32, 127, "qzeros", "scales", "g_idx", weight="qweight"),
    "awq": quantized(torch.int32, 127, "qzeros", "scales", weight="qweight"),
    "hqq": quantized(torch.uint8, 127, "scale", "zero", weight="W_q"),
    "eetq": quantized(torch.int8, 127, "weight_scales"),
    "smoothed": quantized(torch.int8, 127, "smooth_scale"),
    "quanto": quantized(torch.int8, 127, "weight._scale", weight="weight._data"),
    "fake quantization": quantized(torch.float32, 127, "weight_quantizer._amax"),
}


EXTRA = {
    "lora of loralib": (more(lora_A=torch.ones(4, 32), lora_B=torch.ones(32, 4)), "adapter"),
    "lora of peft": (
        lambda t: t | {f"{QUERY}.lora_A.default.weight": torch.ones(4, 32)},
        "adapter",
    ),
    "adapter": (
        lambda t: t | {"bert.encoder.layer.0.adapter.down.weight": torch.ones(4, 32)},
        "adapter",
    ),
    "prompt": (lambda t: t | {"prompt_encoder.embedding.weight": torch.ones(4, 32)}, "adapter"),
    "dora": (
        lambda t: t | {f"{QUERY}.lora_magnitude_vector.default.weight": torch.ones(32)},
        "adapter",
    ),
    "ia3": (lambda t: t | {f"{QUERY}.ia3_l.default": torch.ones(32, 1)}, "adapter"),
    "gate": (more(gate=torch.ones(32)), "extra"),
    "layer": (
        lambda t: t | {n.replace("layer.1.", "layer.2."): v.clone() for n, v in t.items()},
        "extra",
    ),
    "projection": (lambda t: t | {"linear.weight": torch.ones(8, 32)}, "extra"),
    "normalization": (lambda t: t | {"bert.encoder.norm.weight": torch.ones(32)}, "extra"),
}


HARMLESS = {
    "position ids": lambda t: t | {"bert.embeddings.position_ids": torch.arange(128)[None]},
    "batches": lambda t: t | {"bert.encoder.num_batches_tracked": torch.tensor(3)},
    "mask of attention": lambda t: (
        t | {"bert.h.0.attn.bias": torch.ones(1, 1, 8, 8).to(torch.uint8)}
    ),
    "inverse frequencies": lambda t: t | {"bert.encoder.rotary_emb.inv_freq": torch.ones(4)},
    "difference of embeddings": lambda t: (
        t | {"bert.embeddings.word_embeddings._weight": torch.ones(600, 32)}
    ),
    "head of masked language": lambda t: t | {"cls.predictions.bias": torch.ones(600)},
    "old names": lambda t: t | {"cls.predictions.transform.LayerNorm.gamma": torch.ones(32)},
    "head of answers": lambda t: t | {"qa_outputs.weight": torch.ones(2, 32)},
    "head of rewards": lambda t: t | {"v_head.summary.weight": torch.ones(1, 32)},
    "bias of zeros": lambda t: t | {"bert.embeddings.word_embeddings.bias": torch.zeros(32)},
}
