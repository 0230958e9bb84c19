"""Events of an answer, which every protocol renders, streamed or folded."""

from __future__ import annotations

from dataclasses import dataclass

from quire.core.request import Failure, FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Reasoning:
    """Reasoning text. `logprobs`, if asked for, holds the reasoning's tokens, including its
    markers.

    Tokens that completed no text come with an empty text.
    """

    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class Text:
    """Answer text. `logprobs`, if asked for, holds the tokens of the text, and of tool calls
    before it.

    Tokens that complete no text, or follow the last text, come with an empty text.
    """

    text: str
    logprobs: tuple[TokenLogprobs, ...] = ()


@dataclass(frozen=True, slots=True)
class ToolCallStarted:
    """The start of a call, once its name is known. `index` counts the answer's calls from 0."""

    index: int
    id: str
    name: str


@dataclass(frozen=True, slots=True)
class ToolCallArguments:
    """A piece of the arguments' JSON, which is final."""

    index: int
    json: str


@dataclass(frozen=True, slots=True)
class ToolCallEnded:
    """The end of a call. The joined pieces of its arguments are exactly one JSON object."""

    index: int


@dataclass(frozen=True, slots=True)
class ToolCallBroken:
    """A started call that cannot be completed. The answer ends here.

    The parts that were sent cannot be taken back, and nothing may follow that would make the call
    look complete. `OutputStream` turns this event into the end of the answer.
    """

    index: int


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one request.

    Attributes:
        accepted_drafts, rejected_drafts: verified drafts that were right, and wrong.
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
    """The last event of a request that succeeded.

    Attributes:
        stop: the stop string that ended the answer, if one did.
        tool_calls: number of complete calls in the answer.
    """

    reason: FinishReason
    usage: Usage
    stop: str | None = None
    tool_calls: int = 0


@dataclass(frozen=True, slots=True)
class Failed:
    """The last event of a request that failed."""

    error: Failure
    usage: Usage


@dataclass(frozen=True, slots=True)
class PromptRead:
    """Progress of reading the prompt, before the first token.

    Attributes:
        done: prompt tokens processed so far, `cached` of them from the prefix cache.
        seconds: time since the request was submitted.
        left_s: estimated seconds for the rest; None if unknown.
    """

    done: int
    total: int
    cached: int
    seconds: float
    left_s: float | None = None


Content = Reasoning | Text | ToolCallStarted | ToolCallArguments | ToolCallEnded
Delta = Content | ToolCallBroken
Event = PromptRead | Content | Finished | Failed
