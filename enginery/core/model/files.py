"""The JSON files of a model, as types with the keys that are read of them.

>>> ModelConfig.read(artifact.path).model_type
'bert'

A key has a range of its own only if a value out of it would allocate more memory than any published
model needs, or give wrong results that nothing else notices.
"""

from __future__ import annotations

import math
import re
from pathlib import Path, PurePosixPath
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, ConfigDict, Field, model_validator
from typing_extensions import override

from enginery.core.errors import ArtifactError, EngineryError
from enginery.core.trust.bounds import (
    Count,
    Settings,
    SettingsFile,
    TokenId,
    conflict,
    expected,
    number,
    read_list,
)

MAX_IMAGE_EDGE = 2**13
"""Pixels of preprocessed images."""
_MAX_AUDIO_FRAME = 2**20
"""Samples of audio for eight frames; 2**12 in wav2vec2."""
_AUDIO_FRAMES = 8
MAX_FRAMES = 2**14
"""Frames of a spectrogram; 3000 in Whisper."""


def _size_as_object(value: Any) -> Any:
    """Convert the older notations of an image's size to the object that new files have."""
    if isinstance(value, list) and len(value) == 2:
        return {"height": value[0], "width": value[1]}
    return value if isinstance(value, dict) else {"edge": value}


def _square_edge(value: Any) -> Any:
    return value if isinstance(value, int) else 0


def _kernels(value: Any) -> Any:
    # Mamba's convolution has one kernel; a list is of the convolutions that read sound.
    return None if isinstance(value, int) else value


def _token_text(value: Any) -> Any:
    return value.get("content") if isinstance(value, dict) else value


def _token_object(value: Any) -> Any:
    return {"content": value, "special": True} if isinstance(value, str) else value


def _list_items(value: Any) -> Any:
    return list(value.values()) if isinstance(value, dict) else value


def _number_as_text(value: Any) -> Any:
    return str(value) if isinstance(value, int | float) else value


Vocabulary = Annotated[int, number(0, 2**24)]
"""Synthetic inputs are drawn from a list of all tokens; the largest vocabularies have 2**18."""
Frames = Annotated[int, number(1, MAX_FRAMES)]
MelBins = Annotated[int, number(1, 2**10)]
Window = Annotated[int, number(2, 2**14)]
Steps = Annotated[tuple[Annotated[int, number(1, _MAX_AUDIO_FRAME)], ...], Field(max_length=64)]
"""Of the convolutions of an audio encoder, one after the other; 7 in wav2vec2."""
Label = Annotated[str, BeforeValidator(_number_as_text)]
SpecialToken = Annotated[
    str, BeforeValidator(_token_text), expected("a string, or an object with 'content'")
]
_Mean = Annotated[float, number(-1e6, 1e6)]
_Deviation = Annotated[float, number(1e-6, 1e6)]
ChannelMeans = Annotated[
    _Mean | tuple[_Mean, ...], expected("a number from -1e6 to 1e6, or a list of them")
]
ChannelDeviations = Annotated[
    _Deviation | tuple[_Deviation, ...], expected("a number from 1e-6 to 1e6, or a list of them")
]


_Edge = Annotated[int, number(1, 2**24)]  # some processors write a number of pixels here


class ImageSize(Settings):
    """Size of an image: one edge, height and width, or limits of its edges."""

    edge: _Edge | None = None
    """A single number; its meaning depends on the processor."""
    height: _Edge | None = None
    width: _Edge | None = None
    shortest_edge: _Edge | None = None
    longest_edge: _Edge | None = None
    max_height: _Edge | None = None
    max_width: _Edge | None = None

    @property
    def longest(self) -> int:
        """The largest of the numbers; 0 if there is none."""
        return max(self.model_dump(exclude_none=True).values(), default=0)

    def sides(self, default: int) -> tuple[int, int]:
        """Return (height, width); a single number gives a square."""
        edge = self.edge or self.shortest_edge or self.longest_edge or default
        return self.height or self.max_height or edge, self.width or self.max_width or edge


