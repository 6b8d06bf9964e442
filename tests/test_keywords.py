"""The keyword arguments of each stage and of generation are their options, with types and meanings.

$ python -m tests.test_keywords > enginery/keywords.py    # part of `make schema`
"""

import ast
import dataclasses
import inspect
import subprocess
import sys
from itertools import pairwise
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BaseModel, BeforeValidator

import enginery
from enginery import api
from enginery.bench.config import BenchConfig
from enginery.deploy.kserve.options import KserveConfig
from enginery.deploy.triton.options import TritonConfig
from enginery.engine.config import BuildConfig
from enginery.export.config import ExportConfig
from enginery.optimize.config import OptimizeConfig
from enginery.predict.config import PredictConfig
from enginery.publish.config import PublishConfig
from enginery.quantize.config import QuantizeConfig
from enginery.runtime.generation.inputs import GenerationInputs
from enginery.runtime.generation.options import GenerationOptions
from enginery.runtime.model import Model
from enginery.validate.config import ValidateConfig

FUNCTIONS = {
    ExportConfig: api.export_model,
    OptimizeConfig: api.optimize_model,
    QuantizeConfig: api.quantize_model,
    BuildConfig: api.build_engine,
    ValidateConfig: api.validate_model,
    BenchConfig: api.bench_model,
    PredictConfig: api.predict_file,
    PublishConfig: api.publish_model,
    TritonConfig: api.export_triton,
    KserveConfig: api.export_kserve,
}
HEADER = '''\
"""The options of each stage and of generation as keyword arguments, for type checkers and editors.

`make schema` writes this module from the options, and a test holds them equal. Nothing imports it
at run time.
"""

from typing import Any, Literal, TypedDict
'''

INPUT_KEYWORDS = {
    "source_language": (str, "Language of the texts, for translation models."),
    "target_language": (str, "Language to translate to."),
    "prompt": (str, "Beginning of a text about an image; or what was said before the speech."),
    "language": (str, "Language of the speech."),
    "task": (Literal["transcribe", "translate"], "What is done with speech."),
    "return_timestamps": (bool, "Return the time of each segment of speech."),
    "chunk_length_s": (float, "Seconds of the chunks that speech is cut into; 0 for none."),
    "stride_length_s": (
        float | tuple[float, float],
        "Seconds of a chunk that overlap with the one before, and with the next one.",
    ),
}
"""Options of `generate` that are about its inputs; which ones there are depends on the model."""


def class_name(config):
    return config.__name__.replace("Config", "Keywords")


def type_text(option_type):
    """Return the source of a type. A tuple may be given as a list, as in a recipe."""
    origin, arguments = get_origin(option_type), get_args(option_type)
    if origin in (Union, UnionType):
        return " | ".join(map(type_text, arguments))
    if origin is Annotated:
        text = type_text(arguments[0])
        takes_item = any(isinstance(mark, BeforeValidator) for mark in arguments[1:])
        return f"{type_text(get_args(arguments[0])[0])} | {text}" if takes_item else text
    if origin is Literal:
        return f"Literal{list(arguments)}"
    if origin is tuple:
        item = type_text(arguments[0])
        return f"tuple[{item}, ...] | list[{item}]"
    if origin is dict:
        return f"dict[{', '.join(map(type_text, arguments))}]"
    return "None" if option_type is NoneType else option_type.__name__


def field_docstrings(config):
    """Return the docstring below each field of a dataclass and its bases."""
    docstrings = {}
    for base in reversed(config.__mro__):
        if base in (object, BaseModel):
            continue
        body = ast.parse(inspect.getsource(base)).body[0].body
        for field, docstring in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(docstring, ast.Expr):
                docstrings[field.target.id] = docstring.value.value
    return docstrings


def class_source(name, docstring, options):
    """Return the source of a TypedDict, from the type and the docstring of each option."""
    lines = [f"class {name}(TypedDict, total=False):", f'    """{docstring}"""\n']
    for option, (option_type, meaning) in options.items():
        lines.append(f"    {option}: {type_text(option_type)}")
        if meaning:
            lines.append(f'    """{meaning}"""')
    return "\n".join(lines) + "\n"


def stage_source(config, function):
    """Return the TypedDict of a stage, with the options that are no parameter of its function."""
    types, docstrings = get_type_hints(config), field_docstrings(config)
    parameters = inspect.signature(function).parameters
    options = {
        field.name: (types[field.name], docstrings[field.name])
        for field in dataclasses.fields(config)
        if field.name not in parameters
    }
    docstring = f"The options of `{function.__name__}`, see `{config.__name__}`."
    return class_source(class_name(config), docstring, options)


def generation_source():
    """Return the TypedDict of `Model.generate`."""
    types = get_type_hints(GenerationOptions, include_extras=True)
    docstrings = field_docstrings(GenerationOptions)
    options = {
        name: (types[name], docstrings.get(name, "")) for name in GenerationOptions.model_fields
    }
    docstring = "The options of `Model.generate`, see `GenerationOptions`."
    return class_source("GenerationKeywords", docstring, options | INPUT_KEYWORDS)


def module_source():
    classes = [stage_source(config, function) for config, function in FUNCTIONS.items()]
    return subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--stdin-filename", "enginery/keywords.py", "-"],
        input="\n\n".join((HEADER, *classes, generation_source())),
        capture_output=True,
        text=True,
        check=True,
        cwd=Path(__file__).parents[1],
    ).stdout


def test_keywords_are_those_of_the_configs():
    path = Path(api.__file__).with_name("keywords.py")
    assert path.read_text(encoding="utf-8") == module_source(), "run `make schema`"


def test_each_function_takes_the_keywords_of_its_config():
    for config, function in FUNCTIONS.items():
        parameters = inspect.signature(function).parameters
        assert parameters["config"].annotation == f"{config.__name__} | None"
        assert parameters["options"].annotation == f"Unpack[{class_name(config)}]"
    with_config = {
        name
        for name, function in inspect.getmembers(api, inspect.isfunction)
        if name in enginery.__all__ and "config" in inspect.signature(function).parameters
    }
    assert with_config == {function.__name__ for function in FUNCTIONS.values()}


def test_generation_takes_its_options_and_those_of_every_kind_of_inputs():
    for method in (Model.generate, Model.stream):
        options = inspect.signature(method).parameters["options"]
        assert options.annotation == "Unpack[GenerationKeywords]"
    arguments = {name for kind in GenerationInputs.__subclasses__() for name in kind.arguments}
    assert set(INPUT_KEYWORDS) == arguments


if __name__ == "__main__":
    sys.stdout.write(module_source())
