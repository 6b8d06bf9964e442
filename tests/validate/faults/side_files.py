"""Faults in the files beside the graphs of six artifacts, and sound changes of them.

An artifact with a fault is consistent: its hashes are made anew. The effect of a fault is measured
on what `load_model` answers to raw inputs.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from enginery import load_model
from enginery.core.artifact.artifact import Artifact, commit_artifact
from enginery.core.errors import EngineryError
from enginery.core.json_file import json_bytes
from enginery.runtime.builtin_inputs import synthetic_images, synthetic_sounds
from tests.speech import save_whisper
from tests.tiny import save_tiny

TEXTS = (
    "The Engine is WARM, and the pump runs again in Köln.",
    "a",
    "Où est la clé du bateau ? Elle est tombée à l'eau, hélas. " * 9,
    "引擎已经热了 Marie Curie lived in Paris, not far from the Seine.",
)
PAIR = ("Who built the bridge?", "Ada Lovelace wrote about it.")
MODULES = [
    {"idx": 0, "name": "0", "path": "", "type": "sentence_transformers.models.Transformer"},
    {"idx": 1, "name": "1", "path": "1_Pooling", "type": "sentence_transformers.models.Pooling"},
    {
        "idx": 2,
        "name": "2",
        "path": "2_Normalize",
        "type": "sentence_transformers.models.Normalize",
    },
]


@dataclass(frozen=True)
class SideFileFault:
    """An edit of one file; `edit` changes the document in place, or returns another."""

    model: str
    file: str
    name: str
    edit: Callable[[Any], Any]

    def plant(self, artifact: Artifact, directory: Path) -> Artifact:
        """Write a copy of an artifact with the fault."""
        shutil.copytree(artifact.path, directory)
        file = directory / self.file
        document = json.loads(file.read_text()) if file.is_file() else {}
        changed = self.edit(document)
        if changed is REMOVED:
            file.unlink()
        else:
            file.write_bytes(json_bytes(document if changed is None else changed))
        files = {n: r for n, r in artifact.manifest.files.items() if (directory / n).is_file()}
        commit_artifact(directory, artifact.manifest.model_copy(update={"files": files}))
        return Artifact.open(directory)

    def __str__(self) -> str:
        return f"{self.model}: {self.file}, {self.name}"


REMOVED = object()


def _set(**values: Any) -> Callable[[Any], None]:
    return lambda document: document.update(values)


def _drop(*keys: str) -> Callable[[Any], None]:
    def edit(document: Any) -> None:
        for key in keys:
            document.pop(key, None)

    return edit


def _rotated_labels(document: Any) -> None:
    labels = list(document["id2label"].values())
    document["id2label"] = {str(i): labels[i - 1] for i in range(len(labels))}
    document["label2id"] = {label: i for i, label in enumerate(document["id2label"].values())}


def _swapped(first: str, second: str) -> Callable[[Any], None]:
    """Exchange the ids of two tokens in tokenizer.json."""

    def edit(document: Any) -> None:
        vocab = document["model"]["vocab"]
        vocab[first], vocab[second] = vocab[second], vocab[first]

    return edit


def _in(*path: str, value: Any) -> Callable[[Any], None]:
    def edit(document: Any) -> None:
        for key in path[:-1]:
            document = document[key]
        document[path[-1]] = value

    return edit


def _unspecial(document: Any) -> None:
    for token in document["added_tokens"]:
        token["special"] = False


def _reversed_merges(document: Any) -> None:
    document["model"]["merges"] = document["model"]["merges"][::-1]


def _without_last_module(document: Any) -> Any:
    return document[:-1]


_TOKENIZER_CONFIG = {
    "cased": _set(do_lower_case=False),
    "accents kept": _set(strip_accents=False),
    "Chinese not split": _set(tokenize_chinese_chars=False),
    "limit of 8": _set(model_max_length=8),
    "cut on the left": _set(truncation_side="left"),
    "padded on the left": _set(padding_side="left"),
    "a word is special": _set(additional_special_tokens=["engine"]),
    "an added word": _set(
        added_tokens_decoder={
            "20": {
                "content": "the",
                "lstrip": False,
                "rstrip": False,
                "normalized": False,
                "single_word": False,
                "special": False,
            }
        }
    ),
    "of another class": _set(tokenizer_class="RobertaTokenizer"),
    "other padding token": _set(pad_token="[UNK]"),
}
_TOKENIZER = {
    "two words exchanged": _swapped("e", "s"),
    "no template": _set(post_processor=None),
    "short words only": _in("model", "max_input_chars_per_word", value=3),
    "no normalizer": _set(normalizer=None),
    "other splitter": _set(pre_tokenizer={"type": "WhitespaceSplit"}),
    "other prefix": _in("model", "continuing_subword_prefix", value="@@"),
}
_POOLING = {
    "first token": _set(pooling_mode_cls_token=True, pooling_mode_mean_tokens=False),
    "maximum": _set(pooling_mode_max_tokens=True, pooling_mode_mean_tokens=False),
    "two modes": _set(pooling_mode_max_tokens=True),
    "root of length": _set(pooling_mode_mean_sqrt_len_tokens=True, pooling_mode_mean_tokens=False),
    "last token": _set(pooling_mode_lasttoken=True, pooling_mode_mean_tokens=False),
    "weighted": _set(pooling_mode_weightedmean_tokens=True, pooling_mode_mean_tokens=False),
    "without the prompt": _set(include_prompt=False),
}
_GENERATION = {
    "another end": _set(eos_token_id=20),
    "three tokens": _set(max_new_tokens=3),
    "longer": _set(max_length=60),
    "repeats cost": _set(repetition_penalty=3.0),
    "no repeats": _set(no_repeat_ngram_size=1),
    "beams": _set(num_beams=3),
    "samples": _set(do_sample=True, temperature=5.0),
    "a word is forbidden": _set(bad_words_ids=[[30], [31], [32]]),
    "suppressed": _set(suppress_tokens=list(range(20, 120))),
    "a beginning": _set(min_new_tokens=15),
    "forced end": _set(forced_eos_token_id=21),
}
_IMAGES = {
    "not rescaled": _set(do_rescale=False),
    "other factor": _set(rescale_factor=1 / 127.5),
    "other mean": _set(image_mean=[0.1, 0.2, 0.3]),
    "other deviation": _set(image_std=[1.0, 0.2, 0.3]),
    "nearest": _set(resample=0),
    "bicubic": _set(resample=3),
    "not normalized": _set(do_normalize=False),
    "of another class": _set(image_processor_type="CLIPImageProcessor"),
    "not resized": _set(do_resize=False),
    "other size": _set(size={"height": 16, "width": 16}),
    "default mean": _drop("image_mean"),
}
_SOUNDS = {
    "other windows": _set(n_fft=256),
    "other hops": _set(hop_length=100),
    "other rate": _set(sampling_rate=8000),
    "shorter": _set(chunk_length=1),
    "other bands": _set(feature_size=40),
    "padded with ones": _set(padding_value=1.0),
    "of another class": _set(feature_extractor_type="Wav2Vec2FeatureExtractor"),
    "noise": _set(dither=1.0),
}


def _all(model: str, file: str, edits: dict[str, Callable[[Any], Any]]) -> list[SideFileFault]:
    return [SideFileFault(model, file, name, edit) for name, edit in edits.items()]


FAULTS = (
    *(
        fault
        for model in ("embedder", "classifier", "tagger")
        for fault in (
            *_all(model, "tokenizer_config.json", _TOKENIZER_CONFIG),
            *_all(model, "tokenizer.json", _TOKENIZER),
            SideFileFault(model, "config.json", "limit of 8", _set(max_position_embeddings=8)),
        )
    ),
    *_all("embedder", "1_Pooling/config.json", _POOLING),
    SideFileFault("embedder", "modules.json", "not normalized", _without_last_module),
    SideFileFault("embedder", "modules.json", "removed", lambda _: REMOVED),
    SideFileFault("embedder", "sentence_bert_config.json", "limit of 6", _set(max_seq_length=6)),
    SideFileFault("embedder", "sentence_bert_config.json", "cased", _set(do_lower_case=True)),
    SideFileFault(
        "embedder",
        "config_sentence_transformers.json",
        "a default prompt",
        _set(default_prompt_name="query"),
    ),
    SideFileFault(
        "embedder",
        "config_sentence_transformers.json",
        "another prompt",
        _set(prompts={"query": "passage: "}),
    ),
    SideFileFault("classifier", "config.json", "labels rotated", _rotated_labels),
    SideFileFault(
        "classifier",
        "config.json",
        "several labels",
        _set(problem_type="multi_label_classification"),
    ),
    SideFileFault("classifier", "config.json", "no labels", _drop("id2label", "label2id")),
    SideFileFault(
        "classifier", "config.json", "a label renamed", _in("id2label", "1", value="furious")
    ),
    SideFileFault("tagger", "config.json", "labels rotated", _rotated_labels),
    SideFileFault("tagger", "config.json", "a tag renamed", _in("id2label", "1", value="I-LOC")),
    *_all("decoder", "generation_config.json", _GENERATION),
    SideFileFault("decoder", "tokenizer.json", "merges reversed", _reversed_merges),
    SideFileFault("decoder", "tokenizer.json", "no decoder", _set(decoder=None)),
    SideFileFault("decoder", "tokenizer.json", "no special tokens", _unspecial),
    SideFileFault("decoder", "tokenizer_config.json", "a space", _set(add_prefix_space=True)),
    SideFileFault("decoder", "tokenizer_config.json", "limit of 4", _set(model_max_length=4)),
    SideFileFault(
        "decoder", "tokenizer_config.json", "cleaned up", _set(clean_up_tokenization_spaces=True)
    ),
    SideFileFault(
        "decoder", "tokenizer_config.json", "end as text", _set(split_special_tokens=True)
    ),
    SideFileFault("decoder", "config.json", "fewer positions", _set(n_positions=16)),
    *_all("vit", "preprocessor_config.json", _IMAGES),
    SideFileFault("vit", "config.json", "labels rotated", _rotated_labels),
    *_all("whisper", "preprocessor_config.json", _SOUNDS),
    SideFileFault("whisper", "generation_config.json", "another end", _set(eos_token_id=20)),
    SideFileFault(
        "whisper",
        "generation_config.json",
        "suppressed",
        _set(suppress_tokens=list(range(10, 200))),
    ),
    SideFileFault("whisper", "tokenizer.json", "merges reversed", _reversed_merges),
    SideFileFault("whisper", "tokenizer.json", "no special tokens", _unspecial),
    SideFileFault(
        "whisper",
        "tokenizer_config.json",
        "a word is special",
        _set(additional_special_tokens=["e"]),
    ),
)
MODELS = tuple(dict.fromkeys(fault.model for fault in FAULTS))


def _resaved_tokenizer(directory: Path) -> None:
    import transformers

    transformers.AutoTokenizer.from_pretrained(directory).save_pretrained(directory)


def _resaved_processor(directory: Path) -> None:
    import transformers

    name = "AutoImageProcessor" if "vit" in str(directory) else "AutoFeatureExtractor"
    options = {"use_fast": False} if "vit" in str(directory) else {}
    auto = getattr(transformers, name)
    auto.from_pretrained(directory, **options).save_pretrained(directory)


def _reordered(directory: Path) -> None:
    for file in directory.glob("*.json"):
        document = json.loads(file.read_text())
        if isinstance(document, dict) and file.name != "manifest.json":
            file.write_text(json.dumps(dict(reversed(document.items())), indent=7))


def _resaved_config(directory: Path) -> None:
    import transformers

    transformers.AutoConfig.from_pretrained(directory).save_pretrained(directory)


def _named(directory: Path) -> None:
    for file in directory.glob("tokenizer_config.json"):
        document = json.loads(file.read_text())
        file.write_bytes(json_bytes(document | {"name_or_path": "org/name", "remark": "mine"}))


def _escaped(directory: Path) -> None:
    for file in directory.glob("*.json"):
        if file.name != "manifest.json":
            file.write_text(json.dumps(json.loads(file.read_text()), ensure_ascii=True) + "\n\n")


def _with_defaults(directory: Path) -> None:
    import transformers

    config = transformers.AutoConfig.from_pretrained(directory)
    (directory / "config.json").unlink()  # it may be a link
    config.to_json_file(directory / "config.json", use_diff=False)


def _with_files(directory: Path) -> None:
    (directory / "README.md").write_text("# A model\n")
    (directory / ".gitattributes").write_text("*.onnx filter=lfs\n")
    (directory / "training_args.txt").write_text("epochs=3")


def _tokens_as_objects(directory: Path) -> None:
    file = directory / "tokenizer_config.json"
    document = json.loads(file.read_text())
    flags = {t["content"]: t for t in document["added_tokens_decoder"].values()}
    objects = {
        role: {"__type": "AddedToken", **flags[token]}
        for role, token in document.items()
        if role.endswith("_token") and isinstance(token, str) and token in flags
    }
    file.write_bytes(json_bytes({**document, **objects}))


SOUND = {
    "written in another order": (MODELS, _reordered),
    "tokenizer saved anew": (
        ("embedder", "classifier", "tagger", "decoder", "whisper"),
        _resaved_tokenizer,
    ),
    "processor saved anew": (("vit", "whisper"), _resaved_processor),
    "config saved anew": (MODELS, _resaved_config),
    "escaped": (MODELS, _escaped),
    "with defaults": (MODELS, _with_defaults),
    "with other files": (MODELS, _with_files),
    "tokens as objects": (
        ("embedder", "classifier", "tagger", "decoder", "whisper"),
        _tokens_as_objects,
    ),
    "named": (("embedder", "classifier", "tagger", "decoder", "whisper"), _named),
}
"""Changes without effect: the models, and what changes their directory in place."""


def change_soundly(name: str, artifact: Artifact, directory: Path) -> Artifact:
    """Write a copy of an artifact with a change without effect."""
    shutil.copytree(artifact.path, directory)
    SOUND[name][1](directory)
    commit_artifact(directory, artifact.manifest)
    return Artifact.open(directory)


def save_source(model: str, directory: Path) -> tuple[Path, str]:
    """Write one of the six models; return its directory and task."""
    tasks = {
        "embedder": ("bert", "feature-extraction"),
        "classifier": ("bert", "text-classification"),
        "tagger": ("bert", "token-classification"),
        "decoder": ("gpt2", "text-generation-with-past"),
        "vit": ("vit", "image-classification"),
    }
    if model == "whisper":
        return save_whisper(directory), "automatic-speech-recognition-with-past"
    kind, task = tasks[model]
    save_tiny(kind, task, directory)
    if model == "embedder":
        files = {
            "modules.json": MODULES,
            "1_Pooling/config.json": {
                "word_embedding_dimension": 32,
                "pooling_mode_cls_token": False,
                "pooling_mode_mean_tokens": True,
            },
            "sentence_bert_config.json": {"max_seq_length": 64, "do_lower_case": False},
            "config_sentence_transformers.json": {
                "prompts": {"query": "query: "},
                "default_prompt_name": None,
            },
        }
        for name, document in files.items():
            (directory / name).parent.mkdir(exist_ok=True)
            (directory / name).write_bytes(json_bytes(document))
    return directory, task


def answers(model: str, artifact: Artifact) -> Any:
    """Return what `load_model` answers to raw inputs; the message of an error is an answer."""
    try:
        with load_model(artifact.path) as loaded:
            if model == "embedder":
                queries = None
                with suppress(EngineryError):
                    queries = np.round(loaded.embed(list(TEXTS), prompt_name="query"), 4).tolist()
                return [np.round(loaded.embed(list(TEXTS)), 4).tolist(), queries]
            if model == "classifier":
                return repr(loaded.classify([*TEXTS, PAIR]))
            if model == "tagger":
                return repr(loaded.tag(list(TEXTS)))
            if model == "decoder":
                return repr(loaded.generate(["The engine", TEXTS[1]]))
            if model == "vit":
                return repr(loaded.classify_images(synthetic_images(3)))
            return repr(loaded.generate(synthetic_sounds(16_000, 2)))
    except EngineryError as error:
        return error.message
