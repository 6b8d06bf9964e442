"""Tiny models, built in code: complete Hugging Face directories with random weights.

    save_tiny("bert", "text-classification", tmp_path / "bert")    # for `from_pretrained`
    tiny_artifact("bert", "text-classification", tmp_path / "artifact")

Two layers, hidden size 32, four heads, a vocabulary of a few hundred, images of 32 or 64 pixels.
Weights are drawn wide (0.3, not 0.02), so that different inputs get clearly different answers.
torch and transformers are imported inside the functions.
"""

from __future__ import annotations

import math
import os
import shutil
import warnings
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import Any

from filelock import FileLock

from enginery.core.artifact.artifact import Artifact, commit_artifact, staging
from enginery.core.artifact.manifest import Manifest, StageRecord
from enginery.core.json_file import json_bytes, read_json
from enginery.core.model.source import resolve_source
from enginery.core.versions import TRANSFORMERS5, transformers_family

CACHE: Path | None = None
"""Directory of the artifacts that all processes of a test run share; None to share none."""

TEXT_KINDS = (
    "bert",
    "distilbert",
    "roberta",
    "albert",
    "electra",
    "deberta-v2",
    "mpnet",
    "modernbert",
)
TEXT_TASKS = (
    "feature-extraction",
    "text-classification",
    "token-classification",
    "question-answering",
    "fill-mask",
)
DECODER_KINDS = (
    "gpt2",
    "llama",
    "opt",
    "qwen3",
    "qwen2",
    "mistral",
    "gemma",
    "gemma3_text",
    "phi",
    "phi3",
    "gpt_neox",
    "stablelm",
    "bloom",
)
IMAGE_KINDS = ("vit", "deit", "swin", "convnext", "resnet")
IMAGE_TASKS = ("image-classification", "feature-extraction")
AUDIO_KINDS = ("wav2vec2", "hubert", "audio-spectrogram-transformer", "whisper")
CTC_KINDS = ("wav2vec2", "hubert")


def with_more(kinds: Collection[str], *quick: str) -> list[Any]:
    """Return kinds as parameters of a test; the others than the quick ones are marked.

    Every fourth of them is `more`, the rest are `slow`.
    """
    import pytest

    longer = [kind for kind in kinds if kind not in quick]
    marks = dict.fromkeys(longer, pytest.mark.slow)
    marks |= dict.fromkeys(longer[::4], pytest.mark.more)
    return [pytest.param(kind, marks=marks.get(kind, ())) for kind in kinds]


LABELS = {
    "text-classification": ("calm", "angry", "glad"),
    "token-classification": ("O", "B-PER", "I-PER", "B-LOC", "I-LOC"),
    "image-classification": ("cat", "boat", "tree"),
    "audio-classification": ("bark", "rain", "bell"),
}

TEXT = """\
The engine is warm and the pump runs again. Marie Curie lived in Paris, not far from the Seine.
Who built the bridge over the river in London? Nobody knows, but Ada Lovelace wrote about it.
A small cat sleeps on the boat under the tree; the rain is cold, the bell rings at noon.
Der Motor ist warm, die Pumpe läuft wieder. Über die Brücke in Köln fährt kein Zug, sagt Jürgen.
Le moteur est chaud et la pompe tourne. Où est la clé du bateau ? Elle est tombée à l'eau, hélas.
El motor está caliente y la bomba funciona. ¿Quién construyó el puente? Nadie lo sabe, señor.
Двигатель прогрет, насос снова работает. Кто построил мост через реку в Москве?
Ο κινητήρας είναι ζεστός και η αντλία δουλεύει ξανά στην Αθήνα.
引擎已经热了,水泵又开始工作了。エンジンは暖まり、ポンプはまた動いている。
0 1 2 3 4 5 6 7 8 9 2026 engines, 64 rows; (a) [b] {c} #d @e 50% & more: "yes" — 'no'! x/y z_w
""".splitlines()

VOCAB_SIZE = 600
MAX_POSITIONS = 128

