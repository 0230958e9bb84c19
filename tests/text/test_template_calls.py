"""Templates that read calls, their arguments or the tools in forms of their own."""

from __future__ import annotations

import json
from typing import Any

import pytest

from quire.text.template import ChatTemplate

TOOL = {
    "type": "function",
    "function": {"name": "now", "parameters": {"type": "object", "properties": {}}},
}
USER = {"role": "user", "content": "Hi"}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "noon"}
ARGUMENTS = {"zone": 1, "place": "Köln"}
WRITTEN = '<C>now|{"zone": 1, "place": "Köln"}</C>'

# As DeepSeek R1, its distillates and V3 have it.
ONLY_IF_NULL = (
    "{% for m in messages %}{% if m['role'] == 'assistant' and m['content'] is none %}"
    "{% for t in m['tool_calls'] %}<C>"
    "{{ t['function']['name'] + '|' + t['function']['arguments'] }}</C>{% endfor %}"
    "{% elif m['content'] is not none %}[{{ m['role'] + ':' + m['content'] }}]"
    "{% endif %}{% endfor %}"
)
# As Functionary has it.
TEXT_ARGUMENTS = (
    "{% for m in messages %}{% if m.tool_calls %}{% for t in m.tool_calls %}"
    "<C>{{ t.function.name + '|' + t.function.arguments }}</C>{% endfor %}{% else %}"
    "[{{ m.role + ':' + m.content }}]{% endif %}{% endfor %}"
)
PRINTED_ARGUMENTS = TEXT_ARGUMENTS.replace(" + '|' + t.function.", " }}|{{ t.function.")
JSON_ARGUMENTS = PRINTED_ARGUMENTS.replace("arguments }}", "arguments | tojson }}")
# As Phi-4-mini has it.
SYSTEM_TOOLS = (
    "{% for message in messages %}{% if message['role'] == 'system' and 'tools' in message and "
    "message['tools'] is not none %}{{ '<|system|>' + message['content'] + '<|tool|>' + "
    "message['tools'] + '<|/tool|><|end|>' }}{% else %}{{ '<|' + message['role'] + '|>' + "
    "message['content'] + '<|end|>' }}{% endif %}{% endfor %}"
)


def calling(**content: Any) -> dict[str, Any]:
    call = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": ARGUMENTS}}
    return {"role": "assistant", **content, "tool_calls": [call]}


def rendered(source: str, *messages: dict[str, Any], tools: Any = (TOOL,)) -> str:
    return ChatTemplate({"default": source}, {}).render(messages, tools=tools)


@pytest.mark.parametrize("tools", [None, (TOOL,)])
@pytest.mark.parametrize("content", [{}, {"content": None}, {"content": ""}, {"content": []}])
@pytest.mark.parametrize(
    "source", [ONLY_IF_NULL, TEXT_ARGUMENTS, PRINTED_ARGUMENTS, JSON_ARGUMENTS]
)
def test_calls_come_out_whole(source: str, content: dict[str, Any], tools: Any) -> None:
    found = rendered(source, USER, calling(**content), RESULT, tools=tools)
    assert found == f"[user:Hi]{WRITTEN}[tool:noon]"


def test_text_beside_calls_has_a_message_of_its_own_where_the_template_writes_one_of_them() -> None:
    found = rendered(ONLY_IF_NULL, USER, calling(content="Let me look."), RESULT)
    assert found == f"[user:Hi][assistant:Let me look.]{WRITTEN}[tool:noon]"


def test_arguments_that_are_a_text_already_stay() -> None:
    message = calling()
    message["tool_calls"][0]["function"]["arguments"] = '{"zone":1}'
    assert '<C>now|{"zone":1}</C>' in rendered(TEXT_ARGUMENTS, USER, message, RESULT)


def test_a_template_that_shows_no_arguments_gets_messages_as_they_are() -> None:
    source = "{% for m in messages %}{{ m.keys() | list }}{{ m.content }}{% endfor %}"
    assert rendered(source, calling()) == "['role', 'tool_calls']"


@pytest.mark.parametrize("asks", [True, False])
def test_tools_stand_in_the_system_message_where_the_template_reads_them(asks: bool) -> None:
    said = [{"role": "system", "content": "S"}] if asks else []
    found = rendered(SYSTEM_TOOLS, *said, USER)
    functions = json.dumps([TOOL["function"]], ensure_ascii=False)
    system = "S" if asks else ""
    assert found == f"<|system|>{system}<|tool|>{functions}<|/tool|><|end|><|user|>Hi<|end|>"
    assert "<|tool|>" not in rendered(SYSTEM_TOOLS, *said, USER, tools=None)


def test_tools_may_be_read_as_a_list() -> None:
    source = SYSTEM_TOOLS.replace("message['tools'] +", "message['tools'] | tojson +")
    assert f"<|tool|>{json.dumps([TOOL])}<|/tool|>" in rendered(source, USER)


def test_tools_stay_out_of_messages_where_the_template_reads_the_variable() -> None:
    source = "{{ tools | tojson }}{% for m in messages %}{{ m | tojson }}{% endfor %}"
    assert rendered(source, USER) == json.dumps([TOOL]) + json.dumps(USER)
