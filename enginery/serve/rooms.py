"""What the application needs of the models and of what watches over the server.

    >>> hosted = models.get("minilm")
    >>> (await hosted.embed(["The engine is warm."])).values[0].shape
    (384,)

Protocols, so that the routes and the models know nothing of each other but this.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from threading import Event
from typing import Any, Protocol, TypeVar

from numpy.typing import NDArray

from enginery.core.artifact import Artifact
from enginery.core.manifest import GraphRecord
from enginery.core.model_files import ModelConfig
from enginery.runtime.classification import Activation, Aggregation
from enginery.runtime.question_answering import MAX_ANSWER_TOKENS
from enginery.runtime.tokenizer import TextTokenizer
from enginery.serve.messages import Request, Response
from enginery.serve.replies import Reply, Timings

Made = TypeVar("Made")
TokenIds = Sequence[int]


class HostedModel(Protocol):
    """A model that answers requests. Its coroutines raise EngineryError."""

    @property
    def name(self) -> str:
        """As routes call it."""

    @property
    def artifact(self) -> Artifact:
        """What it was made of."""

    @property
    def task(self) -> str:
        """Of its manifest."""

    @property
    def method(self) -> str:
        """The coroutine that answers its task; empty where only `infer` does."""

    @property
    def takes_images(self) -> bool:
        """Whether its inputs are image files."""

    @property
    def record(self) -> GraphRecord:
        """The graph's inputs and outputs."""

    @property
    def state(self) -> str:
        """`ready`; else loading, stuck, failed or closed."""

    @property
    def reason(self) -> str:
        """Why it is not ready, in words."""

    @property
    def limit(self) -> int:
        """The most tokens of a text; 0 without a tokenizer."""

    @property
    def dim(self) -> int:
        """Of its vectors; 0 where it makes none."""

    @property
    def tokenizer(self) -> TextTokenizer | None:
        """None for models of images."""

    @property
    def config(self) -> ModelConfig:
        """config.json."""

    def info(self) -> dict[str, Any]:
        """All there is to know of it, as JSON; `provider`, `precision` and `engines` among it."""

    async def embed(
        self,
        texts: Sequence[str | TokenIds],
        *,
        prompt_name: str = "",
        normalize: bool | None = None,
        truncate: bool | None = None,
    ) -> Reply:
        """Values: float32 (dim,) a text.

        Of length one with `normalize`, as they were pooled without, for None as the model does.
        """

    async def classify(
        self,
        texts: Sequence[str | tuple[str, str]],
        *,
        top_k: int = 0,
        activation: Activation = "auto",
        truncate: bool | None = None,
    ) -> Reply:
        """Values: a Classification a text."""

    async def tag(
        self,
        texts: Sequence[str],
        *,
        aggregation: Aggregation = "simple",
        truncate: bool | None = None,
    ) -> Reply:
        """Values: a list of TokenSpan a text."""

    async def answer(
        self,
        pairs: Sequence[tuple[str, str]],
        *,
        top_k: int = 1,
        max_tokens: int = MAX_ANSWER_TOKENS,
        allow_none: bool = False,
    ) -> Reply:
        """Values: a list of ContextAnswer a (question, context)."""

    async def fill(
        self, texts: Sequence[str], *, top_k: int = 5, truncate: bool | None = None
    ) -> Reply:
        """Values: a MaskFillings a text."""

    async def classify_images(
        self, images: Sequence[bytes], *, top_k: int = 0, activation: Activation = "auto"
    ) -> Reply:
        """Values: a Classification an image file."""

    async def embed_images(self, images: Sequence[bytes]) -> Reply:
        """Values: float32 (dim,) an image file."""

    async def infer(self, feeds: dict[str, NDArray[Any]]) -> Reply:
        """Values: the graph's outputs by name."""

    async def read(
        self, inputs: int, read: Callable[[Event], Made], *, quick: bool = False
    ) -> Made:
        """What `read` makes of so many inputs, in a thread; `quick` where it takes a millisecond.

        Its event is set when nobody waits for the inputs any more.
        """


class Reloaded(Protocol):
    """What happened to a model that was to be reloaded."""

    @property
    def swapped(self) -> bool:
        """Whether its place was taken by the new one; else it goes on as it was."""

    @property
    def text(self) -> str:
        """In words."""


class Models(Protocol):
    """All models of a server."""

    @property
    def names(self) -> tuple[str, ...]:
        """In the order they were given."""

    @property
    def ready(self) -> bool:
        """Every model is ready, and the server does not drain."""

    @property
    def draining(self) -> bool:
        """The server is about to end."""

    def get(self, name: str) -> HostedModel:
        """Raises NotFoundError where there is none of that name."""

    def only(
        self, name: str = "", fits: Callable[[HostedModel], bool] | None = None
    ) -> HostedModel:
        """The model of that name, or the only one that fits.

        Raises NotFoundError, InvalidInputError, UnavailableError.
        """

    def __iter__(self) -> Iterator[HostedModel]:
        """The models, in the order they were given."""

    async def reload(self, name: str = "") -> Mapping[str, Reloaded]:
        """What happened to each model that was reloaded; all of them for an empty name."""


class Metrics(Protocol):
    """What counts."""

    def request(self, *, route: str, model: str, status: int, seconds: float) -> None:
        """A request was answered or refused."""

    def reply(self, model: str, timings: Timings, *, inputs: int) -> None:
        """A model answered."""

    def refused(self, model: str, reason: str) -> None:
        """A request was refused."""

    def exposition(self, accept: str = "") -> tuple[bytes, str]:
        """The text of /metrics and its content type, in the format that `accept` names."""


class AccessLog(Protocol):
    """What writes a line a request."""

    def __call__(
        self,
        request: Request,
        response: Response,
        *,
        route: str,
        model: str,
        seconds: float,
        timings: Timings | None,
    ) -> None:
        """A request was answered or refused."""


class Tracing(Protocol):
    """What makes spans of a request after the fact."""

    def record(
        self,
        request: Request,
        response: Response,
        *,
        route: str,
        model: str,
        timings: Timings | None,
        started: float,
        ended: float,
    ) -> None:
        """A request was answered or refused, between two times of `time.perf_counter`."""
