"""The options of each stage and of generation as keyword arguments, for type checkers and editors.

`make schema` writes this module from the options, and a test holds them equal. Nothing imports it
at run time.
"""

from typing import Any, Literal, TypedDict


class ExportKeywords(TypedDict, total=False):
    """The options of `export_model`, see `ExportConfig`."""

    task: str
    """The task, as Optimum or transformers' pipelines name it: text-classification, ner, … `auto`
    infers it as Optimum does."""
    revision: str
    """The Hub revision: a branch, a tag or a commit."""
    opset: int | Literal["auto"]
    """The ONNX operator set: 7 to 23. `auto` is 20, and for an .onnx file its own; a later one
    converts the file."""
    dtype: Literal["fp32", "fp16", "bf16"]
    """The type in which the model's weights are loaded and exported."""
    exporter: Literal["auto", "optimum", "transformers", "dynamo"]
    """`optimum` needs transformers 4.57, `transformers` is the exporter of transformers 5, and
    `dynamo` is torch's own. `auto` is Optimum where it is installed and has the model's type, and
    else the first of the others that writes a graph equal to the model."""
    device: str
    """The device on which PyTorch traces the model: cpu, cuda or cuda:N."""
    trust_remote_code: bool
    """Run Python code that comes with the model. Only use it for authors you trust."""
    allow_pickle: bool
    """Load pickled weights, with PyTorch's restricted unpickler."""
    allow_unused: bool
    """Export a model without tensors of its checkpoint that no weight takes: adapters, layers that
    config.json does not have. Without it they are an error."""
    cache_dir: str
    """The directory for Hub downloads; empty for the default cache of the Hub library."""
    python: str
    """The interpreter of another environment that exports the model, such as
    ~/transformers5/bin/python; empty for the variable `ENGINERY_EXPORT_PYTHON`, or this one."""
    layout: Literal["enginery", "optimum"]
    """The graphs of a model with a cache. `enginery`: one decoder, for the last position's logits,
    and an encoder that also computes the cross-attention's keys and values. `optimum`: Optimum's
    graphs, for its ORTModel classes."""
    model_kwargs: dict[str, str]
    """What Optimum needs beside the model, as JSON: `{"vocoder": "org/name"}` names the vocoder of
    SpeechT5, like the model itself."""
    dims: tuple[str, ...] | list[str]
    """The dims of an .onnx file's input, such as `x=batch,3,height,width`: a name or a number for
    each axis. A number fixes a dynamic dim. Repeat it for other inputs."""
    resize: str
    """The size of images for an .onnx file, such as `320` or `480x640` (height × width); empty for
    the graph's own size, and if that is dynamic for each image's own."""
    rescale: str
    """The factor that pixels from 0 to 255 are multiplied with for an .onnx file: `1/255`, which
    is the default, or `1`."""
    mean: str
    """What is subtracted from rescaled pixels for an .onnx file: a number, or one for each channel,
    such as `0.485,0.456,0.406`. The default is 0."""
    std: str
    """What pixels without the mean are divided by, like `mean`. The default is 1."""
    channel_order: Literal["auto", "rgb", "bgr", "gray"]
    """The channels of images for an .onnx file. `auto` is rgb, and gray for one channel."""


