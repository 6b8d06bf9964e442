"""Read a model's config.json as the installed transformers understands it.

    loaded = load_config(path, trust_remote_code=False)
    loaded.config, loaded.notes

transformers 5 saves settings under other names than transformers 4 reads, and 4 keeps what it does
not read as an attribute without a word. A base of rotary positions under `rope_parameters`, for
example, would be replaced by 10,000. Such settings are translated, and those that version 4 cannot
express are refused. `transformers5.json` has the keys of version 5 that version 4 does not read,
with their defaults, for all model types that both know; tests/transformers5/keys.py writes it.

A config that the installed version saved itself is read unchanged.
"""

from __future__ import annotations

import inspect
import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any

from enginery.core.errors import SourceError
from enginery.core.json_file import read_json
from enginery.core.model.files import ModelConfig
from enginery.core.scratch import temporary_directory

Document = dict[str, Any]

_ROPE = "rope_parameters"
_NO_EFFECT = frozenset(
    {
        # training
        "aux_loss_alpha",
        "gradient_checkpointing",
        "initializer_factor",
        "initializer_range",
        "num_nextn_predict_layers",
        "output_router_logits",
        "pretraining_tp",
        "router_aux_loss_coef",
        # which of several equal implementations is used
        "use_associative_scan",
        "use_cache",
        "use_mamba_kernels",
        "use_mambapy",
        # a backbone's, where version 4 has no backbone of the type
        "apply_layernorm",
        "out_features",
        "out_indices",
        "reshape_hidden_states",
        "stage_names",
    }
)
"""Keys that change no answer."""
_BOOKKEEPING = frozenset(
    {
        "architectures",
        "auto_map",
        "dtype",
        "model_type",
        "quantization_config",
        "rope_parameters",
        "torch_dtype",
        "transformers_version",
        "transformers.js_config",
    }
)
"""Keys that are read outside of a model's class, or here."""
_RENAMED = {
    "qwen3_moe": {"num_local_experts": "num_experts"},
    "qwen3_vl_moe_text": {"num_local_experts": "num_experts"},
    "videomae": {"qv_bias": "qkv_bias"},
    "vipllava": {"vision_feature_layer": "vision_feature_layers"},
}
"""Keys that version 4 reads under another name, by model type."""
_SCALING = frozenset(
    {
        "attention_factor",
        "beta_fast",
        "beta_slow",
        "factor",
        "high_freq_factor",
        "long_factor",
        "low_freq_factor",
        "mscale",
        "mscale_all_dim",
        "original_max_position_embeddings",
        "short_factor",
        "truncate",
    }
)
"""Parameters of scaled rotary positions."""
_REFUSED = {
    "granitemoehybrid": "layer_types",
    "zamba": "layers_block_type",
    "zamba2": "layers_block_type",
}
"""Keys of which version 4 has other values, by model type: no translation of them was compared."""


@dataclass(frozen=True)
class _RopeKeys:
    """The keys of rotary positions that a model type of transformers 4 reads."""

    theta: str = "rope_theta"
    scaling: str = "rope_scaling"
    partial: str = "partial_rotary_factor"
    local_theta: str = ""
    """The base of layers with a sliding window; empty if it is the same for all layers."""
    type: str = "rope_type"
    """The key of the type of scaling."""


_ROPE_KEYS = {
    "gpt_neox": _RopeKeys("rotary_emb_base", partial="rotary_pct"),
    "gpt_neox_japanese": _RopeKeys("rotary_emb_base", partial="rotary_pct"),
    # Their validation allows no other name than the first one.
    "olmo": _RopeKeys(type="type"),
    "olmo2": _RopeKeys(type="type"),
    "phi3": _RopeKeys(type="type"),
    "gemma3_text": _RopeKeys(local_theta="rope_local_base_freq"),
    "gemma3n_text": _RopeKeys(local_theta="rope_local_base_freq"),
    "modernbert": _RopeKeys("global_rope_theta", scaling="", local_theta="local_rope_theta"),
    "modernbert-decoder": _RopeKeys(
        "global_rope_theta", scaling="", local_theta="local_rope_theta"
    ),
}
"""Model types with other keys than most."""


@dataclass
class Translation:
    """A config.json in the terms of the installed transformers."""

    document: Document
    changes: list[str] = field(default_factory=list)
    """What was translated, one phrase for each key."""

    def set(self, part: Document, source: str, **values: Any) -> None:
        """Set keys of the document or a part of it, and record what they are made from."""
        # The name of another key stands for a key that is missing: no value equals it.
        changed = {key: value for key, value in values.items() if part.get(key, _ROPE) != value}
        part |= changed
        if changed:
            new = ", ".join(f"{key} {json.dumps(value)}" for key, value in changed.items())
            self.changes.append(f"{source} → {new}")


