"""Answers that the last message starts, and what they have to meet."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from quire.core.config import ServerConfig
from quire.core.request import GrammarSpec
from tests.api.conftest import HTTP, Serve, Served
from tests.api.test_formats import error, meets

ASKED = {"role": "user", "content": "Who?"}
OBJECT = {"type": "object", "properties": {"name": {"type": "string"}}, "required": ["name"]}
SCHEMA: dict[str, Any] = {
    "response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": OBJECT}}
}
EXPLICIT = {"continue_final_message": True}
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}


def ask(served: Served, started: Any, **more: Any) -> httpx.Response:
    messages = [ASKED, {"role": "assistant", "content": started}]
    body = {"model": "quire-demo", "messages": messages, **more}
    return HTTP.post(f"{served.url}/v1/chat/completions", json=body)


def last(served: Served) -> tuple[str, GrammarSpec]:
    """Return the prompt and the grammar that the engine got."""
    request = served.engine.requests[-1]
    assert request.grammar is not None
    return served.tokenizer.decode(request.prompt), request.grammar


@pytest.mark.parametrize("named", [{}, EXPLICIT])
@pytest.mark.parametrize(
    ("fields", "started", "rest"),
    [
        (SCHEMA, '{"na', 'me": "Bo"}'),
        (SCHEMA, '{\n  "name": "B', 'o"}'),
        (SCHEMA, '{"name": "Bo"}', ""),
        ({"response_format": {"type": "json_object"}}, '{"a": 1', "2}"),
        ({"format": "json"}, '{"a": [', "]}"),
        ({"guided_regex": "[ab]{3}"}, "ab", "a"),
        ({"guided_choice": ["yes", "no"]}, "n", "o"),
        ({"guided_grammar": 'root ::= "yes" | "no"'}, "ye", "s"),
        ({**SCHEMA, "tools": [TOOL]}, '{"name": ', '"Bo"}'),
        ({**SCHEMA, "enable_thinking": True}, '{"name"', ': "Bo"}'),
    ],
)
def test_the_whole_answer_is_bound(
    serve: Serve, fields: dict[str, Any], started: str, rest: str, named: dict[str, Any]
) -> None:
    served = serve(rest)
    answer = ask(served, started, **fields, **named)
    assert answer.json()["choices"][0]["message"]["content"] == rest
    prompt, grammar = last(served)
    assert prompt.endswith(started)
    assert meets(grammar, rest)
    assert not meets(grammar, started + rest)


@pytest.mark.parametrize("started", ["Here it is: ", '{"nome', '{"name": 1', '["'])
def test_text_that_no_bound_answer_starts_with(serve: Serve, started: str) -> None:
    """Unless a format was requested by name, such text is an answer, and the next one is bound
    whole.
    """
    served = serve('{"name": "Bo"}')
    assert ask(served, started, **SCHEMA).status_code == 200
    prompt, grammar = last(served)
    assert prompt.endswith("<turn|>\n<|turn>model\n")
    assert grammar.started == ""
    refused = error(ask(served, started, **SCHEMA, **EXPLICIT))
    assert (refused["param"], refused["code"]) == ("response_format", "invalid_beginning")
    assert "last message" in refused["message"]
    assert len(served.engine.requests) == 1


def test_a_continued_request_keeps_salt_seed_and_limit(serve: Serve) -> None:
    served = serve("{}", config=ServerConfig())
    ask(served, "Hm.", format="json", cache_salt="mine", seed=3, max_tokens=9)
    (request,) = served.engine.requests
    assert (request.cache_salt, request.sampling.seed, request.max_tokens) == ("mine", 3, 9)


def test_forced_calls_follow_a_started_answer(serve: Serve) -> None:
    served = serve()
    ask(served, "Wait.", tools=[TOOL], tool_choice="required", **SCHEMA)
    prompt, grammar = last(served)
    assert prompt.endswith("Wait.")
    assert grammar.started == ""


@pytest.mark.parametrize("started", ["Hm. ", '{"name": "'])
def test_a_long_start_is_read_elsewhere(serve: Serve, started: str) -> None:
    served = serve("x", config=ServerConfig(), context_length=1 << 16)
    started += "a word " * 3000
    assert ask(served, started, **SCHEMA).status_code == 200
    prompt, grammar = last(served)
    assert (started.rstrip() in prompt, prompt.endswith(started)) == (True, started[0] == "{")
    assert grammar.started == (started if started[0] == "{" else "")


def test_what_anthropics_protocol_starts(serve: Serve) -> None:
    """Anthropic's protocol defines a last assistant message as the start of the answer."""
    served = serve('me": "Bo"}')
    for started, status in (('{"na', 200), ("Here: ", 400)):
        body = {
            "model": "quire-demo",
            "max_tokens": 50,
            "messages": [ASKED, {"role": "assistant", "content": started}],
            "output_config": {"format": {"type": "json_schema", "schema": OBJECT}},
        }
        answer = HTTP.post(f"{served.url}/v1/messages", json=body)
        assert answer.status_code == status
    assert "'output_config.format'" in answer.json()["error"]["message"]
    assert meets(last(served)[1], 'me": "Bo"}')