class OptimizeKeywords(TypedDict, total=False):
    """The options of `optimize_model`, see `OptimizeConfig`."""

    target: Literal["cuda", "tensorrt", "cpu"]
    """What will run the graph. `tensorrt` gets standard ops only; `cuda` and `cpu` get ONNX
    Runtime's fused ops, which TensorRT cannot parse."""
    precision: Literal["auto", "fp32", "fp16", "bf16"]
    """The type of weights and activations; `auto` is FP32 for the target cpu, else FP16. TensorRT
    follows the types in the graph."""
    io_dtype: Literal["fp32", "same"]
    """The type of float inputs and outputs: `fp32`, or `same` for that of `precision`."""
    level: Literal["O1", "O2", "O3", "O4"] | None
    """The level of fusions, named as Optimum's, for cuda and cpu; O2 by default. O1: basic
    optimizations such as constant folding. O2: also fused attention, LayerNorm and GELU. O3: also
    the tanh approximation of GELU. O4: O3 in FP16."""
    data: str
    """Real inputs to measure ranges on: a CSV, TSV, JSONL, Parquet or text file, a folder of
    images, or arrays of the graph's own inputs, `.npz`, `.npy` or a folder of `.npz` files. Empty:
    built-in sentences or images, or generated numbers."""
    column: str
    """The column of `data` that holds the text."""
    rows: int
    """The number of rows read from `data`, evenly spread over the file or folder."""
    keep_fp32: tuple[str, ...] | list[str]
    """Names of nodes that stay FP32, besides those whose ranges require it."""
    max_error: float | Literal["by-precision"]
    """The largest error of an output against FP32, relative to its largest magnitude.
    `by-precision`: 16 unit roundoffs, 0.78 % for FP16."""
    max_rounds: int
    """How many times the check may keep more nodes in FP32 before the stage fails."""
    allow_failed: bool
    """Accept an artifact whose validation failed."""


class QuantizeKeywords(TypedDict, total=False):
    """The options of `quantize_model`, see `QuantizeConfig`."""

    column: str
    """Column of `data` with the texts."""
    label_column: str
    """Column with the correct labels, for `accuracy_budget`."""
    label_values: Literal["auto", "names", "indices"]
    """What the labels are: `names` of the model's classes, or `indices`. `auto` reads the whole
    column in one of the two ways; that both are possible is an error."""
    rows: int
    """Number of rows to read, evenly spread over the file. A quarter of them is held out to measure
    the accuracy: at most 128 rows, or 1024 with `accuracy_budget`."""
    held_out: str
    """Other rows to measure the accuracy on, in a file like `data`, whose rows all calibrate then.
    At most 128 are read, or 1024 with `accuracy_budget`, evenly spread over the file."""
    method: Literal["percentile", "minmax", "moving-average", "entropy", "mse"]
    """Method that derives the range of an activation from its histogram."""
    percentile: float
    """Percentage of values inside the range, for the method `percentile`."""
    smoothing: float | Literal["search", "none"]
    """SmoothQuant's migration strength, 0 to 1: how much of the activations' outliers moves into
    the weights. `search` chooses for each activation the strength with the smallest error in the
    outputs of its layers."""
    shift: bool
    """Center the channels of an activation where that reduces the error. The bias compensates."""
    bias_correction: bool
    """Correct each bias by the mean error of its output channel."""
    residual: Literal["auto", "fp16", "fp32"]
    """Precision of everything that is not quantized. `auto` is fp16 for TensorRT and fp32 for the
    CPU."""
    min_cosine: float
    """Minimum mean cosine between the outputs and the FP32 model's. If it is not met, the most
    harmful layers stay in floating point."""
    accuracy_budget: str
    """Accuracy that may be lost, such as `0.5%`; replaces `min_cosine`. Of a classifier, the share
    of correct labels with `label_column`, otherwise of answers equal to FP32's; of a detector, the
    F1 of its boxes to FP32's."""
    curve: bool
    """Measure accuracy against the quantized share for the report, even if every layer can be
    quantized."""
    exclude: tuple[str, ...] | list[str]
    """Layers not to quantize: node names, or patterns such as `*/layer.0/*`."""
    ranges: str
    """Ranges to reuse: `reports/ranges.json` from an earlier run, or its artifact. Nothing is
    calibrated then, and the accuracy is measured only on built-in inputs."""
    scheme: Literal["auto", "int8", "fp8", "dynamic"]
    """`int8` and `fp8` (E4M3, for compute capabilities 8.9, 12.0 and later) use static ranges.
    `dynamic` is INT8 with activation scales computed at run time, for the target cpu; it needs no
    calibration, and is less accurate. `auto` is `int8`, or `dynamic` for the target cpu if that
    meets the budget and is faster on this machine."""
    target: Literal["tensorrt", "cuda", "cpu"]
    """Runtime that the graph is made for. `cpu` is ONNX Runtime's CPU provider, without a trial
    engine. `cuda` is refused: ONNX Runtime has no INT8 matrix products there."""
    per_channel: bool
    """One scale for each output channel of a weight instead of one for the whole weight."""
    capability: tuple[str, ...] | list[str]
    """Compute capabilities that a trial engine is built for before anything is saved, such as
    `8.0,8.9`. With `none`, no engine is built, and the report says so."""
    profile: tuple[str, ...] | list[str]
    """Shape profiles of the trial engine, such as `batch=1:8:32,sequence=8:128:512`. If empty,
    batches of 1 to 32 and sequences up to the model's limit."""
    allow_random: bool
    """Calibrate on random inputs if no data are given. For trying things out, not for use."""
    allow_failed: bool
    """Accept an artifact whose validation failed."""
    seed: int
    """Random seed for the sample of rows that errors are measured on."""


