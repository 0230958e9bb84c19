"""Turns the engine's outputs for a request into the events that every protocol renders."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import takewhile

from quire.core.request import Failure, FinishReason, Output, TokenLogprobs
from quire.text.detokenizer import Detokenizer
from quire.text.dialects.base import Parser
from quire.text.events import (
    Delta,
    Event,
    Failed,
    Finished,
    Reasoning,
    Text,
    ToolCallArguments,
    ToolCallBroken,
    ToolCallEnded,
    ToolCallStarted,
    Usage,
)
from quire.text.stops import StopMatcher

_HELD = 32
"""The most tokens whose log-probabilities wait for text. More are sent with an empty text."""


class OutputStream:
    """Turns the outputs of one request into events, of which the last is `Finished` or `Failed`.

    Stop strings match only in the answer's text, not in reasoning or tool calls. The answer ends
    early at a stop string, after the only call allowed, or at a broken call. `stopped` is then set,
    the caller aborts the engine's request, and further outputs are ignored.

    Args:
        detokenizer: made for this request.
        parser: the dialect's, made for this request.
        stops: the stop matcher, made for this request.
        one_call: whether the answer ends with its first tool call.
        stop_tokens: end tokens whose text is part of the answer.
        keep_ids: whether to keep the tokens for `take_ids`.
        silent: whether only the prompt is read; generated tokens are ignored.
    """

    __slots__ = (
        "_calls",
        "_completion",
        "_detokenizer",
        "_ended",
        "_header",
        "_ids",
        "_keep_ids",
        "_last",
        "_logprobs",
        "_one_call",
        "_owned",
        "_parser",
        "_reasoned",
        "_reasoning",
        "_silent",
        "_stop",
        "_stop_tokens",
        "_stopped",
        "_stops",
    )

    def __init__(
        self,
        detokenizer: Detokenizer,
        parser: Parser,
        stops: StopMatcher,
        *,
        one_call: bool = False,
        stop_tokens: frozenset[int] = frozenset(),
        keep_ids: bool = False,
        silent: bool = False,
    ) -> None:
        self._silent = silent
        self._detokenizer = detokenizer
        self._parser = parser
        self._owned = parser.owned
        self._stops = stops
        self._one_call = one_call
        self._stop_tokens = stop_tokens
        self._keep_ids = keep_ids
        self._ids: list[int] = []
        self._last = Output("")
        self._logprobs: list[TokenLogprobs] = []  # of tokens outside of reasoning
        self._reasoned: list[TokenLogprobs] = []  # of the tokens of reasoning
        self._header: list[TokenLogprobs] = []  # of a header, which belongs to what follows it
        self._completion = 0
        self._reasoning = 0
        self._calls = 0
        self._ended = self._stopped = False
        self._stop: str | None = None

    @property
    def stopped(self) -> bool:
        """Whether the answer ended early, so that the engine's request can be aborted."""
        return self._stopped

    @property
    def usage(self) -> Usage:
        """Token counts so far. Tokens after the end of the answer are not counted."""
        return Usage(
            prompt_tokens=self._last.prompt_tokens,
            completion_tokens=self._completion,
            reasoning_tokens=self._reasoning,
            cached_tokens=self._last.cached_tokens,
            reuse=self._last.reuse,
            accepted_drafts=self._last.accepted_drafts,
            rejected_drafts=self._last.rejected_drafts,
        )

    def take_ids(self) -> list[int]:
        """Return the tokens since the last call, if `keep_ids`."""
        taken, self._ids = self._ids, []
        return taken

    def feed(self, output: Output) -> list[Event]:
        """Return the events that an output of the engine completes; none after the end."""
        if self._ended:
            return []
        self._last = output
        events: list[Event] = []
        tokens = () if self._silent else output.token_ids
        last = len(tokens) - 1
        end = 0 if output.logprobs else last + (output.finish is None)
        index = again = 0
        pause = 1
        while index <= last:
            if index >= again and end > index:
                taken = self._take_plain(tokens[index:end], events)
                # Looking ahead in vain takes time: the next pause is twice as long.
                pause = 1 if taken else 2 * pause
                index += taken
                again = index + pause
                continue
            logprobs = output.logprobs[index] if output.logprobs else None
            stop_token = index == last and output.finish is FinishReason.STOP
            self._token(tokens[index], logprobs, events, stop_token=stop_token)
            if self._ended:
                return events
            index += 1
        if output.error is not None or output.finish is FinishReason.ERROR:
            events.append(self._fail(output.error))
        elif output.finish is not None:
            ended_itself = self._silent and output.finish is FinishReason.STOP
            self._finish(FinishReason.LENGTH if ended_itself else output.finish, events)
        return events

    def _take_plain(self, tokens: Sequence[int], events: list[Event]) -> int:
        """Take the first tokens as one piece of text, if nothing depends on their borders.

        Returns:
            The number of tokens taken.
        """
        if self._logprobs or self._reasoned:
            return 0
        if not self._owned.isdisjoint(tokens):
            tokens = [*takewhile(lambda token: token not in self._owned, tokens)]
        pieces = self._detokenizer.pieces_of(tokens)
        while pieces and (not pieces[-1] or pieces[-1][-1].isspace()):
            pieces.pop()
        text, count = "".join(pieces), len(pieces)
        delta = self._parser.flowing(text) if text else None
        if delta is None or not self._stops.passes(text if type(delta) is Text else ""):
            return 0
        events.append(delta)
        self._completion += count
        self._reasoning += count if type(delta) is Reasoning else 0
        if self._keep_ids:
            self._ids += tokens[:count]
        return count

    def _token(
        self,
        token_id: int,
        logprobs: TokenLogprobs | None,
        events: list[Event],
        *,
        stop_token: bool,
    ) -> None:
        self._completion += 1
        if self._keep_ids:
            self._ids.append(token_id)
        parser = self._parser
        thinking = parser.thinking
        if token_id in self._owned:
            piece = self._detokenizer.flush()
        elif stop_token and token_id not in self._stop_tokens:
            if logprobs is not None:
                self._keep(logprobs, within=bool(thinking))
            return
        else:
            piece = self._detokenizer.add(token_id)
        deltas = parser.feed(token_id, piece)
        within = thinking or parser.thinking
        self._reasoning += bool(within)
        if logprobs is not None:
            self._keep(logprobs, within=within)
        if deltas:
            self._pass_on(deltas, events)
        if not self._ended:
            self._flush_logprobs(events, held=_HELD)

    def _keep(self, entry: TokenLogprobs, *, within: bool | None) -> None:
        """Keep a token's log-probabilities for the event that they belong to.

        Args:
            within: whether the token belongs to reasoning; None within a header, until that is
                known.
        """
        self._header.append(entry)
        if within is not None:
            (self._reasoned if within else self._logprobs).extend(self._header)
            self._header.clear()

    def _flush_logprobs(self, events: list[Event], *, held: int = 1) -> None:
        """Send log-probabilities of tokens without text, if at least `held` of a kind wait."""
        if len(self._reasoned) >= held:
            events.append(Reasoning("", _taken(self._reasoned)))
        if len(self._logprobs) >= held:
            events.append(Text("", _taken(self._logprobs)))

    def _pass_on(self, deltas: list[Delta], events: list[Event]) -> None:
        for delta in deltas:
            if type(delta) is Text:
                self._text(delta, events)
                if self._ended:
                    return
                continue
            self._release(events)
            if isinstance(delta, ToolCallBroken):
                self._stop_here(events, FinishReason.MALFORMED_CALL)
                return
            if type(delta) is Reasoning and self._reasoned:
                delta = Reasoning(delta.text, _taken(self._reasoned))
            events.append(delta)
            if type(delta) is ToolCallEnded:
                self._calls += 1
                if self._one_call:
                    self._stop_here(events)
                    return

    def _text(self, delta: Text, events: list[Event]) -> None:
        if self._reasoned:
            events.append(Reasoning("", _taken(self._reasoned)))
        safe, self._stop = self._stops.feed(delta.text)
        if safe is delta.text and not self._logprobs:
            events.append(delta)
        elif safe:
            events.append(Text(safe, _taken(self._logprobs)))
        if self._stop is not None:
            self._stop_here(events)

    def _release(self, events: list[Event]) -> None:
        """Emit the text that was held for a stop string, because other output follows."""
        held = self._stops.flush()
        if held:
            events.append(Text(held, _taken(self._logprobs)))

    def _finish(self, reason: FinishReason, events: list[Event]) -> None:
        held = self._detokenizer.flush()
        if held:
            self._pass_on(self._parser.feed(-1, held), events)
        if not self._ended:
            self._pass_on(self._parser.finish(reason), events)
        if not self._ended:
            self._release(events)
            self._end(reason, events)

    def _stop_here(self, events: list[Event], reason: FinishReason = FinishReason.STOP) -> None:
        self._stopped = True
        self._end(reason, events)

    def _end(self, reason: FinishReason, events: list[Event]) -> None:
        self._ended = True
        self._logprobs += _taken(self._header)
        if self._stop is None:
            self._flush_logprobs(events)
        events.append(Finished(reason, self.usage, self._stop, tool_calls=self._calls))

    def _fail(self, error: Failure | None) -> Failed:
        self._ended = True
        return Failed(error or Failure("the engine ended the request without a reason"), self.usage)


