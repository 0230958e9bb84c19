"""The chat template writes Gemma 4's turns, thoughts, tools and pictures."""

from typing import Any

import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from quire.demo import MODEL_DIR

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
            "required": ["city"],
        },
    },
}
DECLARED = (
    '<|tool>declaration:get_weather{description:<|"|>Weather of a city<|"|>,parameters:{properties:'
    '{city:{type:<|"|>STRING<|"|>},days:{type:<|"|>INTEGER<|"|>}},required:[<|"|>city<|"|>],'
    'type:<|"|>OBJECT<|"|>}}<tool|>'
)
QUESTION = {"role": "user", "content": " Weather in Rome? "}
CALL = {
    "role": "assistant",
    "content": None,
    "tool_calls": [
        {
            "id": "c1",
            "type": "function",
            "function": {"name": "get_weather", "arguments": {"days": 2, "city": "Rome"}},
        }
    ],
}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
CALLED = '<|tool_call>call:get_weather{city:<|"|>Rome<|"|>,days:2}<tool_call|>'
RESPONDED = '<|tool_response>response:get_weather{value:<|"|>sunny<|"|>}<tool_response|>'
ASKED = "<|turn>user\nWeather in Rome?<turn|>\n<|turn>model\n"


def render(messages: list[dict[str, Any]], **options: Any) -> str:
    source = (MODEL_DIR / "chat_template.jinja").read_text()
    environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    options.setdefault("add_generation_prompt", True)
    return environment.from_string(source).render(messages=messages, bos_token="<bos>", **options)


def test_turns() -> None:
    messages = [
        {"role": "system", "content": "Be brief."},
        QUESTION,
        {"role": "assistant", "content": "Sunny."},
        {"role": "user", "content": "Thanks"},
    ]
    assert render(messages) == (
        "<bos><|turn>system\nBe brief.<turn|>\n<|turn>user\nWeather in Rome?<turn|>\n"
        "<|turn>model\nSunny.<turn|>\n<|turn>user\nThanks<turn|>\n<|turn>model\n"
    )


def test_no_system_turn_where_nothing_belongs_in_it() -> None:
    assert render([QUESTION], enable_thinking=False) == "<bos>" + ASKED


def test_thinking_is_asked_for_in_the_system_turn() -> None:
    head = "<bos><|turn>system\n<|think|><turn|>\n"
    assert render([QUESTION], enable_thinking=True) == head + ASKED


def test_tools_are_declared_in_the_system_turn() -> None:
    head = f"<bos><|turn>system\n{DECLARED}<turn|>\n"
    assert render([QUESTION], tools=[WEATHER]) == head + ASKED


def test_the_response_of_a_tool_stays_in_the_turn_of_the_model() -> None:
    assert render([QUESTION, CALL, RESULT]) == f"<bos>{ASKED}{CALLED}{RESPONDED}"
    answered = render([QUESTION, CALL, RESULT, {"role": "assistant", "content": "Sunny."}])
    assert answered == f"<bos>{ASKED}{CALLED}{RESPONDED}Sunny.<turn|>\n<|turn>model\n"


def test_a_new_question_closes_a_turn_left_open() -> None:
    text = render([QUESTION, CALL, RESULT, {"role": "user", "content": "And?"}])
    assert text.endswith(f"{RESPONDED}<turn|>\n<|turn>user\nAnd?<turn|>\n<|turn>model\n")


def test_thoughts_of_earlier_turns_are_dropped() -> None:
    thought = "<|channel>thought\nHm.\n<channel|>Sunny."
    messages = [QUESTION, {"role": "assistant", "content": thought}, QUESTION]
    assert "Hm." not in render(messages)
    assert "<|turn>model\nSunny.<turn|>" in render(messages)


def test_the_thought_before_a_call_stays_until_the_next_question() -> None:
    called = {**CALL, "reasoning_content": "Look it up."}
    kept = f"<|channel>thought\nLook it up.\n<channel|>{CALLED}"
    assert kept in render([QUESTION, called, RESULT])
    assert "Look it up." not in render([QUESTION, called, RESULT, QUESTION])


@pytest.mark.parametrize(
    ("part", "mark"),
    [("image", "<|image|>"), ("image_url", "<|image|>"), ("input_audio", "<|audio|>")],
)
def test_media_become_placeholders_where_they_stand(part: str, mark: str) -> None:
    content = [{"type": "text", "text": "Look:"}, {"type": part}, {"type": "text", "text": "So?"}]
    assert f"Look:{mark}So?<turn|>" in render([{"role": "user", "content": content}])


def test_values_of_every_json_type() -> None:
    arguments = {"a": None, "b": True, "c": 1.5, "d": [1, "x"], "e": {"k": "v"}}
    call = {"function": {"name": "f", "arguments": arguments}}
    text = render([{"role": "assistant", "content": "", "tool_calls": [call]}])
    assert 'call:f{a:null,b:true,c:1.5,d:[1,<|"|>x<|"|>],e:{k:<|"|>v<|"|>}}' in text
