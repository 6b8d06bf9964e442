"""The options of the provider of TensorRT for RTX, with its own defaults. Imports nothing heavy.

    >>> TensorrtRtxOptions(nv_runtime_cache_path="cache", enable_cuda_graph=True)
    TensorrtRtxOptions(device_id=0, …)

From onnxruntime.ai/docs/execution-providers/TensorRTRTX-ExecutionProvider.html and
nvidia.github.io/TensorRT-RTX-EP-ABI. Nothing here has been given to the provider: its library needs
the driver to be loaded at all.
"""

from __future__ import annotations

from dataclasses import dataclass

from enginery.runtime.providers.option_fields import address, number, size


@dataclass(frozen=True)
class TensorrtRtxOptions:
    """Options of NvTensorRTRTXExecutionProvider."""

    device_id: int = number(0, least=0)
    """Which of the visible GPUs, from 0."""
    nv_max_workspace_size: int = size(0)
    """The most memory for an engine's workspace, in bytes; 0 lets TensorRT choose."""
    nv_max_shared_mem_size: int = size(0)
    """The most shared memory of a kernel, in bytes; 0 lets TensorRT choose."""
    nv_dump_subgraphs: bool = False
    """Write each subgraph that becomes an engine as ONNX into the working directory."""
    nv_detailed_build_log: bool = False
    """Log each step of a build."""
    enable_cuda_graph: bool = False
    """Capture a run as a CUDA graph and replay it."""
    nv_profile_min_shapes: str = ""
    """Smallest shapes, `input_ids:1x8,attention_mask:1x8`; an input again for each profile."""
    nv_profile_opt_shapes: str = ""
    """The shapes to tune for, in the same notation."""
    nv_profile_max_shapes: str = ""
    """Largest shapes, in the same notation."""
    nv_multi_profile_enable: bool = False
    """The shapes are of several profiles."""
    nv_use_external_data_initializer: bool = False
    """Hand weights over from where they lie, beside the graph."""
    nv_runtime_cache_path: str = ""
    """A directory for kernels that are compiled when an engine is loaded; empty for none."""
    has_user_compute_stream: bool = False
    """A stream of the caller's is given."""
    user_compute_stream: int = address()
    """The address of a cudaStream_t of the caller's."""
    user_aux_stream_array: int = address()
    """The address of an array of the caller's cudaStream_t, for auxiliary streams."""
