"""Both sides of the comparison: transformers' pipelines, and `load_model`.

Each side turns a raw input into an answer: scores by what they are scores of, a vector, or a text.
Nothing of enginery prepares an input of the pipelines, or reads one of their results.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tests.answers import inputs
from tests.answers.models import Case
from tests.sounds import RATE

Answer = Any
"""Scores by what they are of, float32 (dim,), or a text."""
_NEW_TOKENS = 10
_SCORE, _DISTANCE = 1e-4, 1e-4
"""How far a score, and a vector as a share of its length, may be from the pipeline's."""


def raw_inputs(case: Case, folder: Path) -> list[Any]:
    """Return the 20 raw inputs of a case, as `load_model` takes them."""
    if case.task.startswith("image"):
        return inputs.images(folder)
    if case.task.startswith(("audio", "automatic")):
        return [(samples, RATE) for samples in inputs.recordings()]
    return list(
        {
            "text-classification": (*inputs.TEXTS[:16], *inputs.PAIRS),
            "question-answering": inputs.QUESTIONS,
            "fill-mask": inputs.MASKED,
            "text-generation-with-past": inputs.PROMPTS,
            "text2text-generation-with-past": inputs.PROMPTS,
        }.get(case.task, inputs.TEXTS)
    )


# -- transformers -----------------------------------------------------------------------------


def pipeline_answers(case: Case, directory: Path) -> Callable[[Any], Answer]:
    """Return what transformers' pipeline for the task answers to one raw input."""
    import torch
    import transformers

    task = {
        "image-to-text-with-past": "image-to-text",
        "text-generation-with-past": "text-generation",
        "text2text-generation-with-past": "text2text-generation",
        "automatic-speech-recognition-with-past": "automatic-speech-recognition",
    }.get(case.task, case.task)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        pipeline = transformers.pipeline(task, model=str(directory), device="cpu")
    read = {
        "text-classification": _classify,
        "token-classification": _tag,
        "question-answering": _answer,
        "fill-mask": _fill,
        "feature-extraction": _embed,
        "image-classification": _classify_images,
        "image-to-text": _read_image,
        "audio-classification": _classify_sounds,
        "automatic-speech-recognition": _transcribe,
        "text-generation": _continue,
        "text2text-generation": _translate,
    }[task]

    def answer(raw: Any) -> Answer:
        with warnings.catch_warnings(), torch.no_grad():
            warnings.simplefilter("ignore")
            return read(pipeline, raw, case)

    return answer


def _labels(results: Iterable[Any]) -> dict[Any, float]:
    return {result["label"]: result["score"] for result in results}


def _classify(pipeline: Any, raw: Any, _case: Case) -> Answer:
    item = {"text": raw} if isinstance(raw, str) else {"text": raw[0], "text_pair": raw[1]}
    return _labels(pipeline([item], top_k=None, truncation=True)[0])


def _tag(pipeline: Any, raw: Any, case: Case) -> Answer:
    spans = pipeline(raw, aggregation_strategy=case.options.get("aggregation", "simple"))
    label = "entity" if case.options.get("aggregation") == "none" else "entity_group"
    return {(span[label], span["start"], span["end"]): float(span["score"]) for span in spans}


def _answer(pipeline: Any, raw: Any, _case: Case) -> Answer:
    found = pipeline(question=raw[0], context=raw[1], top_k=3)
    found = found if isinstance(found, list) else [found]
    return {(answer["start"], answer["end"]): answer["score"] for answer in found}


def _fill(pipeline: Any, raw: Any, _case: Case) -> Answer:
    masks = pipeline(raw.replace("{mask}", pipeline.tokenizer.mask_token), top_k=5)
    masks = masks if isinstance(masks[0], list) else [masks]
    return {
        (index, token["token"]): token["score"]
        for index, mask in enumerate(masks)
        for token in mask
    }


def _embed(pipeline: Any, raw: Any, case: Case) -> Answer:
    """Pool the vectors of the tokens, as sentence-transformers does."""
    limits = {"max_length": 32} if case.pooling else {}
    tokens = np.asarray(
        pipeline(raw, tokenize_kwargs={"truncation": True, **limits})[0], np.float32
    )
    if not len(tokens):
        raise ValueError("no tokens")
    if not case.pooling:
        return tokens.mean(0)
    vector = {"mean": tokens.mean(0), "cls": tokens[0], "lasttoken": tokens[-1]}[case.pooling]
    return vector / np.linalg.norm(vector)


