import signal
import subprocess
import sys
import threading
from concurrent.futures import CancelledError
from contextlib import closing

import numpy as np
import pytest
from PIL import Image

from enginery.core.datasets.reader import open_dataset
from enginery.core.errors import OptionError
from enginery.predict.batch_predictor import BatchPredictor, map_in_order
from enginery.predict.config import PredictConfig
from enginery.predict.report import Counts
from enginery.predict.stage import input_options
from enginery.predict.task_inputs import require_task, window_rows
from enginery.predict.writer import _json


def test_map_in_order_keeps_order_and_reads_one_item_ahead():
    read = []
    gates = [threading.Event() for _ in range(20)]

    def numbers():
        for number in range(20):
            read.append(number)
            yield number

    def work(number):
        if number == 0:
            gates[1].wait(30)  # the first ends after the second
        gates[number].set()
        return number

    found = map_in_order(work, numbers(), threads=2, stopped=threading.Event())
    assert next(found) == 0
    assert len(read) <= 3
    assert [0, *found] == list(range(20))


@pytest.mark.parametrize(
    ("kind", "task"),
    [("vit", "image-classification"), ("gpt2", "text-generation-with-past")],
)
def test_rows_that_nobody_waits_for_are_left_out(tiny, kind, task, tmp_path, monkeypatch):
    from enginery.runtime.onnxruntime.runner import OrtRunner
    from enginery.runtime.tasks.text_generator import TextGenerator

    owner, name = (OrtRunner, "__call__") if kind == "vit" else (TextGenerator, "_steps")
    runs, run = [], getattr(owner, name)
    monkeypatch.setattr(owner, name, lambda *args: runs.append(1) or run(*args))
    image = tmp_path / "image.png"
    Image.new("RGB", (32, 32)).save(image)
    window = [str(image) if kind == "vit" else "The engine"] * 40
    with BatchPredictor(tiny(kind, task), PredictConfig(batch_rows=1, workers=1)) as predictor:
        model = predictor._model

        def work(inputs):
            running.set()
            return model(inputs, Counts())

        running = threading.Event()
        finished = map_in_order(work, iter([window] * 3), threads=1, stopped=model.stopped)
        threading.Thread(target=lambda: running.wait(30) and model.stopped.set()).start()
        with closing(finished), pytest.raises(CancelledError):
            next(finished)
        stopped = len(runs)
        model.stopped.clear()
        work(window[:2])
    assert stopped < 20 * (len(runs) - stopped) / 2


def test_map_in_order_stops_at_an_error_and_leaves_no_thread():
    def work(number):
        if number == 3:
            raise ValueError("three")
        return number

    with pytest.raises(ValueError, match="three"):
        list(map_in_order(work, iter(range(10_000)), threads=2, stopped=threading.Event()))
    assert not [t for t in threading.enumerate() if t.name.startswith("enginery-window")]


def test_no_threads_are_left_after_a_run(predict, tiny, reviews):
    before = set(threading.enumerate())
    predict(tiny("bert", "text-classification"), reviews)
    assert set(threading.enumerate()) <= before


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"window": -1}, "'window' is -1, expected 0 or more"),
        ({"part_seconds": 0.0}, "'part_seconds' is 0.0, expected more than 0"),
    ],
)
def test_config_rejects_invalid_values(options, message):
    with pytest.raises(OptionError, match=message):
        PredictConfig(**options)


def test_json_numbers_have_few_digits_and_no_nan():
    import numpy as np

    assert _json(np.array([0.1, np.nan], np.float32)) == "[0.1,null]"
    assert np.float32(float(_json(np.float32(1) / np.float32(3)))) == np.float32(1) / np.float32(3)
    assert _json({"a": [float("inf"), "é", b"\x00"]}) == '{"a": [null, "é", "00"]}'


