"""One request on its way through a route.

    >>> model = call.take(call.parts.models.only(), "embed")
    >>> vectors = call.keep(await model.embed(["The engine is warm."]), inputs=1)

The route reads the request and asks the model; what it learns of both stays here, for the headers,
the metrics and the log, which the application writes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from enginery.serve.config import ServeConfig
from enginery.serve.keys import Keys
from enginery.serve.messages import Request
from enginery.serve.reading import JsonObject, json_object
from enginery.serve.refusals import InvalidBodyError, InvalidInputError, UnavailableError
from enginery.serve.replies import Reply, Timings
from enginery.serve.rooms import HostedModel, Metrics, Models
from enginery.serve.routing import Route, Table

_ANSWERS = {
    "embed": "embeds texts", "classify": "classifies texts", "tag": "tags texts",
    "answer": "answers questions", "fill": "fills masks", "classify_images": "classifies images",
    "embed_images": "embeds images",
}  # fmt: skip


@dataclass(frozen=True)
class ServerParts:
    """What the routes of one server share."""

    models: Models
    config: ServeConfig
    keys: Keys
    table: Table
    metrics: Metrics | None = None


@dataclass(slots=True)
class Call:
    """One request, with what is learnt of it."""

    request: Request
    parts: ServerParts
    request_id: str = ""
    started: float = 0.0
    """By `time.perf_counter`."""
    route: Route | None = None
    """What answers; None where nothing does."""
    path_values: Mapping[str, str] = field(default_factory=dict)
    """The names in the route's pattern."""
    noted: bool = False
    """It was answered, and written down: nothing that follows counts."""
    model: HostedModel | None = None
    timings: Timings | None = None
    inputs: int = 0
    characters: int = 0
    """Of all texts; 0 where there are none."""

    def json(self) -> JsonObject:
        """The JSON object of the body; raises InvalidBodyError where it is none."""
        self.require_plain_bytes()
        return json_object(self.request.body)

    def require_plain_bytes(self) -> None:
        """Raises InvalidBodyError for a compressed body."""
        encoding = self.request.headers.get("content-encoding", "identity")
        if encoding not in ("identity", ""):
            # A few bytes could become gigabytes, which the limit of the body would not see.
            raise InvalidBodyError(
                f"the body is encoded with {encoding[:40]!r}, expected none.",
                do="Send it uncompressed.",
            )

    def take(self, model: HostedModel, *methods: str) -> HostedModel:
        """The model, once it is sure that it can answer.

        Args:
            model: of this request, from here on.
            methods: the route needs one of them; none where it does not matter.

        Raises:
            UnavailableError: it is loading, stuck or gone.
            InvalidInputError: it was exported for another task.
        """
        self.model = model
        if model.state != "ready":
            reason = f": {model.reason.rstrip('.')}" if model.reason else ""
            raise UnavailableError(
                f"model '{model.name}' is {model.state}{reason}.",
                retry_after_seconds=1.0,
            )
        if methods and model.method not in methods:
            does = _ANSWERS.get(model.method)
            wanted = " or ".join(_ANSWERS[method] for method in methods)
            raise InvalidInputError(
                f"model '{model.name}' was exported for {model.task}, "
                f"expected a model that {wanted}.",
                do=f"It {does}: POST /predict/{model.name}."
                if does
                else f"Send it tensors: POST /v2/models/{model.name}/infer.",
            )
        return model

    def keep(self, reply: Reply, *, inputs: int, characters: int = 0) -> Any:
        """The values of a reply, whose figures the application writes down."""
        self.timings = reply.timings
        self.inputs = inputs
        self.characters = characters
        return reply.values


def vocabulary_size(model: HostedModel) -> int:
    """Token ids of the model are below it; 0 where config.json does not say."""
    return model.config.vocab_size
