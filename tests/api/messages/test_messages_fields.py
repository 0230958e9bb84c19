"""Every field of Anthropic's messages is honoured, refused by name, or known to change nothing."""

from __future__ import annotations

from typing import Any, get_args, get_type_hints

import httpx
import pytest
from anthropic import Anthropic
from anthropic.types.beta import BetaOutputConfigParam, BetaThinkingConfigParam

from quire.core.config import ServerConfig
from tests.api.conftest import HTTP, Serve, Served

ASK = [{"role": "user", "content": "Hi."}]
PIXEL = {"type": "base64", "media_type": "image/png", "data": "iVBORw0KGgo="}
IMAGE = {"type": "image", "source": PIXEL}
USE = {"type": "tool_use", "id": "t1", "name": "f", "input": {}}
TOOL = {"name": "f", "input_schema": {"type": "object"}}
BAD = {"name": "f", "input_schema": {"type": "nonsense"}}
HEADER = "x-anthropic-billing-header: cc_version=2.1.177.01c; cc_entrypoint=cli; cch=36ee5;"
COUNTDOWN = "<total_tokens>14999841 tokens left</total_tokens>"


def post(served: Served, headers: dict[str, str] | None = None, **body: Any) -> httpx.Response:
    body = {"model": "quire-demo", "max_tokens": 8, "messages": ASK, **body}
    return HTTP.post(f"{served.url}/v1/messages", json=body, headers=headers)


def prompt_of(served: Served) -> str:
    return served.tokenizer.decode(served.engine.requests[-1].prompt)


def user(*blocks: Any) -> list[Any]:
    return [{"role": "user", "content": list(blocks)}]


def test_the_ways_to_think_of_the_official_sdks_betas_are_known(serve: Serve) -> None:
    """Claude Code asks by them, and without them once it was refused."""
    served = serve()
    asked: list[dict[str, Any]] = []
    for config in get_args(BetaThinkingConfigParam):
        hints = get_type_hints(config)
        (kind,) = get_args(hints["type"])
        for display in get_args(get_args(hints["display"])[0]) if "display" in hints else (None,):
            asked.append(
                {"thinking": {"type": kind, "display": display} if display else {"type": kind}}
            )
    efforts = get_args(get_args(get_type_hints(BetaOutputConfigParam)["effort"])[0])
    asked += [{"output_config": {"effort": each}} for each in efforts]
    assert len(asked) > 12
    for fields in asked:
        assert post(served, **fields).status_code == 200, fields


WRONG: list[tuple[dict[str, Any], str]] = [
    ({"messages": []}, "messages"),
    ({"max_tokens": -1}, "max_tokens"),
    ({"response_format": {"type": "json_object"}}, "response_format"),
    ({"max_tokens": None}, "max_tokens"),
    ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
    ({"messages": user({"type": "smell"})}, "messages[0].content[0].type"),
    ({"messages": user({"type": "thinking"})}, "messages[0].content[0].type"),
    ({"messages": user({"type": "text"})}, "messages[0].content[0].text"),
    ({"messages": user(IMAGE)}, "messages[0].content[0].source"),
    ({"messages": user({"type": "image"})}, "messages[0].content[0].source"),
    (
        {"messages": user({"type": "image", "source": {"type": "file", "file_id": "f"}})},
        "messages[0].content[0].source.type",
    ),
    (
        {"messages": user({"type": "image", "source": {"type": "url", "url": ""}})},
        "messages[0].content[0].source.url",
    ),
    (
        {"messages": user({"type": "image", "source": {**PIXEL, "data": ""}})},
        "messages[0].content[0].source.data",
    ),
    (
        {"messages": user({"type": "image", "source": {**PIXEL, "media_type": "image/bmp"}})},
        "messages[0].content[0].source.media_type",
    ),
    (
        {"messages": user({**IMAGE, "transformations": {"oversized_image": "error"}})},
        "messages[0].content[0].transformations.oversized_image",
    ),
    ({"system": [IMAGE]}, "system[0]"),
    ({"messages": [*ASK, {"role": "assistant", "content": [IMAGE]}]}, "messages[1].content[0]"),
    (
        {"messages": user({"type": "document", "source": {**PIXEL, "type": "url"}})},
        "messages[0].content[0].source.url",
    ),
    (
        {"messages": user({"type": "tool_result", "tool_use_id": "t9"})},
        "messages[0].content[0].tool_use_id",
    ),
    ({"messages": [*ASK, {"role": "assistant", "content": [USE]}]}, "messages"),
    ({"tools": [{"name": "f"}]}, "tools[0].input_schema"),
    ({"tools": [{**TOOL, "defer_loading": True}], "tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tools": [{**TOOL, "allowed_callers": [5]}]}, "tools[0].allowed_callers[0]"),
    ({"tools": [{**TOOL, "name": "no spaces"}]}, "tools[0].name"),
    ({"tool_choice": {"type": "any"}}, "tool_choice"),
    ({"tool_choice": {"type": "tool", "name": "g"}, "tools": [TOOL]}, "tool_choice"),
    ({"tool_choice": {"type": "tool"}}, "'tool_choice.name'"),
    ({"tools": [BAD], "tool_choice": {"type": "any"}}, "tools[0].input_schema"),
    (
        {"output_config": {"format": {"type": "json_schema", "schema": {"type": "nonsense"}}}},
        "output_config.format",
    ),
    ({"tool_choice": {"type": "maybe"}}, "tool_choice.type"),
    ({"thinking": {"type": "sometimes"}}, "thinking.type"),
    ({"thinking": {"type": "adaptive", "budget_tokens": 5}}, "thinking.budget_tokens"),
    ({"stop_sequences": [""]}, "stop_sequences[0]"),
    ({"temperature": -3}, "temperature"),
    ({"top_k": -2}, "top_k"),
    ({"speed": "fast"}, "speed"),
    ({"thread": {"type": "create"}}, "thread"),
    ({"container": "c"}, "container"),
    ({"safeguards": [{"type": "dangerous_tool_use"}]}, "'safeguards' is not offered"),
    ({"context_management": {"edits": [{"type": "forget_20260112"}]}}, "edits[0].type"),
    ({"kv_bits": 3}, "kv_bits"),
    ({"beam_width": 4}, "beam_width"),
]


