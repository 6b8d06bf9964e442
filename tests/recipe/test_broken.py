"""Recipes that cannot run: each is refused with file, line and remedy before anything has run."""

import shutil

import pytest

from enginery import Recipe, run_recipe
from enginery.cli import main
from enginery.core.errors import EngineryError, OptionError, ProviderError, RecipeError
from enginery.export.config import ExportConfig
from enginery.optimize.config import OptimizeConfig
from enginery.recipe import Step
from enginery.recipe.steps import PredictStage

HEAD = "model: ./model\nout: out\nstages:\n"
EXPORT = "  - export: {task: text-classification}\n"
PUBLISH = "publish: {url: registry}"


def recipe(*stages):
    """A recipe with these stages; the lines of each are its options."""
    return HEAD + "".join("  - " + stage.replace("\n", "\n      ") + "\n" for stage in stages)


def then(*stages):
    return recipe("export: {task: text-classification}", *stages)


@pytest.fixture(scope="module")
def beside(tmp_path_factory, tiny_model):
    """A directory with a model and data, in which recipes are written."""
    folder = tmp_path_factory.mktemp("recipes")
    shutil.copytree(tiny_model("bert", "text-classification"), folder / "model")
    (folder / "reviews.csv").write_text("text,label\nGood.,1\nBad.,0\n")
    (folder / "predicted.csv").write_text("text,label,predicted_label\nGood.,1,1\n")
    (folder / "reviews.jsonl").write_text('{"text": "Good."}\n{"text": "Bad."}\n')
    (folder / "semicolons.csv").write_text("text;label\nGood.;1\n")
    (folder / "empty.csv").write_text("text,label\n")
    (folder / "plain.csv").write_text("text,other\nGood.,Better.\n")
    (folder / "latin.csv").write_bytes("text\nGrün.\n".encode("latin-1"))
    (folder / "fake.onnx").write_bytes(b"not ONNX")
    for name, weights in (("empty", ()), ("pickled", ("pytorch_model.bin",))):
        shutil.copytree(folder / "model", folder / name, ignore=shutil.ignore_patterns("*.safe*"))
        for file in weights:
            (folder / name / file).write_bytes(b"weights")
    (folder / "folder.csv").mkdir()
    (folder / "photos").mkdir()
    (folder / "notes").mkdir()
    (folder / "notes/thesis.txt").write_text("years of work")
    return folder


