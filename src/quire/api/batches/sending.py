"""Sends the requests of a batch until each is answered."""

from __future__ import annotations

import asyncio
import itertools
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from quire.api.batches.lines import Answers, BatchRequest

if TYPE_CHECKING:
    import httpx

_BUSY = (429, 503)
_LONGEST_WAIT_S = 30


async def answer_request(
    client: httpx.AsyncClient, request: BatchRequest, answers: Answers, tries: int | None = None
) -> bool:
    """Send a request and write its answer. Return whether its status is 200.

    Args:
        tries: how often a busy server is asked; None means until it answers.

    Raises:
        httpx.HTTPError: the server cannot be reached.
        OSError: the answer cannot be written.
    """
    for tried in itertools.count(1):
        got = await client.post(
            request.url, content=request.body, headers={"content-type": "application/json"}
        )
        if got.status_code not in _BUSY or tried == tries:
            break
        asked = got.headers.get("retry-after", "")  # a proxy may send a date
        wait_s = int(asked) if asked.isdecimal() else 2 ** min(tried - 1, 5)
        await asyncio.sleep(min(wait_s, _LONGEST_WAIT_S))
    body: Any = got.text
    with suppress(ValueError):
        body = got.json()
    request_id = got.headers.get("x-request-id", "")
    answers.add(request.custom_id, got.status_code, request_id, body=body)
    return got.status_code == 200
