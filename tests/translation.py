"""Directories of slow tokenizers, whose sentencepiece models are trained here on real texts.

    save_tokenizer("marian", tmp_path / "marian")    # source.spm, target.spm, vocab.json, …

`TEXTS` are ordinary texts, and `HOSTILE` ones are unlikely to be typed by anyone.
"""

from __future__ import annotations

import ast
import inspect
import io
import json
import random
import re
import sysconfig
import unicodedata
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np

GERMAN = [
    "Der Motor ist warm, die Pumpe läuft wieder. Über die Brücke in Köln fährt kein Zug.",
    "Größe, Straße, Maß: süß und weiß sind die Füße, sagt Jürgen. Äpfel und Öl im Übermut!",
]
FRENCH = [
    "Le moteur est chaud et la pompe tourne. Où est la clé du bateau ? Elle est tombée à l'eau.",
    "Ça coûte cher, cœur naïf ; Noël, une œuvre, le garçon et « la forêt » près de l'hôtel.",
]
ASIAN = [
    "引擎已经热了，泵又开始运转。谁建造了这座桥？",
    "私は学生です。橋を建てたのは誰ですか。",
    "엔진이 따뜻하고 펌프가 다시 작동합니다.",
]
OTHERS = [
    "Двигатель прогрет, насос снова работает. Кто построил мост через реку?",
    "Ο κινητήρας είναι ζεστός και η αντλία δουλεύει ξανά.",
    "المحرك دافئ والمضخة تعمل مرة أخرى.",
    "इंजन गर्म है और पंप फिर से चल रहा है।",
    "เครื่องยนต์อุ่นแล้ว น้ำ",
    "Động cơ đã nóng và máy bơm chạy lại.",
]


@cache
def docstrings() -> list[str]:
    """Paragraphs of the documentation of the standard library and of numpy."""
    library = Path(sysconfig.get_paths()["stdlib"])
    names = ("argparse", "pathlib", "subprocess", "typing", "zipfile", "statistics", "difflib")
    trees = [ast.parse((library / f"{name}.py").read_text()) for name in names]
    kinds = (ast.FunctionDef, ast.ClassDef, ast.Module)
    found = [ast.get_docstring(n) for tree in trees for n in ast.walk(tree) if isinstance(n, kinds)]
    arrays = [getattr(np, name) for name in ("sort", "einsum", "pad", "sum", "unique", "where")]
    found += [inspect.getdoc(function) for function in arrays]
    paragraphs = [" ".join(p.split()) for text in found if text for p in text.split("\n\n")]
    # Segmentations of `=====` that are equally probable may be rounded to either.
    return [re.sub(r"(\W)\1{3,}", r"\1\1\1", p) for p in paragraphs if len(p) > 10]


def _random_texts(kind: str, count: int) -> list[str]:
    chosen = random.Random(kind)
    pools = {
        "ascii": [chr(c) for c in range(32, 127)],
        "latin": [chr(c) for c in range(1, 0x250)],
        "any": [chr(c) for c in range(1, 0xD800)],
        "mixed": ["ba", "ß", "漢", "字", "é", " ", "the ", "ing", "я", "🙂", "..", "ー", "ﬁ"],
    }
    return ["".join(chosen.choices(pools[kind], k=16)) for _ in range(count)]


TEXTS = [
    *GERMAN,
    *FRENCH,
    *ASIAN,
    *OTHERS,
    "  a   b  ",
    "\t\n x\n\ny\r\nz ",
    "",
    "   ",
    "It's 12:30, 3.5% of £1,000 – isn't it? ada@example.com",
    "ＦＵＬＬ ｗｉｄｔｈ, ﬁne, ½ and x² ™ ㎏ Ⅷ",
    "Thanks 🙂🎉 ❤️ 👩‍👩‍👧‍👦 🏳️‍🌈 1️⃣ 🇫🇷🇩🇪",
    "Donaudampfschifffahrtsgesellschaftskapitän " * 3,
    "ß",
    "漢字 ab 漢",
]
HOSTILE = {
    "decomposed": [
        unicodedata.normalize("NFD", text) for text in (*GERMAN, *FRENCH, *ASIAN, *OTHERS)
    ],
    "marks": ["\u0301", "\u0301abc", "a \u0308 b", "\u0e33", "\u200d", "\ufe0f", "ﾊﾞﾅﾅ ｶﾞ ﾊﾟ"],
    "controls": [
        "a\x00b",
        "a\x01\x02b\x7f",
        "\u200bf\ufefe\ufeff",
        "\x85x\u2028y",
        "\ue000a\ue001",
    ],
    "spaces": ["▁", "a▁b ▁ c▁", "\u3000x\u00a0", "▁ b", "\u00a8a"],
    "long": ["a" * 999, "ab" * 500, "the" * 400, "漢" * 300, " ".join("a" * 300), "🙂" * 99],
    "special": ["<s> hi </s>", "a</s>b", "<unk><pad>x", " </s> x </s> y", "<mask>", "__fr__ x"],
    "normalized": ["＜/s＞ ＜unk＞ x", "＞＞fra＜＜ x", "＜ｐａｄ＞"],
    "codes": [
        ">>fra<< Hello",
        ">>fra<<Hello",
        ">>deu_Latn<<  Hello ",
        ">>nowhere<< Hello",
        ">>a\nb<< x",
        ">>fra<<",
        ">>xyz<<",
        ">>fra<<  ",
        " >>fra<< x",
        "see >>fra<< x",
        ">>fra<< >>fra<< x",
        ">>fra<<漢字",
        ">>",
        "<<>> >>",
        ">><<x",
        ">>fra<</s>>>fra<<x",
        "</s>>>fra<< y",
        ">>ｆｒａ<< x",
    ],
    "random": [
        text for kind in ("ascii", "latin", "any", "mixed") for text in _random_texts(kind, 60)
    ],
}


