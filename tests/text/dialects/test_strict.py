"""Strict tools: the model calls as it likes, but what it calls them with meets their schemas."""

from __future__ import annotations

import json
import random
from functools import cache

import numpy as np
import pytest

from quire.constraints.grammar import GrammarCompiler, GrammarState
from quire.core.request import FinishReason, GrammarSpec
from quire.text.dialects import DIALECTS, Tool
from tests.support.backend import backend_of
from tests.support.folding import fold
from tests.text.dialects.scripts import STOP_TOKEN, TOOLS, encode, events, tokenizer, vocabulary
from tests.text.dialects.test_forced import CHECKED, FORCING, GOOD, check, endings, set_bits

LOOSE = Tool("get_rain")
"""A tool that is not strict. The service passes it without a schema."""

UNBOUND = {"llama3", "harmony", "glm4_9b", "kimi_k3"}
"""Dialects that bind the whole answer, because only a call's place or a header marks it."""


LEADS = {"dsml": "<"}
"""Text that stands before the opener."""

NAMED = {"glm4_9b"}
"""The name of a tool is what marks a call: with another it is text, and chance writes none."""


@cache
def compiler_of(dialect: str) -> GrammarCompiler:
    known = tokenizer(dialect)
    stop = known.token_id(STOP_TOKEN)
    assert stop is not None
    return GrammarCompiler(backend_of(known), known.vocab_size, frozenset({stop}))


def state_of(dialect: str, tools: list[Tool]) -> GrammarState:
    source = DIALECTS[dialect].strict_grammar(tools, vocabulary(dialect))
    assert source is not None
    opener = DIALECTS[dialect].opener(vocabulary(dialect))
    assert (opener is None) == (dialect in UNBOUND)
    return compiler_of(dialect).compile(
        GrammarSpec("lark", source, opener=opener, lazy=opener is not None), "tools"
    )


def permits(state: GrammarState, token: int) -> bool:
    mask = state.mask()
    return mask is None or bool(mask[token // 32] >> token % 32 & 1)


def permitted(state: GrammarState, tokens: int) -> list[int]:
    """Return which of the first `tokens` tokens the grammar allows next."""
    mask = state.mask()
    if mask is None:
        return list(range(tokens))
    return set_bits(mask.view(np.uint8), tokens)


def lets_through(dialect: str, text: str) -> bool:
    """Return whether an answer may be this text and then end."""
    state = state_of(dialect, [TOOLS[0], LOOSE])
    for token in encode(dialect, [text, STOP_TOKEN]):
        if not permits(state, token):
            return False
        state.accept(token)
    return True


@pytest.mark.parametrize("dialect", FORCING)
def test_calls_are_bound_and_all_else_is_free(dialect: str) -> None:
    call = GOOD[dialect]
    if dialect == "harmony":
        said = "<|channel|>analysis<|message|>Hm.<|end|><|start|>assistant"
        assert lets_through(dialect, "<|channel|>final<|message|>Sure.")
    elif dialect == "llama3":
        said = ""
        assert lets_through(dialect, " It is [3] and {4}.")
        assert lets_through(dialect, call + "; " + call)
    elif dialect == "glm4_9b":
        said = ""
        assert lets_through(dialect, "get_weather\nis a tool, and {4}.")
        assert lets_through(dialect, call + "\n" + call)
    elif dialect == "kimi_k3":  # calls are the last part of a message
        said = "Let me see.\n"
        assert lets_through(dialect, said + "<|close|>response<|sep|><|close|>message<|sep|>")
        start, end = call.index("<|open|>call"), call.index("<|close|>tools")
        assert lets_through(dialect, said + call[:end] + call[start:end] + call[end:])
    else:
        said = "Let me see.\n"
        assert lets_through(dialect, said)
        assert lets_through(dialect, said + call + "\nAnd " + call + "\n")
    assert lets_through(dialect, said + call)
    unknown = call.replace("get_weather", "get_snow")
    assert lets_through(dialect, said + unknown) == (dialect in NAMED)
    assert not lets_through(dialect, said + call.replace("city", "town"))


@pytest.mark.parametrize("dialect", FORCING)
def test_a_tool_that_is_not_strict_takes_any_arguments(dialect: str) -> None:
    call = GOOD[dialect].replace("get_weather", "get_rain").replace("city", "town")
    assert lets_through(dialect, call)


@pytest.mark.parametrize("dialect", [name for name in FORCING if name not in {"granite", *NAMED}])
def test_whatever_a_model_says_its_calls_meet_the_schema(dialect: str) -> None:
    known, calls = tokenizer(dialect), 0
    stop, opener = known.token_id(STOP_TOKEN), DIALECTS[dialect].opener(vocabulary(dialect))
    last = known.token_id("<|return|>")
    ending = endings(dialect, b'"', b"}", b"]", b"<", b"{")
    for seed in range(8):
        state, draw, ids = state_of(dialect, [CHECKED]), random.Random(seed), list[int]()
        for _ in range(500):
            allowed = permitted(state, known.vocab_size)
            if state.mask() is None:
                allowed = [stop, opener, *draw.sample(allowed, 3)]
            elif len(allowed) > 1 and opener is None and draw.random() < 0.9:
                allowed = [token for token in allowed if token not in (stop, last)]
            likely = [token for token in allowed if token in ending]
            token = draw.choice(likely if likely and draw.random() < 0.5 else allowed)
            if token == opener and state.mask() is None:
                for lead in encode(dialect, [LEADS.get(dialect, "")]):
                    state.accept(lead)
                    ids.append(lead)
            state.accept(token)
            if token == stop:
                break
            ids.append(token)
        reason = FinishReason.STOP if token == stop else FinishReason.LENGTH
        for call in fold(events(dialect, ids, tools=[CHECKED], finish=reason)).tool_calls:
            calls += 1
            check(json.loads(call.arguments))
    assert calls > 0


def test_without_a_token_to_go_by_nothing_is_bound() -> None:
    assert DIALECTS["none"].strict_grammar(TOOLS, vocabulary("none")) is None
    assert DIALECTS["qwen3"].strict_grammar(TOOLS, vocabulary("qwen3", with_ids=False)) is None
