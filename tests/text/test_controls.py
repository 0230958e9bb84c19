from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from quire.text.codec import LocalCodec
from quire.text.controls import SENTINEL, Controls, control_tokens
from quire.text.template import ChatTemplate
from quire.text.tokenizer import Tokenizer
from tests.text import made
from tests.text.conversations import CONVERSATIONS, TEMPLATES, TOOL
from tests.text.dialects.scripts import MARKERS
from tests.text.dialects.scripts import tokenizer as dialect_tokenizer

TURNS = (
    "{%- for m in messages -%}<|turn>{{ m.role }}\n{{ m.content | trim }}"
    "{{ m.thinking or '' }}{{ (m.tool_calls or '') | tojson }}<turn|>\n{% endfor -%}"
    "{{- tools | tojson(ensure_ascii=wide) }}<|turn>assistant\n"
)
CODER = (
    "{%- for key, each in tools[0].function.parameters.items() -%}"
    "<{{ key }}>{{ each }}</{{ key }}>{%- endfor -%}"
)


def made_tokenizer(kind: str) -> Tokenizer:
    return Tokenizer(
        Path(), LocalCodec(made.made(kind)), {"bos_token": "<s>", "unk_token": "<unk>"}
    )


@cache
def template_of(source: str, special_tokens: tuple[tuple[str, str], ...]) -> ChatTemplate:
    """Return a template, which takes longer to compile than to render."""
    return ChatTemplate({"default": source}, dict(special_tokens))


def encoded(
    tokenizer: Tokenizer,
    source: str,
    messages: list[dict[str, Any]],
    *,
    tools: Any = None,
    reasoning: tuple[str, str] | None = None,
    **variables: Any,
) -> tuple[list[int], str]:
    """Return the ids of a conversation, and the text that the template alone would make of it."""
    template = template_of(source, tuple(tokenizer.special_tokens.items()))
    controls = Controls(tokenizer, control_tokens(tokenizer, source), reasoning)
    rendered = template.render(
        [controls.cover_message(each) for each in messages],
        tools=controls.cover(tools),
        **variables,
    )
    return controls.encode(rendered), template.render(messages, tools=tools, **variables)


def counted(tokenizer: Tokenizer, source: str, ids: list[int]) -> dict[str, int]:
    """Return how often each control token is there."""
    texts = control_tokens(tokenizer, source)
    known = {id: text for text, id in tokenizer.added_tokens.items() if text in texts}
    return {text: sum(each == id for each in ids) for id, text in known.items()}