def train(
    texts: list[str], path: Path, *, kind: str = "unigram", size: int, **options: Any
) -> None:
    """Train a sentencepiece model."""
    from sentencepiece import SentencePieceTrainer

    model = io.BytesIO()
    SentencePieceTrainer.train(
        sentence_iterator=iter(texts),
        model_writer=model,
        model_type=kind,
        vocab_size=size,
        num_threads=1,
        minloglevel=2,
        **options,
    )
    path.write_bytes(model.getvalue())


def pieces(path: Path) -> list[str]:
    """The pieces of a sentencepiece model that texts are segmented into."""
    from sentencepiece import SentencePieceProcessor

    model = SentencePieceProcessor(model_file=str(path))
    named = [model.id_to_piece(i) for i in range(len(model))]
    return [p for i, p in enumerate(named) if not (model.is_control(i) or model.is_unknown(i))]


def save_tokenizer(kind: str, directory: Path, **settings: Any) -> Path:
    """Save a slow tokenizer: marian, m2m100, m2m100-bpe, t5, pegasus, mbart, mbart50 or nllb."""
    import transformers

    directory.mkdir(parents=True)
    texts = [*docstrings(), *(GERMAN + FRENCH) * 5, *ASIAN * 2]
    if kind == "marian":
        # The source model has no Asian characters; those of the target are in vocab.json.
        source, target = directory / "source.spm", directory / "target.spm"
        train([*docstrings(), *GERMAN * 9], source, size=900)
        train([*docstrings()[::4], *FRENCH * 9, *ASIAN * 9], target, size=600)
        shared = list(dict.fromkeys(pieces(source) + pieces(target)))
        random.Random(0).shuffle(shared)
        tokens = ["</s>", "<unk>", *shared, ">>fra<<", ">>deu_Latn<<", "<pad>"]
    elif kind.startswith("m2m100"):
        model = directory / "sentencepiece.bpe.model"
        train(texts, model, kind="bpe" if kind == "m2m100-bpe" else "unigram", size=900)
        tokens = ["<s>", "<pad>", "</s>", "<unk>", *reversed(pieces(model))]
        codes = transformers.models.m2m_100.tokenization_m2m_100.FAIRSEQ_LANGUAGE_CODES["m2m100"]
        settings.setdefault("additional_special_tokens", [f"__{code}__" for code in codes])
    else:
        tokens = []
        file = "spiece.model" if kind in ("t5", "pegasus") else "sentencepiece.bpe.model"
        ids = {"pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1} if "spiece" in file else {}
        train(texts, directory / file, kind="bpe" if kind == "nllb" else "unigram", size=900, **ids)
        settings["vocab_file"] = str(directory / file)
    if tokens:
        vocabulary = {token: i for i, token in enumerate(tokens)}
        (directory / "vocab.json").write_text(json.dumps(vocabulary))
    if kind == "marian":
        # Published models have little more.
        (directory / "tokenizer_config.json").write_text(json.dumps({"source_lang": "eng"}))
        (directory / "config.json").write_text(json.dumps({"model_type": "marian"}))
        return directory
    if tokens:
        settings |= {"vocab_file": str(directory / "vocab.json"), "spm_file": str(model)}
    name = {
        "m2m100": "M2M100Tokenizer",
        "m2m100-bpe": "M2M100Tokenizer",
        "mbart": "MBartTokenizer",
        "mbart50": "MBart50Tokenizer",
        "nllb": "NllbTokenizer",
        "pegasus": "PegasusTokenizer",
        "t5": "T5Tokenizer",
    }[kind]
    getattr(transformers, name)(**settings).save_pretrained(directory)
    return directory
