"""Tiny models of many types, with the tokenizers and processors that users save beside them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.model_types import CONFIGS
from enginery.core.json_file import json_bytes
from tests import tiny
from tests.image_to_text import save_image_to_text
from tests.speech import save_whisper

GENERIC = "PreTrainedTokenizerFast"
NO_TYPES = {"model_input_names": ["input_ids", "attention_mask"]}
POSITIONS = 96
_LETTERS = "letters"
"""Tokenizer of a CTC model."""
_METASPACE = "metaspace"
"""Tokenizer of the first Llamas: BPE that marks the beginnings of words."""
_POSITIONS = ("max_position_embeddings", "n_positions", "max_seq_len")
_AUTO = {
    **tiny._AUTO_MODELS,
    "automatic-speech-recognition": "AutoModelForCTC",
    "feature-extraction": "AutoModel",
}


@dataclass(frozen=True)
class Case:
    """A model, and what is saved beside it."""

    name: str
    task: str
    """As `export` takes it."""
    kind: str
    """Model type."""
    tokenizer: str = ""
    """Tokenizer of `tests.tiny`, by model type; `letters` or `metaspace`."""
    tokenizer_class: str = ""
    """Class that saves it; empty for its own."""
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Settings of the tokenizer when it is saved."""
    processor: Mapping[str, Any] = field(default_factory=dict)
    """Keys of preprocessor_config.json."""
    config: Mapping[str, Any] = field(default_factory=dict)
    """Keys of config.json."""
    pooling: str = ""
    """Of an embedder of texts: `mean`, `cls` or `lasttoken`; empty without files of
    sentence-transformers."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of the answer, by enginery's names."""
    refused: str = ""
    """Part of the message with which the export refuses the model."""


def save_model(case: Case, directory: Path) -> None:
    """Write the model of a case with all files beside it."""
    import torch
    import transformers

    if case.kind == "whisper":
        save_whisper(directory, multilingual="language" in case.options)
        file = directory / "generation_config.json"
        values = json.loads(file.read_text())
        # As in the real models: what is between the end and the text is no text.
        specials = range(values["eos_token_id"] + 1, values["no_timestamps_token_id"] + 1)
        file.write_bytes(json_bytes({**values, "suppress_tokens": list(specials)}))
        return
    if case.kind == "vision-encoder-decoder":
        save_image_to_text(case.tokenizer, directory)
        return
    directory.mkdir(parents=True)
    known = json.loads(CONFIGS.read_text())[case.kind]
    task = case.task.removesuffix("-with-past")
    values = {key: value for key, value in known["config"].items() if key != "architectures"}
    values |= dict.fromkeys([key for key in _POSITIONS if key in values], POSITIONS)
    if not task.startswith("text-generation"):
        # The types of BART's family are listed with their decoders alone.
        for key in ("is_decoder", "is_encoder_decoder"):
            values.pop(key, None)
    if case.tokenizer:
        values |= _save_tokenizer(case, directory)
    if "preprocessor" in known:
        processor = {**known["preprocessor"], **case.processor}
        kept = {key: value for key, value in processor.items() if value is not ...}
        (directory / "preprocessor_config.json").write_bytes(json_bytes(kept))
    for key in ("id2label", "label2id"):
        values.pop(key, None)
    if labels := tiny.LABELS.get(task, ())[: case.config.get("num_labels")]:
        values["id2label"] = dict(enumerate(labels))
        values["label2id"] = {label: index for index, label in enumerate(labels)}
    config = transformers.AutoConfig.for_model(**{**values, **case.config})
    if task == known["task"]:
        config.architectures = known["config"]["architectures"]  # some types have several
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        model = getattr(transformers, _AUTO[task]).from_config(config).eval()
        _spread(model)
    model.save_pretrained(directory)
    if case.pooling:
        _save_pooling(case.pooling, config.hidden_size, directory)


def _spread(model: Any) -> None:
    """Draw weights so that answers depend on every part of an input."""
    import torch

    for module in model.modules():
        is_norm = "Norm" in type(module).__name__
        for name, parameter in module.named_parameters(recurse=False):
            if is_norm or "gamma" in name or "layer_scale" in name:
                torch.nn.init.normal_(parameter, 0 if name == "bias" else 1, 0.1)
            elif isinstance(module, torch.nn.Embedding) or parameter.ndim == 3:
                # Rows of tables, the padding's included; tokens and positions of images.
                torch.nn.init.normal_(parameter, std=1 if parameter.ndim == 2 else 0.3)
            elif parameter.ndim > 1:
                torch.nn.init.normal_(parameter, std=(2 / parameter[0].numel()) ** 0.5)
            else:
                torch.nn.init.normal_(parameter, std=0.1)


