"""Plays texts through a dialect as a model would write them: as tokens of a real tokenizer."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

from quire.core.request import FinishReason, Output
from quire.text.codec import LocalCodec
from quire.text.detokenizer import Detokenizer
from quire.text.dialects import DIALECTS, Tool, Vocabulary
from quire.text.dialects.deepseek import ALL_BEGIN, ALL_END, BEGIN, END, SEPARATOR
from quire.text.events import Event
from quire.text.output import Answer, OutputStream
from quire.text.stops import StopMatcher, StopStrings
from quire.text.tokenizer import Tokenizer
from tests.support.folding import fold
from tests.text.made import CORPUS

_HERMES = ["<think>", "</think>", "<tool_call>", "</tool_call>"]
MARKERS = {
    "gemma4": [
        "<|channel>",
        "<channel|>",
        "<|tool_call>",
        "<tool_call|>",
        '<|"|>',
        "<|turn>",
        "<turn|>",
        "<|tool_response>",
    ],
    "qwen3": [*_HERMES, "<|im_start|>", "<|im_end|>"],
    "qwen3_coder": ["<tool_call>", "</tool_call>", "<|im_start|>", "<|im_end|>"],
    "llama3": ["<|python_tag|>", "<|eom_id|>", "<|eot_id|>", "<|start_header_id|>"],
    "mistral": ["[TOOL_CALLS]", "[ARGS]", "[CALL_ID]", "[THINK]", "[/THINK]", "[INST]", "[/INST]"],
    "dsml": [*_HERMES[:2], "｜DSML｜", "<｜Assistant｜>"],
    "deepseek": [*_HERMES[:2], BEGIN, END, SEPARATOR, ALL_BEGIN, ALL_END, "<｜Assistant｜>"],
    "glm4": [*_HERMES, "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>", "<|assistant|>"],
    "harmony": [
        "<|start|>",
        "<|channel|>",
        "<|message|>",
        "<|constrain|>",
        "<|end|>",
        "<|call|>",
        "<|return|>",
    ],
    "granite": ["<|tool_call|>", "<|start_of_role|>", "<|end_of_role|>"],
    "kimi_k2": [
        *_HERMES[:2],
        "<|tool_calls_section_begin|>",
        "<|tool_calls_section_end|>",
        "<|tool_call_begin|>",
        "<|tool_call_argument_begin|>",
        "<|tool_call_end|>",
    ],
    "kimi_k3": ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"],
    "muse": [
        *("<|start|>", "<|message|>", "<|eom|>", "<|eot|>"),
        *("<atem:function_calls>", "</atem:function_calls>"),
    ],
    "minimax": [*_HERMES[:2], "<minimax:tool_call>", "</minimax:tool_call>"],
    "seed": ["<seed:think>", "</seed:think>", "<seed:tool_call>", "</seed:tool_call>"],
    "lfm2": [*_HERMES[:2], "<|tool_call_start|>", "<|tool_call_end|>", "<|im_start|>"],
    "cohere": [
        "<|START_THINKING|>",
        "<|END_THINKING|>",
        "<|START_ACTION|>",
        "<|END_ACTION|>",
        "<|START_RESPONSE|>",
        "<|START_TEXT|>",
        "<|END_TEXT|>",
        "<|END_RESPONSE|>",
        "<|CHATBOT_TOKEN|>",
    ],
    "jamba": ["<tool_calls>", "</tool_calls>", "<|bom|>", "<|assistant|>"],
    "hunyuan": [*_HERMES[:2], "<tool_calls>", "</tool_calls>", "<answer>", "</answer>"],
    "apertus": [
        "<|inner_prefix|>",
        "<|inner_suffix|>",
        "<|tools_prefix|>",
        "<|tools_suffix|>",
        "<|assistant_start|>",
    ],
    "hy3": [
        *_HERMES,
        "<tool_calls>",
        "</tool_calls>",
        "<tool_sep>",
        "<arg_key>",
        "</arg_key>",
        "<arg_value>",
        "</arg_value>",
    ],
    "longcat": [
        *("<longcat_think>", "</longcat_think>", "<longcat_tool_call>", "</longcat_tool_call>"),
        *("<longcat_arg_key>", "</longcat_arg_key>"),
        *("<longcat_arg_value>", "</longcat_arg_value>"),
    ],
    "nemotron": [*_HERMES[:2], "<TOOLCALL>", "</TOOLCALL>"],
    "nemotron_mini": ["<toolcall>", "</toolcall>"],
    "olmo3": [*_HERMES[:2], "<function_calls>", "</function_calls>", "<|im_start|>"],
    "phi4": [*_HERMES[:2], "<|tool_call|>", "<|/tool_call|>", "<|assistant|>"],
    "ernie": [*_HERMES, "<response>", "</response>"],
    "glm4_9b": [*_HERMES[:2], "<answer>", "</answer>", "<|assistant|>"],
    "none": [],
}
STOP_TOKEN = "<stop>"

TOOLS = [
    Tool(
        "get_weather",
        {
            "type": "object",
            "properties": {
                "city": {"type": "string"},
                "days": {"type": "integer"},
                "exact": {"type": "boolean"},
                "unit": {"type": "string", "enum": ["celsius", "fahrenheit"]},
                "tags": {"type": "array", "items": {"type": "string"}},
                "where": {"type": "object", "properties": {"zip": {"type": "string"}}},
                "limit": {"type": ["number", "null"]},
            },
            "required": ["city"],
        },
    ),
    Tool("db.find-all", {"type": "object", "properties": {"q": {"type": "string"}}}),
    Tool("now", {"type": "object", "properties": {}}),
]


@cache
def tokenizer(dialect: str, with_ids: bool = True) -> Tokenizer:
    """Return a byte-level tokenizer that has the dialect's markers as tokens, or has none of
    them.
    """
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    backend.train_from_iterator(CORPUS, trainer)
    backend.add_special_tokens([STOP_TOKEN, *(MARKERS[dialect] if with_ids else ())])
    return Tokenizer(Path(), LocalCodec(backend), {"eos_token": STOP_TOKEN})


def vocabulary(dialect: str, with_ids: bool = True) -> Vocabulary:
    """Return the dialect's view of the tokenizer's vocabulary."""
    known = tokenizer(dialect, with_ids)
    encode_bare = partial(known.encode, add_special_tokens=False)
    return Vocabulary(known.added_tokens, encode_bare, known.decode)


def encode(dialect: str, pieces: Iterable[str], with_ids: bool = True) -> list[int]:
    """Return token ids of each piece on its own, so that cuts between pieces are cuts between
    tokens.
    """
    made_with = tokenizer(dialect, with_ids)
    return [id for text in pieces for id in made_with.encode(text, add_special_tokens=False)]


def spelled(dialect: str, text: str) -> list[int]:
    """Return token ids of a text whose markers are spelled by ordinary tokens."""
    made_with = tokenizer(dialect)
    return [
        id for character in text for id in made_with.encode(character, add_special_tokens=False)
    ]


def events(
    dialect: str,
    ids: Sequence[int],
    *,
    prompt: str = "",
    tools: Sequence[Tool] = TOOLS,
    finish: FinishReason = FinishReason.STOP,
    stops: Sequence[str] = (),
    with_ids: bool = True,
    group: int = 1,
) -> list[Event]:
    """Return the events of an answer whose tokens come `group` at a time."""
    made_with = tokenizer(dialect, with_ids)
    parser = DIALECTS[dialect].parser(
        encode(dialect, [prompt], with_ids), tools, vocabulary(dialect, with_ids)
    )
    stream = OutputStream(Detokenizer(made_with), parser, StopMatcher(StopStrings(stops)))
    tokens = list(ids)
    if finish is FinishReason.STOP:
        tokens += encode(dialect, [STOP_TOKEN], with_ids)
    outputs = [Output("r", tuple(tokens[at : at + group])) for at in range(0, len(tokens), group)]
    last = outputs.pop() if outputs else Output("r")
    outputs.append(Output("r", last.token_ids, finish=finish, prompt_tokens=5))
    return [event for output in outputs for event in stream.feed(output)]


def answer(dialect: str, text: str, **how: Any) -> Answer:
    """Return the whole answer that a text says."""
    ids = encode(dialect, [text], how.get("with_ids", True))
    return fold(events(dialect, ids, **how))


def cut(text: str, places: Iterable[int], markers: Sequence[str]) -> list[str]:
    """Return `text` cut at `places` (any integers), but never inside one of `markers`."""
    found = [match.span() for m in markers for match in re.finditer(re.escape(m), text)]
    wanted = sorted({place % (len(text) + 1) for place in places})
    at = [p for p in wanted if not any(start < p < end for start, end in found)]
    return [text[i:j] for i, j in zip([0, *at], [*at, len(text)], strict=True) if i < j]
