"""Traces of requests, as an OTLP/HTTP collector gets them."""

from __future__ import annotations

import gzip
import sys
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)
from opentelemetry.proto.common.v1.common_pb2 import AnyValue
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from quire.api.shared.tracing import open_tracer
from quire.core.config import ServerConfig
from quire.core.errors import QuireError
from quire.core.request import Failure, Request
from quire.text.tokenizer import Tokenizer
from tests.api.conftest import HTTP, NAME, start
from tests.support.scripted_engine import Script
from tests.support.waiting import HANG_S

CHAT = "/v1/chat/completions"
ASK = {"messages": [{"role": "user", "content": "Hi."}]}
TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"


class Collector:
    """Takes in spans; while `open` is not set it answers nobody."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.open.set()
        self.asked = threading.Event()
        self.requests: list[ExportTraceServiceRequest] = []
        self.url = ""

    @property
    def spans(self) -> list[Span]:
        return [
            span
            for request in self.requests
            for resource in request.resource_spans
            for scope in resource.scope_spans
            for span in scope.spans
        ]

    def take(self, path: str, body: bytes) -> bytes:
        self.asked.set()
        self.open.wait(HANG_S)
        assert path == "/v1/traces"
        self.requests.append(ExportTraceServiceRequest.FromString(body))
        return ExportTraceServiceResponse().SerializeToString()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    for name in ("_SEND_S", "_LAST_S"):  # a busy machine gives nothing up
        monkeypatch.setattr(f"quire.api.shared.tracing.{name}", HANG_S)
    found = Collector()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") == "gzip":
                body = gzip.decompress(body)
            answer = found.take(self.path, body)
            self.send_response(200)
            self.send_header("content-type", "application/x-protobuf")
            self.send_header("content-length", str(len(answer)))
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    found.url = f"http://127.0.0.1:{server.server_port}"
    yield found
    found.open.set()
    server.shutdown()
    server.server_close()


@contextmanager
def traced(tokenizer: Tokenizer, endpoint: str, script: Script) -> Iterator[str]:
    """Yield the URL of a server that traces; when the block is left, all spans have been sent."""

    def scripted(request: Request) -> Script:
        return script

    with ExitStack() as stack:
        served = start(stack, tokenizer, ServerConfig(otlp_endpoint=endpoint))
        served.engine.reset(scripted)
        yield served.url


def plain(value: AnyValue) -> object:
    kind = value.WhichOneof("value")
    if kind == "array_value":
        return [plain(each) for each in value.array_value.values]
    return getattr(value, str(kind))


def attributes(span: Span) -> dict[str, object]:
    return {each.key: plain(each.value) for each in span.attributes}


@pytest.mark.parametrize("stream", [False, True])
def test_a_request_is_a_span_with_its_phases_in_the_trace_of_its_client(
    tokenizer: Tokenizer, collector: Collector, stream: bool
) -> None:
    script = Script((5, 6, 7), cached_tokens=4, reuse="evicted", delay_s=0.01, queued_s=0.004)
    with traced(tokenizer, collector.url, script) as url:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        answer = HTTP.post(url + CHAT, json={**ASK, "stream": stream}, headers=headers)
        assert answer.status_code == 200
        assert HTTP.get(f"{url}/health").status_code == 200
    span, *phases = sorted(collector.spans, key=lambda each: each.start_time_unix_nano)
    assert (span.name, span.kind) == (f"chat {NAME}", Span.SPAN_KIND_SERVER)
    assert (span.trace_id.hex(), span.parent_span_id.hex()) == (TRACE, PARENT)
    told = attributes(span)
    assert told["gen_ai.operation.name"] == "chat"
    assert told["gen_ai.response.model"] == NAME
    assert told["gen_ai.usage.output_tokens"] == 4
    assert told["gen_ai.usage.cache_read.input_tokens"] == 4
    assert told["gen_ai.response.finish_reasons"] == ["stop"]
    assert told["quire.cache.reuse"] == "evicted"
    assert told["quire.request.id"] == answer.headers["x-request-id"]
    assert (told["http.route"], told["http.response.status_code"]) == (CHAT, 200)
    if not stream:
        usage = answer.json()["usage"]
        assert told["gen_ai.usage.input_tokens"] == usage["prompt_tokens"]
        assert told["gen_ai.usage.output_tokens"] == usage["completion_tokens"]
    queue, prefill, decode = phases
    assert [each.name for each in phases] == ["queue", "prefill", "decode"]
    assert {each.parent_span_id for each in phases} == {span.span_id}
    assert span.start_time_unix_nano <= queue.start_time_unix_nano
    assert abs(queue.end_time_unix_nano - queue.start_time_unix_nano - 4_000_000) < 1000
    assert queue.end_time_unix_nano == prefill.start_time_unix_nano
    assert prefill.end_time_unix_nano == decode.start_time_unix_nano
    assert decode.start_time_unix_nano < decode.end_time_unix_nano <= span.end_time_unix_nano
    (resource,) = {
        each.value.string_value
        for request in collector.requests
        for one in request.resource_spans
        for each in one.resource.attributes
        if each.key == "service.name"
    }
    assert resource == "quire"


def test_server_faults_are_errors_and_client_faults_are_not(
    tokenizer: Tokenizer, collector: Collector
) -> None:
    script = Script((5,), error=Failure("no", 500, code="internal_error"))
    with traced(tokenizer, collector.url, script) as url:
        assert HTTP.post(url + CHAT, json=ASK).status_code == 500
        assert HTTP.post(url + CHAT, json={}).status_code == 400
    failed, refused = (span for span in collector.spans if not span.parent_span_id)
    assert failed.status.code == Status.STATUS_CODE_ERROR
    assert attributes(failed)["error.type"] == "internal_error"
    assert (refused.name, refused.status.code) == (f"chat {NAME}", Status.STATUS_CODE_UNSET)
    assert attributes(refused)["http.response.status_code"] == 400


def test_a_client_that_wants_no_trace_gets_none(tokenizer: Tokenizer, collector: Collector) -> None:
    with traced(tokenizer, collector.url, Script((5,))) as url:
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-00"}
        assert HTTP.post(url + CHAT, json=ASK, headers=headers).status_code == 200
    assert not collector.spans


def test_a_collector_that_hangs_holds_up_nobody(
    tokenizer: Tokenizer, collector: Collector, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OTEL_BSP_SCHEDULE_DELAY", "1")
    collector.open.clear()
    with traced(tokenizer, collector.url, Script((5, 6))) as url:
        assert HTTP.post(url + CHAT, json=ASK).status_code == 200
        assert collector.asked.wait(HANG_S)
        for _ in range(3):
            assert HTTP.post(url + CHAT, json=ASK).status_code == 200
        assert not collector.requests
        collector.open.set()
    assert sum(span.name == f"chat {NAME}" for span in collector.spans) == 4


def test_a_collector_that_is_away_holds_up_neither_answers_nor_the_end(
    tokenizer: Tokenizer,
) -> None:
    with traced(tokenizer, "http://127.0.0.1:9", Script((5, 6))) as url:
        assert HTTP.post(url + CHAT, json=ASK).status_code == 200
        assert HTTP.get(f"{url}/health").status_code == 200


def test_traces_are_off_unless_asked_for() -> None:
    assert open_tracer(None) is None


def test_what_is_missing_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(QuireError, match=r"quire-serve\[otel\]"):
        open_tracer("http://127.0.0.1:4318")