_COMMON = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "max_position_embeddings": MAX_POSITIONS,
    "initializer_range": 0.3,
}
_IMAGE = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 64,
    "image_size": 32,
    "patch_size": 8,
    "initializer_range": 0.3,
}
_BART = {
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "max_position_embeddings": MAX_POSITIONS,
    "decoder_start_token_id": 2,
    "init_std": 0.3,
}
_T5 = {
    "d_model": 32,
    "d_kv": 8,
    "d_ff": 64,
    "num_layers": 2,
    "num_heads": 4,
    "decoder_start_token_id": 0,
}
_SPEECH = {
    **_COMMON,
    "conv_dim": [16, 16],
    "conv_kernel": [10, 3],
    "conv_stride": [5, 2],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 8,
    "num_conv_pos_embedding_groups": 2,
    "classifier_proj_size": 16,
    "vocab_size": 32,
}
_CONFIGS: dict[str, dict[str, Any]] = {
    "bert": _COMMON,
    "distilbert": {
        "dim": 32,
        "n_layers": 2,
        "n_heads": 4,
        "hidden_dim": 64,
        "initializer_range": 0.3,
        "max_position_embeddings": MAX_POSITIONS,
    },
    # Positions of the RoBERTa family start after the padding id, hence two more.
    "roberta": {**_COMMON, "max_position_embeddings": MAX_POSITIONS + 2, "type_vocab_size": 1},
    "mpnet": {**_COMMON, "max_position_embeddings": MAX_POSITIONS + 2},
    "albert": {**_COMMON, "embedding_size": 16},
    "electra": {**_COMMON, "embedding_size": 16},
    "convbert": {**_COMMON, "embedding_size": 16, "conv_kernel_size": 3},
    "deberta-v2": {
        **_COMMON,
        "relative_attention": True,
        "position_buckets": 16,
        "norm_rel_ebd": "layer_norm",
        "share_att_key": True,
        "pos_att_type": ["p2c", "c2p"],
        "position_biased_input": False,
        "max_relative_positions": -1,
        "type_vocab_size": 0,
    },
    "modernbert": {
        **_COMMON,
        "local_attention": 16,
        "global_attn_every_n_layers": 2,
        "reference_compile": False,
        "attn_implementation": "eager",
    },
    "gpt2": {
        "n_embd": 32,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": MAX_POSITIONS,
        "initializer_range": 0.3,
    },
    # Two heads of keys and values for four of queries.
    "llama": {**_COMMON, "num_key_value_heads": 2},
    "qwen3": {**_COMMON, "num_key_value_heads": 2, "head_dim": 8, "tie_word_embeddings": True},
    "qwen2": {**_COMMON, "num_key_value_heads": 2},
    "mistral": {**_COMMON, "num_key_value_heads": 2, "sliding_window": 8},
    "gemma": {**_COMMON, "num_key_value_heads": 2, "head_dim": 8},
    "gemma3_text": {
        **_COMMON,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "sliding_window": 8,
        "layer_types": ["sliding_attention", "full_attention"],
    },
    "phi": {**_COMMON, "num_key_value_heads": 4},
    "phi3": {**_COMMON, "num_key_value_heads": 4},
    "gpt_neox": _COMMON,
    "stablelm": {**_COMMON, "num_key_value_heads": 2},
    "bloom": {"hidden_size": 32, "n_layer": 2, "n_head": 4, "initializer_range": 0.3},
    "opt": {
        "hidden_size": 32,
        "word_embed_proj_dim": 32,
        "ffn_dim": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": MAX_POSITIONS,
        "init_std": 0.3,
    },
    "bart": {**_BART, "forced_eos_token_id": 2},
    "mbart": _BART,
    "pegasus": _BART,
    "blenderbot-small": _BART,
    "m2m_100": {**_BART, "encoder_layerdrop": 0.0, "decoder_layerdrop": 0.0},
    # As in Helsinki-NLP's models, the padding token starts a text and is never generated.
    "marian": {
        **_BART,
        "decoder_start_token_id": 1,
        "bad_words_ids": [[1]],
        "forced_eos_token_id": 2,
    },
    # The exporter's inputs are 30 seconds long: 3000 frames, half of which are positions.
    "whisper": {
        "d_model": 16,
        "encoder_layers": 1,
        "decoder_layers": 2,
        "encoder_attention_heads": 2,
        "decoder_attention_heads": 2,
        "encoder_ffn_dim": 16,
        "decoder_ffn_dim": 16,
        "num_mel_bins": 8,
        "max_target_positions": 64,
        "max_position_embeddings": 64,
        "vocab_size": 100,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "decoder_start_token_id": 1,
        "init_std": 0.3,
    },
    "t5": _T5,
    "mt5": {**_T5, "feed_forward_proj": "gated-gelu", "tie_word_embeddings": False},
    "vit": _IMAGE,
    # Two classes of DeiT classify images; the list says which one is meant.
    "deit": {**_IMAGE, "architectures": ["DeiTForImageClassification"]},
    "swin": {
        "image_size": 32,
        "patch_size": 4,
        "embed_dim": 16,
        "depths": [1, 1],
        "num_heads": [2, 4],
        "window_size": 4,
        "initializer_range": 0.3,
    },
    "convnext": {
        "hidden_sizes": [8, 16, 24, 32],
        "depths": [1, 1, 1, 1],
        "image_size": 64,
        "initializer_range": 0.3,
    },
    "resnet": {"embedding_size": 8, "hidden_sizes": [8, 16, 24, 32], "depths": [1, 1, 1, 1]},
    "wav2vec2": _SPEECH,
    "hubert": _SPEECH,
    "audio-spectrogram-transformer": {
        **_COMMON,
        "num_mel_bins": 16,
        "max_length": 64,
        "patch_size": 8,
        "frequency_stride": 8,
        "time_stride": 8,
    },
}

