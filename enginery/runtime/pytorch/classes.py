"""Choose the class of transformers that loads a model for its features.

The Auto class has one class for each model type. It would leave out the projections of CLIP's
towers, take DPR's question encoder for each of DPR's models, and ask a T5 encoder for a decoder.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_MAPPING_NAMES

from enginery.core.model.files import ModelConfig, module_kinds

_T5_ENCODERS = {"t5": "T5EncoderModel", "mt5": "MT5EncoderModel"}
"""Model types of which sentence-transformers loads the encoder alone; source: its
`models/Transformer.py`."""


def feature_class(path: Path, config: Any) -> Any | None:
    """Return the encoder's class that config.json names; None for the Auto class.

    Another class, such as BertForMaskedLM, has a head for a task: the Auto class loads what is
    below it. Of sentence-transformers' T5 models it is the encoder, whatever config.json names.

    Args:
        path: the model's directory.
        config: its config, as transformers reads it.
    """
    names = tuple(config.architectures or ())[:1]
    if config.model_type in _T5_ENCODERS and "Transformer" in module_kinds(path):
        names = (_T5_ENCODERS[config.model_type],)
    if not ModelConfig(architectures=names).names_encoder:
        return None
    named: Any = getattr(transformers, names[0], None)
    # A model's own code is not one of transformers' classes.
    is_class = isinstance(named, type) and issubclass(named, PreTrainedModel)
    settings: Any = getattr(named, "config_class", None)
    if not is_class or not isinstance(config, settings) or named is default_class(config):
        return None
    return named


def default_class(config: Any) -> Any | None:
    """Return the class that the Auto class loads; None for a type that it does not know."""
    return getattr(transformers, str(MODEL_MAPPING_NAMES.get(config.model_type)), None)
