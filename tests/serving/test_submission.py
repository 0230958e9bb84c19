"""Prepared generations become requests in the engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from quire.core.errors import EngineFailure, RequestError
from quire.core.request import FinishReason, Output, SamplingParams
from quire.serving.generation import Generation
from quire.serving.service import Service
from quire.serving.streams import GenerationStream, Unobserved
from quire.text.events import Event, Failed, Finished
from quire.text.output import OutputStream
from tests.serving.conftest import CONTEXT
from tests.support.folding import fold
from tests.support.scripted_engine import Script, ScriptedEngine

ASK: Any = {"role": "user", "content": "Hi."}


async def start(service: Service, **fields: Any) -> GenerationStream:
    fields = {"prompts": ("x",), **fields}
    return await service.start(await service.prepare(Generation(**fields)))


async def test_a_lone_choice_is_queued_in_one_turn(
    service: Service, engine: ScriptedEngine
) -> None:
    """So the requests of a burst reach the engine one after the other, not all at the end."""
    prepared = await service.prepare(Generation(prompts=("x",)))
    queuing = service.submit(await service.constrain(prepared))
    with pytest.raises(StopIteration):
        queuing.send(None)
    assert len(engine.requests) == 1


async def events_of(run: GenerationStream) -> list[tuple[int, Event]]:
    return [event async for batch in run.batches() for event in batch]


async def test_one_request_a_choice_and_prompt(service: Service, engine: ScriptedEngine) -> None:
    run = await start(service, prompts=((5,), (6, 7)), n=2, sampling=SamplingParams(seed=3))
    assert [request.prompt for request in engine.requests] == [(5,), (5,), (6, 7), (6, 7)]
    seeds = [request.sampling.seed for request in engine.requests]
    assert seeds[0] == 3
    assert len(set(seeds)) == 4
    assert len({request.id for request in engine.requests}) == 4
    assert run.prompt_tokens == 3
    found = await events_of(run)
    for index in range(4):
        answer = fold([event for number, event in found if number == index])
        assert answer.text == "Hello."
        assert isinstance(answer.finish, Finished)


@pytest.mark.parametrize(
    ("asked", "prompt", "given"),
    [(None, 1, 50), (7, 1, 7), (1000, 1, CONTEXT - 1), (None, CONTEXT - 10, 10)],
)
async def test_max_tokens(
    service: Service, engine: ScriptedEngine, asked: int | None, prompt: int, given: int
) -> None:
    await start(service, prompts=((5,) * prompt,), max_tokens=asked)
    assert engine.requests[0].max_tokens == given


async def test_what_ends_an_answer(service: Service, engine: ScriptedEngine) -> None:
    eos = service.tokenizer.eos_ids
    await start(service, stop_token_ids=frozenset({9}))
    await start(service, stop_token_ids=frozenset({9}), ignore_eos=True)
    assert [each.stop_token_ids for each in engine.requests] == [eos | {9}, {9}]
    assert engine.requests[0].deadline_s == 9.0


async def test_ends_of_messages_are_worth_a_snapshot(
    service: Service, engine: ScriptedEngine
) -> None:
    await start(service, prompts=(), messages=(ASK, {"role": "assistant", "content": "Ho."}, ASK))
    (request,) = engine.requests
    assert len(request.snapshots) == 3
    assert all(request.prompt[at - 1] in service.tokenizer.eos_ids for at in request.snapshots)


async def test_a_least_length_that_the_answer_cannot_have(
    service: Service, engine: ScriptedEngine
) -> None:
    with pytest.raises(RequestError, match="'min_tokens' is 8, but the answer has at most 7"):
        await start(service, min_tokens=8, max_tokens=7)
    assert engine.requests == []


async def test_a_stop_string_aborts_the_request(service: Service, engine: ScriptedEngine) -> None:
    words = tuple(service.tokenizer.encode("one two three four"))
    engine.reset(lambda _: Script(words, silent=True))
    found = await events_of(await start(service, stops=("two",)))
    assert fold([event for _, event in found]).text == "one "
    assert engine.tickets[0].aborted is FinishReason.STOP


async def test_an_engine_that_is_gone_takes_nothing(
    service: Service, engine: ScriptedEngine
) -> None:
    engine.failure = "it died"
    with pytest.raises(EngineFailure, match="it died"):
        await start(service)


async def test_observers_hear_of_every_choice(service: Service, engine: ScriptedEngine) -> None:
    heard: list[str] = []

    class Counting(Unobserved):
        def __init__(self, caller: str, prompt_tokens: int) -> None:
            self._caller = f"{caller} {prompt_tokens}"

        def first_token(self, seconds: float, cached: int, reuse: str) -> None:
            heard.append(f"{self._caller} first")

        def ended(self, event: Finished | Failed) -> None:
            heard.append(f"{self._caller} ended")

        def gone(self) -> None:
            heard.append(f"{self._caller} gone")

    service.observe(Counting)
    await events_of(await start(service, prompts=((5, 6),), n=2, caller="me"))
    assert sorted(heard) == sorted(["me 2 first", "me 2 ended", "me 2 gone"] * 2)


async def test_a_reader_that_leaves_aborts_its_requests(
    service: Service, engine: ScriptedEngine
) -> None:
    def silent(_: object) -> Script:
        return Script(tuple(service.tokenizer.encode("Hello")), silent=True)

    engine.reset(silent)
    run = await start(service, n=2)
    before = asyncio.all_tasks()
    batches: Sequence[Any] = []
    stream = run.batches()
    batches = await anext(stream)
    assert len(asyncio.all_tasks() - before) == 2
    await stream.aclose()
    assert batches
    assert asyncio.all_tasks() <= before  # scripts that were aborted may have ended
    assert all(ticket.aborted is FinishReason.ABORT for ticket in engine.tickets)


async def test_output_that_cannot_be_read_fails_its_request(
    service: Service, engine: ScriptedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unreadable(stream: OutputStream, output: Output) -> list[Event]:
        raise ValueError("no parser expects this")

    monkeypatch.setattr(OutputStream, "feed", unreadable)
    engine.reset(lambda _: Script((5, 6), silent=True))
    ((_, end),) = await events_of(await start(service))
    assert isinstance(end, Failed)
    assert engine.tickets[0].aborted is FinishReason.ERROR
