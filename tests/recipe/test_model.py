import dataclasses
import json
from pathlib import Path

import pytest

from enginery.core.errors import OptionError, RecipeError
from enginery.engine.config import BuildConfig
from enginery.export.config import ExportConfig
from enginery.recipe import STAGES, Recipe, Step
from enginery.validate.config import ValidateConfig

RECIPES = Path(__file__).parents[2] / "recipes"

FULL = """\
model: org/name@v1
out: build/minilm
stages:
  - export: {task: text-classification, opset: 17}
  - validate: {profile: ["batch=1:4:8,sequence=8:64:128"], data: reviews.csv, column: review}
# nothing more
ask: ["What a day."]
"""


def error(text, name="recipe.yaml"):
    with pytest.raises(RecipeError) as caught:
        Recipe.parse(text, name)
    assert caught.value.do
    return str(caught.value)


def only_export(options):
    return Recipe.parse(f"model: m\nstages:\n  - export:\n      {options}\n").steps[0].options


def only_validate(options):
    text = f"model: m\nstages:\n  - export\n  - validate:\n      {options}\n"
    return Recipe.parse(text).steps[1].options


# What a recipe says.


def test_recipe_names_the_model_the_stages_in_order_and_their_options():
    assert Recipe.parse(FULL) == Recipe(
        model="org/name@v1",
        out="build/minilm",
        steps=(
            Step("export", ExportConfig(task="text-classification", opset=17)),
            Step(
                "validate",
                ValidateConfig(
                    profile=("batch=1:4:8,sequence=8:64:128",), data="reviews.csv", column="review"
                ),
            ),
        ),
        ask=("What a day.",),
    )
    assert [step.line for step in Recipe.parse(FULL).steps] == [4, 5]


def test_the_shortest_recipe_is_a_model_and_export():
    for stages in ("[export]", "[export: ]", "[export: {}]"):
        assert Recipe.parse(f"model: m\nstages: {stages}") == Recipe(
            "m", (Step("export", ExportConfig()),)
        )


NEEDED = {
    "quantize": {"allow_random": True},
    "predict": {"input": "-", "out": "out.csv"},
    "publish": {"url": "oci://registry/name", "allow_failed": True},
    "export-triton": {"out": "/triton"},
    "export-kserve": {"out": "/kserve", "storage_uri": "s3://a/b", "image": "i"},
}
"""What a stage cannot do without."""


@pytest.mark.parametrize("stage", STAGES)
def test_every_option_of_every_stage_can_be_written(stage):
    kind = STAGES[stage]
    lines, expected = [], {}
    for field in dataclasses.fields(kind):
        value = NEEDED.get(stage, {}).get(field.name, field.default)
        if field.name == "profile":
            value = ("batch=1",)
        if value is dataclasses.MISSING and field.default_factory is not dataclasses.MISSING:
            value = field.default_factory()
        if value is None:  # YAML's null is no value
            continue
        expected[field.name] = value
        lines.append(f"      {field.name}: {json.dumps(value)}")
    first = "" if stage == "export" else "  - export\n"
    recipe = Recipe.parse(f"model: m\nstages:\n{first}  - {stage}:\n" + "\n".join(lines))
    assert recipe.steps[-1].options == kind(
        **expected | {name: str(Path(expected[name])) for name in ("out",) if stage == "predict"}
    )


@pytest.mark.parametrize("stage", ["lint", "bench", "validate", "optimize"])
def test_a_stage_without_needs_is_its_name_alone(stage):
    steps = Recipe.parse(f"model: m\nstages: [export, {stage}]").steps
    assert steps[1] == Step(stage, STAGES[stage]())


def test_profile_and_ask_may_be_one_text():
    assert only_validate("profile: batch=1").profile == ("batch=1",)
    assert Recipe.parse("model: m\nstages: [export]\nask: Hello.").ask == ("Hello.",)


