"""Responses that go on without their clients: polled, taken up again, cancelled."""

from __future__ import annotations

import threading

import openai
import pytest
from openai import OpenAI
from openai.types.responses import Response

from quire.core.config import ServerConfig
from quire.core.request import Failure
from tests.api.conftest import Serve, Served, openai_client
from tests.support.scripted_engine import Script
from tests.support.server import leaving
from tests.support.waiting import wait_until

TEXT = "one two three four five six"


def held(serve: Serve) -> tuple[Served, OpenAI, threading.Event]:
    """Return a server whose answers stop behind two tokens until the event is set."""
    go_on = threading.Event()
    served = serve()
    tokens = served.ids(TEXT)
    served.engine.reset(lambda _: Script(tokens, held=go_on, held_at=2))
    return served, openai_client(served.url), go_on


def ended(client: OpenAI, response_id: str) -> Response:
    wait_until(
        lambda: client.responses.retrieve(response_id).status not in ("queued", "in_progress")
    )
    return client.responses.retrieve(response_id)


def test_a_response_is_polled_until_it_ends(serve: Serve) -> None:
    _, client, go_on = held(serve)
    started = client.responses.create(input="x", background=True)
    assert (started.status, started.background, started.output) == ("in_progress", True, [])
    assert client.responses.retrieve(started.id).status == "in_progress"
    with pytest.raises(openai.BadRequestError, match="not kept here"):
        client.responses.create(input="y", previous_response_id=started.id)
    go_on.set()
    whole = ended(client, started.id)
    assert (whole.status, whole.output_text) == ("completed", TEXT)
    assert client.responses.cancel(started.id).status == "completed"
    assert client.responses.create(input="y", previous_response_id=started.id).output_text == TEXT


def test_a_stream_is_taken_up_again(serve: Serve) -> None:
    _, client, go_on = held(serve)
    stream = client.responses.create(input="x", background=True, stream=True)
    seen = [next(stream), next(stream)]
    created = seen[0]
    assert created.type == "response.created"
    stream.close()
    go_on.set()
    rest = client.responses.retrieve(
        created.response.id, stream=True, starting_after=seen[-1].sequence_number
    )
    events = list(rest)
    assert [each.sequence_number for each in events] == list(
        range(seen[-1].sequence_number + 1, seen[-1].sequence_number + 1 + len(events))
    )
    last = events[-1]
    assert last.type == "response.completed"
    assert last.response.output_text == TEXT
    again = list(client.responses.retrieve(created.response.id, stream=True))
    assert [each.sequence_number for each in again] == list(range(len(again)))
    for wrong in ("9" * 5000, "x"):
        query = {"starting_after": wrong}
        with pytest.raises(openai.BadRequestError, match="must be a whole number"):
            client.responses.retrieve(created.response.id, stream=True, extra_query=query)


def test_it_goes_on_when_its_client_leaves(serve: Serve) -> None:
    served, client, go_on = held(serve)
    with leaving(served.url, "/v1/responses", {"input": "x", "background": True}) as raw:
        answer = raw.recv(1 << 16).decode()
        while "resp_" not in answer:
            answer += raw.recv(1 << 16).decode()
    response_id = "resp_" + answer.split('"id":"resp_')[1][:32]
    go_on.set()
    assert ended(client, response_id).output_text == TEXT


def test_a_running_response_is_not_evicted(serve: Serve) -> None:
    served, go_on = serve(config=ServerConfig(stored_responses=3)), threading.Event()
    tokens, client = served.ids(TEXT), openai_client(served.url)
    served.engine.reset(lambda _: Script(tokens, held=go_on, held_at=2))
    talk = client.conversations.create().id
    started = client.responses.create(input="x", background=True, conversation=talk)
    served.engine.reset(lambda _: Script(tokens))
    for _ in range(4):
        client.responses.create(input="y")
        client.conversations.retrieve(talk)  # so that it stays the most recently used
    go_on.set()
    assert ended(client, started.id).output_text == TEXT
    assert len(list(client.conversations.items.list(talk))) == 2
    for _ in range(3):
        client.responses.create(input="y")
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(started.id)


def silent(serve: Serve) -> tuple[Served, OpenAI]:
    """Return a server whose answers have no end."""
    served = serve()
    tokens = served.ids(TEXT)
    served.engine.reset(lambda _: Script(tokens, silent=True))
    return served, openai_client(served.url)


def test_a_response_is_cancelled(serve: Serve) -> None:
    served, client = silent(serve)
    started = client.responses.create(input="x", background=True)
    assert client.responses.cancel(started.id).status == "cancelled"
    assert client.responses.retrieve(started.id).status == "cancelled"
    wait_until(lambda: bool(served.engine.tickets[0].aborted))
    served.settle()


def test_a_deleted_response_stops(serve: Serve) -> None:
    served, client = silent(serve)
    started = client.responses.create(input="x", background=True)
    client.responses.delete(started.id)
    wait_until(lambda: bool(served.engine.tickets[0].aborted))
    served.settle()
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve(started.id)


def test_a_failure_is_kept(serve: Serve) -> None:
    served = serve()
    tokens = served.ids(TEXT)
    served.engine.reset(lambda _: Script(tokens[:2], error=Failure("no more memory")))
    client = openai_client(served.url)
    failed = ended(client, client.responses.create(input="x", background=True).id)
    assert failed.status == "failed"
    assert failed.error is not None
    assert "no more memory" in failed.error.message


def test_a_response_in_the_foreground_is_not_cancelled_nor_streamed_again(serve: Serve) -> None:
    client = openai_client(serve().url)
    whole = client.responses.create(input="x")
    with pytest.raises(openai.BadRequestError, match="'background': true"):
        client.responses.cancel(whole.id)
    with pytest.raises(openai.BadRequestError, match="supported only for responses"):
        list(client.responses.retrieve(whole.id, stream=True))
