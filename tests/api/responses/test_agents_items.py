"""Items that Codex and the AI SDK send beside messages: agents' tasks, searches, settings."""

from __future__ import annotations

from typing import Any

import httpx

from tests.api.conftest import HTTP, Serve, Served
from tests.api.responses.test_responses import prompt_of

IGNORED = "x-quire-ignored-fields"
USER = {"role": "user", "content": "Count the files."}
DEFERRED = {"type": "function", "name": "count", "defer_loading": True}
SCHEMA = {"type": "object", "properties": {"files": {"type": "integer"}}}
FORMAT = {"type": "json_schema", "name": "count", "schema": SCHEMA}


def post(served: Served, *items: Any, **body: Any) -> httpx.Response:
    url = f"{served.url}/v1/responses"
    answer = HTTP.post(url, json={"input": [USER, *items], **body})
    assert answer.status_code == 200, answer.text
    return answer


def test_a_message_of_an_agent_is_read_as_the_users(serve: Serve) -> None:
    """Codex gives a task to an agent in two parts, of which OpenAI seals the second."""
    served = serve("3")
    post(
        served,
        {
            "type": "agent_message",
            "id": "amsg_1",
            "author": "/root",
            "recipient": "/root/counter",
            "content": [
                {"type": "input_text", "text": "Message Type: NEW_TASK\n"},
                {"type": "encrypted_content", "encrypted_content": "Only in src."},
            ],
        },
        {"type": "agent_message", "author": "/root", "recipient": "/root/a", "content": None},
    )
    prompt = prompt_of(served)
    assert "<|turn>user\nCount the files." in prompt
    assert prompt.count("<|turn>user") == 1
    assert prompt.index("Message Type: NEW_TASK") < prompt.index("Only in src.")


def test_a_sealed_part_of_an_output_is_read(serve: Serve) -> None:
    served = serve("3")
    call = {"type": "function_call", "call_id": "c", "name": "wait", "arguments": "{}"}
    output = [{"type": "encrypted_content", "encrypted_content": "There are 3."}]
    post(served, call, {"type": "function_call_output", "call_id": "c", "output": output})
    assert "There are 3." in prompt_of(served).split("<|tool_response>")[1]


def test_a_search_of_openais_servers_is_left_out_and_its_tools_are_offered(serve: Serve) -> None:
    served = serve("3")
    given: dict[str, Any] = {"call_id": None, "execution": "server", "status": "completed"}
    call = {"type": "tool_search_call", "arguments": {"paths": ["files"]}, **given}
    answer = post(served, call, {"type": "tool_search_output", "tools": [DEFERRED], **given})
    assert answer.headers[IGNORED] == "input[1], input[2]"
    assert "declaration:count{" in prompt_of(served)


def test_deferred_tools_are_offered_if_nobody_here_searches(serve: Serve) -> None:
    served = serve("3")
    for search in ({"type": "tool_search"}, {"type": "tool_search", "execution": "server"}):
        answer = post(served, tools=[DEFERRED, search])
        assert answer.headers[IGNORED] == "tools[1]"
        assert "declaration:count{" in prompt_of(served)
    post(served, tools=[DEFERRED, {"type": "tool_search", "execution": "client"}])
    assert "declaration:count{" not in prompt_of(served)


def test_a_compaction_of_another_server_is_left_out_and_named(serve: Serve) -> None:
    served = serve("3")
    answer = post(
        served,
        {"type": "context_compaction", "encrypted_content": "gAAAAABo"},
        {"type": "context_compaction"},
        USER,
    )
    assert answer.headers[IGNORED] == "input[1], input[2]"


def update(**settings: Any) -> dict[str, Any]:
    return {"type": "configuration_update", **settings}


def test_the_last_update_of_the_effort_holds(serve: Serve) -> None:
    served = serve("3")
    high, none = update(reasoning={"effort": "high"}), update(reasoning={"effort": "none"})
    text = update(text={"format": {"type": "text"}})

    def thinks(*items: Any, **body: Any) -> tuple[bool, str | None]:
        effort = post(served, *items, **body).json()["reasoning"]["effort"]
        return "<|think|>" in prompt_of(served), effort

    low = {"effort": "low"}
    assert thinks() == (False, None)
    assert thinks(high, USER) == (True, "high")
    assert thinks(none, USER, reasoning=low) == (False, "none")
    assert thinks(none, USER, high, text, USER, reasoning=low) == (True, "high")
    assert thinks(high, update(reasoning={"effort": None}), USER, reasoning=low) == (False, None)


def test_an_update_holds_for_later_responses(serve: Serve) -> None:
    served = serve("3")
    first = post(served, update(reasoning={"effort": "high"}), USER).json()
    post(served, previous_response_id=first["id"])
    assert "<|think|>" in prompt_of(served)
    items = HTTP.get(f"{served.url}/v1/responses/{first['id']}/input_items").json()["data"]
    assert update(reasoning={"effort": "high"}).items() <= items[1].items()


def test_the_last_update_of_the_format_holds(serve: Serve) -> None:
    served = serve("3")
    bound, free = update(text={"format": FORMAT}), update(text={"format": {"type": "text"}})
    answer = post(served, bound, USER)
    assert answer.json()["text"]["format"] == FORMAT
    assert served.engine.requests[-1].grammar is not None
    post(served, bound, free, USER, text={"format": FORMAT})
    assert served.engine.requests[-1].grammar is None


def test_a_format_without_its_schema_is_refused_by_its_path(serve: Serve) -> None:
    url = f"{serve('3').url}/v1/responses"
    wrong = update(text={"format": {"type": "json_schema", "name": "count"}})
    answer = HTTP.post(url, json={"input": [USER, wrong]})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "input[1].text.format.schema"


def test_tools_that_programs_may_call_are_called_by_the_model(serve: Serve) -> None:
    served = serve("3")
    callers = ["direct", "programmatic"]
    tools = [{"type": "function", "name": "f", "allowed_callers": callers}]
    caller = {"type": "program", "caller_id": "p"}
    call = {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"}
    output = {"type": "function_call_output", "call_id": "c", "output": "4"}
    answer = post(served, {**call, "caller": caller}, {**output, "caller": caller}, tools=tools)
    assert answer.headers[IGNORED] == "tools[0].allowed_callers"
    assert "declaration:f{" in prompt_of(served)


def test_settings_of_an_update_without_effect_are_named(serve: Serve) -> None:
    silent = update(reasoning={"summary": "auto"}, text={"verbosity": "low"})
    answer = post(serve("3"), silent, update(text={"verbosity": "medium"}), USER)
    assert answer.headers[IGNORED] == "input[1].reasoning.summary, input[1].text.verbosity"


def test_an_output_without_an_id_is_that_of_the_only_open_call(serve: Serve) -> None:
    served = serve("3")
    first, second = (
        {"type": "function_call", "call_id": name, "name": f"count_{name}", "arguments": "{}"}
        for name in ("a", "b")
    )
    output = {"type": "function_call_output", "output": "4"}
    post(served, first, output, second, {**output, "call_id": None})
    prompt = prompt_of(served)
    assert prompt.index("response:count_a") < prompt.index("response:count_b")
    url = f"{served.url}/v1/responses"
    for items, number in (
        ((first, second, output), 3),
        ((output,), 1),
        ((first, output, output), 3),
    ):
        answer = HTTP.post(url, json={"input": [USER, *items]})
        assert answer.status_code == 400
        assert answer.json()["error"]["param"] == f"input[{number}].call_id"
