"""Write transformers5.json: what transformers 5 saves in config.json and version 4 does not read.

Run it once in an environment with transformers 5 alone, then in the environment of the package:

    $ v5/bin/python -m tests.transformers5.keys dump --out v5.json
    $ python -m tests.transformers5.keys compare v5.json

A key is read by version 4 if the constructor of the type's configuration class takes it, if the
class has such an attribute, or if the code of the model names it.
"""

from __future__ import annotations

import argparse
import inspect
import json
import logging
import re
import sys
import warnings
from pathlib import Path
from typing import Any

import transformers

HANDLED = {
    "_name_or_path",
    "model_type",
    "rope_parameters",  # translated; read.py proves which types of scaling
    "scale_decoder_outputs",  # translated
    "transformers_version",
}


def saved_keys(config_class: Any) -> dict[str, Any] | None:
    """Return the keys and defaults that a class saves; None if it needs arguments."""
    try:
        values: dict[str, Any] = json.loads(json.dumps(config_class().to_dict(), default=str))
    except Exception:
        return None
    return values


def read_keys(config_class: Any) -> set[str]:
    """Return the keys that a class of the installed version reads."""
    known = set(getattr(config_class, "attribute_map", {}))
    for base in config_class.__mro__:
        known |= set(vars(base))
        if "__init__" in vars(base):
            known |= set(inspect.signature(vars(base)["__init__"]).parameters)
    return known | set(saved_keys(config_class) or {})


def model_code(config_class: Any) -> str:
    """Return the source code of the models beside a configuration class."""
    folder = Path(sys.modules[config_class.__module__].__file__ or "").parent
    return "\n".join(path.read_text() for path in sorted(folder.glob("model*.py")))


def data_text(document: dict[str, Any]) -> str:
    """Return the JSON of the data, with a line for each model type."""
    sections = []
    for name, value in sorted(document.items()):
        if isinstance(value, dict):
            lines = [f"  {json.dumps(k)}: {json.dumps(v)}" for k, v in sorted(value.items())]
            sections.append(f" {json.dumps(name)}: {{\n" + ",\n".join(lines) + "\n }")
        else:
            sections.append(f" {json.dumps(name)}: {json.dumps(value)}")
    return "{\n" + ",\n".join(sections) + "\n}\n"


def dump(out: Path) -> None:
    """Write the keys and defaults of all model types of the installed version."""
    types = {
        kind: values
        for kind in sorted(transformers.CONFIG_MAPPING.keys())
        if (values := saved_keys(transformers.CONFIG_MAPPING[kind])) is not None
    }
    out.write_text(json.dumps({"version": transformers.__version__, "types": types}))


def compare(dumped: Path, out: Path) -> None:
    """Write the keys of a dump that the installed version does not read."""
    newer = json.loads(dumped.read_text())
    unread: dict[str, dict[str, Any]] = {}
    timm: list[str] = []
    positions: dict[str, dict[str, Any]] = {}
    for kind in sorted(transformers.CONFIG_MAPPING.keys() & newer["types"].keys()):
        config_class = transformers.CONFIG_MAPPING[kind]
        known, code = read_keys(config_class) | HANDLED, model_code(config_class)
        values = {
            key: value
            for key, value in newer["types"][kind].items()
            if key not in known
            and not re.search(rf"\b{re.escape(key)}\b", code)
            and not (isinstance(value, dict) and "model_type" in value)
        }
        if values:
            unread[kind] = values
        parameters = newer["types"][kind].get("rope_parameters")
        own = saved_keys(config_class) or {}
        if isinstance(parameters, dict) and parameters.get("rope_theta") == own.get("rope_theta"):
            share = parameters.get("partial_rotary_factor")
            if share == own.get("partial_rotary_factor") and not own.get("rope_scaling"):
                positions[kind] = parameters
        if {"use_timm_backbone", "backbone_config"} <= known:
            timm.append(kind)
    document = json.loads(out.read_text()) if out.is_file() else {"rope_types": {}}
    document |= {
        "saved_by": newer["version"],
        "read_by": transformers.__version__,
        "unread": unread,
        "rope_defaults": positions,
        "timm_backbones": timm,
    }
    out.write_text(data_text(document))


def main() -> None:
    """Dump the keys of one version, or compare them with another."""
    parser = argparse.ArgumentParser(description=main.__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("dump").add_argument("--out", type=Path, required=True)
    commands.add_parser("compare").add_argument("dumped", type=Path)
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.disable(logging.ERROR)
    if options.command == "dump":
        dump(options.out)
        return
    import enginery.runtime

    compare(options.dumped, Path(enginery.runtime.__file__).with_name("transformers5.json"))


if __name__ == "__main__":
    main()
