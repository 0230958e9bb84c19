"""Fields of other servers: honoured, or passed over by name; what nobody knows is refused."""

from __future__ import annotations

import logging
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest

from quire.api.shared.foreign import is_known, shown
from quire.api.shared.peers import PEERS
from quire.core.config import ServerConfig
from quire.core.sampling_params import BOUNDS
from quire.demo import MODEL_DIR
from quire.text.tokenizer import Tokenizer
from tests.api.conftest import HTTP, Serve, Served, access_records, openai_client, start
from tests.support.waiting import wait_until

ASK = [{"role": "user", "content": "Hi."}]
BODIES: dict[str, dict[str, Any]] = {
    "chat/completions": {"messages": ASK},
    "completions": {"prompt": "x"},
    "responses": {"input": "x"},
    "messages": {"model": "quire-demo", "messages": ASK, "max_tokens": 5},
}
HEADER = "x-quire-ignored-fields"

OTHERS: dict[str, object] = {
    "add_special_tokens": True,
    "cache_prompt": False,
    "chat_template": "x",
    "documents": [],
    "draft_model": "x",
    "dynatemp_range": 0.5,
    "id_slot": 1,
    "include_reasoning": False,
    "length_penalty": 2,
    "litellm_session_id": "x",
    "mirostat": 2,
    "mm_processor_kwargs": {},
    "models": ["x"],
    "n_keep": 4,
    "num_batch": 512,
    "num_ctx": 4096,
    "num_gpu": 0,
    "num_keep": 24,
    "num_thread": 2,
    "options": {"num_ctx": 4096},
    "penalize_nl": True,
    "plugins": [],
    "provider": {"order": ["x"]},
    "repeat_last_n": 64,
    "request_id": "x",
    "rid": "x",
    "safe_prompt": True,
    "samplers": ["top_k"],
    "separate_reasoning": False,
    "speculative.n_max": 4,
    "timings_per_token": True,
    "transforms": ["middle-out"],
    "ttl": 300,
    "use_beam_search": True,
    "use_mlock": True,
    "use_mmap": False,
    "vllm_xargs": {},
    "top_n_sigma": 1.0,
}

HONOURED = {"chat/completions": {"include_reasoning"}}
"""Fields that `test_formats` covers."""


def post(served: Served, path: str, **more: Any) -> httpx.Response:
    return HTTP.post(f"{served.url}/v1/{path}", json={**BODIES[path], **more})


