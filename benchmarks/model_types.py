"""Run the model types that this environment exports through the stages, one tiny model each.

    python -m benchmarks.model_types --work DIR                 # the main task of each type
    python -m benchmarks.model_types --work DIR --tasks all     # every task
    python -m benchmarks.model_types --work DIR --tasks fill-mask,multiple-choice
    python -m benchmarks.model_types --work DIR --types bert,vit --stages export,int8,engine
    python -m benchmarks.model_types --work DIR --table docs/model-types.csv
    python -m benchmarks.model_types --work DIR --check docs/model-types.csv

With Optimum, these are the types of its registry, in `tests/model_types.json`. With transformers 5,
they are those of `tests/model_types_transformers5.json`, whose entries have the type's tasks, and a
configuration unless the first file has it. The models have random weights. Each runs in a process
of its own, and its result is a line of `DIR/results.jsonl`, so that a run that was interrupted goes
on; `--again` forgets the results of these types. `--table` writes the rows of the families that
have results, and keeps those of the other.
"""

from __future__ import annotations

import argparse
import csv
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from enginery.core import subprocess as children
from enginery.core.versions import OPTIMUM, TRANSFORMERS5, Family, transformers_family
from tests.prefork import children_of, forked_children

CONFIGS = Path(__file__).parent.parent / "tests" / "model_types.json"
_CONFIGS5 = CONFIGS.with_name("model_types_transformers5.json")
SECONDS = 900
_LETTERS = "etaoinshrdlucmfwypvbgkjqxz0123456789.,'-"
_SPECIALS = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")