@pytest.mark.parametrize("word", ["no", "on", "yes", "012", "1e3", "2024-01-01", "12:30"])
def test_text_options_keep_what_is_written(word):
    assert only_export(f"revision: {word}").revision == word


@pytest.mark.parametrize(
    ("written", "opset"), [("020", 20), ("'17'", 17), ("17.0", 17), ("1_8", 18)]
)
def test_numbers_are_decimal(written, opset):
    assert only_export(f"opset: {written}").opset == opset


def test_numbers_may_have_an_exponent_without_a_point():
    assert only_validate("min_cosine: 1e-3").min_cosine == 1e-3
    assert only_validate("max_abs_error: noise-floor").max_abs_error == "noise-floor"


@pytest.mark.parametrize(("written", "value"), [("yes", True), ("off", False), ("True", True)])
def test_booleans_are_as_yaml_has_them(written, value):
    assert only_export(f"allow_pickle: {written}").allow_pickle is value


def test_anchors_stand_for_whole_values():
    recipe = Recipe.parse("model: &m name\nstages: [export: {revision: *m}]\nask: [*m, *m]")
    assert recipe.steps[0].options.revision == "name"
    assert recipe.ask == ("name", "name")


# What is wrong with a recipe, and where.


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            FULL.replace("opset", "opsets"),
            "recipe.yaml:4: unknown option 'opsets' for export; did you mean 'opset'? Known op",
        ),
        (
            FULL.replace("validate:", "validat:"),
            "recipe.yaml:5: unknown stage 'validat'; did you mean 'validate'? Known stages: export",
        ),
        (FULL.replace("# nothing more", "  - vaildate"), "recipe.yaml:6: unknown stage 'vaildate'"),
        (
            FULL.replace("\nask:", "\nasks:"),
            "recipe.yaml:7: unknown key 'asks'; did you mean 'ask'? Known keys: model, out, ",
        ),
        (
            FULL.replace("opset: 17", "opset: new"),
            "recipe.yaml:4: option 'opset' for export: input should be a valid integer",
        ),
        (FULL.replace("opset: 17", "opset: yes"), "recipe.yaml:4: option 'opset' for export"),
        (FULL.replace("opset: 17", "opset: [17]"), "found ['17']"),
        (
            FULL.replace("opset: 17", "dtype: fp8"),
            "input should be 'fp32', 'fp16' or 'bf16', found 'fp8'",
        ),
        (FULL.replace("column: review", "column: {a: b}"), "found {'a': 'b'}"),
        (FULL.replace("opset: 17", "opset: "), "recipe.yaml:4: option 'opset' has no value. Leave"),
        (FULL.replace("opset: 17", "opset:"), "unknown option 'opset:' for export; did you mean"),
        (FULL.replace("opset: 17", "task: null"), "the key 'task' is repeated: see line 4."),
        (FULL + "model: again\n", "recipe.yaml:8: the key 'model' is repeated: see line 1."),
        (FULL.replace("org/name@v1", ""), "recipe.yaml:1: model: found nothing, expected text."),
        (FULL.replace("org/name@v1", '""'), "recipe.yaml:1: the key 'model' is empty."),
        (FULL.replace("org/name@v1", "[a]"), "recipe.yaml:1: model: found a list, expected text."),
        (
            FULL.replace('["What a day."]', "[{What: a}]"),
            "recipe.yaml:7: ask: found a mapping, expected text.",
        ),
        ("stages: [export]", "recipe.yaml:1: the key 'model' is missing."),
        ("model: m", "recipe.yaml:1: the key 'stages' is missing."),
        ("model: m\nstages: []", "recipe.yaml:2: stages: found none, expected export first."),
        ("model: m\nstages: export", "recipe.yaml:2: stages: found 'export', expected a list"),
        ("model: m\nstages: {export: }", "recipe.yaml:2: stages: found a mapping, expected a list"),
        ("model: m\nstages:\n- validate", "recipe.yaml:3: the first stage is 'validate', expected"),
        ("model: m\nstages:\n- export\n- export", "recipe.yaml:4: export is named twice"),
        ("model: m\nstages:\n- [export]", "recipe.yaml:3: found a list, expected a stage."),
        ("model: m\nstages:\n- {}", "recipe.yaml:3: found nothing in one stage"),
        ("model: m\nstages:\n- export: 20", "recipe.yaml:3: export: found '20', expected its opt"),
        (
            "model: m\nstages:\n- export:\n  opset: 20",
            "recipe.yaml:3: found 'export', 'opset' in one stage, expected only the stage's name. "
            "Indent its options further",
        ),
        ("", "recipe.yaml:1: the file is empty"),
        ("# only a comment\n", "recipe.yaml:1: the file is empty"),
        ("- export", "recipe.yaml:1: found a list, expected the keys model and stages."),
        ("minilm", "recipe.yaml:1: found text, expected the keys model and stages."),
        ("model: m\nstages: [export\nask: a", "recipe.yaml:3: while parsing a flow sequence, "),
        ("model: m\n\tstages: []", "recipe.yaml:2: while scanning for the next token, found char"),
        ("model: m\nstages: \x07", "recipe.yaml:2: special characters are not allowed, found U+"),
        ("model: m\n---\nmodel: n", "recipe.yaml:2: expected a single document"),
        ("model: *m\n", "recipe.yaml:1: found undefined alias 'm'"),
        ("%YAML 1.3\n---\nmodel: m", "recipe.yaml:1: version minor part can only be 2 or 1"),
        ("model: m\n? [a]\n: b", "recipe.yaml:2: a key is a list or a mapping, expected a name."),
        ("model: m\nstages: [export: &e {opset: 20}, validate: {<<: *e}]", "'<<' is not supported"),
    ],
)
def test_error_names_the_line_and_what_was_found(text, message):
    assert message in error(text)
    assert error(text).startswith("recipe.yaml:")


