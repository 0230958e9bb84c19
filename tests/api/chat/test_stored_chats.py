"""Stored chat completions: `store: true` and its endpoints, through the official SDK."""

from __future__ import annotations

from typing import Any

import pytest
from openai import NotFoundError, OpenAI

from quire.core.config import ServerConfig
from tests.api.conftest import HTTP, Serve, Served, openai_client


def client(served: Served) -> OpenAI:
    return openai_client(served.url)


def asked(served: Served, content: Any = "Hi.", **fields: Any) -> Any:
    messages: Any = [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": content},
    ]
    return client(served).chat.completions.create(
        model="quire-demo", messages=messages, store=True, **fields
    )


def test_a_stored_chat_is_read_changed_and_deleted(serve: Serve) -> None:
    served = serve("Hello.")
    answer = asked(served, metadata={"topic": "a"})
    chats = client(served).chat.completions
    found: Any = chats.retrieve(answer.id)
    assert found.metadata == {"topic": "a"}
    shown = found.to_dict()
    del shown["metadata"]
    assert shown == answer.to_dict()
    changed: Any = chats.update(answer.id, metadata={"topic": "b"})
    assert changed.metadata == {"topic": "b"}
    deleted = chats.delete(answer.id)
    assert (deleted.id, deleted.deleted) == (answer.id, True)
    for gone in (chats.retrieve, chats.delete, chats.messages.list):
        with pytest.raises(NotFoundError, match="There is no chat completion"):
            gone(answer.id)


def test_a_stream_is_stored_as_a_whole_answer(serve: Serve) -> None:
    served = serve("Hello there.")
    chunks = [*asked(served, stream=True, n=2, logprobs=True)]
    found = client(served).chat.completions.retrieve(chunks[0].id)
    assert [each.message.content for each in found.choices] == ["Hello there."] * 2
    assert found.usage is not None
    assert found.usage.completion_tokens > 0
    assert found.choices[0].logprobs is None


def test_messages_are_listed_with_ids_and_parts(serve: Serve) -> None:
    served = serve("Hello.")
    parts = [{"type": "text", "text": "Hi."}]
    answer = asked(served, parts)
    messages = client(served).chat.completions.messages
    listed: Any = messages.list(answer.id).data
    assert [(each.role, each.content) for each in listed] == [
        ("system", "Be brief."),
        ("user", None),
    ]
    assert [each.to_dict() for each in listed[1].content_parts] == parts
    assert len({each.id for each in listed}) == 2
    after: Any = messages.list(answer.id, after=listed[1].id, order="desc")
    assert [each.id for each in after.data] == [listed[0].id]


def test_lists_are_filtered_and_in_pages(serve: Serve) -> None:
    served = serve("Hello.", config=ServerConfig())
    ids = [asked(served, metadata={"run": run}).id for run in ("1", "2", "1")]
    chats = client(served).chat.completions
    assert [each.id for each in chats.list()] == ids
    assert [each.id for each in chats.list(metadata={"run": "1"})] == [ids[0], ids[2]]
    first = chats.list(limit=2)
    assert [each.id for each in first.data] == ids[:2]
    assert first.has_next_page()
    assert [each.id for each in first.get_next_page().data] == ids[2:]
    assert chats.list(model="other").data == []
    with pytest.raises(NotFoundError, match="chatcmpl-0"):
        chats.list(after="chatcmpl-0")


def test_only_what_asks_for_it_is_stored(serve: Serve) -> None:
    served = serve("Hello.", config=ServerConfig())
    body = {"messages": [{"role": "user", "content": "Hi."}]}
    answer = HTTP.post(f"{served.url}/v1/chat/completions", json=body)
    assert "x-quire-ignored-fields" not in answer.headers
    assert HTTP.get(f"{served.url}/v1/chat/completions").json()["data"] == []
    assert HTTP.get(f"{served.url}/v1/chat/completions/{answer.json()['id']}").status_code == 404
