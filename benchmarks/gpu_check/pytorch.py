"""PyTorch models on the same device, and synchronization with the GPU.

    model = load_text_model(path, "eager", "fp16", "cuda")
    answer(model, feeds, "cuda")["last_hidden_state"].shape  # (1, 128, 384)

TF32 is off, because FP32 is a reference here.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray

from enginery.core.errors import ProviderError

DTYPES = {
    "fp64": torch.float64,
    "fp32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
}
Feeds = Mapping[str, NDArray[Any]]


def require_device(device: str) -> None:
    """Raise ProviderError if torch does not find a GPU; turn TF32 off."""
    if device == "cuda" and not torch.cuda.is_available():
        raise ProviderError(
            f"the installed torch {torch.__version__} does not find a GPU.",
            do="Install a build of torch for this driver's CUDA.",
        )
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False


def load_text_model(path: Path, attention: str, precision: str, device: str) -> Any:
    """Load the encoder of a directory in evaluation mode.

    Args:
        path: a Hugging Face directory.
        attention: eager or sdpa.
        precision: fp64, fp32, fp16 or bf16.
        device: cpu or cuda.
    """
    # Loaded as it is stored and cast afterwards: the name of the option for it differs between
    # transformers 4 and 5.
    model = transformers.AutoModel.from_pretrained(path, attn_implementation=attention)
    return model.to(DTYPES[precision]).to(device).eval()


def tensors_of(feeds: Feeds, device: str) -> dict[str, torch.Tensor]:
    """Copy the feeds to the device."""
    return {name: torch.from_numpy(array).to(device) for name, array in feeds.items()}


def answer(model: Any, feeds: Feeds, device: str) -> dict[str, NDArray[Any]]:
    """Return outputs on the host, as float32 or wider because numpy has no bfloat16."""
    with torch.inference_mode():
        found = model(**tensors_of(feeds, device))
        return {name: _array(value) for name, value in found.items() if value is not None}


def wait(device: str) -> None:
    """Wait until the GPU is done."""
    if device == "cuda":
        torch.cuda.synchronize()


def _array(value: torch.Tensor) -> NDArray[Any]:
    narrow = value.dtype in (torch.float16, torch.bfloat16)
    return np.asarray((value.float() if narrow else value).cpu().numpy())
