"""A request in flight."""

from __future__ import annotations

import asyncio

from quire.core.request import Failure, FinishReason, Output
from quire.serving.ticket import Ticket

ROOM = 1 << 20


def ticket(aborted: list[tuple[str, FinishReason]] | None = None) -> Ticket:
    seen = [] if aborted is None else aborted
    return Ticket("a", lambda name, reason: seen.append((name, reason)))


async def test_tokens_that_wait_are_one_output() -> None:
    made = ticket()
    made.put(Output("a", (1,), prompt_tokens=4, cached_tokens=2, reuse="new"))
    made.put_tokens((2, 3), 1, 2)
    (output,) = made.take(ROOM)
    assert output.token_ids == (1, 2, 3)
    assert (output.accepted_drafts, output.rejected_drafts) == (1, 2)
    made.put_tokens((4,), 0, 0)
    (output,) = made.take(ROOM)
    assert (output.token_ids, output.prompt_tokens, output.cached_tokens) == ((4,), 4, 2)
    assert made.take(ROOM) == []


async def test_a_long_wait_is_more_than_one_output() -> None:
    made = ticket()
    made.put(Output("a", (0,)))
    for token in range(1, 1000):
        made.put_tokens((token,), 0, 0)
    waiting = made.take(ROOM)
    assert 1 < len(waiting) < 10
    assert [token for output in waiting for token in output.token_ids] == list(range(1000))


async def test_a_failure_keeps_the_prompt_counts() -> None:
    made, failure = ticket(), Failure("the engine is gone")
    made.put(Output("a", (1,), prompt_tokens=4, cached_tokens=2, reuse="new", queued_s=0.5))
    made.fail(failure)
    assert made.ended
    last = made.take(ROOM)[-1]
    assert last == Output(
        "a", (), (), FinishReason.ERROR, failure, 4, cached_tokens=2, reuse="new", queued_s=0.5
    )
    early = ticket()
    early.fail(failure)
    assert early.take(ROOM) == [Output("a", finish=FinishReason.ERROR, error=failure)]


async def test_whoever_waits_is_woken() -> None:
    made = ticket()
    reading = asyncio.create_task(anext(aiter(made)))
    await asyncio.sleep(0)
    made.put(Output("a", (1,)))
    assert (await reading).token_ids == (1,)


async def test_the_end_ends_the_iteration_and_the_aborts() -> None:
    aborted: list[tuple[str, FinishReason]] = []
    made = ticket(aborted)
    made.abort(FinishReason.STOP)
    made.put(Output("a", (1,)))
    made.put(Output("a", (), finish=FinishReason.STOP))
    assert len([output async for output in made]) == 2
    assert [output async for output in made] == []
    made.abort()
    assert aborted == [("a", FinishReason.STOP)]
