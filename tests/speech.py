"""A tiny Whisper with a tokenizer whose special tokens are those of the real models.

save_whisper(directory)                         # four languages, two tasks
save_whisper(directory, multilingual=False)     # English only
save_whisper(directory, time_stamps=True)       # with the tokens of time stamps
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from enginery.core.json_file import json_bytes, read_json
from tests.tiny import TEXT

LANGUAGES = ("en", "zh", "fr", "haw")
_END, _START = "<|endoftext|>", "<|startoftranscript|>"
_TASKS = ("translate", "transcribe")
_STAMPED_LENGTH = 64
"""Tokens of a window with time stamps."""


def save_whisper(
    directory: Path, *, multilingual: bool = True, time_stamps: bool = False, **generation: Any
) -> Path:
    """Write the model, its feature extractor, tokenizer and generation_config.json.

    Args:
        directory: where to write.
        multilingual: with languages and tasks; else English only.
        time_stamps: with tokens of time stamps, one of which follows some words of a text.
        generation: fields of generation_config.json in place of the usual ones; None removes one.
    """
    import torch
    import transformers

    directory.mkdir(parents=True, exist_ok=True)
    tokenizer = save_tokenizer(directory, multilingual=multilingual, time_stamps=time_stamps)
    transformers.WhisperFeatureExtractor(feature_size=8).save_pretrained(directory)
    ids = tokenizer.get_vocab()
    config = transformers.WhisperConfig(
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=32,
        decoder_ffn_dim=32,
        num_mel_bins=8,
        max_target_positions=_STAMPED_LENGTH if time_stamps else 40,
        vocab_size=len(tokenizer),
        pad_token_id=ids[_END],
        bos_token_id=ids[_END],
        eos_token_id=ids[_END],
        decoder_start_token_id=ids[_START],
        init_std=0.5,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = transformers.WhisperForConditionalGeneration(config).eval()
        if time_stamps:
            _balance(model, ids)
        model.save_pretrained(directory)
    values = {
        "max_length": config.max_target_positions,
        "is_multilingual": multilingual,
        "no_timestamps_token_id": ids["<|notimestamps|>"],
        "suppress_tokens": [ids["a"], ids["e"], ids[_START]],
        "begin_suppress_tokens": [ids["Ġ"], ids[_END]],
    }
    if time_stamps:
        values["max_initial_timestamp_index"] = 50
    if multilingual:
        values["lang_to_id"] = {f"<|{code}|>": ids[f"<|{code}|>"] for code in LANGUAGES}
        values["task_to_id"] = {task: ids[f"<|{task}|>"] for task in _TASKS}
    file = directory / "generation_config.json"
    # With that mark, transformers makes the values from config.json anew.
    document = {**read_json(file), "_from_model_config": None, **values, **generation}
    file.write_bytes(json_bytes({k: v for k, v in document.items() if v is not None}))
    return directory


def _balance(model: Any, ids: dict[str, int]) -> None:
    """Make time stamps, of which there are many more than words, and ends as rare as in use."""
    import torch

    decoder, stamps = model.model.decoder, ids["<|notimestamps|>"] + 1
    with torch.no_grad():
        # All states have a part in this direction, so that it makes tokens more or less probable.
        direction = torch.nn.functional.normalize(torch.randn(32), dim=0)
        decoder.layer_norm.bias += direction
        table = decoder.embed_tokens.weight
        table -= (table @ direction)[:, None] * direction
        table[stamps:] *= 0.4
        table[stamps:] -= 5.0 * direction
        table[ids[_END]] += 2.0 * direction


def save_tokenizer(directory: Path, *, multilingual: bool = True, time_stamps: bool = False) -> Any:
    """Save a byte-level BPE with Whisper's special tokens behind it, in their order."""
    import transformers
    from tokenizers import AddedToken, Tokenizer, models, pre_tokenizers, trainers

    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=300, show_progress=False, initial_alphabet=alphabet)
    bpe.train_from_iterator(TEXT, trainer)
    vocabulary, merges = (Path(file) for file in bpe.model.save(str(directory)))
    words = read_json(vocabulary)
    vocabulary.write_bytes(json_bytes({**words, _END: len(words)}))
    tokenizer = transformers.WhisperTokenizerFast(
        str(vocabulary), str(merges), unk_token=_END, bos_token=_END, eos_token=_END
    )
    tokenizer.pad_token = _END
    specials = [_START, "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", "<|notimestamps|>"]
    if multilingual:
        specials[1:1] = [*(f"<|{code}|>" for code in LANGUAGES), *(f"<|{t}|>" for t in _TASKS)]
    tokenizer.add_special_tokens({"additional_special_tokens": specials})
    if time_stamps:
        stamps = [AddedToken(f"<|{index / 50:.2f}|>", special=False) for index in range(1501)]
        tokenizer.add_tokens(stamps)
    tokenizer.save_pretrained(directory)
    return tokenizer
