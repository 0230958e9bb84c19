"""One tree of errors. Each names what was wrong; the API maps them to a wire format once.

`RequestError` and its children are the client's fault and carry what OpenAI-shaped error bodies
need (`status`, `code`, `param`). `ModelError` is raised while a model is opened. `EngineFailure`
means that the engine itself cannot continue.
"""

from __future__ import annotations

from typing import Any


class QuireError(Exception):
    """Root of every error that Quire raises on purpose.

    Attributes:
        exit_status: exit status of a command that ends by this error.
    """

    exit_status = 1


class RequestError(QuireError):
    """A request that cannot be served because of the client, not of the server.

    Args:
        message: one sentence that names the field and the limit.
        param: the request field at fault, as the client spelled it.
        code: a stable machine-readable word, e.g. `context_length_exceeded`; None for the class's.

    Attributes:
        overflow: tokens of the prompt, and the most that it may have, if that is what was wrong.
    """

    overflow: tuple[int, int] | None = None
    status = 400
    type = "invalid_request_error"
    code = "invalid_value"

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        if code is not None:
            self.code = code

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickle without calling `__init__`, whose arguments differ between classes."""
        return _restored, (type(self), self.args), self.__dict__


def _restored(kind: type[RequestError], args: tuple[object, ...]) -> RequestError:
    return kind.__new__(kind, *args)


class ContextOverflow(RequestError):
    """A prompt with more tokens than the context holds, the first of the answer included.

    Clients compact or cut a conversation only on the words that they know, so the message is
    OpenAI's, and says `prompt is too long` for LangChain, which knows those of Anthropic alone;
    other protocols make theirs of the numbers.

    Args:
        tokens: of the prompt.
        limit: tokens that prompt and answer may have together.
        because: a sentence on what sets the limit, if not the model or the operator.
        at_least: `tokens` were counted before the counting was given up.
    """

    def __init__(
        self, tokens: int, limit: int, *, param: str, because: str = "", at_least: bool = False
    ) -> None:
        counted = f"at least {tokens}" if at_least else f"{tokens}"
        super().__init__(
            f"This model's maximum context length is {limit} tokens. However, your prompt "
            f"resulted in {counted} tokens, and the answer needs at least one: the prompt is too "
            f"long. Please reduce the length of the prompt. {because}".rstrip(),
            param=param,
            code="context_length_exceeded",
        )
        self.overflow = (tokens, limit - 1)


class TextTooLong(RequestError):
    """A text with more tokens than an embedding or a score may be made of.

    Args:
        tokens: of the text.
        limit: the most tokens.
        because: what sets the limit.
        at_least: `tokens` were counted before the counting was given up.
    """

    def __init__(
        self, tokens: int, limit: int, *, param: str, because: str, at_least: bool = False
    ) -> None:
        counted = f"at least {tokens}" if at_least else f"{tokens}"
        super().__init__(
            f"'{param}' has {counted} tokens; this model reads at most {limit} ({because}). "
            "Shorten the text, or send 'truncate_prompt_tokens': -1 to have it cut.",
            param=param,
            code="context_length_exceeded",
        )
        self.overflow = (tokens, limit)


class AuthenticationError(RequestError):
    """No API key, or a wrong one."""

    status = 401
    type = "authentication_error"


class Forbidden(RequestError):
    """A request that this web page or API key has no right to send."""

    status = 403
    type = "permission_error"


class UnsupportedMediaType(RequestError):
    """A body that is not JSON."""

    status = 415


class NotFound(RequestError):
    """A model, response or route that does not exist."""

    status = 404
    type = "not_found_error"
    code = "not_found"


class TooLarge(RequestError):
    """A body, header or media item over its size limit."""

    status = 413
    type = "request_too_large"
    code = "request_too_large"


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
    """A model folder that cannot be opened: unknown type, missing tensor, too large for memory.

    Args:
        message: what is wrong; of a setting, what is wrong with its value.
        setting: the setting at fault, as `LLM` spells it, e.g. `kv_memory`; "" for none. It stands
            before the message, unless who shows the error knows how the user spelled it.
    """

    def __init__(self, message: str, *, setting: str = "") -> None:
        super().__init__(f"{setting}: {message}" if setting else message)
        self.message = message
        self.setting = setting


class NoRoom(ModelError):
    """A model that would fit if others were unloaded."""


class EngineFailure(QuireError):
    """The engine cannot continue: requests in flight fail, and `/health` reports it.

    Args:
        retry_after_s: seconds after which another engine may answer; None if that is not known.
    """

    def __init__(self, message: str, *, retry_after_s: float | None = None) -> None:
        super().__init__(message)
        self.retry_after_s = retry_after_s


class LoadingStopped(EngineFailure):
    """The loading of a model was stopped while requests waited for it."""


class StorageFailed(QuireError):
    """A folder of the server cannot be read or written. The reason names no path."""
