"""The options of ONNX Runtime's CUDA provider, with its own defaults. Imports nothing heavy.

    >>> CudaOptions(gpu_mem_limit=2 << 30, cudnn_conv_algo_search="HEURISTIC")
    CudaOptions(device_id=0, …)

The names are those that the parser of onnxruntime-gpu 1.31 takes, which tests hold; what they mean
and their defaults are from onnxruntime.ai/docs/execution-providers/CUDA-ExecutionProvider.html and
`cuda_provider_options.h`. No GPU has been given them by this project yet.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from enginery.runtime.providers.option_fields import MAX_SIZE, address, number, size


@dataclass(frozen=True)
class CudaOptions:
    """Options of CUDAExecutionProvider. A session is given those that differ from the defaults."""

    device_id: int = number(0, least=0)
    """Which of the visible GPUs, from 0."""
    gpu_mem_limit: int = size(MAX_SIZE, least=1)
    """The most that the arena takes of the GPU's memory, in bytes; cuDNN and CUDA come on top."""
    arena_extend_strategy: Literal["kNextPowerOfTwo", "kSameAsRequested"] = "kNextPowerOfTwo"
    """By how much the arena grows: powers of two, or what is asked for."""
    cudnn_conv_algo_search: Literal["EXHAUSTIVE", "HEURISTIC", "DEFAULT"] = "EXHAUSTIVE"
    """How cuDNN's algorithm for a convolution is found.

    EXHAUSTIVE tries all, anew for each new shape of the input: with dynamic shapes that makes a GPU
    slower than the CPU (onnxruntime issue 13198). HEURISTIC asks cuDNN; DEFAULT takes one
    algorithm, and was seen far slower (onnxruntime pull request 22705).
    """
    cudnn_conv_use_max_workspace: bool = True
    """Let cuDNN take the workspace that it wants, up to gigabytes; else 32 MiB."""
    cudnn_conv1d_pad_to_nc1d: bool = False
    """Pad a convolution over one dim to [N, C, 1, D] in place of [N, C, D, 1]."""
    do_copy_in_default_stream: bool = True
    """Copy on the stream that computes; off may race (onnxruntime issue 4829)."""
    enable_cuda_graph: bool = False
    """Capture a run as a CUDA graph and replay it; needs bound inputs and outputs."""
    enable_skip_layer_norm_strict_mode: bool = False
    """Sum SkipLayerNormalization in float32: more exact, slower."""
    enable_cudnn: bool = True
    """Use cuDNN where an operation can do without. Named by the parser; its default is assumed."""
    fuse_conv_bias: bool = False
    """Fuse a convolution with its bias through cuDNN's graph API, compiled when it first runs."""
    prefer_nhwc: bool = False
    """Lay images out as NHWC, as tensor cores want them."""
    sdpa_kernel: int = number(0, least=0)
    """Which attention kernels may be taken, as a sum of bits; 0 lets ONNX Runtime choose."""
    tunable_op_enable: bool = False
    """Use TunableOp's kernels."""
    tunable_op_tuning_enable: bool = False
    """Tune them while running."""
    tunable_op_max_tuning_duration_ms: int = number(0, least=0)
    """The most time for tuning one operation, in milliseconds; 0 for no limit."""
    use_ep_level_unified_stream: bool = False
    """One stream for all threads that run the session."""
    use_tf32: bool = True
    """Multiply float32 in TensorFloat-32 on Ampere and newer: 10 bits of mantissa, not 23."""
    has_user_compute_stream: bool = False
    """A stream of the caller's is given."""
    user_compute_stream: int = address()
    """The address of a cudaStream_t of the caller's."""
    gpu_external_alloc: int = address()
    """The address of a function that allocates, in place of the arena."""
    gpu_external_free: int = address()
    """The address of the function that frees."""
    gpu_external_empty_cache: int = address()
    """The address of the function that empties the allocator's cache."""
