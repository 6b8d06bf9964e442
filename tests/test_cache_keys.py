"""The cache keys of all stages: what counts in them, and what does not."""

import dataclasses
import shutil
import typing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from enginery.bench import stage as bench
from enginery.bench.config import BenchConfig
from enginery.bench.target import Target
from enginery.core.artifact.fingerprint import data_content, option_fields, runtime_version
from enginery.core.model.source import resolve_source
from enginery.core.options import by_content, key_parts, not_in_key
from enginery.engine import stage as build
from enginery.engine.config import BuildConfig
from enginery.engine.requests import resolve_requests
from enginery.export import stage as export
from enginery.export.config import ExportConfig
from enginery.optimize import stage as optimize
from enginery.optimize.config import OptimizeConfig
from enginery.predict import stage as predict
from enginery.predict.config import PredictConfig
from enginery.quantize import stage as quantize
from enginery.quantize.config import QuantizeConfig
from enginery.runtime.tensorrt.library import has_tensorrt
from enginery.validate import stage as validate
from enginery.validate.config import ValidateConfig
from tests.bench.sample_results import save_photographs

MODEL = ("bert", "text-classification")
ROWS = "text\nThe engine is warm.\nThe pump runs again.\n"


@pytest.fixture
def fingerprint(exported, tiny_model):
    """Return a function: `fingerprint("optimize", path)` is that of a run on the data at a path."""

    def of_export(_, **options):
        return export.fingerprint(resolve_source(str(tiny_model(*MODEL))), ExportConfig(**options))

    def of_optimize(data, **options):
        return optimize.fingerprint(exported(*MODEL), OptimizeConfig(data=data, **options))

    def of_quantize(data, **options):
        config = QuantizeConfig(data=data, capability=("none",), **options)
        inputs = quantize.read_calibration(exported(*MODEL), config)
        return quantize.fingerprint(exported(*MODEL), config, inputs)

    def of_build(data, **options):
        if not has_tensorrt():
            pytest.skip("pip install 'enginery[tensorrt-rtx]'")
        config = BuildConfig(data=data, capability="8.9", **options)
        requested = resolve_requests(exported(*MODEL), config)
        return build.fingerprint(exported(*MODEL), config, requested)

    def of_validate(data, **options):
        return validate.fingerprint(exported(*MODEL), ValidateConfig(data=data, **options))

    def of_bench(data, **options):
        target = Target.open(exported(*MODEL), "", allow_failed=True)
        return bench.fingerprint([target], BenchConfig(data=data, **options))

    def of_predict(data, **options):
        config = PredictConfig(**options)
        return predict.fingerprint(exported(*MODEL), Path(data), Path("out.csv"), "csv", config)

    functions = {
        "export": of_export,
        "optimize": of_optimize,
        "quantize": of_quantize,
        "build": of_build,
        "validate": of_validate,
        "bench": of_bench,
        "predict": of_predict,
    }

    def make(stage, data="", **options):
        return functions[stage](str(data), **options)

    return make


ALL = ("export", "optimize", "quantize", "build", "validate", "bench", "predict")
WITH_DATA = ALL[1:]


def write(path, content=ROWS):
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    return path


def test_a_vocoder_counts_by_its_content(tiny_model):
    source = resolve_source(str(tiny_model(*MODEL)))

    def key(name, content):
        record = source.record.model_copy(update={"id": name, "sha256": content})
        vocoder = dataclasses.replace(source, record=record)
        return export.fingerprint(source, ExportConfig(model_kwargs={"vocoder": name}), vocoder).key

    assert key("a", "0") == key("b", "0")
    assert key("a", "0") != key("a", "1")


@pytest.mark.parametrize("stage", WITH_DATA)
def test_the_same_rows_elsewhere_are_the_same_key(fingerprint, tmp_path, stage):
    here, there = write(tmp_path / "reviews.csv"), write(tmp_path / "other" / "texts.csv")
    key = fingerprint(stage, here)
    assert key == fingerprint(stage, there)
    assert not [value for value in key.fields.values() if str(tmp_path) in value]


