"""`/v1/conversations`, and responses that continue one, through the official SDK."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError, NotFoundError, OpenAI

from quire.core.config import ServerConfig
from quire.core.request import Request
from tests.api.conftest import HTTP, Serve, Served, openai_client

HI: Any = {"role": "user", "content": "Hi."}


def client(served: Served) -> OpenAI:
    return openai_client(served.url)


def texts(items: Any) -> list[str]:
    return [item.content[0].text for item in items]


def said(served: Served, conversation_id: str) -> list[str]:
    """Return the texts of a conversation, the oldest first."""
    return texts(client(served).conversations.items.list(conversation_id, order="asc"))


def prompt_of(served: Served) -> str:
    sent = served.engine.requests[-1]
    assert isinstance(sent, Request)
    return served.tokenizer.decode(list(sent.prompt))


def test_a_conversation_is_made_read_changed_and_deleted(serve: Serve) -> None:
    served = serve()
    made = client(served).conversations.create(items=[HI], metadata={"topic": "a"})
    assert made.id.startswith("conv_")
    assert made.metadata == {"topic": "a"}
    assert client(served).conversations.retrieve(made.id) == made
    changed = client(served).conversations.update(made.id, metadata={"topic": "b"})
    assert (changed.metadata, changed.created_at) == ({"topic": "b"}, made.created_at)
    assert said(served, made.id) == ["Hi."]
    deleted = client(served).conversations.delete(made.id)
    assert (deleted.id, deleted.deleted) == (made.id, True)
    with pytest.raises(NotFoundError, match="There is no conversation"):
        client(served).conversations.retrieve(made.id)


def test_items_are_added_listed_read_and_deleted(serve: Serve) -> None:
    served = serve()
    made = client(served).conversations.create()
    items = client(served).conversations.items
    added = items.create(made.id, items=[HI, {"role": "user", "content": "Bye."}])
    assert texts(added.data) == ["Hi.", "Bye."]
    assert said(served, made.id) == ["Hi.", "Bye."]
    first, last = added.data[0].id, added.data[1].id
    assert first is not None
    assert last is not None
    assert texts(items.list(made.id, after=last)) == ["Hi."]
    assert texts([items.retrieve(first, conversation_id=made.id)]) == ["Hi."]
    assert items.delete(first, conversation_id=made.id).id == made.id
    assert said(served, made.id) == ["Bye."]
    with pytest.raises(NotFoundError, match="There is no item"):
        items.retrieve(first, conversation_id=made.id)


def test_an_item_may_refer_to_a_response(serve: Serve) -> None:
    served = serve("Hello.")
    answer = client(served).responses.create(model="quire-demo", input="Hi.")
    reference: Any = {"type": "item_reference", "id": answer.output[0].id}
    made = client(served).conversations.create(items=[reference])
    assert said(served, made.id) == ["Hello."]


@pytest.mark.parametrize("stream", [False, True])
def test_responses_continue_a_conversation_and_join_it(serve: Serve, stream: bool) -> None:
    served = serve("Hello.")
    made = client(served).conversations.create(items=[{"role": "user", "content": "I am Ada."}])
    for text, named in (("Hi.", made.id), ("Who am I?", {"id": made.id})):
        fields: Any = {"input": text, "conversation": named, "stream": stream}
        answer: Any = client(served).responses.create(model="quire-demo", **fields)
        if stream:
            answer = [*answer][-1].response
        assert answer.conversation.id == made.id
    asked = prompt_of(served)
    assert asked.index("Ada") < asked.index("Hi.") < asked.index("Hello.") < asked.index("Who am")
    assert said(served, made.id) == ["I am Ada.", "Hi.", "Hello.", "Who am I?", "Hello."]


def test_a_response_that_is_not_stored_joins_all_the_same(serve: Serve) -> None:
    served = serve("Hello.")
    made = client(served).conversations.create()
    fields: Any = {"input": "Hi.", "conversation": made.id}
    client(served).responses.create(model="quire-demo", store=False, **fields)
    assert said(served, made.id) == ["Hi.", "Hello."]


def test_a_response_in_the_background_joins_when_it_has_ended(serve: Serve) -> None:
    served = serve("Hello.")
    made = client(served).conversations.create()
    fields: Any = {"input": "Hi.", "conversation": made.id}
    client(served).responses.create(model="quire-demo", background=True, **fields)
    served.settle()
    assert said(served, made.id) == ["Hi.", "Hello."]


def test_a_long_conversation_is_read_by_a_job(serve: Serve) -> None:
    served = serve("Hello.")
    long = " ".join(["word"] * 5000)
    made = client(served).conversations.create(items=[{"role": "user", "content": long}])
    fields: Any = {"input": "Hi.", "conversation": made.id}
    counted = client(served).responses.input_tokens.count(model="quire-demo", **fields)
    assert counted.input_tokens > 5000


def test_what_comes_before_is_said_once(serve: Serve) -> None:
    served = serve("Hello.")
    made = client(served).conversations.create()
    answer = client(served).responses.create(model="quire-demo", input="Hi.")
    fields: Any = {"input": "x", "conversation": made.id, "previous_response_id": answer.id}
    with pytest.raises(BadRequestError, match="send one"):
        client(served).responses.create(model="quire-demo", **fields)
    with pytest.raises(NotFoundError, match="There is no conversation 'conv_0'"):
        client(served).responses.create(model="quire-demo", input="x", conversation="conv_0")
    named: Any = {"input": "x", "previous_response_id": made.id}
    with pytest.raises(BadRequestError, match="not kept here"):
        client(served).responses.create(model="quire-demo", **named)


def test_items_have_a_limit(serve: Serve) -> None:
    items = [HI] * 21
    answer = HTTP.post(f"{serve().url}/v1/conversations", json={"items": items})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "items")


def test_conversations_belong_to_a_key_and_to_the_bound(serve: Serve) -> None:
    served = serve(config=ServerConfig(api_keys=("a", "b"), stored_responses=2))

    def call(method: str, path: str, key: str) -> Any:
        headers = {"authorization": f"Bearer {key}"}
        body: Any = {} if method == "POST" else None
        return HTTP.request(method, f"{served.url}{path}", headers=headers, json=body)

    ids = [call("POST", "/v1/conversations", "a").json()["id"] for _ in range(2)]
    assert call("GET", f"/v1/conversations/{ids[0]}", "b").status_code == 404
    assert call("GET", f"/v1/conversations/{ids[0]}", "a").status_code == 200
    call("POST", "/v1/conversations", "a")
    found = [call("GET", f"/v1/conversations/{each}", "a").status_code for each in ids]
    assert found == [200, 404]
