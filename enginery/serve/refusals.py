"""Why a request is not answered, as a status with a reason in words.

    >>> raise InvalidInputError("inputs: found a number, expected a string or a list of strings.")

    400  the body is not what its content type says        InvalidBodyError
    401  a key is wanted                                   UnauthorizedError
    404  no such model or route                            NotFoundError
    405  the route has other methods                       MethodNotAllowedError
    413  too many bytes, inputs or tokens                  TooLargeError
    422  a text, a tensor or an option cannot be used      InvalidInputError, InputError …
    429  the queue is full; Retry-After says when          OverloadedError
    503  loading, draining, or the worker is gone          UnavailableError

Each protocol has its own shape for these; the routes give it.
"""

from __future__ import annotations

from enginery.core.errors import EngineryError, InputError, OptionError, ShapeError


class RefusalError(EngineryError):
    """A request that is not answered, with its HTTP status."""

    status = 500

    def __init__(self, message: str, *, do: str = "", retry_after_seconds: float = 0.0) -> None:
        super().__init__(message, do=do)
        self.retry_after_seconds = retry_after_seconds


class InvalidBodyError(RefusalError):
    """The body is not what its content type says, or lacks what the route needs."""

    status = 400


class UnauthorizedError(RefusalError):
    """A key is wanted, and was not given or is wrong."""

    status = 401


class NotFoundError(RefusalError):
    """There is no such model or route."""

    status = 404


class MethodNotAllowedError(RefusalError):
    """The route is there, with other methods."""

    status = 405


class TooLargeError(RefusalError):
    """More bytes, inputs or tokens than are taken at once."""

    status = 413


class InvalidInputError(RefusalError):
    """A text, a tensor or an option cannot be used."""

    status = 422


class OverloadedError(RefusalError):
    """The queue is full."""

    status = 429


class UnavailableError(RefusalError):
    """The model is loading or draining, or its worker is gone."""

    status = 503


def as_refusal(error: EngineryError) -> RefusalError:
    """What an error of the runtime is for the client.

    What a client can mend is 422; everything else is the server's, and 503.
    """
    if isinstance(error, RefusalError):
        return error
    if isinstance(error, InputError | ShapeError | OptionError):
        return InvalidInputError(error.message, do=error.do)
    return UnavailableError(error.message, do=error.do)