class BuildKeywords(TypedDict, total=False):
    """The options of `build_engine`, see `BuildConfig`."""

    workspace_bytes: int
    """Device memory that a layer may use besides its tensors, in bytes. The plan depends on it, so
    the default does not depend on the GPU. TensorRT's default without a GPU, 64 GiB, is more than
    its GPUs have."""
    optimization_level: int
    """0 to 5: how thoroughly TensorRT searches. 0 uses the first kernel that works."""
    hardware_compatibility: Literal["none", "ampere-plus", "same-compute-capability"]
    """Other GPUs that the engine runs on; slower. `none`: the same GPU model. `ampere-plus`:
    compute capability 8.0 and newer. `same-compute-capability`: the same compute capability."""
    tf32: bool
    """Compute FP32 matrix products and convolutions on tensor cores, with mantissas of 10 instead
    of 23 bits; sums are FP32."""
    flavor: Literal["tensorrt-rtx", "tensorrt"]
    """TensorRT library. `tensorrt-rtx` builds ahead of time, without a GPU. `tensorrt`, version 10,
    builds on the GPU that runs the engine, and only for that one."""
    capability: str
    """Target GPUs of the engine: compute capabilities such as `8.0,8.9,12.0`; `current`, this
    machine's GPU; or `portable`, every GPU from Ampere (8.0) on."""
    profile: tuple[str, ...] | list[str]
    """Shape profile: min:opt:max of each dynamic dim, such as `batch=1:8:32,sequence=8:128:512`. A
    single number is a fixed size. Can be repeated. In a model with several graphs, a profile
    applies to those whose dims it names."""
    min_shapes: str
    """Minimum shapes in TensorRT's notation, such as `input_ids:1x8,attention_mask:1x8`; replaces
    `profile`. Repeat the inputs to start another profile."""
    opt_shapes: str
    """Optimum shapes, which the engine is tuned for, in TensorRT's notation."""
    max_shapes: str
    """Maximum shapes in TensorRT's notation."""
    data: str
    """CSV, TSV, JSONL, Parquet or text file whose token lengths give the profiles with the least
    padding; replaces `profile`."""
    column: str
    """Column of `data` with the texts."""
    count: int
    """Maximum number of profiles from `data`."""
    batch: str
    """Batch sizes min:opt:max of the profiles from `data`."""
    engine_per_profile: bool
    """Build one engine for each profile, each with its own weights, because ONNX Runtime uses only
    the first profile of an engine. Otherwise one engine holds all profiles, for other runtimes."""
    allow_partitions: bool
    """Continue if TensorRT does not support some graphs of a model. These get no engine: ONNX
    Runtime partitions them when it loads their ONNX files, and builds engines then."""
    allow_failed: bool
    """Accept an artifact whose validation failed."""


