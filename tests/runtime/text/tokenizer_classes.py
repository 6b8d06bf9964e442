"""Write tokenizer_classes.json: what transformers' tokenizer classes do with the files of a model.

$ python -m tests.runtime.text.tokenizer_classes
"""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import transformers
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.tokenization_auto import (
    TOKENIZER_MAPPING_NAMES,
    tokenizer_class_from_name,
)

from enginery.runtime.text import tokenizer_files

FILE = Path(tokenizer_files.__file__).with_name("tokenizer_classes.json")
_ROLES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token")
_BASE = "PreTrainedTokenizerFast"


def read_classes() -> dict[str, Any]:
    """Return the document: each class without `Fast`, its defaults, settings and model types."""
    names = {name for name in dir(transformers) if name.endswith("TokenizerFast")}
    names |= {name for pair in TOKENIZER_MAPPING_NAMES.values() for name in pair if name}
    classes = {}
    for name in sorted(names):
        tokenizer_class = tokenizer_class_from_name(name)
        if tokenizer_class and issubclass(tokenizer_class, PreTrainedTokenizerFast):
            classes[name.removesuffix("Fast")] = _describe(name, tokenizer_class)
    return {"read_by": transformers.__version__, "classes": classes}


def _describe(name: str, tokenizer_class: Any) -> dict[str, Any]:
    initializer = tokenizer_class.__init__
    parameters = inspect.signature(initializer).parameters
    defaults = {key: parameter.default for key, parameter in parameters.items()}
    source = inspect.getsource(initializer) if name != _BASE else ""
    tokens = {role: defaults[role] for role in (*_ROLES, "mask_token") if role in defaults}
    described: dict[str, Any] = {"tokens": tokens}
    # Roles of one class alone.
    names = ("question_token", "prefix_token", "middle_token", "suffix_token", "eot_token")
    if own := [defaults[name] for name in names if name in defaults]:
        described["own_special_tokens"] = own
    extra = defaults.get("additional_special_tokens")
    flags = {role: _flags(source, role) for role in tokens}
    if any(flags.values()):
        described["flags"] = {role: values for role, values in flags.items() if values}
    if "_pad_token_type_id = 3" in inspect.getsource(tokenizer_class):
        described["pad_token_type_id"] = 3
    if extra:
        described["additional_special_tokens"] = list(extra)
    if tokenizer_class.padding_side != "right":
        described["padding_side"] = tokenizer_class.padding_side
    if 'strip_accents", strip_accents' in source:
        flags = ["do_lower_case", "strip_accents"]
        if "handle_chinese_chars" in source:
            flags.append("tokenize_chinese_chars")
        described["normalizer"] = flags
    if "self.update_post_processor()" in source:
        described["template"] = {key: defaults[key] for key in ("add_bos_token", "add_eos_token")}
    if 'trim_offsets", trim_offsets' in source:
        described["trim_offsets"] = defaults["trim_offsets"]
    if "PreTokenizer.custom" in source:
        described["library"] = "rjieba"
    if "pickle.loads" in source:
        described["nested_prefix_space"] = True
    if defaults.get("add_prefix_space", False) is not False:
        described["add_prefix_space"] = defaults["add_prefix_space"]
    if 'kwargs["from_slow"] = True' in source:
        described["converted"] = ["add_prefix_space"]
    described["model_types"] = [
        model_type
        for model_type, (slow, fast) in TOKENIZER_MAPPING_NAMES.items()
        if (fast or slow) == name
    ]
    return described


def _flags(source: str, role: str) -> dict[str, bool]:
    """Return the flags of a role's token, if a class makes an AddedToken of it; else nothing."""
    match = re.search(rf"AddedToken\({role}, ([^)]*)\)", source)
    values = re.findall(r"(\w+)=(True|False)", match[1]) if match else ()
    return {name: value == "True" for name, value in values if name != "special"}


def write_document() -> str:
    """Return the text of the file, a line for each class."""
    document = read_classes()
    lines = [
        f"  {json.dumps(name)}: {json.dumps(described, ensure_ascii=False)}"
        for name, described in document["classes"].items()
    ]
    version = json.dumps(document["read_by"])
    return f'{{\n "read_by": {version},\n "classes": {{\n' + ",\n".join(lines) + "\n }\n}\n"


if __name__ == "__main__":
    FILE.write_text(write_document(), encoding="utf-8")