ImageSizeValue = Annotated[
    ImageSize,
    BeforeValidator(_size_as_object),
    expected("a positive number, height and width, or a shortest_edge"),
]


class ModelPart(Settings):
    """Keys of a config.json, or of its text or vision part, that concern inputs."""

    model_type: str = ""
    vocab_size: Vocabulary = 0
    """0 if missing."""
    type_vocab_size: Vocabulary = 0
    pad_token_id: TokenId | None = None
    eos_token_id: Annotated[TokenId | tuple[TokenId, ...], expected("token ids")] | None = None
    max_position_embeddings: Count = 0
    n_positions: Count = 0
    max_target_positions: Count = 0
    """Of the decoder of a model of speech."""
    position_biased_input: bool = True
    """DeBERTa: false if positions are relative."""
    hidden_size: Count = 0
    d_model: Count = 0
    dim: Count = 0
    n_embd: Count = 0
    image_size: ImageSizeValue | None = None
    patch_size: Annotated[Count, BeforeValidator(_square_edge)] = 0
    """Edge of a square patch of an image; 0 if missing, or not square."""
    num_channels: Count = 0
    conv_kernel: Annotated[Steps | None, BeforeValidator(_kernels)] = None
    conv_stride: Steps | None = None
    max_source_positions: Frames | None = None
    num_mel_bins: MelBins | None = None
    max_length: Count = 0
    num_codebooks: Count = 0
    """Codebooks of an audio decoder, each with a row of tokens; 0 for other models."""

    @property
    def positions(self) -> int:
        """Number of position embeddings; 0 if missing."""
        return self.max_position_embeddings or self.n_positions or self.max_target_positions

    @property
    def width(self) -> int:
        """Size of the hidden states; 0 if missing."""
        return self.hidden_size or self.d_model or self.dim or self.n_embd

    @property
    def audio_samples(self) -> int:
        """Samples that a convolutional audio encoder needs for eight frames; 1 for other models."""
        return self._samples_of(_AUDIO_FRAMES)

    @property
    def audio_stride(self) -> int:
        """Samples from a frame of a convolutional audio encoder to the next; 0 for others."""
        return math.prod(self.conv_stride) if self.conv_stride else 0

    @property
    def audio_frame_samples(self) -> int:
        """Samples that a convolutional audio encoder needs for one frame; 1 for other models."""
        return self._samples_of(1)

    def _samples_of(self, frames: int) -> int:
        if self.conv_kernel is None or self.conv_stride is None:
            return 1
        samples = frames
        for kernel, stride in zip(
            reversed(self.conv_kernel), reversed(self.conv_stride), strict=False
        ):
            samples = (samples - 1) * stride + kernel
        return samples

    @property
    def spectrogram_frames(self) -> int | None:
        """Number of frames of an audio spectrogram transformer; None for other models."""
        is_ast = self.model_type == "audio-spectrogram-transformer"
        return self.max_length if is_ast and self.max_length else None

    @model_validator(mode="after")
    def _check_audio(self) -> Self:
        self.require_audio_frame()
        return self

    def require_audio_frame(self) -> None:
        """Raise PydanticCustomError if the convolutions do not match or need too many samples."""
        kernels, strides = self.conv_kernel, self.conv_stride
        if kernels is None or strides is None:
            return
        if len(kernels) != len(strides):
            raise conflict("conv_stride", list(strides), f"{len(kernels)} numbers as conv_kernel")
        if self.audio_samples > _MAX_AUDIO_FRAME:
            words = f"strides that need at most {_MAX_AUDIO_FRAME} samples for eight frames"
            raise conflict("conv_stride", list(strides), words)


_NestedPart = Annotated[
    ModelPart | None, BeforeValidator(lambda value: value if isinstance(value, dict) else None)
]
"""A model's own part under a key that other models use for something else."""

_ENCODER_CLASS = re.compile(r"(WithProjection|EncoderModel|TextModel|VisionModel|DPR\w+Encoder)$")
"""Names of transformers' classes for a part of a model: a tower of CLIP and its like, with or
without its projection, DPR's encoders, T5 without its decoder."""