class ValidateKeywords(TypedDict, total=False):
    """The options of `validate_model`, see `ValidateConfig`."""

    providers: str
    """Execution providers in order of preference, such as tensorrt,cuda,cpu; or a YAML or JSON
    file of them. If empty, the environment variable `ENGINERY_PROVIDERS`, or cpu."""
    provider_option: tuple[str, ...] | list[str]
    """Option of a provider, such as `cuda.gpu_mem_limit=2GiB`. Can be repeated."""
    allow_fallback: bool
    """Use the next provider if the first is not available, and report it."""
    profile: tuple[str, ...] | list[str]
    """Shape profile, such as `batch=1:8:32,sequence=8:128:512`; all its corners are compared.
    Can be repeated."""
    data: str
    """Real inputs: a CSV, TSV, JSONL, Parquet or text file, a folder of images, or
    arrays of the graph's own inputs, `.npz`, `.npy` or a folder of `.npz` files. If empty, built-in
    sentences or images."""
    column: str
    """Column of `data` with the texts."""
    label_column: str
    """Column of `data` with the correct labels of a text classifier: report the accuracy of the
    reference and of the artifact. It does not decide the verdict."""
    label_values: Literal["auto", "names", "indices"]
    """What the labels are: `names` of the model's classes, or `indices`. `auto` reads the whole
    column in one of the two ways; that both are possible is an error."""
    rows: int
    """Number of rows to read from `data`, evenly spread over the file."""
    reference: str
    """Model to compare with: one in PyTorch, or an .onnx file. If empty, the artifact's own source,
    which is the .onnx file itself for an imported one."""
    max_abs_error: float | Literal["noise-floor"]
    """Largest absolute error of an output. `noise-floor` derives it from the reference's own error
    at the artifact's precision on the same inputs; a quantized artifact has no such limit."""
    min_cosine: float | Literal["by-precision"]
    """Smallest cosine between an output and the reference. `by-precision` derives it from the
    artifact's precision, or from the budget of a quantized artifact."""
    effort: Literal["quick", "normal", "thorough"]
    """How many batch sizes and lengths to run: `quick`, `normal` or `thorough`, which runs every
    length."""
    python: str
    """The interpreter of another environment that runs the model in PyTorch, such as
    ~/transformers5/bin/python; empty for the variable `ENGINERY_EXPORT_PYTHON`, or this one."""
    seed: int
    """Random seed for the inputs of the shape sweep."""
    trust_remote_code: bool
    """Run Python code that comes with the model. Only for authors you trust."""
    allow_pickle: bool
    """Load pickled weights. Only for authors you trust."""


class BenchKeywords(TypedDict, total=False):
    """The options of `bench_model`, see `BenchConfig`."""

    providers: str
    """Execution providers in order of preference: tensorrt,cuda,cpu; or a YAML or JSON file of
    them. Empty: those of the variable `ENGINERY_PROVIDERS`, or cpu."""
    provider_option: tuple[str, ...] | list[str]
    """Provider option, such as `cuda.gpu_mem_limit=2GiB`. Repeat it for several."""
    allow_fallback: bool
    """If the first provider is not available, use the next one and report the reason."""
    io_binding: bool
    """Keep inputs and outputs in GPU buffers, on NVIDIA's providers."""
    cuda_graph: bool
    """Capture a CUDA graph for each shape and replay it."""
    shrink_arena: bool
    """Return memory beyond the arena's first region to the system after each run. Each run then
    allocates again."""
    against: str
    """Backends to compare with: onnxruntime, optimum, pytorch, pytorch-compile, pytorch-fp16,
    enginery-cpu, or none. `auto`: all that can run here; the report gives the reason for the
    others. A backend that you name and that cannot run is an error."""
    batch: str
    """Batch sizes."""
    sequence: str
    """Sequence lengths. `auto`: 16,128,512 up to the model's maximum length, if the graph has the
    dim sequence."""
    shape: tuple[str, ...] | list[str]
    """Sizes of other dims, such as batch=1,height=64. Repeat it for several shapes. Missing dims
    are taken from `batch` and `sequence`."""
    graph: str
    """Graph to measure, for an artifact with several. Empty: the first."""
    images: str
    """Folder of images. Each is run by itself at its own size, instead of generated inputs."""
    multiple: int
    """Scale images to the nearest multiple of this size if height and width are dynamic, as
    convolutional detectors require."""
    data: str
    """File of texts: report how much padding their lengths cause at each batch size."""
    column: str
    """Column of `data` with the text."""
    label_column: str
    """Column of `data` with the correct labels of a text classifier: report the accuracy of each
    artifact beside its latency."""
    label_values: Literal["auto", "names", "indices"]
    """What the labels are: `names` of the model's classes, or `indices`. `auto` reads the whole
    column in one of the two ways; that both are possible is an error."""
    rows: int
    """Number of rows of `data`, or of images, to read, evenly spread."""
    threads: int
    """Intra-op threads of each backend. 0: the backend's default."""
    confidence: float
    """Confidence level of the intervals of medians and ratios."""
    precision: float
    """Stop when the interval of each median is within this share of the median."""
    smallest_difference: float
    """Ratios closer to 1 than this count as no difference. One program in two processes differs by
    about as much."""
    min_rounds: int
    """Minimum number of rounds at each shape, unless `max_seconds` runs out. The rounds that an
    interval needs, 6 at a confidence of 0.95, are always run."""
    max_rounds: int
    """Maximum number of rounds at each shape."""
    max_seconds: float
    """Time limit for the rounds of one shape, for all backends together. The rounds that an
    interval needs are still run, except by a backend that has used five times this limit."""
    warm_up_seconds: float
    """Time limit for the warm-up of a backend at a shape."""
    seed: int
    """Seed of the generated inputs."""
    allow_failed: bool
    """Accept an artifact whose validation failed."""
    trust_remote_code: bool
    """Run Python code that comes with the model, in PyTorch. Only for authors you trust."""
    allow_pickle: bool
    """Load pickled weights into PyTorch. Only for authors you trust."""


