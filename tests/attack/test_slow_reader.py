"""A stream whose reader is slow: what waits is rendered in pieces, between which others run."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from quire.core.request import SamplingParams
from quire.serving.generation import Generation
from quire.serving.service import Service
from quire.serving.streams import BATCH_ENTRIES
from quire.text.events import Event, Finished, Text
from tests.serving.conftest import engine, service, tokenizer
from tests.support.scripted_engine import Script, ScriptedEngine

__all__ = ["engine", "service", "tokenizer"]

TOP, TOKENS = 20, 200
OF_TOKEN = 2 + TOP  # the token, its log-probability and those of the likeliest


def entries(events: list[Event]) -> int:
    """Return the number of log-probabilities that some events hold."""
    texts = [event for event in events if isinstance(event, Text)]
    return sum(1 + len(each.top) for text in texts for each in text.logprobs)


class Turns:
    """Counts the turns of the event loop."""

    def __init__(self) -> None:
        self.count = 0
        self._loop = asyncio.get_running_loop()
        self._handle = self._loop.call_soon(self._turn)

    def _turn(self) -> None:
        self.count += 1
        self._handle = self._loop.call_soon(self._turn)

    def stop(self) -> None:
        self._handle.cancel()


@pytest.mark.parametrize("choices", [1, 4])
async def test_what_waits_is_rendered_in_pieces(
    service: Service, engine: ScriptedEngine, choices: int
) -> None:
    words = service.tokenizer.encode("word " * TOKENS)[:TOKENS]
    engine.reset(lambda _: Script(tuple(words)))
    spec: dict[str, Any] = {"sampling": SamplingParams(logprobs=TOP), "max_tokens": TOKENS}
    prepared = await service.prepare(Generation(prompts=("x",), n=choices, **spec))
    run = await service.start(prepared)
    stream = run.batches()
    said = [event for _, event in await anext(stream)]
    while not all(ticket.ended for ticket in engine.tickets):
        await asyncio.sleep(0)
    turns, seen = Turns(), []
    async for batch in stream:
        seen.append((turns.count, [event for _, event in batch]))
    turns.stop()
    most = max(entries(events) for _, events in seen)
    assert most <= BATCH_ENTRIES + choices * OF_TOKEN
    at = [turn for turn, _ in seen]
    assert len(set(at)) == len(at), "two batches within one turn"
    said += [event for _, events in seen for event in events]
    assert entries(said) == choices * len(words) * (OF_TOKEN - 1)
    assert sum(isinstance(event, Finished) for event in said) == choices