def passed(answer: httpx.Response) -> list[str]:
    """Return the fields of which the client is told that they had no effect."""
    assert answer.status_code == 200, answer.text
    header = answer.headers.get(HEADER)
    return header.split(", ") if header else []


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("stream", [False, True])
def test_what_others_honour_passes_by_name(
    serve: Serve, path: str, stream: bool, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve()
    others = {name: OTHERS[name] for name in OTHERS.keys() - HONOURED.get(path, set())}
    with caplog.at_level(logging.INFO, "quire.access"):
        answer = post(served, path, stream=stream, **others)
        wait_until(lambda: access_records(caplog))  # a stream's record follows its last byte
    assert set(passed(answer)) == set(others)
    (line,) = [vars(each)["fields"] for each in access_records(caplog)]
    assert set(line["ignored_fields"]) == set(others)


@pytest.mark.parametrize("path", BODIES)
def test_every_protocol_draws_by_the_same_fields(serve: Serve, path: str) -> None:
    served = serve()
    asked = {
        "top_k": 3,
        "min_p": 0.5,
        "typical_p": 0.8,
        "xtc_probability": 0.25,
        "xtc_threshold": 0.2,
        "dry_multiplier": 0.5,
        "dry_base": 2.0,
        "dry_allowed_length": 3,
        "dry_penalty_last_n": 512,
        "repetition_penalty": 1.5,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.25,
        "seed": 7,
    }
    assert BOUNDS.keys() - asked.keys() == {"temperature", "top_p"}  # of OpenAI's own fields
    assert passed(post(served, path, **asked, stop_token_ids=[9], ignore_eos=True)) == []
    request = served.engine.requests[0]
    assert {name: getattr(request.sampling, name) for name in asked} == asked
    assert request.stop_token_ids == {9}


@pytest.mark.parametrize("given", [["\n", "*"], '"\\n", "*"', '["\\n", "*"]'])
def test_texts_that_break_repeats_become_tokens(serve: Serve, given: object) -> None:
    served = serve()
    tokenizer = Tokenizer.open(MODEL_DIR)
    wanted = sorted(tokenizer.encode(f"a{text}")[-1] for text in "\n*")
    post(served, "completions", dry_multiplier=0.8, dry_sequence_breakers=given)
    assert list(served.engine.requests[0].sampling.dry_breakers) == wanted
    post(served, "completions", dry_multiplier=0.8)
    assert len(served.engine.requests[1].sampling.dry_breakers) == 4
    answer = post(served, "completions", dry_multiplier=0.8, dry_sequence_breakers="no JSON")
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == "dry_sequence_breakers"


@pytest.mark.parametrize("path", BODIES)
def test_every_protocol_takes_the_others_names_of_a_limit(serve: Serve, path: str) -> None:
    served = serve("A long answer.")
    for name in ("max_tokens", "max_completion_tokens", "max_output_tokens"):
        body = {key: value for key, value in BODIES[path].items() if key != "max_tokens"}
        assert HTTP.post(f"{served.url}/v1/{path}", json={**body, name: 3}).status_code == 200
    assert [each.max_tokens for each in served.engine.requests] == [3, 3, 3]


@pytest.mark.parametrize("path", BODIES)
def test_what_happens_anyway_is_not_named(serve: Serve, path: str) -> None:
    asked = {"cache_prompt": True, "skip_special_tokens": True, "min_tokens": 0, "ttl": None}
    if path == "chat/completions":
        asked["top_logprobs"] = 0
    assert passed(post(serve(), path, **asked)) == []


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("name", "meant"), [("temprature", "temperature"), ("guided_regx", "guided_regex")]
)
def test_what_nobody_knows_is_refused_with_a_suggestion(
    serve: Serve, path: str, name: str, meant: str
) -> None:
    answer = post(serve(), path, **{name: 1})
    assert answer.status_code == 400
    assert f"'{name}'. Did you mean '{meant}'?" in answer.json()["error"]["message"]
    far = post(serve(), path, quux=1)
    assert far.status_code == 400
    assert far.json()["error"]["message"] == "Unknown parameter: 'quux'."


def test_what_does_not_generate_suggests_its_own_fields_alone(serve: Serve) -> None:
    url = f"{serve().url}/tokenize"
    far = HTTP.post(url, json={"prompt": "x", "temperature": 1})
    assert far.json()["error"]["message"] == "Unknown parameter: 'temperature'."
    near = HTTP.post(url, json={"prompt": "x", "enable_thinkin": True})
    assert near.json()["error"]["message"].endswith("Did you mean 'enable_thinking'?")


def test_other_names_of_our_fields(serve: Serve) -> None:
    served = serve()
    names = {"max_new_tokens": 3, "random_seed": 5, "repeat_penalty": 1.5, "stop_sequences": ["x"]}
    assert passed(post(served, "chat/completions", **names)) == []
    request = served.engine.requests[0]
    sampling = request.sampling
    assert (request.max_tokens, sampling.seed, sampling.repetition_penalty) == (3, 5, 1.5)
    assert passed(post(served, "messages", stop=["x"])) == []
    error = post(served, "completions", random_seed=5, seed=6).json()["error"]
    assert (error["param"], error["code"]) == ("random_seed", "invalid_value")
    error = post(served, "completions", random_seed="x").json()["error"]
    assert (error["param"], error["code"]) == ("random_seed", "invalid_type")


@pytest.mark.parametrize("given", [{"type": "object"}, '{"type": "object"}'])
@pytest.mark.parametrize("name", ["guided_json", "json_schema"])
def test_a_schema_by_another_name(serve: Serve, name: str, given: object) -> None:
    served = serve()
    assert passed(post(served, "chat/completions", **{name: given})) == []
    assert served.engine.requests[0].grammar is not None


