"""The keyword arguments of each stage and of generation are their options, with types and meanings.

$ python -m tests.test_keywords > enginery/keywords.py    # part of `make schema`
"""

import dataclasses
import inspect
import re
import subprocess
import sys
from pathlib import Path
from types import NoneType, UnionType
from typing import Annotated, Literal, Union, get_args, get_origin, get_type_hints

from pydantic import BeforeValidator

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
from enginery.runtime.tasks import TASKS
from enginery.runtime.tasks.task import TaskOptions
from enginery.runtime.tasks.views import VIEWS
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
"""The options of each stage, and of the methods of `Model`, as keyword arguments of their types.

`make schema` writes this module from the options, and a test holds them equal. Nothing imports it
at run time. What an option means is said where it is declared.
"""

from typing import Any, Literal, TypedDict
'''

INPUT_KEYWORDS = {
    "source_language": str,
    "target_language": str,
    "prompt": str,
    "language": str,
    "task": Literal["transcribe", "translate"],
    "return_timestamps": bool,
    "chunk_length_s": float,
    "stride_length_s": float | tuple[float, float],
}
"""Options of `generate` that are about its inputs; which ones there are depends on the model."""

DTYPE = ("dtype",)
METHODS = {verb: task for verb, task in {**TASKS, **VIEWS}.items() if verb != "generate"}
"""The tasks whose methods have the options of the task."""

PARAMETERS = {"zero_shot_images": ("candidate_labels",), "embed": DTYPE, "embed_images": DTYPE}
"""Verb -> options that are parameters of the method: labels, and the type that vectors have."""


def class_name(config):
    return re.sub("(Config|Options)$", "Keywords", config.__name__)


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
    if origin is list:
        return f"list[{type_text(arguments[0])}]"
    if origin is dict:
        return f"dict[{', '.join(map(type_text, arguments))}]"
    return "None" if option_type is NoneType else option_type.__name__


def class_source(name, docstring, options, bases=("TypedDict",)):
    """Return the source of a TypedDict, from the type of each option."""
    lines = [f"class {name}({', '.join(bases)}, total=False):", f'    """{docstring}"""\n']
    lines += [f"    {option}: {type_text(option_type)}" for option, option_type in options.items()]
    return "\n".join(lines).rstrip() + "\n"


def stage_source(config, function):
    """Return the TypedDict of a stage, with the options that are no parameter of its function."""
    types, parameters = get_type_hints(config), inspect.signature(function).parameters
    names = [field.name for field in dataclasses.fields(config) if field.name not in parameters]
    docstring = f"The options of `{function.__name__}`, see `{config.__name__}`."
    return class_source(class_name(config), docstring, {name: types[name] for name in names})


def task_sources():
    """Return the TypedDicts of the methods of `Model`, derived from one another as the options."""
    parameters = {}
    for verb, names in PARAMETERS.items():
        for kind in METHODS[verb].Options.__mro__:
            parameters.setdefault(kind, []).extend(names)
    kinds = dict.fromkeys(
        kind
        for task in METHODS.values()
        for kind in reversed(task.Options.__mro__)
        if issubclass(kind, TaskOptions) and kind is not TaskOptions
    )
    for kind in kinds:
        types = get_type_hints(kind)
        names = [
            name for name in vars(kind).get("__annotations__", {}) if name in kind.model_fields
        ]
        options = {name: types[name] for name in names if name not in parameters.get(kind, ())}
        bases = [class_name(base) for base in kind.__bases__ if base is not TaskOptions]
        yield class_source(
            class_name(kind), f"See `{kind.__name__}`.", options, bases or ("TypedDict",)
        )


def generation_source():
    """Return the TypedDict of `Model.generate`."""
    types = get_type_hints(GenerationOptions, include_extras=True)
    options = {name: types[name] for name in GenerationOptions.model_fields}
    docstring = "The options of `Model.generate`, see `GenerationOptions`."
    return class_source("GenerationKeywords", docstring, options | INPUT_KEYWORDS)


def module_source():
    classes = [stage_source(config, function) for config, function in FUNCTIONS.items()]
    return subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--stdin-filename", "enginery/keywords.py", "-"],
        input="\n\n".join((HEADER, *classes, *task_sources(), generation_source())),
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