def _taken(entries: list[TokenLogprobs]) -> tuple[TokenLogprobs, ...]:
    """Empty a list and return its former entries."""
    taken = tuple(entries)
    entries.clear()
    return taken


@dataclass(slots=True)
class ToolCall:
    """A call of a folded answer. `arguments` is the text of one JSON object, or a prefix of it."""

    id: str
    name: str
    arguments: str = ""


@dataclass(slots=True)
class Answer:
    """A whole answer, folded from its events.

    Attributes:
        tool_calls: the complete calls.
        unfinished: the call in which the answer was truncated, if any.
        finish: the last event; None if the events ended without one.
    """

    text: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCall] = field(default_factory=list)
    unfinished: ToolCall | None = None
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    reasoning_logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish: Finished | Failed | None = None


class Fold:
    """Folds events into an `Answer`."""

    def __init__(self) -> None:
        self._text: list[str] = []
        self._reasoning: list[str] = []
        self._open: dict[int, tuple[ToolCall, list[str]]] = {}
        self._answer = Answer()

    def add(self, event: Event) -> None:
        """Add the next event."""
        match event:
            case Text(text, logprobs):
                self._text.append(text)
                self._answer.logprobs.extend(logprobs)
            case Reasoning(text, logprobs):
                self._reasoning.append(text)
                self._answer.reasoning_logprobs.extend(logprobs)
            case ToolCallStarted(index, id, name):
                self._open[index] = ToolCall(id, name), []
            case ToolCallArguments(index, piece):
                self._open[index][1].append(piece)
            case ToolCallEnded(index):
                call, arguments = self._open.pop(index)
                call.arguments = "".join(arguments)
                self._answer.tool_calls.append(call)
            case Finished() | Failed():
                self._answer.finish = event

    def answer(self) -> Answer:
        """Return the answer made of the events so far."""
        self._answer.text = "".join(self._text)
        self._answer.reasoning = "".join(self._reasoning)
        self._answer.unfinished = None
        for call, arguments in self._open.values():
            self._answer.unfinished = ToolCall(call.id, call.name, "".join(arguments))
        return self._answer
