"""`clear_tool_uses_20250919`: old tool results leave the prompt, and the answer says how much."""

from __future__ import annotations

from typing import Any

import pytest

from quire.api.messages.edits import CLEARED
from tests.api.conftest import HTTP, Serve, Served
from tests.api.messages.test_messages import prompt_of

MANY = "word " * 60
TOOLS = [
    {"name": name, "input_schema": {"type": "object", "properties": {"n": {"type": "integer"}}}}
    for name in ("read", "keep")
]
COUNTED = {"type": "tool_uses", "value": 1}


def said(*names: str) -> list[dict[str, Any]]:
    """Return a conversation in which the tools were called one after the other."""
    messages: list[dict[str, Any]] = [{"role": "user", "content": "Read them."}]
    for number, name in enumerate(names):
        use = {"type": "tool_use", "id": f"t{number}", "name": name, "input": {"n": 70 + number}}
        result = {"type": "tool_result", "tool_use_id": f"t{number}"}
        result["content"] = f"result {number}: {MANY}"
        messages.append({"role": "assistant", "content": [use]})
        messages.append({"role": "user", "content": [result]})
    return messages


def post(served: Served, path: str, edit: dict[str, Any], *names: str) -> dict[str, Any]:
    edits = {"edits": [{"type": "clear_tool_uses_20250919", **edit}]}
    body = {"messages": said(*names), "tools": TOOLS, "context_management": edits}
    if not path:
        body["max_tokens"] = 5
    answer = HTTP.post(f"{served.url}/v1/messages{path}", json=body)
    assert answer.status_code == 200, answer.text
    assert "x-quire-ignored-fields" not in answer.headers
    told: dict[str, Any] = answer.json()
    return told


def test_the_last_results_stay_and_the_answer_says_what_went(serve: Serve) -> None:
    served = serve("Yes.")
    edit = {"trigger": COUNTED, "keep": {"type": "tool_uses", "value": 1}}
    (applied,) = post(served, "", edit, "read", "read", "read")["context_management"][
        "applied_edits"
    ]
    prompt = prompt_of(served)
    assert prompt.count(CLEARED) == 2
    assert "result 2" in prompt
    assert "result 1" not in prompt
    assert "70" in prompt  # arguments stay
    assert applied["type"] == "clear_tool_uses_20250919"
    assert applied["cleared_tool_uses"] == 2
    counted = post(served, "/count_tokens", edit, "read", "read", "read")
    before = counted["context_management"]["original_input_tokens"]
    assert before - counted["input_tokens"] == applied["cleared_input_tokens"] > 40


def test_tools_that_are_excluded_keep_theirs_and_arguments_may_go(serve: Serve) -> None:
    served = serve("Yes.")
    edit = {
        "trigger": COUNTED,
        "keep": {"type": "tool_uses", "value": 0},
        "exclude_tools": ["keep"],
        "clear_tool_inputs": ["read"],
    }
    told = post(served, "", edit, "keep", "read")
    assert told["context_management"]["applied_edits"][0]["cleared_tool_uses"] == 1
    prompt = prompt_of(served)
    assert "result 0" in prompt
    assert "result 1" not in prompt
    assert "70" in prompt
    assert "71" not in prompt


@pytest.mark.parametrize(
    "edit",
    [
        {},  # a hundred thousand tokens
        {"trigger": {"type": "tool_uses", "value": 3}},
        {"trigger": {"type": "input_tokens", "value": 4000}},
        {"trigger": COUNTED},  # the last three stay
        {
            "trigger": COUNTED,
            "keep": {"type": "tool_uses", "value": 0},
            "clear_at_least": {"type": "input_tokens", "value": 100_000},
        },
    ],
)
def test_nothing_goes_before_its_time(serve: Serve, edit: dict[str, Any]) -> None:
    served = serve("Yes.")
    told = post(served, "", edit, "read", "read", "read")
    assert told["context_management"] == {"applied_edits": []}
    assert CLEARED not in prompt_of(served)


def test_a_conversation_beyond_the_context_is_answered_once_it_is_shorter(serve: Serve) -> None:
    served = serve("Yes.", context_length=480)
    edit = {"trigger": COUNTED, "keep": {"type": "tool_uses", "value": 0}}
    told = post(served, "", edit, *["read"] * 8)
    assert told["context_management"]["applied_edits"][0]["cleared_tool_uses"] == 8