def main() -> None:
    """Run the models, and print a line for each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--types", default="")
    parser.add_argument("--tasks", default="main", help="main, all, or names")
    parser.add_argument("--stages", default="export,validate")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--again", action="store_true")
    parser.add_argument("--table", type=Path, help="write the results so far to this file, and end")
    parser.add_argument("--check", type=Path, help="fail if a cell of this file has got worse")
    parser.add_argument("--socket", type=Path, default=Path(), help=argparse.SUPPRESS)
    parser.add_argument("--one", nargs=2, metavar=("TYPE", "TASK"))
    given = parser.parse_args()
    given.work.mkdir(parents=True, exist_ok=True)
    stages = given.stages.split(",")
    results = given.work / "results.jsonl"
    if given.table:
        every_result = [*read_results(results, OPTIMUM).values()]
        every_result += read_results(results, TRANSFORMERS5).values()
        write_table(given.table, table_rows(every_result, read_table(given.table)))
        return
    if given.one:
        with children_of(given.socket):
            print(json.dumps(run_one(*given.one, stages, given.work)))
        return
    known = model_types()
    types = given.types.split(",") if given.types else list(known)
    pairs = [(kind, task) for kind in types for task in tasks_of(kind, known[kind], given.tasks)]
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // given.jobs)))
    done = {} if given.again else read_results(results)

    def run(pair: tuple[str, str]) -> None:
        found = done.get(pair)
        if found is None:
            found = run_apart(pair, given.stages, given.work, socket)
            with results.open("a") as file:
                file.write(json.dumps(found) + "\n")
        words = ", ".join(f"{stage} {each['state']}" for stage, each in found["stages"].items())
        print(f"{pair[0]} {pair[1]}: {words}", flush=True)

    with tempfile.TemporaryDirectory() as folder:
        socket = Path(folder, "socket")
        with forked_children(socket), ThreadPoolExecutor(given.jobs) as pool:
            list(pool.map(run, pairs))
    found_now = read_results(results)
    print(summarize(found_now.values()))
    if given.check and (worse := worse_cells(read_table(given.check), found_now)):
        sys.exit("worse than the table says:\n" + "\n".join(worse))


def model_types(family: Family = "") -> dict[str, dict[str, Any]]:
    """Return the configurations of a family, by default this environment's, by type.

    Each has `class`, `config` and `task`, and may have a `preprocessor` and, for transformers 5,
    other `tasks` and settings of its `tokenizer`.
    """
    registry: dict[str, dict[str, Any]] = json.loads(CONFIGS.read_text())
    if (family or transformers_family()) != TRANSFORMERS5:
        return registry
    entries: dict[str, dict[str, Any]] = json.loads(_CONFIGS5.read_text())
    return {kind: registry.get(kind, {}) | entry for kind, entry in entries.items()}


def tasks_of(kind: str, known: dict[str, Any], which: str) -> list[str]:
    """Return the main task of a type, all that are exported, or those that are named."""
    if which == "main":
        return [known["task"]]
    if transformers_family() == TRANSFORMERS5:
        tasks = [known["task"], *known.get("tasks", ())]
        return [task for task in tasks if which == "all" or task in which.split(",")]
    importlib.import_module("optimum.exporters.onnx.model_configs")  # registers the types
    from optimum.exporters.tasks import TasksManager

    found = TasksManager.get_supported_tasks_for_model_type(
        kind, "onnx", library_name="transformers"
    )
    return sorted(task for task in found if which == "all" or task in which.split(","))


def read_results(path: Path, family: Family = "") -> dict[tuple[str, str], dict[str, Any]]:
    """Return a family's last result of each type and task, by default this environment's."""
    family = family or transformers_family()
    lines = path.read_text().splitlines() if path.exists() else []
    results = [result for result in map(json.loads, lines) if _family(result) == family]
    return {(result["type"], result["task"]): result for result in results}


def _family(result: dict[str, Any]) -> str:
    """Return the family of a result; those of earlier versions have none."""
    return str(result.get("family", OPTIMUM))


def summarize(results: Iterable[dict[str, Any]]) -> str:
    """Return how many models passed each stage."""
    counts: dict[str, dict[str, int]] = {}
    for result in results:
        for stage, each in result["stages"].items():
            states = counts.setdefault(stage, {})
            states[each["state"]] = states.get(each["state"], 0) + 1
    return "; ".join(
        f"{stage}: {', '.join(f'{n} {state}' for state, n in states.items())}"
        for stage, states in counts.items()
    )


COLUMNS = {
    "export": "export",
    "validate": "validate",
    "fp16 validate": "FP16",
    "int8": "INT8",
    "engine fp16": "engine",
}
_WORDS = {"passed": "yes", "failed": "no", "refused": "no", "crashed": "crash"}
FAMILIES: dict[Family, str] = {OPTIMUM: "4.57", TRANSFORMERS5: "5"}
"""The version of transformers of each family, the first column of the table."""
HEADER = ("transformers", "type", "task", *COLUMNS.values(), "why not")


def read_table(path: Path) -> list[dict[str, str]]:
    """Return the rows of a table, each with the columns of `HEADER`."""
    if not path.exists():
        return []
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))


def write_table(path: Path, rows: Iterable[dict[str, str]]) -> None:
    """Write rows to a CSV file."""
    with path.open("w", encoding="utf-8", newline="") as file:
        writer = csv.DictWriter(file, HEADER, lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)


def table_rows(
    results: Iterable[dict[str, Any]], written: Iterable[dict[str, str]] = ()
) -> list[dict[str, str]]:
    """Return the rows of results, and the written ones of families without results."""
    listed = list(results)
    families = {FAMILIES[_family(result)] for result in listed}
    kept = [row for row in written if row["transformers"] not in families]
    return sorted([*kept, *map(_row, listed)], key=lambda row: [row[name] for name in HEADER[:3]])


def _row(result: dict[str, Any]) -> dict[str, str]:
    stages = _with_refused_fp16(result["stages"])
    row = {
        "transformers": FAMILIES[_family(result)],
        "type": result["type"],
        "task": result["task"],
        "why not": "",
    }
    for stage, column in COLUMNS.items():
        state = stages.get(stage, {}).get("state", "")
        row[column] = _WORDS.get(state, "")
        if state not in ("", "passed") and not row["why not"]:
            row["why not"] = f"{column}: {_reason(stages[stage])}"
    return row


def _with_refused_fp16(stages: dict[str, Any]) -> dict[str, Any]:
    """Return the stages of a model, with those that a refused FP16 graph has kept from running."""
    refused = stages.get("fp16", {}).get("state", "passed") != "passed"
    missing = {stage: stages["fp16"] for stage in ("fp16 validate", "engine fp16") if refused}
    return missing | stages


def count_rows(rows: Iterable[dict[str, str]]) -> str:
    """Return how many rows say yes, by column."""
    listed = list(rows)
    found = []
    for name in COLUMNS.values():
        tried = [row[name] for row in listed if row[name]]
        found.append(f"{name} {tried.count('yes')} of {len(tried)}")
    return f"{len({row['type'] for row in listed})} types, {len(listed)} tasks: {', '.join(found)}."


def worse_cells(
    written: Iterable[dict[str, str]], results: dict[tuple[str, str], dict[str, Any]]
) -> list[str]:
    """Return the cells of a table that say yes, of stages that do not pass any more.

    Args:
        written: the rows of the table.
        results: those of one family, by type and task.
    """
    worse = []
    for row in written:
        result = results.get((row["type"], row["task"]))
        if result is None or row["transformers"] != FAMILIES[_family(result)]:
            continue
        stages = _with_refused_fp16(result["stages"])
        for stage, column in COLUMNS.items():
            state = stages.get(stage, {}).get("state", "passed")
            if row[column] == "yes" and state != "passed":
                worse.append(f"{row['type']} {row['task']}, {column}: {_reason(stages[stage])}")
    return worse


def _reason(broken: dict[str, Any]) -> str:
    """Return the first sentence of what went wrong, without paths."""
    words = broken["why"].split(" The whole log: ")[0].splitlines()[0]
    words = re.sub(r"/\S+/", "", words)
    return textwrap.shorten(words, 160, placeholder=" …")


def run_apart(pair: tuple[str, str], stages: str, work: Path, socket: Path) -> dict[str, Any]:
    """Run one model in a process of its own."""
    words = ["--work", str(work), "--stages", stages, "--socket", str(socket), "--one", *pair]
    command = children.python_command("benchmarks.model_types", *words)
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS, check=False)
    except subprocess.TimeoutExpired:
        return _broken(pair, f"no result after {SECONDS} s")
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return _broken(pair, (done.stderr.strip().splitlines() or ["no output"])[-1])
    found: dict[str, Any] = json.loads(lines[-1])
    return found


def _broken(pair: tuple[str, str], why: str) -> dict[str, Any]:
    state = {"state": "crashed", "why": why}
    return _result(*pair, {"export": state})


def _result(kind: str, task: str, stages: dict[str, Any]) -> dict[str, Any]:
    """Return what is stored of a model."""
    return {"family": transformers_family(), "type": kind, "task": task, "stages": stages}


def run_one(kind: str, task: str, stages: list[str], work: Path) -> dict[str, Any]:
    """Run the stages of one model; a stage that fails ends those that need it."""
    from enginery import build_engine, export_model, optimize_model, quantize_model, validate_model

    folder = work / f"{kind}-{task}"
    shutil.rmtree(folder, ignore_errors=True)
    os.environ["ENGINERY_HOME"] = str(folder / "home")
    found: dict[str, Any] = {}

    def attempt(stage: str, make: Callable[[], Any]) -> Any:
        started = time.monotonic()
        try:
            made = make()
        except Exception as error:
            found[stage] = _failure(error)
            made = None
        else:
            report = made if stage.endswith("validate") else None
            found[stage] = {"state": "passed"}
            if report is not None and not report.passed:
                found[stage] = {"state": "failed", "why": report.summary}
            elif report is not None:
                found[stage]["why"] = report.summary
        found[stage]["seconds"] = round(time.monotonic() - started, 1)
        return made

    result = _result(kind, task, found)
    source = attempt("build", lambda: save_model(kind, task, folder / "model"))
    if source is None:
        return result
    del found["build"]
    exported = attempt(
        "export",
        lambda: export_model(
            str(source),
            task=task,
            model_kwargs=save_companions(kind, folder),
            out=str(folder / "fp32"),
        ),
    )
    if exported is None:
        return result
    if "validate" in stages:
        attempt("validate", lambda: validate_model(exported, effort="quick"))
    variants = {"fp32": exported}
    if "fp16" in stages:
        made = attempt(
            "fp16",
            lambda: optimize_model(
                exported,
                target="tensorrt",
                precision="fp16",
                allow_failed=True,
                out=str(folder / "fp16"),
            ),
        )
        if made is not None:
            variants["fp16"] = made
            attempt("fp16 validate", lambda: validate_model(made, effort="quick"))
    if "int8" in stages:
        quantized = attempt(
            "int8",
            lambda: quantize_model(
                exported,
                allow_random=True,
                allow_failed=True,
                capability=(),
                min_cosine=0.9,
                out=str(folder / "int8"),
            ),
        )
        if quantized is not None:
            variants["int8"] = quantized
    if "engine" in stages:
        for name, artifact in variants.items():
            attempt(
                f"engine {name}",
                lambda artifact=artifact, name=name: build_engine(
                    artifact,
                    profile=profiles(artifact),
                    capability="8.9",
                    out=str(folder / f"engine-{name}"),
                ),
            )
    shutil.rmtree(folder, ignore_errors=True)
    return result


def save_companions(kind: str, folder: Path) -> dict[str, str]:
    """Save the models that a type is exported with, and return the export's `model_kwargs`."""
    if kind != "speecht5":
        return {}
    from transformers import SpeechT5HifiGan, SpeechT5HifiGanConfig

    SpeechT5HifiGan(SpeechT5HifiGanConfig(upsample_initial_channel=32)).save_pretrained(
        folder / "vocoder"
    )
    return {"vocoder": str(folder / "vocoder")}


