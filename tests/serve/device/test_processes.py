"""`enginery serve --fronts` as processes: asked, killed, reloaded, ended."""

import http.client
import json
import os
import re
import signal
import threading
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import httpx
import numpy as np
import psutil
import pytest

from enginery.core.errors import OptionError
from enginery.runtime.model import load_model
from enginery.serve.config import ServeConfig, check_options, gpu_ids
from enginery.serve.server import plan_devices
from tests.serve.processes import gone, wait_until
from tests.serve.test_service import WAIT, serving
from tests.tolerances import OUTPUTS

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="processes of POSIX")
FRONTS = ("--fronts", "2", "--access-log", "off")


class Clients:
    """Threads that send requests over connections of their own, kept or new, until `stop`."""

    def __init__(self, url, count, body=None, *, keeps_alive=True):
        self.statuses, self.lost = Counter(), 0
        self._keeps_alive = keeps_alive
        self._address = urlsplit(url).netloc
        self._body = json.dumps(body or {"inputs": "the pump runs"})
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=self._ask) for _ in range(count)]
        for thread in self._threads:
            thread.start()

    def _ask(self):
        while not self._stop.is_set():
            connection = http.client.HTTPConnection(self._address, timeout=WAIT)
            try:
                while not self._stop.is_set():
                    connection.request("POST", "/embed", self._body)
                    response = connection.getresponse()
                    response.read()
                    self.statuses[response.status] += 1
                    if not self._keeps_alive:
                        break
            except (OSError, http.client.HTTPException):
                self.lost += 1
            finally:
                connection.close()

    def stop(self):
        self._stop.set()
        for thread in self._threads:
            thread.join(WAIT)
            assert not thread.is_alive(), "a request was never answered"
        return self


def device_and_fronts(server):
    """Pids: the device process is started first, and it alone has no listening socket."""
    listening = [pid for pid in server.children if psutil.Process(pid).net_connections("tcp")]
    (device,) = set(server.children) - set(listening)
    return device, listening


@pytest.mark.more
def test_fronts_answer_as_the_model_and_end_with_0(exported):
    artifact, other = (
        exported("bert", "feature-extraction"),
        exported("bert", "text-classification"),
    )
    texts = ["the pump runs", "a", "the engine is warm and the valve is open again"]
    with load_model(artifact) as model:
        expected = model.embed(texts, normalize=True)
    with serving(f"words={artifact.path}", f"labels={other.path}", options=FRONTS) as server:
        assert len(server.children) == 3
        assert server.says("ready: words, feature-extraction, fp32 on CPUExecutionProvider")
        for _ in range(8):  # connections of different fronts
            with httpx.Client(base_url=server.url, timeout=WAIT) as client:
                answer = client.post("/embed", json={"inputs": texts, "model": "words"})
                assert answer.status_code == 200, answer.text
                assert np.allclose(answer.json(), expected, atol=OUTPUTS)
                labels = client.post("/predict/labels", json={"inputs": ["a", "b"]}).json()
                assert len(labels["outputs"]) == 2
                health = client.get("/health").json()
                assert health["status"] == "ready"
                assert health["models"]["words"]["provider"] == "CPUExecutionProvider"
        feeds = {"name": "input_ids", "datatype": "INT64", "shape": [1, 2], "data": [5, 6]}
        mask = {"name": "attention_mask", "datatype": "INT64", "shape": [1, 2], "data": [1, 1]}
        types = {"name": "token_type_ids", "datatype": "INT64", "shape": [1, 2], "data": [0, 0]}
        raw = server.client.post("/v2/models/words/infer", json={"inputs": [feeds, mask, types]})
        assert raw.status_code == 200, raw.text
        assert raw.json()["outputs"][0]["shape"][:2] == [1, 2]
        # Figures of all processes together, from whichever front is asked.
        info = httpx.get(f"{server.url}/info", timeout=WAIT).json()
        assert [model["method"] for model in info["models"]] == ["embed", "classify"]
        assert info["models"][0]["dim"] == 32
        assert info["models"][0]["batching"]["max_rows"] == 64
        text = httpx.get(f"{server.url}/metrics", timeout=WAIT).text
        count = re.search(r'request_duration_seconds_count\{.*"/embed".*\} (\S+)', text)[1]
        assert float(count) == 8
        batches = re.search(r'batch_inputs_sum\{model="words"\} (\S+)', text)[1]
        assert float(batches) == 8 * len(texts) + 1
        assert 'enginery_queue_inputs{model="words"} 0.0' in text
        device, _ = device_and_fronts(server)
        (directory,) = {
            Path(each.laddr).parent
            for each in psutil.Process(device).net_connections("unix")
            if "device-" in each.laddr
        }
        assert directory.stat().st_mode & 0o777 == 0o700
        children = server.children
        server.process.terminate()
        assert server.process.wait(WAIT) == 0
        assert all(map(gone, children))
        assert not directory.exists()