@pytest.mark.parametrize("stage", WITH_DATA)
def test_other_rows_at_the_same_place_are_another_key_and_the_miss_says_so(
    fingerprint, tmp_path, stage
):
    path = write(tmp_path / "reviews.csv")
    before = fingerprint(stage, path)
    write(path, f"{ROWS}It stopped.\n")
    now = fingerprint(stage, path)
    assert now.key != before.key
    name = "input" if stage == "predict" else "data"
    changes = dict(change.split(": ", 1) for change in now.changes(before.fields))
    values = changes.pop(name)
    assert not changes or stage == "build", "whose profiles follow from the lengths of the rows"
    (kind, old), (same, new) = (value.split() for value in values.split(" → "))
    assert (kind, same, len(old), len(new), old != new) == ("csv", "csv", 12, 12, True)


@pytest.mark.parametrize("stage", WITH_DATA)
def test_the_same_bytes_read_in_another_way_are_another_key(fingerprint, tmp_path, stage):
    # A row of a .txt is a text, and the first row is no header.
    as_table, as_lines = write(tmp_path / "a.csv"), write(tmp_path / "a.txt")
    assert fingerprint(stage, as_table) != fingerprint(stage, as_lines)


@pytest.mark.parametrize("stage", ["optimize", "quantize", "validate"])
def test_arrays_count_by_content(fingerprint, tmp_path, stage):
    arrays = {
        name: np.ones((2, 4), np.int64)
        for name in ("input_ids", "attention_mask", "token_type_ids")
    }
    for folder in ("here", "there"):
        (tmp_path / folder).mkdir()
        np.savez(tmp_path / folder / "rows.npz", **arrays)
    keys = [fingerprint(stage, tmp_path / folder) for folder in ("here", "there")]
    assert keys[0] == keys[1]
    np.savez(tmp_path / "there" / "more.npz", **arrays)
    assert fingerprint(stage, tmp_path / "there") != keys[0]


def test_images_count_by_content(exported, tmp_path):
    vit = exported("vit", "image-classification")
    here = save_photographs(tmp_path / "here", (64, 64), (96, 60))
    there = shutil.copytree(here, tmp_path / "there")
    target = Target.open(vit, "", allow_failed=True)

    def keys(folder):
        config = QuantizeConfig(data=str(folder), capability=("none",))
        inputs = quantize.read_calibration(vit, config)
        yield quantize.fingerprint(vit, config, inputs).key
        yield optimize.fingerprint(vit, OptimizeConfig(data=str(folder))).key
        yield validate.fingerprint(vit, ValidateConfig(data=str(folder))).key
        yield bench.fingerprint([target], BenchConfig(images=str(folder))).key

    before = list(keys(here))
    assert list(keys(there)) == before
    shutil.copy(there / "0.png", there / "1.png")
    assert not set(keys(there)) & set(before)


def test_one_image_counts_by_content(exported, tmp_path):
    vit = exported("vit", "image-classification")
    folder = save_photographs(tmp_path / "photos", (64, 64), (64, 64))

    def key(file):
        config = QuantizeConfig(data=str(file), capability=("none",))
        return quantize.fingerprint(vit, config, quantize.read_calibration(vit, config))

    other = shutil.copy(folder / "0.png", tmp_path / "moved.png")
    assert key(folder / "0.png") == key(other) != key(folder / "1.png")


@pytest.mark.more
@pytest.mark.parametrize("stage", ALL)
@pytest.mark.parametrize("name", ["onnxruntime", "onnxruntime-openvino", "ort-nightly-gpu"])
def test_another_version_of_any_onnxruntime_is_another_key(
    fingerprint, tmp_path, monkeypatch, stage, name
):
    data = write(tmp_path / "reviews.csv")
    keys = [fingerprint(stage, data)]
    monkeypatch.syspath_prepend(tmp_path / "site")
    for version in ("1.24.1", "1.24.2"):
        shutil.rmtree(tmp_path / "site", ignore_errors=True)
        folder = tmp_path / "site" / f"{name.replace('-', '_')}-{version}.dist-info"
        folder.mkdir(parents=True)
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}")
        (folder / "top_level.txt").write_text("onnxruntime\n")
        keys.append(fingerprint(stage, data))
    assert keys[2].changes(keys[1].fields) == [f"{name}: 1.24.1 → 1.24.2"]
    assert len({key.key for key in keys}) == 3


def test_packages_beside_onnxruntime_are_no_builds_of_it(tmp_path, monkeypatch):
    before = runtime_version()
    monkeypatch.syspath_prepend(tmp_path)
    for name, modules in (("onnxruntime-genai", None), ("my-tools", "my_tools\nonnxruntime_x\n")):
        folder = tmp_path / f"{name.replace('-', '_')}-1.0.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        if modules:
            (folder / "top_level.txt").write_text(modules)
    assert runtime_version() == before