def _save_tokenizer(case: Case, directory: Path) -> dict[str, Any]:
    """Save the tokenizer of a case; return what config.json says of it."""
    import transformers

    if case.tokenizer == _LETTERS:
        tiny._save_letters(directory)
        return {"vocab_size": 32, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    own = directory.with_name(f"{directory.name}-tokenizer")
    own.mkdir()
    if case.tokenizer == _METASPACE:
        _save_metaspace(own)
    else:
        tiny._save_tokenizer(case.tokenizer, own)
    saved = getattr(transformers, case.tokenizer_class or "AutoTokenizer")
    config = {"model_type": case.tokenizer if case.tokenizer != _METASPACE else "llama"}
    (own / "config.json").write_bytes(json_bytes(config))
    settings = {"model_max_length": POSITIONS, **case.settings}
    tokenizer = saved.from_pretrained(str(own), **settings)
    tokenizer.save_pretrained(directory)
    ids = {
        f"{role}_token_id": getattr(tokenizer, f"{role}_token_id")
        for role in ("pad", "bos", "eos", "cls", "sep")
    }
    known = {name: index for name, index in ids.items() if index is not None}
    positions = {}
    if case.kind in ("roberta", "xlm-roberta", "camembert", "mpnet", "data2vec-text"):
        # Their positions start behind the padding id.
        positions["max_position_embeddings"] = POSITIONS + 1 + known.get("pad_token_id", 1)
    return {"vocab_size": len(tokenizer), **known, **positions}


def _save_metaspace(directory: Path) -> None:
    import transformers
    from tokenizers import Tokenizer, decoders, models, normalizers, processors, trainers

    bpe = Tokenizer(models.BPE(unk_token="<unk>", fuse_unk=True))
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    special = ["<unk>", "<s>", "</s>"]
    trainer = trainers.BpeTrainer(vocab_size=500, special_tokens=special, show_progress=False)
    bpe.train_from_iterator(tiny.TEXT, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s>:1 $B:1", special_tokens=[("<s>", 1)]
    )
    transformers.LlamaTokenizerFast(tokenizer_object=bpe).save_pretrained(directory)


def _save_pooling(mode: str, size: int, directory: Path) -> None:
    """Write the files of sentence-transformers: pooling, then vectors of length 1."""
    folders = {"Transformer": "", "Pooling": "1_Pooling", "Normalize": "2_Normalize"}
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{name}"}
        for i, (name, path) in enumerate(folders.items())
    ]
    (directory / "1_Pooling").mkdir()
    (directory / "2_Normalize").mkdir()
    (directory / "modules.json").write_bytes(json_bytes(modules))
    names = {"mean": "mean_tokens", "cls": "cls_token", "lasttoken": "lasttoken"}
    switches = {f"pooling_mode_{name}": key == mode for key, name in names.items()}
    (directory / "1_Pooling" / "config.json").write_bytes(
        json_bytes({"word_embedding_dimension": size, **switches})
    )
    (directory / "sentence_bert_config.json").write_bytes(json_bytes({"max_seq_length": 32}))


def _classifier(name: str, kind: str, tokenizer: str, *parts: Any, **options: Any) -> Case:
    return Case(name, "text-classification", kind, tokenizer, *parts, **options)


