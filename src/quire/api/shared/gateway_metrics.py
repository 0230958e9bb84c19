"""Metrics that gateways route by, under the names that they read.

The endpoint picker of Kubernetes' inference gateway asks model servers for queue length, use of the
KV cache and adapters, by default under vLLM's names:
https://github.com/kubernetes-sigs/gateway-api-inference-extension (model server protocol).
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from quire.core.info import EngineStats
from quire.serving.model import Model

_GAUGES = (
    ("num_requests_running", "running requests"),
    ("num_requests_waiting", "waiting requests"),
    ("kv_cache_usage_perc", "share of the KV memory in use by requests, from 0 to 1"),
)
_COUNTERS = (
    ("prefix_cache_queries", "prompt tokens looked up in the prefix cache"),
    ("prefix_cache_hits", "prompt tokens found in the prefix cache"),
)


def gateway_families(models: Iterable[Model], stats: Mapping[str, EngineStats]) -> Iterator[Metric]:
    """Yield the metrics that gateways read, for each loaded model (label `model_name`).

    Args:
        stats: counters of the models that are loaded, by name.
    """
    values = {name: _values(each) for name, each in stats.items()}
    for kind, figures in ((GaugeMetricFamily, _GAUGES), (CounterMetricFamily, _COUNTERS)):
        for figure, text in figures:
            family = kind(f"vllm:{figure}", f"For gateways: {text}", labels=["model_name"])
            for name, own in values.items():
                family.add_metric([name], own[figure])
            yield family
    cache = GaugeMetricFamily(
        "vllm:cache_config_info",
        "For gateways: tokens per KV block, and the number of blocks",
        labels=["model_name", "block_size", "num_gpu_blocks"],
    )
    adapters = GaugeMetricFamily(
        "vllm:lora_requests_info",
        "For gateways: loaded adapters; the value is the time in seconds",
        labels=["model_name", "max_lora", "running_lora_adapters", "waiting_lora_adapters"],
    )
    for model in models:
        if model.info is None or model.name not in stats:
            continue
        blocks = _block_count(stats[model.name])
        cache.add_metric([model.name, str(model.info.blocks.block_size), str(blocks)], 1)
        engine = model.config.engine
        loaded = [*([engine.adapter] if engine.adapter else []), *(n for n, _ in engine.adapters)]
        labels = [model.name, str(len(loaded)), ",".join(loaded), ""]
        adapters.add_metric(labels, time.time())
    yield cache
    yield adapters


def _values(stats: EngineStats) -> dict[str, float]:
    used = sum(size for _, size in stats.kv_used)
    return {
        "num_requests_running": stats.running,
        "num_requests_waiting": stats.waiting,
        "kv_cache_usage_perc": used / stats.kv_budget if stats.kv_budget else 0.0,
        "prefix_cache_queries": stats.prompt_tokens,
        "prefix_cache_hits": stats.cached_tokens,
    }


def _block_count(stats: EngineStats) -> int:
    """Return how many blocks the budget holds in the first format that was used."""
    by_group: dict[str, int] = {}
    for pool, size in stats.kv_block_bytes:
        by_group.setdefault(pool.partition("/")[0], size)
    each = sum(by_group.values())
    return stats.kv_budget // each if each else 0