_AUTO_MODELS = {
    "feature-extraction": "AutoModel",
    "text-classification": "AutoModelForSequenceClassification",
    "token-classification": "AutoModelForTokenClassification",
    "question-answering": "AutoModelForQuestionAnswering",
    "fill-mask": "AutoModelForMaskedLM",
    "text-generation": "AutoModelForCausalLM",
    "text2text-generation": "AutoModelForSeq2SeqLM",
    "image-classification": "AutoModelForImageClassification",
    "audio-classification": "AutoModelForAudioClassification",
    "automatic-speech-recognition": "AutoModelForSpeechSeq2Seq",
}

# kind -> algorithm, transformers class, special tokens in the order of their ids
_BERT = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
_ROBERTA = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
_TOKENIZERS: dict[str, tuple[str, str, tuple[str, ...]]] = {
    "bert": ("wordpiece", "BertTokenizerFast", _BERT),
    "distilbert": ("wordpiece", "DistilBertTokenizerFast", _BERT),
    "electra": ("wordpiece", "ElectraTokenizerFast", _BERT),
    "mpnet": ("wordpiece", "MPNetTokenizerFast", ("<s>", "<pad>", "</s>", "[UNK]", "<mask>")),
    "roberta": ("bpe", "RobertaTokenizerFast", _ROBERTA),
    "modernbert": ("bpe", "PreTrainedTokenizerFast", _BERT),
    **dict.fromkeys(DECODER_KINDS, ("bpe", "GPT2TokenizerFast", ("<|endoftext|>",))),
    **dict.fromkeys(
        ("bart", "mbart", "pegasus", "blenderbot-small", "m2m_100", "marian"),
        ("bpe", "BartTokenizerFast", _ROBERTA),
    ),
    "albert": ("unigram", "AlbertTokenizerFast", ("<pad>", "<unk>", "[CLS]", "[SEP]", "[MASK]")),
    "deberta-v2": (
        "unigram",
        "DebertaV2TokenizerFast",
        ("[PAD]", "[CLS]", "[SEP]", "[UNK]", "[MASK]"),
    ),
    **dict.fromkeys(("t5", "mt5"), ("unigram", "T5TokenizerFast", ("<pad>", "</s>", "<unk>"))),
}


