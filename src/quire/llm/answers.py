"""Results of the Python API."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

from quire.core.errors import QuireError
from quire.core.request import TokenLogprobs
from quire.text.events import Finished, Usage
from quire.text.output import Answer as FoldedAnswer
from quire.text.output import ToolCall

FinishReason = Literal["stop", "length", "loop", "malformed_call", "abort", "error"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """An answer to a prompt or a conversation.

    Attributes:
        text: the answer's text, without reasoning and calls.
        reasoning: the reasoning's text; "" if the model did not reason.
        tool_calls: the complete calls; `arguments` is the text of a JSON object.
        finish_reason: why the answer ended; "error" if the request failed.
        stop: the stop string that ended it, if one did.
        token_ids: all tokens of the answer, its end token included.
        logprobs: an entry for each token outside of reasoning, if asked for.
        usage: tokens of the prompt and the answer.
        parsed: an instance of the pydantic class given as `schema`; None if the answer was
            truncated.
        others: the further choices, if `n` is more than 1.
        error: why the request failed; only with `on_error="keep"`.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    finish_reason: FinishReason = "error"
    stop: str | None = None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprobs, ...] = ()
    usage: Usage = Usage(0, 0)  # noqa: RUF009 - frozen
    parsed: Any = None
    others: tuple[Answer, ...] = ()
    error: QuireError | None = None

    def __str__(self) -> str:
        return self.text


@dataclass(frozen=True, slots=True)
class Embedding:
    """The vector of one input.

    Attributes:
        values: the numbers; `numpy.array(embedding.values)` makes an array of them.
        prompt_tokens: number of tokens of the input.
    """

    values: tuple[float, ...]
    prompt_tokens: int


@dataclass(frozen=True, slots=True)
class Score:
    """How well a document answers a query.

    Attributes:
        index: the document's index in the arguments.
        score: from 0 to 1 for models that judge, from -1 to 1 for models that embed.
    """

    index: int
    score: float


def made_of(folded: FoldedAnswer, token_ids: list[int], parsed: Any) -> Answer:
    """Return the `Answer` of a folded answer."""
    end = folded.finish
    assert isinstance(end, Finished), "failures are raised"
    return Answer(
        text=folded.text,
        reasoning=folded.reasoning,
        tool_calls=tuple(folded.tool_calls),
        finish_reason=end.reason.value,
        stop=end.stop,
        token_ids=tuple(token_ids),
        logprobs=tuple(folded.logprobs),
        usage=end.usage,
        parsed=parsed,
    )