class PredictKeywords(TypedDict, total=False):
    """The options of `predict_file`, see `PredictConfig`."""

    column: str
    """Column with the text, or with the path of the image for an image model."""
    pair_column: str
    """Column with the second text, for models that classify pairs of texts."""
    question_column: str
    """Column with the question, for question answering."""
    context_column: str
    """Column with the text that contains the answer, for question answering."""
    format: Literal["auto", "csv", "tsv", "jsonl", "parquet", "text", "images", "audio"]
    """Format of the input; `auto` takes it from the suffix. Standard input has none, so set it."""
    delimiter: str
    """Character between the fields of a CSV file; `auto` is a comma for CSV and a tab for TSV."""
    encoding: str
    """Encoding of CSV, TSV, JSONL and text input. A row with other bytes is a bad row."""
    prefix: str
    """Prefix of the names of the prediction's columns. Empty: a column gets the prefix
    `predicted_` if the input already has one of its name, as labelled data have `label`."""
    top_k: int
    """Number of labels, answers or fillings per row, best first; 0 for all labels. Above 1, labels
    and answers are also written as a list."""
    activation: Literal["auto", "softmax", "sigmoid", "none"]
    """Function that turns a classifier's logits into scores; `auto` chooses like transformers'
    pipeline."""
    aggregation: Literal["none", "simple", "first", "average", "max"]
    """Strategy that merges tokens into spans, as in transformers' pipeline."""
    candidate_labels: tuple[str, ...] | list[str]
    """Labels to choose from, for a model of natural language inference, or of texts and images such
    as CLIP: `sport,politics`. Repeat it for labels with commas."""
    hypothesis_template: str
    """What is said of an input with a label, in place of `{}`, for `candidate_labels`. Empty for
    "This example is {}." of texts, and "This is a photo of {}." of images."""
    multi_label: bool
    """Judge each of `candidate_labels` by itself: several may be right."""
    threshold: float
    """Score above which the objects or segments of an image are written, 0 to 1; -1 for that of
    transformers' pipelines, 0.5 of objects and 0.9 of segments."""
    subtask: Literal["auto", "panoptic", "semantic"]
    """Kind of segmentation: `semantic` joins the objects of a panoptic model by label; `auto` is
    panoptic where the model can."""
    dimensions: int
    """Number of leading dimensions of an embedding to keep, for models trained with Matryoshka
    representation learning; 0 for all."""
    vectors: Literal["dense", "tokens", "sparse"]
    """Vectors of a model that embeds: one for each text, or `tokens`, one for each token; `sparse`,
    the weights of a SPLADE model for fill-mask."""
    dtype: Literal["float32", "float16", "int8", "binary", "ubinary"]
    """Type of the numbers of dense vectors: float16; int8 of vectors of length 1, times 127; or a
    bit for each dimension, packed into int8 (`binary`) or uint8 (`ubinary`)."""
    prompt_name: str
    """A prompt of config_sentence_transformers.json; empty for the model's default."""
    max_answer_tokens: int
    """Maximum number of tokens of an answer in question answering, 1 to 512."""
    allow_no_answer: bool
    """Allow "no answer" as a result of question answering, as an empty text."""
    return_timestamps: Literal["", "char", "word"]
    """Add the column `chunks` to transcriptions of CTC models, with the time of each letter or
    word."""
    chunk_length_s: float
    """Seconds of the chunks that audio is cut into before a CTC model transcribes it, which bounds
    the memory of long recordings; 0 for none."""
    generation: tuple[str, ...] | list[str]
    """An option of generation, `max_new_tokens=64`, `num_beams=4` or `target_language=fr`; repeat
    it for several. The model's generation_config.json has the others."""
    providers: str
    """Execution providers in order of preference: tensorrt,cuda,cpu; or a YAML or JSON file of
    them. Empty for the variable `ENGINERY_PROVIDERS`, or cpu if it is not set."""
    provider_option: tuple[str, ...] | list[str]
    """An option of a provider, `cuda.gpu_mem_limit=2GiB`; repeat it for several."""
    allow_fallback: bool
    """Use the next provider, with a message, if the first one is not available."""
    io_binding: bool
    """Keep inputs and outputs in GPU buffers, on NVIDIA's providers."""
    cuda_graph: bool
    """Record the run of each shape as a CUDA graph and replay it."""
    ladder: bool
    """On CUDA, round batches and lengths up to a few sizes and record a CUDA graph for each."""
    shrink_arena: bool
    """Return memory beyond the arena's first chunk after each run; each run allocates it again."""
    allow_failed: bool
    """Accept an artifact whose validation failed."""
    optimized_graph: bool
    """Keep ONNX Runtime's optimized graph for this processor in the store: the next run starts
    faster and needs less memory."""
    unproved: Literal["warn", "refuse"]
    """A text that is longer than any that validate has compared with PyTorch: predict it, and say
    so once in the log; or count it as a bad row."""
    workers: int
    """Number of batches that run at the same time, on the CPU one thread each; 0 for one per core.
    On a GPU one batch runs at a time."""
    window: int
    """Number of rows that are sorted by length before they are cut into batches. 0 for 2048 texts,
    or two full batches of inputs that take longer: images, audio and prompts."""
    batch_tokens: int
    """Maximum number of padded tokens per batch; a single text may have more. 0 for 512 on the CPU
    and 8192 on a GPU."""
    batch_rows: int
    """Maximum number of rows per batch. 0 for 64, or 256 for texts on a GPU."""
    part_rows: int
    """Number of rows per part of the output; a killed run repeats at most two parts. 0 for 4096 on
    the CPU and 65,536 on a GPU."""
    part_seconds: float
    """Time after which a part with fewer rows is finished, in seconds."""
    fail_fast: bool
    """Stop at the first bad row."""


