"""Templates and ends of models that say neither in their files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from quire.core.end_tokens import end_token_ids
from quire.text.template import ChatTemplate

PICTURE, QUESTION = {"type": "image"}, {"type": "text", "text": "Why?"}
QUERY = "<|md_reserved_0|>query<|md_reserved_1|>Why?<|md_reserved_2|>"
GOT = (
    "<|im_start|>system\nYou should follow the instructions carefully and explain your answers in \
detail.<|im_end|><|im_start|>user\n<imgpad>\n"
)
PROMPTS = {
    "moondream1": f"<|endoftext|>{QUERY}",
    "deepseekocr": "<image>\nWhy?",
    "falcon_ocr": "<|image|>Why?\n<|OCR_PLAIN|>",
    "falcon_perception": "<|image|>Why?",
    "got_ocr2": f"{GOT}Why?<|im_end|><|im_start|>assistant\n",
    "moondream3": f"<|endoftext|>{QUERY}",
}
AGAIN = {
    "moondream1": f"Oh.{QUERY}",
    "deepseekocr": "Oh.<|endoftext|>Why?",
    "falcon_ocr": "Oh.<|end_of_query|>Why?\n<|OCR_PLAIN|>",
    "falcon_perception": "Oh.<|end_of_query|>Why?",
    "got_ocr2": "Oh.<|im_end|><|im_start|>user\nWhy?<|im_end|><|im_start|>assistant\n",
    "moondream3": f"Oh.{QUERY}",
}


def folder(path: Path, model_type: str) -> Path:
    (path / "config.json").write_text(json.dumps({"model_type": model_type}))
    return path


@pytest.mark.parametrize("model_type", PROMPTS)
def test_a_question_is_written_as_by_the_publisher(model_type: str, tmp_path: Path) -> None:
    template = ChatTemplate.open(folder(tmp_path, model_type), {"eos_token": "<|endoftext|>"})
    first = {"role": "user", "content": [PICTURE, QUESTION]}
    assert template.render([first]) == PROMPTS[model_type]
    answer = {"role": "assistant", "content": "Oh."}
    again = template.render([first, answer, {"role": "user", "content": "Why?"}])
    assert again == PROMPTS[model_type] + AGAIN[model_type]
    started = template.render([first, answer], continue_final=True)
    assert started == PROMPTS[model_type] + "Oh."


@pytest.mark.parametrize(
    ("model_type", "prompt"),
    [
        ("got_ocr2", f"{GOT} OCR: <|im_end|><|im_start|>assistant\n"),
        ("falcon_ocr", "<|image|>Extract the text content from this image.\n<|OCR_PLAIN|>"),
        (
            "moondream3",
            "<|endoftext|><|md_reserved_0|>describe<|md_reserved_1|>normal<|md_reserved_2|>",
        ),
    ],
)
def test_a_picture_alone_is_asked_about(model_type: str, prompt: str, tmp_path: Path) -> None:
    template = ChatTemplate.open(folder(tmp_path, model_type), {})
    assert template.render([{"role": "user", "content": [PICTURE]}]) == prompt


def test_the_files_of_a_model_come_first(tmp_path: Path) -> None:
    (folder(tmp_path, "falcon_ocr") / "chat_template.jinja").write_text("{{ messages | length }}")
    assert ChatTemplate.open(tmp_path, {}).render([{"role": "user", "content": "hi"}]) == "1"


def test_an_end_that_only_published_code_knows(tmp_path: Path) -> None:
    added = [{"id": 263, "content": "<|end_of_query|>"}, {"id": 11, "content": "<|end_of_text|>"}]
    (tmp_path / "tokenizer.json").write_text(json.dumps({"added_tokens": added}))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|end_of_text|>"}))
    assert end_token_ids(folder(tmp_path, "llama")) == {11}
    assert end_token_ids(folder(tmp_path, "falcon_ocr")) == {11, 263}
    # Points, sizes and masks are no text.
    assert end_token_ids(folder(tmp_path, "falcon_perception")) == {11, 263, 240, 241, 262}
    other = {"model_type": "falcon_perception", "coord_token_id": 7}
    (tmp_path / "config.json").write_text(json.dumps(other))
    assert end_token_ids(tmp_path) == {11, 263, 7, 241, 262}


BOS, EOS = "<｜begin▁of▁sentence｜>", "<｜end▁of▁sentence｜>"
TOOL = {"type": "function", "function": {"name": "now", "parameters": {"type": "object"}}}
ARGUMENTS = {"zone": 1, "place": "a\n<b>", "all": True}
CALL = {"id": "c1", "type": "function", "function": {"name": "now", "arguments": ARGUMENTS}}
RESULT = {"role": "tool", "tool_call_id": "c1", "content": "noon"}
CALLS = (
    '\n\n<｜DSML｜function_calls>\n<｜DSML｜invoke name="now">\n'
    '<｜DSML｜parameter name="zone" string="false">1</｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="place" string="true">a\n<b></｜DSML｜parameter>\n'
    '<｜DSML｜parameter name="all" string="false">true</｜DSML｜parameter>\n'
    "</｜DSML｜invoke>\n</｜DSML｜function_calls>"
)
RESULTS = "\n\n<function_results>\n<result>noon</result>\n</function_results>\n\n"


def said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


@pytest.mark.parametrize("thinks", [True, False])
def test_reasoning_of_the_last_question_alone_is_in_prompts_of_deepseek_v32(
    thinks: bool, tmp_path: Path
) -> None:
    template = ChatTemplate.open(folder(tmp_path, "deepseek_v32"), {})
    thought = {"role": "assistant", "content": "Ok.", "reasoning_content": "Hm."}
    calling = {"role": "assistant", "reasoning_content": "Ask.", "tool_calls": [CALL]}
    history = [said("a"), thought, said("b"), {**calling, "content": None}, RESULT]
    opened, reasoned = ("<think>", "Ask.</think>") if thinks else ("</think>", "")
    assert template.render(history, enable_thinking=thinks) == (
        f"{BOS}<｜User｜>a<｜Assistant｜></think>Ok.{EOS}<｜User｜>b<｜Assistant｜>{opened}{reasoned}"
        f"{CALLS}{EOS}{RESULTS}{opened}"
    )
    again = template.render([*history, thought, said("c")], enable_thinking=thinks)
    assert "Ask." not in again
    assert "Hm." not in again
    assert again.endswith(f"<｜User｜>c<｜Assistant｜>{opened}")


def test_tools_follow_the_system_message_of_deepseek_v32(tmp_path: Path) -> None:
    template = ChatTemplate.open(folder(tmp_path, "deepseek_v32"), {})
    for system in ([], [{"role": "system", "content": "Be brief."}]):
        text = template.render([*system, said("a")], tools=[TOOL])
        started = "Be brief." if system else ""
        assert text.startswith(f"{BOS}{started}\n\n## Tools\nYou have access to a set of tools")
        function = json.dumps(TOOL["function"])
        end = f"<functions>\n{function}\n</functions>\n<｜User｜>a<｜Assistant｜></think>"
        assert text.endswith(end)


CALLED = (
    '<|open|>tools<|sep|><|open|>call tool="now" index="1"<|sep|>'
    '<|open|>argument key="zone" type="number"<|sep|>1<|close|>argument<|sep|>'
    '<|open|>argument key="place" type="string"<|sep|>a\n<b><|close|>argument<|sep|>'
    '<|open|>argument key="all" type="boolean"<|sep|>true<|close|>argument<|sep|>'
    '<|close|>call<|sep|><|open|>call tool="then" index="2"<|sep|><|close|>call<|sep|>'
    "<|close|>tools<|sep|>"
)


def in_xtml(attributes: str, content: str) -> str:
    return f"<|open|>message {attributes}<|sep|>{content}<|close|>message<|sep|><|end_of_msg|>"


@pytest.mark.parametrize("thinks", [True, False])
def test_results_are_in_the_order_of_the_calls_in_prompts_of_kimi_k3(
    thinks: bool, tmp_path: Path
) -> None:
    """As encoding_k3.py of mlx-vlm 0.7.10 writes the same messages."""
    template = ChatTemplate.open(folder(tmp_path, "kimi_k3"), {})
    then = {"id": "c2", "type": "function", "function": {"name": "then", "arguments": {}}}
    late = {"role": "tool", "tool_call_id": "c2", "content": "late"}
    calling = {"role": "assistant", "reasoning_content": "Ask.", "tool_calls": [CALL, then]}
    history = [said("a"), {**calling, "content": None}, late, RESULT]
    text = template.render(history, tools=[TOOL], enable_thinking=thinks, reasoning_effort="low")

    tools = '[{"function":{"name":"now","parameters":{"type":"object"}},"type":"function"}]'
    declared = "# Tools\nHere are the available tools, described in JSONSchema.\n\n"
    thought = "<|open|>think<|sep|>Ask.<|close|>think<|sep|>" if thinks else ""
    channel = "think" if thinks else "response"
    effort, expected = (
        "thinking_effort=low`.<|close|>",
        [
            in_xtml('role="system" type="tool-declare"', f"{declared}```json\n{tools}\n```"),
            in_xtml('role="user"', "a"),
            in_xtml(
                'role="assistant"',
                f"{thought}<|open|>response<|sep|><|close|>response<|sep|>{CALLED}",
            ),
            in_xtml('role="tool" tool="now" index="1"', "noon"),
            in_xtml('role="tool" tool="then" index="2"', "late"),
            f'<|open|>message role="assistant"<|sep|><|open|>{channel}<|sep|>',
        ],
    )
    assert text.startswith(expected[0])
    assert (effort in text) == thinks
    assert text.endswith("".join(expected[1:]))