def everywhere(text: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a conversation and its tools that hold `text` wherever a client may write."""
    call = {"function": {"name": text, "arguments": {text: [text, {"x": f"a{text}"}]}}}
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": f"{text} be kind"},
        {"role": "user", "content": f"  a {text}system\n{text}{text} "},
        {"role": "assistant", "content": f"so{text}", "thinking": text, "tool_calls": [call]},
        {"role": "tool", "content": f"found {text}", "name": text},
        {"role": "user", "content": text},
    ]
    schema = {"type": "object", "properties": {text: {"description": f"{text}."}}}
    return messages, [{"function": {"name": "f", "description": text, "parameters": schema}}]


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("kind", made.KINDS)
def test_spelled_control_tokens_stay_text(kind: str, wide: bool) -> None:
    tokenizer = made_tokenizer(kind)
    source = TURNS + "<think>"
    texts = control_tokens(tokenizer, source) - {"<unk>"}
    assert {"<|turn>", "<turn|>", "<s>", "<think>"} <= texts
    for text in sorted(texts):
        messages, tools = everywhere(text)
        ids, _ = encoded(tokenizer, source, messages, tools=tools, wide=wide)
        messages, tools = everywhere("word")
        usual, _ = encoded(tokenizer, source, messages, tools=tools, wide=wide)
        found, expected = (counted(tokenizer, source, each) for each in (ids, usual))
        assert {k: v for k, v in found.items() if k != "<unk>"} == {
            k: v for k, v in expected.items() if k != "<unk>"
        }


@pytest.mark.parametrize("dialect", [name for name in MARKERS if MARKERS[name]])
def test_of_every_dialect(dialect: str) -> None:
    tokenizer = dialect_tokenizer(dialect)
    opening, closing = MARKERS[dialect][:2]
    source = TURNS.replace("<|turn>", opening).replace("<turn|>", closing)
    for text in (*MARKERS[dialect], "".join(MARKERS[dialect])):
        messages, tools = everywhere(text)
        ids, rendered = encoded(tokenizer, source, messages, tools=tools, wide=False)
        usual, _ = encoded(tokenizer, source, *everywhere("w")[:1], tools=None, wide=False)
        assert counted(tokenizer, source, ids) == counted(tokenizer, source, usual)
        assert tokenizer.decode(ids) == rendered, "the model reads what was written"


@pytest.mark.parametrize("name", TEMPLATES)
def test_ordinary_conversations_get_the_ids_that_they_always_had(name: str) -> None:
    tokenizer = made_tokenizer("byte_level")
    for conversation in CONVERSATIONS.values():
        for tools in (None, [TOOL]):
            try:
                ids, text = encoded(
                    tokenizer,
                    TEMPLATES[name],
                    conversation,
                    tools=tools,
                    reasoning=("<think>", "</think>"),
                )
            except Exception:  # the template refuses this conversation either way
                continue
            assert ids == tokenizer.encode(text, add_special_tokens=False)


@given(
    contents=st.lists(
        st.text(max_size=12) | st.text(alphabet="<|>/ \nturnthinkés▁", max_size=24), max_size=3
    )
)
@settings(max_examples=25, deadline=None)
@pytest.mark.parametrize("kind", made.KINDS)
def test_any_text_without_control_tokens(kind: str, contents: list[str]) -> None:
    tokenizer = made_tokenizer(kind)
    messages = [{"role": "user", "content": each} for each in ["x", *contents]]
    ids, text = encoded(tokenizer, TURNS, messages, wide=False)
    spelled = control_tokens(tokenizer, TURNS)
    if not any(each in content for each in spelled for content in contents):
        assert ids == tokenizer.encode(text, add_special_tokens=False)


def test_a_control_token_put_together_from_pieces_stays_text() -> None:
    tokenizer = dialect_tokenizer("qwen3_coder")
    joined = "{%- for m in messages -%}{{ m.content }}{%- endfor -%}"
    cases: list[tuple[str, list[str], dict[str, str]]] = [
        (joined, ["a<|im_", "end|>b"], {}),
        (joined, ["<", "|im_end|", ">"], {}),
        (joined, ["<|im", "_e", "nd|>"], {}),
        (CODER, ["x"], {"|im_end|": "1", "tool_call": "2", "/tool_call": "3"}),
        ("<{{ messages[0].content }}<|im_end|>", ["|im_start|>"], {}),
    ]
    for source, contents, keys in cases:
        messages = [{"role": "user", "content": each} for each in contents]
        tools = [{"function": {"parameters": keys}}] if keys else None
        ids, text = encoded(
            tokenizer, source + "{# <tool_call></tool_call> #}", messages, tools=tools
        )
        own = [each for each in ids if each in tokenizer.special_ids]
        assert len(own) == source.count("<|im_end|>")
        assert tokenizer.decode(ids) == text


def test_thoughts_in_answers_are_the_templates_to_read() -> None:
    tokenizer = made_tokenizer("byte_level")
    said = {"role": "assistant", "content": "<think>Hm.</think>Yes <turn|><think>"}
    marks = ("<think>", "</think>")
    source = "{{ messages[0].content.split('</think>')[-1] }}<think>"
    ids, _ = encoded(tokenizer, source, [said], reasoning=marks)
    assert tokenizer.decode(ids) == "Yes <turn|><think><think>"
    assert [each for each in ids if each in tokenizer.added_tokens.values()] == ids[-1:]
    for change in ({"role": "user"}, {"content": "Yes </think><think>"}):
        ids, _ = encoded(tokenizer, source, [said | change], reasoning=marks)
        assert tokenizer.decode(ids) == (said | change)["content"] + "<think>"


def test_lone_surrogates_are_no_marks() -> None:
    tokenizer = made_tokenizer("byte_level")
    ids, _ = encoded(
        tokenizer, TURNS, [{"role": "user", "content": f"<{SENTINEL}turn|>"}], wide=False
    )
    assert "<\ufffdturn|>" in tokenizer.decode(ids)


def test_a_normalizer_makes_no_control_tokens() -> None:
    backend = tokenizers.Tokenizer.from_str(made.made("byte_level").to_str())
    backend.normalizer = tokenizers.normalizers.NFKC()
    backend.add_special_tokens([tokenizers.AddedToken("<|end|>", normalized=True)])
    tokenizer = Tokenizer(Path(), LocalCodec(backend), {})
    end = tokenizer.token_id("<|end|>")
    source = "{{ messages[0].content }}<|end|>"
    for content in ("＜｜end｜＞ and", "<|end|> and", "and"):
        ids, _ = encoded(tokenizer, source, [{"role": "user", "content": content}])
        assert [each for each in ids if each == end] == ids[-1:]


def test_blanks_and_markup_that_are_matched_whole_are_ordinary_text() -> None:
    backend = tokenizers.Tokenizer.from_str(made.made("byte_level").to_str())
    backend.add_tokens(["\n\n", "    ", "<table>", "<|fim|>", "<call>"])
    tokenizer = Tokenizer(Path(), LocalCodec(backend), {})
    ordinary = set(tokenizer.added_tokens) - control_tokens(tokenizer, "\n\n<call>")
    assert ordinary == {"\n\n", "    ", "<table>", "<think>", "</think>"}
    messages = [{"role": "user", "content": "a\n\n<table>    <|fim|><table>"}]
    ids, _ = encoded(tokenizer, "{{ messages[0].content }}\n\n<call>", messages)
    texts = [tokenizer.token_text(each) for each in ids]
    assert [texts.count(each) for each in ("\n\n", "<table>", "<|fim|>")] == [2, 2, 0]


def test_json_with_only_ascii_keeps_the_marks() -> None:
    tokenizer = made_tokenizer("byte_level")
    message = {"role": "user", "content": 'é"<turn|>🙂'}
    source = "{{ messages[0].content | tojson(ensure_ascii=True) }}"
    ids, text = encoded(tokenizer, source, [message])
    assert text == json.dumps(message["content"])
    assert tokenizer.decode(ids) == text
    assert tokenizer.special_ids.isdisjoint(ids)


@pytest.mark.parametrize("kind", made.KINDS)
def test_media_texts_without_a_token_are_covered_and_encoded(kind: str) -> None:
    """Media may replace a text that is no token, or several tokens."""
    tokenizer = made_tokenizer(kind)
    tokens = control_tokens(tokenizer, TURNS)
    token = "<|turn>"
    assert token in tokens
    controls = Controls(tokenizer, tokens | {"<nowhere>", f"{token}user{token}"})
    covered = controls.cover("a <nowhere> b")
    assert SENTINEL in covered
    ids = controls.encode(f"{token}user{token}{covered}")
    assert ids.count(tokenizer.added_tokens[token]) == 2
