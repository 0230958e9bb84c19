"""A conversation goes on whatever the model once wrote for a call's arguments."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.conftest import Serve, openai_client

WRITTEN = [
    ("", "call:f{}"),
    ('{"path": "a.txt", "content": "hello wor', 'path:<|"|>a.txt<|"|>'),
    ('{"path": "a.txt", "content": "hello wor', 'content:<|"|>hello wor<|"|>'),
    ("{'path': 1}", "arguments:<|\"|>{'path': 1}<|\"|>"),
    ("[1, 2]", 'arguments:<|"|>[1, 2]<|"|>'),
    ("NaN", 'arguments:<|"|>NaN<|"|>'),
    ("[" * 1_000, "arguments:"),
    ({"path": "a.txt"}, 'path:<|"|>a.txt<|"|>'),
]


@pytest.mark.parametrize(("arguments", "read"), WRITTEN)
@pytest.mark.parametrize("protocol", ["chat", "responses"])
def test_malformed_arguments_stay_in_sight(
    serve: Serve, protocol: str, arguments: Any, read: str
) -> None:
    served = serve()
    sdk = openai_client(served.url)
    if protocol == "chat":
        call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}
        messages: Any = [
            {"role": "user", "content": "Go."},
            {"role": "assistant", "tool_calls": [call]},
            {"role": "tool", "tool_call_id": "c", "content": "That was no JSON."},
        ]
        sdk.chat.completions.create(model="quire-demo", messages=messages)
    else:
        items: Any = [
            {"role": "user", "content": "Go."},
            {"type": "function_call", "call_id": "c", "name": "f", "arguments": arguments},
            {"type": "function_call_output", "call_id": "c", "output": "That was no JSON."},
        ]
        sdk.responses.create(model="quire-demo", input=items)
    prompt = served.tokenizer.decode(served.engine.requests[0].prompt)
    assert read in prompt
    assert "That was no JSON." in prompt
