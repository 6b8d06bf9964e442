"""The keyword arguments of each stage are the fields of its config, with their types and meanings.

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
from typing import Literal, Union, get_args, get_origin, get_type_hints

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
"""The options of each stage as keyword arguments, for type checkers and editors.

`make schema` writes this module from the stages' configs, and a test holds them equal. Nothing
imports it at run time.
"""

from typing import Literal, TypedDict
'''


def class_name(config):
    return config.__name__.replace("Config", "Keywords")


def type_text(option_type):
    """Return the source of a type. A tuple may be given as a list, as in a recipe."""
    origin, arguments = get_origin(option_type), get_args(option_type)
    if origin in (Union, UnionType):
        return " | ".join(map(type_text, arguments))
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
    for base in reversed(config.__mro__[:-1]):
        body = ast.parse(inspect.getsource(base)).body[0].body
        for field, docstring in pairwise(body):
            if isinstance(field, ast.AnnAssign) and isinstance(docstring, ast.Expr):
                docstrings[field.target.id] = docstring.value.value
    return docstrings


def class_source(config, function):
    """Return the source of a TypedDict with the options that are no parameter of the function."""
    types, docstrings = get_type_hints(config), field_docstrings(config)
    parameters = inspect.signature(function).parameters
    lines = [
        f"class {class_name(config)}(TypedDict, total=False):",
        f'    """The options of `{function.__name__}`, see `{config.__name__}`."""\n',
    ]
    for field in dataclasses.fields(config):
        if field.name not in parameters:
            lines.append(f"    {field.name}: {type_text(types[field.name])}")
            lines.append(f'    """{docstrings[field.name]}"""')
    return "\n".join(lines) + "\n"


def module_source():
    classes = (class_source(config, function) for config, function in FUNCTIONS.items())
    return subprocess.run(
        [sys.executable, "-m", "ruff", "format", "--stdin-filename", "enginery/keywords.py", "-"],
        input="\n\n".join((HEADER, *classes)),
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


if __name__ == "__main__":
    sys.stdout.write(module_source())
