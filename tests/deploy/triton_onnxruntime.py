"""A Python-based backend in the place of Triton's for ONNX Runtime, which no package on PyPI has.

`tests.deploy.triton_server` copies this file into the server's folder of backends. Triton itself
does the rest: configurations, batching, warm-up. Each run of a graph is a line in the server's log.
In the place of the TensorRT backend, it answers with zeros.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np

_TYPES = {
    "tensor(bool)": "TYPE_BOOL",
    "tensor(int32)": "TYPE_INT32",
    "tensor(int64)": "TYPE_INT64",
    "tensor(float16)": "TYPE_FP16",
    "tensor(float)": "TYPE_FP32",
}


class TritonPythonModel:
    """An instance of a graph."""

    def initialize(self, args):
        config = json.loads(args["model_config"])
        self.name, self.batched = config["name"], config["max_batch_size"] > 0
        tensors = config["output"]
        self.outputs = {t["name"]: [max(1, int(dim)) for dim in t["dims"]] for t in tensors}
        self.session = None
        if config["backend"] == "onnxruntime":
            self._open(args, config)

    def _open(self, args, config):
        import onnxruntime as ort

        file = config.get("default_model_filename") or "model.onnx"
        path = Path(args["model_repository"]) / args["model_version"] / file
        path = path / "model.onnx" if path.is_dir() else path
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        self._check_tensors(config)

    def execute(self, requests):
        import triton_python_backend_utils as pb_utils

        feeds = [{t.name(): t.as_numpy() for t in request.inputs()} for request in requests]
        if self.batched:
            names, counts = list(feeds[0]), [len(next(iter(rows.values()))) for rows in feeds]
            # Triton puts only requests of equal shapes into one batch.
            batch = {name: np.concatenate([rows[name] for rows in feeds]) for name in names}
            ends = np.cumsum(counts)[:-1]
            parts = zip(*(np.split(array, ends) for array in self._run(batch)), strict=True)
        else:
            parts = map(self._run, feeds)
        return [
            pb_utils.InferenceResponse(list(map(pb_utils.Tensor, self.outputs, arrays)))
            for arrays in parts
        ]

    def _run(self, feeds):
        shape = next(iter(feeds.values())).shape
        sys.stdout.write(json.dumps({"model": self.name, "shape": shape}) + "\n")
        sys.stdout.flush()
        if self.session is None:
            return [np.zeros((shape[0], *dims), np.float32) for dims in self.outputs.values()]
        return self.session.run(list(self.outputs), feeds)

    def _check_tensors(self, config):
        """Check types and dims, as CompareDimsSupported of the ONNX Runtime backend does."""
        batch = [-1] if self.batched else []
        for tensors, nodes, exact in (
            (config["input"], self.session.get_inputs(), False),
            (config["output"], self.session.get_outputs(), True),
        ):
            by_name = {node.name: node for node in nodes}
            if not exact:
                assert {tensor["name"] for tensor in tensors} == set(by_name)
            for tensor in tensors:
                node = by_name[tensor["name"]]
                assert _TYPES[node.type] == tensor["data_type"], node
                dims = [dim if isinstance(dim, int) else -1 for dim in node.shape]
                expected = [*batch, *map(int, tensor["dims"])]
                assert len(dims) == len(expected), node
                assert dims[: len(batch)] == batch, node
                for dim, size in zip(dims, expected, strict=True):
                    assert dim == size or (dim == -1 and not exact), node
