"""Renders conversations with the shipped template, so that training sees what a server sends."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, Template

from quire.demo.skills import SkillAnswer
from training.data.item import Item, Message, Tool

REPOSITORY = Path(__file__).resolve().parent.parent
MODEL_DIR = REPOSITORY / "src" / "quire" / "demo" / "model"

END_OF_TURN = "<turn|>"
AWAIT_TOOL = "<|tool_response>"


@cache
def template() -> Template:
    """The chat template that ships with the model."""
    environment = Environment(trim_blocks=True, lstrip_blocks=True)
    return environment.from_string((MODEL_DIR / "chat_template.jinja").read_text())


def render(
    messages: list[Message],
    tools: list[Tool] | None = None,
    enable_thinking: bool = False,
    add_generation_prompt: bool = True,
) -> str:
    """The prompt text of a conversation."""
    return template().render(
        messages=messages,
        tools=tools,
        enable_thinking=enable_thinking,
        add_generation_prompt=add_generation_prompt,
        bos_token="<bos>",
    )


def prompt_of(item: Item) -> str:
    """What the model reads before it answers."""
    return render(item.messages, item.tools, item.enable_thinking)


def answer_of(item: Item) -> str:
    """What the model should write, its end token included."""
    answer = item.answer
    thought = answer.get("reasoning_content")
    head = "" if thought is None else f"<|channel>thought\n{thought}\n<channel|>"
    if "tool_calls" not in answer:
        return f"{head}{answer['content']}{END_OF_TURN}"
    bare = {**answer, "content": ""}
    bare.pop("reasoning_content", None)
    turn = render([bare], add_generation_prompt=False)
    return head + turn.removeprefix("<bos><|turn>model\n") + AWAIT_TOOL


def parse(text: str) -> SkillAnswer:
    """What the model wrote, taken apart: thought, tool calls and the rest."""
    thought = None
    if match := re.match(r"<\|channel>thought\n(.*?)\n?<channel\|>", text, re.DOTALL):
        thought, text = match[1], text[match.end() :]
    found = re.findall(r"<\|tool_call>call:([^{]*)\{(.*?)\}<tool_call\|>", text, re.DOTALL)
    tool_calls = [{"name": name, "arguments": _arguments(body)} for name, body in found]
    for end in (END_OF_TURN, AWAIT_TOOL, "<eos>"):
        text = text.split(end)[0]
    return SkillAnswer("" if found else text, thought, tool_calls)


def _arguments(body: str) -> dict[str, Any]:
    """Flat arguments: strings between their quotes, anything else as a literal."""
    pattern = r'([^:,]+):(?:<\|"\|>(.*?)<\|"\|>|([^,]*))'
    literals = {"true": True, "false": False, "null": None}
    arguments: dict[str, Any] = {}
    for key, string, bare in re.findall(pattern, body, re.DOTALL):
        if bare in literals:
            arguments[key] = literals[bare]
        elif re.fullmatch(r"-?\d+", bare):
            arguments[key] = int(bare)
        else:
            arguments[key] = string
    return arguments
