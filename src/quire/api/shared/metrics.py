"""Prometheus metrics. Samples are kept as plain lists and become metric families only when scraped,
so that counting is nearly free.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Iterable, Iterator

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import (
    CounterMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from quire.api.shared.access import Access
from quire.api.shared.activity import Activity
from quire.api.shared.auth import EVERYONE
from quire.api.shared.live_streams import Stream, Streams
from quire.api.shared.refusals import Refusals
from quire.core.request import FinishReason
from quire.serving.streams import Observer
from quire.text.events import Failed, Finished

_TTFT_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)
_BETWEEN_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0)
_REQUEST_S = (0.01, 0.05, 0.1, 0.5, 1.0, 5.0, 10.0, 30.0, 60.0, 300.0, 1800.0)


class Histogram:
    """Counts of samples by upper bound, and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    def observe(self, value: float, count: int = 1) -> None:
        """Add `count` samples of `value`."""
        self._counts[bisect_left(self._bounds, value)] += count
        self._sum += value * count

    def family(self, name: str, text: str) -> HistogramMetricFamily:
        """Return the samples in Prometheus' form: cumulative."""
        buckets, total = [], 0
        for bound, count in zip((*self._bounds, float("inf")), self._counts, strict=True):
            total += count
            buckets.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return HistogramMetricFamily(name, text, buckets=buckets, sum_value=self._sum)


class Metrics:
    """The HTTP side's counters, its last minutes, and the running streams."""

    def __init__(self) -> None:
        self.time_to_first_token = Histogram(_TTFT_S)
        self.between_tokens = Histogram(_BETWEEN_S)
        self.request_seconds = Histogram(_REQUEST_S)
        self.responses: Counter[tuple[str, str]] = Counter()
        self.ends: Counter[str] = Counter()
        self.streams = Streams()
        self.refusals = Refusals()
        self.activity = Activity()

    def first_token(self, seconds: float) -> None:
        """Count a request's first token."""
        self.time_to_first_token.observe(seconds)
        self.activity.add(written=1)

    def tokens(self, seconds: float, count: int) -> None:
        """Count `count` further tokens of a request, after `seconds`."""
        self.between_tokens.observe(seconds / count, count)
        self.activity.add(written=count)

    def ended(self, finish: str) -> None:
        """Count the end of a choice."""
        self.ends[finish] += 1

    def response(self, access: Access) -> None:
        """Count a response that was sent whole, or whose client left."""
        self.responses[access.route, str(access.line["status"])] += 1
        self.request_seconds.observe(access.ended - access.started)
        if (refusal := access.refusal) is not None:
            self.refusals.add(refusal)

    def render(self, engines: Iterable[Metric] = ()) -> bytes:
        """Return the text exposition of all counters, with the engines' if they are given."""
        registry = CollectorRegistry()
        registry.register(_Snapshot([*self._families(), *engines]))
        return generate_latest(registry)

    def view(self, engines: Iterable[Metric] = ()) -> dict[str, object]:
        """Return `/metrics` as JSON: the samples of `render` by name, running and finished streams,
        refused requests, and the last minutes.
        """
        samples: dict[str, list[dict[str, object]]] = {}
        for family in (*self._families(), *engines):
            for sample in family.samples:
                samples.setdefault(sample.name, []).append(
                    {"labels": sample.labels, "value": sample.value}
                )
        return {
            "metrics": samples,
            "streams": self.streams.view(),
            "ended": self.streams.view_ended(),
            "refused": self.refusals.view(),
            "history": self.activity.view(),
        }

    def _families(self) -> Iterator[Metric]:
        responses = CounterMetricFamily(
            "quire_http_responses", "HTTP responses", labels=["path", "status"]
        )
        for (path, status), count in self.responses.items():
            responses.add_metric([path, status], count)
        yield responses
        yield counted(
            "quire_answers", "HTTP answers, by outcome", "reason", items=self.ends.items()
        )
        yield self.request_seconds.family("quire_http_request_seconds", "Duration of HTTP requests")
        yield self.time_to_first_token.family(
            "quire_time_to_first_token_seconds",
            "Time to first token, from the request's submission",
        )
        yield self.between_tokens.family(
            "quire_inter_token_seconds", "Time between two tokens of a request"
        )


class CallerMetrics:
    """All callers' counters together, and each caller's own if callers are told apart."""

    def __init__(self, callers: Iterable[str]) -> None:
        self.all = Metrics()
        self._own = {caller: Metrics() for caller in callers if caller != EVERYONE}

    def of(self, caller: str) -> Metrics:
        """Return the metrics that a caller may see."""
        return self._own.get(caller, self.all)

    def response(self, access: Access) -> None:
        """Count a response that was sent whole, or whose client left."""
        for metrics in self._of_both(access.caller):
            metrics.response(access)

    def observer(self, caller: str, prompt_tokens: int, model: str) -> Observer:
        """Return an observer that counts one of a caller's choices."""
        return _Watched(self._of_both(caller), Stream(prompt_tokens, model))

    def _of_both(self, caller: str) -> tuple[Metrics, ...]:
        own = self._own.get(caller)
        return (self.all,) if own is None else (self.all, own)


class _Watched:
    """Counts a choice in several places; implements `quire.serving.streams.Observer`."""

    def __init__(self, places: tuple[Metrics, ...], stream: Stream) -> None:
        self._places = places
        self._stream = stream
        for place in places:
            place.streams.add(stream)

    def read(self, done: int, cached: int, reuse: str | None, left_s: float | None) -> None:
        computed = self._stream.read(done, cached, reuse, left_s=left_s)
        for place in self._places:
            place.activity.add(read=computed)

    def first_token(self, seconds: float, cached: int, reuse: str | None) -> None:
        self.read(self._stream.prompt_tokens, cached, reuse, left_s=None)
        self._stream.start()
        for place in self._places:
            place.first_token(seconds)

    def tokens(self, seconds: float, count: int) -> None:
        self._stream.generated += count
        for place in self._places:
            place.tokens(seconds, count)

    def ended(self, event: Finished | Failed) -> None:
        self._end(event.reason if isinstance(event, Finished) else FinishReason.ERROR)

    def gone(self) -> None:
        self._end(FinishReason.ABORT)

    def _end(self, finish: FinishReason) -> None:
        reason = str(finish)
        if self._stream.end(reason):
            for place in self._places:
                place.ended(reason)
                place.streams.end(self._stream)


class _Snapshot(Collector):
    """A registry of ready metric families, for one answer."""

    def __init__(self, families: list[Metric]) -> None:
        self._families = families

    def collect(self) -> Iterable[Metric]:
        return self._families


def counted(
    name: str, text: str, label: str, items: Iterable[tuple[str, int]]
) -> CounterMetricFamily:
    family = CounterMetricFamily(name, text, labels=[label])
    for key, count in items:
        family.add_metric([key], count)
    return family
