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
IMAGES = "  - export: {task: image-classification}\n"


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


# What is written, the line that is to be named, words of the problem, and, where the recipe itself
# finds it, of the remedy.
BROKEN = {
    # keys and values
    "unknown key": (HEAD + EXPORT + "outs: x\n", 5, "unknown key 'outs'", "Known keys: model, out"),
    "no model": ("out: out\nstages: [export]\n", 1, "the key 'model' is missing", "model: …"),
    "unknown stage": (HEAD + EXPORT + "  - bnech\n", 5, "did you mean 'bench'?", "Known stages"),
    "unknown option": (
        HEAD + "  - export:\n      task: fill-mask\n      opsets: 20\n",
        6,
        "unknown option 'opsets' for export; did you mean 'opset'?",
        "Known options: task",
    ),
    "not a number": (
        HEAD + "  - export:\n      task: fill-mask\n      opset: new\n",
        6,
        "option 'opset' for export: input should be a valid integer",
        "enginery export --help",
    ),
    "a number out of range": (
        HEAD + "  - export:\n      opset: 200\n",
        5,
        "option 'opset' is 200, expected 7 to 23",
        "Leave it out for 20",
    ),
    "no value": (HEAD + "  - export:\n      opset:\n", 5, "'opset' has no value", "Leave the line"),
    "options that are none": (HEAD + "  - export: 20\n", 4, "found '20', expected its", "Write"),
    "options not indented": (
        HEAD + "  - export:\n    opset: 20\n",
        4,
        "in one stage, expected",
        "Indent its options",
    ),
    "key twice": (HEAD + EXPORT + "out: b\n", 5, "the key 'out' is repeated", "Keep one"),
    "tag": (HEAD + EXPORT + "ask: !!set {a}\n", 5, "the tag '!!set' is not allowed", "Leave the"),
    "variable": (HEAD + EXPORT + "ask: ${NO_SUCH}\n", 5, "'NO_SUCH' is not set", "Set it, or"),
    "bracket": (HEAD + "  - export: {task\nask: a\n", 5, "while parsing a flow", "Fix the YAML"),
    # order
    "no export": (HEAD + "  - validate\n", 4, "the first stage is 'validate'", "Begin with"),
    "export twice": (HEAD + EXPORT + "  - export\n", 5, "export is named twice", "Leave one out"),
    "stage twice": (
        HEAD + EXPORT + "  - validate\n  - validate: {rows: 8}\n",
        6,
        "validate follows itself",
        "Put everything to check into one",
    ),
    "quantize after optimize for cuda": (
        HEAD + EXPORT + "  - optimize: {target: cuda}\n  - quantize: {data: reviews.csv}\n",
        6,
        "quantize follows optimize, which leaves fp16 for cuda",
        "Set from: export, or leave optimize out",
    ),
    "from a stage that is not before": (
        HEAD + EXPORT + "  - validate: {from: quantize}\n",
        5,
        "from: no quantize stands before it",
        "Known here: export",
    ),
    "from a stage that there is not": (
        HEAD + EXPORT + "  - optimize: {target: cuda}\n  - validate: {from: optimise}\n",
        6,
        "from: unknown stage 'optimise'; did you mean 'optimize'?",
        "Stages that make an artifact: export, optimize",
    ),
    "from for the first stage": (
        HEAD + "  - export:\n      from: export\n",
        4,
        "export makes the first artifact",
        "Leave from out",
    ),
    "from without a name": (
        HEAD + EXPORT + "  - optimize:\n      from: [export]\n",
        6,
        "from: found a list, expected the name of a stage",
        "enginery optimize --help",
    ),
    "publish of a branch without a validation": (
        HEAD + EXPORT + "  - optimize\n  - validate\n  - quantize: {from: export, "
        "data: reviews.csv}\n  - publish: {url: registry}\n",
        8,
        "publish follows quantize without a validation",
        "Put - validate before it",
    ),
    "variants in a folder that holds one": (
        HEAD + EXPORT + "  - validate\n  - publish: {url: registry, variants: export}\n",
        6,
        "publish has variants, which only the layout hub holds",
        "Set layout: hub",
    ),
    "variants of no stage": (
        HEAD + EXPORT + "  - validate\n"
        "  - publish: {url: registry, layout: hub, variants: [optimise]}\n",
        6,
        "variants: no optimise stands before it",
        "Stages that make an artifact: export",
    ),
    "variants without a validation": (
        HEAD + EXPORT + "  - validate\n  - optimize\n"
        "  - publish: {from: export, url: registry, layout: hub, variants: [optimize]}\n",
        7,
        "publish takes what optimize made without a validation",
        "Put - validate: {from: optimize} before it",
    ),
    "two copies in one place": (
        HEAD + "  - export:\n      task: fill-mask\n      out: a\n  - optimize:\n      out: ./a\n",
        8,
        "two artifacts go to",
        "Name another directory",
    ),
    "a copy over files of yours": (
        HEAD + "  - export:\n      task: fill-mask\n      out: notes\n",
        6,
        "not an enginery artifact",
    ),
    "a copy of what makes none": (
        HEAD + EXPORT + "  - validate: {out: a}\n",
        5,
        "unknown option 'out' for validate",
        "Known options",
    ),
    "build after optimize for cuda": (
        HEAD + EXPORT + "  - optimize: {target: cuda}\n  - build: {capability: 8.9}\n",
        6,
        "TensorRT parses no graph for cuda",
        "target: tensorrt",
    ),
    "build of INT8 for the CPU": (
        HEAD + EXPORT + "  - quantize: {scheme: dynamic, target: cpu}\n"
        "  - build: {capability: 8.9}\n",
        6,
        "TensorRT parses no graph for cpu",
        "leave build out",
    ),
    "optimize of FP16": (
        HEAD + "  - export: {dtype: fp16}\n  - optimize\n",
        5,
        "optimize starts from fp32",
        "leave dtype out",
    ),
    "quantize twice": (
        HEAD + EXPORT + "  - quantize: {data: reviews.csv}\n  - validate\n"
        "  - quantize: {data: reviews.csv}\n",
        7,
        "quantize is named twice",
        "Leave one out",
    ),
    "publish without a validation": (
        HEAD + EXPORT + "  - publish: {url: registry}\n",
        5,
        "without a validation",
        "Put - validate before it",
    ),
    "publish of what was validated before it changed": (
        HEAD + EXPORT + "  - validate\n  - optimize\n  - publish: {url: registry}\n",
        7,
        "publish follows optimize without a validation",
        "Put - validate before it",
    ),
    "Triton without an engine": (
        HEAD + EXPORT + "  - export-triton: {out: triton, backend: tensorrt}\n",
        5,
        "no stage builds one",
        "build: {flavor: tensorrt}",
    ),
    "Triton with a provider that the artifact is not made for": (
        HEAD + EXPORT + "  - quantize: {data: reviews.csv}\n"
        "  - export-triton: {out: triton, provider: cuda}\n",
        6,
        "the artifact is int8, made for TensorRT",
        "Leave out --provider",
    ),
    "KServe with INT8 and without an engine": (
        HEAD + EXPORT + "  - quantize: {data: reviews.csv}\n"
        "  - export-kserve: {out: k, storage_uri: s3://a/b, image: i}\n",
        6,
        "no stage builds one",
        "build: {flavor: tensorrt}",
    ),
    "KServe with the engine of another flavor": (
        HEAD + EXPORT + "  - build: {flavor: tensorrt-rtx, capability: 8.9}\n"
        "  - export-kserve: {out: k, storage_uri: s3://a/b, image: i, provider: tensorrt}\n",
        6,
        "requires an engine of TensorRT, and no stage builds one",
        "build: {flavor: tensorrt}",
    ),
    # options that do not go together, budgets, limits
    "FP8 for a GPU without": (
        HEAD + EXPORT + "  - quantize:\n      data: reviews.csv\n      scheme: fp8\n"
        "      capability: 8.0\n",
        8,
        "no FP8 matrix products",
    ),
    "FP16 for the CPU": (
        HEAD + EXPORT + "  - optimize:\n      precision: fp16\n      target: cpu\n",
        7,
        "option 'precision' is fp16 for the target cpu",
    ),
    "labels without a budget": (
        HEAD + EXPORT + "  - quantize:\n      label_column: label\n      data: plain.csv\n",
        6,
        "without 'accuracy_budget'",
    ),
    "two ways of naming profiles": (
        HEAD + EXPORT + "  - build:\n      capability: 8.9\n      data: reviews.csv\n"
        "      profile: batch=1,sequence=8\n",
        8,
        "several options set profiles",
    ),
    "option of the other TensorRT": (
        HEAD + EXPORT + "  - build:\n      capability: 8.9\n      profile: batch=1,sequence=8\n"
        "      timing_cache: cache\n",
        8,
        "has no effect in TensorRT for RTX",
    ),
    "Triton's backend for the CPU": (
        HEAD + EXPORT + "  - export-triton:\n      out: t\n      provider: cpu\n"
        "      backend: tensorrt\n",
        8,
        "needs a GPU",
    ),
    "encoding": (
        HEAD + EXPORT + "  - predict:\n      input: plain.csv\n      out: a.csv\n"
        "      encoding: utf-99\n",
        8,
        "'encoding' is 'utf-99', expected an encoding",
    ),
    "NUL": (HEAD + EXPORT + 'ask: "a\\0b"\n', 5, "NUL character"),
    "no calibration": (HEAD + EXPORT + "  - quantize\n", 5, "no calibration inputs"),
    "capability": (
        HEAD + EXPORT + "  - build: {profile: 'batch=1,sequence=8',\n      capability: 9.9}\n",
        6,
        "does not build for compute capability '9.9'",
    ),
    "level without fusions": (
        HEAD + EXPORT + "  - optimize:\n      level: O3\n",
        6,
        "option 'level' is O3",
    ),
    "contender": (
        HEAD + EXPORT + "  - bench:\n      against: pytorhc\n",
        6,
        "did you mean 'pytorch'?",
    ),
    "output of another kind": (
        HEAD + EXPORT + "  - predict:\n      input: reviews.csv\n      out: a.xlsx\n",
        7,
        "has the suffix '.xlsx'",
    ),
    "option missing": (
        HEAD + EXPORT + "  - predict: {input: reviews.csv}\n",
        5,
        "option 'out' for predict is missing",
    ),
    "dtype on the CPU": (
        HEAD + "  - export:\n      dtype: bf16\n      exporter: optimum\n",
        5,
        "no BF16 kernels",
    ),
    # profiles
    "profile that is none": (
        HEAD + EXPORT + "  - validate:\n      rows: 8\n      profile: batch\n",
        7,
        "found 'batch', expected name=min:opt:max",
    ),
    "profile beyond the positions": (
        HEAD + EXPORT + "  - validate:\n      profile: batch=1,sequence=1:8:5000\n",
        6,
        "the model's positions end at",
    ),
    "profile of an unknown dim": (
        HEAD + EXPORT + "  - validate:\n      profile: batch=1,sequnce=8\n",
        6,
        "did you mean 'sequence'?",
    ),
    "shape of an unknown dim": (
        HEAD + EXPORT + "  - bench:\n      shape: sequnce=3\n",
        6,
        "did you mean 'sequence'?",
    ),
    "sizes of profiles that are none": (
        HEAD + EXPORT + "  - build:\n      capability: 8.9\n      data: reviews.csv\n"
        "      batch: 8:1\n",
        8,
        "expected min:opt:max or one size",
    ),
    "bench beyond the positions": (
        HEAD + EXPORT + "  - bench:\n      sequence: 16,5000\n",
        6,
        "the model's positions end at",
    ),
    "no profile": (HEAD + EXPORT + "  - build: {capability: 8.9}\n", 5, "build has no profile"),
    # providers
    "provider": (
        HEAD + EXPORT + "  - validate:\n      providers: cudaa\n",
        6,
        "did you mean 'cuda'?",
    ),
    "provider that this machine cannot have": (
        HEAD + EXPORT + "  - validate:\n      providers: acl\n",
        6,
        "is built without it",
    ),
    "provider option": (
        HEAD + EXPORT + "  - validate:\n      providers:\n        - cpu\n"
        "        - cuda: {devise_id: 0}\n",
        8,
        "did you mean 'device_id'?",
    ),
    "provider option of another": (
        HEAD
        + EXPORT
        + "  - bench:\n      providers: cpu\n      provider_option: cuda.device_id=0\n",
        7,
        "which is not requested",
    ),
    "CUDA graph on the CPU": (
        HEAD + EXPORT + "  - predict: {input: reviews.csv, out: a.csv, providers: cpu,\n"
        "      cuda_graph: true}\n",
        6,
        "cpu has no CUDA graphs",
    ),
    "CUDA graph by the provider's own option": (
        HEAD + EXPORT + "  - validate:\n      providers: [{cuda: {enable_cuda_graph: true}}]\n",
        6,
        "'enable_cuda_graph' for cuda is set by itself",
    ),
    # model and task
    "task": (
        HEAD + "  - export:\n      task: text-clasification\n",
        5,
        "did you mean 'text-classification'?",
    ),
    "model that is not there": (
        "model: ./models\nstages: [export]\n",
        1,
        "no such directory or file",
    ),
    "file that is no ONNX": ("model: ./fake.onnx\nstages: [export]\n", 1, "is not an ONNX model"),
    "model without weights": ("out: out\nmodel: ./empty\nstages: [export]\n", 2, "has no weights"),
    "model with pickled weights alone": (
        "model: ./pickled\nstages: [export]\n",
        1,
        "only pickled weights",
    ),
    "package that is not there": (
        "model: package:no_such_package\nstages: [export]\n",
        1,
        "is not installed",
    ),
    "directory without a model": ("model: ./photos\nstages: [export]\n", 1, "has no config.json"),
    "two revisions": (
        "model: org/name@v1\nstages:\n  - export: {revision: v2}\n",
        3,
        "but the model is",
    ),
    "pairs for a model of single texts": (
        HEAD + "  - export: {task: token-classification}\n  - predict:\n      input: plain.csv\n"
        "      out: a.csv\n      pair_column: other\n",
        8,
        "option 'pair_column' is 'other', but the model does token-classification",
    ),
    "images for a model of texts": (
        HEAD + EXPORT + "  - bench:\n      images: photos\n",
        6,
        "the model's task is text-class",
    ),
    # files and columns
    "out in a file": (
        "model: ./model\nout: reviews.csv/out\nstages: [export]\n",
        2,
        "reviews.csv is a file",
    ),
    "output that is a directory": (
        HEAD + EXPORT + "  - predict:\n      input: plain.csv\n      out: folder.csv\n",
        7,
        "is a directory, expected a file",
    ),
    "directory that is a file": (
        HEAD + EXPORT + "  - export-triton:\n      provider: cpu\n      out: plain.csv\n",
        7,
        "is a file, expected a directory",
    ),
    "a name too long for a file": (
        HEAD + EXPORT + f"  - validate:\n      data: {'x' * 3000}\n",
        6,
        "File name too long",
    ),
    "not UTF-8": (HEAD + EXPORT + "  - validate:\n      data: latin.csv\n", 6, "cannot be read"),
    "column of the question": (
        HEAD + "  - export: {task: question-answering}\n  - predict:\n      input: plain.csv\n"
        "      out: a.csv\n      question_column: q\n",
        8,
        "has no column 'q'",
    ),
    "out that is somebody else's": (
        "model: ./model\nout: notes\nstages: [export]\n",
        2,
        "not an enginery artifact",
    ),
    "data that are not there": (
        HEAD + EXPORT + "  - validate:\n      rows: 8\n      data: review.csv\n",
        7,
        "no such file or folder",
    ),
    "column": (
        HEAD + EXPORT + "  - validate:\n      data: reviews.csv\n      column: texts\n",
        7,
        "has no column 'texts'; did you mean 'text'?",
    ),
    "label column": (
        HEAD + EXPORT + "  - quantize:\n      data: reviews.csv\n      accuracy_budget: 1%\n"
        "      label_column: labels\n",
        8,
        "has no column 'labels'",
    ),
    "separator": (
        HEAD + EXPORT + "  - bench:\n      data: semicolons.csv\n",
        6,
        "has no column 'text'",
    ),
    "texts for a model of images": (
        HEAD + IMAGES + "  - validate:\n      data: reviews.csv\n",
        6,
        "expected a folder of images",
    ),
    "no images": (HEAD + IMAGES + "  - bench:\n      images: photos\n", 6, "has no images"),
    "ranges": (
        HEAD + EXPORT + "  - quantize:\n      ranges: nowhere\n",
        6,
        "expected a ranges.json",
    ),
    "column of the input": (
        HEAD + EXPORT + "  - predict:\n      input: reviews.csv\n      out: a.csv\n"
        "      column: review\n",
        8,
        "has no column 'review'",
    ),
    "column that the answer has": (
        HEAD + EXPORT + "  - predict:\n      out: a.csv\n      input: predicted.csv\n",
        7,
        "has a column 'predicted_label', and the prediction",
    ),
    "option that the task does not take": (
        HEAD + EXPORT + "  - predict:\n      input: reviews.csv\n      out: a.csv\n"
        "      top_k: 20000\n",
        8,
        "top_k",
    ),
    "task of sound": (
        HEAD + "  - export: {task: audio-xvector}\n"
        "  - predict:\n      input: reviews.csv\n      out: a.csv\n",
        5,
        "predict follows an export for audio-xvector",
    ),
    "input that would be overwritten": (
        HEAD + EXPORT + "  - predict:\n      input: reviews.csv\n      out: ./reviews.csv\n",
        7,
        "is the input, which is never overwritten",
    ),
    "standard input of no format": (
        HEAD + EXPORT + "  - predict: {input: '-', out: a.csv}\n",
        5,
        "standard input has no su",
    ),
    "task that is not answered": (
        HEAD + "  - export: {task: multiple-choice}\n"
        "  - predict: {input: reviews.csv, out: a.csv}\n",
        5,
        "predict follows an export for",
    ),
    # addresses
    "scheme": (
        HEAD + EXPORT + "  - validate\n  - publish:\n      url: htp://a\n",
        7,
        "unknown scheme 'htp'",
    ),
    "address of the Hub": (
        HEAD + EXPORT + "  - validate\n  - publish:\n      url: hf://a b/c\n",
        7,
        "expected hf://org/name",
    ),
    "registry that is an artifact's": (
        HEAD + EXPORT + "  - validate\n  - publish:\n      url: reviews.csv\n",
        7,
        "is a file, expected a folder",
    ),
    "storage": (
        HEAD + EXPORT + "  - export-kserve:\n      out: k\n      image: i\n"
        "      storage_uri: models/b\n",
        8,
        "expected an address that KServe supports",
    ),
}


@pytest.mark.parametrize("case", BROKEN)
def test_file_line_problem_and_remedy_are_named_and_nothing_has_run(
    case, beside, tmp_path, monkeypatch
):
    text, line, problem, *remedy = BROKEN[case]
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