def test_what_is_wrong_is_named(serve: Serve) -> None:
    served = serve()
    for body, name in WRONG:
        answer = post(served, **body)
        assert answer.status_code == 400, (body, answer.text)
        error = answer.json()
        assert set(error) == {"type", "error"}
        assert error["type"] == "error"
        assert error["error"]["type"] == "invalid_request_error"
        assert name in error["error"]["message"], (body, error)
    assert served.engine.requests == []


def test_a_server_that_lets_unknown_fields_pass_does_not_seem_to_judge_tool_calls(
    serve: Serve,
) -> None:
    served = serve("x", ServerConfig(strict_fields=False))
    assert post(served, beam_width=4).status_code == 200
    # Claude Code 2.1.330 looks for the name in a 400, and judges the calls itself from then on.
    answer = post(served, safeguards=[{"type": "dangerous_tool_use"}])
    assert (answer.status_code, "safeguards" in answer.json()["error"]["message"]) == (400, True)


def test_errors_of_the_route_have_their_shape(serve: Serve) -> None:
    answer = HTTP.get(f"{serve().url}/v1/messages")
    assert (answer.status_code, answer.json()["error"]["type"]) == (405, "invalid_request_error")
    answer = HTTP.get(f"{serve().url}/v1/messages/batches")  # opened by --files
    assert (answer.status_code, answer.json()["error"]["type"]) == (501, "api_error")
    answer = HTTP.get(f"{serve().url}/v1/messages/unknown")
    assert (answer.status_code, answer.json()["error"]["type"]) == (404, "not_found_error")


def test_a_model_that_is_not_served_is_a_404(serve: Serve) -> None:
    answer = post(serve(), model="claude-opus")
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "not_found_error"


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        *(
            (name, 1, f"'{name}' is a field of /v1/messages: it does not change the count, ")
            for name in ("max_tokens", "max_completion_tokens", "temperature", "stream", "stop")
        ),
        ("container", "c", "'container' is not offered by this server."),
        ("thread", {}, "'thread' is not offered by this server; send the whole conversation."),
        ("temprature", 1, "Unknown parameter: 'temprature'."),
        ("sistem", "Be brief.", "Unknown parameter: 'sistem'. Did you mean 'system'?"),
    ],
)
def test_count_tokens_takes_prompt_fields(
    serve: Serve, name: str, value: object, said: str
) -> None:
    body = {"model": "quire-demo", "messages": ASK, name: value}
    answer = HTTP.post(f"{serve().url}/v1/messages/count_tokens", json=body)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert error["type"] == "invalid_request_error"
    assert error["message"].startswith(said)