def state(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


# What is written, words of the problem, and, where the recipe itself finds it, of the remedy. The
# line that is to be named is the last one, or the one marked with "here".
BROKEN = [
    (
        recipe("export:\ntask: fill-mask\nopsets: 20"),
        "unknown option 'opsets' for export; did you mean 'opset'?",
        "Known options: task",
    ),
    (
        recipe("export:\nopset: 200"),
        "option 'opset' is 200, expected 7 to 23",
        "Leave it out for 20",
    ),
    (
        then("optimize: {target: cuda}", "quantize: {data: reviews.csv}"),
        "quantize follows optimize, which leaves fp16 for cuda",
        "Set from: export, or leave optimize out",
    ),
    (
        then("validate: {from: quantize}"),
        "from: no quantize stands before it",
        "Known here: export",
    ),
    (
        then("optimize: {target: cuda}", "validate: {from: optimise}"),
        "from: unknown stage 'optimise'; did you mean 'optimize'?",
        "Stages that make an artifact: export, optimize",
    ),
    (recipe("export:  # here\nfrom: export"), "export makes the first artifact", "Leave from out"),
    (
        then("optimize:\nfrom: [export]"),
        "from: found a list, expected the name of a stage",
        "enginery optimize --help",
    ),
    (
        then("validate", "quantize: {from: export, data: reviews.csv}", PUBLISH),
        "publish follows quantize without a validation",
        "Put - validate before it",
    ),
    (
        then("validate", "publish: {url: registry, variants: export}"),
        "publish has variants, which only the layout hub holds",
        "Set layout: hub",
    ),
    (
        then("validate", "publish: {url: registry, layout: hub, variants: [optimise]}"),
        "variants: no optimise stands before it",
        "Stages that make an artifact: export",
    ),
    (
        then(
            "validate",
            "optimize",
            "publish: {from: export, url: registry, layout: hub, variants: [optimize]}",
        ),
        "publish takes what optimize made without a validation",
        "Put - validate: {from: optimize} before it",
    ),
    (
        recipe("export:\ntask: fill-mask\nout: a", "optimize:\nout: ./a"),
        "two artifacts go to",
        "Name another directory",
    ),
    (recipe("export:\ntask: fill-mask\nout: notes"), "not an enginery artifact"),
    (then("validate: {out: a}"), "unknown option 'out' for validate", "Known options"),
    (
        then("optimize: {target: cuda}", "build: {capability: 8.9}"),
        "TensorRT parses no graph for cuda",
        "target: tensorrt",
    ),
    (recipe("export: {dtype: fp16}", "optimize"), "optimize starts from fp32", "leave dtype out"),
    (
        then("quantize: {data: reviews.csv}", "validate", "quantize: {data: reviews.csv}"),
        "quantize is named twice",
        "Leave one out",
    ),
    (
        then("export-triton: {out: triton, backend: tensorrt}"),
        "no stage builds one",
        "build: {flavor: tensorrt}",
    ),
    (
        then("quantize: {data: reviews.csv}", "export-triton: {out: triton, provider: cuda}"),
        "the artifact is int8, made for TensorRT",
        "Leave out --provider",
    ),
    (
        then(
            "quantize: {data: reviews.csv}",
            "export-kserve: {out: k, storage_uri: s3://a/b, image: i}",
        ),
        "no stage builds one",
        "build: {flavor: tensorrt}",
    ),
    (
        then(
            "build: {flavor: tensorrt-rtx, capability: 8.9}",
            "export-kserve: {out: k, storage_uri: s3://a/b, image: i, provider: tensorrt}",
        ),
        "requires an engine of TensorRT, and no stage builds one",
        "build: {flavor: tensorrt}",
    ),
    (then("quantize:\ndata: reviews.csv\nscheme: fp8\ncapability: 8.0"), "no FP8 matrix products"),
    (
        then("build:\ncapability: 8.9\ndata: reviews.csv\nprofile: batch=1,sequence=8"),
        "several options set profiles",
    ),
    (
        then("build:\ncapability: 8.9\nprofile: batch=1,sequence=8\noptimization_level: 5"),
        "has no effect in TensorRT for RTX",
    ),
    (then("export-triton:\nout: t\nprovider: cpu\nbackend: tensorrt"), "needs a GPU"),
    (
        then("predict:\ninput: plain.csv\nout: a.csv\nencoding: utf-99"),
        "'encoding' is 'utf-99', expected an encoding",
    ),
    (HEAD + EXPORT + 'ask: "a\\0b"\n', "NUL character"),
    (then("quantize"), "no calibration inputs"),
    (
        then("build: {profile: 'batch=1,sequence=8',\ncapability: 9.9}"),
        "does not build for compute capability '9.9'",
    ),
    (then("optimize:\nlevel: O3"), "option 'level' is O3"),
    (then("bench:\nagainst: pytorhc"), "did you mean 'pytorch'?"),
    (then("predict:\ninput: reviews.csv\nout: a.xlsx"), "has the suffix '.xlsx'"),
    (then("predict: {input: reviews.csv}"), "option 'out' for predict is missing"),
    (recipe("export:\ndtype: bf16  # here\nexporter: optimum"), "no BF16 kernels"),
    (then("validate:\nprofile: batch=1,sequence=1:8:5000"), "the model's positions end at"),
    (then("bench:\nshape: sequnce=3"), "did you mean 'sequence'?"),
    (
        then("build:\ncapability: 8.9\ndata: reviews.csv\nbatch: 8:1"),
        "expected min:opt:max or one size",
    ),
    (then("bench:\nsequence: 16,5000"), "the model's positions end at"),
    (then("build: {capability: 8.9}"), "build has no profile"),
    (then("validate:\nproviders: acl"), "is built without it"),
    (then("bench:\nproviders: cpu\nprovider_option: cuda.device_id=0"), "which is not requested"),
    (
        then("predict: {input: reviews.csv, out: a.csv, providers: cpu,\ncuda_graph: true}"),
        "cpu has no CUDA graphs",
    ),
    (
        then("validate:\nproviders: [{cuda: {enable_cuda_graph: true}}]"),
        "'enable_cuda_graph' for cuda is set by itself",
    ),
    (recipe("export:\ntask: text-clasification"), "did you mean 'text-classification'?"),
    ("model: ./models  # here\nstages: [export]\n", "no such directory or file"),
    ("model: ./fake.onnx  # here\nstages: [export]\n", "is not an ONNX model"),
    ("out: out\nmodel: ./empty  # here\nstages: [export]\n", "has no weights"),
    ("model: package:no_such_package  # here\nstages: [export]\n", "is not installed"),
    ("model: ./photos  # here\nstages: [export]\n", "has no config.json"),
    ("model: org/name@v1\nstages:\n  - export: {revision: v2}\n", "but the model is"),
    (
        recipe(
            "export: {task: token-classification}",
            "predict:\ninput: plain.csv\nout: a.csv\npair_column: other",
        ),
        "option 'pair_column' is 'other', but the model does token-classification",
    ),
    (then("bench:\nimages: photos"), "the model's task is text-class"),
    ("model: ./model\nout: reviews.csv/out  # here\nstages: [export]\n", "reviews.csv is a file"),
    (then("predict:\ninput: plain.csv\nout: folder.csv"), "is a directory, expected a file"),
    (then("export-triton:\nprovider: cpu\nout: plain.csv"), "is a file, expected a directory"),
    (then("validate:\ndata: latin.csv"), "cannot be read"),
    (then("validate:\nrows: 8\ndata: review.csv"), "no such file or folder"),
    (
        then("validate:\ndata: reviews.csv\ncolumn: texts"),
        "has no column 'texts'; did you mean 'text'?",
    ),
    (
        then("quantize:\ndata: reviews.csv\naccuracy_budget: 1%\nlabel_column: labels"),
        "has no column 'labels'",
    ),
    (
        recipe("export: {task: image-classification}", "validate:\ndata: reviews.csv"),
        "expected a folder of images",
    ),
    (recipe("export: {task: image-classification}", "bench:\nimages: photos"), "has no images"),
    (then("predict:\ninput: reviews.csv\nout: a.csv\ncolumn: review"), "has no column 'review'"),
    (
        then("predict:\nout: a.csv\ninput: predicted.csv"),
        "has a column 'predicted_label', and the prediction",
    ),
    (then("predict:\ninput: reviews.csv\nout: a.csv\ntop_k: 20000"), "top_k"),
    (
        recipe("export: {task: audio-xvector}", "predict:  # here\ninput: reviews.csv\nout: a.csv"),
        "predict follows an export for audio-xvector",
    ),
    (
        then("predict:\ninput: reviews.csv\nout: ./reviews.csv"),
        "is the input, which is never overwritten",
    ),
    (then("predict: {input: '-', out: a.csv}"), "standard input has no su"),
    (then("validate", "publish:\nurl: hf://a b/c"), "expected hf://org/name"),
    (then("validate", "publish:\nurl: reviews.csv"), "is a file, expected a folder"),
    (
        then("export-kserve:\nout: k\nimage: i\nstorage_uri: models/b"),
        "expected an address that KServe supports",
    ),
]


@pytest.mark.parametrize("case", BROKEN, ids=lambda case: case[1])
def test_file_line_problem_and_remedy_are_named_and_nothing_has_run(
    case, beside, tmp_path, monkeypatch
):
    text, problem, *remedy = case
    lines = text.splitlines()
    line = next((n for n, words in enumerate(lines, 1) if "# here" in words), len(lines))
    path = beside / "recipe.yaml"
    path.write_text(text)
    home = tmp_path / "home"
    monkeypatch.setenv("ENGINERY_HOME", str(home))
    monkeypatch.delenv("NO_SUCH", raising=False)
    monkeypatch.setattr("enginery.api.run_cached", lambda *_, **__: pytest.fail("it ran"))
    before = state(beside)
    with pytest.raises(RecipeError) as caught:
        run_recipe(path)
    said = caught.value
    assert said.message.startswith(f"{path}:{line}: "), said
    assert problem in said.message
    assert said.do, f"no remedy: {said}"
    assert all(words in said.do for words in remedy), said
    assert state(beside) == before
    assert not home.exists()


@pytest.mark.parametrize(
    ("stages", "lines"),
    [
        (["quantize: {rows: many}", "bench: {batch: [1], speed: 3}"], [5, 6]),
        (["validate: {data: review.csv}", "bench: {}", "build: {profile: [batch=9:1]}"], [5, 7]),
    ],
    ids=["types", "values"],
)
def test_every_stage_with_a_mistake_is_named(beside, stages, lines):
    path = beside / "recipe.yaml"
    path.write_text(HEAD + EXPORT + "".join(f"  - {stage}\n" for stage in stages))
    with pytest.raises(RecipeError) as caught:
        run_recipe(path)
    places = [problem.message.partition(": ")[0] for problem in caught.value.problems]
    assert places == [f"{path}:{line}" for line in lines]


def test_check_says_what_is_wrong_and_runs_nothing(beside, capsys, monkeypatch):
    monkeypatch.setattr("enginery.api.run_cached", lambda *_, **__: pytest.fail("it ran"))
    path = beside / "recipe.yaml"
    path.write_text(HEAD + EXPORT + "  - validate: {data: review.csv}\n")
    with pytest.raises(SystemExit) as ended:
        main(["run", "--check", str(path)])
    assert ended.value.code == 2
    assert f"{path}:5: data " in capsys.readouterr().err.replace("\n", " ")

    path.write_text(HEAD + EXPORT + "  - validate: {data: reviews.csv}\n")
    main_ends_well(["run", "--check", str(path), "--json"])
    assert '"validate"' in capsys.readouterr().out


def main_ends_well(words):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 0


def test_what_is_wrong_on_the_command_line_names_no_line_of_the_recipe(beside, monkeypatch):
    path = beside / "recipe.yaml"
    path.write_text(HEAD + EXPORT)
    plan = Recipe.load(path)
    with pytest.raises(OptionError, match=r"^option 'task': unknown task 'sorting'"):
        run_recipe(plan.with_model(task="sorting"))
    with pytest.raises(EngineryError, match=r"^model 'a b': no such directory"):
        run_recipe(plan.with_model("a b"))
    with pytest.raises(EngineryError, match="not an enginery artifact") as caught:
        run_recipe(plan.changed(out=str(beside / "notes")))
    assert not isinstance(caught.value, RecipeError)


def test_a_recipe_made_in_python_is_checked_as_well(beside):
    export = Step("export", ExportConfig(task="text-classification"))
    model = str(beside / "model")
    with pytest.raises(OptionError, match="option 'level' is O3"):
        run_recipe(Recipe(model, (export, Step("optimize", OptimizeConfig(level="O3")))))
    predict = Step("predict", PredictStage(input="nowhere.csv", out="a.csv"))
    with pytest.raises(EngineryError, match="no such file or folder"):
        run_recipe(Recipe(model, (export, predict)))


def test_an_export_on_a_gpu_that_is_not_there_names_its_line(beside, monkeypatch):
    def no_gpu():
        raise ProviderError("no GPU can be used.", do="Give the container its GPUs.")

    monkeypatch.setattr("enginery.recipe.checks.visible_gpus", no_gpu)
    plan = Recipe.parse(HEAD + "  - export:\n      device: cuda\n", base=beside)
    with pytest.raises(RecipeError, match=r"^recipe:5: no GPU can be used\. Give the container"):
        run_recipe(plan)


def test_pickled_weights_are_for_who_runs_the_recipe_to_allow(beside):
    from enginery.recipe.checks import check_recipe

    plan = Recipe.parse("model: ./pickled\nstages: [export]\n", base=beside)
    with pytest.raises(RecipeError, match="only pickled weights"):
        check_recipe(plan)
    check_recipe(plan.trusted(allow_pickle=True))


def test_a_file_that_an_earlier_stage_leaves_need_not_be_there(beside):
    from enginery.recipe.checks import check_recipe

    text = (
        HEAD + EXPORT + "  - predict: {input: reviews.csv, out: first.csv, prefix: a_}\n"
        "  - predict: {input: first.csv, out: second.csv, prefix: again_}\n"
    )
    check_recipe(Recipe.parse(text, base=beside))


def test_predict_may_follow_the_export_of_a_model_that_generates(beside):
    from enginery.recipe.checks import check_recipe

    export = "  - export: {task: text-generation-with-past}\n"
    predict = "  - predict: {input: plain.csv, out: a.csv, generation: [max_new_tokens=4]}\n"
    check_recipe(Recipe.parse(HEAD + export + predict, base=beside))
    with pytest.raises(RecipeError, match="expected NAME=VALUE"):
        check_recipe(Recipe.parse(HEAD + export + predict.replace("=4", ""), base=beside))
