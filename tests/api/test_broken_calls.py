"""A call that is malformed or cut off is the same in a stream and in a whole answer, and no client
takes it for a whole one."""

from __future__ import annotations

from typing import Any

import pytest
from anthropic import Anthropic

from tests.api.conftest import Serve, Served, openai_client

Q = '<|"|>'
ASK: Any = [{"role": "user", "content": "Go."}]
SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}, "s": {"type": "string"}}}
FUNCTION = {"name": "add", "parameters": SCHEMA}
CHAT: Any = [{"type": "function", "function": FUNCTION}]
FLAT: Any = [{"type": "function", **FUNCTION}]
CLAUDE: Any = [{"name": "add", "input_schema": SCHEMA}]
LONG = "a value that is long enough to be sent"
SHORT = "pre <|tool_call>call:add{a:1,b<tool_call|> post"
BROKEN = f"pre <|tool_call>call:add{{a:1,s:{Q}{LONG}{Q},b<tool_call|> post"
CUT_OFF = f"pre <|tool_call>call:add{{a:1,s:{Q}{LONG}"


def tokens_of(served: Served, text: str) -> int:
    """Return the `max_tokens` under which a text is cut off if it is `CUT_OFF`, else ends by
    itself.
    """
    return len(served.ids(text)) + (text != CUT_OFF)


@pytest.mark.parametrize("text", [SHORT, BROKEN, CUT_OFF])
def test_chat(serve: Serve, text: str) -> None:
    served = serve(text)
    tokens = tokens_of(served, text)
    sdk = openai_client(served.url).chat.completions
    asked: Any = {"model": "quire-demo", "messages": ASK, "tools": CHAT, "max_tokens": tokens}
    choice = sdk.create(**asked).choices[0]
    content, calls, finish = "", dict[int, list[str]](), None
    for chunk in sdk.create(stream=True, **asked):
        streamed = chunk.choices[0]
        content += streamed.delta.content or ""
        finish = streamed.finish_reason or finish
        for piece in streamed.delta.tool_calls or ():
            calls.setdefault(piece.index, []).append(piece.function.arguments)
    whole = [call.function.arguments for call in choice.message.tool_calls or ()]
    assert ["".join(call) for call in calls.values()] == whole
    assert (content, finish) == (choice.message.content, choice.finish_reason)
    if text == SHORT:
        assert (content, whole, finish) == (text, [], "stop")
    else:
        assert (content, finish) == ("pre", "length")
        assert whole[0].startswith(f'{{"a": 1, "s": "{LONG}')


@pytest.mark.parametrize("text", [SHORT, BROKEN, CUT_OFF])
def test_messages(serve: Serve, text: str) -> None:
    served = serve(text)
    tokens = tokens_of(served, text)
    sdk = Anthropic(base_url=served.url, api_key="none", max_retries=0)
    asked: Any = {"model": "quire-demo", "messages": ASK, "tools": CLAUDE, "max_tokens": tokens}
    whole = sdk.messages.create(**asked)
    with sdk.messages.stream(**asked) as stream:
        streamed = stream.get_final_message()
    for message in (whole, streamed):
        said = [block.model_dump(exclude={"id"}) for block in message.content]
        kinds = [block["type"] for block in said]
        if text == SHORT:
            assert (kinds, said[0]["text"], message.stop_reason) == (["text"], text, "end_turn")
        else:
            assert (kinds, message.stop_reason) == (["text", "tool_use"], "max_tokens")
            finished = {"a": 1, "s": LONG} if text == BROKEN else {"a": 1}
            assert said[1]["input"] == finished


@pytest.mark.parametrize("text", [SHORT, BROKEN, CUT_OFF])
def test_responses(serve: Serve, text: str) -> None:
    served = serve(text)
    tokens = tokens_of(served, text)
    sdk = openai_client(served.url).responses
    asked: Any = {"model": "quire-demo", "input": ASK, "tools": FLAT, "max_output_tokens": tokens}
    kinds, streamed = [], None
    for event in sdk.create(stream=True, **asked):
        kinds.append(event.type)
        streamed = getattr(event, "response", streamed)
    whole = sdk.create(**asked)
    assert streamed is not None
    for response in (whole, streamed):
        assert response.output[0].content[0].text == (text if text == SHORT else "pre")
        assert response.status == ("completed" if text == SHORT else "incomplete")
        for item in response.output[1:]:
            assert (item.type, item.status) == ("function_call", "incomplete")
            assert item.arguments.startswith(f'{{"a": 1, "s": "{LONG}')
    assert len(whole.output) == len(streamed.output) == 1 + (text != SHORT)
    assert "response.function_call_arguments.done" not in kinds


def test_chat_gives_the_part_of_a_custom_call_that_is_there(serve: Serve) -> None:
    text = f"<|tool_call>call:note{{input:{Q}{LONG}"
    served = serve(text)
    sdk = openai_client(served.url).chat.completions
    tools: Any = [{"type": "custom", "custom": {"name": "note"}}]
    asked: Any = {"model": "quire-demo", "messages": ASK, "tools": tools}
    asked["max_tokens"] = len(served.ids(text))
    (call,) = sdk.create(**asked).choices[0].message.tool_calls
    streamed = ""
    for chunk in sdk.create(stream=True, **asked):
        for piece in chunk.choices[0].delta.tool_calls or ():
            streamed += piece.model_dump()["custom"]["input"]
    assert streamed == call.custom.input
    assert LONG.startswith(streamed)
    assert len(streamed) > len(LONG) / 2