def save_tiny(kind: str, task: str, directory: Path, **config: Any) -> Path:
    """Write the model directory; the weights only depend on `kind`, `task` and `config`."""
    import torch
    import transformers

    directory.mkdir(parents=True, exist_ok=True)
    task = task.removesuffix("-with-past")
    settings: dict[str, Any] = dict(_CONFIGS[kind])
    if kind in _TOKENIZERS:
        settings |= _save_tokenizer(kind, directory)
    else:
        _preprocessor(kind).save_pretrained(directory)
    ctc = kind in CTC_KINDS and task == "automatic-speech-recognition"
    if ctc:
        _save_letters(directory)
    if labels := LABELS.get(task, ())[: config.pop("num_labels", None)]:
        settings["id2label"] = dict(enumerate(labels))
        settings["label2id"] = {label: index for index, label in enumerate(labels)}
    made = transformers.AutoConfig.for_model(kind, **{**settings, **config})
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(7)
        auto = "AutoModelForCTC" if ctc else _AUTO_MODELS[task]
        model = getattr(transformers, auto).from_config(made).eval()
        _widen(kind, model)
        model.save_pretrained(directory, safe_serialization=True)
    return directory


def tiny_artifact(
    kind: str, task: str, directory: Path, *, source: Path | None = None, **config: Any
) -> Artifact:
    """Return an artifact: a tiny model (or the model directory `source`) and its graphs.

    This is the exporter's core alone: no child process, no probing of dims. A model without a
    `source` is exported once for all processes of a test run, and copied. Its source is shared, so
    leave that as it is.
    """
    if source is not None:
        return _export(source, task, directory)
    if CACHE is None:
        model = save_tiny(kind, task, directory.with_name(f"{directory.name}-source"), **config)
        return _export(model, task, directory)
    name = "-".join([kind, task, *(f"{key}={value}" for key, value in sorted(config.items()))])
    with FileLock(CACHE / f"{name}.lock"):
        exported = CACHE / name
        if not exported.is_dir():
            _export(save_tiny(kind, task, CACHE / f"{name}-source", **config), task, exported)
    # No links, since tests write to files in their copies.
    shutil.copytree(exported, directory)
    return Artifact.open(directory)


def _export(source: Path, task: str, directory: Path) -> Artifact:
    """Export a model directory with what this environment has."""
    from enginery.export.graphs import fix_dims, float_precision, name_dims, record_graph

    write = _export_with_transformers
    if transformers_family() != TRANSFORMERS5:
        write = _export_with_optimum
    settings = read_json(source / "config.json")
    with staging(directory) as staged, warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the tracer's, about code that is not ours
        write(source, task, staged)
        channels = settings.get("num_channels")
        graphs = sorted(staged.rglob("*.onnx"))
        for graph in graphs:
            name_dims(graph)
            record = record_graph(graph, staged)
            fix_dims(graph, record, {"channels": channels} if channels else {})
        manifest = Manifest(
            source=resolve_source(str(source)).record,
            task=task,
            model_type=settings["model_type"],
            library="transformers",
            precision=float_precision(graphs[0]),
            target="onnx",
            graphs=tuple(record_graph(graph, staged) for graph in graphs),
            stages=(
                StageRecord(
                    stage="export",
                    key="tiny",
                    fields={},
                    options={"opset": 20},
                    changed_options=(),
                    tools={},
                    finished="2026-01-01T00:00:00+00:00",
                    seconds=0.0,
                    peak_rss_bytes=0,
                ),
            ),
            files={},
        )
        commit_artifact(staged, manifest)
    return Artifact.open(directory)


def _export_with_optimum(source: Path, task: str, out: Path) -> None:
    from optimum.exporters.onnx import main_export

    from enginery.export.side_files import copy_side_files

    main_export(
        str(source),
        output=out,
        task=task,
        opset=20,
        do_validation=False,
        library_name="transformers",
    )
    copy_side_files(source, out, code=False)


