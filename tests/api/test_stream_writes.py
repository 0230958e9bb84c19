"""A streamed token costs the HTTP side one wake-up, one batch of events and one write."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterable

import pytest

from quire.api.shared import sse
from quire.serving.ticket import Ticket
from tests.api.conftest import HTTP, Serve
from tests.api.test_foreign_fields import BODIES
from tests.support.scripted_engine import Script

TOKENS = 12


@pytest.mark.parametrize("path", BODIES)
def test_a_token_is_one_waking_and_one_write(
    serve: Serve, path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[bytes] = []
    writes = sse.writes

    async def counted(pieces: Iterable[bytes]) -> AsyncIterator[bytes]:
        async for body in writes(pieces):
            written.append(body)
            yield body

    woken: list[Ticket] = []
    sleep = Ticket._woken

    async def noted(ticket: Ticket) -> None:
        await sleep(ticket)
        woken.append(ticket)

    monkeypatch.setattr(sse, "writes", counted)
    monkeypatch.setattr(Ticket, "_woken", noted)
    served = serve()
    tokens = served.ids("fox ")[:1] * TOKENS
    served.engine.script = lambda _: Script(tokens, delay_s=0.01)
    body = {**BODIES[path], "stream": True, "max_tokens": TOKENS}
    if path == "responses":
        body["max_output_tokens"] = body.pop("max_tokens")
    with HTTP.stream("POST", f"{served.url}/v1/{path}", json=body) as answer:
        assert answer.status_code == 200
        assert answer.read()
    served.settle()
    assert 2 <= len([body for body in written if body]) <= TOKENS + 2  # a head and an end
    assert 2 <= len(woken) <= TOKENS + 2  # accepted, and the end