def profiles(artifact: Any) -> tuple[str, ...]:
    """Return a profile for each graph, like those of quantize's trial engines."""
    from enginery.core.model.feeds import FeedLimits
    from enginery.quantize.trial import trial_profiles

    limits = FeedLimits.from_artifact(artifact)
    graphs = artifact.manifest.graphs
    found = (str(profile) for graph in graphs for profile in trial_profiles(graph, limits))
    return tuple(dict.fromkeys(found))


def _failure(error: Exception) -> dict[str, Any]:
    """Return a refusal of enginery, or a crash."""
    import traceback

    from enginery import EngineryError

    if isinstance(error, EngineryError):
        return {"state": "refused", "why": str(error), "kind": type(error).__name__}
    last = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(last.filename).name}:{last.lineno}"
    return {"state": "crashed", "why": f"{type(error).__name__}: {error} ({where})"}


def save_model(kind: str, task: str, directory: Path) -> Path:
    """Write a tiny model, its tokenizer and preprocessor."""
    import torch
    import transformers

    known = model_types()[kind]
    config = transformers.AutoConfig.for_model(**known["config"])
    if task == known["task"]:
        made = getattr(transformers, known["class"])
    else:
        from enginery.runtime.pytorch.classes import class_for_task

        made = class_for_task(task, config)
    if known["task"].startswith("text-generation") and not task.startswith("text-generation"):
        # The main class of BART's type and others is the decoder alone.
        usual = type(config)()
        for name in ("is_encoder_decoder", "is_decoder"):
            if hasattr(usual, name):
                setattr(config, name, getattr(usual, name))
    torch.manual_seed(0)
    model = (made.from_config if "Auto" in made.__name__ else made)(config).eval()
    _spread(model)
    directory.mkdir(parents=True)
    model.save_pretrained(directory)
    if "preprocessor" in known:
        text = json.dumps(known["preprocessor"])
        (directory / "preprocessor_config.json").write_text(text)
    vocabulary = _vocabulary_size(config)
    if vocabulary:
        _save_tokenizer(directory, vocabulary, known.get("tokenizer", {}))
    return directory