def test_a_wrong_value_is_reported_with_its_own_line():
    text = "model: m\nstages:\n- export:\n    task: fill-mask\n    opset: new\n    dtype: fp32\n"
    assert error(text).startswith("recipe.yaml:5: option 'opset' for export: ")


@pytest.mark.parametrize(
    "value",
    [
        "!!python/object/apply:os.system [ls]",
        "!!python/name:os.system",
        "!local x",
        "!!binary eA==",
        "!!set {a, b}",
    ],
)
def test_tags_are_refused_and_nothing_is_run(value, monkeypatch):
    monkeypatch.setattr("os.system", lambda _: pytest.fail("ran"))
    assert f"the tag '{value.split()[0]}" in error(f"model: m\nstages: {value}")


@pytest.mark.more
def test_aliases_that_expand_without_end_are_refused():
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 10)]
    assert "more than 10000 values after expanding aliases" in error("\n".join(lines))
    assert "nested deeper than 20 levels" in error("model: &a [*a]")
    assert "nested deeper than 20 levels" in error("[" * 5000)


def test_a_file_far_too_long_is_refused_before_it_is_parsed(monkeypatch):
    monkeypatch.setattr("ruamel.yaml.YAML.compose", lambda *_, **__: pytest.fail("parsed"))
    assert "1048577 characters, expected at most 1048576" in error("x" * 1048577)


def test_a_file_that_cannot_be_read_is_named(tmp_path):
    with pytest.raises(RecipeError, match=r"missing\.yaml: there is no such recipe"):
        Recipe.load(tmp_path / "missing.yaml")
    with pytest.raises(RecipeError, match="the recipe cannot be read"):
        Recipe.load(tmp_path)
    (tmp_path / "model.onnx").write_bytes(b"\x08\x0a\xff\xfe")
    with pytest.raises(RecipeError, match=r"model\.onnx: byte 2 is not UTF-8"):
        Recipe.load(tmp_path / "model.onnx")


def test_a_byte_order_mark_is_no_part_of_the_recipe(tmp_path):
    (tmp_path / "r.yaml").write_text("\ufeffmodel: m\nstages: [export]", encoding="utf-8")
    assert Recipe.load(tmp_path / "r.yaml").model == "m"