class PublishKeywords(TypedDict, total=False):
    """The options of `publish_model`, see `PublishConfig`."""

    name: str
    """Name of the model in a folder; empty for its source's name. Other addresses contain the
    name."""
    version: str
    """Version to create, `1.2.0`; empty for the registry's next one, in a folder 1, 2, 3, …"""
    alias: str
    """Alias to move to the version, `production`: `NAME@production` pulls it. It cannot be the
    name of a version, and a folder has no aliases."""
    allow_failed: bool
    """Publish an artifact whose validation is missing or failed; the card says so."""
    layout: Literal["enginery", "hub"]
    """Where the graphs are. `enginery`: in the root, as in the artifact. `hub`: in `onnx/`, several
    artifacts of a model side by side, as transformers.js and sentence-transformers expect."""
    license: str
    """Licence of the model, `apache-2.0`; empty for the one on the source's card."""
    base_model: str
    """Hub id of the model that this one was made from; empty for the source's id."""
    private: bool
    """Create a new Hub repository as private; an existing one is not changed."""
    insecure: bool
    """Use plain HTTP for an OCI registry."""


class TritonKeywords(TypedDict, total=False):
    """The options of `export_triton`, see `TritonConfig`."""

    name: str
    """Name of the model in Triton; empty for the name of its source."""
    backend: Literal["onnxruntime", "tensorrt"]
    """Triton backend of the graph: `tensorrt` loads the artifact's classic TensorRT engines without
    ONNX Runtime."""
    provider: Literal["auto", "cuda", "cpu", "tensorrt", "tensorrt-rtx"]
    """Execution provider of the ONNX Runtime backend; `auto` is tensorrt for static INT8 and FP8,
    cpu for what was made for it, else cuda. `tensorrt` uses the artifact's classic TensorRT engine;
    without one, the server builds it from the graph when it loads the model."""
    graph: str
    """ONNX file of the artifact; empty if there is only one."""
    engine: str
    """Directory of the engine that Triton must use; empty if there is only one for each compute
    capability."""
    engine_cache: str
    """Folder on the server for an engine that it builds, in an existing folder; empty to build at
    every load."""
    tokenizer: bool
    """For text tasks, add models for preprocessing and postprocessing in the Python backend, and an
    ensemble that takes texts and returns results."""
    profile: tuple[str, ...] | list[str]
    """Shapes for warm-up, for preferred batches and of an engine that the server builds, if the
    artifact's engine has no profiles: batch=1:8:32,sequence=8:64:128; repeat it for several."""
    max_batch_size: int
    """Maximum number of rows per batch; a profile may reduce it. Triton prefers the profiles'
    optima."""
    max_queue_delay_us: int
    """Time that a request waits for others to share its batch, in microseconds."""
    max_queue_size: int
    """Maximum number of requests that wait for the graph, further ones are rejected; 0 for no
    limit."""
    queue_timeout_us: int
    """Time after which a waiting request is rejected, in microseconds; 0 for no limit."""
    instances: int
    """Number of instances of the graph per GPU that run at the same time."""
    tokenizer_instances: int
    """Number of processes for preprocessing, and the same number for postprocessing."""
    threads: int
    """Intra-op threads of ONNX Runtime; 0 for its own choice."""
    pad_multiple: int
    """Texts are padded to a multiple of this number of tokens, because Triton batches only requests
    of equal shapes."""
    execution_env: str
    """Path on the server of a conda-pack archive or an environment with enginery; empty if enginery
    is installed in the Python backend's Python."""
    allow_failed: bool
    """Accept an artifact whose validation failed."""