@pytest.mark.more
def test_killed_device_process_fails_its_requests_and_is_replaced(exported):
    path = exported("bert", "feature-extraction").path
    with serving(path, options=FRONTS) as server:
        device, fronts = device_and_fronts(server)
        clients = Clients(server.url, 6)
        wait_until(lambda: clients.statuses[200] > 50)
        os.kill(device, signal.SIGKILL)
        server.says(f"warning: worker process {device} was killed (signal 9)")
        server.wait_ready()
        answered = clients.statuses[200]
        wait_until(lambda: clients.statuses[200] > answered + 50)
        clients.stop()
        assert not clients.lost
        assert set(clients.statuses) <= {200, 503}
        assert clients.statuses[503]
        assert set(fronts) < set(server.children)  # they have stayed


def test_killed_front_loses_only_its_own_connections(exported):
    path = exported("bert", "feature-extraction").path
    with serving(path, options=FRONTS) as server:
        device, (front, other) = device_and_fronts(server)
        clients = Clients(server.url, 8)
        wait_until(lambda: clients.statuses[200] > 50)
        own = len(
            [c for c in psutil.Process(front).net_connections("tcp") if c.status == "ESTABLISHED"]
        )
        os.kill(front, signal.SIGKILL)
        server.says(f"warning: worker process {front} was killed (signal 9)")
        wait_until(lambda: len(server.children) == 3)
        answered = clients.statuses[200]
        wait_until(lambda: clients.statuses[200] > answered + 50)
        clients.stop()
        assert clients.lost <= own
        assert set(clients.statuses) == {200}  # the one that replaces it listens when it can answer
        assert {device, other} < set(server.children)


@pytest.mark.more
@pytest.mark.parametrize("option", ["--fronts", "--processes"])
def test_there_is_no_503_after_the_server_was_ready(exported, option):
    path = exported("bert", "feature-extraction").path
    with serving(path, options=(option, "3", "--access-log", "off")) as server:
        clients = Clients(server.url, 12)
        wait_until(lambda: clients.statuses.total() > 100)
        clients.stop()
        assert (set(clients.statuses), clients.lost) == ({200}, 0)


@pytest.mark.more
def test_worker_that_replaces_another_listens_when_it_can_answer(exported):
    path = exported("bert", "feature-extraction").path
    with serving(path, options=("--processes", "2", "--access-log", "off")) as server:
        server.says("ready: ", times=2)
        clients = Clients(server.url, 8, keeps_alive=False)
        for replaced in range(1, 4):
            os.kill(server.children[0], signal.SIGKILL)
            server.says("ready: ", times=2 + replaced)
        clients.stop()
        assert set(clients.statuses) == {200}


@pytest.mark.more
def test_draining_answers_what_was_sent(exported):
    """The device process runs what the fronts accept until they have ended."""
    path = exported("bert", "feature-extraction").path
    with serving(path, options=(*FRONTS, "--drain-delay", "1")) as server:
        clients = Clients(server.url, 8, {"inputs": ["the pump runs"] * 40})
        wait_until(lambda: clients.statuses[200] > 10)
        server.process.terminate()
        server.says("draining", times=2)
        answered = clients.statuses[200]
        wait_until(lambda: clients.statuses[200] > answered + 10)
        time.sleep(0.5)
        clients.stop()
        assert server.process.wait(WAIT) == 0
        assert set(clients.statuses) == {200}


