"""System messages in the middle of a conversation change tools and the effort."""

from __future__ import annotations

from typing import Any

from tests.api.conftest import Serve, Served
from tests.api.messages.test_messages_fields import ASK, TOOL, post, prompt_of

IGNORED = "x-quire-ignored-fields"
HIDDEN = {"name": "hidden", "input_schema": {"type": "object"}, "defer_loading": True}
ANSWER = {"role": "assistant", "content": "Hello."}


def system(*blocks: Any, **fields: Any) -> dict[str, Any]:
    return {"role": "system", "content": list(blocks), **fields}


def change(kind: str, name: str) -> dict[str, Any]:
    return {"type": f"tool_{kind}", "tool": {"type": "tool_reference", "name": name}}


def offered(served: Served, *messages: Any) -> list[str]:
    """Return which tools the prompt of a conversation declares."""
    answer = post(served, messages=[*ASK, *messages, *ASK], tools=[TOOL, HIDDEN])
    assert answer.status_code == 200, answer.text
    assert IGNORED not in answer.headers
    names = ("f", "hidden", "new")
    return [name for name in names if f"declaration:{name}{{" in prompt_of(served)]


def test_messages_change_which_tools_are_offered(serve: Serve) -> None:
    served = serve()
    new = {"name": "new", "input_schema": {"type": "object"}}
    defined = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": new}}
    assert offered(served) == ["f"]
    assert offered(served, system(change("removal", "f"))) == []
    assert offered(served, system(change("addition", "hidden"))) == ["f", "hidden"]
    assert offered(served, system(defined, change("removal", "f"))) == ["new"]
    again = system(change("addition", "f"), clear_at="next_user_message")
    assert offered(served, system(defined, change("removal", "f")), ANSWER, again) == ["f", "new"]
    text = {"type": "text", "text": "Count by hand."}
    assert offered(served, system(change("removal", "f"), text)) == []
    assert "<|turn>system\nCount by hand.<turn|>" in prompt_of(served)


def test_changes_of_servers_tools_are_named(serve: Serve) -> None:
    hosted = {"type": "web_search_20250305", "name": "web_search"}
    blocks: list[dict[str, Any]] = [
        {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": hosted}},
        {"type": "tool_removal", "tool": {"type": "mcp_toolset_reference", "server_name": "s"}},
    ]
    answer = post(serve(), messages=[*ASK, system(*blocks)])
    named = "messages[1].content[0], messages[1].content[1]"
    assert (answer.status_code, answer.headers[IGNORED]) == (200, named)


def test_an_addition_of_no_tool_is_refused(serve: Serve) -> None:
    answer = post(serve(), messages=[*ASK, system(change("addition", "g"))], tools=[TOOL])
    assert answer.status_code == 400
    assert "'messages[1].content[0].tool.name' is 'g'" in answer.json()["error"]["message"]


def test_a_format_belongs_to_the_request(serve: Serve) -> None:
    form = {"type": "json_schema", "schema": {"type": "object"}}
    answer = post(serve(), messages=[*ASK, system(output_config={"format": form})])
    assert answer.status_code == 400
    assert "messages[1].output_config.format" in answer.json()["error"]["message"]


def test_the_last_effort_of_a_conversation_holds(serve: Serve) -> None:
    served = serve()

    def budget(*messages: Any, **fields: Any) -> int:
        config: dict[str, Any] = {"thinking": {"type": "adaptive"}, "max_tokens": 4000, **fields}
        answer = post(served, messages=[*ASK, *messages, *ASK], **config)
        assert answer.status_code == 200, answer.text
        thinking = served.engine.requests[-1].thinking
        assert thinking is not None
        return thinking.max_tokens

    high: Any = {"output_config": {"effort": "high"}}
    least, most = budget(output_config={"effort": "low"}), budget(**high)
    assert least < most
    low = {"role": "system", "output_config": {"effort": "low"}}
    assert budget(low) == least
    assert "<|turn>system\n<turn|>" not in prompt_of(served)
    assert budget(low, **high) == least
    assert budget(low, system(output_config={"effort": "high"})) == most
    text = {"type": "text", "text": "Go on."}
    assert budget(low, system(text, output_config={})) == least


def test_callers_of_a_tool_that_a_message_defines_are_named(serve: Serve) -> None:
    new = {"name": "new", "input_schema": {"type": "object"}, "allowed_callers": ["direct"]}

    def ignored(**fields: Any) -> str | None:
        tool = {"type": "tool_definition", "definition": {**new, **fields}}
        added = system({"type": "tool_addition", "tool": tool})
        answer = post(serve(), messages=[*ASK, added])
        assert answer.status_code == 200, answer.text
        named: str | None = answer.headers.get(IGNORED)
        return named

    assert ignored() is None
    code = ignored(allowed_callers=["direct", "code_execution_20260120"])
    assert code == "messages[1].content[0].tool.definition.allowed_callers"


def summed_up(*changes: Any) -> dict[str, Any]:
    """Return an answer that begins with a summary of a range with these changes of tools."""
    block = {"type": "compaction", "content": "We said hello.", "tool_changes": list(changes)}
    return {"role": "assistant", "content": [block, {"type": "text", "text": "Hello again."}]}


def test_a_summary_changes_which_tools_are_offered(serve: Serve) -> None:
    served = serve()
    new = {"name": "new", "input_schema": {"type": "object"}}
    defined = {"type": "tool_addition", "tool": {"type": "tool_definition", "definition": new}}
    assert offered(served, summed_up()) == ["f"]
    assert offered(served, summed_up(defined, change("removal", "f"))) == ["new"]
    added = system(change("addition", "f"))
    assert offered(served, summed_up(change("removal", "f")), *ASK, added) == ["f"]
    answer = post(serve(), messages=[*ASK, summed_up(change("addition", "g"))], tools=[TOOL])
    assert answer.status_code == 400
    named = "'messages[1].content[0].tool_changes[0].tool.name' is 'g'"
    assert named in answer.json()["error"]["message"]


def test_a_summary_stands_for_the_conversation_before_it(serve: Serve) -> None:
    served = serve()
    told = {"role": "user", "content": "Told before."}
    failed = {"role": "assistant", "content": [{"type": "compaction", "content": None}]}

    def prompt(*messages: Any) -> str:
        answer = post(served, messages=list(messages))
        assert answer.status_code == 200, answer.text
        return prompt_of(served)

    asked = prompt(told, ANSWER, failed, told, summed_up(), *ASK)
    assert "Told before." not in asked
    summary = asked.index("<|turn>user\n[Summary of our conversation so far]\nWe said hello.")
    assert summary < asked.index("<|turn>model\nHello again.")
    assert asked == prompt(summed_up(), *ASK)
    alone = {"role": "assistant", "content": summed_up()["content"][:1]}
    assert prompt(told, alone).endswith("We said hello.<turn|>\n<|turn>model\n")
    assert "Told before." in prompt(told, failed, *ASK)
