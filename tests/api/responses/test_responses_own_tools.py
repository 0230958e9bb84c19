"""OpenAI's own tools: shells and patches that a client runs, and tools that nobody runs here."""

from __future__ import annotations

from typing import Any

import pytest
from openai.types.responses import ResponseOutputItem
from pydantic import TypeAdapter

from tests.api.conftest import HTTP, Serve, Served
from tests.api.responses.test_responses import create, prompt_of

IGNORED = "x-quire-ignored-fields"
USER = {"role": "user", "content": "List the files."}
Q = '<|"|>'
CALLS: list[tuple[str, str, str, dict[str, Any]]] = [
    (
        "local_shell",
        f"command:[{Q}ls{Q},{Q}-l{Q}],working_directory:{Q}/tmp{Q}",
        "action",
        {"type": "exec", "command": ["ls", "-l"], "env": {}, "working_directory": "/tmp"},
    ),
    (
        "shell",
        f"commands:[{Q}ls{Q}],timeout_ms:9",
        "action",
        {"commands": ["ls"], "timeout_ms": 9, "max_output_length": None},
    ),
    (
        "apply_patch",
        f"type:{Q}create_file{Q},path:{Q}a.txt{Q},diff:{Q}+a{Q}",
        "operation",
        {"type": "create_file", "path": "a.txt", "diff": "+a"},
    ),
]


def post(served: Served, **body: Any) -> Any:
    return HTTP.post(f"{served.url}/v1/responses", json={"input": [USER], **body})


@pytest.mark.parametrize(("kind", "written", "field", "action"), CALLS)
def test_a_call_has_the_item_that_clients_run_and_comes_back(
    serve: Serve, kind: str, written: str, field: str, action: dict[str, Any]
) -> None:
    served = serve(f"<|tool_call>call:{kind}{{{written}}}<tool_call|>")
    tools: Any = [{"type": kind}]
    choice = "required" if kind == "local_shell" else {"type": kind}
    response = create(served, tools=tools, tool_choice=choice)
    (call,) = response.output
    assert (call.type, call.status) == (f"{kind}_call", "completed")
    assert call.to_dict()[field] == action
    assert response.to_dict()["tools"] == tools

    with_id = {"id": call.call_id} if kind == "local_shell" else {"call_id": call.call_id}
    output: Any = {"type": f"{kind}_call_output", "output": "a.txt", **with_id}
    if kind == "shell":
        output["output"] = [{"stdout": "a.txt", "stderr": "", "outcome": {"type": "timeout"}}]
    if kind == "apply_patch":
        output["status"] = "completed"
    for said in ({"input": [USER, call.to_dict(), output]},
                 {"input": [output], "previous_response_id": response.id}):  # fmt: skip
        answer = post(served, tools=tools, **said)
        assert answer.status_code == 200, answer.text
        assert IGNORED not in answer.headers
        prompt = prompt_of(served)
        assert f"call:{kind}{{" in prompt
        assert "a.txt" in prompt.split("<|tool_response>")[1]


def test_streamed_calls_are_the_same(serve: Serve) -> None:
    kind, written, field, action = CALLS[1]
    served = serve(f"<|tool_call>call:{kind}{{{written}}}<tool_call|>")
    tools: Any = [{"type": kind, "environment": {"type": "local"}}]
    events = list(create(served, tools=tools, stream=True))
    added, done = (
        next(each.item for each in events if each.type == f"response.output_item.{what}")
        for what in ("added", "done")
    )
    assert (added.type, added.status) == ("shell_call", "in_progress")
    assert done.to_dict()[field] == action
    assert events[-1].response.output[0].to_dict() == done.to_dict()


