"""Answers as each official SDK shows them, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from anthropic import AsyncAnthropic
from openai import AsyncOpenAI

Calls = tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class Spoken:
    """An answer, free of any protocol.

    Attributes:
        calls: names, and arguments as JSON with sorted keys.
        end: "stop", "tool_calls" or "length".
        tokens: prompt tokens, and tokens of the answer.
    """

    reasoning: str
    text: str
    calls: Calls
    end: str
    tokens: tuple[int, int] = (0, 0)


def calls_of(pairs: Iterable[tuple[str, Any]]) -> Calls:
    """Return calls in the form that compares; arguments are an object or its JSON."""
    parsed = [(name, json.loads(a) if isinstance(a, str) else a) for name, a in pairs]
    return tuple((name, json.dumps(a, sort_keys=True)) for name, a in parsed)


def _complete(arguments: str) -> bool:
    """Return whether a call's arguments came to their end.

    Arguments are streamed as they are written, so a stream also shows the start of a call that
    is cut off or turns out to be no call. That start is never JSON, and no answer has the call.
    """
    try:
        json.loads(arguments)
    except json.JSONDecodeError:
        return False
    return True


async def chat(sdk: AsyncOpenAI, **body: Any) -> Spoken:
    """Ask /v1/chat/completions without streaming."""
    answer = await sdk.chat.completions.create(**body)
    message, usage = answer.choices[0].message, answer.usage
    assert usage is not None
    calls: list[Any] = list(message.tool_calls or ())
    return Spoken(
        getattr(message, "reasoning_content", None) or "",
        message.content or "",
        calls_of((call.function.name, call.function.arguments) for call in calls),
        answer.choices[0].finish_reason,
        (usage.prompt_tokens, usage.completion_tokens),
    )


async def chat_streamed(sdk: AsyncOpenAI, **body: Any) -> Spoken:
    """Ask /v1/chat/completions, and fold the deltas."""
    reasoning = text = end = ""
    tokens = (0, 0)
    calls: dict[int, list[str]] = {}
    create: Any = sdk.chat.completions.create
    async for chunk in await create(**body, stream=True, stream_options={"include_usage": True}):
        if chunk.usage is not None:
            tokens = (chunk.usage.prompt_tokens, chunk.usage.completion_tokens)
        for choice in chunk.choices:
            assert not end, "a delta came after the end"
            reasoning += getattr(choice.delta, "reasoning_content", None) or ""
            text += choice.delta.content or ""
            for piece in choice.delta.tool_calls or ():
                call = calls.setdefault(piece.index, ["", ""])
                call[0] += piece.function.name or ""
                call[1] += piece.function.arguments or ""
            end = choice.finish_reason or ""
    pairs = [(name, arguments) for name, arguments in calls.values() if _complete(arguments)]
    return Spoken(reasoning, text, calls_of(pairs), end, tokens)


_STOP_REASONS = {"end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "length"}


def _message(message: Any) -> Spoken:
    blocks, usage = message.content, message.usage
    return Spoken(
        "".join(block.thinking for block in blocks if block.type == "thinking"),
        "".join(block.text for block in blocks if block.type == "text"),
        calls_of((block.name, block.input) for block in blocks if block.type == "tool_use"),
        _STOP_REASONS[message.stop_reason],
        (usage.input_tokens + usage.cache_read_input_tokens, usage.output_tokens),
    )


async def messages(sdk: AsyncAnthropic, **body: Any) -> Spoken:
    """Ask /v1/messages without streaming."""
    return _message(await sdk.messages.create(**body))


async def messages_streamed(sdk: AsyncAnthropic, **body: Any) -> Spoken:
    """Ask /v1/messages; compare the message that the SDK folds with the deltas."""
    text = ""
    arguments: dict[int, str] = {}
    async with sdk.messages.stream(**body) as stream:
        async for event in stream:
            if event.type == "content_block_start" and event.content_block.type == "tool_use":
                arguments[event.index] = ""
            elif event.type == "content_block_delta" and event.delta.type == "text_delta":
                text += event.delta.text
            elif event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                arguments[event.index] += event.delta.partial_json
        message = await stream.get_final_message()
    started = {index for index, each in arguments.items() if not _complete(each)}
    message.content = [each for n, each in enumerate(message.content) if n not in started]
    spoken = _message(message)
    assert spoken.text == text
    return spoken


def _response(response: Any) -> Spoken:
    thoughts = [item for item in response.output if item.type == "reasoning"]
    said = [item for item in response.output if item.type == "message"]
    started = [item for item in response.output if item.type == "function_call"]
    calls = [item for item in started if item.status == "completed"]
    assert not any(_complete(item.arguments) for item in started if item not in calls)
    complete = "tool_calls" if calls else "stop"
    return Spoken(
        "".join(part.text for item in thoughts for part in item.content or ()),
        "".join(part.text for item in said for part in item.content),
        calls_of((item.name, item.arguments) for item in calls),
        complete if response.status == "completed" else "length",
        (response.usage.input_tokens, response.usage.output_tokens),
    )


async def responses(sdk: AsyncOpenAI, **body: Any) -> Spoken:
    """Ask /v1/responses without streaming."""
    return _response(await sdk.responses.create(**body))


async def responses_streamed(sdk: AsyncOpenAI, **body: Any) -> Spoken:
    """Ask /v1/responses; compare the last event's response with the deltas."""
    text, reasoning, last = "", "", None
    arguments: dict[int, str] = {}
    async for event in await sdk.responses.create(**body, stream=True):
        last = event
        match event.type:
            case "response.output_text.delta":
                text += event.delta
            case "response.reasoning_text.delta":
                reasoning += event.delta
            case "response.function_call_arguments.delta":
                arguments[event.output_index] = arguments.get(event.output_index, "") + event.delta
    assert last is not None
    assert last.type in ("response.completed", "response.incomplete")
    spoken = _response(last.response)
    assert (spoken.text, spoken.reasoning) == (text, reasoning)
    complete = filter(_complete, arguments.values())
    streamed = [json.dumps(json.loads(each), sort_keys=True) for each in complete]
    assert [each for _, each in spoken.calls] == streamed
    return spoken