@dataclass(frozen=True)
class LoadedConfig:
    """A configuration of the installed transformers."""

    config: Any
    is_newer: bool = False
    """A newer major version of transformers has saved the file."""
    notes: tuple[str, ...] = ()
    """What was translated, and what is not read."""


def load_config(path: Path, *, trust_remote_code: bool) -> LoadedConfig:
    """Load a model's configuration, translated if a newer version of transformers saved it.

    Args:
        path: the model's directory.
        trust_remote_code: run the configuration's own Python code.

    Raises:
        SourceError: the file has settings that change answers and that the installed transformers
            cannot express.
    """
    from transformers import AutoConfig

    options = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    document = read_json(path / ModelConfig.FILE, error=SourceError)
    saved_by = f"transformers {document.get('transformers_version') or 'of a newer version'}"
    newer = is_newer(document)
    has_code = trust_remote_code and "AutoConfig" in (document.get("auto_map") or {})
    if has_code or not newer:
        config = AutoConfig.from_pretrained(str(path), **options)
        note = f"config.json of {saved_by} is read by the model's own code, which was not compared"
        return LoadedConfig(config, notes=(note,) if newer else ())
    translation = translate(document)
    with temporary_directory("config") as folder:
        # `json_bytes` would write null for infinity.
        (folder / ModelConfig.FILE).write_text(json.dumps(translation.document), encoding="utf-8")
        config = AutoConfig.from_pretrained(str(folder), **options)
    # Not the temporary folder, which is gone.
    config.name_or_path = str(path)
    notes = []
    if translation.changes:
        notes.append(f"config.json of {saved_by} was translated: {'; '.join(translation.changes)}")
    if ignored := list(_unread(config, translation.document, document)):
        notes.append(f"config.json of {saved_by} has keys that are not read: {', '.join(ignored)}")
    return LoadedConfig(config, is_newer=True, notes=tuple(notes))


def is_newer(document: Mapping[str, Any]) -> bool:
    """Return True if a newer major version of transformers has saved a config.json.

    Version 4 never writes rotary positions without their base under its own name, so that a file
    without it is newer, whatever version it names.
    """
    import transformers

    installed = int(transformers.__version__.partition(".")[0])
    version = str(document.get("transformers_version") or "").partition(".")[0]
    if version.isdecimal() and int(version) > installed:
        return True
    parts = [part for part in _parts(document) if part.get(_ROPE)]
    return installed < 5 and any(
        not version.isdecimal() or _rope_keys(part).theta not in part for part in parts
    )


def translate(document: Mapping[str, Any]) -> Translation:
    """Translate the settings of transformers 5 to those that transformers 4 reads.

    Raises:
        SourceError: a setting cannot be expressed.
    """
    translation = Translation(_decode_floats(document))
    for part in _parts(translation.document):
        _translate_positions(translation, part)
        _translate_layers(translation, part)
        _translate_tied_head(translation, part)
        _translate_backbone(translation, part)
        for key, name in _RENAMED.get(str(part.get("model_type", "")), {}).items():
            if key in part:
                translation.set(part, key, **{name: part[key]})
    return translation


def _parts(document: Mapping[str, Any]) -> Iterator[Document]:
    """Yield a config and the configs inside it."""
    yield document  # type: ignore[misc]
    for key, value in document.items():
        if key != _ROPE and isinstance(value, dict):
            yield from _parts(value)


def _decode_floats(value: Any) -> Any:
    """Return a document with numbers in place of `{"__float__": "Infinity"}`."""
    if isinstance(value, dict):
        if set(value) == {"__float__"} and isinstance(value["__float__"], str):
            return float(value["__float__"])
        return {key: _decode_floats(item) for key, item in value.items()}
    return [_decode_floats(item) for item in value] if isinstance(value, list) else value


# -- rotary positions -----------------------------------------------------------------------------


def _translate_positions(translation: Translation, part: Document) -> None:
    parameters = part.get(_ROPE)
    if not parameters:
        return
    if not isinstance(parameters, dict):
        raise _refusal(part, _ROPE, parameters)
    kind = str(part.get("model_type", ""))
    keys = _rope_keys(part)
    by_layer = {name: value for name, value in parameters.items() if isinstance(value, dict)}
    if not by_layer:
        if keys.local_theta:  # both kinds of layers have a base of their own
            raise _refusal(part, _ROPE, parameters)
        _set_positions(translation, part, keys, parameters)
        return
    full = by_layer.pop("full_attention", {})
    sliding = by_layer.pop("sliding_attention", {})
    if by_layer or not full:
        raise _refusal(part, _ROPE, parameters)
    if keys.local_theta:
        if set(sliding) - {"rope_theta", "rope_type"} or _rope_type(sliding) != "default":
            raise _refusal(part, f"{_ROPE}.sliding_attention", sliding)
        theta = _number(part, f"{_ROPE}.sliding_attention.rope_theta", sliding.get("rope_theta"))
        translation.set(part, f"{_ROPE}.sliding_attention", **{keys.local_theta: theta})
    elif sliding != full and not (
        # OLMo 3 scales the positions of full attention alone.
        kind == "olmo3"
        and sliding == {"rope_type": "default", "rope_theta": full.get("rope_theta")}
    ):
        raise _refusal(part, _ROPE, parameters)
    _set_positions(translation, part, keys, full)


