"""The options of each stage, and of the methods of `Model`, as keyword arguments of their types.

`make schema` writes this module from the options, and a test holds them equal. Nothing imports it
at run time. What an option means is said where it is declared.
"""

from typing import Any, Literal, TypedDict


class ExportKeywords(TypedDict, total=False):
    """The options of `export_model`, see `ExportConfig`."""

    task: str
    revision: str
    opset: int | Literal["auto"]
    dtype: Literal["fp32", "fp16", "bf16"]
    exporter: Literal["auto", "optimum", "transformers", "dynamo"]
    device: str
    trust_remote_code: bool
    allow_pickle: bool
    allow_unused: bool
    cache_dir: str
    python: str
    layout: Literal["enginery", "optimum"]
    model_kwargs: dict[str, str]
    dims: tuple[str, ...] | list[str]
    resize: str
    rescale: str
    mean: str
    std: str
    channel_order: Literal["auto", "rgb", "bgr", "gray"]


class OptimizeKeywords(TypedDict, total=False):
    """The options of `optimize_model`, see `OptimizeConfig`."""

    target: Literal["cuda", "tensorrt", "cpu"]
    precision: Literal["auto", "fp32", "fp16", "bf16"]
    io_dtype: Literal["fp32", "same"]
    level: Literal["O1", "O2", "O3", "O4"] | None
    data: str
    column: str
    rows: int
    keep_fp32: tuple[str, ...] | list[str]
    max_error: float | Literal["by-precision"]
    max_rounds: int
    allow_failed: bool


class QuantizeKeywords(TypedDict, total=False):
    """The options of `quantize_model`, see `QuantizeConfig`."""

    column: str
    label_column: str
    label_values: Literal["auto", "names", "indices"]
    rows: int
    held_out: str
    method: Literal["percentile", "minmax", "entropy"]
    percentile: float
    smoothing: float | Literal["search", "none"]
    shift: bool
    bias_correction: bool
    residual: Literal["auto", "fp16", "fp32"]
    min_cosine: float
    accuracy_budget: str
    curve: bool
    exclude: tuple[str, ...] | list[str]
    scheme: Literal["int8", "fp8", "dynamic"]
    target: Literal["tensorrt", "cuda", "cpu"]
    per_channel: bool
    capability: tuple[str, ...] | list[str]
    profile: tuple[str, ...] | list[str]
    allow_random: bool
    allow_failed: bool
    seed: int


class BuildKeywords(TypedDict, total=False):
    """The options of `build_engine`, see `BuildConfig`."""

    workspace_bytes: int
    optimization_level: int
    hardware_compatibility: Literal["none", "ampere-plus", "same-compute-capability"]
    tf32: bool
    flavor: Literal["tensorrt-rtx", "tensorrt"]
    capability: str
    profile: tuple[str, ...] | list[str]
    min_shapes: str
    opt_shapes: str
    max_shapes: str
    data: str
    column: str
    count: int
    batch: str
    engine_per_profile: bool
    allow_partitions: bool
    allow_failed: bool


class ValidateKeywords(TypedDict, total=False):
    """The options of `validate_model`, see `ValidateConfig`."""

    providers: str
    provider_option: tuple[str, ...] | list[str]
    allow_fallback: bool
    profile: tuple[str, ...] | list[str]
    data: str
    column: str
    label_column: str
    label_values: Literal["auto", "names", "indices"]
    rows: int
    reference: str
    max_abs_error: float | Literal["noise-floor"]
    min_cosine: float | Literal["by-precision"]
    effort: Literal["quick", "normal", "thorough"]
    python: str
    seed: int
    trust_remote_code: bool
    allow_pickle: bool


class BenchKeywords(TypedDict, total=False):
    """The options of `bench_model`, see `BenchConfig`."""

    providers: str
    provider_option: tuple[str, ...] | list[str]
    allow_fallback: bool
    io_binding: bool
    cuda_graph: bool
    shrink_arena: bool
    against: str
    batch: str
    sequence: str
    shape: tuple[str, ...] | list[str]
    graph: str
    images: str
    multiple: int
    data: str
    column: str
    label_column: str
    label_values: Literal["auto", "names", "indices"]
    rows: int
    threads: int
    confidence: float
    precision: float
    smallest_difference: float
    min_rounds: int
    max_rounds: int
    max_seconds: float
    warm_up_seconds: float
    seed: int
    allow_failed: bool
    trust_remote_code: bool
    allow_pickle: bool


class PredictKeywords(TypedDict, total=False):
    """The options of `predict_file`, see `PredictConfig`."""

    column: str
    pair_column: str
    question_column: str
    context_column: str
    format: Literal["auto", "csv", "tsv", "jsonl", "parquet", "text", "images", "audio"]
    delimiter: str
    encoding: str
    prefix: str
    top_k: int
    activation: Literal["auto", "softmax", "sigmoid", "none"]
    aggregation: Literal["none", "simple", "first", "average", "max"]
    candidate_labels: tuple[str, ...] | list[str]
    hypothesis_template: str
    multi_label: bool
    threshold: float
    subtask: Literal["auto", "panoptic", "semantic"]
    dimensions: int
    vectors: Literal["dense", "tokens", "sparse"]
    dtype: Literal["float32", "float16", "int8", "binary", "ubinary"]
    prompt_name: str
    max_answer_tokens: int
    allow_no_answer: bool
    return_timestamps: Literal["", "char", "word"]
    chunk_length_s: float
    generation: tuple[str, ...] | list[str]
    providers: str
    provider_option: tuple[str, ...] | list[str]
    allow_fallback: bool
    io_binding: bool
    cuda_graph: bool
    ladder: bool
    shrink_arena: bool
    allow_failed: bool
    optimized_graph: bool
    unproved: Literal["warn", "refuse"]
    workers: int
    window: int
    batch_tokens: int
    batch_rows: int
    part_rows: int
    part_seconds: float
    fail_fast: bool


