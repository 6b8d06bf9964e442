"""Requests to an exported ensemble, and their outputs beside the results of load_model."""

import json
import math

import numpy as np

from enginery import load_model
from tests.deploy.triton_repository import texts
from tests.tolerances import OUTPUTS, SCORES

ASKED = ["The engine is warm.", "Marie Curie lived in Paris, not far from the Seine.", "Rain."]
CONTEXT = " ".join(["The pump runs. The cat sleeps on the boat."] * 12)


def check_answers(artifact, infer, atol=OUTPUTS):
    """Assert that a request of three texts has the results of load_model.

    Args:
        artifact: an artifact of a text task.
        infer: returns the ensemble's outputs for its inputs.
        atol: absolute tolerance for vectors.
    """
    task = artifact.manifest.task
    asked, inputs = task_inputs(task)
    results = answers(task, infer(inputs))
    with load_model(artifact) as model:
        wanted = expected(task, model, asked)
    if task == "feature-extraction":
        assert results.dtype == np.float32
        np.testing.assert_allclose(results, wanted, atol=atol)
    else:
        assert close(results, wanted)


def answers(task, outputs):
    """Return the outputs of the server as values of the library's results."""
    if task == "feature-extraction":
        return outputs["embedding"]
    if task in ("token-classification", "fill-mask"):
        (column,) = outputs.values()
        return [json.loads(text) for text in column]
    names = "answer" if task == "question-answering" else "label"
    rows = zip(outputs[names], outputs["score"], strict=True)
    return [[(text.decode(), score) for text, score in zip(*row, strict=True)] for row in rows]


def expected(task, model, inputs):
    if task == "feature-extraction":
        return model.embed(inputs)
    if task == "token-classification":
        return [[span.to_dict() for span in spans] for spans in model.tag(inputs)]
    if task == "fill-mask":
        return [filled.to_dict() for filled in model.fill(inputs)]
    if task == "question-answering":
        return [[(a.text, a.score) for a in row] for row in model.answer(inputs)]
    return [[(x.label, x.score) for x in row.labels] for row in model.classify(inputs)]


def close(values, wanted):
    """Return True for equal results, with tolerances for the padding of other batches."""
    if isinstance(wanted, dict):
        return values.keys() == wanted.keys() and all(close(values[k], wanted[k]) for k in wanted)
    if isinstance(wanted, list | tuple):
        return len(values) == len(wanted) and all(map(close, values, wanted))
    if isinstance(wanted, float):
        return math.isclose(values, wanted, abs_tol=SCORES)
    return values == wanted


def task_inputs(task):
    """Return the inputs of a task for load_model, and those for Triton."""
    if task == "question-answering":
        asked = [("Who runs?", CONTEXT), ("Where?", "In Paris."), ("Who?", "A cat.")]
        questions, contexts = zip(*asked, strict=True)
        return asked, {"question": texts(questions), "context": texts(contexts)}
    asked = [f"{text} [MASK]" for text in ASKED] if task == "fill-mask" else ASKED
    return asked, {"text": texts(asked)}
