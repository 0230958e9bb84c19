"""One tree of errors. Each names what was wrong; the API maps them to a wire format once.

`RequestError` and its children are the caller's fault and carry what OpenAI-shaped error bodies
need (`status`, `code`, `param`). `ModelError` is raised while a model is opened. `EngineFailure`
means that the engine itself cannot go on.
"""

from __future__ import annotations


class QuireError(Exception):
    """Root of every error that Quire raises on purpose."""


class RequestError(QuireError):
    """A request that cannot be served, through no fault of the server.

    Args:
        message: one sentence that names the field and the limit.
        param: the request field at fault, as the client spelled it.
        code: a stable machine-readable word, e.g. `context_length_exceeded`.
    """

    status = 400
    type = "invalid_request_error"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code


class AuthenticationError(RequestError):
    """No API key, or a wrong one."""

    status = 401
    type = "authentication_error"


class NotFound(RequestError):
    """A model, response or route that does not exist."""

    status = 404
    type = "not_found_error"


class TooLarge(RequestError):
    """A body, header or media item over its size limit."""

    status = 413
    type = "request_too_large"


class Overloaded(RequestError):
    """More concurrent requests than the operator allows; try again after `retry_after_s`."""

    status = 429
    type = "rate_limit_error"

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: float = 1.0,
        param: str | None = None,
        code: str | None = None,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.retry_after_s = retry_after_s


class NotOffered(RequestError):
    """A part of a protocol that this server does not implement."""

    status = 501
    type = "not_implemented_error"


class ModelError(QuireError):
    """A model folder that cannot be opened: unknown type, missing tensor, too large for memory."""


class EngineFailure(QuireError):
    """The engine cannot go on: what is in flight fails, /health says so, the process exits."""