# Position ids of these model types start after the padding index; the first embeddings are unused.
# Source: create_position_ids_from_input_ids in the modules of transformers.
_OFFSET_POSITIONS = (
    "roberta",
    "xlm-roberta",
    "xlm-roberta-xl",
    "camembert",
    "longformer",
    "mpnet",
    "esm",
    "roberta-prelayernorm",
    "data2vec-text",
    "ibert",
    "luke",
    "xmod",
    "markuplm",
    "lilt",
    "layoutlmv3",
)
_DEFAULT_POSITIONS = 512
"""For models without a limit: the length that nearly every text encoder is trained with."""


class VisionLanguagePart(ModelPart):
    """The model of images and texts inside ColPali's."""

    image_token_index: TokenId | None = None
    """Id of the token that stands for a patch of the image."""
    vision_config: ModelPart | None = None

    @property
    def image_tokens(self) -> int:
        """Number of tokens that stand for an image; 0 if the file does not say."""
        vision = self.vision_config
        if vision is None or vision.image_size is None or not vision.patch_size:
            return 0
        height, width = vision.image_size.sides(0)
        return (height // vision.patch_size) * (width // vision.patch_size)


class ModelConfig(ModelPart, SettingsFile):
    """config.json."""

    FILE = "config.json"

    architecture: str = ""
    """Name of the model in timm; only in files from timm."""
    architectures: tuple[str, ...] = ()
    tokenizer_class: str = ""
    is_encoder_decoder: bool = False
    is_causal: bool = True
    """False for a decoder that was trained to read texts in both directions."""
    problem_type: str = ""
    id2label: dict[int, Label] = Field(default_factory=dict)
    label2id: dict[str, int] = Field(default_factory=dict)
    text_config: ModelPart | None = None
    vision_config: ModelPart | None = None
    vlm_config: VisionLanguagePart | None = None
    backbone_config: ModelPart | None = None
    encoder: _NestedPart = None
    decoder: _NestedPart = None

    @property
    def names_encoder(self) -> bool:
        """True if the class is an encoder whose outputs are features, not one with a task's head.

        >>> ModelConfig(architectures=("CLIPTextModelWithProjection",)).names_encoder
        True
        """
        return bool(self.architectures and _ENCODER_CLASS.search(self.architectures[0]))

    @property
    def names_causal_decoder(self) -> bool:
        """True if the class is a language model that reads a text from left to right.

        >>> ModelConfig(architectures=("Qwen3ForCausalLM",)).names_causal_decoder
        True
        """
        is_decoder = bool(self.architectures) and self.architectures[0].endswith("ForCausalLM")
        return is_decoder and self.is_causal

    def merged(self) -> ModelConfig:
        """Return the config with keys of its parts that it lacks itself.

        Of an encoder and a decoder that are configured apart, the decoder's positions count, and
        the smaller vocabulary.
        """
        backbone = self.backbone_config
        values: dict[str, Any] = {
            name: getattr(backbone, name)
            for name in ("image_size", "num_channels")
            if backbone is not None and name in backbone.model_fields_set
        }
        vision = self.vision_config or (self.vlm_config and self.vlm_config.vision_config)
        parts = (self.encoder, self.decoder, vision, self.text_config, self)
        for part in parts:
            if part is not None:
                values |= {name: getattr(part, name) for name in part.model_fields_set}
        if self.encoder and self.decoder and self.encoder.vocab_size and self.decoder.vocab_size:
            values["vocab_size"] = min(self.encoder.vocab_size, self.decoder.vocab_size)
        return self.model_copy(update=values)

    @property
    def reads_the_end(self) -> bool:
        """True for the text classifiers of BART and T5, which read the last end of sequence."""
        return self.is_encoder_decoder and any(
            name.endswith("ForSequenceClassification") for name in self.architectures
        )

    def position_limit(self) -> int:
        """Return the longest sequence, in tokens; 512 without a limit in the file."""
        limit = self.positions or _DEFAULT_POSITIONS
        kind = self.decoder.model_type if self.decoder else self.model_type
        if kind in _OFFSET_POSITIONS:
            limit -= (1 if self.pad_token_id is None else self.pad_token_id) + 1
        return limit

    @model_validator(mode="after")
    def _check_positions(self) -> Self:
        merged = self.merged()
        if merged.position_limit() < 1:
            words = f"more than pad_token_id + 1, where {self.model_type} starts its positions"
            raise conflict("max_position_embeddings", merged.positions, words)
        merged.require_audio_frame()  # kernels and strides may come from different parts
        return self


class SpecialTokens(Settings):
    """Special tokens by role, in the order in which transformers adds them to a vocabulary."""

    bos_token: SpecialToken | None = None
    eos_token: SpecialToken | None = None
    unk_token: SpecialToken | None = None
    sep_token: SpecialToken | None = None
    pad_token: SpecialToken | None = None
    cls_token: SpecialToken | None = None
    mask_token: SpecialToken | None = None


class AddedTokenValue(Settings):
    """A token with its flags, as in `added_tokens_decoder`."""

    content: str
    single_word: bool = False
    lstrip: bool = False
    rstrip: bool = False
    normalized: bool | None = None
    """None: True unless the token is special, as for `AddedToken`."""
    special: bool = False


class _SpecialTokensFile(SpecialTokens, SettingsFile):
    """A file with special tokens by role, as strings or objects."""

    objects: dict[str, AddedTokenValue] = Field(default_factory=dict)
    """The tokens that are objects, by their role: these have flags."""

    @model_validator(mode="before")
    @classmethod
    def _keep_objects(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        values = {role: data.get(role) for role in SpecialTokens.model_fields}
        objects = {role: value for role, value in values.items() if isinstance(value, dict)}
        return {**data, "objects": objects}


MoreTokens = list[Annotated[AddedTokenValue, BeforeValidator(_token_object)]]
"""Special tokens without a role, as strings or objects."""


class SpecialTokensMap(_SpecialTokensFile):
    """special_tokens_map.json."""

    FILE = "special_tokens_map.json"

    additional_special_tokens: MoreTokens = Field(default_factory=list)


class NamedTemplate(Settings):
    """One of several chat templates."""

    name: str = ""
    template: str = ""


TOKENIZERS_BACKEND = "TokenizersBackend"
"""transformers 5's class of a tokenizer that is no more than its tokenizer.json."""


class TokenizerConfig(_SpecialTokensFile):
    """tokenizer_config.json."""

    FILE = "tokenizer_config.json"

    tokenizer_class: str = ""
    model_max_length: Annotated[float, Field(allow_inf_nan=False)] = 0
    """Tokens; 0 if missing. transformers writes 1e30 for no limit."""
    max_len: Annotated[float, Field(allow_inf_nan=False)] = 0
    """The name of `model_max_length` in old files."""
    do_lower_case: bool = True
    strip_accents: bool | None = None
    """None: accents are stripped if the text is lowercased."""
    tokenize_chinese_chars: bool = True
    add_prefix_space: bool | None = None
    """None: the default of the tokenizer's class."""
    trim_offsets: bool | None = None
    add_bos_token: bool | None = None
    add_eos_token: bool | None = None
    split_special_tokens: bool = False
    additional_special_tokens: MoreTokens = Field(default_factory=list)
    extra_special_tokens: Annotated[MoreTokens, BeforeValidator(_list_items)] = Field(
        default_factory=list
    )
    """Special tokens with roles of this model's own."""
    added_tokens_decoder: dict[Count, AddedTokenValue] = Field(default_factory=dict)
    truncation_side: Literal["left", "right"] = "right"
    padding_side: Literal["left", "right"] = "right"
    model_input_names: tuple[str, ...] = ()
    """What the tokenizer gives to the model; empty for the default of its class, `input_names`."""
    word_delimiter_token: SpecialToken | None = None
    """CTC: the token between words; None for `|`."""
    replace_word_delimiter_char: str = " "
    """CTC: what is written between words."""
    target_lang: str = ""
    """CTC: the language, for a vocabulary by language."""
    clean_up_tokenization_spaces: bool = False
    src_lang: str = ""
    """The source language of a translation model; empty if missing."""
    legacy_behaviour: bool = False
    """NLLB: put the source language behind a text."""
    chat_template: str | list[NamedTemplate] = ""

    @property
    def default_chat_template(self) -> str:
        """The template for chats; empty if there is none. Some models have others by name."""
        if isinstance(self.chat_template, str):
            return self.chat_template
        named_default = [t.template for t in self.chat_template if t.name == "default"]
        return named_default[0] if named_default else ""

    def with_map(self, other: SpecialTokensMap) -> SpecialTokens:
        """Return the special tokens of both files.

        As in transformers: special_tokens_map.json takes precedence, but is not read beside a
        tokenizer_config.json with `added_tokens_decoder`.
        """
        tokens = {role: getattr(self, role) for role in SpecialTokens.model_fields}
        if not self.lists_added_tokens:
            tokens |= other.model_dump(exclude_none=True, include=set(tokens))
        return SpecialTokens(**tokens)

    @property
    def lists_added_tokens(self) -> bool:
        """True if the file has `added_tokens_decoder`, so that no older file is read beside it."""
        return "added_tokens_decoder" in self.model_fields_set

    @property
    def input_names(self) -> tuple[str, ...]:
        """What the tokenizer gives to the model; transformers 5's own class gives no types."""
        types = () if self.tokenizer_class == TOKENIZERS_BACKEND else ("token_type_ids",)
        return self.model_input_names or ("input_ids", *types, "attention_mask")


class ProcessingArguments(Settings):
    """`processing_kwargs` of sentence_bert_config.json."""

    chat_template: dict[str, str | int | float | bool | None] = Field(default_factory=dict)
    """Variables of the chat template."""


class SentenceBertConfig(SettingsFile):
    """sentence_bert_config.json, or a file of sentence-transformers' earlier classes."""

    FILE = "sentence_bert_config.json"
    FILES: ClassVar[tuple[str, ...]] = (
        FILE,
        *(
            f"sentence_{name}_config.json"
            for name in ("roberta", "distilbert", "camembert", "albert", "xlm-roberta", "xlnet")
        ),
    )
    """In the order in which sentence-transformers looks for them."""

    max_seq_length: Count = 0
    """0 if missing."""
    do_lower_case: bool = False
    modality_config: dict[str, Any] = Field(default_factory=dict)
    """Kinds of input, such as `text` and `message`, and how the model takes them."""
    processing_kwargs: ProcessingArguments = Field(default_factory=ProcessingArguments)
    file_name: str = FILE
    """Name of the file that was read."""

    @classmethod
    @override
    def read(cls, directory: Path, *, error: type[EngineryError] = ArtifactError) -> Self:
        """Read the first of `FILES` that there is; see `SettingsFile.read`."""
        name = next((name for name in cls.FILES if (directory / name).is_file()), cls.FILE)
        return cls._read(directory / name, error).model_copy(update={"file_name": name})


class SentenceTransformersConfig(SettingsFile):
    """config_sentence_transformers.json."""

    FILE = "config_sentence_transformers.json"

    prompts: dict[str, str | None] = Field(default_factory=dict)
    default_prompt_name: str = ""
    truncate_dim: Annotated[int, Field(ge=1)] | None = None
    """Number of leading dimensions to keep of a vector; None for all."""


class PoolingConfig(SettingsFile):
    """config.json of a Pooling module; unknown `pooling_mode_…` keys are kept as extras."""

    model_config = ConfigDict(extra="allow")

    FILE = "config.json"

    pooling_mode: Annotated[
        tuple[str, ...],
        BeforeValidator(lambda value: [value] if isinstance(value, str) else value),
    ] = ()
    pooling_mode_cls_token: bool = False
    pooling_mode_max_tokens: bool = False
    pooling_mode_mean_tokens: bool = False
    pooling_mode_mean_sqrt_len_tokens: bool = False
    pooling_mode_weightedmean_tokens: bool = False
    pooling_mode_lasttoken: bool = False
    include_prompt: bool = True

    def unknown_modes(self) -> list[str]:
        """Return the `pooling_mode_…` keys that are set but unknown."""
        extras = self.model_extra or {}
        return [key for key, on in extras.items() if key.startswith("pooling_mode_") and on]


class SpladePoolingConfig(SettingsFile):
    """config.json of a SpladePooling module."""

    FILE = "config.json"

    pooling_strategy: str = "max"
    activation_function: str = "relu"


class DenseConfig(SettingsFile):
    """config.json of a Dense module."""

    FILE = "config.json"

    in_features: Count
    out_features: Count
    bias: bool = True
    activation_function: str = "torch.nn.modules.activation.Tanh"
    """Name of the activation's class, in full."""
    module_input_name: str = "sentence_embedding"
    module_output_name: str = "sentence_embedding"
    use_residual: bool = False

    @property
    def activation(self) -> str:
        """Name of the activation's class, such as `Tanh`."""
        return self.activation_function.rpartition(".")[2]


class LayerNormConfig(SettingsFile):
    """config.json of a LayerNorm module."""

    FILE = "config.json"

    dimension: Count


class LogitScoreConfig(SettingsFile):
    """config.json of a LogitScore module: a reranker whose score is the logit of a token."""

    FILE = "config.json"

    true_token_id: Count
    false_token_id: Count | None = None
    """None: the logit of the other token alone is the score."""


class SentenceModule(Settings):
    """One entry of modules.json."""

    type: str = ""
    path: str = ""

    @property
    def kind(self) -> str:
        """Name of the module's class."""
        return self.type.rpartition(".")[2]


def read_modules(directory: Path) -> list[SentenceModule]:
    """Read the modules of a sentence-transformers model.

    Raises:
        ArtifactError: modules.json is not a list of modules, or a path leaves the directory.
    """
    file = directory / "modules.json"
    modules = read_list(file, SentenceModule, "modules")
    for module in modules:
        path = PurePosixPath(module.path)
        if path.is_absolute() or ".." in path.parts or "\0" in module.path:
            raise ArtifactError(
                f"{file}: the module path {module.path!r} leads outside the model's directory."
            )
    return modules


def read_logit_score(directory: Path) -> LogitScoreConfig | None:
    """Read the LogitScore module of a sentence-transformers reranker; None if it has none.

    Raises:
        ArtifactError: a file cannot be read.
    """
    paths = [module.path for module in _present_modules(directory) if module.kind == "LogitScore"]
    return LogitScoreConfig.read(directory / paths[0]) if paths else None


def module_kinds(directory: Path) -> list[str]:
    """Return the kinds of a sentence-transformers model's modules, in order; else nothing.

    Raises:
        ArtifactError: modules.json cannot be read.
    """
    return [module.kind for module in _present_modules(directory)]


def has_embedding_modules(directory: Path) -> bool:
    """Return True if sentence-transformers' modules make embeddings of a model's token vectors.

    Raises:
        ArtifactError: modules.json cannot be read.
    """
    kinds = module_kinds(directory)
    # A SpladePooling makes vectors of the logits of a masked language model.
    return "SpladePooling" not in kinds and any(
        kind not in ("Transformer", "LogitScore") for kind in kinds
    )


_SIDE_FILES = (".json", ".txt", ".model", ".spm", ".jinja")


def side_files(directory: Path, *, code: bool = False) -> list[str]:
    """Return the names of the files beside a model's weights that its answers may depend on.

    sentence-transformers stores its modules in numbered folders (`1_Pooling/config.json`).

    Args:
        directory: the model's directory.
        code: name Python files, too.
    """
    suffixes = (*_SIDE_FILES, ".py") if code else _SIDE_FILES
    folders = [path for path in directory.iterdir() if path.is_dir() and path.name[0].isdigit()]
    return [
        path.relative_to(directory).as_posix()
        for folder in (directory, *folders)
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix in suffixes and not path.name.endswith(".index.json")
    ]


def _present_modules(directory: Path) -> list[SentenceModule]:
    return read_modules(directory) if (directory / "modules.json").is_file() else []


class PreprocessorConfig(SettingsFile):
    """preprocessor_config.json. None means the default of the image processor.

    Null switches a step off (`do_…`), as in transformers: processors of the fast classes save it.
    """

    FILE = "preprocessor_config.json"

    image_processor_type: str = ""
    feature_extractor_type: str = ""
    do_resize: bool | None = None
    size: ImageSizeValue | None = None
    resample: Annotated[int, number(0, 5)] | None = None
    do_center_crop: bool | None = None
    crop_size: ImageSizeValue | None = None
    crop_pct: Annotated[float, number(0.1, 2)] | None = None
    do_rescale: bool | None = None
    rescale_factor: Annotated[float, Field(gt=0, le=1e3)] | None = None
    rescale_offset: bool | None = None
    do_normalize: bool | None = None
    include_top: bool | None = None
    do_align_long_axis: bool | None = None
    do_thumbnail: bool | None = None
    do_pad: bool | None = None
    pad_size: ImageSizeValue | None = None
    max_size: _Edge | None = None
    """The longest edge, in files with a number as `size`."""
    size_divisor: Annotated[int, number(0, 2**12)] | None = None
    keep_aspect_ratio: bool | None = None
    ensure_multiple_of: Annotated[int, number(1, 2**12)] | None = None
    do_flip_channel_order: bool | None = None
    channel_order: Literal["rgb", "bgr", "gray"] | None = None
    """Only in files that the import of an .onnx file writes."""
    image_mean: ChannelMeans | None = None
    image_std: ChannelDeviations | None = None

    @model_validator(mode="before")
    @classmethod
    def _read_notation(cls, data: Any) -> Any:
        """Switch off the steps that are null. Donut's older files have the width first."""
        if not isinstance(data, dict):
            return data
        nulls = {name for name, value in data.items() if value is None}
        steps = {name for name in nulls if name.startswith("do_")}
        steps |= nulls & {"rescale_offset", "include_top"}
        data = data | dict.fromkeys(steps, False)
        kind = str(data.get("image_processor_type") or data.get("feature_extractor_type"))
        size = data.get("size")
        if kind.startswith("Donut") and isinstance(size, list):
            return {**data, "size": size[::-1]}
        return data


_MAX_CHUNK = 2**26
"""Samples of the fixed length that a feature extractor pads audio to; 480,000 in Whisper."""


class FeatureExtractorConfig(SettingsFile):
    """preprocessor_config.json of a model for audio. None means the feature extractor's default."""

    FILE = "preprocessor_config.json"

    feature_extractor_type: str = ""
    feature_size: MelBins | None = None
    sampling_rate: Annotated[int, number(1000, 768_000)] | None = None
    hop_length: Frames | None = None
    chunk_length: Annotated[int, number(1, 3600)] | None = None
    n_fft: Window | None = None
    win_length: Window | None = None
    preemphasis: Annotated[float, number(0, 1)] | None = None
    num_mel_bins: MelBins | None = None
    max_length: Frames | None = None
    padding_value: _Mean | None = None
    padding_side: Literal["left", "right"] | None = None
    dither: Annotated[float, number(0, 1e6)] | None = None
    do_normalize: bool | None = None
    mean: _Mean | None = None
    std: _Deviation | None = None
    do_ceptral_normalize: bool | None = None
    normalize_means: bool | None = None
    normalize_vars: bool | None = None
    return_attention_mask: bool | None = None

    @model_validator(mode="after")
    def _check_chunk(self) -> Self:
        samples = (self.chunk_length or 0) * (self.sampling_rate or 16_000)
        if samples > _MAX_CHUNK:
            words = f"a length of at most {_MAX_CHUNK} samples"
            raise conflict("chunk_length", self.chunk_length, words)
        return self