PERMISSIONS = {
    "optimize": {"allow_failed": True},
    "quantize": {"allow_failed": True},
    "build": {"allow_failed": True},
    "validate": {"trust_remote_code": True, "allow_pickle": True},
    "bench": {"allow_failed": True},
    "predict": {"allow_failed": True, "workers": 3, "part_rows": 5},
    "export": {"allow_pickle": True, "cache_dir": "somewhere"},
}


@pytest.mark.parametrize("stage", ALL)
def test_permissions_are_in_no_key(fingerprint, tmp_path, stage):
    data = write(tmp_path / "reviews.csv")
    assert fingerprint(stage, data) == fingerprint(stage, data, **PERMISSIONS[stage])


@pytest.mark.parametrize("stage", ["validate", "bench", "predict"])
def test_providers_count_as_they_are_understood(fingerprint, tmp_path, stage):
    data = write(tmp_path / "reviews.csv")
    files = [write(tmp_path / name, "cpu:\n") for name in ("a.yaml", "b.yaml")]
    keys = {fingerprint(stage, data, providers=str(file)).key for file in files}
    assert keys == {fingerprint(stage, data, providers="cpu").key}
    write(files[0], "cpu: {enable_cpu_mem_arena: 0}\n")
    changed = fingerprint(stage, data, providers=str(files[0]))
    option = ("cpu.enable_cpu_mem_arena=0",)
    assert changed == fingerprint(stage, data, providers="cpu", provider_option=option)
    assert changed.key not in keys


# Every option of every stage.

CONFIGS = (
    ExportConfig,
    OptimizeConfig,
    QuantizeConfig,
    BuildConfig,
    ValidateConfig,
    BenchConfig,
    PredictConfig,
)


def other_value(hint, value):
    """Return a value of a type that differs from `value`."""
    if typing.get_origin(hint) is typing.Literal:
        return next(word for word in typing.get_args(hint) if word != value)
    if typing.get_args(hint) and typing.get_origin(hint) not in (tuple, dict):  # a union
        kinds = [kind for kind in typing.get_args(hint) if kind is not type(None)]
        return other_value(kinds[0], value)
    if hint is bool:
        return not value
    if hint in (int, float):
        return hint(value + 1 if isinstance(value, int | float) else 1)
    return {str: f"{value}x", dict: {"name": "value"}, tuple: ("x",)}[
        typing.get_origin(hint) or hint
    ]


@pytest.mark.parametrize("kind", CONFIGS)
def test_every_option_counts_as_it_declares(kind, tmp_path):
    options = kind()
    hints = typing.get_type_hints(kind)
    here, there = write(tmp_path / "a.csv"), write(tmp_path / "b.csv")
    before = option_fields(options)
    for name, part in key_parts(kind).items():

        def fields(value, name=name):
            changed = object.__new__(kind)  # a check would refuse some of the values
            for field in dataclasses.fields(kind):
                object.__setattr__(changed, field.name, getattr(options, field.name))
            object.__setattr__(changed, name, value)
            return option_fields(changed)

        if part == "content" and hints[name] is str:
            write(there)
            assert fields(str(here)) == fields(str(there)) != before
            write(there, "text\nother\n")
            assert fields(str(here)) != fields(str(there))
            continue
        value = other_value(hints[name], getattr(options, name))
        if part == "content":  # a mapping of names, whose content its stage finds
            assert option_fields(options, **{name: "one"}) != option_fields(options)
        elif part == "value":
            assert fields(value) != before, name
        else:
            assert fields(value) == before, name


def test_an_option_without_declaration_counts_by_its_value():
    @dataclass(frozen=True)
    class Config:
        plain: int = 1
        file: str = by_content()
        jobs: int = not_in_key(2)

    assert key_parts(Config) == {"plain": "value", "file": "content", "jobs": "nothing"}
    assert option_fields(Config(plain=3)) == {"plain": "3", "file": "none"}


def test_content_of_an_option_that_counts_by_value_is_a_mistake():
    with pytest.raises(ValueError, match=r"OptimizeConfig does not declare \['rows'\]"):
        option_fields(OptimizeConfig(), rows="one")


def test_content_of_data_begins_with_its_kind(tmp_path):
    assert data_content("") == "none"
    assert data_content(write(tmp_path / "A.CSV")).split()[0] == "csv"
    assert data_content(write(tmp_path / "lines")).split()[0] == "file"
    assert data_content(tmp_path).split()[0] == "folder"