def _set_positions(
    translation: Translation, part: Document, keys: _RopeKeys, parameters: Mapping[str, Any]
) -> None:
    """Set the base, the share of rotated dims and the scaling."""
    kind = _rope_type(parameters)
    provable = _data()["rope_types"].get(str(part.get("model_type", "")), [])
    rest = {
        key: value
        for key, value in parameters.items()
        if key not in {"rope_theta", "rope_type", "type", "partial_rotary_factor"}
        and value is not None
    }
    if kind == "default":  # it has no scaling, whatever is left of another type
        rest = {key: value for key, value in rest.items() if key not in _SCALING}
    if kind not in provable:
        if parameters == _data()["rope_defaults"].get(part.get("model_type")):
            return  # version 4 has the same default
        raise _refusal(part, _ROPE, parameters)
    if kind == "default" and rest and "mrope_section" not in rest:
        raise _refusal(part, _ROPE, parameters)
    values: Document = {}
    if "rope_theta" in parameters:
        theta = _number(part, f"{_ROPE}.rope_theta", parameters["rope_theta"])
        values[keys.theta] = theta
    share = parameters.get("partial_rotary_factor")
    if share is not None:
        if "partial" not in provable and share != 1:
            raise _refusal(part, f"{_ROPE}.partial_rotary_factor", share)
        values[keys.partial] = share
    if kind == "longrope":
        values |= _longrope(part, keys, rest)
    if keys.scaling and (kind != "default" or rest):
        values[keys.scaling] = {keys.type: kind, **rest}
    elif keys.scaling:
        part[keys.scaling] = None  # gpt-oss and others have a scaling by default
    translation.set(part, _ROPE, **values)


def _rope_keys(part: Mapping[str, Any]) -> _RopeKeys:
    return _ROPE_KEYS.get(str(part.get("model_type", "")), _RopeKeys())


def _rope_type(parameters: Mapping[str, Any]) -> str:
    # Older files call the type of scaling `type`.
    return str(parameters.get("rope_type", parameters.get("type", "default")))


def _longrope(part: Document, keys: _RopeKeys, scaling: Document) -> Document:
    """Move the original length out of a LongRoPE scaling, and set its `attention_factor`.

    Version 4 derives the factor of cosines and sines from the two lengths, whatever `factor` says:
    sqrt(1 + ln(factor) / ln(original)). Source of both: `_compute_longrope_parameters` in
    transformers.modeling_rope_utils.
    """
    name = f"{_ROPE}.original_max_position_embeddings"
    original = _number(part, name, scaling.pop("original_max_position_embeddings", None))
    positions = _number(part, "max_position_embeddings", part.get("max_position_embeddings"))
    factor = _number(part, f"{_ROPE}.factor", scaling.get("factor", positions / original))
    attention = scaling.get("attention_factor")
    if attention is None:
        attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    if keys.type == "type":  # Phi-3 allows the two lists alone
        own = math.sqrt(1 + math.log(positions / original) / math.log(original))
        if not math.isclose(attention, own if positions > original else 1.0):
            raise _refusal(part, _ROPE, part[_ROPE])
        scaling.pop("factor", None)
        scaling.pop("attention_factor", None)
    else:
        scaling["attention_factor"] = attention
    return {"original_max_position_embeddings": original}


def _number(part: Document, key: str, value: Any) -> float:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or not 0 < value < math.inf:
        raise SourceError(
            f"config.json: {key} of {part.get('model_type') or 'the model'} is "
            f"{json.dumps(value)}, expected a positive number."
        )
    return float(value) if isinstance(value, float) else int(value)


# -- other settings -------------------------------------------------------------------------------


def _translate_layers(translation: Translation, part: Document) -> None:
    kind = str(part.get("model_type", ""))
    if kind.startswith("modernbert") and "layer_types" in part:
        every = _full_attention_interval(part)
        translation.set(part, "layer_types", global_attn_every_n_layers=every)
    if (key := _REFUSED.get(kind, "")) in part:
        raise _refusal(part, key, part[key])


