"""Prometheus metrics of the engines: one metric family for each figure, one sample for each
model.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from quire.core.info import EngineStats
from quire.serving.models import Models

Samples = Iterable[tuple[tuple[str, ...], float]]
"""Values by the figure's own labels."""


@dataclass(frozen=True, slots=True)
class _Figure:
    """One metric family.

    Attributes:
        counts: whether it is a counter; otherwise it is a gauge.
        samples: returns the samples of one engine.
    """

    name: str
    text: str
    samples: Callable[[EngineStats], Samples]
    labels: tuple[str, ...] = ()
    counts: bool = False

    def family(self, engines: Mapping[str, EngineStats], by_model: tuple[str, ...]) -> Metric:
        """Return the samples of all engines; `by_model` is the label that tells them apart, or
        nothing.
        """
        kind = CounterMetricFamily if self.counts else GaugeMetricFamily
        family = kind(self.name, self.text, labels=(*by_model, *self.labels))
        for model, stats in engines.items():
            for labels, value in self.samples(stats):
                family.add_metric([model, *labels] if by_model else list(labels), value)
        return family


def _one(value: Callable[[EngineStats], float]) -> Callable[[EngineStats], Samples]:
    return lambda stats: (((), value(stats)),)


def _by_name(
    pairs: Callable[[EngineStats], Iterable[tuple[str, int]]],
) -> Callable[[EngineStats], Samples]:
    return lambda stats: (((name,), value) for name, value in pairs(stats))


def _kv_bytes(stats: EngineStats) -> Samples:
    for state, pools in (("live", stats.kv_used), ("kept", stats.kv_kept)):
        for pool, size in pools:
            yield (pool, state), size


def _disk_bytes(stats: EngineStats) -> Samples:
    return (((), value) for what, value in stats.disk if what == "bytes")


def _disk_blocks(stats: EngineStats) -> Samples:
    return (((what,), value) for what, value in stats.disk if what != "bytes")


_FIGURES = (
    _Figure(
        "quire_running_sequences",
        "Running sequences, in prefill or decode",
        _one(lambda stats: stats.running),
    ),
    _Figure(
        "quire_waiting_sequences",
        "Waiting sequences",
        _one(lambda stats: stats.waiting),
    ),
    _Figure(
        "quire_kv_budget_bytes",
        "Budget of the KV cache in bytes",
        _one(lambda stats: stats.kv_budget),
    ),
    _Figure("quire_steps", "Engine steps", _one(lambda stats: stats.steps), counts=True),
    _Figure(
        "quire_prompt_tokens",
        "Prompt tokens of all requests",
        _one(lambda stats: stats.prompt_tokens),
        counts=True,
    ),
    _Figure(
        "quire_cached_tokens",
        "Prompt tokens found in the prefix cache",
        _one(lambda stats: stats.cached_tokens),
        counts=True,
    ),
    _Figure(
        "quire_generated_tokens",
        "Tokens generated",
        _one(lambda stats: stats.generated_tokens),
        counts=True,
    ),
    _Figure(
        "quire_drafted_tokens",
        "Draft tokens that steps verified, by drafter",
        _by_name(lambda stats: stats.drafts),
        labels=("drafter",),
        counts=True,
    ),
    _Figure(
        "quire_accepted_draft_tokens",
        "Draft tokens that were accepted, by drafter",
        _by_name(lambda stats: stats.accepted_drafts),
        labels=("drafter",),
        counts=True,
    ),
    _Figure(
        "quire_preemptions",
        "Preempted sequences",
        _one(lambda stats: stats.preemptions),
        counts=True,
    ),
    _Figure(
        "quire_rank_work_seconds",
        "Seconds that each process of a split model took for the same steps",
        lambda stats: (((str(rank),), each) for rank, each in enumerate(stats.work_seconds)),
        labels=("rank",),
    ),
    _Figure(
        "quire_prefix_misses",
        "Requests by the reason why prefix reuse ended",
        _by_name(lambda stats: stats.reuse_misses),
        labels=("reason",),
        counts=True,
    ),
    _Figure(
        "quire_sequences_finished",
        "Finished sequences, by finish reason",
        _by_name(lambda stats: stats.finished),
        labels=("reason",),
        counts=True,
    ),
    _Figure(
        "quire_kv_bytes",
        "Bytes of KV blocks in use, by group and format",
        _kv_bytes,
        labels=("pool", "state"),
    ),
    _Figure(
        "quire_kv_block_bytes",
        "Bytes of one KV block, by group and format",
        _by_name(lambda stats: stats.kv_block_bytes),
        labels=("pool",),
    ),
    _Figure(
        "quire_memory_bytes",
        "Memory of the engine's process and its device",
        _by_name(lambda stats: stats.memory),
        labels=("what",),
    ),
)
_OF_DISK = (
    _Figure("quire_disk_bytes", "Size of the disk tier's file", _disk_bytes),
    _Figure(
        "quire_disk_blocks",
        "KV blocks of the disk tier, by event",
        _disk_blocks,
        labels=("what",),
        counts=True,
    ),
    _Figure(  # the name before 0.2
        "quire_disk_pages",
        "Renamed to quire_disk_blocks; the next release drops this name",
        _disk_blocks,
        labels=("what",),
        counts=True,
    ),
)


def engine_families(
    models: Models,
    engines: Mapping[str, EngineStats],
    in_flight: int,
) -> Iterator[Metric]:
    """Yield the metric families of all engines.

    Samples have the label `model` if more than one model is served.

    Args:
        engines: counters of the models that are loaded, by name.
        in_flight: HTTP requests that generate.
    """
    yield GaugeMetricFamily(
        "quire_http_in_flight", "Generation requests in flight", value=in_flight
    )
    loaded = GaugeMetricFamily(
        "quire_models", "Models by state; the value is 1", labels=["model", "state"]
    )
    failures = CounterMetricFamily(
        "quire_engine_failures", "Failures of engines, which are started anew", labels=["model"]
    )
    for model in models:
        loaded.add_metric([model.name, model.state], 1)
        failures.add_metric([model.name], model.failures)
    yield loaded
    yield failures
    by_model = ("model",) if len(models) > 1 else ()
    with_disk = any(stats.disk for stats in engines.values())
    for figure in (*_FIGURES, *(_OF_DISK if with_disk else ())):
        yield figure.family(engines, by_model)
