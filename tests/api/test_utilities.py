"""Keys, limits, metrics, the log, and the routes beside generation."""

from __future__ import annotations

import codecs
import contextlib
import gzip
import json
import logging
import re
import socket
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import zstandard
from openai import APIStatusError, OpenAI

import quire
from quire.api.listening import check_exposure
from quire.api.routes import OPERATIONS
from quire.core.config import ServerConfig
from quire.core.errors import QuireError
from quire.core.request import Failure
from tests.api.conftest import HTTP, NAME, Serve, Served, access_records
from tests.support.scripted_engine import Script
from tests.support.server import JSON_TYPE, RAW_HEAD, leaving
from tests.support.waiting import HANG_S, wait_until

ASK = {"messages": [{"role": "user", "content": "Hi."}]}
CHAT = "/v1/chat/completions"


def test_a_key_opens_every_route_and_only_health_needs_none(serve: Serve) -> None:
    served = serve(config=ServerConfig(api_keys=("first", "second", "clé")))
    with httpx.Client(base_url=served.url, timeout=HANG_S) as client:
        assert client.get("/health").status_code == 200
        for operation in OPERATIONS:
            if operation.open:
                continue
            for headers in ({}, {"authorization": "Bearer wrong"}, {"x-api-key": ""}):
                refused = client.request(operation.method, operation.path, headers=headers)
                assert refused.status_code == 401, operation.path
                assert refused.headers["x-should-retry"] == "false"
                error = refused.json()["error"]
                ollama = operation.path.startswith("/api/")  # its errors are texts
                assert ollama or error["type"] == "authentication_error"
        for headers in (
            {"authorization": "Bearer first"},
            {"authorization": "bearer second"},
            {"x-api-key": "second"},
            {"x-api-key": "other", "authorization": "Bearer first"},
            {"x-api-key": "clé".encode()},
        ):
            assert client.get("/v1/models", headers=headers).status_code == 200
        assert client.get("/nowhere").status_code == 401


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.0.4", "example.com", ""])
def test_a_server_for_strangers_needs_a_key_or_a_second_word(host: str) -> None:
    with pytest.raises(QuireError, match="API key"):
        check_exposure(ServerConfig(host=host), allow_anyone=False)
    check_exposure(ServerConfig(host=host), allow_anyone=True)
    check_exposure(ServerConfig(host=host, api_keys=("k",)), allow_anyone=False)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.1.2.3", "::1", "localhost", "unix:/run/q"])
def test_this_machine_may_be_served_without_a_key(host: str) -> None:
    check_exposure(ServerConfig(host=host), allow_anyone=False)


@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_too_large_is_refused(serve: Serve, chunked: bool) -> None:
    served = serve(config=ServerConfig(max_body_bytes=1000))
    body = json.dumps({**ASK, "user": "x" * 1000}).encode()
    content = iter([body[:500], body[500:]]) if chunked else body
    answer = HTTP.post(served.url + CHAT, content=content, headers=JSON_TYPE)
    assert (answer.status_code, answer.json()["error"]["code"]) == (413, "request_too_large")


def test_headers_and_messages_have_limits(serve: Serve) -> None:
    served = serve(config=ServerConfig(max_messages=2))
    answer = HTTP.post(served.url + CHAT, json=ASK, headers={"x-padding": "x" * 40_000})
    assert answer.status_code == 413
    answer = HTTP.post(served.url + CHAT, json={"messages": ASK["messages"] * 3})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "messages")
    assert HTTP.post(served.url + CHAT, json={"messages": ASK["messages"] * 2}).status_code == 200


def test_requests_beyond_the_limit_are_told_to_come_back(serve: Serve) -> None:
    go = threading.Event()
    served = serve(lambda _: Script((5, 6), held=go), config=ServerConfig(max_concurrent=2))
    with ThreadPoolExecutor(2) as pool:
        slow = [
            pool.submit(HTTP.post, served.url + CHAT, json={**ASK, "stream": stream})
            for stream in (True, False)
        ]
        wait_until(lambda: len(served.engine.requests) >= 2)
        refused = HTTP.post(served.url + CHAT, json=ASK)
        assert refused.status_code == 429
        assert int(refused.headers["retry-after"]) >= 1
        assert HTTP.get(f"{served.url}/health").status_code == 200
        go.set()
        assert [each.result().status_code for each in slow] == [200, 200]
    for _ in range(5):  # slots come back, also from requests that were refused
        served.settle()
        assert HTTP.post(served.url + CHAT, json={**ASK, "n": 0}).status_code == 400
        served.settle()
        assert HTTP.post(served.url + CHAT, json=ASK).status_code == 200


