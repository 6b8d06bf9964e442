"""Run thousands of mutated model files under an audit hook.

    $ python -m benchmarks.hostile_campaign --cases 10000
    $ python -m benchmarks.hostile_campaign --kind command --cases 200

The script starts with a tiny BERT and its artifact. Each case changes a file of one of four kinds:
the model's configuration files, which transformers then loads; the artifact's files, including the
tokenizer; its manifest; its ONNX file. Half of the changes to JSON are hostile on purpose: wrong
types, huge numbers, paths, code references, deep nesting. Files of an artifact get new hashes, as
an attacker would do. A case passes if the model runs or is rejected with an error of enginery, and
no code was run and nothing outside was read or written. Seeds are fixed.

These four kinds run in one process, for speed. The fifth, `command`, runs `enginery export`,
`validate`, `optimize`, `predict` or `inspect --verify` on such a directory. A traceback, a file
written by the model's code, 60 seconds, or 4 GB in one process is a finding.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

KINDS = ("configuration", "artifact", "manifest", "onnx")
COMMANDS = ("export", "validate", "optimize", "predict", "inspect")
LIMIT_SECONDS = 60
LIMIT_BYTES = 4 << 30
BATCH = 250

HOSTILE: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    2**31,
    2**63,
    10**30,
    1e308,
    "",
    "x" * 10_000,
    "\x00",
    "../" * 9 + "etc/passwd",
    "/etc/passwd",
    "org/repo",
    "evil.Model",
    "os.system",
    [],
    [[]],
    {},
    {"": {}},
    [None] * 1000,
    {"AutoModel": "evil.Model", "AutoConfig": "evil.Config", "AutoTokenizer": ["evil.T", None]},
)
HOSTILE_KEYS = (
    "auto_map",
    "trust_remote_code",
    "_attn_implementation",
    "_attn_implementation_internal",
    "_name_or_path",
    "transformers_weights",
    "custom_pipelines",
    "vocab_file",
    "tokenizer_file",
    "quantization_config",
    "torch_dtype",
    "architectures",
    "model_type",
    "tokenizer_class",
    "backbone",
)


def main() -> None:
    """Run the cases in batches, each in its own process, and print the findings."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--kind", choices=(*KINDS, "command"))
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--batch", type=int, nargs=2, help=argparse.SUPPRESS)
    parser.add_argument("--base", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.batch:
        work(options.kind, options.base, range(*options.batch), options.seed)
        return
    kinds = (options.kind,) if options.kind else KINDS
    each = -(-options.cases // len(kinds))
    found: Counter[str] = Counter()
    bad: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        base = prepare(Path(scratch))
        for kind in kinds:
            done = 0
            while done < each:
                done += supervise(
                    kind, base, done, min(each, done + BATCH), options.seed, found, bad
                )
    print(", ".join(f"{count} {what}" for what, count in found.most_common()))
    for line in bad:
        print(f"bad: {line}")
    raise SystemExit(bool(bad))


def prepare(folder: Path) -> Path:
    """Make the tiny model and its artifact."""
    from enginery import export_model
    from tests.tiny import save_tiny

    save_tiny("bert", "feature-extraction", folder / "model")
    code = f"open({str(folder / 'evil-ran')!r}, 'w')\nraise SystemExit('evil ran')"
    (folder / "model/evil.py").write_text(code)
    (folder / "texts.csv").write_text("text\nThe engine is warm.\n")
    export_model(str(folder / "model"), task="feature-extraction", out=folder / "artifact")
    return folder


def supervise(
    kind: str, base: Path, start: int, stop: int, seed: int, found: Counter[str], bad: list[str]
) -> int:
    """Run cases in one process until it ends; return the number of cases that were run."""
    command = [sys.executable, "-m", "benchmarks.hostile_campaign", "--kind", kind]
    command += ["--base", str(base), "--seed", str(seed), "--batch", str(start), str(stop)]
    count, last = 0, time.monotonic()
    answers = base / "answers"
    answers.write_text("")
    with (
        (base / "log").open("w") as log,
        answers.open() as lines,
        subprocess.Popen(command, stdout=log, stderr=log) as process,
    ):
        ended = False
        while not ended:
            ended = process.poll() is not None  # before the last lines are read
            for line in lines:
                verdict = json.loads(line)
                found[verdict["what"]] += 1
                if verdict["bad"]:
                    bad.append(f"{kind} {start + count}: {verdict['bad']}")
                count, last = count + 1, time.monotonic()
            too_long = time.monotonic() - last > LIMIT_SECONDS * 1.5
            if too_long or _resident(process.pid) > LIMIT_BYTES:
                process.kill()
            time.sleep(0.05)
    if start + count < stop:
        count += 1
        found["killed or crashed"] += 1
        bad.append(f"{kind} {start + count - 1}: the process ended with {process.returncode}")
    return count


def _resident(pid: int) -> int:
    try:
        return int(psutil.Process(pid).memory_info().rss)
    except psutil.Error:
        return 0


def work(kind: str, base: Path, cases: range, seed: int) -> None:
    """Run cases and print a line of JSON for each."""
    answers = (base / "answers").open("a")
    os.environ["HF_HUB_OFFLINE"] = "1"
    signal.signal(signal.SIGALRM, _late)
    judges = {
        "configuration": _configuration,
        "artifact": _artifact,
        "manifest": _manifest,
        "onnx": _onnx,
        "command": _command_line,
    }
    judge = judges[kind]
    with tempfile.TemporaryDirectory(dir=base) as scratch:
        os.environ["ENGINERY_HOME"] = str(Path(scratch, "home"))
        for number in cases:
            randomness = random.Random(f"{seed} {kind} {number}")
            place = Path(scratch, "case")
            shutil.rmtree(place, ignore_errors=True)
            signal.alarm(LIMIT_SECONDS + 20 * (kind == "command"))
            what, bad = "", ""
            try:
                what = judge(base, place, randomness)
            except BaseException as error:  # whatever came out is the finding
                what, bad = "raw", f"{type(error).__name__}: {str(error)[:200]}"
            signal.alarm(0)
            if what.startswith("stopped"):
                bad = what
            answers.write(json.dumps({"what": what.split(":")[0], "bad": bad}) + "\n")
            answers.flush()


def _late(*_: object) -> None:
    raise TimeoutError(f"no answer within {LIMIT_SECONDS} s")


def _judged(model: Path, run: Callable[[], object]) -> str:
    """Run a case under the hook and return its outcome."""
    from enginery.core.errors import EngineryError
    from enginery.core.trust.confinement import confined

    try:
        with confined(model, writable=[Path(os.environ["ENGINERY_HOME"])]) as confinement:
            ended = "answered"
            try:
                run()
            except EngineryError:
                ended = "refused"
    except EngineryError as error:
        return f"stopped: {error}"
    return f"stopped: read of {confinement.denied[0]}" if confinement.denied else ended


def _configuration(base: Path, place: Path, randomness: random.Random) -> str:
    from enginery.core.errors import EngineryError
    from enginery.core.model.source import resolve_source
    from enginery.runtime.pytorch.runner import TorchOptions, guarded, load_pytorch

    shutil.copytree(base / "model", place)
    names = ["config.json", "tokenizer_config.json", "special_tokens_map.json"]
    mutate_json(place / randomness.choice(names), randomness)

    try:
        source = resolve_source(str(place))  # in the product, another process does this
    except EngineryError:
        return "refused"

    def load() -> None:
        with guarded(place, trust_remote_code=False):
            load_pytorch(
                place,
                "feature-extraction",
                TorchOptions(pickled=source.pickled),
            )
            import transformers

            try:
                transformers.AutoTokenizer.from_pretrained(str(place))
            except EngineryError:
                raise
            except Exception:  # as the exporter does
                pass

    return _judged(place, load)


def _artifact(base: Path, place: Path, randomness: random.Random) -> str:
    from enginery import load_model

    shutil.copytree(base / "artifact", place)
    names = ["config.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"]
    mutate_json(place / randomness.choice(names), randomness)
    _hash_again(place)

    def answer() -> None:
        with load_model(place) as model:
            model.embed(["The engine is warm.", ""])

    return _judged(place, answer)


def _manifest(base: Path, place: Path, randomness: random.Random) -> str:
    from enginery.core.json_file import CHECKSUM_KEY, append_checksum

    shutil.copytree(base / "artifact", place)
    file = place / "manifest.json"
    if randomness.random() < 0.5:
        mutate_bytes(file, randomness)
    else:
        document = json.loads(file.read_text())
        del document[CHECKSUM_KEY]
        file.write_bytes(append_checksum(json.dumps(mutated(document, randomness), indent=2)))
    return _command(place, "inspect", str(place), "--verify")


def _onnx(base: Path, place: Path, randomness: random.Random) -> str:
    from enginery import load_model

    shutil.copytree(base / "artifact", place)
    mutate_bytes(place / "model.onnx", randomness)
    _hash_again(place)

    def answer() -> None:
        with load_model(place) as model:
            model.embed(["The engine is warm."])

    return _judged(place, answer)


def _command_line(base: Path, place: Path, randomness: random.Random) -> str:
    """Run a command on a changed model or artifact in a separate process."""
    command = randomness.choice(COMMANDS)
    shutil.copytree(base / ("model" if command == "export" else "artifact"), place)
    shutil.copy(base / "model/evil.py", place)
    names = ["config.json", "tokenizer_config.json", "special_tokens_map.json", "tokenizer.json"]
    if command != "export" and randomness.random() < 0.3:
        mutate_bytes(place / "model.onnx", randomness)
    else:
        mutate_json(place / randomness.choice(names), randomness)
    if command != "export":
        _hash_again(place)
    out = str(place.with_name("out"))
    shutil.rmtree(out, ignore_errors=True)
    words = {
        "export": ["--task", "feature-extraction", "--out", out],
        "validate": [],
        "optimize": ["--target", "tensorrt", "--precision", "fp16", "--out", out],
        "predict": [
            "--input",
            str(base / "texts.csv"),
            "--column",
            "text",
            "--out",
            f"{out}.jsonl",
            "--force",
        ],
        "inspect": ["--verify"],
    }
    status, said, peak = _watched([command, str(place), *words[command]])
    if (base / "evil-ran").exists():
        (base / "evil-ran").unlink()
        return f"stopped: {command} ran the model's code"
    if "Traceback" in said or status not in (0, 1, 2):
        return f"stopped: {command} ended with {status}: {said[-300:]}"
    if peak > LIMIT_BYTES:
        return f"stopped: {command} took {peak / 1e9:.1f} GB"
    return "answered" if status == 0 else "refused"


def _watched(words: list[str]) -> tuple[int, str, int]:
    """Run `enginery`; return exit status, output, and peak memory of the largest process."""
    peak = 0
    with (
        tempfile.TemporaryFile("w+") as printed,
        subprocess.Popen(
            [sys.executable, "-m", "enginery", *words], stdout=printed, stderr=printed
        ) as process,
    ):
        deadline = time.monotonic() + LIMIT_SECONDS
        while process.poll() is None:
            try:
                parent = psutil.Process(process.pid)
                for one in (parent, *parent.children(recursive=True)):
                    peak = max(peak, _resident(one.pid))
            except psutil.Error:
                pass
            if time.monotonic() > deadline:
                process.kill()
                raise TimeoutError(f"{words[0]} took over {LIMIT_SECONDS} s")
            time.sleep(0.05)
        printed.seek(0)
        return process.returncode, printed.read(), peak


def _command(place: Path, *words: str) -> str:
    """Run a command in this process; an exit status is a result, an exception is not."""
    from enginery.cli import main as command

    status: list[object] = []

    def run() -> None:
        try:
            command(list(words))
        except SystemExit as ended:
            status.append(ended.code)

    ended = _judged(place, run)
    return "refused" if ended == "answered" and status and status[0] not in (0, None) else ended


def _hash_again(place: Path) -> None:
    from enginery.core.artifact.artifact import commit_artifact
    from enginery.core.artifact.manifest import Manifest

    commit_artifact(place, Manifest.from_bytes((place / "manifest.json").read_bytes()))


def mutate_json(file: Path, randomness: random.Random) -> None:
    """Change one value of a JSON file, add a hostile key, or break the text."""
    if randomness.random() < 0.1:
        mutate_bytes(file, randomness)
        return
    document = json.loads(file.read_text()) if file.is_file() else {}
    if randomness.random() < 0.02:
        file.write_text("[" * 100_000 + "]" * 100_000)
        return
    file.write_text(json.dumps(mutated(document, randomness)))


def mutated(document: Any, randomness: random.Random) -> Any:
    """Return a document with one member changed, removed or added."""
    places: list[tuple[Any, Any]] = []
    pending = [document]
    while pending and len(places) < 5000:
        found = pending.pop()
        members = found.items() if isinstance(found, dict) else enumerate(found)
        for key, value in list(members):
            places.append((found, key))
            if isinstance(value, dict | list):
                pending.append(value)
    if not places or randomness.random() < 0.3:
        target = document if isinstance(document, dict) else {}
        if randomness.random() < 0.5:
            target = target.setdefault("text_config", {})
            target = target if isinstance(target, dict) else {}
        target[randomness.choice(HOSTILE_KEYS)] = randomness.choice(HOSTILE)
        return document
    holder, key = randomness.choice(places)
    if randomness.random() < 0.2:
        del holder[key]
    else:
        holder[key] = randomness.choice(HOSTILE)
    return document


def mutate_bytes(file: Path, randomness: random.Random) -> None:
    """Change, cut, repeat or insert some bytes."""
    content = bytearray(file.read_bytes() if file.is_file() else b"{}")
    for _ in range(randomness.choice((1, 1, 1, 4, 16))):
        place = randomness.randrange(len(content)) if content else 0
        kind = randomness.randrange(4)
        if kind == 0 and content:
            content[place] = randomness.randrange(256)
        elif kind == 1:
            del content[place : place + randomness.randrange(1, 64)]
        elif kind == 2:
            content[place:place] = content[place : place + randomness.randrange(1, 64)]
        else:
            content[place:place] = randomness.randbytes(randomness.randrange(1, 16))
    file.write_bytes(bytes(content))


if __name__ == "__main__":
    main()
