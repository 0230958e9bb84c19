"""Chat's custom tools and allowed tools do what those of responses do."""

from __future__ import annotations

from typing import Any

import pytest
from openai import BadRequestError

from quire.constraints.grammar import GrammarCompiler
from quire.constraints.masks import allows
from tests.api.conftest import HTTP, Serve, Served, openai_client
from tests.support.backend import backend_of

ASK: Any = [{"role": "user", "content": "Patch it."}]
PATCH = '<|tool_call>call:apply_patch{input:<|"|>*** Begin\n+x<|"|>}<tool_call|>'
RULES = {"syntax": "lark", "definition": "start: LINE+"}
CUSTOM: Any = {
    "type": "custom",
    "custom": {
        "name": "apply_patch",
        "description": "Patches.",
        "format": {"type": "grammar", "grammar": RULES},
    },
}
FLAT: Any = {
    "type": "custom",
    "name": "apply_patch",
    "description": "Patches.",
    "format": {"type": "grammar", **RULES},
}
FUNCTION: Any = {"type": "function", "function": {"name": "look"}}
NAMED: Any = {"type": "custom", "custom": {"name": "apply_patch"}}


def create(served: Served, **fields: Any) -> Any:
    fields = {"messages": ASK, "tools": [CUSTOM, FUNCTION], **fields}
    return openai_client(served.url).chat.completions.create(model="quire-demo", **fields)


def test_a_custom_tool_is_called_with_a_text(serve: Serve) -> None:
    served = serve(PATCH)
    (choice,) = create(served).choices
    assert choice.finish_reason == "tool_calls"
    (call,) = choice.message.tool_calls
    assert (call.type, call.custom.name, call.custom.input) == (
        "custom",
        "apply_patch",
        "*** Begin\n+x",
    )
    answer = choice.message.model_dump(exclude_none=True)
    result = {"role": "tool", "tool_call_id": call.id, "content": "Done."}
    create(served, messages=[*ASK, answer, result])
    prompt = served.tokenizer.decode(served.engine.requests[-1].prompt)
    assert 'call:apply_patch{input:<|"|>*** Begin\n+x<|"|>}' in prompt
    assert 'response:apply_patch{value:<|"|>Done.<|"|>}' in prompt


def test_a_stream_of_a_custom_call_adds_up_to_it(serve: Serve) -> None:
    served = serve(PATCH)
    whole = create(served).choices[0].message.tool_calls[0].custom
    name = text = ""
    for chunk in create(served, stream=True):
        for piece in chunk.choices[0].delta.tool_calls or ():
            said = piece.model_dump(exclude_unset=True)
            assert said["index"] == 0
            assert "function" not in said
            name += said["custom"].get("name", "")
            text += said["custom"]["input"]
    assert (name, text) == (whole.name, whole.input)


def test_both_protocols_make_one_prompt(serve: Serve) -> None:
    served = serve("Fine.")
    create(served, tools=[CUSTOM])
    openai_client(served.url).responses.create(model="quire-demo", input=ASK, tools=[FLAT])
    chat, responses = (request.prompt for request in served.engine.requests)
    assert chat == responses
    assert "Follows this lark grammar: start: LINE+" in served.tokenizer.decode(chat)


def test_a_named_custom_tool_is_called(serve: Serve) -> None:
    served = serve(PATCH)
    create(served, tool_choice=NAMED)
    grammar = served.engine.requests[-1].grammar
    assert grammar is not None
    assert "apply_patch" in grammar.source
    assert "look" not in grammar.source


def test_allowed_tools_hide_the_others(serve: Serve) -> None:
    served = serve("Fine.")
    for mode, bound in (("auto", False), ("required", True)):
        allowed = {"mode": mode, "tools": [{"type": "function", "function": {"name": "look"}}]}
        create(served, tool_choice={"type": "allowed_tools", "allowed_tools": allowed})
        request = served.engine.requests[-1]
        prompt = served.tokenizer.decode(request.prompt)
        assert "declaration:look" in prompt
        assert "declaration:apply_patch" not in prompt
        assert (request.grammar is not None) is bound


def test_a_choice_of_none_of_the_tools_is_refused(serve: Serve) -> None:
    other = {"type": "function", "function": {"name": "other"}}
    allowed = {"type": "allowed_tools", "allowed_tools": {"mode": "auto", "tools": [other]}}
    for choice in (other, allowed):
        with pytest.raises(BadRequestError, match="'other', which is not among 'tools'"):
            create(serve(), tool_choice=choice)


def accepts(served: Served, call: str) -> bool:
    """Return whether the grammar of the last request allows an answer."""
    grammar, tokenizer = served.engine.requests[-1].grammar, served.tokenizer
    assert grammar is not None
    compiler = GrammarCompiler(backend_of(tokenizer), tokenizer.vocab_size, tokenizer.eos_ids)
    state = compiler.compile(grammar)
    for token in served.ids(call):
        mask = state.mask()
        if mask is not None and not allows(mask, token):
            return False
        state.accept(token)
    return True


@pytest.mark.parametrize(
    ("syntax", "definition"),
    [
        ("regex", r"(SELECT|DROP) [a-z]+\n"),
        (
            "lark",
            'start: verb " " NAME LF\nverb: "SELECT" | "DROP"\nNAME: /[a-z]+/\n%import common.LF',
        ),
    ],
)
@pytest.mark.parametrize("forced", [False, True])
def test_a_custom_tools_text_is_held_to_its_grammar(
    serve: Serve, syntax: str, definition: str, forced: bool
) -> None:
    served = serve("Fine.")
    rules = {"syntax": syntax, "definition": definition}
    chat: Any = {"name": "sql", "format": {"type": "grammar", "grammar": rules}}
    flat: Any = {"type": "custom", "name": "sql", "format": {"type": "grammar", **rules}}
    choice: Any = "required" if forced else "auto"
    client = openai_client(served.url)
    for protocol in ("chat", "responses"):
        if protocol == "chat":
            tool = {"type": "custom", "custom": chat}
            answer = client.chat.completions.with_raw_response.create(
                model="quire-demo", messages=ASK, tools=[tool], tool_choice=choice
            )
        else:
            answer = client.responses.with_raw_response.create(
                model="quire-demo", input=ASK, tools=[flat], tool_choice=choice
            )
        assert "x-quire-ignored-fields" not in answer.headers
        called = '<|tool_call>call:sql{input:<|"|>%s<|"|>}<tool_call|>'
        assert accepts(served, called % "DROP users\n")
        assert not accepts(served, called % "UPDATE users\n")
        assert not accepts(served, called % "DROP users;\n")


@pytest.mark.parametrize("grammar", ['start: "(" start? ")"', "", 'start: "a"..B'])
def test_a_grammar_that_cannot_bind_is_told_to_the_model_and_named(
    serve: Serve, grammar: str
) -> None:
    rules = {"syntax": "lark", "definition": grammar}
    chat: Any = {"name": "nest", "format": {"type": "grammar", "grammar": rules}}
    body = {"messages": ASK, "tools": [{"type": "custom", "custom": chat}]}
    answer = HTTP.post(f"{serve('Fine.').url}/v1/chat/completions", json=body)
    named = answer.headers["x-quire-ignored-fields"]
    assert named == "tools[0].custom.format.grammar.definition"
