"""The one stream of events that every protocol renders, streamed or folded."""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.request import Failure, FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning text. `logprobs`, if asked for, holds the tokens of the reasoning, marks included.
    Those that completed no text come with an empty text.
    """

    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """Answer text. `logprobs`, if asked for, holds the tokens that completed it and those of calls
    before it. Tokens that complete no text, or follow the last, come with an empty text.
    """

    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """A call's name is known. `index` counts the calls of this answer from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the arguments' JSON that can no longer change."""

    index: int
    json: str


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    """The arguments are complete: joined, the pieces are exactly one JSON object."""

    index: int


@dataclass(frozen=True, slots=True)
class ToolCallBroken:
    """A call that was started cannot be completed. The answer ends here: what was sent of the call
    cannot be taken back, and nothing may follow that makes it look whole. `OutputStream` turns it
    into the end of the answer."""

    index: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request.

    Attributes:
        accepted_drafts, rejected_drafts: guessed tokens of the answer that were verified, by
            whether they were right.
    """

    prompt_tokens: int
    completion_tokens: int
    reasoning_tokens: int = 0
    cached_tokens: int = 0
    reuse: str | None = None
    accepted_drafts: int = 0
    rejected_drafts: int = 0


@dataclass(frozen=True, slots=True)
class Finished:
    """The terminal event of a request that went well.

    Attributes:
        stop: the stop string that ended it, if one did.
        tool_calls: how many complete calls the answer holds.
    """

    reason: FinishReason
    usage: Usage
    stop: str | None = None
    tool_calls: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """The terminal event of a request that did not."""

    error: Failure
    usage: Usage


@dataclass(frozen=True, slots=True)
class PromptRead:
    """How far the reading of the prompt has come, before the first token; part of no answer.

    Attributes:
        done: prompt tokens whose state is there, `cached` of them from the prefix cache.
        seconds: since the request was submitted.
        left_s: how long the rest is likely to take; None is unknown.
    """

    done: int
    total: int
    cached: int
    seconds: float
    left_s: float | None = None


Content = Reasoning | Text | ToolCallStarted | ToolCallArguments | ToolCallEnded
Delta = Content | ToolCallBroken
Event = PromptRead | Content | Finished | Failed