def _export_with_transformers(source: Path, task: str, out: Path) -> None:
    from enginery.export.config import ExportConfig
    from enginery.export.native.export import export_with_transformers

    config = ExportConfig(task=task, opset=20)
    export_with_transformers(source, config, out, pickled=False)


def _save_tokenizer(kind: str, directory: Path) -> dict[str, Any]:
    """Train and save the tokenizer; return its settings for the model's config."""
    import transformers

    algorithm, class_name, specials = _TOKENIZERS[kind]
    tokenizer = _train(algorithm, specials)
    by_role = {}
    for role, names in (
        ("pad_token", ("[PAD]", "<pad>", "<|endoftext|>")),
        ("unk_token", ("[UNK]", "<unk>", "<|endoftext|>")),
        ("cls_token", ("[CLS]", "<s>")),
        ("sep_token", ("[SEP]", "</s>")),
        ("mask_token", ("[MASK]", "<mask>")),
        ("bos_token", ("<s>", "<|endoftext|>")),
        ("eos_token", ("</s>", "<|endoftext|>")),
    ):
        if found := next((name for name in names if name in specials), None):
            by_role[role] = found
    options: dict[str, Any] = {"model_max_length": MAX_POSITIONS, **by_role}
    if "mask_token" in by_role and algorithm != "wordpiece":
        options["mask_token"] = transformers.AddedToken(by_role["mask_token"], lstrip=True)
    if kind in ("t5", "mt5"):
        options["extra_ids"] = 10
    if kind == "modernbert":
        options["model_input_names"] = ["input_ids", "attention_mask"]
    tokenizer.post_processor = _post_processor(kind, specials, by_role)
    fast = getattr(transformers, class_name)(tokenizer_object=tokenizer, **options)
    fast.save_pretrained(directory)
    ids = {
        f"{role.removesuffix('_token')}_token_id": fast.convert_tokens_to_ids(str(token))
        for role, token in by_role.items()
        if role not in ("unk_token", "mask_token")
    }
    return {"vocab_size": len(fast), **ids}


def _save_letters(directory: Path) -> None:
    """Save the tokenizer of a CTC model: 32 tokens, most of them letters."""
    import transformers

    tokens = ["<pad>", "<s>", "</s>", "<unk>", "|", "'", *"ABCDEFGHIJKLMNOPQRSTUVWXYZ"]
    file = directory / "vocab.json"
    file.write_bytes(json_bytes({token: index for index, token in enumerate(tokens)}))
    transformers.Wav2Vec2CTCTokenizer(str(file)).save_pretrained(directory)


