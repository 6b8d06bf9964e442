"""Run every command and every public function, each with arguments that reach its work.

    $ python -P tests/every_call.py ARTIFACT DIRECTORY NAME=ARTIFACT …

It runs in an environment that lacks packages, and prints one JSON document: name -> [status, what
was printed]. Imports of anything but the standard library are inside the functions.
"""

import contextlib
import io
import json
import os
import sys
import traceback
from pathlib import Path


def command_lines(artifact, folder):
    """The arguments of every command."""
    artifact, folder = str(artifact), Path(folder)
    out = lambda name: str(folder / name)  # noqa: E731  as short as what it stands for
    return {
        "export": ["export", "org/name", "--out", out("exported")],
        "optimize": ["optimize", artifact, out("optimized"), "--target", "cuda"],
        "quantize": ["quantize", artifact, out("quantized"), "--data", out("rows.csv")],
        "build": ["build", artifact, out("built"), "--profile", "batch=1,sequence=8"],
        "init": ["init", "org/name", out("recipe.yaml")],
        "run": ["run", "--model", "org/name"],
        "validate": ["validate", artifact],
        "lint": ["lint", artifact],
        "inspect": ["inspect", artifact, "--placement"],
        "doctor": ["doctor"],
        "bench": ["bench", artifact, "--batch", "1", "--sequence", "8", "--against", "pytorch"],
        "report": ["report", artifact],
        "predict": ["predict", artifact, "--input", out("rows.csv"), "--out", out("out.csv")],
        "try": ["try", artifact, "The engine is warm."],
        "serve": ["serve", artifact, "--host", "nowhere.invalid"],
        "publish": ["publish", artifact, "hf://org/name", "--allow-failed"],
        "pull": ["pull", "hf://org/name", out("pulled")],
        "export-triton": ["export-triton", artifact, out("triton")],
        "export-kserve": [
            *("export-kserve", artifact, out("kserve"), "--image", "enginery:cpu"),
            *("--storage-uri", "s3://models/name", "--provider", "cpu"),
        ],
        "store": ["store", "list"],
    }


def functions(artifact, folder, others):
    """A call of every public function, and of what they return."""
    import enginery
    from enginery import api

    folder = Path(folder)
    rows, out = folder / "rows.csv", folder / "function.csv"
    kserve = {"image": "enginery:cpu", "storage_uri": "s3://models/name", "provider": "cpu"}
    calls = {
        "Artifact": lambda: enginery.Artifact.open(artifact),
        "EngineryError": lambda: enginery.EngineryError("text"),
        "OrtRunner": lambda: enginery.OrtRunner(enginery.Artifact.open(artifact)).close(),
        "Recipe": lambda: enginery.Recipe.parse("{model: org/name, stages: [export]}"),
        "RunnerOptions": lambda: enginery.RunnerOptions(threads=1),
        "__version__": lambda: enginery.__version__,
        "bench_model": lambda: enginery.bench_model(artifact, against="pytorch", batch="1"),
        "build_engine": lambda: enginery.build_engine(artifact, profile=("batch=1,sequence=8",)),
        "export_kserve": lambda: enginery.export_kserve(artifact, folder / "kserve-2", **kserve),
        "export_model": lambda: enginery.export_model("org/name"),
        "export_triton": lambda: enginery.export_triton(artifact, folder / "triton-2"),
        "length_buckets": lambda: enginery.length_buckets(artifact, rows),
        "lint_model": lambda: api.lint_model(artifact),
        "load_model": lambda: enginery.load_model(artifact).embed(["The engine is warm."]),
        "optimize_model": lambda: enginery.optimize_model(artifact, target="cuda"),
        "predict_file": lambda: enginery.predict_file(artifact, rows, out),
        "publish_model": lambda: enginery.publish_model(
            artifact, "hf://org/name", allow_failed=True
        ),
        "pull_model": lambda: enginery.pull_model("hf://org/name", folder / "pulled-2"),
        "quantize_model": lambda: enginery.quantize_model(artifact, data=rows),
        "run_recipe": lambda: enginery.run_recipe(
            enginery.Recipe.parse("{model: org/name, stages: [export, {lint: {}}]}")
        ),
        "validate_model": lambda: enginery.validate_model(artifact),
        "write_report": lambda: enginery.write_report(artifact),
    }
    for name, path in others.items():  # what needs a package only for some models
        inputs = [str(folder / "sound.wav")] if "audio" in name else ["The engine"]
        calls[f"load_model, {name}"] = lambda path=path, inputs=inputs: call_method(path, inputs)
    return calls


def call_method(artifact, inputs):
    import enginery

    with enginery.load_model(artifact) as model:
        return getattr(model, model.method)(inputs)


def run(call):
    """Return the status of a call as the command line has it, and what was printed."""
    printed = io.StringIO()
    status = 0
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        try:
            call()
        except SystemExit as ended:
            status = ended.code or 0
        except Exception as error:
            status = getattr(error, "exit_code", 1)
            if status == 1:
                traceback.print_exc(file=printed)
            printed.write(str(error))
    return [status, printed.getvalue()]


def main(artifact, folder, *others):
    from enginery.cli import main as run_command

    answers = {}
    for name, words in command_lines(artifact, folder).items():
        answers[f"enginery {name}"] = run(lambda words=words: run_command(words))
    others = dict(other.split("=", 1) for other in others)
    for name, call in functions(artifact, folder, others).items():
        answers[name] = run(call)
    sys.stdout.write(json.dumps(answers))
    sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
