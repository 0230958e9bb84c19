"""A request in flight, as the event loop sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Callable
from dataclasses import replace

from quire.core.messages import NextTokens
from quire.core.request import Failure, FinishReason, Output

_MERGED = 256
"""Tokens that one waiting output takes in; joining them costs time by their square."""


class Ticket:
    """A request in flight: iterate its outputs, or abort it. The last output has `finish` set.

    Args:
        abort: asks the engine to end the request by the next step, for a reason.
    """

    def __init__(self, request_id: str, abort: Callable[[str, FinishReason], None]) -> None:
        self._id = request_id
        self._abort = abort
        self._ready: deque[Output] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._last: Output | None = None
        self._ended = False

    def put(self, output: Output) -> None:
        """Takes in an output of the engine."""
        self._last = output
        self._ready.append(output)
        self._ended = output.finish is not None
        self._notify()

    def put_tokens(self, further: NextTokens) -> None:
        """Takes in an output that is just more tokens."""
        assert self._last is not None, "the first output of a request comes whole"
        drafts = further.accepted_drafts, further.rejected_drafts
        if drafts != (self._last.accepted_drafts, self._last.rejected_drafts):
            accepted, rejected = drafts
            self._last = replace(self._last, accepted_drafts=accepted, rejected_drafts=rejected)
        waiting = self._ready[-1] if self._ready else None
        if waiting is not None and not waiting.logprobs and len(waiting.token_ids) < _MERGED:
            self._ready[-1] = replace(
                waiting,
                token_ids=waiting.token_ids + further.token_ids,
                accepted_drafts=further.accepted_drafts,
                rejected_drafts=further.rejected_drafts,
            )
        else:
            self._ready.append(self._further(further.token_ids))
        self._notify()

    def fail(self, failure: Failure) -> None:
        """Ends it where the engine does not: nothing more comes from there."""
        self.put(self._further(finish=FinishReason.ERROR, error=failure))

    def _further(
        self,
        tokens: tuple[int, ...] = (),
        finish: FinishReason | None = None,
        error: Failure | None = None,
    ) -> Output:
        """Return an output that says of the prompt what the one before said."""
        last = self._last or Output(self._id)
        return Output(
            self._id,
            tokens,
            finish=finish,
            error=error,
            prompt_tokens=last.prompt_tokens,
            cached_tokens=last.cached_tokens,
            reuse=last.reuse,
            queued_s=last.queued_s,
            accepted_drafts=last.accepted_drafts,
            rejected_drafts=last.rejected_drafts,
        )

    def take(self, room: int) -> list[Output]:
        """Outputs that have arrived and were not iterated yet, without waiting; empty if none.

        A stream that was woken for one output, or that a slow reader held up, renders what is
        ready into one write. Consecutive waiting outputs may be merged into one.

        Args:
            room: no further output is taken once the sum of their `Output.entries` reaches this.
        """
        outputs: list[Output] = []
        while self._ready and room > 0:
            outputs.append(self._ready.popleft())
            room -= outputs[-1].entries
        return outputs

    @property
    def waiting(self) -> bool:
        """Whether an output has arrived that was not taken or iterated yet."""
        return bool(self._ready)

    @property
    def ended(self) -> bool:
        """Whether the engine has ended the request. Outputs may still wait to be taken."""
        return self._ended

    async def __aiter__(self) -> AsyncIterator[Output]:
        while True:
            while not self._ready:
                if self._ended:
                    return
                self._wake = asyncio.get_running_loop().create_future()
                await self._wake
            output = self._ready.popleft()
            yield output
            if output.finish is not None:
                return

    def abort(self, reason: FinishReason = FinishReason.ABORT) -> None:
        """Ends the request by the next step. Harmless after the end; of two calls the first counts.

        Args:
            reason: what the engine counts the end as.
        """
        if not self._ended:
            self._abort(self._id, reason)

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
