"""Models that answer at once, or not at all, as a test wants them."""

from __future__ import annotations

import asyncio
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from enginery.core.manifest import SourceRecord
from enginery.core.model_files import ModelConfig
from enginery.core.shapes import TensorSpec
from enginery.runtime.answers import Classification, Label
from enginery.serve.models import Models, Reloaded
from enginery.serve.refusals import NotFoundError
from enginery.serve.replies import Reply, Timings

TIMINGS = Timings(0.0001, 0.0002, 0.004, tokens=7)


class StandInModel:
    """A hosted model whose `answer_with` is raised, awaited or returned by every method."""

    def __init__(self, name="minilm", method="embed", *, answer_with=None, config=None, dim=4):
        self.name, self.method, self.dim = name, method, dim
        self.task = "feature-extraction"
        self.takes_images = method.endswith("images")
        self.state, self.reason, self.limit = "ready", "", 128
        self.tokenizer = None
        self.config = ModelConfig.model_validate(config or {"vocab_size": 600})
        self.calls = []
        self.answer_with = answer_with
        inputs = (TensorSpec("input_ids", "int64", ("batch", "sequence")),)
        outputs = (TensorSpec("logits", "float32", ("batch", 3)),)
        self.record = SimpleNamespace(inputs=inputs, outputs=outputs)
        source = SourceRecord(
            kind="hub", id="sentence-transformers/all-MiniLM-L6-v2", revision="abc", sha256="",
            files={},
        )  # fmt: skip
        manifest = SimpleNamespace(
            source=source, precision="fp32", stages=(), task=self.task, verdict=lambda _: None
        )
        self.artifact = SimpleNamespace(
            manifest=manifest, path=Path("nowhere"), failed=lambda: None
        )

    def info(self):
        return {"task": self.task, "providers": [{"name": "CUDAExecutionProvider"}]}

    async def _answer(self, method, inputs, options):
        self.calls.append((method, inputs, options))
        if isinstance(self.answer_with, Exception):
            raise self.answer_with
        if isinstance(self.answer_with, asyncio.Event):
            await self.answer_with.wait()
        values = self.answer_with
        if not isinstance(values, list | dict):
            values = [self._value() for _ in inputs]
        return Reply(values, TIMINGS)

    def _value(self):
        if self.method.startswith("classify"):
            return Classification((Label("glad", 0.75), Label("calm", 0.25)))
        return np.arange(1, self.dim + 1, dtype=np.float32)

    def __getattr__(self, method):
        if method not in ("embed", "classify", "tag", "answer", "fill", "infer",
                          "classify_images", "embed_images"):  # fmt: skip
            raise AttributeError(method)

        def ask(inputs, **options):
            return self._answer(method, inputs, options)

        return ask


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

    def get(self, name):
        if name not in self._models:
            raise NotFoundError(f"there is no model '{name}'.")
        return self._models[name]

    only = Models.only

    async def reload(self, name=""):
        names = (self.get(name).name,) if name else self.names
        self.reloaded += names
        return {
            name: Reloaded(swapped=False, text=f"not reloaded: {self.broken[name]}")
            if name in self.broken
            else Reloaded(swapped=True, text="reloaded")
            for name in names
        }


class StandInMetrics:
    """Keeps what it is told."""

    def __init__(self):
        self.requests, self.replies, self.refusals = [], [], []

    def request(self, *, route, model, status, seconds):
        self.requests.append((route, model, status))

    def reply(self, model, timings, *, inputs):
        self.replies.append((model, timings.tokens, inputs))

    def refused(self, model, reason):
        self.refusals.append((model, reason))

    def exposition(self, accept=""):
        return b"# HELP x\n", "text/plain; version=0.0.4"