def _train(algorithm: str, specials: tuple[str, ...]) -> Any:
    """Return a tokenizer of the algorithm, the same in every process.

    Byte-level BPE is trained by its trainer. The trainers of the other two break ties by the order
    of a hash table, so their vocabularies are counted out here.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # the trainer forks nothing
    from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

    unknown = next((name for name in specials if "unk" in name.lower()), None)
    if algorithm == "wordpiece":
        normalizer = normalizers.BertNormalizer(lowercase=True)
        splitter = pre_tokenizers.BertPreTokenizer()
        pieces = _pieces(normalizer, splitter, inside="##")
        vocabulary = list(dict.fromkeys([*specials, *pieces]))[:VOCAB_SIZE]
        tokenizer = Tokenizer(
            models.WordPiece({t: i for i, t in enumerate(vocabulary)}, unk_token=unknown)
        )
        tokenizer.decoder = decoders.WordPiece()
    elif algorithm == "unigram":
        normalizer = normalizers.NFKC()
        splitter = pre_tokenizers.Metaspace()
        pieces = _pieces(normalizer, splitter, inside="")
        scores = {**dict.fromkeys(specials, 0.0), **pieces}
        vocabulary = list(scores.items())[:VOCAB_SIZE]
        tokenizer = Tokenizer(models.Unigram(vocabulary, unk_id=specials.index(unknown or "")))
        tokenizer.decoder = decoders.Metaspace()
    else:
        normalizer = None
        splitter = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer = Tokenizer(models.BPE())
        tokenizer.decoder = decoders.ByteLevel()
    if normalizer is not None:
        tokenizer.normalizer = normalizer
    tokenizer.pre_tokenizer = splitter
    if algorithm == "bpe":
        trainer = trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=list(specials),
            show_progress=False,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        )
        tokenizer.train_from_iterator(TEXT, trainer)
    tokenizer.add_special_tokens(list(specials))
    return tokenizer


def _pieces(normalizer: Any, splitter: Any, inside: str) -> dict[str, float]:
    """Return all letters of the text, then the most frequent starts and ends of words, with their
    logarithmic frequencies. `inside` marks a piece that does not begin a word."""
    letters: Counter[str] = Counter()
    parts: Counter[str] = Counter()
    for line in TEXT:
        for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(line)):
            letters.update([word[0], *(f"{inside}{letter}" for letter in word[1:])])
            for cut in range(2, len(word) + 1):
                parts[word[:cut]] += cut
                parts[f"{inside}{word[-cut:]}"] += cut
    total = letters.total() + parts.total()
    heaviest = sorted(parts, key=lambda piece: (-parts[piece], piece))
    return {
        piece: math.log((letters[piece] + parts[piece]) / total)
        for piece in [*sorted(letters), *heaviest]
    }


def _post_processor(kind: str, specials: tuple[str, ...], by_role: dict[str, str]) -> Any:
    from tokenizers import processors

    ids = [(token, index) for index, token in enumerate(specials)]
    if kind in DECODER_KINDS:
        return processors.ByteLevel(trim_offsets=False)
    if kind in ("t5", "mt5"):
        return processors.TemplateProcessing(
            single="$A </s>", pair="$A </s> $B </s>", special_tokens=ids
        )
    cls, sep = by_role["cls_token"], by_role["sep_token"]
    if specials == _ROBERTA:
        # By position: releases of tokenizers have other names for them.
        pieces = ((sep, specials.index(sep)), (cls, specials.index(cls)))
        return processors.RobertaProcessing(*pieces, add_prefix_space=False)
    pair = f"{cls} $A {sep} $B:1 {sep}:1"
    if kind == "mpnet":
        pair = f"{cls} $A {sep} {sep} $B {sep}"
    return processors.TemplateProcessing(single=f"{cls} $A {sep}", pair=pair, special_tokens=ids)


def _preprocessor(kind: str) -> Any:
    import transformers

    square = {"height": 32, "width": 32}
    if kind in CTC_KINDS:
        return transformers.Wav2Vec2FeatureExtractor(return_attention_mask=False)
    if kind == "audio-spectrogram-transformer":
        return transformers.ASTFeatureExtractor(num_mel_bins=16, max_length=64)
    if kind == "whisper":
        return transformers.WhisperFeatureExtractor(feature_size=8)
    if kind == "deit":
        return transformers.DeiTImageProcessor(size={"height": 40, "width": 40}, crop_size=square)
    if kind == "convnext":
        return transformers.ConvNextImageProcessor(size={"shortest_edge": 64}, crop_pct=0.875)
    if kind == "resnet":  # as microsoft/resnet-50 ships: a ConvNeXt processor
        return transformers.ConvNextImageProcessor(size={"shortest_edge": 64}, crop_pct=0.875)
    if kind == "swin":
        return transformers.ViTImageProcessor(
            size=square,
            resample=3,
            image_mean=[0.485, 0.456, 0.406],
            image_std=[0.229, 0.224, 0.225],
        )
    return transformers.ViTImageProcessor(size=square)


def _widen(kind: str, model: Any) -> None:
    """Draw the weights of models whose initialization ignores `initializer_range`."""
    import torch

    if kind in ("t5", "mt5", "resnet", "convnext"):
        for parameter in model.parameters():
            if parameter.dim() > 1:
                torch.nn.init.normal_(parameter, std=0.3)
    if kind == "convnext":
        for name, parameter in model.named_parameters():
            if "layer_scale" in name:  # starts at 1e-6, which would switch the layers off
                torch.nn.init.ones_(parameter)
