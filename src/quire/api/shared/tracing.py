"""Traces of requests, sent to an OpenTelemetry collector by OTLP/HTTP (the extra `[otel]`).

Spans are made when a request is over, from its log line and its run's times. A thread sends them;
spans that a slow or absent collector does not take are dropped.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import quire
from quire.api.shared.access import Access
from quire.api.shared.notes import LogLine
from quire.core.errors import QuireError
from quire.core.request import FinishReason

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

_OPERATIONS = {
    "/v1/chat/completions": "chat",
    "/v1/completions": "text_completion",
    "/v1/messages": "chat",
    "/v1/responses": "chat",
}
"""GenAI conventions' operation name of each traced route."""
_TRACES_PATH = "/v1/traces"
_SEND_S = 5  # for one batch, with its repetitions
_LAST_S = 1.0  # at the end, after which a batch is not tried again
_REASONS = frozenset(reason.value for reason in FinishReason)

_ATTRIBUTES = {
    "model": "gen_ai.response.model",
    "prompt_tokens": "gen_ai.usage.input_tokens",
    "completion_tokens": "gen_ai.usage.output_tokens",
    "cached_tokens": "gen_ai.usage.cache_read.input_tokens",
    "reuse": "quire.cache.reuse",
    "id": "quire.request.id",
    "method": "http.request.method",
    "path": "url.path",
    "status": "http.response.status_code",
}
"""Semantic conventions' attribute name of each log field."""


class Tracer:
    """Makes a span for each request that generates, with `queue`, `prefill` and `decode` below it.

    A client's `traceparent` makes the span part of its trace, and its sampling holds.

    Args:
        endpoint: the collector's base URL, below which `/v1/traces` lies.
    """

    def __init__(self, endpoint: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import OTELResourceDetector, Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor

        url = endpoint.rstrip("/").removesuffix(_TRACES_PATH) + _TRACES_PATH
        own = Resource({"service.name": "quire", "service.version": quire.__version__})
        provider = TracerProvider(
            resource=own.merge(OTELResourceDetector().detect()), shutdown_on_exit=False
        )
        self._exporter = OTLPSpanExporter(endpoint=url, timeout=_SEND_S)
        provider.add_span_processor(BatchSpanProcessor(self._exporter))
        self._provider: TracerProvider = provider
        self._tracer = provider.get_tracer("quire", quire.__version__)

    def trace(self, access: Access) -> None:
        """Make the spans of a finished request that was to generate."""
        from opentelemetry import propagate
        from opentelemetry.trace import SpanKind, StatusCode, set_span_in_context

        operation = _OPERATIONS.get(access.route)
        if operation is None:
            return
        epoch = time.time_ns() - round(time.perf_counter() * 1e9)

        def at(seconds: float) -> int:
            return epoch + round(seconds * 1e9)

        headers = {
            name.decode("latin-1"): value.decode("latin-1") for name, value in access.headers
        }
        span = self._tracer.start_span(
            " ".join(filter(None, (operation, access.line.get("model")))),
            context=propagate.extract(headers),
            kind=SpanKind.SERVER,
            attributes=_attributes(operation, access),
            start_time=at(access.started),
        )
        if (error := _error(access.line)) is not None:
            span.set_attribute("error.type", error)
            span.set_status(StatusCode.ERROR)
        below = set_span_in_context(span)
        for name, started, over in _phases(access):
            child = self._tracer.start_span(name, context=below, start_time=at(started))
            child.end(at(over))
        span.end(at(access.ended))

    async def close(self) -> None:
        """Send the remaining spans, if the collector takes them."""
        give_up = asyncio.get_running_loop().call_later(_LAST_S, self._exporter.shutdown)
        try:
            await asyncio.to_thread(self._provider.shutdown)
        finally:
            give_up.cancel()


def open_tracer(endpoint: str | None) -> Tracer | None:
    """Return a tracer that exports to `endpoint`; None without one.

    Raises:
        QuireError: the extra is not installed.
    """
    if endpoint is None:
        return None
    try:
        return Tracer(endpoint)
    except ImportError as error:
        raise QuireError(
            "--otlp-endpoint (or OTEL_EXPORTER_OTLP_ENDPOINT) asks for traces: "
            'pip install "quire-serve[otel]"'
        ) from error


def _attributes(operation: str, access: Access) -> dict[str, Any]:
    line: Mapping[str, Any] = access.line
    told: dict[str, Any] = {
        "gen_ai.operation.name": operation,
        "gen_ai.provider.name": "quire",
        "http.route": access.route,
    }
    told |= {
        name: line[field] for field, name in _ATTRIBUTES.items() if line.get(field) is not None
    }
    if "finish" in line:
        told["gen_ai.response.finish_reasons"] = line["finish"].split(",")
    times = access.times
    if times is not None and times.first_token is not None:
        told["gen_ai.response.time_to_first_chunk"] = times.first_token - access.started
    return told


def _error(line: LogLine) -> str | None:
    """Return the server-side error of a response; None for success and client errors."""
    failed = [each for each in line.get("finish", "").split(",") if each and each not in _REASONS]
    if failed:
        return str(failed[0])
    return str(line["status"]) if line["status"] >= 500 else None


def _phases(access: Access) -> Iterator[tuple[str, float, float]]:
    """Yield name, start and end of each phase that was reached. The last one may be incomplete."""
    times = access.times
    if times is None:
        return
    ended = access.ended if times.ended is None else times.ended
    started = [
        ("queue", times.submitted),
        ("prefill", times.scheduled),
        ("decode", times.first_token),
    ]
    reached = [(name, since) for name, since in started if since is not None]
    ends = [since for _, since in reached[1:]] + [ended]
    for (name, since), over in zip(reached, ends, strict=True):
        yield name, since, over