def test_what_changes_nothing_is_accepted(serve: Serve) -> None:
    cached = {"cache_control": {"type": "ephemeral", "ttl": "1h", "scope": "global"}}
    served = serve("x")
    answer = post(
        served,
        messages=user({"type": "text", "text": "Hi.", "citations": None, **cached}),
        system=[{"type": "text", "text": "Be brief.", **cached}],
        tools=[{**TOOL, "type": "custom", "strict": True, "eager_input_streaming": True, **cached}],
        metadata={"user_id": "u"},
        service_tier="auto",
        mcp_servers=[],
        diagnostics={"previous_message_id": None},
        **cached,
    )
    assert answer.status_code == 200, answer.text


@pytest.mark.parametrize("version", ["2026-10-21", "2023-06-01", None])
def test_versions_that_are_served(serve: Serve, version: str | None) -> None:
    headers = {"anthropic-version": version} if version else {}
    assert post(serve("x"), headers).status_code == 200


def test_other_versions_are_refused(serve: Serve) -> None:
    answer = post(serve(), {"anthropic-version": "2023-01-01"})
    assert answer.status_code == 400
    assert "anthropic-version" in answer.json()["error"]["message"]


def test_betas_are_accepted(serve: Serve) -> None:
    served = serve("Fine.")
    sdk = Anthropic(base_url=served.url, api_key="none", max_retries=0)
    message = sdk.beta.messages.create(  # posts to ?beta=true
        model="quire-demo",
        max_tokens=8,
        messages=[{"role": "user", "content": "Hi."}],
        betas=["interleaved-thinking-2025-05-14", "fine-grained-tool-streaming-2025-05-14"],
    )
    assert message.content[0].to_dict() == {"type": "text", "text": "Fine."}
    counted = sdk.beta.messages.count_tokens(
        model="quire-demo", messages=[{"role": "user", "content": "Hi."}]
    )
    assert counted.input_tokens == message.usage.input_tokens


def test_system_messages_stay_where_they_stand(serve: Serve) -> None:
    served = serve()
    messages = [
        *ASK,
        {"role": "assistant", "content": "Hello."},
        {"role": "system", "content": [{"type": "text", "text": "Now be rude."}]},
        {"role": "user", "content": "Bye."},
    ]
    post(served, messages=messages, system="Be kind.")
    prompt = prompt_of(served)
    order = ["system\nBe kind.", "user\nHi.", "model\nHello.", "system\nNow be rude.", "user\nBye."]
    places = [prompt.index(f"<|turn>{each}") for each in order]
    assert places == sorted(places)


def test_neighbours_of_one_role_are_one_turn(serve: Serve) -> None:
    served = serve()
    post(served, messages=[*ASK, {"role": "user", "content": "Again."}])
    assert "<|turn>user\nHi.\nAgain.<turn|>" in prompt_of(served)


def test_documents_of_plain_text_are_read(serve: Serve) -> None:
    served = serve()
    source = {"type": "text", "media_type": "text/plain", "data": "Once upon a time."}
    document = {"type": "document", "source": source, "title": "A tale"}
    post(served, messages=user(document, {"type": "text", "text": "Who?"}))
    assert "<|turn>user\nA tale\nOnce upon a time.\nWho?<turn|>" in prompt_of(served)


def test_what_a_search_found_is_read(serve: Serve) -> None:
    served = serve()
    found = {
        "type": "search_result",
        "source": "https://a.example",
        "title": "A page",
        "content": [{"type": "text", "text": "It rains."}],
    }
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [found]}
    post(served, messages=[*ASK, {"role": "assistant", "content": [USE]}, *user(result)])
    assert "A page\nhttps://a.example\nIt rains." in prompt_of(served)


def test_a_deferred_tool_is_told_of_once_a_search_found_it(serve: Serve) -> None:
    served = serve()
    tools = [TOOL, {**TOOL, "name": "hidden", "defer_loading": True}]
    post(served, tools=tools)
    assert "declaration:f{" in prompt_of(served)
    assert "hidden" not in prompt_of(served)
    reference = {"type": "tool_reference", "tool_name": "hidden"}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": [reference]}
    messages = [*ASK, {"role": "assistant", "content": [USE]}, *user(result)]
    post(served, tools=tools, messages=messages)
    assert "declaration:hidden{" in prompt_of(served)
    assert 'response:f{value:<|"|>hidden<|"|>}' in prompt_of(served)


