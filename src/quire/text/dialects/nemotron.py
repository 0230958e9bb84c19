"""Nemotron: JSON calls in tags, in an array (Nano 2, Super) or one by one (Mini, Minitron).

Source: the chat templates of nvidia/NVIDIA-Nemotron-Nano-9B-v2 and Llama-3_3-Nemotron-Super-49B
(`<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>`, reasoning in `<think>`) and the model
card of nvidia/Nemotron-Mini-4B-Instruct (`<toolcall> {...} </toolcall>`). Nemotron 3 writes XML as
Qwen3-Coder does.
"""

from __future__ import annotations

from functools import partial

from quire.text.dialects.base import THINK, Dialect, Forced
from quire.text.dialects.grammar import array_of_calls, json_rules, wrapped
from quire.text.dialects.marker_parser import Layout, MarkerParser, enclosing
from quire.text.dialects.readers import json_section

BEGIN, END = "<TOOLCALL>", "</TOOLCALL>"
MINI_BEGIN, MINI_END = "<toolcall>", "</toolcall>"
_LAYOUT = Layout(
    reasoning=enclosing(THINK),
    sections={BEGIN: json_section(END)},
)
_MINI = Layout(sections={MINI_BEGIN: json_section(MINI_END)})


def _forced_mini(forced: Forced) -> str:
    calls = json_rules(forced.tools)
    return wrapped(forced, MINI_BEGIN, MINI_END, call=calls, within='" "', between='" "')


NEMOTRON = Dialect(
    name="nemotron",
    recognises=lambda template, model_type: BEGIN in template,
    build=partial(MarkerParser, _LAYOUT),
    reasoning=THINK,
    forced=lambda forced: array_of_calls(forced, BEGIN, END),
    openers=(BEGIN,),
)
NEMOTRON_MINI = Dialect(
    name="nemotron_mini",
    recognises=lambda template, model_type: MINI_BEGIN in template or model_type == "nemotron",
    build=partial(MarkerParser, _MINI),
    forced=_forced_mini,
    openers=(MINI_BEGIN,),
)