class KserveKeywords(TypedDict, total=False):
    """The options of `export_kserve`, see `KserveConfig`."""

    storage_uri: str
    """Address of the model for the cluster: pvc://, s3://, gs://, hf://, oci://, https://. For
    enginery it is the artifact, for Triton the repository of export-triton."""
    runtime: Literal["enginery", "triton"]
    """Server: `enginery` is a container with `enginery serve`, `triton` is KServe's Triton
    runtime."""
    name: str
    """Name of the InferenceService, at most 53 characters, with Knative 47; empty for the name of
    the model's source."""
    model_name: str
    """Name of the model in requests to enginery; empty for the name of its source. In Triton it has
    the name from export-triton."""
    image: str
    """Container image, required for enginery, see docs/deploy. For Triton, empty for KServe's
    image, which lacks enginery for the ensemble's Python models."""
    provider: Literal["auto", "cuda", "cpu", "tensorrt", "tensorrt-rtx"]
    """Execution provider; `auto` is tensorrt for static INT8 and FP8, or tensorrt-rtx if only
    that flavor has an engine in the artifact, cpu for what was made for it, else cuda. With cpu no
    GPU is requested. The runtime enginery needs an engine in the artifact for tensorrt and
    tensorrt-rtx; Triton has no tensorrt-rtx."""
    gpus: int
    """GPUs per replica; not used with provider cpu."""
    cpu: str
    """Requested CPU cores per replica, 2 or 500m; they are not limited."""
    memory: str
    """Memory per replica, 4Gi; `auto` is 1 GiB plus three times the size of the model's files."""
    min_replicas: int
    """Minimum number of replicas; 0 lets Knative stop the last one."""
    max_replicas: int
    """Maximum number of replicas."""
    service_account: str
    """Service account with the secrets to download the model; empty for the namespace's default."""
    allow_failed: bool
    """Accept an artifact whose validation failed."""