@pytest.mark.parametrize(
    "betas", ["interleaved-thinking-2025-05-14", "other-1, interleaved-thinking-x"]
)
def test_a_budget_of_interleaved_thinking_may_be_more_than_an_answer(
    serve: Serve, betas: str
) -> None:
    served = serve()
    thinking = {"type": "enabled", "budget_tokens": 4000}
    body: dict[str, Any] = {"max_tokens": 1000, "tools": [TOOL], "thinking": thinking}
    assert post(served, **body).status_code == 400
    answer = post(served, headers={"anthropic-beta": betas}, **body)
    assert answer.status_code == 200, answer.text
    limit = served.engine.requests[-1].thinking
    assert limit is not None
    assert limit.max_tokens < 1000


def test_tools_that_code_may_call_are_called_by_the_model(serve: Serve) -> None:
    """Nobody runs code here, so a tool for code alone is offered as any other."""
    served = serve()
    code = "code_execution_20260120"
    hosted = {"type": code, "name": "code_execution"}
    tools = [{**TOOL, "allowed_callers": callers} for callers in (["direct"], [code])]
    tools[1]["name"] = "g"
    called = {**USE, "caller": {"type": code, "tool_id": "s1"}}
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "4"}
    messages = [*ASK, {"role": "assistant", "content": [called]}, *user(result)]
    answer = post(served, tools=[*tools, hosted], messages=messages)
    assert answer.status_code == 200, answer.text
    assert answer.headers["x-quire-ignored-fields"] == "tools[1].allowed_callers, tools[2]"
    prompt = prompt_of(served)
    assert all(part in prompt for part in ("declaration:f{", "declaration:g{", "call:f{"))


def test_a_system_message_may_be_for_one_turn(serve: Serve) -> None:
    served = serve()
    note = {"role": "system", "content": "It is late.", "clear_at": "next_user_message"}
    post(served, messages=[*ASK, note])
    assert "It is late." in prompt_of(served)
    post(served, messages=[*ASK, note, {"role": "assistant", "content": "Yes?"}, *ASK])
    assert "It is late." not in prompt_of(served)


@pytest.mark.parametrize(
    ("content", "seen"),
    [
        ("no such file", "Error: no such file"),
        ([{"type": "text", "text": "no such file"}], "Error: no such file"),
        ("<tool_use_error>no</tool_use_error>", "<tool_use_error>no</tool_use_error>"),
        (None, "Error:"),
    ],
)
def test_a_tools_failure_is_told_to_the_model(serve: Serve, content: Any, seen: str) -> None:
    served = serve()
    result = {"type": "tool_result", "tool_use_id": "t1", "content": content, "is_error": True}
    messages = [*ASK, {"role": "assistant", "content": [USE]}, *user(result)]
    assert post(served, messages=messages).status_code == 200
    assert f'response:f{{value:<|"|>{seen}<|"|>}}' in prompt_of(served)


def test_examples_of_a_tools_input_are_part_of_its_schema(serve: Serve) -> None:
    served = serve()
    post(served, tools=[{**TOOL, "input_examples": [{"city": "Oslo"}]}])
    assert 'examples:[{city:<|"|>Oslo<|"|>}]' in prompt_of(served)


def _claude_code(header: str, countdown: str) -> dict[str, Any]:
    """Return a request as Claude Code sends it, with the parts that it changes each time."""
    result = {"type": "tool_result", "tool_use_id": "t1", "content": "4 degrees"}
    return {
        "system": [{"type": "text", "text": header}, {"type": "text", "text": "You are an agent."}],
        "messages": [
            *ASK,
            {"role": "assistant", "content": [USE]},
            *user(result, {"type": "text", "text": countdown}),
        ],
        "tools": [TOOL],
    }


def test_what_agents_change_each_time_is_not_in_the_prompt(serve: Serve) -> None:
    served = serve()
    prompts = []
    for number in (1, 2):
        post(
            served,
            **_claude_code(
                HEADER.replace("36ee5", f"36ee{number}"), COUNTDOWN.replace("149", f"{number}")
            ),
        )
        prompts.append(prompt_of(served))
    assert prompts[0] == prompts[1]
    assert "billing" not in prompts[0]
    assert "tokens left" not in prompts[0]
    assert "You are an agent." in prompts[0]
    kept = serve("x", ServerConfig(drop_volatile_headers=False))
    post(kept, **_claude_code(HEADER, COUNTDOWN))
    assert HEADER in prompt_of(kept)
    assert COUNTDOWN in prompt_of(kept)
