"""Anthropic's own tools: those that a client runs, and those that nobody runs here."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.api.messages.tools import BashTool, ComputerTool, EditorTool, MemoryTool
from tests.api.conftest import Serve
from tests.api.messages.test_messages import ASK, TOOL, create, prompt_of
from tests.api.messages.test_messages_fields import post, user

IGNORED = "x-quire-ignored-fields"
SCREEN = {"display_width_px": 1024, "display_height_px": 768}
CLIENT: list[tuple[dict[str, Any], str]] = [
    ({"type": "bash_20241022", "name": "bash"}, "restart"),
    ({"type": "bash_20250124", "name": "bash"}, "restart"),
    ({"type": "text_editor_20250124", "name": "str_replace_editor"}, "undo_edit"),
    ({"type": "text_editor_20250429", "name": "str_replace_based_edit_tool"}, "insert_text"),
    (
        {
            "type": "text_editor_20250728",
            "name": "str_replace_based_edit_tool",
            "max_characters": 9000,
        },
        "view_range",
    ),
    ({"type": "memory_20250818", "name": "memory"}, "rename"),
    ({"type": "computer_20241022", "name": "computer", **SCREEN}, "1024 x 768"),
    ({"type": "computer_20250124", "name": "computer", **SCREEN}, "scroll_direction"),
    ({"type": "computer_20251124", "name": "computer", **SCREEN, "enable_zoom": True}, "zoom"),
]


@pytest.mark.parametrize(("tool", "shown"), CLIENT)
def test_the_model_is_told_of_tools_that_the_client_runs(
    serve: Serve, tool: dict[str, Any], shown: str
) -> None:
    name = tool["name"]
    served = serve(f'<|tool_call>call:{name}{{command:<|"|>view<|"|>}}<tool_call|>')
    answer = post(served, messages=ASK, tools=[tool], max_tokens=256)
    assert answer.status_code == 200, answer.text
    assert IGNORED not in answer.headers
    assert shown in prompt_of(served)
    (call,) = answer.json()["content"]
    assert (call["type"], call["name"], call["input"]) == ("tool_use", name, {"command": "view"})
    forced = post(served, messages=ASK, tools=[tool], tool_choice={"type": "tool", "name": name})
    assert forced.status_code == 200, forced.text


def test_tool_versions_differ_in_their_commands() -> None:
    def schema(tool: Any) -> str:
        return json.dumps(tool.to_template())

    screen = {"name": "computer", **SCREEN}
    assert "scroll" not in schema(ComputerTool(type="computer_20241022", **screen))
    assert "zoom" not in schema(ComputerTool(type="computer_20251124", **screen))
    assert "undo_edit" not in schema(EditorTool(type="text_editor_20250728", name="e"))
    assert "insert_text" not in schema(EditorTool(type="text_editor_20241022", name="e"))
    assert "old_path" in schema(MemoryTool(type="memory_20250818", name="memory"))
    assert "restart" in schema(BashTool(type="bash_20250124", name="bash"))


HOSTED = [
    {"type": "web_search_20250305", "name": "web_search"},
    {"type": "web_fetch_20250910", "name": "web_fetch"},
    {"type": "code_execution_20250825", "name": "code_execution"},
    {"type": "mcp_toolset", "mcp_server_name": "m"},
    {"type": "advisor_20260301", "name": "advisor"},
]


def test_tools_that_nobody_runs_here_are_left_out_and_named(serve: Serve) -> None:
    served = serve("Yes.")
    answer = post(
        served,
        messages=ASK,
        tools=[TOOL, *HOSTED],
        mcp_servers=[{"type": "url", "url": "https://x", "name": "m"}],
    )
    assert answer.status_code == 200, answer.text
    named = answer.headers[IGNORED].split(", ")
    assert named == [*(f"tools[{n}]" for n in range(1, 6)), "mcp_servers"]
    post(served, messages=ASK, tools=[TOOL])
    assert prompt_of(served, 0) == prompt_of(served, 1)


def test_deferred_tools_are_told_where_the_search_for_them_is_hosted(serve: Serve) -> None:
    served = serve("Yes.")
    search = {"type": "tool_search_tool_regex_20251119", "name": "tool_search_tool_regex"}
    answer = post(served, messages=ASK, tools=[{**TOOL, "defer_loading": True}, search])
    assert answer.headers[IGNORED] == "tools[1]"
    assert "get_weather" in prompt_of(served)


def test_what_hosted_tools_did_is_left_out_and_named(serve: Serve) -> None:
    served = serve("Yes.")
    kinds = ("server_tool_use", "mcp_tool_listing", "bash_code_execution_tool_result")
    blocks = [{"type": kind, "id": "x", "content": []} for kind in kinds]
    said = {"role": "assistant", "content": [*blocks, {"type": "text", "text": "Ok."}]}
    answer = post(
        served, messages=[*ASK, said, *user({"type": "container_upload", "file_id": "f"})]
    )
    assert answer.status_code == 200, answer.text
    named = [*(f"messages[1].content[{n}]" for n in range(3)), "messages[2].content[0]"]
    assert answer.headers[IGNORED].split(", ") == named


def test_unknown_tools_and_blocks_are_refused(serve: Serve) -> None:
    served = serve("Yes.")
    for body, name in (
        ({"tools": [{"type": "telepathy_20250101", "name": "t"}]}, "tools[0].type"),
        ({"messages": user({"type": "telepathy"})}, "messages[0].content[0].type"),
    ):
        answer = post(served, **body)
        assert answer.status_code == 400
        assert name in answer.json()["error"]["message"]


def test_edits_that_are_not_made_are_named(serve: Serve) -> None:
    edits = [
        {"type": "clear_thinking_20251015"},
        {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": 150000}},
    ]
    served = serve("Yes.")
    answer = post(served, context_management={"edits": edits})
    assert answer.status_code == 200, answer.text
    assert answer.headers[IGNORED] == "context_management.edits[1]"
    assert answer.json()["context_management"] == {"applied_edits": []}


def test_a_summary_is_read_as_text(serve: Serve) -> None:
    served = serve("Yes.")
    summary = {"role": "assistant", "content": [{"type": "compaction", "content": "They met."}]}
    create(served, messages=[*ASK, summary, *ASK])
    assert "They met." in prompt_of(served)


def test_documents_of_content_blocks(serve: Serve) -> None:
    served = serve("Yes.")
    text = {"type": "text", "text": "One."}
    for content in ("One.", [text, {"type": "text", "text": "Two."}]):
        source = {"type": "content", "content": content}
        document = {"type": "document", "source": source, "title": "T", "context": "C"}
        answer = post(served, messages=user(document))
        assert answer.status_code == 200, answer.text
        said = prompt_of(served)
        assert all(each in said for each in ("T", "C", "One."))
        assert ("Two." in said) == isinstance(content, list)


def test_altered_reasoning_is_named_in_the_header(serve: Serve) -> None:
    served = serve("Yes.")
    thinking = {"type": "thinking", "thinking": "Hm.", "signature": "q1.AAAA"}
    said = {"role": "assistant", "content": [thinking, {"type": "text", "text": "Ok."}]}
    answer = post(served, messages=[*ASK, said, *ASK])
    assert answer.headers[IGNORED] == "messages[1].content[0]"