class PublishKeywords(TypedDict, total=False):
    """The options of `publish_model`, see `PublishConfig`."""

    name: str
    version: str
    alias: str
    allow_failed: bool
    layout: Literal["enginery", "hub"]
    license: str
    base_model: str
    private: bool
    insecure: bool


class TritonKeywords(TypedDict, total=False):
    """The options of `export_triton`, see `TritonConfig`."""

    name: str
    backend: Literal["onnxruntime", "tensorrt"]
    provider: Literal["auto", "cuda", "cpu", "tensorrt", "tensorrt-rtx"]
    graph: str
    engine: str
    engine_cache: str
    tokenizer: bool
    profile: tuple[str, ...] | list[str]
    max_batch_size: int
    max_queue_delay_us: int
    max_queue_size: int
    queue_timeout_us: int
    instances: int
    tokenizer_instances: int
    threads: int
    pad_multiple: int
    execution_env: str
    allow_failed: bool


class KserveKeywords(TypedDict, total=False):
    """The options of `export_kserve`, see `KserveConfig`."""

    storage_uri: str
    image: str
    name: str
    provider: Literal["auto", "cuda", "cpu", "tensorrt", "tensorrt-rtx"]
    gpus: int
    cpu: str
    memory: str
    replicas: int
    allow_failed: bool


class VectorKeywords(TypedDict, total=False):
    """See `VectorOptions`."""

    normalize: bool | None
    dimensions: int | None


class TextKeywords(TypedDict, total=False):
    """See `TextOptions`."""

    truncate: bool | None


class PromptKeywords(TextKeywords, total=False):
    """See `PromptOptions`."""

    prompt_name: str


class EmbedKeywords(PromptKeywords, VectorKeywords, total=False):
    """See `EmbedOptions`."""


class LabelKeywords(TypedDict, total=False):
    """See `LabelOptions`."""

    top_k: int
    activation: Literal["auto", "softmax", "sigmoid", "none"]


class ClassifyKeywords(TextKeywords, LabelKeywords, total=False):
    """See `ClassifyOptions`."""

    instruction: str
    candidate_labels: list[str] | None
    hypothesis_template: str
    multi_label: bool


class TagKeywords(TextKeywords, total=False):
    """See `TagOptions`."""

    aggregation: Literal["none", "simple", "first", "average", "max"]


class AnswerKeywords(TypedDict, total=False):
    """See `AnswerOptions`."""

    top_k: int
    max_tokens: int
    allow_none: bool


class FillKeywords(TextKeywords, total=False):
    """See `FillOptions`."""

    top_k: int


class DetectKeywords(TypedDict, total=False):
    """See `DetectOptions`."""

    threshold: float


class SegmentKeywords(TypedDict, total=False):
    """See `SegmentOptions`."""

    threshold: float
    mask_threshold: float
    overlap_mask_area_threshold: float
    subtask: Literal["auto", "panoptic", "semantic"]


class ZeroShotImageKeywords(TypedDict, total=False):
    """See `ZeroShotImageOptions`."""

    hypothesis_template: str
    top_k: int


class TranscribeKeywords(TypedDict, total=False):
    """See `TranscribeOptions`."""

    return_timestamps: Literal["char", "word"] | None
    chunk_length_s: float | None
    stride_length_s: float | None


class SparseKeywords(PromptKeywords, total=False):
    """See `SparseOptions`."""

    max_active_dims: int | None


class GenerationKeywords(TypedDict, total=False):
    """The options of `Model.generate`, see `GenerationOptions`."""

    max_new_tokens: int | None
    max_length: int | None
    min_new_tokens: int | None
    min_length: int
    stop_strings: str | tuple[str, ...] | list[str]
    do_sample: bool
    seed: int | None
    temperature: float
    top_k: int
    top_p: float
    num_beams: int
    num_return_sequences: int
    length_penalty: float
    early_stopping: bool | Literal["never"]
    repetition_penalty: float
    frequency_penalty: float
    presence_penalty: float
    logit_bias: dict[int, float]
    top_logprobs: int | None
    json_schema: dict[str, Any] | None
    renormalize_logits: bool
    no_repeat_ngram_size: int
    bad_words_ids: tuple[tuple[int, ...] | list[int], ...] | list[tuple[int, ...] | list[int]]
    suppress_tokens: int | tuple[int, ...] | list[int]
    begin_suppress_tokens: int | tuple[int, ...] | list[int]
    forced_bos_token_id: int | None
    forced_eos_token_id: int | tuple[int, ...] | list[int]
    eos_token_id: int | tuple[int, ...] | list[int]
    pad_token_id: int | None
    bos_token_id: int | None
    decoder_start_token_id: int | None
    source_language: str
    target_language: str
    prompt: str
    language: str
    task: Literal["transcribe", "translate"]
    return_timestamps: bool
    chunk_length_s: float
    stride_length_s: float | tuple[float, ...] | list[float]
