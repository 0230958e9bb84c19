"""Requests in flight: from the engine's outputs to batches of events, and aborts.

Each choice ends in exactly one terminal event. If a consumer leaves, choices that still run are
aborted.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator, Sequence
from dataclasses import dataclass, replace
from itertools import repeat
from typing import Protocol, TypedDict

from quire.core.request import Failure, FinishReason, Output
from quire.serving.merging import merge
from quire.serving.reading_time import ReadingTime
from quire.serving.tasks import cancel_and_wait
from quire.serving.ticket import Ticket
from quire.text.events import Event, Failed, Finished, PromptRead, Reasoning, Usage
from quire.text.output import OutputStream

log = logging.getLogger("quire.service")

ChoiceEvent = tuple[int, Event]

BATCH_ENTRIES = 512
"""Tokens and log-probabilities (`Output.entries`) after which a batch takes no further output. The
output that waits for a slow reader is thus rendered in short turns of the event loop.
"""


class Observer(Protocol):
    """Interface for metrics: told what happens to one choice. Durations are in seconds."""

    def read(self, done: int, cached: int, reuse: str | None, left_s: float | None) -> None:
        """Record that `done` prompt tokens were read, `cached` of them from the prefix cache.

        Args:
            left_s: expected seconds for the rest; None if unknown.
        """
        ...

    def first_token(self, seconds: float, cached: int, reuse: str | None) -> None:
        """Record that the whole prompt was read, `cached` tokens of it from the prefix cache."""
        ...

    def tokens(self, seconds: float, count: int) -> None: ...

    def ended(self, event: Finished | Failed) -> None: ...

    def gone(self) -> None:
        """Record that nobody reads the choice any more, whether it ended or not."""
        ...


class RunSummary(TypedDict, total=False):
    """Fields of a finished request's log line: token counts, times and finish reasons.

    Attributes:
        reuse: why the prefix cache held `cached_tokens` of the prompt, and not more.
        finish: the finish reason or error of each choice, with commas between.
        queue_ms: milliseconds until the prompt was scheduled.
        ttft_ms: milliseconds until the first token.
    """

    prompt_tokens: int
    cached_tokens: int
    reuse: str | None
    completion_tokens: int
    finish: str
    queue_ms: float | None
    ttft_ms: float | None


class Unobserved:
    """An observer that records nothing."""

    def read(self, done: int, cached: int, reuse: str | None, left_s: float | None) -> None: ...

    def first_token(self, seconds: float, cached: int, reuse: str | None) -> None: ...

    def tokens(self, seconds: float, count: int) -> None: ...

    def ended(self, event: Finished | Failed) -> None: ...

    def gone(self) -> None: ...


@dataclass(frozen=True, slots=True)
class Times:
    """Times of an answer's stages, by `time.perf_counter`; None if not reached.

    Attributes:
        submitted: when the request was sent to the engine.
        scheduled: when the engine started to read the prompt.
    """

    submitted: float
    scheduled: float | None
    first_token: float | None
    ended: float | None


class ChoiceStream:
    """One answer in progress: a ticket, and the parser that turns its outputs into events.

    Args:
        index: its number among the choices of its run.
        show_reasoning: whether the reasoning is among the events.
        show_progress: whether events report the progress of reading the prompt.
    """

    def __init__(
        self,
        ticket: Ticket,
        output: OutputStream,
        observer: Observer,
        *,
        index: int = 0,
        show_reasoning: bool = True,
        show_progress: bool = False,
    ) -> None:
        self._ticket = ticket
        self._output = output
        self._observer = observer
        self.index = index
        self._show_reasoning = show_reasoning
        self._show_progress = show_progress
        self._reading = ReadingTime()
        self._latest: Output | None = None
        """The engine's last output."""
        self._accepted, self._placed = asyncio.Event(), asyncio.Event()
        self._submitted = self._last_token_at = time.perf_counter()
        self._first_token: float | None = None
        self._ended: float | None = None
        self._end: Finished | Failed | None = None

    @property
    def end(self) -> Finished | Failed | None:
        """The terminal event, once it was yielded."""
        return self._end

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        return self._output.usage if self._end is None else self._end.usage

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens from the prefix cache; 0 before reading started."""
        return 0 if self._latest is None else self._latest.cached_tokens

    @property
    def reuse(self) -> str | None:
        """Why no more of the prompt was reused; None before reading started."""
        return None if self._latest is None else self._latest.reuse

    @property
    def times(self) -> Times:
        """Times of the stages reached so far."""
        queued_s = None if self._latest is None else self._latest.queued_s
        scheduled = None if queued_s is None else self._submitted + queued_s
        return Times(self._submitted, scheduled, self._first_token, ended=self._ended)

    async def accepted(self) -> None:
        """Wait until the engine has accepted the request, or has sent any other output for it."""
        await self._accepted.wait()

    async def placed(self) -> None:
        """Wait until it is known how much of the prompt was in the prefix cache."""
        await self._placed.wait()

    def take_ids(self) -> list[int]:
        """Return the token ids since the last call, if the request asks for them."""
        return self._output.take_ids()

    def abort(self) -> None:
        """End the request by the engine's next step."""
        self._ticket.abort()

    async def batches(
        self, entries: int = BATCH_ENTRIES
    ) -> AsyncGenerator[list[ChoiceEvent], None]:
        """Yield the events that are ready at each wake-up. The last batch ends with the terminal
        event.

        The first batch comes with the first token, and is empty if that token gives no event yet.
        Events that wait for a slow reader are merged, in batches between which the event loop runs.

        Args:
            entries: the number of `Output.entries` after which a batch takes no further output.
        """
        ticket = self._ticket
        try:
            while True:
                outputs = ticket.take(entries)
                if not outputs:
                    if (arrival := ticket.arrival()) is None:
                        break
                    await arrival
                    continue
                started = self._first_token is not None
                events = self._feed(outputs[0])
                for output in outputs[1:]:
                    if self._end is None:
                        events += self._feed(output)
                if len(events) > 1:
                    events = merge(events)
                if events or (not started and self._first_token is not None):
                    yield list(zip(repeat(self.index), events))
                if self._end is not None:
                    return
                if ticket.waiting:
                    await asyncio.sleep(0)
            failed = self._fail("The engine ended the request without saying why.")
            yield [(self.index, failed)]
        finally:
            self._ticket.abort()
            self._observer.gone()

    def _feed(self, output: Output) -> list[Event]:
        if output.read == 0:
            self._accepted.set()
            return []
        self._observe(output)
        if output.read is not None:
            return [self._progress(output, output.read)] if self._show_progress else []
        try:
            events = self._output.feed(output)
        except Exception:  # a parser's fault ends this request with an error, not its neighbours
            log.exception("request %s: its output could not be read", output.request_id)
            return [self._fail("The model's output could not be read.")]
        if self._output.stopped:
            self._ticket.abort(FinishReason.STOP)
        if not self._show_reasoning:
            events = [event for event in events if not isinstance(event, Reasoning)]
        if events and isinstance(end := events[-1], Finished | Failed):
            self._finish(end)
        return events

    def _progress(self, output: Output, read: int) -> PromptRead:
        seconds = time.perf_counter() - self._submitted
        left_s = self._reading.left_s(output.prompt_tokens)
        return PromptRead(
            read, output.prompt_tokens, output.cached_tokens, seconds=seconds, left_s=left_s
        )

    def _observe(self, output: Output) -> None:
        if self._latest is None:
            self._accepted.set()
            self._placed.set()
        self._latest = output
        if output.read is not None:
            self._reading.observe(output.read, time.perf_counter())
            left_s = self._reading.left_s(output.prompt_tokens)
            self._observer.read(output.read, output.cached_tokens, output.reuse, left_s=left_s)
        if not output.token_ids:
            return
        now = time.perf_counter()
        if self._first_token is not None:
            self._observer.tokens(now - self._last_token_at, len(output.token_ids))
        else:
            self._first_token = now
            seconds = now - self._submitted
            self._observer.first_token(seconds, output.cached_tokens, output.reuse)
        self._last_token_at = now

    def _fail(self, message: str) -> Failed:
        self._ticket.abort(FinishReason.ERROR)
        event = Failed(Failure(message, code="internal_error"), self._output.usage)
        self._finish(event)
        return event

    def _finish(self, event: Finished | Failed) -> None:
        self._end, self._ended = event, time.perf_counter()
        self._observer.ended(event)