# Environment variables.


def test_variables_are_expanded_in_two_forms_and_no_other(monkeypatch):
    monkeypatch.setenv("NAME", "minilm")
    monkeypatch.setenv("EMPTY", "")
    monkeypatch.setenv("NESTED", "${NAME}")
    monkeypatch.delenv("UNSET", raising=False)
    cases = {
        "${NAME}": "minilm",
        "org/${NAME}-${NAME}": "org/minilm-minilm",
        "${UNSET:-a b}": "a b",
        "${EMPTY:-fallback}": "fallback",
        "${NAME:-fallback}": "minilm",
        "x${EMPTY}y${UNSET:-}": "xy",
        "${NESTED}": "${NAME}",
        "$${NAME}": "${NAME}",
        "$NAME $$ ${} ${1} ${NAME:+x} $(ls) $": "$NAME $$ ${} ${1} ${NAME:+x} $(ls) $",
    }
    for written, read in cases.items():
        recipe = Recipe.parse(f"model: m\nstages: [export]\nask: ['{written}']")
        assert recipe.ask == (read,), written


def test_variables_fill_options_of_every_type_but_no_keys(monkeypatch):
    monkeypatch.setenv("OPSET", "18")
    assert only_export("opset: ${OPSET}").opset == 18
    assert "unknown option '${OPSET}' for export" in error(
        "model: m\nstages: [export: {'${OPSET}': 1}]"
    )


def test_an_unset_variable_names_its_line(monkeypatch):
    monkeypatch.delenv("REVIEWS", raising=False)
    message = error(FULL.replace("reviews.csv", "'${REVIEWS}'"))
    assert message.startswith("recipe.yaml:5: the environment variable 'REVIEWS' is not set.")
    assert "${REVIEWS:-default}" in message


# Paths.


def test_paths_start_from_the_recipe_wherever_the_command_runs(tmp_path, monkeypatch):
    folder = tmp_path / "recipes"
    (folder / "mine").mkdir(parents=True)
    (folder / "r.yaml").write_text(
        "model: mine\nout: ../build\nstages:\n"
        "  - export: {cache_dir: cache, python: v5/bin/python}\n"
        "  - validate: {data: r.csv, reference: ./torch, python: python3}\n"
    )
    monkeypatch.chdir(tmp_path)
    for path in (folder / "r.yaml", Path("recipes/r.yaml")):
        recipe = Recipe.load(path)
        export, validate = (step.options for step in recipe.steps)
        assert Path(recipe.model) == folder / "mine"
        assert Path(recipe.out).resolve() == tmp_path / "build"
        assert Path(export.cache_dir).resolve() == folder / "cache"
        assert Path(export.python).resolve() == folder / "v5/bin/python"
        assert validate.python == "python3"
        assert Path(validate.data).resolve() == folder / "r.csv"
        assert Path(validate.reference) == folder / "torch"


@pytest.mark.parametrize(
    "model", ["org/name", "org/name@v1", "name", "package:name", "/data/model"]
)
def test_a_model_that_is_no_path_beside_the_recipe_is_taken_as_written(tmp_path, model):
    (tmp_path / "r.yaml").write_text(f"model: {model}\nstages: [export]")
    assert Recipe.load(tmp_path / "r.yaml").model == model


