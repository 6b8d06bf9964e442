"""Break the package on purpose, a line at a time, and record which test notices.

    $ python -m tests.breaks --out tests/breaks.json --jobs 2
    $ python -m tests.breaks --out tests/breaks.json --only validate,passes/cast

A suite that becomes faster must notice what it noticed before, so the table in `breaks.json` is
committed, and this is run again whenever tests are removed or made smaller.

Each break is made in a copy of the tree. The tests that mirror the broken modules run first for all
breaks; then, for those that are left, the tests of their folders, then those of the folders that
use the modules. The first failure ends a run. `noticed_by` is `nothing` as long as all tests in
`tested` have passed. A test that also fails on the unbroken copy is left out, and does not count.

Syncs, locks and cleanups have a table of their own, `tests/faults/test_deliberate_breaks.py`.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from queue import SimpleQueue

ROOT = Path(__file__).parents[1]
TABLE = ROOT / "tests" / "breaks.json"

AREAS = ("export", "passes", "quantize", "validate", "serve", "core")

LEVELS = {
    "make test": "not more and not slow and not gpu and not network",
    "make test-more": "more and not slow and not gpu and not network",
    "slow tests": "slow and not gpu and not network",
}
"""What a break is noticed by -> the tests that it selects, as the Makefile does."""

BEYOND = {
    "export": "tests/recipe tests/cli tests/validate/test_decoding.py tests/test_docs.py",
    "passes": "tests/optimize tests/quantize/test_stage.py tests/quantize/test_architectures.py "
    "tests/runtime/generation tests/runtime/onnxruntime",
    "quantize": "tests/recipe tests/cli tests/validate/metrics tests/test_docs.py",
    "validate": "tests/recipe tests/cli tests/quantize/test_cpu.py tests/test_docs.py",
    "serve": "tests/deploy tests/cli tests/test_docs.py",
    "core": "tests/predict tests/recipe tests/cli tests/faults tests/publish tests/runtime/engines "
    "tests/engine tests/quantize/calibration",
}
"""Area -> tests of what uses it, which run after those of the area itself."""

TIMEOUT_SECONDS = 2400
_STEPS = 4
"""Number of parts of `Break.steps`."""
_FAILURE = re.compile(r"^(?:FAILED|ERROR) (\S+?(?:\[.*?\])?)(?: - .*)?$", re.MULTILINE)
_NOT_COPIED = shutil.ignore_patterns(
    ".git", ".venv", ".*_cache", "__pycache__", "build", "dist", "*.egg-info"
)


@dataclass(frozen=True)
class Break:
    """A change of one line of the package."""

    file: str
    """Path below `enginery/`."""
    old: str
    """Text that is once in the file."""
    new: str
    """What takes its place."""
    breaks: str
    """What is wrong then."""
    tests: str = ""
    """Test files, or single tests, that run with the file that mirrors the module."""

    @property
    def area(self) -> str:
        """The folder below `enginery/`."""
        return self.file.partition("/")[0]

    @property
    def mirror(self) -> str:
        """Path of the test file that mirrors the module."""
        folder, _, name = self.file.rpartition("/")
        return f"tests/{folder}/test_{name}"

    def steps(self, root: Path) -> list[list[str]]:
        """Return the paths to test, in the order in which they run: four parts."""
        near = [f"enginery/{self.file}", *self.tests.split(), self.mirror]
        near = [path for path in dict.fromkeys(near) if (root / path.partition("::")[0]).exists()]
        folder = str(Path(self.mirror).parent)
        area = f"tests/{self.area}"
        own = [folder] if folder != area and (root / folder).is_dir() else []
        return [near, own, [area], BEYOND[self.area].split()]


BREAKS = (
    # -- export -----------------------------------------------------------------------------------
    Break(
        "export/graphs.py",
        "counts[names[tensor.data_type]] += size",
        "counts[names[tensor.data_type]] += 1",
        "the precision is that of most tensors, not of most weights",
        "tests/export/test_graphs.py",
    ),
    Break(
        "export/graphs.py",
        "elif not follows and not unknown:",
        "elif not follows:",
        "an output dim becomes a constant although a run that could change it failed",
        "tests/export/test_graphs.py",
    ),
    Break(
        "export/stage.py",
        "if config.opset < file_opset:",
        "if config.opset <= file_opset:",
        "the opset that an .onnx file has is refused",
        "tests/export/test_onnx_file.py::test_the_opset_that_the_file_has_may_be_named",
    ),
    Break(
        "export/stage.py",
        "model_kwargs=vocoder.record.sha256 if vocoder",
        "model_kwargs=vocoder.record.id if vocoder",
        "another vocoder of the same name is not another cache key",
        "tests/test_cache_keys.py::test_a_vocoder_counts_by_its_content",
    ),
    Break(
        "export/used_weights.py",
        "for m in arrays for w in (weight, weight.T))",
        "for m in arrays for w in (weight,))",
        "random weights that the tracer has transposed are exported",
        "tests/export/test_stage.py",
    ),
    Break(
        "export/optimum.py",
        "mask = mask.masked_fill(keys[None, :] > queries[:, None], ",
        "mask = mask.masked_fill(keys[None, :] >= queries[:, None], ",
        "a decoder's token does not attend to itself",
        "tests/runtime/generation/test_images.py",
    ),
    Break(
        "export/onnx_file.py",
        "{'|'.join(map(re.escape, named))})(?![\\w.])\")",
        "{'|'.join(map(re.escape, named))})\")",
        "a dim is renamed inside the longer name of another dim",
        "tests/export/test_onnx_file.py::test_a_dim_is_not_renamed_inside_the_longer_name_of_another",
    ),
    Break(
        "export/side_files.py",
        "        refuse_linked_out(source / name, source)\n",
        "",
        "a file that is a link out of the model's directory is copied into the artifact",
        "tests/export/test_onnx_file.py::test_links_out_of_the_directory_are_never_copied",
    ),
    Break(
        "export/tokenizer.py",
        "if built or not (text in UNUSUAL or slow.unk_token_id in ids):",
        "if built:",
        "a fast tokenizer of transformers that differs on usual texts is written",
        "tests/export/test_tokenizer.py::test_a_fast_tokenizer_of_transformers_may_differ_on_unusual_texts_alone",
    ),
    Break(
        "export/sentencepiece_tokenizers.py",
        "special = 10 * min([-10.0, *pieces.values()])",
        "special = 0.1 * min([-10.0, *pieces.values()])",
        "characters that normalize to a special token become that token",
        "tests/export/test_tokenizer.py",
    ),
    # -- passes -----------------------------------------------------------------------------------
    Break(
        "passes/cast/overflow.py",
        'if node.op_type == "ReduceL2" and after.largest**2 * HEADROOM > FP16_MAX:',
        'if node.op_type == "ReduceL2" and after.largest * HEADROOM > FP16_MAX:',
        "the squares inside a ReduceL2 may overflow in FP16",
    ),
    Break(
        "passes/cast/positions.py",
        "elif value not in data and _becomes_integers(node):",
        "elif _becomes_integers(node):",
        "nodes that compute data stay in FP32 because their result becomes integers",
        "tests/passes/cast/test_cast.py::test_data_that_become_integers_are_no_positions",
    ),
    Break(
        "passes/qdq/scales.py",
        "shape = (1, -1) if layer.weight_axis == 0 else (-1, 1)",
        "shape = (-1, 1) if layer.weight_axis == 0 else (1, -1)",
        "smoothing divides a weight along the wrong axis",
        "tests/passes/qdq/test_qdq.py",
    ),
    Break(
        "passes/qdq/insert.py",
        "_replace_uses(graph, value, nodes, outputs=name in written)",
        "_replace_uses(graph, value, nodes)",
        "outputs of the graph that no convolution writes are quantized",
        "tests/passes/qdq/test_qdq.py tests/passes/qdq/test_joining.py",
    ),
    Break(
        "passes/qdq/layers.py",
        "int(np.prod(shape[1:])), shape[0], shape[0] // groups",
        "int(np.prod(shape[1:])), shape[0], shape[0]",
        "a grouped convolution counts as large enough for INT8",
        "tests/passes/qdq/test_qdq.py",
    ),
    Break(
        "passes/ranges/segments.py",
        "for index in range(producer + 1, last_use.get(name, producer) + 1)",
        "for index in range(producer + 1, last_use.get(name, producer))",
        "a graph is cut between a value of unknown type and its last reader",
        "tests/passes/ranges/test_ranges.py",
    ),
    Break(
        "passes/lint/placement.py",
        'return 0 if transposed and node.attributes["transB"].as_int() else rank - 1',
        "return 0 if transposed else rank - 1",
        "a Gemm with transB = 0 is taken for one with a transposed weight",
        "tests/passes/lint/test_lint.py",
    ),
    Break(
        "passes/ir/cleanup.py",
        'return bool(attributes.get_int("ceil_mode", 0)) or list(shape[2:]) == list(window)',
        "return True",
        "a pool without outputs, whose window exceeds its input, becomes a global one",
        "tests/passes/ir/test_cleanup.py",
    ),
    Break(
        "passes/ir/opset.py",
        'return "" if error <= limit else ',
        'return "" if not error > limit else ',
        "a graph whose outputs become NaN in another opset is accepted",
        "tests/passes/ir/test_opset.py",
    ),
    Break(
        "passes/generation/visibility.py",
        "window = None if count == length else count\n",
        "window = None if count == length else count - 1\n",
        "a sliding window is one position too short",
        "tests/passes/generation/test_visibility.py",
    ),
    # -- quantize ---------------------------------------------------------------------------------
    Break(
        "quantize/search.py",
        "key=lambda n: effects[n] / max(weights[n], 1e-9), reverse=True)",
        "key=lambda n: effects[n], reverse=True)",
        "layers are left out by their effect, whatever their share of the work",
    ),
    Break(
        "quantize/search.py",
        "best = max(orders, key=lambda order: order.share)",
        "best = min(orders, key=lambda order: order.share)",
        "of two orders the one that quantizes less is taken",
    ),
    Break(
        "quantize/calibration/ranges.py",
        "        target[-1] += counts[bins:].sum()\n",
        "",
        "the entropy method ignores the values that a threshold clips",
    ),
    Break(
        "quantize/calibration/ranges.py",
        "return float((min(last, BINS - 1) + 1) * histogram.largest / BINS)",
        "return float(min(last, BINS - 1) * histogram.largest / BINS)",
        "the percentile method returns the lower edge of its bin",
    ),
    Break(
        "quantize/calibration/batches.py",
        "return sorted(set(rows) - set(held_out)), held_out",
        "return rows, held_out",
        "the rows that accuracy is measured on are calibrated on, too",
        "tests/quantize/calibration/test_data.py tests/quantize/test_rows.py",
    ),
    Break(
        "quantize/stage.py",
        "    source.require_passed(allow_failed=config.allow_failed)\n",
        "",
        "an artifact whose validation failed is quantized",
    ),
    Break(
        "quantize/config.py",
        "return (int(major), int(minor)) >= (8, 9)",
        "return (int(major), int(minor)) > (8, 9)",
        "FP8 is refused for GPUs of compute capability 8.9",
        "tests/quantize/test_config.py",
    ),
    Break(
        "quantize/calibration/smoothing.py",
        "return replace(params, scale=max(-low, high) / scheme.largest)",
        "return replace(params, scale=max(low, high) / scheme.largest)",
        "the negative end of an activation's range is clipped",
        "tests/quantize/calibration/test_smoothing.py",
    ),
    Break(
        "quantize/config.py",
        "    if not 0 <= part <= 1:\n",
        "    if part > 1:\n",
        "an accuracy budget need not be a percentage",
        "tests/quantize/test_config.py",
    ),
    Break(
        "quantize/calibration/activation_statistics.py",
        "            value = value[real]\n",
        "            value = value[:]\n",
        "padded positions count in the range of an activation",
    ),
    # -- validate ---------------------------------------------------------------------------------
    Break(
        "validate/metrics/outputs.py",
        "if differences.rms_error > rms_limit:",
        "if differences.rms_error > limit:",
        "the root mean square of the error has the limit of its maximum",
        "tests/validate/metrics/test_metrics.py",
    ),
    Break(
        "validate/metrics/budget.py",
        "confidence = 1 - (1 - _CONFIDENCE) / len(self.measured)",
        "confidence = _CONFIDENCE",
        "the confidence bound holds for one layer, not for all of them together",
        "tests/validate/test_layers.py::test_limits_are_a_share_or_the_confidence_bound_over_all_layers",
    ),
    Break(
        "validate/decoding.py",
        "name in outputs and not (resume and is_cross_attention(name)):",
        "name in outputs:",
        "the encoder's keys are replaced by what a later step returns",
        "tests/validate/test_decoding.py::test_the_keys_of_the_encoder_are_those_of_the_prompt",
    ),
    Break(
        "validate/consistency.py",
        "return [max(shape.length - 1, self._shortest), middle]",
        "return [shape.length, middle]",
        "no row is padded by one position, so that not every length runs with and without padding",
        "tests/validate/test_consistency.py::test_one_of_two_rows_is_padded_by_one_position",
    ),
    Break(
        "validate/embeddings.py",
        "not cosines.min() >= min_cosine:",
        "cosines.min() < min_cosine:",
        "embeddings that are NaN pass",
        "tests/validate/test_embeddings.py",
    ),
    Break(
        "validate/verdict.py",
        "        and not weights.differences\n",
        "",
        "weights that differ from the model's do not fail the validation",
        "tests/validate/test_weights.py",
    ),
    Break(
        "validate/verdict.py",
        "return bool(graphs) and graphs == compared and all(",
        "return bool(graphs) and all(",
        "a graph that was compared on no input passes",
        "tests/validate/test_stage.py::test_every_graph_has_to_be_compared_on_an_input",
    ),
    Break(
        "validate/weights/elements.py",
        "return np.asarray(~(np.abs(difference) <= limit), np.bool_)",
        "return np.asarray(np.abs(difference) > limit, np.bool_)",
        "a weight that is NaN equals any other",
        "tests/validate/test_weights.py::test_a_weight_that_is_nan_equals_no_number",
    ),
    Break(
        "validate/stage.py",
        "if not _verdict_marker(verdict.key, written).exists():",
        "if not written:",
        "the verdict in an artifact from elsewhere is trusted",
        "tests/validate/test_stage.py",
    ),
    Break(
        "validate/generation.py",
        "if unk_id is not None and unk_id in {*mine[step:], *expected[step:]}:",
        "if unk_id is not None:",
        "a text that is tokenized in another way is only noted",
    ),
    # -- serve ------------------------------------------------------------------------------------
    Break(
        "serve/batching/queue.py",
        "if self.rows and not admitted:",
        "if self.rows:",
        "later rows of an accepted request are rejected",
        "tests/serve/test_queue.py",
    ),
    Break(
        "serve/batching/queue.py",
        "while self.rows and (entry := self._first()).weight <= rows:",
        "while self.rows and (entry := self._first()) and rows > 0:",
        "a text with several beams counts as one row of a batch",
        "tests/serve/test_queue.py tests/serve/test_generation.py",
    ),
    Break(
        "serve/batching/planner.py",
        "return tokens <= rules.max_tokens and padding <= allowed",
        "return real <= rules.max_tokens and padding <= allowed",
        "padding does not count as tokens of a batch",
        "tests/serve/test_planner.py",
    ),
    Break(
        "serve/middleware.py",
        "budget.take(len(part), held + len(part))",
        "budget.take(len(part), len(part))",
        "a body without a declared length may have any size",
        "tests/serve/test_app.py",
    ),
    Break(
        "serve/keys.py",
        'bearer = token.strip() if scheme.lower() == "bearer" else ""',
        'bearer = token.strip() if scheme == "bearer" else ""',
        "the key of a client that writes `Bearer` is refused",
        "tests/serve/test_app.py tests/serve/test_service.py",
    ),
    Break(
        "serve/api/oip_tensors.py",
        "first_size, first_name = sizes.setdefault(dim, (size, spec.name))",
        'first_size, first_name = sizes.setdefault(f"{spec.name} {dim}", (size, spec.name))',
        "a dim that two tensors share may have two sizes",
        "tests/serve/test_oip.py",
    ),
    Break(
        "serve/batching/generation.py",
        "            request.cancelled = True\n            queue.cancel(request.entries)\n",
        "            queue.cancel(request.entries)\n",
        "the texts of a request that was cancelled are generated to their end",
        "tests/serve/test_generation.py",
    ),
    Break(
        "serve/models/registry.py",
        "async with self._reloading:",
        "if True:",
        "two reloads of a model run at the same time",
        "tests/serve/test_registry.py::test_reloads_asked_for_at_once_run_one_after_the_other",
    ),
    Break(
        "serve/api/errors.py",
        'getattr(error, "retry_after_seconds", 1.0)',
        'getattr(error, "retry_after_seconds", 0.0)',
        "an answer 503 does not say when to try again",
        "tests/serve/test_app.py",
    ),
    Break(
        "serve/api/completions.py",
        "results[index] = _Piece(index, text, finish, logprobs)",
        "results[step.index + position] = _Piece(index, text, finish, logprobs)",
        "texts of several prompts with several answers each are mixed up",
        "tests/serve/test_completions.py",
    ),
    # -- core -------------------------------------------------------------------------------------
    Break(
        "core/store/store.py",
        "for i, size in entry.files.items() if not holders[i])",
        "for i, size in entry.files.items())",
        "a removed entry counts as freed space although another entry holds its files",
    ),
    Break(
        "core/shapes.py",
        "ranks = [(largest_volume(profile), shape_count(profile)) for profile in profiles]",
        "ranks = [(shape_count(profile), largest_volume(profile)) for profile in profiles]",
        "the profile with the fewest shapes runs an input, not the smallest one",
        "tests/core/test_shapes.py",
    ),
    Break(
        "core/trust/screening.py",
        "if nested or not _has_class(path, top, known_types):",
        "if nested and not _has_class(path, top, known_types):",
        "the code of a model of unknown type is not refused",
    ),
    Break(
        "core/model/weights.py",
        'if pickled == name.endswith(".safetensors"):',
        'if pickled and name.endswith(".safetensors"):',
        "an index of safetensors may name pickled files",
        "tests/core/model/test_source.py",
    ),
    Break(
        "core/artifact/artifact.py",
        "locked(self.path / MANIFEST, lambda: None),",
        "",
        "of two verdicts that are written at the same time one is lost",
    ),
    Break(
        "core/artifact/artifact.py",
        "if inside.as_posix() not in manifest.files:",
        "if inside.name not in manifest.files:",
        "a settings file in a folder that the manifest does not list is accepted",
    ),
    Break(
        "core/datasets/labels.py",
        "if index is not None and (not indices or index in indices.values()) else None",
        "if index is not None else None",
        "an index that is none of the model's classes is a label",
        "tests/quantize/test_rows.py tests/quantize/calibration/test_data.py",
    ),
    Break(
        "core/datasets/delimited.py",
        "start = reader.line_num + 1",
        "start = reader.line_num",
        "the error of an open quotation mark names the line before it",
        "tests/core/datasets/test_reader.py",
    ),
    Break(
        "core/datasets/batches.py",
        "if len(batch) >= max_rows or size >= BATCH_BYTES:",
        "if len(batch) > max_rows or size >= BATCH_BYTES:",
        "a batch has one row more than its limit",
        "tests/core/datasets/test_reader.py",
    ),
    Break(
        "core/model/feeds.py",
        'left = decodes and not mask_spec.name.startswith("encoder_")',
        "left = decodes",
        "made-up inputs of an encoder are padded on the left",
    ),
)


@dataclass(frozen=True)
class Result:
    """A row of the table."""

    file: str
    breaks: str
    noticed_by: str
    """A key of `LEVELS`, or `nothing`."""
    test: str
    """The first test that failed, or `timeout`."""
    tested: str
    """The paths that ran, the last of them up to the failure."""


def matches(fault: Break, words: Sequence[str]) -> bool:
    """Return True if a break is in one of the folders or files."""
    return any(fault.file.startswith(word) for word in words)


def broken_source(fault: Break, source: str) -> str:
    """Return a module's text with the break.

    Raises:
        ValueError: the old text is not there exactly once.
    """
    count = source.count(fault.old)
    if count != 1:
        raise ValueError(
            f"enginery/{fault.file}: found {count} times, expected once: {fault.old!r}. "
            "Write the break anew for the code as it is now."
        )
    return source.replace(fault.old, fault.new)


class Laboratory:
    """A copy of the tree in which breaks are made."""

    def __init__(self, root: Path) -> None:
        """Copy the tree to a directory that does not exist."""
        self.root = root
        shutil.copytree(ROOT, root, symlinks=True, ignore=_NOT_COPIED)

    @contextmanager
    def broken(self, fault: Break) -> Iterator[None]:
        """Make a break for the time of the block."""
        path = self.root / "enginery" / fault.file
        before = path.stat()
        source = path.read_text(encoding="utf-8")
        path.write_text(broken_source(fault, source), encoding="utf-8")
        # Python takes a compiled module for current if the source has its time, in seconds, and
        # its size: each break has a time of its own.
        os.utime(path, (before.st_mtime, before.st_mtime - 1 - BREAKS.index(fault)))
        try:
            yield
        finally:
            path.write_text(source, encoding="utf-8")
            os.utime(path, (before.st_mtime, before.st_mtime))

    def failures(self, arguments: Sequence[str]) -> list[str]:
        """Run pytest with these arguments; return the ids of the tests that failed, in order."""
        temporary = self.root.parent / f"{self.root.name}-tmp"
        command = [sys.executable, "-m", "pytest", "-q", "--tb=no", "-p", "no:cacheprovider"]
        command += ["--basetemp", str(temporary), "--prefork", *arguments]
        with subprocess.Popen(
            command,
            cwd=self.root,
            env={**os.environ, "PYTHONPATH": str(self.root)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=TIMEOUT_SECONDS)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                return ["timeout"]
            finally:
                shutil.rmtree(temporary, ignore_errors=True)
        failed = _FAILURE.findall(output)
        if process.returncode not in (0, 5) and not failed:  # 5: no test was selected
            raise RuntimeError(f"pytest ended with status {process.returncode}:\n{output[-3000:]}")
        return failed

    def first_failure(self, fault: Break, step: int, level: str, left_out: Iterable[str]) -> str:
        """Return the first test of a step that notices a break, '' if none does."""
        paths, *before = fault.steps(self.root)[step::-1]
        if not paths:
            return ""
        # Files that have run already; a folder has to run for its other files.
        tested = [f"--ignore={path}" for part in before for path in part if path.endswith(".py")]
        deselected = [f"--deselect={name}" for name in left_out]
        with self.broken(fault):
            failed = self.failures(["-x", "-m", LEVELS[level], *paths, *tested, *deselected])
        return failed[0] if failed else ""


def read_table(path: Path) -> dict[tuple[str, str], Result]:
    """Return the rows of a table by file and sentence; none if it does not exist."""
    rows = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else []
    return {(row["file"], row["breaks"]): Result(**row) for row in rows}


def write_table(path: Path, results: dict[tuple[str, str], Result]) -> None:
    """Write the rows in the order of `BREAKS`."""
    keys = [(fault.file, fault.breaks) for fault in BREAKS]
    rows = [asdict(results[key]) for key in keys if key in results]
    path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


class Search:
    """The search for tests that notice breaks, in several copies of the tree at a time."""

    def __init__(self, scratch: Path, jobs: int, out: Path) -> None:
        """Copy the tree for each job.

        Args:
            scratch: the directory of the copies.
            jobs: the number of breaks at a time.
            out: the table. Rows of other breaks stay.
        """
        self._laboratories: SimpleQueue[Laboratory] = SimpleQueue()
        for index in range(jobs):
            self._laboratories.put(Laboratory(scratch / str(index)))
        self._jobs, self._out = jobs, out
        self._results = read_table(out)
        self._sound: set[str] = set()
        """Tests that pass without a break."""
        self._unsound: set[str] = set()
        """Tests that fail without a break, too."""

    def run(self, faults: Sequence[Break], step: int, level: str) -> list[Break]:
        """Run a step of some breaks, and return those that no test has noticed."""
        missed: list[Break] = []
        waiting = list(faults)
        while waiting:
            with ThreadPoolExecutor(self._jobs) as pool:
                failed = list(pool.map(lambda fault: self._run_one(fault, step, level), waiting))
            self._run_without_a_break({*failed} - {"", "timeout"} - self._sound)
            missed += [fault for fault, test in zip(waiting, failed, strict=True) if not test]
            waiting = [
                fault for fault, test in zip(waiting, failed, strict=True) if test in self._unsound
            ]
        return missed

    def _run_one(self, fault: Break, step: int, level: str) -> str:
        """Run a step of a break, write its row, and return the test that failed or ''."""
        started = time.monotonic()
        with self._laboratory() as laboratory:
            failed = laboratory.first_failure(fault, step, level, self._unsound)
        seconds = time.monotonic() - started
        paths = [path for part in fault.steps(ROOT)[: step + 1] for path in part]
        self._results[fault.file, fault.breaks] = Result(
            fault.file,
            fault.breaks,
            level if failed else "nothing",
            failed,
            " ".join(dict.fromkeys(paths)),
        )
        write_table(self._out, self._results)
        print(f"{seconds:5.0f} s  {fault.breaks}: {failed or '-'}", flush=True)  # noqa: T201
        return failed

    def _run_without_a_break(self, tests: set[str]) -> None:
        """Find out which tests fail in a copy without a break, too."""
        if not tests:
            return
        with self._laboratory() as laboratory:
            failed = laboratory.failures(["-m", "slow or not slow", *sorted(tests)])
        self._unsound |= tests & {*failed}
        self._sound |= tests - {*failed}

    @contextmanager
    def _laboratory(self) -> Iterator[Laboratory]:
        laboratory = self._laboratories.get()
        try:
            yield laboratory
        finally:
            self._laboratories.put(laboratory)


def main() -> int:
    """Make the breaks and write the table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--out", type=Path, default=TABLE, help="the table; other rows in it stay")
    parser.add_argument("--only", default="", help="folders or files, with commas: export,passes")
    parser.add_argument("--missing", action="store_true", help="only those not in the table yet")
    parser.add_argument("--slow", action="store_true", help="also run the tests marked slow")
    parser.add_argument(
        "--steps", type=int, default=_STEPS, help="parts of `Break.steps` to run, 1 to 4"
    )
    parser.add_argument("--jobs", type=int, default=1, help="breaks at a time")
    options = parser.parse_args()
    known = read_table(options.out) if options.missing else {}
    words = [word for word in options.only.split(",") if word] or [""]
    faults = [
        fault
        for fault in BREAKS
        if matches(fault, words) and (fault.file, fault.breaks) not in known
    ]
    levels = list(LEVELS) if options.slow else list(LEVELS)[:-1]
    with tempfile.TemporaryDirectory(prefix="breaks-") as scratch:
        search = Search(Path(scratch), options.jobs, options.out)
        for step, level in product(range(options.steps), levels):
            faults = search.run(faults, step, level)
    return 0


if __name__ == "__main__":
    sys.exit(main())