@pytest.mark.more
def test_predict_loads_neither_torch_nor_transformers(tiny, reviews, tmp_path):
    artifact = tiny("bert", "feature-extraction")
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from enginery.predict.config import PredictConfig\n"
        "print('config:', *sorted({'numpy', 'pyarrow', 'onnxruntime'} & set(sys.modules)))\n"
        "from enginery.core.artifact.artifact import Artifact\n"
        "from enginery.predict.stage import run\n"
        f"artifact, folder = Artifact.open({str(artifact.path)!r}), Path({str(tmp_path)!r})\n"
        f"run(artifact, {str(reviews)!r}, folder / 'o.csv', PredictConfig())\n"
        f"run(artifact, {str(reviews)!r}, folder / 'o.parquet', PredictConfig())\n"
        "config = PredictConfig(prefix='again_')\n"
        "run(artifact, str(folder / 'o.parquet'), folder / 'o.jsonl', config)\n"
        "run(artifact, str(folder / 'o.jsonl'), folder / 'p.jsonl', PredictConfig(prefix='x_'))\n"
        "heavy = {'torch', 'transformers', 'optimum', 'onnx', 'pandas', 'PIL'}\n"
        "print('heavy:', *sorted(heavy & set(sys.modules)))\n"
    )
    words = [sys.executable, "-c", program]
    found = subprocess.run(words, capture_output=True, text=True, check=True)
    assert found.stdout.splitlines() == ["config:", "heavy:"]


@pytest.mark.slow
def test_memory_does_not_depend_on_the_size_of_the_input(tiny, tmp_path):
    artifact = tiny("bert", "text-classification")
    program = (
        "import sys\n"
        "from pathlib import Path\n"
        "from enginery.core.artifact.artifact import Artifact\n"
        "from enginery.predict.config import PredictConfig\n"
        "from enginery.predict.stage import run\n"
        "artifact = Artifact.open(sys.argv[1])\n"
        "report = run(artifact, sys.argv[2], Path(sys.argv[3]), PredictConfig())\n"
        "print(report.peak_rss_bytes)\n"
    )
    peaks = []
    for rows in (20_000, 200_000):
        data = tmp_path / f"{rows}.csv"
        with data.open("w") as stream:
            stream.write("text\n")
            stream.writelines(f"the pump number {n} {'is warm ' * (n % 9)}\n" for n in range(rows))
        words = [sys.executable, "-c", program, artifact.path, data, tmp_path / f"{rows}.parquet"]
        done = subprocess.run(words, capture_output=True, text=True, check=True)
        peaks.append(int(done.stdout))
    assert peaks[1] < peaks[0] + (32 << 20)


def test_few_texts_are_divided_among_all_workers(tiny, monkeypatch):
    from enginery.predict.report import Counts
    from enginery.predict.token_batches import InferencePool, WindowRunner
    from enginery.runtime.onnxruntime.runner import OrtRunner
    from enginery.runtime.tasks.batch_runner import BatchRunner
    from enginery.runtime.tasks.embed import Embed

    texts = ["The pump is warm.", "The belt is loose.", "The fan is loud."] * 4
    batches = []
    real = BatchRunner.feeds

    def noting(batch_runner, rows):
        batches.append(len(rows))
        return real(batch_runner, rows)

    monkeypatch.setattr(BatchRunner, "feeds", noting)
    found = []
    artifact = tiny("bert", "feature-extraction")
    with OrtRunner(artifact) as runner:
        for workers, fixed_rows in ((1, 0), (4, 0), (4, 12)):
            with InferencePool(workers) as pool:
                model = WindowRunner.open(Embed, artifact, runner, pool, PredictConfig())
                model.batches.fixed_rows = fixed_rows
                found.append(np.stack(model(texts, Counts())))
    (whole, *divided, fixed) = batches
    assert (whole, fixed) == (12, 12)  # a smaller batch would be filled up
    assert (len(divided), sum(divided)) == (4, 12)
    assert max(divided) <= 4  # of the shorter texts
    for vectors in found[1:]:
        np.testing.assert_allclose(vectors, found[0], atol=1e-6)