def test_the_deadline_goes_to_the_engine(serve: Serve) -> None:
    served = serve(config=ServerConfig(request_deadline_s=7.5, default_max_tokens=12))
    HTTP.post(served.url + CHAT, json=ASK)
    (request,) = served.engine.requests
    assert (request.deadline_s, request.max_tokens) == (7.5, 12)


@pytest.mark.parametrize("stream", [False, True])
def test_a_deadline_that_passed_is_not_tried_again(serve: Serve, stream: bool) -> None:
    failure = Failure("the request was not finished within 1 s", 408, "timeout_error")
    served = serve(lambda _: Script(error=failure))
    messages: Any = ASK["messages"]
    patient = OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=2)
    with pytest.raises(APIStatusError, match="not finished within") as raised:
        patient.chat.completions.create(model=NAME, messages=messages, stream=stream)
    assert raised.value.status_code == 408
    assert len(served.engine.requests) == 1
    answer = HTTP.post(f"{served.url}/v1/messages", json={"model": NAME, "max_tokens": 9, **ASK})
    assert answer.json()["error"]["type"] == "timeout_error"


def test_a_head_without_end_is_not_taken_in(serve: Serve) -> None:
    address = httpx.URL(serve().url)
    with socket.create_connection((address.host, address.port or 80), timeout=HANG_S) as raw:
        raw.sendall(b"GET /health HTTP/1.1\r\nx-endless: ")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 64 << 20:
                sent += raw.send(b"x" * 65536)
        assert sent < 64 << 20, "it was taken in"


def test_cors_is_off_unless_an_origin_is_named(serve: Serve) -> None:
    asking = {"origin": "https://a.example", "access-control-request-method": "POST"}
    plain = HTTP.options(serve().url + CHAT, headers=asking)
    assert plain.status_code == 403
    assert "access-control-allow-origin" not in plain.headers
    config = ServerConfig(cors_origins=("https://a.example",), api_keys=("k",))
    served = serve(config=config)
    allowed = HTTP.options(served.url + CHAT, headers=asking)
    assert allowed.headers["access-control-allow-origin"] == "https://a.example"
    other = HTTP.options(served.url + CHAT, headers={**asking, "origin": "https://b.example"})
    assert "access-control-allow-origin" not in other.headers


def test_an_origin_may_be_named_as_the_address_bar_shows_it(serve: Serve) -> None:
    served = serve(config=ServerConfig(cors_origins=("http://A.example:3000/",)))
    headers = {"origin": "http://a.example:3000"}
    answer = HTTP.post(served.url + CHAT, json=ASK, headers=headers)
    assert answer.headers["access-control-allow-origin"] == headers["origin"]


def test_a_public_page_may_call_this_machine_if_it_is_named(serve: Serve) -> None:
    """Chrome asks so before a page of the internet calls a local address."""
    private = "access-control-{}-private-network"
    asking = {
        "origin": "https://a.example",
        "access-control-request-method": "POST",
        private.format("request"): "true",
    }
    for origin, status in ("https://a.example", 200), ("*", 400):
        served = serve(config=ServerConfig(cors_origins=(origin,)))
        answer = HTTP.options(served.url + CHAT, headers=asking)
        assert answer.status_code == status
        assert (answer.headers.get(private.format("allow")) == "true") == (status == 200)