@pytest.mark.parametrize(
    ("fields", "thinks", "budget"),
    [
        ({"thinking": {"type": "enabled", "budget_tokens": 9}}, True, 9),
        ({"thinking": {"type": "disabled"}}, False, None),
        ({"reasoning": {"effort": "low"}}, True, 20),
        ({"reasoning": {"enabled": True, "max_tokens": 7}}, True, 7),
        ({"reasoning": {"effort": "none"}}, False, None),
        ({"think": True}, True, None),
        ({"think": "low"}, True, 20),
        ({"think": False, "reasoning_effort": "low"}, False, 20),
        ({"enable_thinking": True, "thinking_token_budget": 5}, True, 5),
    ],
)
def test_thoughts_by_other_names(
    serve: Serve, fields: dict[str, Any], thinks: bool, budget: int | None
) -> None:
    served = serve()
    answer = post(served, "chat/completions", max_tokens=100, **fields)
    assert passed(answer) == []
    request = served.engine.requests[0]
    assert ("<|think|>" in served.tokenizer.decode(request.prompt)) is thinks
    assert (request.thinking.max_tokens if request.thinking else None) == budget


def test_thoughts_that_the_model_does_not_have_are_not_asked_of_it(
    tokenizer: Tokenizer, tmp_path: Path
) -> None:
    for file in MODEL_DIR.glob("*.json"):
        (tmp_path / file.name).symlink_to(file)
    template = "{% for message in messages %}{{ message.content }}{% endfor %}"
    (tmp_path / "chat_template.jinja").write_text(template)
    with ExitStack() as stack:
        served = start(stack, tokenizer, ServerConfig(dialect="none"), tmp_path)
        for path, fields, name in (
            ("chat/completions", {"reasoning_effort": "low"}, "reasoning_effort"),
            ("responses", {"reasoning": {"effort": "low"}}, "reasoning.effort"),
            ("messages", {"thinking": {"type": "adaptive"}}, "thinking"),
        ):
            assert passed(post(served, path, **fields)) == [name]


def test_a_variable_that_no_template_reads_is_named(serve: Serve) -> None:
    answer = post(serve(), "chat/completions", chat_template_kwargs={"mood": 1})
    assert passed(answer) == ["chat_template_kwargs.mood"]


def test_verbosity_has_no_effect_in_either_protocol(serve: Serve) -> None:
    served = serve()
    assert passed(post(served, "chat/completions", verbosity="low")) == ["verbosity"]
    assert passed(post(served, "responses", text={"verbosity": "low"})) == ["text.verbosity"]
    assert passed(post(served, "chat/completions", verbosity="medium")) == []


EPHEMERAL = {"cache_control": {"type": "ephemeral"}, "@user": 1, "@text": {}}
TOOL = {"name": "f", "description": "x", "parameters": {"type": "object"}, **EPHEMERAL}


def test_history_of_other_servers_passes(serve: Serve) -> None:
    """Agents send cache marks, thought signatures and additions of gateways."""
    served = serve()
    call = {
        "id": "c",
        "type": "function",
        "function": {"name": "f", "arguments": "{}", "thought_signature": "x"},
        "extra_content": {"google": {"thought_signature": "x"}},
    }
    thought = [{"type": "reasoning.text", "text": "x"}]
    messages: Any = [
        {"role": "user", "content": [{"type": "text", "text": "Hi.", **EPHEMERAL}]},
        {"role": "assistant", "content": "", "reasoning_details": thought, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "c", "content": "1", **EPHEMERAL},
    ]
    tools: Any = [{"type": "function", "function": TOOL, **EPHEMERAL}]
    openai_client(served.url).chat.completions.create(
        model="quire-demo", messages=messages, tools=tools
    )
    item = {"type": "message", "role": "user", "content": "Hi.", "extra_content": {}}
    answer = post(served, "responses", input=[item], tools=[{"type": "function", **TOOL}])
    assert passed(answer) == []
    message = {"role": "user", "content": [{"type": "text", "text": "x", "mood": 1}], **EPHEMERAL}
    assert passed(post(served, "messages", messages=[message])) == []
    assert len(served.engine.requests) == 3


@pytest.mark.parametrize("arguments", [{"arguments": None}, {"arguments": ""}, {}])
def test_a_call_of_another_server_without_arguments(
    serve: Serve, arguments: dict[str, Any]
) -> None:
    served = serve()
    function = {"name": "f", **arguments}
    messages = [
        *ASK,
        {"role": "assistant", "tool_calls": [{"id": "c", "function": function}]},
        {"role": "tool", "tool_call_id": "c", "content": "1", "images": []},
    ]
    assert passed(post(served, "chat/completions", messages=messages)) == []
    items = [
        {"type": "function_call", "call_id": "c", **function},
        {"type": "function_call_output", "call_id": "c", "output": "1"},
    ]
    assert passed(post(served, "responses", input=[*ASK, *items])) == []
    for request in served.engine.requests:
        assert "<|tool_call>call:f{}<tool_call|>" in served.tokenizer.decode(request.prompt)


