"""Nemotron: JSON calls in tags, in an array (Nano 2, Super) or one by one (Mini, Minitron).

Source: the chat templates of nvidia/NVIDIA-Nemotron-Nano-9B-v2 and Llama-3_3-Nemotron-Super-49B
(`<TOOLCALL>[{"name": ..., "arguments": {...}}]</TOOLCALL>`, reasoning in `<think>`) and the model
card of nvidia/Nemotron-Mini-4B-Instruct (`<toolcall> {...} </toolcall>`). Nemotron 3 writes XML as
Qwen3-Coder does.
"""

from __future__ import annotations

from quire.text.dialects.base import Dialect
from quire.text.dialects.grammar import array_of_calls, wrapped
from quire.text.dialects.machine import Layout, Machine
from quire.text.dialects.readers import json_section

BEGIN, END = "<TOOLCALL>", "</TOOLCALL>"
MINI_BEGIN, MINI_END = "<toolcall>", "</toolcall>"
REASONING = ("<think>", "</think>")
_LAYOUT = Layout(
    reasoning=(frozenset({REASONING[0]}), frozenset({REASONING[1]})),
    sections={BEGIN: json_section(END)},
)
_MINI = Layout(sections={MINI_BEGIN: json_section(MINI_END)})

NEMOTRON = Dialect(
    name="nemotron",
    recognises=lambda template, model_type: BEGIN in template,
    build=lambda start: Machine(_LAYOUT, start),
    reasoning=REASONING,
    forced=lambda forced: array_of_calls(forced, BEGIN, END),
    openers=(BEGIN,),
)
NEMOTRON_MINI = Dialect(
    name="nemotron_mini",
    recognises=lambda template, model_type: MINI_BEGIN in template or model_type == "nemotron",
    build=lambda start: Machine(_MINI, start),
    forced=lambda forced: wrapped(forced, MINI_BEGIN, MINI_END, '" "', within='" "'),
    openers=(MINI_BEGIN,),
)