@pytest.mark.parametrize("model", ["./name", "../name", "name.onnx", "name/model.onnx"])
def test_a_model_written_as_a_path_never_becomes_a_hub_id(tmp_path, model, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("r.yaml").write_text(f"model: {model}\nstages: [export]")
    assert Recipe.load("r.yaml").model == str(tmp_path / model)


def test_absolute_paths_and_home_are_as_they_are_meant(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", "/home/me")
    assert only_validate("data: ~/r.csv").data == "/home/me/r.csv"
    assert only_validate("data: /r.csv").data == "/r.csv"
    assert only_validate("data: ''").data == ""
    assert only_validate("data: ~no_such_user/r.csv").data == "~no_such_user/r.csv"
    assert Recipe.parse(f"model: {'m' * 5000}\nstages: [export]").model == "m" * 5000


def test_a_build_takes_one_profile_or_several_and_paths_from_the_recipe(tmp_path):
    text = "model: m\nstages:\n  - export\n  - build: {profile: batch=1, flavor: tensorrt}\n"
    options = Recipe.parse(text, base=tmp_path).steps[1].options
    assert isinstance(options, BuildConfig)
    assert options.profile == ("batch=1",)
    text = "model: m\nstages: [export, build: {data: reviews.csv, count: 2}]"
    options = Recipe.parse(text, base=tmp_path).steps[1].options
    assert (options.data, options.count) == (str(tmp_path / "reviews.csv"), 2)


def test_an_unknown_option_of_a_build_names_the_nearest():
    text = "model: m\nstages: [export, build: {capabilities: '8.9'}]"
    assert "unknown option 'capabilities' for build; did you mean 'capability'?" in error(text)


# Providers.

CUDA_LIST = """[{cuda: {device_id: 0, arena_extend_strategy: kNextPowerOfTwo, gpu_mem_limit: 2 GiB,
        cudnn_conv_algo_search: HEURISTIC, do_copy_in_default_stream: true}}, cpu]"""


def test_providers_are_a_list_with_options():
    assert only_validate(f"providers: {CUDA_LIST}").providers == (
        "cuda,cpu; cuda.device_id=0; cuda.arena_extend_strategy=kNextPowerOfTwo; "
        "cuda.gpu_mem_limit=2147483648; cuda.cudnn_conv_algo_search=HEURISTIC; "
        "cuda.do_copy_in_default_stream=1"
    )
    assert only_validate("providers: CUDAExecutionProvider,cpu").providers == "cuda,cpu"


def test_a_file_of_providers_is_read_from_the_recipes_directory(tmp_path):
    text = "model: m\nstages:\n  - export\n  - validate: {providers: ocr/config.yaml}\n"
    with pytest.raises(RecipeError, match=r"recipe:4: .*config\.yaml does not exist"):
        Recipe.parse(text, base=tmp_path)
    (tmp_path / "ocr").mkdir()
    (tmp_path / "ocr" / "config.yaml").write_text("cuda: {device_id: 1}\ncpu:\n")
    options = Recipe.parse(text, base=tmp_path).steps[1].options
    assert options.providers == "cuda,cpu; cuda.device_id=1"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("{providers: [{cuda: {devise_id: 0}}]}", "unknown option 'devise_id' for cuda; did you"),
        ("{providers: [cudaa]}", "unknown execution provider 'cudaa'; did you mean 'cuda'?"),
        ("{provider: cpu}", "unknown option 'provider' for validate; did you mean 'providers'?"),
        ("{provders: [cpu]}", "unknown option 'provders' for validate; did you mean 'providers'?"),
    ],
)
def test_providers_that_cannot_be_used_are_named_with_their_line(options, message):
    said = error(f"model: m\nstages:\n  - export\n  - validate: {options}\n")
    assert said.startswith("recipe.yaml:4: ")
    assert message in said


def test_a_stage_without_providers_does_not_know_them():
    said = error("model: m\nstages: [export, build: {providers: [cpu]}]")
    assert "unknown option 'providers' for build" in said


# Another model.


def test_another_model_drops_what_was_said_of_the_first():
    other = Recipe.parse(FULL).with_model("org/other")
    assert other.model == "org/other"
    assert other.ask == ()
    assert other.out == "build/minilm"
    assert other.steps[0].options == ExportConfig(opset=17)
    assert other.steps[1].options.data == "reviews.csv"
    imported = Recipe.parse("model: m.onnx\nstages: [export, validate: {reference: org/name}]")
    assert imported.with_model("org/other").steps[1].options.reference == ""