def test_metrics_carry_what_gateways_route_by(serve: Serve) -> None:
    served = serve(lambda _: Script((5, 6, 7)), config=ServerConfig())
    HTTP.post(served.url + CHAT, json=ASK)
    served.settle()
    text = HTTP.get(f"{served.url}/metrics").text
    name = "quire-demo"
    for line in (
        rf'vllm:num_requests_waiting{{model_name="{name}"}} \d',
        rf'vllm:num_requests_running{{model_name="{name}"}} \d',
        rf'vllm:kv_cache_usage_perc{{model_name="{name}"}} 0',
        rf'vllm:prefix_cache_hits_total{{model_name="{name}"}} \d',
        rf'vllm:cache_config_info{{block_size="64",model_name="{name}",num_gpu_blocks="\d+"}} 1',
        rf'vllm:lora_requests_info{{max_lora="0",model_name="{name}",running_lora_adapters=""',
    ):
        assert re.search(line, text), line


def test_metrics_count_requests_tokens_and_times(serve: Serve) -> None:
    served = serve(lambda _: Script((5, 6, 7)), config=ServerConfig())
    for _ in range(3):
        HTTP.post(served.url + CHAT, json=ASK)
    HTTP.post(served.url + CHAT, json={**ASK, "stream": True})
    HTTP.post(served.url + CHAT, json={})
    for made_up in range(3):
        HTTP.get(f"{served.url}/made-up-{made_up}")
        HTTP.get(f"{served.url}/v1/responses/resp_{made_up}")
    HTTP.get(f"{served.url}/v1/models/quire-demo")
    served.settle()
    text = HTTP.get(f"{served.url}/metrics").text
    for line in (
        f'quire_http_responses_total{{path="{CHAT}",status="200"}} 4.0',
        f'quire_http_responses_total{{path="{CHAT}",status="400"}} 1.0',
        'quire_http_responses_total{path="other",status="404"} 3.0',
        'quire_http_responses_total{path="/v1/responses/{id}",status="404"} 3.0',
        'quire_http_responses_total{path="/v1/models/{name}",status="200"} 1.0',
        'quire_answers_total{reason="stop"} 4.0',
        "quire_time_to_first_token_seconds_count 4.0",
        "quire_inter_token_seconds_count",
        'quire_kv_bytes{pool="full/plain",state="live"} 4096.0',
        'quire_prefix_misses_total{reason="evicted"} 2.0',
        "quire_steps_total 7.0",
        "quire_disk_bytes 8192.0",
        'quire_disk_blocks_total{what="hits"} 3.0',
        'quire_disk_pages_total{what="hits"} 3.0',  # its name before 0.2
        "quire_http_in_flight 0.0",
    ):
        assert line in text
    assert "made-up" not in text