def _classify_images(pipeline: Any, raw: Any, _case: Case) -> Answer:
    return _labels(pipeline(raw, top_k=20))


def _classify_sounds(pipeline: Any, raw: Any, _case: Case) -> Answer:
    return _labels(pipeline({"raw": raw[0], "sampling_rate": raw[1]}, top_k=20))


def _transcribe(pipeline: Any, raw: Any, case: Case) -> Answer:
    options: dict[str, Any] = {}
    if case.kind == "whisper":
        options["generate_kwargs"] = _generation(case)
    return pipeline({"raw": raw[0], "sampling_rate": raw[1]}, **options)["text"]


def _read_image(pipeline: Any, raw: Any, case: Case) -> Answer:
    return pipeline(raw, generate_kwargs=_generation(case))[0]["generated_text"]


def _continue(pipeline: Any, raw: Any, case: Case) -> Answer:
    # The pipeline cleans spaces up whatever the tokenizer's setting is, which `decode` follows.
    cleans = pipeline.tokenizer.clean_up_tokenization_spaces
    options = {"return_full_text": False, "clean_up_tokenization_spaces": cleans}
    return pipeline(raw, **options, **_generation(case))[0]["generated_text"]


def _translate(pipeline: Any, raw: Any, case: Case) -> Answer:
    return pipeline(raw, **_generation(case))[0]["generated_text"]


def _generation(case: Case) -> dict[str, Any]:
    """Return the options of `generate`; the pipelines have other defaults than the models."""
    plain = {"max_new_tokens": _NEW_TOKENS, "do_sample": False, "num_beams": 1}
    return {**plain, **case.options}


# -- enginery ---------------------------------------------------------------------------------


def model_answers(case: Case, model: Any, raws: Sequence[Any]) -> list[Answer]:
    """Return what a loaded model answers to raw inputs in one call."""
    if case.task in ("text-classification", "image-classification", "audio-classification"):
        return [
            {label.label: label.score for label in result.labels}
            for result in getattr(model, model.method)(raws)
        ]
    if case.task == "token-classification":
        options = {"aggregation": "simple", **case.options}
        return [
            {(span.label, span.start, span.end): span.score for span in spans}
            for spans in model.tag(raws, **options)
        ]
    if case.task == "question-answering":
        return [
            {(answer.start, answer.end): answer.score for answer in answers}
            for answers in model.answer(raws, top_k=3)
        ]
    if case.task == "fill-mask":
        mask = model.definition.tokenizer.mask_token
        return [
            {
                (index, filling.token_id): filling.score
                for index, fillings in enumerate(result.masks)
                for filling in fillings
            }
            for result in model.fill([raw.replace("{mask}", mask) for raw in raws])
        ]
    if case.task == "feature-extraction":
        return list(model.embed(raws))
    if case.task == "automatic-speech-recognition":
        return [result.text for result in model.transcribe(raws)]
    options = {"max_new_tokens": _NEW_TOKENS, **case.options}
    return [result.text for result in model.generate(raws, batch_size=len(raws), **options)]


# -- the comparison ---------------------------------------------------------------------------


def difference(answer: Answer, expected: Answer) -> str:
    """Return how an answer differs from the pipeline's; empty if it is equal."""
    if isinstance(expected, str):
        return "" if answer == expected else f"{answer!r}, pipeline {expected!r}"
    if isinstance(expected, np.ndarray):
        if answer.shape != expected.shape:
            return f"{answer.shape} numbers, pipeline {expected.shape}"
        distance = float(np.linalg.norm(answer - expected) / np.linalg.norm(expected))
        return "" if distance <= _DISTANCE else f"{distance:.2g} of its length apart"
    for key in sorted({*answer, *expected}, key=str):
        # Of the best few, the last ones may be near ties with others that are left out.
        score = answer.get(key, min(answer.values(), default=0.0))
        wanted = expected.get(key, min(expected.values(), default=0.0))
        absent = key not in answer or key not in expected
        if (absent and len(answer) != len(expected)) or not abs(score - wanted) <= _SCORE:
            return f"{key}: {answer.get(key)}, pipeline {expected.get(key)}"
    return ""