_EOS_PADS = {"pad_token": "</s>"}
_END_PADS = {"pad_token": "<|endoftext|>"}
_LEFT = {"padding_side": "left"}
_LEFT_CUT = {"truncation_side": "left"}
CASES = (
    # Texts and pairs
    _classifier("bert-cased", "bert", "bert", settings={"do_lower_case": False, **_LEFT_CUT}),
    _classifier(
        "bert-accents-regression",
        "bert",
        "bert",
        settings={"strip_accents": False},
        config={"num_labels": 1},
    ),
    _classifier("bert-generic-left", "bert", "bert", GENERIC, _LEFT),
    _classifier("roberta-generic-left", "roberta", "roberta", GENERIC, _LEFT),
    _classifier("roberta-two-types", "roberta", "roberta", config={"type_vocab_size": 2}),
    _classifier("distilbert-generic", "distilbert", "bert", GENERIC, {**NO_TYPES, **_LEFT_CUT}),
    _classifier("albert-left-cut", "albert", "albert", settings=_LEFT_CUT),
    _classifier(
        "electra-multi-label",
        "electra",
        "electra",
        config={"problem_type": "multi_label_classification"},
    ),
    _classifier("xlm-roberta", "xlm-roberta", "roberta", "XLMRobertaTokenizerFast", settings=_LEFT),
    _classifier("deberta-v2", "deberta-v2", "deberta-v2"),
    _classifier("deberta-generic", "deberta", "roberta", GENERIC),
    _classifier("mpnet", "mpnet", "mpnet", settings={"do_lower_case": False}),
    _classifier("modernbert", "modernbert", "modernbert"),
    _classifier("squeezebert", "squeezebert", "bert", "SqueezeBertTokenizerFast"),
    _classifier("convbert", "convbert", "bert", "ConvBertTokenizerFast"),
    _classifier("mobilebert-left", "mobilebert", "bert", "MobileBertTokenizerFast", _LEFT),
    _classifier("nystromformer", "nystromformer", "albert"),
    _classifier("bart", "bart", "bart"),
    _classifier("gpt2-generic", "gpt2", "gpt2", GENERIC, _END_PADS),
    _classifier("gpt2-left", "gpt2", "gpt2", settings={**_END_PADS, **_LEFT}),
    _classifier("llama-eos-pads", "llama", "metaspace", settings={**_EOS_PADS, **_LEFT}),
    _classifier("llama-generic-right", "llama", "metaspace", GENERIC, {**_EOS_PADS, **NO_TYPES}),
    _classifier(
        "mistral-eos",
        "mistral",
        "metaspace",
        settings={"pad_token": "<unk>", "add_eos_token": True, **_LEFT},
    ),
    _classifier("qwen3", "qwen3", "qwen3", "Qwen2TokenizerFast", _END_PADS),
    _classifier("opt", "opt", "opt", settings=_END_PADS),
    _classifier("bloom-left", "bloom", "bloom", "BloomTokenizerFast", {**_END_PADS, **_LEFT}),
    # Tokens
    Case("tag-bert", "token-classification", "bert", "bert", settings={"do_lower_case": False}),
    Case(
        "tag-roberta",
        "token-classification",
        "roberta",
        "roberta",
        settings={"add_prefix_space": True, "model_max_length": 40},
        options={"aggregation": "first"},
    ),
    Case(
        "tag-deberta-v2",
        "token-classification",
        "deberta-v2",
        "deberta-v2",
        options={"aggregation": "max"},
    ),
    Case(
        "tag-distilbert",
        "token-classification",
        "distilbert",
        "distilbert",
        settings=_LEFT,
        options={"aggregation": "average"},
    ),
    Case(
        "tag-gpt2",
        "token-classification",
        "gpt2",
        "gpt2",
        settings={**_END_PADS, "add_prefix_space": True},
        options={"aggregation": "none"},
    ),
    Case(
        "tag-xlm-roberta",
        "token-classification",
        "xlm-roberta",
        "albert",
        GENERIC,
        options={"aggregation": "simple"},
    ),
    # Questions
    Case("answer-bert-left", "question-answering", "bert", "bert", settings=_LEFT),
    Case(
        "answer-roberta",
        "question-answering",
        "roberta",
        "roberta",
        settings={"model_max_length": 48},
    ),
    Case("answer-distilbert", "question-answering", "distilbert", "distilbert"),
    Case(
        "answer-xlm-roberta-left",
        "question-answering",
        "xlm-roberta",
        "roberta",
        GENERIC,
        {**_LEFT, **_LEFT_CUT, **NO_TYPES, "model_max_length": 56},
    ),
    Case(
        "answer-electra-left-cut",
        "question-answering",
        "electra",
        "electra",
        settings={**_LEFT_CUT, "model_max_length": 40},
    ),
    Case("answer-deberta-v2", "question-answering", "deberta-v2", "deberta-v2"),
    # Masks
    Case("fill-bert", "fill-mask", "bert", "bert", settings={"do_lower_case": False}),
    Case("fill-roberta", "fill-mask", "roberta", "roberta"),
    Case("fill-albert-left", "fill-mask", "albert", "albert", settings=_LEFT),
    Case("fill-generic", "fill-mask", "xlm-roberta", "roberta", GENERIC, NO_TYPES),
    # Vectors of texts
    Case("embed-bert-cls", "feature-extraction", "bert", "bert", settings=_LEFT, pooling="cls"),
    Case("embed-mpnet", "feature-extraction", "mpnet", "mpnet", pooling="mean"),
    Case("embed-roberta-generic", "feature-extraction", "roberta", "roberta", GENERIC),
    Case(
        "embed-mistral-last",
        "feature-extraction",
        "mistral",
        "metaspace",
        settings={**_EOS_PADS, **_LEFT, "add_eos_token": True},
        pooling="lasttoken",
    ),
    Case(
        "embed-qwen3-last",
        "feature-extraction",
        "qwen3",
        "qwen3",
        settings=_END_PADS,
        pooling="lasttoken",
    ),
    Case(
        "embed-modernbert",
        "feature-extraction",
        "modernbert",
        "modernbert",
        settings=_LEFT_CUT,
        pooling="mean",
    ),
    # Images
    Case(
        "vit-crop",
        "image-classification",
        "vit",
        processor={
            "image_processor_type": "BitImageProcessor",
            "size": {"shortest_edge": 37},
            "do_center_crop": True,
            "crop_size": {"height": 30, "width": 30},
        },
    ),
    Case(
        "vit-fast",
        "image-classification",
        "vit",
        processor={
            "image_processor_type": "ViTImageProcessorFast",
            "resample": 3,
            "do_convert_rgb": True,
        },
    ),
    Case(
        "vit-older",
        "image-classification",
        "vit",
        processor={
            "image_processor_type": ...,
            "feature_extractor_type": "ViTFeatureExtractor",
            "size": 30,
        },
    ),
    Case(
        "beit-odd-crop",
        "image-classification",
        "beit",
        processor={"size": {"height": 41, "width": 41}},
    ),
    Case("deit", "image-classification", "deit"),
    Case(
        "convnext",
        "image-classification",
        "convnext",
        processor={"size": {"shortest_edge": 67}, "crop_pct": 0.83},
    ),
    Case("swin", "image-classification", "swin"),
    Case(
        "resnet-odd-crop",
        "image-classification",
        "resnet",
        processor={"size": {"shortest_edge": 35}, "crop_size": {"height": 33, "width": 31}},
    ),
    Case("mobilevit", "image-classification", "mobilevit"),
    Case(
        "mobilenet_v2",
        "image-classification",
        "mobilenet_v2",
        processor={"size": {"shortest_edge": 40}},
    ),
    Case("levit", "image-classification", "levit"),
    Case("efficientnet", "image-classification", "efficientnet"),
    Case("dinov2", "image-classification", "dinov2"),
    Case("poolformer", "image-classification", "poolformer", processor={"crop_pct": 0.77}),
    Case("segformer", "image-classification", "segformer"),
    # Sounds
    Case("sound-wav2vec2", "audio-classification", "wav2vec2"),
    Case("sound-wavlm", "audio-classification", "wavlm", processor={"do_normalize": False}),
    Case("sound-ast", "audio-classification", "audio-spectrogram-transformer"),
    Case("letters-wav2vec2", "automatic-speech-recognition", "wav2vec2", "letters"),
    Case(
        "letters-hubert",
        "automatic-speech-recognition",
        "hubert",
        "letters",
        config={"feat_extract_norm": "layer", "do_stable_layer_norm": True},
        processor={"return_attention_mask": True},
    ),
    # Generated texts
    Case("generate-gpt2", "text-generation-with-past", "gpt2", "gpt2", settings=_END_PADS),
    Case(
        "generate-llama",
        "text-generation-with-past",
        "llama",
        "metaspace",
        settings={**_EOS_PADS, **_LEFT},
    ),
    Case(
        "generate-mistral-generic",
        "text-generation-with-past",
        "mistral",
        "metaspace",
        GENERIC,
        {**_EOS_PADS, **NO_TYPES},
    ),
    Case("generate-qwen3", "text-generation-with-past", "qwen3", "qwen3", settings=_END_PADS),
    Case("generate-opt", "text-generation-with-past", "opt", "opt", settings=_END_PADS),
    Case(
        "generate-bloom",
        "text-generation-with-past",
        "bloom",
        "bloom",
        settings={**_END_PADS, **_LEFT},
    ),
    Case(
        "generate-cohere",
        "text-generation-with-past",
        "cohere",
        "gpt2",
        "CohereTokenizerFast",
        {**_END_PADS, "bos_token": "<|endoftext|>", "eos_token": "<|endoftext|>"},
    ),
    Case(
        "generate-codegen",
        "text-generation-with-past",
        "codegen",
        "gpt2",
        "CodeGenTokenizerFast",
        _END_PADS,
    ),
    Case(
        "generate-llama-beams",
        "text-generation-with-past",
        "llama",
        "metaspace",
        settings={**_EOS_PADS, **_LEFT},
        options={"num_beams": 3},
    ),
    Case(
        "translate-bart-beams",
        "text2text-generation-with-past",
        "bart",
        "bart",
        options={"num_beams": 4},
    ),
    Case("translate-t5", "text2text-generation-with-past", "t5", "t5"),
    Case("translate-bart", "text2text-generation-with-past", "bart", "bart", settings=_LEFT),
    Case("transcribe-whisper", "automatic-speech-recognition-with-past", "whisper"),
    Case(
        "transcribe-whisper-french",
        "automatic-speech-recognition-with-past",
        "whisper",
        options={"language": "fr", "task": "transcribe"},
    ),
    Case("read-donut", "image-to-text-with-past", "vision-encoder-decoder", "donut"),
    Case("read-trocr", "image-to-text-with-past", "vision-encoder-decoder", "trocr"),
)
