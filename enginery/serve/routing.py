"""Which handler answers which method and path.

    >>> table = Table(routes)
    >>> table.find("GET", "/v2/models/minilm/ready")[0].pattern
    '/v2/models/{model}/ready'

Fixed paths are looked up in a dict; patterns are compared segment by segment, those with the most
fixed segments first. The last name of a pattern may end in a star: it takes the rest of the path,
slashes included. HEAD is answered as GET.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from enginery.core.errors import nearest
from enginery.serve.error_shapes import Family
from enginery.serve.messages import Response
from enginery.serve.reading import shown
from enginery.serve.refusals import MethodNotAllowedError, NotFoundError

if TYPE_CHECKING:
    from enginery.serve.call import Call

Handler = Callable[["Call"], Awaitable[Response]]
Schema = Mapping[str, Any]

_LONGEST = 256
"""Of a path, beyond which no nearest one is looked for: the search takes the square of it."""


@dataclass(frozen=True)
class Operation:
    """What the OpenAPI document says of a route."""

    summary: str
    answer: Schema | None = None
    """The JSON schema of a 200; None for a body that is no JSON, or none at all."""
    body: Schema | None = None
    """The JSON schema of the request's body."""
    optional_body: bool = False
    other_bodies: Mapping[str, Schema] = field(default_factory=dict)
    """Content type -> schema of other bodies that are taken."""
    answer_types: Sequence[str] = ("application/json",)
    statuses: Sequence[int] = ()
    """Those of its own; what any request can get is added."""
    query: Mapping[str, Schema] = field(default_factory=dict)
    not_ready: Schema | None = None
    """The JSON schema of a 503 that is an answer, as health routes give it."""


@dataclass(frozen=True)
class Route:
    """A method and a path, or a pattern of paths, with what answers them."""

    method: str
    pattern: str
    handler: Handler
    family: Family
    operation: Operation
    public: bool = False
    """No key is needed."""

    @property
    def names(self) -> tuple[str, ...]:
        """The names in the pattern."""
        return tuple(part[1:-1].rstrip("*") for part in _segments(self.pattern) if _is_name(part))


def get(
    family: Family, pattern: str, handler: Handler, operation: Operation, *, public: bool = False
) -> Route:
    """A route that is read."""
    return Route("GET", pattern, handler, family, operation, public)


def post(family: Family, pattern: str, handler: Handler, operation: Operation) -> Route:
    """A route that is asked something, with a key where there is one."""
    return Route("POST", pattern, handler, family, operation)


class MethodError(MethodNotAllowedError):
    """The route is there, with other methods, which the answer's Allow names."""

    def __init__(self, message: str, *, allowed: tuple[str, ...]) -> None:
        super().__init__(message)
        self.allowed = allowed


class Table:
    """The routes of one server."""

    def __init__(self, routes: Iterable[Route]) -> None:
        self.routes = tuple(routes)
        self._fixed: dict[str, dict[str, Route]] = {}
        patterns: dict[str, dict[str, Route]] = {}
        for route in self.routes:
            paths = patterns if route.names else self._fixed
            methods = paths.setdefault(route.pattern, {})
            if route.method in methods:
                raise ValueError(f"two handlers answer {route.method} {route.pattern}")
            methods[route.method] = route
        split = [(_segments(pattern), methods) for pattern, methods in patterns.items()]
        self._patterns = sorted(split, key=lambda entry: sum(map(_is_name, entry[0])))

    def find(self, method: str, path: str) -> tuple[Route, dict[str, str]]:
        """The route, and the values of the names in its pattern.

        Raises:
            NotFoundError: no route has this path.
            MethodError: the route has other methods.
        """
        methods, values = self._match(path)
        if methods is None:
            raise NotFoundError(f"there is no route {shown(path)}{self._nearest(path)}")
        route = methods.get(method)
        if route is None and method == "HEAD":
            route = methods.get("GET")
        if route is None:
            allowed = _allowed(methods)
            raise MethodError(
                f"{path if len(path) < _LONGEST else 'the route'} does not answer "
                f"{shown(method)}, expected {' or '.join(allowed)}.",
                allowed=allowed,
            )
        return route, values

    def is_public(self, method: str, path: str) -> bool:
        """Whether no key is needed: of paths that no route has, too."""
        methods, _ = self._match(path)
        route = (methods or {}).get(method)
        return route is None or route.public

    def allowed(self, path: str) -> tuple[str, ...]:
        """The methods of a path; raises NotFoundError where no route has it."""
        methods, _ = self._match(path)
        if methods is None:
            raise NotFoundError(f"there is no route {shown(path)}{self._nearest(path)}")
        return _allowed(methods)

    def family(self, path: str) -> Family:
        """The protocol that a path belongs to, though nothing may answer it."""
        methods, _ = self._match(path)
        if methods:
            # GET / is a page and POST / is text-embeddings-inference's.
            return next(iter(methods.values())).family
        if path.startswith("/v2"):
            return "oip"
        return "openai" if path.startswith("/v1/") else "plain"

    def _match(self, path: str) -> tuple[dict[str, Route] | None, dict[str, str]]:
        methods = self._fixed.get(path)
        if methods is not None:
            return methods, {}
        parts = _segments(path)
        for pattern, candidates in self._patterns:
            values = _values(pattern, parts)
            if values is not None:
                return candidates, values
        if len(path) > 2 and path[-1] == "/" and path[-2] != "/":
            return self._match(path[:-1])
        return None, {}

    def _nearest(self, path: str) -> str:
        if len(path) > _LONGEST:
            return "."
        patterns = dict.fromkeys(route.pattern for route in self.routes)
        return nearest(path, patterns)


def _segments(path: str) -> list[str]:
    return path.split("/")[1:]


def _is_name(segment: str) -> bool:
    return segment.startswith("{")


def _values(pattern: Sequence[str], parts: Sequence[str]) -> dict[str, str] | None:
    rest = pattern[-1].endswith("*}")
    if len(parts) != len(pattern) and not (rest and len(parts) > len(pattern)):
        return None
    values = {}
    for index, segment in enumerate(pattern):
        if not _is_name(segment):
            if segment != parts[index]:
                return None
            continue
        value = "/".join(parts[index:]) if segment.endswith("*}") else parts[index]
        if not value:
            return None
        values[segment[1:-1].rstrip("*")] = value
    return values


def _allowed(methods: Mapping[str, Route]) -> tuple[str, ...]:
    names = {*methods, "OPTIONS"} | ({"HEAD"} if "GET" in methods else set())
    return tuple(sorted(names))