def test_all_names_pass_where_the_operator_says_so(serve: Serve) -> None:
    served = serve(config=ServerConfig(strict_fields=False))
    made_up = {"beam_width": 4, "@user": 1, "a\r\nb: ü": 2, "@json_object": {}}
    fields = {**made_up, "response_format": {"type": "text", "@text": 1}}
    assert passed(post(served, "chat/completions", **fields)) == [
        "beam_width",
        "@user",
        "a??b???",
        "@json_object",
        "response_format.@text",
    ]
    assert served.engine.requests
    for path in BODIES:
        error = post(served, path, beam_width=4, temperature=-1).json()["error"]
        assert "temperature" in error["message"]


def test_what_a_header_is_told_is_bounded(serve: Serve) -> None:
    served = serve(config=ServerConfig(strict_fields=False))
    answer = post(served, "completions", **{f"{'x' * 500}{i}": i for i in range(500)})
    assert 0 < len(answer.headers[HEADER]) < 100
    answer = post(served, "completions", **{f"f{i}": i for i in range(500)})
    assert len(passed(answer)) == 64


def test_names_are_known_by_their_path() -> None:
    assert is_known("top_a")
    assert is_known("stream_options.continuous_usage_stats")
    assert not is_known("text.top_a")
    assert shown("a\nb") == "a?b"


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("peer", PEERS)
def test_no_field_of_a_peer_is_unknown(serve: Serve, path: str, peer: str) -> None:
    served = serve()
    for name in sorted(PEERS[peer]):
        outer, _, inner = name.partition(".")
        dotted = inner and outer in ("structured_outputs", "output_config")
        if outer == "output_config" and path != "messages":
            continue
        answer = post(served, path, **({outer: {inner: False}} if dotted else {name: False}))
        assert "Unknown parameter" not in answer.text, name


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("logits_processors", ["x.y"]),
        ("custom_logit_processor", "x"),
        ("stop_regex", "a+"),
        ("structural_tag", {"type": "x"}),
        ("structured_outputs.structural_tag", "{}"),
        ("grammar_triggers", [{"value": "x"}]),
        ("banned_strings", ["x"]),
        ("prompt_embeds", "AAAA"),
    ],
)
def test_what_binds_an_answer_and_cannot_be_kept_is_refused(
    serve: Serve, path: str, field: str, value: object
) -> None:
    served = serve(config=ServerConfig(strict_fields=False))
    outer, _, inner = field.partition(".")
    error = post(served, path, **{outer: {inner: value} if inner else value}).json()["error"]
    assert f"'{field}' is not offered by this server" in error["message"]
    assert served.engine.requests == []
    empty = type(value)()
    assert post(served, path, **{outer: {inner: empty} if inner else empty}).status_code == 200


@pytest.mark.parametrize("path", BODIES)
def test_numbers_come_as_strings_and_integers_with_a_fraction_of_nothing(
    serve: Serve, path: str
) -> None:
    served = serve("A long answer.")
    names = {"responses": "max_output_tokens"}
    body = {"temperature": "0.5", "top_k": 5.0, "seed": "7", names.get(path, "max_tokens"): "3"}
    assert passed(post(served, path, **body, min_p="1e-2", logit_bias={"5": "1"})) == []
    request = served.engine.requests[0]
    sampling = request.sampling
    assert (sampling.temperature, sampling.top_k, sampling.seed) == (0.5, 5, 7)
    assert (sampling.min_p, sampling.logit_bias, request.max_tokens) == (0.01, ((5, 1),), 3)
    refused: list[dict[str, Any]] = [
        *({"top_k": 5.5}, {"top_k": "5.5"}, {"temperature": "NaN"}, {"temperature": ""}),
        *({"seed": 1e300}, {"seed": 2.0**60}, {"top_k": True}, {"seed": "0x10"}),
    ]
    for wrong in refused:
        assert post(served, path, **wrong).status_code == 400, wrong


@pytest.mark.parametrize("path", BODIES)
def test_a_temperature_has_no_bound_but_float32s(serve: Serve, path: str) -> None:
    served = serve()
    assert passed(post(served, path, temperature=100)) == []
    assert served.engine.requests[0].sampling.temperature == 100
    for value in (3.5e38, -0.1):
        assert post(served, path, temperature=value).status_code == 400