@pytest.mark.parametrize(
    ("kind", "task", "threads"),
    [("bert", "feature-extraction", 0), ("vit", "image-classification", 3)],
)
def test_only_batches_of_images_get_a_session_for_lone_runs(tiny, monkeypatch, kind, task, threads):
    from enginery.predict import batch_predictor

    found = []

    class Noting(batch_predictor.OrtRunner):
        def __init__(self, artifact, options, **given):
            found.append(options.lone_threads)
            super().__init__(artifact, options, **given)

    monkeypatch.setattr(batch_predictor, "OrtRunner", Noting)
    batch_predictor.BatchPredictor(tiny(kind, task), PredictConfig(workers=3)).close()
    assert found == [threads]


@pytest.mark.parametrize("unit", ["the pump is warm. ", "pump" * 999 + " ", "   \t", "Ünïcödé "])
def test_shortened_text_has_the_same_first_tokens(tiny, unit):
    from enginery.predict.token_batches import InferencePool, WindowRunner
    from enginery.runtime.onnxruntime.runner import OrtRunner
    from enginery.runtime.tasks.embed import Embed
    from enginery.runtime.text.tokenizer import TextTokenizer

    artifact = tiny("bert", "feature-extraction")
    text = unit * (1_000_000 // len(unit)) + "the end"
    with OrtRunner(artifact) as runner, InferencePool(1) as pool:
        model = WindowRunner.open(Embed, artifact, runner, pool, PredictConfig())
        tokenizer = model.task.tokenizer
        (found,) = tokenizer.encode([text])
        (whole,) = TextTokenizer.open(artifact.path).encode([text])
        assert found.ids == whole.ids
        assert bool(found.overflowing) == bool(whole.overflowing)
        if unit.startswith("the"):
            assert len(tokenizer._shorten(text)) < 50_000


@pytest.mark.more
@pytest.mark.parametrize(
    ("kind", "task"),
    [
        ("bert", "text-classification"),
        ("bert", "feature-extraction"),
        ("vit", "image-classification"),
        ("vit", "feature-extraction"),
    ],
)
def test_one_thread_runs_all_batches_on_a_gpu(
    tiny, predict, rows, reviews, tmp_path, monkeypatch, kind, task
):
    """CUDA graphs are replayed by the thread that recorded them."""
    from PIL import Image

    from enginery.predict import batch_predictor
    from enginery.runtime.onnxruntime.device_values import Device

    source, text = reviews, "text"
    if kind == "vit":
        source, text = tmp_path / "images", "path"
        source.mkdir()
        for level in range(5):
            Image.new("RGB", (8, 8), (level * 40,) * 3).save(source / f"{level}.png")
    threads = set()

    class OnGpu(batch_predictor.OrtRunner):
        opened = False

        def __init__(self, *args, **options):
            super().__init__(*args, **options)
            self.opened = True

        @property
        def device(self):
            return Device("cuda") if self.opened else super().device

        def __call__(self, *args):
            threads.add(threading.current_thread())
            return super().__call__(*args)

        def warm_up(self):
            threads.add(threading.current_thread())
            super().warm_up()

    artifact = tiny(kind, task)
    on_cpu = predict(artifact, source, "cpu.jsonl", workers=3)
    monkeypatch.setattr(batch_predictor, "OrtRunner", OnGpu)
    on_gpu = predict(artifact, source, "gpu.jsonl", workers=3, window=16)
    assert (on_cpu.workers, on_gpu.workers) == (3, 1)
    (thread,) = threads
    assert thread.name.startswith("enginery-run")
    for row, expected in zip(rows("gpu.jsonl"), rows("cpu.jsonl"), strict=True):
        assert (row[text], row["error"]) == (expected[text], None)
        if "label" in row:
            assert row["label"] == expected["label"]
        else:
            assert row["embedding"] == pytest.approx(expected["embedding"], abs=1e-5)


@pytest.mark.parametrize(
    ("options", "cpu", "gpu"),
    [
        ({}, (64, 512), (256, 8192)),
        ({"batch_rows": 7, "batch_tokens": 100}, (7, 100), (7, 100)),
    ],
)
def test_limits_of_a_batch_depend_on_the_device(tiny, options, cpu, gpu):
    from enginery.predict.token_batches import InferencePool, WindowRunner
    from enginery.runtime.onnxruntime.device_values import Device
    from enginery.runtime.onnxruntime.runner import OrtRunner, RunnerOptions
    from enginery.runtime.tasks.embed import Embed

    class OnGpu(OrtRunner):
        device = Device("cuda")

    artifact = tiny("bert", "feature-extraction")
    for kind, limits in ((OrtRunner, cpu), (OnGpu, gpu)):
        with kind(artifact, RunnerOptions(io_binding=False)) as runner, InferencePool(1) as pool:
            model = WindowRunner.open(Embed, artifact, runner, pool, PredictConfig(**options))
            assert (model.max_rows, model.max_tokens) == limits


@pytest.mark.parametrize(
    ("workers", "is_interrupted"), [(1, False), (3, False), (2, True)], ids=str
)
def test_a_window_ends_midway(tiny, workers, is_interrupted):
    """Closed, or interrupted while this thread waits for it."""
    from enginery.predict.token_batches import InferencePool, WindowRunner
    from enginery.runtime.onnxruntime.runner import OrtRunner
    from enginery.runtime.tasks.embed import Embed
    from enginery.runtime.tasks.row_stream import Window

    artifact = tiny("bert", "feature-extraction")
    before = set(threading.enumerate())
    running = threading.Event()
    runs = []

    class Slow(OrtRunner):
        def __call__(self, feeds, outputs=()):
            runs.append(len(feeds["input_ids"]))
            if len(runs) > 4:
                running.set()
                stopped.wait(30)
            return super().__call__(feeds, outputs)

    stopped = threading.Event()
    with Slow(artifact) as runner, InferencePool(workers) as pool:
        config = PredictConfig(batch_rows=1)
        model = WindowRunner.open(Embed, artifact, runner, pool, config)
        windows = [Window(["the pump"] * 4, 0), Window(["the pump"] * 500, 1)]
        done = model.run_windows(iter(windows))
        assert next(done).origin == 0
        assert running.wait(30)
        threading.Timer(0.2, stopped.set).start()
        if is_interrupted:
            main = threading.main_thread().ident
            threading.Timer(0.1, signal.pthread_kill, (main, signal.SIGINT)).start()
            with pytest.raises(KeyboardInterrupt):
                next(done)
        done.close()
        model.close()
    assert len(runs) < 50
    assert not [t for t in {*threading.enumerate()} - before if t.name.startswith("enginery-")]


def test_the_share_is_shown_within_a_window(tiny, tmp_path):
    (tmp_path / "in.txt").write_text("the pump\n" * 40)
    config = PredictConfig(batch_rows=4, workers=1)
    shares = []
    with BatchPredictor(tiny("bert", "feature-extraction"), config) as predictor:
        reader = open_dataset(tmp_path / "in.txt", ("text",), input_options(config, keep="columns"))
        columns = predictor.columns(reader.schema, reader.names)
        (window,) = predictor.stream(reader, columns, skip=0, show=shares.append)
    assert window.counts.rows == 40
    assert shares == pytest.approx([number / 10 for number in range(1, 11)])


@pytest.mark.parametrize(
    ("kind", "task", "config", "rows"),
    [
        ("bert", "feature-extraction", PredictConfig(), 2048),
        ("vit", "image-classification", PredictConfig(), 128),
        ("gpt2", "text-generation-with-past", PredictConfig(batch_rows=200), 400),
        ("vit", "image-classification", PredictConfig(providers="cuda"), 512),
        ("vit", "image-classification", PredictConfig(window=3), 3),
    ],
)
def test_windows_of_slow_inputs_are_smaller(tiny, kind, task, config, rows):
    assert window_rows(require_task(tiny(kind, task), config), config) == rows