@pytest.mark.parametrize(
    ("kind", "written"),
    [(kind, written) for kind, written, _, _ in CALLS]
    + [("apply_patch", f"type:{Q}update_file{Q},path:{Q}a.txt{Q}"), ("shell", "")],
)
def test_calls_have_each_field_of_the_official_sdk(serve: Serve, kind: str, written: str) -> None:
    """Clients that check what they get refuse a call without one, the added item's included."""
    served = serve(f"<|tool_call>call:{kind}{{{written}}}<tool_call|>")
    tools: Any = [{"type": kind}]
    for event in create(served, tools=tools, stream=True):
        if event.type.startswith("response.output_item."):
            TypeAdapter(ResponseOutputItem).validate_python(event.item.to_dict())


@pytest.mark.parametrize(("kind", "written"), [(kind, written) for kind, written, _, _ in CALLS])
def test_calls_that_are_cut_off_have_each_field_too(serve: Serve, kind: str, written: str) -> None:
    served = serve(f"<|tool_call>call:{kind}{{{written}}}<tool_call|>")
    seen: set[str] = set()
    for max_tokens in range(8, 44, 2):
        response = create(served, tools=[{"type": kind}], max_output_tokens=max_tokens)
        for item in response.output:
            TypeAdapter(ResponseOutputItem).validate_python(item.to_dict())
            seen |= {item.status}
    assert seen == {"completed", "in_progress" if kind == "apply_patch" else "incomplete"}


HOSTED: list[dict[str, Any]] = [
    {"type": "web_search"},
    {"type": "web_search_2025_08_26"},
    {"type": "image_generation"},
    {"type": "code_interpreter", "container": {"type": "auto"}},
    {"type": "file_search", "vector_store_ids": ["v"]},
    {"type": "mcp", "server_label": "m", "server_url": "https://x"},
    {"type": "computer_use_preview", "display_width": 9, "display_height": 9},
    {"type": "shell", "environment": {"type": "container_auto"}},
]
ITEMS: list[dict[str, Any]] = [
    {"type": "web_search_call", "id": "1"},
    {"type": "image_generation_call", "id": "2", "result": "aGk="},
    {"type": "code_interpreter_call", "id": "3", "code": "1", "container_id": "c"},
    {"type": "file_search_call", "id": "4", "queries": []},
    {"type": "compaction", "id": "8", "encrypted_content": "x"},
]


def test_hosted_tools_and_their_items_are_left_out_and_named(serve: Serve) -> None:
    served = serve("Yes.")
    answer = post(
        served,
        input=[*ITEMS, USER],
        tools=HOSTED,
        context_management=[{"type": "compaction", "compact_threshold": 1000}],
    )
    assert answer.status_code == 200, answer.text
    named = ["context_management", *(f"tools[{n}]" for n in range(len(HOSTED)))]
    named += [f"input[{n}]" for n in range(len(ITEMS))]
    assert answer.headers[IGNORED].split(", ") == named
    assert answer.json()["tools"] == []
    post(served)
    first, second = (request.prompt for request in served.engine.requests)
    assert first == second


def test_unknown_tools_and_items_are_refused(serve: Serve) -> None:
    served = serve("Yes.")
    for body, name in (
        ({"tools": [{"type": "telepathy"}]}, "tools[0].type"),
        ({"input": [{"type": "telepathy_call", "id": "1"}]}, "input[0].type"),
        ({"tool_choice": {"type": "shell"}}, "tool_choice"),
        (
            {"input": [USER, {"type": "shell_call_output", "call_id": "c", "output": []}]},
            "input[1].call_id",
        ),
    ):
        answer = post(served, **body)
        assert answer.status_code == 400
        assert name in answer.json()["error"]["message"]


def test_sealed_reasoning_of_another_server_is_named_in_the_header(serve: Serve) -> None:
    served = serve("Yes.")
    signed = {"type": "reasoning", "id": "r", "summary": [], "encrypted_content": "gAAAAABo"}
    answer = post(served, input=[USER, signed, {"role": "assistant", "content": "Ok."}, USER])
    assert answer.headers[IGNORED] == "input[1]"