class GenerationKeywords(TypedDict, total=False):
    """The options of `Model.generate`, see `GenerationOptions`."""

    max_new_tokens: int | None
    """Largest number of tokens to generate; null for `max_length`."""
    max_length: int | None
    """Largest number of tokens with the decoder's prompt; null for 20 new ones."""
    min_new_tokens: int | None
    """Number of tokens before which generation does not end."""
    min_length: int
    """The same, with the decoder's prompt."""
    stop_strings: str | tuple[str, ...] | list[str]
    """Texts at whose end generation ends."""
    do_sample: bool
    """Draw tokens by their probabilities, in place of the most probable ones."""
    seed: int | None
    """Seed of the draws; null for another one each time."""
    temperature: float
    """Divides the logits before a draw."""
    top_k: int
    """Draw from this many most probable tokens; 0 for all."""
    top_p: float
    """Draw from the most probable tokens whose probabilities reach this sum."""
    num_beams: int
    """Number of sequences that beam search keeps; 1 for no beam search."""
    num_return_sequences: int
    """Number of results of each input."""
    length_penalty: float
    """Exponent of the length that a beam's score is divided by."""
    early_stopping: bool | Literal["never"]
    """When beam search ends: with enough finished beams (true), when none is likely to improve
    (false), or when none can (`never`)."""
    repetition_penalty: float
    """Divides positive logits of tokens that occurred, and multiplies negative ones."""
    frequency_penalty: float
    """Subtracted from a token's logit for each time that it was generated, as OpenAI defines it."""
    presence_penalty: float
    """Subtracted once from the logit of each token that was generated, as OpenAI defines it."""
    logit_bias: dict[int, float]
    """What is added to the logits of tokens, by their ids."""
    top_logprobs: int | None
    """Return the log-probability of each token, and those of this many most probable tokens; null
    for none."""
    json_schema: dict[str, Any] | None
    """The text is JSON of this schema (json-schema.org), and nothing else; null for any text."""
    renormalize_logits: bool
    """Take the log-softmax of the scores after all other changes, which changes the scores of beams
    whose tokens were banned."""
    no_repeat_ngram_size: int
    """No sequence of this many tokens occurs twice; 0 for no such limit."""
    bad_words_ids: tuple[tuple[int, ...] | list[int], ...] | list[tuple[int, ...] | list[int]]
    """Sequences of tokens that are not generated."""
    suppress_tokens: int | tuple[int, ...] | list[int]
    """Tokens that are not generated."""
    begin_suppress_tokens: int | tuple[int, ...] | list[int]
    """Tokens that are not generated first."""
    forced_bos_token_id: int | None
    """The token after the decoder's start token, such as a language."""
    forced_eos_token_id: int | tuple[int, ...] | list[int]
    """The token at the largest length."""
    eos_token_id: int | tuple[int, ...] | list[int]
    """Tokens that end a sequence."""
    pad_token_id: int | None
    bos_token_id: int | None
    decoder_start_token_id: int | None
    """The first token of an encoder-decoder's decoder."""
    source_language: str
    """Language of the texts, for translation models."""
    target_language: str
    """Language to translate to."""
    prompt: str
    """Beginning of a text about an image; or what was said before the speech."""
    language: str
    """Language of the speech."""
    task: Literal["transcribe", "translate"]
    """What is done with speech."""
    return_timestamps: bool
    """Return the time of each segment of speech."""
    chunk_length_s: float
    """Seconds of the chunks that speech is cut into; 0 for none."""
    stride_length_s: float | tuple[float, ...] | list[float]
    """Seconds of a chunk that overlap with the one before, and with the next one."""