def test_one_line_a_request_says_how_it_went(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(lambda _: Script((5, 6, 7), cached_tokens=4, reuse="evicted"))
    with caplog.at_level(logging.INFO, logger="quire.access"):
        answer = HTTP.post(served.url + CHAT, json={**ASK, "stream": True})
        served.settle()
        HTTP.post(served.url + CHAT, json={"model": "x", **ASK})
        served.settle()
    good, bad = (vars(record)["fields"] for record in access_records(caplog))
    assert good["id"] == answer.headers["x-request-id"]
    assert (good["path"], good["status"], good["finish"]) == (CHAT, 200, "stop")
    assert (good["cached_tokens"], good["reuse"], good["completion_tokens"]) == (4, "evicted", 4)
    assert good["ttft_ms"] >= 0
    assert (bad["status"], "finish" in bad) == (404, False)
    assert bad["error"]["type"] == "not_found_error"
    assert "'x' is not served here" in bad["error"]["message"]
    first, second = (record.message for record in access_records(caplog))
    assert re.match(
        rf"POST {CHAT} 200 \d+ ms model={NAME} prompt_tokens=\d+ cached_tokens=4 ", first
    )
    assert first.endswith(f" id={good['id']}")
    assert second.startswith(f"POST {CHAT} 404 ")


def test_slots_are_the_running_streams_and_an_idle_one(serve: Serve) -> None:
    served = serve(lambda _: Script(silent=True, reuse=None))
    slots = f"{served.url}/slots"
    idle = {"id": 0, "n_ctx": 4096, "is_processing": False}
    assert HTTP.get(slots).json() == [idle]
    with leaving(served.url, CHAT, {**ASK, "stream": True}):
        wait_until(lambda: len(HTTP.get(slots).json()) == 2)
        busy, last = HTTP.get(slots).json()
        assert busy["is_processing"]
        assert busy["n_prompt_tokens"] > 0
        assert busy["next_token"] == [{"has_next_token": True, "n_decoded": 0}]
        assert last == {**idle, "id": 1}
    assert HTTP.get(slots, params={"model": "other"}).status_code == 404


def test_nothing_is_said_of_the_reuse_of_a_prompt_that_was_never_read(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve(lambda _: Script(silent=True, reuse=None))
    with caplog.at_level(logging.INFO, logger="quire.access"):
        with leaving(served.url, CHAT, {**ASK, "stream": True}):
            wait_until(lambda: served.engine.tickets)
        served.settle()
    (record,) = access_records(caplog)
    fields = vars(record)["fields"]
    assert (fields["finish"], fields["reuse"]) == ("abort", None)
    assert "reuse" not in record.message
    view = HTTP.get(f"{served.url}/metrics", headers={"accept": "application/json"}).json()
    seen = view["ended"][0]
    assert (seen["finish"], seen["reuse"]) == ("abort", None)


def test_what_is_asked_each_second_is_logged_at_debug_level_unless_it_fails(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve()
    paths = ["/metrics", "/health", "/page/main.js", "/page/none.js", "/v1/models", "/tokenize"]
    with caplog.at_level(logging.DEBUG, logger="quire.access"):
        for path in paths:
            HTTP.get(served.url + path, headers={"x-quire-watch": "1"})
            served.settle()
        HTTP.get(f"{served.url}/v1/models")
        served.settle()
    levels = [logging.DEBUG] * 3 + [logging.INFO, logging.DEBUG, logging.INFO, logging.INFO]
    assert [record.levelno for record in access_records(caplog)] == levels


def test_the_root_names_the_server(serve: Serve) -> None:
    served = serve()
    assert HTTP.head(served.url).status_code == 200
    assert HTTP.get(served.url).json()["name"] == "quire"


def test_models_lists_the_served_models(serve: Serve) -> None:
    served = serve()
    (model,) = HTTP.get(f"{served.url}/v1/models").json()["data"]
    assert (model["id"], model["object"], model["context_length"]) == ("quire-demo", "model", 4096)
    assert "page-4" in model["kv_formats"]
    assert model["modalities"] == ["text"]
    again = HTTP.get(f"{served.url}/v1/models/quire-demo").json()
    assert again.pop("expires_s") == pytest.approx(model.pop("expires_s"), abs=60)
    assert again == model
    missing = HTTP.get(f"{served.url}/v1/models/some/other")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "model_not_found")


def test_a_model_may_have_further_names(serve: Serve) -> None:
    served = serve(config=ServerConfig(also_named=("claude-haiku-4-5", "gpt-5")))
    for name, status in (("gpt-5", 200), (NAME, 200), ("gpt-4", 404)):
        answer = HTTP.post(served.url + CHAT, json={"model": name, **ASK})
        assert answer.status_code == status
        assert status == 404 or answer.json()["model"] == NAME
    body = {"model": "claude-haiku-4-5", "max_tokens": 5, **ASK}
    assert HTTP.post(f"{served.url}/v1/messages", json=body).json()["model"] == NAME


def test_text_to_tokens_and_back(serve: Serve) -> None:
    served = serve()

    def tokenize(**body: object) -> dict[str, object]:
        answer = HTTP.post(f"{served.url}/tokenize", json=body)
        assert answer.status_code == 200, answer.text
        parsed: dict[str, object] = answer.json()
        return parsed

    tokens = tokenize(prompt="naïve fox", add_special_tokens=False)["tokens"]
    assert tokens == list(served.ids("naïve fox"))
    back = HTTP.post(f"{served.url}/detokenize", json={"tokens": tokens})
    assert back.json() == {"prompt": "naïve fox", "content": "naïve fox"}
    assert tokenize(content="naïve fox")["tokens"] == tokens
    pieces = tokenize(content="fox", with_pieces=True)["tokens"]
    names = [served.tokenizer.token_text(each) for each in served.ids("fox")]
    assert pieces == [{"id": i, "piece": n} for i, n in zip(served.ids("fox"), names, strict=True)]
    HTTP.post(served.url + CHAT, json=ASK)
    chat = tokenize(**ASK, return_token_strs=True)
    assert chat["tokens"] == list(served.engine.requests[0].prompt)
    assert chat["count"] == len(served.engine.requests[0].prompt)
    for body in ({}, {"prompt": "x", **ASK}):
        assert HTTP.post(f"{served.url}/tokenize", json=body).status_code == 400
    wrong = HTTP.post(f"{served.url}/detokenize", json={"tokens": [10**8]})
    assert (wrong.status_code, wrong.json()["error"]["param"]) == (400, "tokens")


def test_tokens_of_a_message_that_goes_on(serve: Serve) -> None:
    served = serve()
    said = [*ASK["messages"], {"role": "assistant", "content": "6"}]

    def count(**body: object) -> int:
        answer = HTTP.post(f"{served.url}/tokenize", json={"messages": said, **body})
        assert answer.status_code == 200, answer.text
        counted: int = answer.json()["count"]
        return counted

    goes_on = count(continue_final_message=True, add_generation_prompt=False)
    assert goes_on == count()
    assert goes_on < count(continue_final_message=False) == count(add_generation_prompt=True)


def test_unknown_routes_and_methods_have_openais_shape(serve: Serve) -> None:
    served = serve()
    missing = HTTP.get(f"{served.url}/nowhere")
    assert (missing.status_code, missing.json()["error"]["code"]) == (404, "unknown_url")
    base = HTTP.get(f"{served.url}/v1")
    assert (base.status_code, "open /" in base.json()["error"]["message"]) == (404, True)
    wrong = HTTP.put(served.url + CHAT)
    assert (wrong.status_code, "POST" in wrong.headers["allow"]) == (405, True)
    assert wrong.json()["error"]["code"] == "method_not_allowed"
    assert "POST" in wrong.json()["error"]["message"]
    anthropic = HTTP.get(f"{served.url}/v1/messages/nowhere").json()
    assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "not_found_error")


def test_a_client_that_leaves_while_it_sends_harms_nobody(
    serve: Serve, caplog: pytest.LogCaptureFixture
) -> None:
    served = serve()
    address = httpx.URL(served.url)
    with socket.create_connection((address.host, address.port or 80)) as raw:
        head = f"POST {CHAT} HTTP/1.1\r\n{RAW_HEAD}\r\ncontent-length: 99"
        raw.sendall(f"{head}\r\n\r\n{{".encode())
    assert HTTP.post(served.url + CHAT, json=ASK).status_code == 200


def test_what_nobody_expected_is_answered_and_the_connection_lives_on(serve: Serve) -> None:
    def broken(_: Any) -> Script:
        raise ValueError("/srv/secret/path")

    served = serve(broken)
    with httpx.Client(base_url=served.url, timeout=HANG_S) as client:
        body = {"messages": [{"role": "user", "content": "x"}]}
        answer = client.post("/v1/chat/completions", json=body)
        assert answer.status_code == 500
        assert "secret" not in answer.text
        assert answer.json()["error"]["code"] == "internal_error"
        stream = answer.extensions["network_stream"]
        again = client.get("/health")
        assert again.status_code == 200
        assert again.extensions["network_stream"] is stream


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/tokenize", "/models/load"])
def test_a_body_compressed_in_another_way_is_told_so(serve: Serve, path: str) -> None:
    url = serve().url + path
    headers = {"content-type": "application/json", "content-encoding": "br"}
    answer = HTTP.post(url, content=b"x", headers=headers)
    assert answer.status_code == 415
    assert "Content-Encoding is 'br'; this server reads gzip" in answer.json()["error"]["message"]
    headers["content-encoding"] = "identity"
    answer = HTTP.post(url, content=b"{}", headers=headers)
    assert answer.status_code == 400


def test_a_byte_order_mark_is_no_part_of_a_body(shared: Served) -> None:
    """Windows' tools write it at the beginning of a file."""
    headers = {"content-type": "application/json"}
    body = codecs.BOM_UTF8 + json.dumps(ASK).encode()
    assert HTTP.post(shared.url + CHAT, content=body, headers=headers).status_code == 200


@pytest.mark.parametrize(
    ("coding", "pack"), [("gzip", gzip.compress), ("zstd", zstandard.compress)]
)
def test_compressed_bodies_are_read_and_bombs_refused(
    serve: Serve, coding: str, pack: Callable[[bytes], bytes]
) -> None:
    served = serve(config=ServerConfig(max_body_bytes=1 << 16))
    headers = {"content-type": "application/json", "content-encoding": coding}

    def post(content: bytes) -> httpx.Response:
        return HTTP.post(served.url + CHAT, content=content, headers=headers)

    body = json.dumps(ASK).encode()
    assert post(pack(body)).status_code == 200
    assert post(pack(body[:9]) + pack(body[9:])).status_code == 200  # of several members
    bomb = pack(b" " * (8 << 20))
    assert len(bomb) < 1 << 16
    assert post(bomb).status_code == 413
    for broken in (b"x", pack(body)[:-5], body):
        answer = post(broken)
        assert answer.status_code == 400, broken
        assert answer.json()["error"]["code"] == "invalid_encoding"
    served.settle()
    assert len(served.engine.requests) == 2


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/chat/completions", "did you mean /v1/chat/completions?"),
        ("/v1/v1/messages", "did you mean /v1/messages?"),
        ("//v1/messages", "did you mean /v1/messages?"),
        ("/v1//chat/completions", "did you mean /v1/chat/completions?"),
        ("//v1//", "/v1 is the base URL"),
        ("/v1/", "/v1 is the base URL"),
        ("/v1/v1/nothing", "There is no such route; /openapi.json"),
    ],
)
def test_a_route_that_is_not_there_names_the_one_meant(serve: Serve, path: str, said: str) -> None:
    answer = HTTP.post(serve().url + path, json=ASK)
    assert (answer.status_code, answer.json()["error"]["code"]) == (404, "unknown_url")
    assert said in answer.json()["error"]["message"]
    assert ("Anthropic's clients" in answer.json()["error"]["message"]) == ("/v1" in said)


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/moderations", "'/v1/moderations' is not offered. No model here judges content"),
        ("//v1/audio/speech/", "'/v1/audio/speech' is not offered."),
        ("/v1/threads/thread_1/runs", "'/v1/threads' is not offered."),
        ("/api/push", "'/api/push' is not offered."),
    ],
)
def test_routes_of_the_protocols_that_are_not_offered_are_named(
    serve: Serve, path: str, said: str
) -> None:
    answer = HTTP.post(serve().url + path, json=ASK)
    assert (answer.status_code, answer.headers["x-should-retry"]) == (501, "false")
    error = answer.json()["error"]
    assert said in (error if isinstance(error, str) else error["message"])


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/v1/chat/completions", ASK),
        ("GET", "/v1/models", None),
        ("GET", "/health", None),
    ],
)
def test_a_slash_at_the_end_of_a_path_changes_nothing(
    serve: Serve, method: str, path: str, body: dict[str, Any] | None
) -> None:
    url = serve().url + path
    plain, slashed = (HTTP.request(method, url + end, json=body) for end in ("", "/"))
    assert slashed.status_code == plain.status_code == 200
    assert slashed.json().keys() == plain.json().keys()


def test_messages_become_the_text_of_a_prompt(serve: Serve) -> None:
    served = serve()
    body = {"messages": [{"role": "user", "content": "Hi."}]}
    prompt = HTTP.post(f"{served.url}/apply-template", json=body).json()["prompt"]
    assert "Hi." in prompt
    tokens = HTTP.post(f"{served.url}/tokenize", json=body).json()["tokens"]
    assert served.tokenizer.decode(tokens) == prompt
    answer = HTTP.post(f"{served.url}/apply-template", json={"prompt": "x"})
    assert answer.json()["error"]["param"] == "messages"


def test_what_other_servers_tell(serve: Serve) -> None:
    url = serve().url
    assert HTTP.get(f"{url}/version").json() == {"version": quire.__version__}
    assert HTTP.get(f"{url}/ping").content == b""
    props = HTTP.get(f"{url}/props").json()
    assert props["default_generation_settings"]["n_ctx"] == 4096
    assert props["modalities"] == {"vision": False, "audio": False}
    assert "messages" in props["chat_template"]
    assert HTTP.get(f"{url}/props", params={"model": "other"}).status_code == 404