class GenerationStream:
    """An accepted generation: one or several choices, numbered prompt by prompt.

    Attributes:
        prompt_tokens: tokens of all prompts, each prompt counted once.
        unenforced: parts of the client's schemas that no grammar enforces; see `AnswerGrammar`.
    """

    def __init__(
        self,
        prompts: Sequence[tuple[int, ...]],
        choices: Sequence[ChoiceStream],
        unenforced: Sequence[str] = (),
    ) -> None:
        self.prompts = prompts
        self.unenforced = unenforced
        self.prompt_tokens = sum(map(len, prompts))
        self.choices = choices

    async def accepted(self) -> None:
        """Wait until the engine has accepted, or refused, every choice."""
        for choice in self.choices:
            await choice.accepted()

    async def placed(self) -> None:
        """Wait until it is known how much of the prompts was in the prefix cache."""
        for choice in self.choices:
            await choice.placed()

    def abort(self) -> None:
        """End all choices by the engine's next step."""
        for choice in self.choices:
            choice.abort()

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens read from the prefix cache; known from the first batch on."""
        cached, copies = 0, len(self.choices) // len(self.prompts)
        for choice in self.choices[::copies]:
            cached += choice.cached_tokens
        return cached

    @property
    def reuse(self) -> str | None:
        """Why no more of the first prompt was reused; None before reading started."""
        return self.choices[0].reuse

    @property
    def usage(self) -> Usage:
        """Token counts of all choices so far."""
        completion = reasoning = accepted = rejected = 0
        for choice in self.choices:
            usage = choice.usage
            completion += usage.completion_tokens
            reasoning += usage.reasoning_tokens
            accepted += usage.accepted_drafts
            rejected += usage.rejected_drafts
        return Usage(
            prompt_tokens=self.prompt_tokens,
            completion_tokens=completion,
            reasoning_tokens=reasoning,
            cached_tokens=self.cached_tokens,
            reuse=self.reuse,
            accepted_drafts=accepted,
            rejected_drafts=rejected,
        )

    @property
    def times(self) -> Times:
        """Times of the first choice; its end is that of the last choice."""
        if len(self.choices) == 1:
            return self.choices[0].times
        ends = [choice.times.ended for choice in self.choices]
        known = [end for end in ends if end is not None]
        ended = max(known) if len(known) == len(ends) else None
        return replace(self.choices[0].times, ended=ended)

    @property
    def failed(self) -> bool:
        """Whether a choice has failed."""
        return any(isinstance(choice.end, Failed) for choice in self.choices)

    def summary(self) -> RunSummary:
        """Return the fields of a finished request's log line."""
        usage, times = self.usage, self.times
        return {
            "prompt_tokens": usage.prompt_tokens,
            "cached_tokens": usage.cached_tokens,
            "reuse": usage.reuse,
            "completion_tokens": usage.completion_tokens,
            "finish": ",".join(_outcome(choice.end) for choice in self.choices),
            "queue_ms": _milliseconds(times.submitted, times.scheduled),
            "ttft_ms": _milliseconds(times.submitted, times.first_token),
        }

    def batches(self) -> AsyncGenerator[list[ChoiceEvent], None]:
        """Yield batches of events with the number of their choice, until every choice has ended.

        A choice that fails ends the stream: its failure is the last event, and the others are
        aborted.
        """
        return self.choices[0].batches() if len(self.choices) == 1 else self._joined()

    async def _joined(self) -> AsyncGenerator[list[ChoiceEvent], None]:
        # As many batches as there are choices wait at most, and all of them go as one: together
        # they are no larger than the batch of a single choice may be.
        count = len(self.choices)
        ready: asyncio.Queue[list[ChoiceEvent] | None] = asyncio.Queue(count)
        entries = max(1, BATCH_ENTRIES // count)
        pumps = [asyncio.create_task(_pump(choice, entries, ready)) for choice in self.choices]
        try:
            running = len(pumps)
            while running:
                batch: list[ChoiceEvent] = []
                item = await ready.get()
                while True:
                    if item is None:
                        running -= 1
                    else:
                        batch += item
                    if ready.empty():
                        break
                    item = ready.get_nowait()
                batch = _up_to_failure(batch)
                if batch:
                    yield batch
                    if isinstance(batch[-1][1], Failed):
                        return
        finally:
            self.abort()
            await cancel_and_wait(*pumps)


def _up_to_failure(batch: list[ChoiceEvent]) -> list[ChoiceEvent]:
    """Return a batch up to its first failure."""
    for number, (_, event) in enumerate(batch, start=1):
        if isinstance(event, Failed):
            return batch[:number]
    return batch


def _milliseconds(since: float, moment: float | None) -> float | None:
    return None if moment is None else round((moment - since) * 1000, 1)


def _outcome(end: Finished | Failed | None) -> str:
    """Return how a choice ended, in one word. A choice that nobody waited for was aborted."""
    match end:
        case Finished():
            return str(end.reason)
        case Failed():
            return end.error.code or "error"
        case None:
            return "abort"


async def _pump(
    choice: ChoiceStream, entries: int, ready: asyncio.Queue[list[ChoiceEvent] | None]
) -> None:
    """Move one choice's batches to the queue that all choices share; None marks its end."""
    try:
        async for events in choice.batches(entries):
            await ready.put(events)
    except Exception:  # the others go on; a cancelled pump has nobody left to tell
        log.exception("choice %d: its stream failed", choice.index)
    await ready.put(None)
