"""A request in flight, as the event loop sees it."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable
from typing import Self

from quire.core.request import Failure, FinishReason, Output

_MERGED = 256
"""Most tokens that one waiting output takes in: joining them takes quadratic time."""


class Ticket:
    """A request in flight: iterate its outputs, or abort it. The last output has `finish` set.

    Args:
        abort: tells the engine to end the request by the next step, with a reason.
    """

    def __init__(self, request_id: str, abort: Callable[[str, FinishReason], None]) -> None:
        self._id = request_id
        self._abort = abort
        self._ready: deque[Output] = deque()
        self._wake: asyncio.Future[None] | None = None
        self._last: Output | None = None
        self._ended = False

    def put(self, output: Output) -> None:
        """Add an output of the engine."""
        self._last = output
        self._ready.append(output)
        self._ended = output.finish is not None
        self._notify()

    def put_tokens(self, tokens: tuple[int, ...], accepted: int, rejected: int) -> None:
        """Add an output that consists of more tokens only.

        Args:
            accepted: drafted tokens accepted so far.
            rejected: drafted tokens rejected so far.
        """
        assert self._last is not None, "the first output of a request comes whole"
        if (accepted, rejected) != (self._last.accepted_drafts, self._last.rejected_drafts):
            self._last = self._last._replace(accepted_drafts=accepted, rejected_drafts=rejected)
        waiting = self._ready[-1] if self._ready else None
        if waiting is not None and not waiting.logprobs and len(waiting.token_ids) < _MERGED:
            self._ready[-1] = waiting._replace(
                token_ids=waiting.token_ids + tokens,
                accepted_drafts=accepted,
                rejected_drafts=rejected,
            )
        else:
            self._ready.append(self._further(tokens))
        self._notify()

    def fail(self, failure: Failure) -> None:
        """End the request with an error, because the engine will send nothing more."""
        self.put(self._further(finish=FinishReason.ERROR, error=failure))

    def _further(
        self,
        tokens: tuple[int, ...] = (),
        finish: FinishReason | None = None,
        error: Failure | None = None,
    ) -> Output:
        """Return an output with the prompt counts of the previous one."""
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
        """Return the outputs that have arrived and were not read yet, without waiting.

        So what is ready goes into one write. Consecutive waiting outputs may be merged into one.

        Args:
            room: the sum of `Output.entries` after which no further output is taken.
        """
        outputs: list[Output] = []
        while self._ready and room > 0:
            outputs.append(self._ready.popleft())
            room -= outputs[-1].entries
        return outputs

    @property
    def waiting(self) -> bool:
        """Whether an output has arrived that was not read yet."""
        return bool(self._ready)

    @property
    def ended(self) -> bool:
        """Whether the engine has ended the request. Outputs may still wait to be read."""
        return self._ended

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Output:
        while not self._ready:
            if (arrival := self.arrival()) is None:
                raise StopAsyncIteration
            await arrival
        return self._ready.popleft()

    def abort(self, reason: FinishReason = FinishReason.ABORT) -> None:
        """End the request by the next step. No effect after the end; only the first call counts.

        Args:
            reason: the reason that the engine counts.
        """
        if not self._ended:
            self._abort(self._id, reason)

    def arrival(self) -> asyncio.Future[None] | None:
        """Return a future for the next output; None after the last. Only the last future counts.

        It is no coroutine, which each token would resume.
        """
        if self._ended:
            return None
        self._wake = asyncio.get_running_loop().create_future()
        return self._wake

    def _notify(self) -> None:
        if self._wake is not None and not self._wake.done():
            self._wake.set_result(None)