def test_another_model_takes_the_task_and_revision_that_are_given():
    other = Recipe.parse(FULL).with_model("org/other", task="fill-mask", revision="v2")
    assert other.steps[0].options == ExportConfig(task="fill-mask", revision="v2", opset=17)


def test_a_task_or_a_revision_alone_leaves_the_rest():
    recipe = Recipe.parse(FULL)
    assert recipe.with_model() == recipe == recipe.with_model("org/name@v1")
    assert recipe.with_model(task="fill-mask").ask == recipe.ask
    assert recipe.with_model(task="fill-mask").steps[0].options.task == "fill-mask"
    pinned = recipe.with_model("org/name@v2")
    assert (pinned.model, pinned.ask) == ("org/name@v2", recipe.ask)
    assert pinned.steps[0].options.task == "text-classification"
    named = Recipe.parse(FULL.replace("@v1", "").replace("opset: 17", "revision: v1"))
    assert named.with_model("org/name@v2").steps[0].options.revision == "main"
    newer = recipe.with_model(revision="v2")
    assert (newer.model, newer.steps[0].options.revision) == ("org/name", "v2")
    assert newer.ask == recipe.ask


def test_two_revisions_for_one_model_are_an_error():
    with pytest.raises(
        OptionError, match="names the revision 'v1', but the option revision is 'v2'"
    ):
        Recipe.default().with_model("org/other@v1", revision="v2")
    message = error(FULL.replace("opset: 17", "revision: v2"))
    assert message.startswith("recipe.yaml:4: option 'revision' for export is 'v2', but the model")
    Recipe.parse(FULL.replace("opset: 17", "revision: v1"))


def test_a_directory_with_an_at_sign_has_no_revision(tmp_path):
    path = tmp_path / "name@2"
    path.mkdir()
    moved = Recipe.default().with_model(str(path), revision="v2")
    assert moved.model == str(path)


# Made in Python.


def test_a_recipe_made_in_python_is_held_to_the_same_order():
    with pytest.raises(OptionError, match="names no model"):
        Recipe("", (Step("export", ExportConfig()),))
    with pytest.raises(OptionError, match="found none, expected export first"):
        Recipe("m", ())
    with pytest.raises(OptionError, match="the first stage is 'validate'"):
        Recipe("m", (Step("validate", ValidateConfig()),))


# The recipes that come with the repository.


def test_the_minilm_recipe_is_the_default():
    assert Recipe.load(RECIPES / "minilm.yaml") == Recipe.default()
    assert len(Recipe.default().ask) == 3


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.yaml")), ids=lambda path: path.name)
def test_every_recipe_of_the_repository_can_be_read(path, monkeypatch):
    monkeypatch.setenv("MODEL", "org/name")
    monkeypatch.setenv("REVIEWS", "reviews.csv")
    recipe = Recipe.load(path)
    assert recipe.steps[0].stage == "export"
    assert len(recipe.steps) > 1


def test_the_recipe_in_the_documentation_can_be_read():
    document = (RECIPES.parent / "docs" / "recipes.md").read_text(encoding="utf-8")
    first = document.split("```yaml\n")[1].split("```")[0]
    assert [step.stage for step in Recipe.parse(first).steps] == ["export", "validate"]


def test_stage_that_follows_itself_is_refused():
    text = "model: org/name\nstages:\n  - export\n  - validate\n  - validate: {rows: 8}\n"
    with pytest.raises(RecipeError, match="recipe:5: validate follows itself"):
        Recipe.parse(text)


def test_model_kwargs_name_models_beside_the_recipe(tmp_path):
    (tmp_path / "vocoder").mkdir()
    (tmp_path / "recipe.yaml").write_text(
        "model: org/name\nstages:\n  - export:\n      model_kwargs: {vocoder: vocoder}\n"
    )
    (step,) = Recipe.load(tmp_path / "recipe.yaml").steps
    assert step.options.model_kwargs == {"vocoder": str(tmp_path / "vocoder")}