@pytest.mark.more
def test_sighup_reloads_in_the_device_process_alone(exported, tmp_path):
    first, second = (exported("bert", "feature-extraction", opset=opset) for opset in (20, 19))
    served = tmp_path / "served"
    served.symlink_to(first.path)
    with serving(served, options=FRONTS) as server:
        clients = Clients(server.url, 4)
        wait_until(lambda: clients.statuses[200] > 20)
        served.unlink()
        served.symlink_to(second.path)
        server.process.send_signal(signal.SIGHUP)
        server.says("served: reloaded: ")
        wait_until(
            lambda: (
                httpx.get(f"{server.url}/info", timeout=WAIT).json()["models"][0]["content_sha256"]
                == second.content_sha256()
            )
        )
        answered = clients.statuses[200]
        wait_until(lambda: clients.statuses[200] > answered + 20)
        clients.stop()
        assert (set(clients.statuses), clients.lost) == ({200}, 0)
        assert sum("reloaded" in line for line in server.lines) == 1


@pytest.mark.more
def test_artifact_that_cannot_be_loaded_ends_the_server(exported, copied, tmp_path):
    import subprocess
    import sys

    broken = copied(exported("bert", "feature-extraction"))
    (broken.path / "tokenizer.json").unlink()
    command = [sys.executable, "-m", "enginery", "serve", str(broken.path), "--port", "0", *FRONTS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=WAIT, check=False)
    assert done.returncode == 2
    assert done.stderr.count("tokenizer.json") == 1


class Spec:
    """A provider that was requested."""

    def __init__(self, name, full_name):
        self.name, self.full_name = name, full_name


CPU = (Spec("cpu", "CPUExecutionProvider"),)
CUDA = (Spec("cuda", "CUDAExecutionProvider"), *CPU)
TENSORRT = (Spec("tensorrt", "TensorrtExecutionProvider"), *CUDA)


def test_gpus_have_a_device_process_each():
    assert plan_devices(ServeConfig(), CPU, {}) == []
    assert plan_devices(ServeConfig(), CUDA, {}) == [()]
    assert plan_devices(ServeConfig(gpus="0,2"), CUDA, {}) == [
        ("cuda.device_id=0",),
        ("cuda.device_id=2",),
    ]
    assert plan_devices(ServeConfig(gpus="1"), TENSORRT, {}) == [
        ("tensorrt.device_id=1", "cuda.device_id=1")
    ]
    assert plan_devices(ServeConfig(processes=1), CUDA, {}) == []
    assert plan_devices(ServeConfig(restart=False), CUDA, {}) == []
    assert plan_devices(ServeConfig(fronts=2), CPU, {}) == [()]


def test_models_that_generate_have_no_fronts(tmp_path):
    (tmp_path / "manifest.json").write_text(json.dumps({"task": "text-generation-with-past"}))
    paths = {"writer": tmp_path}
    assert plan_devices(ServeConfig(), CUDA, paths) == []
    with pytest.raises(OptionError, match="'fronts' is set, but writer generates texts"):
        plan_devices(ServeConfig(fronts=2), CUDA, paths)
    with pytest.raises(OptionError, match="'gpus' is '0', but the provider is cpu"):
        plan_devices(ServeConfig(gpus="0"), CPU, {})


@pytest.mark.parametrize("gpus", ["a", "0,", "-1", "1,1", "0;1", "²"])
def test_ids_of_gpus_are_different_numbers(gpus):
    with pytest.raises(OptionError, match=r"'gpus' is .*, expected ids of GPUs"):
        check_options(ServeConfig(gpus=gpus))
    assert gpu_ids(ServeConfig(gpus="3, 1")) == [3, 1]


def test_fronts_and_processes_exclude_each_other():
    with pytest.raises(OptionError, match="'processes' and 'fronts' are both set"):
        check_options(ServeConfig(processes=2, fronts=2))
    with pytest.raises(OptionError, match="'processes' and 'gpus' are both set"):
        check_options(ServeConfig(processes=1, gpus="0"))
    with pytest.raises(OptionError, match="'fronts' is 1, expected 0 without 'restart'"):
        check_options(ServeConfig(fronts=1, restart=False))
    with pytest.raises(OptionError, match="'gpus' is '0', but without 'restart'"):
        check_options(ServeConfig(gpus="0", restart=False))


def test_systems_that_cannot_fork_have_one_process(monkeypatch):
    monkeypatch.delattr(os, "fork")
    assert plan_devices(ServeConfig(), CUDA, {}) == []
    with pytest.raises(OptionError, match="'fronts' is set, but a server on this"):
        plan_devices(ServeConfig(fronts=2), CPU, {})
    with pytest.raises(OptionError, match="'gpus' is set, but a server on this"):
        plan_devices(ServeConfig(gpus="0"), CUDA, {})
