"""Models that answer at once, or not at all, as a test wants them."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from types import SimpleNamespace

import httpx
import numpy as np

from enginery.core.artifact.manifest import SourceRecord
from enginery.core.model.files import ModelConfig
from enginery.core.shapes import TensorSpec
from enginery.runtime.tasks import TASKS
from enginery.runtime.tasks.classify import Classification, Label
from enginery.runtime.tasks.task import count_inputs
from enginery.runtime.tasks.tensors import Tensors
from enginery.serve.app import make_app
from enginery.serve.batching.scheduler import Timings
from enginery.serve.config import ServeConfig
from enginery.serve.keys import ApiKeys
from enginery.serve.models.registry import ModelRegistry, ReloadResult
from enginery.serve.models.served_model import InferenceResult
from tests.serve.conftest import seen

TIMINGS = Timings(0.0001, 0.0002, 0.004, tokens=7)


class StandInModel:
    """A served model whose `answer_with` is raised, awaited or returned for every request."""

    def __init__(self, name="minilm", verb="embed", *, answer_with=None, config=None, dim=4):
        self.name, self.dim = name, dim
        self.state, self.reason, self.is_loaded = "ready", "", True
        self.calls = []
        self.answer_with = answer_with
        definition = TASKS.get(verb)
        record = SimpleNamespace(
            inputs=(TensorSpec("input_ids", "int64", ("batch", "sequence")),),
            outputs=(TensorSpec("logits", "float32", ("batch", 3)),),
        )
        self.task = None
        if definition is not None:
            self.task = object.__new__(definition)
            self.task.record, self.task.notes = record, ()
            self.task.config, self.task.pooling = ModelConfig(), None
        task = definition.tasks[0] if definition else "object-detection"
        source = SourceRecord(
            kind="hub",
            id="sentence-transformers/all-MiniLM-L6-v2",
            revision="abc",
            sha256="",
            files={},
        )
        manifest = SimpleNamespace(
            source=source,
            precision="fp32",
            float_precision="fp32",
            stages=(),
            task=task,
            verdict=lambda _: None,
        )
        self.artifact = SimpleNamespace(
            manifest=manifest,
            path=Path("nowhere"),
            failed=lambda: None,
            validation_status=lambda: "none",
        )
        self.backend = SimpleNamespace(
            config=ModelConfig.model_validate(config or {"vocab_size": 600}),
            dim=dim,
            limit=128,
            on_cpu=False,
            record=record,
            tensors=object.__new__(Tensors),
        )

    @property
    def is_serving(self):
        return self.state == "ready"

    def info(self):
        return {
            "task": self.artifact.manifest.task,
            "batching": {"max_tokens": 0, "max_rows": 0},
            "providers": [{"name": "CUDAExecutionProvider"}],
        }

    async def infer(self, task, inputs, options, timings=None):
        self.calls.append((inputs, options))
        if isinstance(self.answer_with, Exception):
            raise self.answer_with
        if isinstance(self.answer_with, asyncio.Event):
            await self.answer_with.wait()
        results = self.answer_with
        if not isinstance(results, list | dict):
            results = [self._result() for _ in range(count_inputs(inputs))]
        return InferenceResult(results, TIMINGS)

    def _result(self):
        if self.task.verb.startswith("classify"):
            return Classification((Label("glad", 0.75), Label("calm", 0.25)))
        return np.arange(1, self.dim + 1, dtype=np.float32)


class StandInModels:
    """All models of a server, by name."""

    def __init__(self, *models):
        self._models = {model.name: model for model in models}
        self.draining = False
        self.reloaded = []
        self.broken = {}

    @property
    def names(self):
        return tuple(self._models)

    @property
    def ready(self):
        return not self.draining and all(model.state == "ready" for model in self)

    def __iter__(self):
        return iter(self._models.values())

    get = ModelRegistry.get
    select = ModelRegistry.select

    async def refresh(self):
        pass

    async def reload(self, name=""):
        names = (self.get(name).name,) if name else self.names
        self.reloaded += names
        return {
            name: ReloadResult(swapped=False, message=f"not reloaded: {self.broken[name]}")
            if name in self.broken
            else ReloadResult(swapped=True, message="reloaded")
            for name in names
        }


def application(*models, keys=(), config=None):
    """The application with models of a test's own; its lifespan does not run."""
    app = make_app({}, config or ServeConfig(access_log="off"), keys=ApiKeys(keys))
    given = models[0] if models and isinstance(models[0], StandInModels) else None
    app.state.registry = given or StandInModels(*models or [StandInModel()])
    return app


def ask(app, method, path, body=None, headers=None):
    """The answer of an application to a request."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode() if body else b""

    async def send():
        transport = httpx.ASGITransport(app=app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://server") as client:
            return await client.request(method, path, content=data, headers=headers or {})

    return seen(asyncio.run(send()))