def _full_attention_interval(part: Document) -> int:
    """Return the n for which ModernBERT's layers 0, n, 2n, … attend to the whole text."""
    layers = part["layer_types"]
    kinds = {"full_attention", "sliding_attention"}
    if isinstance(layers, list) and layers and set(map(str, layers)) <= kinds:
        full = [index for index, name in enumerate(layers) if name == "full_attention"]
        # Layer 0 attends to the whole text, so the second such layer gives n.
        every = full[1] if len(full) > 1 else len(layers)
        if full == list(range(0, len(layers), every)):
            return every
    raise _refusal(part, "layer_types", layers)


def _translate_tied_head(translation: Translation, part: Document) -> None:
    """Set T5's `tie_word_embeddings`, from which version 4 also learns whether to scale outputs.

    Version 5 always sets it to true, and ties the head unless the weights have another one.
    """
    if part.get("model_type") == "mt5":
        translation.set(part, "model_type mt5", tie_word_embeddings=False)
    elif isinstance(scale := part.get("scale_decoder_outputs"), bool):
        translation.set(part, "scale_decoder_outputs", tie_word_embeddings=scale)


def _translate_backbone(translation: Translation, part: Document) -> None:
    """Set the backbone's keys of detectors, whose defaults in version 4 name a model of timm."""
    backbone = part.get("backbone_config")
    if part.get("model_type") not in _data()["timm_backbones"] or not isinstance(backbone, dict):
        return
    if backbone.get("model_type") == "timm_backbone":
        raise _refusal(part, "backbone_config", backbone)
    translation.set(
        part,
        "backbone_config",
        use_timm_backbone=False,
        use_pretrained_backbone=False,
        backbone=None,
    )


# -- keys that nobody reads -----------------------------------------------------------------------


def _unread(
    config: Any, document: Document, saved: Mapping[str, Any], parent: str = ""
) -> Iterator[str]:
    """Yield the keys of a document that the installed transformers does not read.

    Args:
        config: what was made of the document.
        document: a config.json, or a part of it.
        saved: the whole file.
        parent: the model type of the config around the part.

    Raises:
        SourceError: a key changes answers.
    """
    kind = str(document.get("model_type") or config.model_type)
    known = _known_keys(config.__class__)
    defaults = _data()["unread"].get(kind, {})
    for key, value in document.items():
        part = getattr(config, key, None)
        if hasattr(part, "to_diff_dict") and isinstance(value, dict):
            yield from _unread(part, value, saved, kind)
        if key in known | _BOOKKEEPING | _NO_EFFECT:
            continue
        if key.startswith("_") or key.endswith("_token_id"):
            continue
        if key in defaults and value in (defaults[key], _implied(document, kind, key, parent)):
            continue
        if key in defaults or _is_unknown_version(saved):
            raise _refusal({"model_type": kind}, key, value)
        yield key


def _implied(document: Document, kind: str, key: str, parent: str) -> Any:
    """Return the value of a key that version 4 computes from others; None for other keys."""
    if key in _RENAMED.get(kind, {}):
        return document[key]
    if key == "layer_types" and kind.startswith("modernbert"):
        return document[key]  # it was translated
    if key == "layer_types" and not document.get("use_sliding_window"):
        return ["full_attention"] * len(document[key])
    if key == "use_bidirectional_attention" and parent == "paligemma":
        return True  # PaliGemma's own mask does the same
    return None


@cache
def _known_keys(config_class: Any) -> frozenset[str]:
    """Return the keys that a configuration class of the installed transformers reads."""
    known: set[str] = set(getattr(config_class, "attribute_map", {}))
    for base in config_class.__mro__:
        known |= {name for name, value in vars(base).items() if isinstance(value, property)}
        if "__init__" in vars(base):
            known |= set(inspect.signature(vars(base)["__init__"]).parameters)
    try:
        known |= set(config_class().to_dict())
    except Exception:  # configurations of several parts need arguments
        known |= set()
    return frozenset(known)


def _is_unknown_version(saved: Mapping[str, Any]) -> bool:
    """Return True if a version saved a config whose keys `transformers5.json` does not have yet."""
    from packaging.version import InvalidVersion, Version

    try:
        return Version(str(saved["transformers_version"])) > Version(_data()["saved_by"])
    except (KeyError, InvalidVersion):
        return False


def _refusal(part: Mapping[str, Any], key: str, value: Any) -> SourceError:
    import transformers

    text = json.dumps(value)
    text = text if len(text) < 200 else f"{text[:200]}…"
    return SourceError(
        f"config.json sets {key} to {text}, which transformers {transformers.__version__} cannot "
        f"express for {part.get('model_type') or 'this model'}: its answers would differ.",
        do="If the key has no effect on this model, remove it from a copy of config.json.",
    )


@cache
def _data() -> dict[str, Any]:
    text = (
        resources.files("enginery.runtime.pytorch")
        .joinpath("transformers5.json")
        .read_text("utf-8")
    )
    document: dict[str, Any] = json.loads(text)
    return document
