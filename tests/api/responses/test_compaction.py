"""`/v1/responses/compact`, through the official SDK."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import CompactedResponse

from tests.api.conftest import HTTP, Serve, Served, openai_client

TURNS: Any = [
    {"role": "user", "content": "My name is Ada."},
    {"role": "assistant", "content": "Hello Ada."},
    {"role": "user", "content": "What is 2 + 2?"},
    {"role": "assistant", "content": "4"},
]


def compacted(served: Served, **fields: Any) -> CompactedResponse:
    client = openai_client(served.url)
    return client.responses.compact(model="quire-demo", **{"input": TURNS, **fields})


def prompt_of(served: Served) -> str:
    return served.tokenizer.decode(list(served.engine.requests[-1].prompt))


def test_the_users_messages_stay_and_a_summary_stands_for_the_rest(serve: Serve) -> None:
    served = serve("Ada asked for a sum.")
    found = compacted(served)
    assert "Summarize our conversation" in prompt_of(served)
    assert "Hello Ada." in prompt_of(served)
    assert served.engine.requests[-1].stop_on_loop, "a model that repeats itself ends, too"
    *kept, summary = found.output
    assert [item.to_dict()["content"][0]["text"] for item in kept] == [  # type: ignore[index]
        "My name is Ada.",
        "What is 2 + 2?",
    ]
    assert summary.type == "compaction"
    assert found.usage.input_tokens > 0
    following: Any = [
        *(item.to_dict() for item in found.output),
        {"role": "user", "content": "And?"},
    ]
    answer = openai_client(served.url).responses.with_raw_response.create(
        model="quire-demo", input=following
    )
    assert "x-quire-ignored-fields" not in answer.headers
    asked = prompt_of(served)
    assert "Hello Ada." not in asked
    assert (
        asked.index("My name is Ada.") < asked.index("Ada asked for a sum.") < asked.index("And?")
    )


def test_a_kept_response_is_compacted(serve: Serve) -> None:
    served = serve("Fine.")
    first = openai_client(served.url).responses.create(model="quire-demo", input="How are you?")
    found = compacted(served, input=[], previous_response_id=first.id)
    assert "Fine." in prompt_of(served)
    assert [item.type for item in found.output] == ["message", "compaction"]


def test_a_summary_of_another_server_is_named(serve: Serve) -> None:
    items = [{"type": "compaction", "encrypted_content": "x"}, TURNS[0]]
    answer = HTTP.post(f"{serve('Hi.').url}/v1/responses", json={"input": items})
    assert answer.headers["x-quire-ignored-fields"] == "input[0]"


@pytest.mark.parametrize("words", [2000, 6000])
def test_a_long_conversation_loses_its_start(serve: Serve, words: int) -> None:
    """If the conversation does not fit, even the summary is made of the last turns alone."""
    served = serve("Short.", context_length=4096)
    long = {"role": "user", "content": " ".join(["word"] * words)}
    turns = [long, {"role": "assistant", "content": "Yes."}, *TURNS]
    found = compacted(served, input=turns)
    assert found.output[-1].type == "compaction"
    assert ("word word" in prompt_of(served)) is (words < 4000)
