"""A Triton server on 127.0.0.1.

with triton_server(directory) as server:
    export_triton(artifact, server.repository, name="mood", provider="cpu")
    server.load("mood")
    server.infer("mood", {"text": texts(["It runs again."])}, {"top_k": 1})["label"]
"""

from __future__ import annotations

import json
import os
import shutil
import site
import sys
import sysconfig
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import np_to_triton_dtype

from tests.publish.targets.servers import free_port, running, wait_for

_ROOT = Path(__file__).parents[2]
_VERSION = f"{sys.version_info.major}.{sys.version_info.minor}"
_ONNX_RUNTIME = Path(__file__).with_name("triton_onnxruntime.py")


def tensors(inputs: Mapping[str, np.ndarray]) -> list[triton.InferInput]:
    """Return inputs as tritonclient's."""
    return [
        triton.InferInput(
            name, list(array.shape), np_to_triton_dtype(array.dtype)
        ).set_data_from_numpy(array)
        for name, array in inputs.items()
    ]


def arrays(result: triton.InferResult) -> dict[str, np.ndarray]:
    """Return the outputs of tritonclient's result by name."""
    names = [output["name"] for output in result.get_response()["outputs"]]
    return {name: result.as_numpy(name) for name in names}


@dataclass(frozen=True)
class TritonServer:
    """A running Triton server, whose models are loaded by request."""

    address: str
    client: triton.InferenceServerClient
    repository: Path
    log: Path

    def load(self, model: str) -> None:
        """Load a model, with the models of an ensemble; raise InferenceServerException."""
        self.client.load_model(model)

    def infer(
        self,
        model: str,
        inputs: Mapping[str, np.ndarray],
        parameters: Mapping[str, Any] = {},
        **options: Any,
    ) -> dict[str, np.ndarray]:
        """Return the outputs for a request; raise InferenceServerException if it fails.

        Args:
            model: its name.
            inputs: name -> array.
            parameters: parameters of the request.
            options: of tritonclient's `infer`, such as `outputs` and `timeout`.
        """
        options["parameters"] = dict(parameters) or None
        return arrays(self.client.infer(model, tensors(inputs), **options))

    def infer_together(
        self, model: str, requests: list[Mapping[str, np.ndarray]]
    ) -> list[dict[str, np.ndarray]]:
        """Return the outputs for several requests, which are sent at the same time."""
        sent = [self.client.async_infer(model, tensors(inputs)) for inputs in requests]
        return [arrays(request.get_result()) for request in sent]

    def batches(self, model: str) -> list[tuple[int, ...]]:
        """Return the shapes of the first input of each run of a graph."""
        lines = [line for line in self.log.read_text().splitlines() if line.startswith('{"model"')]
        return [tuple(run["shape"]) for run in map(json.loads, lines) if run["model"] == model]


@contextmanager
def triton_server(directory: Path) -> Iterator[TritonServer]:
    """Run a server with an empty repository, which loads models on demand.

    It is the one of nvidia-pytriton, with its Python backend; `tests.deploy.triton_onnxruntime` is
    in the place of two others. TRITON_PYTHON names the Python of its environment.

    Args:
        directory: an empty one.
    """
    python = os.environ.get("TRITON_PYTHON", "")
    if not python:
        pytest.skip("set TRITON_PYTHON to the Python of an environment with nvidia-pytriton")
    packages = Path(python).absolute().parents[1] / f"lib/python{_VERSION}/site-packages"
    installed = packages / "pytriton/tritonserver"
    stub = installed / f"python_backend_stubs/{_VERSION}/triton_python_backend_stub"
    if not stub.is_file():
        pytest.fail(f"TRITON_PYTHON is {python}, which has no nvidia-pytriton for {_VERSION}")
    backends = directory / "backends"
    shutil.copytree(installed / "backends", backends)
    shutil.copy(stub, backends / "python")
    (backends / "python" / stub.name).chmod(0o755)
    for name in ("onnxruntime", "tensorrt"):
        (backends / name).mkdir()
        shutil.copy(_ONNX_RUNTIME, backends / name / "model.py")
    # The stub ignores PYTHONPATH: its packages are those of the first `python3` on PATH. This one
    # has NumPy 1 from TRITON_PYTHON, because the stub's pybind11 cannot read arrays of NumPy 2, and
    # all others from the environment of the tests.
    environment = directory / "python"
    venv.create(environment, symlinks=True)
    paths = [packages, _ROOT, *site.getsitepackages()]
    added = environment / f"lib/python{_VERSION}/site-packages/tests.pth"
    added.write_text("".join(f"{path}\n" for path in paths))
    libraries = [packages / "nvidia_pytriton.libs", sysconfig.get_config_var("LIBDIR")]
    repository, log, port = directory / "models", directory / "server.log", free_port()
    repository.mkdir()
    command = [
        installed / "bin/tritonserver",
        f"--model-repository={repository}",
        f"--backend-directory={backends}",
        "--model-control-mode=explicit",
        "--http-address=127.0.0.1",
        f"--http-port={port}",
        "--allow-grpc=false",
        "--allow-metrics=false",
    ]
    variables = {
        **os.environ,
        "PATH": f"{environment / 'bin'}:{os.environ['PATH']}",
        "LD_LIBRARY_PATH": ":".join(map(str, libraries)),
    }
    address = f"http://127.0.0.1:{port}"
    with running([str(word) for word in command], log, variables) as server:
        wait_for(f"{address}/v2/health/ready", server, log)
        client = triton.InferenceServerClient(
            f"127.0.0.1:{port}", concurrency=8, network_timeout=240, connection_timeout=240
        )
        try:
            yield TritonServer(address, client, repository, log)
        finally:
            client.close()
