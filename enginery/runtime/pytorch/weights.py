"""Change the weights of a PyTorch model after it was loaded.

Files of transformers 5 may tie the head by other rules than version 4, a LogitScore module makes a
classifier of a language model, and FP64 weights of a large model exist only while they are used.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch.overrides import TorchFunctionMode

from enginery.core.errors import ExportError
from enginery.core.model.files import LogitScoreConfig


def restore_head(model: Any, path: Path, missing: Iterable[str]) -> set[str]:
    """Tie or untie the output embeddings as transformers 5 does: by what the files have.

    Version 5 ties them if the files have one of the two matrices, or the same twice. Version 4
    follows `tie_word_embeddings` alone: it would replace the head of a file by the embeddings.

    Args:
        model: a model that version 4 has loaded from files of version 5.
        path: the model's directory.
        missing: the names of weights that the files lack.

    Returns:
        The names of weights that were missing and are tied now.
    """
    try:
        head, embeddings = model.get_output_embeddings(), model.get_input_embeddings()
    except (AttributeError, NotImplementedError):  # a model without tokens
        return set()
    names = [name for name, module in model.named_modules() if module is head]
    if head is None or embeddings is None or not names:
        return set()
    weight = f"{names[0]}.weight"
    if weight in missing:
        if head.weight.shape != embeddings.weight.shape:
            return set()
        head.weight = embeddings.weight
        return {weight}
    for name, parameter in head.named_parameters():  # BERT's bias is tied, too
        own = _tensor(path, f"{names[0]}.{name}")
        if own is not None and own.shape == parameter.shape:
            # In the type of the model's own parameter, and on its device.
            own = own.to(parameter)
            if not torch.equal(own, parameter):
                setattr(head, name, torch.nn.Parameter(own, requires_grad=False))
    return set()


def _tensor(path: Path, name: str) -> Any:
    """Return a tensor of the safetensors files in a directory; None if none has it."""
    for file in sorted(path.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            if name in tensors.keys():  # noqa: SIM118  safetensors' handle, not a dict
                return tensors.get_tensor(name)
    return None


RERANKER_LABELS = 1
"""Labels of the classifier that a LogitScore module makes of a language model."""


def as_classifier(language_model: Any, classes: Any, score: LogitScoreConfig) -> Any:
    """Turn a language model into the classifier with one label that scores as LogitScore does.

    The difference of two logits is a linear layer over the last token's state, whose weight is the
    difference of two rows of the language model's head.

    Args:
        language_model: the model with its head.
        classes: the Auto class of classifiers.
        score: the tokens whose logits are read.

    Raises:
        ExportError: transformers has no classifier for the model's type, or the head lacks a token.
    """
    head = language_model.get_output_embeddings()
    tokens = [score.true_token_id]
    if score.false_token_id is not None:
        tokens.append(score.false_token_id)
    if head is None:
        problem = "has no head"
    elif head.bias is not None:
        problem = "has a head with a bias, which is not supported"
    elif max(tokens) >= len(head.weight):
        problem = f"has {len(head.weight)} tokens"
    else:
        problem = ""
    if problem:
        raise ExportError(
            f"the LogitScore module reads the logits of the tokens {tokens}, but "
            f"{type(language_model).__name__} {problem}."
        )
    config = language_model.config
    config.num_labels = RERANKER_LABELS
    # Without memory: its layers are replaced by the language model's.
    with torch.device("meta"):
        model = classes.from_config(config)
    prefix = model.base_model_prefix
    if not hasattr(model, "score") or not hasattr(language_model, prefix):
        raise ExportError(
            f"{type(model).__name__} has another layout than {type(language_model).__name__}, so "
            "its LogitScore module cannot become a classifier."
        )
    # One label, whose logit is that of the true token, less that of the false one if it is read.
    rows = head.weight.detach()[tokens]
    weight = rows[:1] - rows[1:] if len(tokens) > 1 else rows[:1]
    setattr(model, prefix, getattr(language_model, prefix))
    model.score = torch.nn.Linear(rows.shape[1], 1, bias=False, dtype=rows.dtype)
    model.score.weight = torch.nn.Parameter(weight.clone())
    return model


class UpcastWeights(TorchFunctionMode):  # type: ignore[misc]  # torch is not type-checked
    """A context manager that upcasts FP32 weights to FP64 as each operation uses them.

    Outputs equal those of `model.double()`. It saves memory, because only the weights of one
    operation are in FP64 at a time, but converts every weight again in every run.
    """

    def __init__(self, model: Any) -> None:
        super().__init__()
        weights = (*model.parameters(), *model.buffers())
        # By identity, because comparing tensors compares their values.
        self._narrow = {id(tensor) for tensor in weights if tensor.dtype == torch.float32}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        """Call a torch function, or read an attribute of a tensor, with upcast weights."""
        if getattr(func, "__name__", "") == "__get__":
            # Reading an attribute needs no values. Report float64 as the dtype of upcast weights.
            is_dtype = func.__self__ is torch.Tensor.dtype
            return torch.float64 if is_dtype and id(args[0]) in self._narrow else func(*args)
        return func(*self._upcast(args), **self._upcast(kwargs or {}))

    def _upcast(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return value.double() if id(value) in self._narrow else value
        # Exactly these types: a subclass such as a named tuple has another constructor.
        if type(value) in (list, tuple):
            return type(value)(self._upcast(item) for item in value)
        if type(value) is dict:
            return {key: self._upcast(item) for key, item in value.items()}
        return value