def _spread(model: Any) -> None:
    """Draw weights that keep the magnitude of their inputs.

    With those of most configurations (a deviation of 0.02) the outputs of small models hardly
    depend on the inputs.
    """
    import torch

    for module in model.modules():
        weight = getattr(module, "weight", None)
        is_matrix = isinstance(weight, torch.nn.Parameter) and weight.ndim > 1
        if isinstance(module, torch.nn.BatchNorm2d):  # some models draw small ones
            torch.nn.init.ones_(weight)
        elif isinstance(codes := getattr(module, "embed", None), torch.Tensor):  # EnCodec: zeros
            torch.nn.init.normal_(codes)
        elif is_matrix and not isinstance(module, torch.nn.Embedding):
            torch.nn.init.normal_(weight, std=(2 / weight[0].numel()) ** 0.5)


def _vocabulary_size(config: Any) -> int:
    parts = [config, *(getattr(config, name, None) for name in ("text_config", "decoder", "text"))]
    sizes = [getattr(part, "vocab_size", None) for part in parts if part is not None]
    return next((size for size in sizes if isinstance(size, int)), 0)


def _save_tokenizer(directory: Path, size: int, settings: dict[str, Any]) -> None:
    """Write a WordPiece tokenizer of letters with at most `size` tokens.

    Args:
        directory: the model's directory.
        size: the size of the vocabulary.
        settings: those of tokenizer_config.json that the class of the type would set otherwise.
    """
    import transformers

    words = [*_SPECIALS, *_LETTERS, *(f"##{letter}" for letter in _LETTERS)][:size]
    file = directory / "vocab.txt"
    file.write_text("\n".join(words))
    transformers.BertTokenizerFast(str(file)).save_pretrained(directory)
    config = directory / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | settings))


if __name__ == "__main__":
    main()
