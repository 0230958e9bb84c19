"""Parts of OpenAI's bodies that chat and text completions share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Protocol, TypedDict

from quire.api.shared.pieces import Array, compact
from quire.api.shared.schema import StreamUsage
from quire.core.request import FinishReason, TokenLogprobs
from quire.serving.streams import GenerationStream
from quire.text.events import Finished, Usage
from quire.text.tokenizer import Tokenizer

_LOWEST = -9999.0  # OpenAI's stand-in for the logarithm of nothing, which JSON cannot say


def usage_body(usage: Usage) -> dict[str, object]:
    """Return OpenAI's `usage`."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        "completion_tokens_details": {
            "reasoning_tokens": usage.reasoning_tokens,
            "accepted_prediction_tokens": usage.accepted_drafts,
            "rejected_prediction_tokens": usage.rejected_drafts,
        },
    }


class ChunkHeads:
    """The starts of chunks of OpenAI's streams, up to the member with the content.

    If token ids were requested, the first chunk of a choice's batch has the batch's ids.

    Args:
        constant: a chunk's event, up to the bracket that opens its choices, inclusive.
        member: the choice's member with the content.
    """

    def __init__(
        self, constant: bytes, run: GenerationStream, member: bytes, *, token_ids: bool
    ) -> None:
        self.constant = constant
        self._run = run
        self._member = b',"' + member + b'":'
        self._heads = [
            constant + b'{"index":%d' % index + self._member for index in range(len(run.choices))
        ]
        self._token_ids = token_ids

    def of(self, index: int) -> bytes:
        """Return the start of the next chunk of a choice."""
        if self._token_ids and (ids := self._run.choices[index].take_ids()):
            return self.constant + b'{"index":%d,"token_ids":' % index + compact(ids) + self._member
        return self._heads[index]


class ChunkEnds:
    """The ends of chunks of OpenAI's streams, with the requested usage.

    Attributes:
        after: bytes after a chunk's choice.
        tail: bytes after the delta of an unfinished choice without log-probabilities.
    """

    def __init__(self, run: GenerationStream, usage: StreamUsage) -> None:
        self._run = run
        self._usage = usage
        self._set(b"" if usage is StreamUsage.NONE else b',"usage":null')

    def update(self) -> None:
        """Update the usage; called for each batch of events."""
        if self._usage is StreamUsage.ALL:
            self._set(self._counted())

    def last(self, constant: bytes) -> bytes:
        """Return the chunk of usage, if requested, and the end mark. After an error there is only
        the mark.

        Args:
            constant: a chunk's JSON up to and with the bracket that opens its choices.
        """
        done = b"data: [DONE]\n\n"
        if self._usage is StreamUsage.NONE or self._run.failed:
            return done
        return constant + b"]" + self._counted() + b"}\n\n" + done

    def _counted(self) -> bytes:
        return b',"usage":' + compact(usage_body(self._run.usage))

    def _set(self, usage: bytes) -> None:
        self.after = b"]" + usage + b"}\n\n"
        self.tail = b',"logprobs":null,"finish_reason":null}' + self.after


def finish_reason(end: Finished) -> str:
    """Return OpenAI's finish reason. An answer cut short for a loop, or a cut call, counts as
    `length`.
    """
    if end.reason.is_cut_off:
        return "length"
    return "tool_calls" if end.tool_calls else "stop"


def stop_reason(end: Finished) -> str | None:
    """Return the end that `finish_reason` cannot express: the matched stop string, `loop` or
    `malformed_call`.
    """
    if end.reason in (FinishReason.LOOP, FinishReason.MALFORMED_CALL):
        return end.reason.value
    return end.stop


def clamp(logprob: float) -> float:
    """Return a logarithm that JSON can express; the lowest for NaN, as overflows compute it."""
    return logprob if logprob > _LOWEST else _LOWEST


class TokenNames(Protocol):
    """How log-probabilities name tokens: by their text."""

    def token_bytes(self, token_id: int) -> bytes:
        """Return the bytes of a token's name."""
        ...


class NumberedTokens:
    """Names tokens by id, as vLLM can, because not every token is text by itself."""

    def token_bytes(self, token_id: int) -> bytes:
        return b"token_id:%d" % token_id


def token_names(tokenizer: Tokenizer, *, numbered: bool | None) -> TokenNames:
    """Return the naming that a request chooses (`return_tokens_as_token_ids`)."""
    return NumberedTokens() if numbered else tokenizer


def token_text(tokenizer: TokenNames, token_id: int) -> str:
    """Return a token as text; bytes that are no whole character are spelled `bytes:\\xNN...`."""
    raw = tokenizer.token_bytes(token_id)
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in raw)


def chat_logprobs(
    tokenizer: TokenNames, entries: Iterable[TokenLogprobs]
) -> list[dict[str, object]]:
    """Return chat's `logprobs.content`."""
    return [
        {
            **_token(tokenizer, entry.token_id, entry.logprob),
            "top_logprobs": [_token(tokenizer, token, value) for token, value in entry.top],
        }
        for entry in entries
    ]


class Identity(TypedDict):
    """The constant start of an answer and its chunks; `created` is in seconds of Unix time."""

    id: str
    created: int
    model: str


class Logprobs(Protocol):
    """Collects the log-probabilities of a choice that is not streamed."""

    def add(self, entries: Sequence[TokenLogprobs], *, reasoning: bool = False) -> int:
        """Add the next tokens, of the answer or of its reasoning; return the bytes held."""
        ...

    def body(self) -> Any:
        """Return the choice's `logprobs`, for `pieces`."""
        ...


class NoLogprobs:
    """The log-probabilities of a choice that requested none."""

    def add(self, entries: Sequence[TokenLogprobs], *, reasoning: bool = False) -> int:
        """Ignore the tokens."""
        return 0

    def body(self) -> None:
        """Return the protocol's value for no log-probabilities."""


class ChatLogprobs:
    """Log-probabilities in chat's format. Those of reasoning have a list of their own."""

    def __init__(self, tokenizer: TokenNames) -> None:
        self._tokenizer = tokenizer
        self._written: list[bytes] = []
        self._reasoning: list[bytes] = []

    def add(self, entries: Sequence[TokenLogprobs], *, reasoning: bool = False) -> int:
        written = compact(chat_logprobs(self._tokenizer, entries))[1:-1]
        (self._reasoning if reasoning else self._written).append(written)
        return len(written)

    def body(self) -> dict[str, object]:
        body: dict[str, object] = {"content": Array(self._written)}
        return body | {"reasoning_content": Array(self._reasoning)} if self._reasoning else body


def _token(tokenizer: TokenNames, token_id: int, logprob: float) -> dict[str, object]:
    return {
        "token": token_text(tokenizer, token_id),
        "logprob": clamp(logprob),
        "bytes": list(tokenizer.token_bytes(token_id)),
    }
