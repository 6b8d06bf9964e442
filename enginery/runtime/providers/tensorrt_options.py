"""The options of ONNX Runtime's TensorRT provider, with its defaults. Imports nothing heavy.

    >>> TensorrtOptions(trt_engine_cache_enable=True, trt_engine_cache_path="cache")
    TensorrtOptions(device_id=0, …)

The names are those that the parser of onnxruntime-gpu 1.31 takes, which tests hold; what they mean
and their defaults are from onnxruntime.ai/docs/execution-providers/TensorRT-ExecutionProvider.html.
No GPU has been given them by this project yet. Those that cache an artifact's engines by content
are made by `engine.provider_options`; an engine of `enginery build` needs none.
"""

from __future__ import annotations

from dataclasses import dataclass

from enginery.runtime.providers.option_fields import address, number, size


@dataclass(frozen=True)
class TensorrtOptions:
    """Options of TensorrtExecutionProvider."""

    device_id: int = number(0, least=0)
    """Which of the visible GPUs, from 0."""
    trt_max_workspace_size: int = size(0)
    """The most memory for an engine's workspace, in bytes; 0 for the GPU's."""
    trt_max_partition_iterations: int = number(1000, least=1)
    """How often the partition of the graph is tried before other providers take all of it."""
    trt_min_subgraph_size: int = number(1, least=1)
    """Subgraphs of fewer nodes are left to other providers."""
    trt_fp16_enable: bool = False
    """Let TensorRT choose FP16 by itself; up to TensorRT 10, and not for a typed graph."""
    trt_bf16_enable: bool = False
    """Let TensorRT choose BF16 by itself; up to TensorRT 10."""
    trt_int8_enable: bool = False
    """Let TensorRT choose INT8 by itself; up to TensorRT 10."""
    trt_int8_calibration_table_name: str = ""
    """The file of calibrated ranges, for a graph without Q/DQ."""
    trt_int8_use_native_calibration_table: bool = False
    """The table is TensorRT's own, not ONNX Runtime's."""
    trt_dla_enable: bool = False
    """Use the deep learning accelerator, where there is one."""
    trt_dla_core: int = number(0, least=0)
    """Which of its cores."""
    trt_engine_cache_enable: bool = False
    """Keep engines. ONNX Runtime's key is the model's file name, not its weights."""
    trt_engine_cache_path: str = ""
    """The directory for engines; empty for the working directory."""
    trt_engine_cache_prefix: str = ""
    """What an engine's file name starts with."""
    trt_timing_cache_enable: bool = False
    """Keep what kernels were measured to take, so that the next build measures less."""
    trt_timing_cache_path: str = ""
    """The directory for those times."""
    trt_force_timing_cache: bool = False
    """Take times that were measured on another GPU."""
    trt_dump_subgraphs: bool = False
    """Write each subgraph that becomes an engine as ONNX into the working directory."""
    trt_force_sequential_engine_build: bool = False
    """Build one engine at a time where several GPUs build."""
    trt_context_memory_sharing_enable: bool = False
    """Share the memory of execution contexts between subgraphs."""
    trt_layer_norm_fp32_fallback: bool = False
    """Keep Pow and ReduceMean of layer normalization in FP32."""
    trt_detailed_build_log: bool = False
    """Log each step of a build with its time."""
    trt_build_heuristics_enable: bool = False
    """Choose kernels by heuristics: a faster build."""
    trt_sparsity_enable: bool = False
    """Use sparse kernels where weights are sparse in the 2:4 pattern."""
    trt_builder_optimization_level: int = number(3, least=0, most=5)
    """0 to 5; below 3 builds are fast and engines slow."""
    trt_auxiliary_streams: int = number(-1, least=-1)
    """Streams beside the main one; -1 lets TensorRT choose, 0 takes the least memory."""
    trt_tactic_sources: str = ""
    """`-CUDNN,+CUBLAS`: where kernels may come from."""
    trt_extra_plugin_lib_paths: str = ""
    """Libraries of plugins, separated by `;`."""
    trt_profile_min_shapes: str = ""
    """Smallest shapes, `input_ids:1x8,attention_mask:1x8`; all three ends, or none."""
    trt_profile_opt_shapes: str = ""
    """The shapes to tune for, in the same notation."""
    trt_profile_max_shapes: str = ""
    """Largest shapes, in the same notation."""
    trt_cuda_graph_enable: bool = False
    """Capture a run as a CUDA graph and replay it."""
    trt_preview_features: str = ""
    """Preview features of the builder, separated by commas."""
    trt_op_types_to_exclude: str = ""
    """Op types that other providers are to run, separated by commas."""
    trt_dump_ep_context_model: bool = False
    """Leave the engine's ONNX wrapper."""
    trt_ep_context_file_path: str = ""
    """Where the wrapper goes."""
    trt_ep_context_embed_mode: int = number(0, least=0, most=1)
    """0 names the engine's file in the wrapper, 1 embeds it."""
    trt_weight_stripped_engine_enable: bool = False
    """Keep engines without weights, and refit them when they are loaded."""
    trt_onnx_model_folder_path: str = ""
    """Where the ONNX file with the weights is, for that."""
    trt_engine_hw_compatible: bool = False
    """Build engines that run on any GPU from Ampere on."""
    trt_engine_decryption_enable: bool = False
    """Engines in the cache are encrypted."""
    trt_engine_decryption_lib_path: str = ""
    """The library that decrypts them."""
    user_compute_stream: int = address()
    """The address of a cudaStream_t of the caller's."""
