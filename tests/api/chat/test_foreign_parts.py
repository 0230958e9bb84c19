"""Content parts that clients of other servers and protocols mix into chats."""

from __future__ import annotations

from typing import Any

import pytest

from tests.api.conftest import HTTP, Serve, Served

ASK = {"role": "user", "content": "Hi."}
CALL = {"id": "c", "type": "function", "function": {"name": "f", "arguments": "{}"}}
RESULT = {"role": "tool", "tool_call_id": "c", "content": "2"}


def prompt(served: Served, *messages: Any) -> str:
    body = {"model": "quire-demo", "messages": messages}
    answer = HTTP.post(f"{served.url}/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return served.tokenizer.decode(served.engine.requests[-1].prompt)


def text(kind: str, said: str) -> list[dict[str, str]]:
    return [{"type": kind, "text": said}]


def test_text_may_have_the_types_of_responses(serve: Serve) -> None:
    served = serve("Yes.")
    same = {
        prompt(
            served,
            {"role": "system", "content": text(given, "Be brief.")},
            {"role": "user", "content": text(given, "Hi.")},
            {"role": "assistant", "content": text(said, "Hello.")},
            {"role": "user", "content": text(given, "Bye.")},
        )
        for given, said in (("text", "text"), ("input_text", "output_text"))
    }
    assert len(same) == 1


@pytest.mark.parametrize(
    "part",
    [
        {"type": "thinking", "thinking": "Of f."},
        {"type": "thinking", "thinking": text("text", "Of ") + text("text", "f.")},
        {"type": "thinking", "thinking": "Of f.", "signature": "abc"},
        {"type": "reasoning", "reasoning": "Of f."},
        {"type": "reasoning", "text": "Of f."},
    ],
)
def test_reasoning_among_an_answers_parts_is_read(serve: Serve, part: Any) -> None:
    served = serve("Yes.")
    called = {"role": "assistant", "tool_calls": [CALL]}
    wanted = prompt(served, ASK, {**called, "reasoning_content": "Of f."}, RESULT)
    assert "Of f." in wanted
    assert prompt(served, ASK, {**called, "content": [part]}, RESULT) == wanted


def test_reasoning_alone_is_no_start_of_an_answer(serve: Serve) -> None:
    part = {"type": "thinking", "thinking": "Hm."}
    last = {"role": "assistant", "content": [part]}
    assert prompt(serve("Yes."), ASK, last).endswith("<|turn>model\n")


def test_only_answers_hold_reasoning(serve: Serve) -> None:
    part = {"type": "thinking", "thinking": "Hm."}
    body = {"messages": [{"role": "user", "content": [part]}]}
    answer = HTTP.post(f"{serve('Yes.').url}/v1/chat/completions", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "messages[0].content[0].type"
