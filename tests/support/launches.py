"""Counts what a step of the eager model launches on a Mac, without one.

A step's graph is built with the flags of the Metal device, on a CPU, and is never computed.
Functions of `mx.fast` count as one primitive each, as Metal has them; a CPU spells them out.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.core.request import Request, SamplingParams
from quire.device import device
from quire.engine.assembly import assemble
from quire.engine.engine import Engine
from quire.executor.eager import EagerExecutor
from quire.executor.step import LaunchedStep
from quire.models.base import named_parameters
from quire.models.layers.linear import use_device_products
from quire.models.registry import build
from quire.models.weights.layouts import store_for_device
from quire.models.weights.loader import LoadedModel
from quire.models.weights.low_rank import LowRank
from quire.scheduler.plan import StepPlan
from tests.support.grown import grown

_NEEDED = {
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "attention_bias": False,
    "mlp_bias": False,
    "rope_theta": 10_000.0,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
}
"""Keys that mlx-lm's models ask for where the test configurations leave them out."""
LEVEL = (
    "llama",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma4",
    "gemma4_moe",
    "gemma4_ple",
    "gpt_oss",
    "mixtral",
    "smollm3",
    "starcoder2",
    "olmoe",
    "phi3",
    "deepseek_v3",
)
"""Configurations whose steps launch no more than mlx-lm's."""
_TIMED = 25
"""Steps whose building is timed."""
VIEWS = frozenset(
    {"Reshape", "Transpose", "Broadcast", "ExpandDims", "Squeeze", "Unflatten", "Flatten"}
    | {"AsStrided", "StopGradient", "Slice", "Split"}
)
"""Primitives that launch nothing."""


class CountedMetal(device.Metal):
    """The Metal device, without kernels and without memory of its own."""

    kernel_language = ""

    def bound_caches(self) -> None:
        pass

    def _working_set(self) -> int:
        return 8 << 30


def primitives(arrays: Sequence[mx.array]) -> Counter[str]:
    """Return the primitives that compute arrays, by name, but for views."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "graph.dot")
        mx.export_to_dot(str(path), *arrays)
        names = re.findall(r'label ="([A-Za-z0-9_]+)", shape=rectangle', path.read_text())
    return Counter(name for name in names if name not in VIEWS)


@contextmanager
def one_primitive_each() -> Iterator[None]:
    """Make each function of `mx.fast` one primitive."""

    def same(x: mx.array, *_: Any, **__: Any) -> mx.array:
        return mx.abs(x)

    def attend(q: mx.array, k: mx.array, v: mx.array, **_: Any) -> mx.array:
        return mx.abs(q)[..., : v.shape[-1]]

    with pytest.MonkeyPatch.context() as patch:
        for name in ("rms_norm", "layer_norm", "rope"):
            patch.setattr(mx.fast, name, same)
        patch.setattr(mx.fast, "scaled_dot_product_attention", attend)
        yield


@contextmanager
def as_metal() -> Iterator[None]:
    """Let models and engines take this device for Apple silicon."""
    device._tracing.append(CountedMetal())  # type: ignore[arg-type]
    try:
        yield
    finally:
        device._tracing.pop()


def counted(name: str) -> dict[str, Any]:
    """Return a configuration that both sides count."""
    config = _NEEDED | grown(name)
    config.pop("clip_qkv", None)  # mlx-lm does not clip
    if (
        "rope_scaling" not in config
        and config.get("rope_parameters", {}).get("rope_type") == "yarn"
    ):
        config["rope_scaling"] = config["rope_parameters"]  # mlx-lm's name of them
    config.setdefault("head_dim", config["hidden_size"] // config["num_attention_heads"])
    return config


def deepened(name: str, layers: int = 16) -> dict[str, Any]:
    """Return a configuration as `counted` does, with more layers of the same kinds."""
    config = counted(name) | {"num_hidden_layers": layers}
    if kinds := config.get("layer_types"):
        config["layer_types"] = [kinds[n % len(kinds)] for n in range(layers)]
    return config


def launches(config: dict[str, Any], streams: int = 8) -> Counter[str]:
    """Return the primitives of a step in which `streams` sequences generate, by name.

    Attention over keys counts as one a layer and sequence group, as MLX's own.
    """
    found: list[Counter[str]] = []

    def noted(self: EagerExecutor, step: LaunchedStep) -> None:
        if len(step.plan.sequences) == streams:
            found.append(primitives(step.to_eval))
        start(self, step)

    start = EagerExecutor._start
    with as_metal(), one_primitive_each(), pytest.MonkeyPatch.context() as patch:
        engine = generating(config, streams)
        patch.setattr(EagerExecutor, "_start", noted)
        engine.step()
    return found[-1]


def build_seconds(config: dict[str, Any], streams: int = 8) -> float:
    """Return the processor time in which the arrays of such a step are built: planning and
    sampling's arrays included, the least of several steps."""
    found: list[float] = []

    def timed(self: EagerExecutor, plan: StepPlan, before: LaunchedStep | None) -> LaunchedStep:
        started = time.thread_time()
        step = build_step(self, plan, before)
        found.append(time.thread_time() - started)
        return step

    build_step = EagerExecutor._build
    with as_metal(), one_primitive_each(), pytest.MonkeyPatch.context() as patch:
        engine = generating(config, streams)
        patch.setattr(EagerExecutor, "_build", timed)
        for _ in range(_TIMED):
            engine.step()
    return min(found)


def generating(
    config: dict[str, Any], streams: int, settings: EngineConfig | None = None
) -> Engine:
    """Return an engine in which `streams` sequences generate."""
    mx.random.seed(0)
    model = build(config)
    use_device_products(model)
    weights = named_parameters(model)
    store_for_device(model, weights)
    model.load_weights(list(weights.items()))
    mx.eval(list(weights.values()))
    size = sum(each.nbytes for each in weights.values())
    loaded = LoadedModel(
        model,
        config,
        Path(),
        frozenset(),
        "counted",
        size,
        512,
        512,
        "float32",
        read_adapter=lambda place: LowRank({}, place),
    )
    plain = EngineConfig("", kv_memory=64 << 20, speculate="off")
    engine = assemble(loaded, settings or plain)
    for number in range(streams):
        prompt = tuple(range(3 + number, 12 + number))
        sampling = SamplingParams(temperature=0)
        engine.add(Request(f"r{number}", prompt, sampling, max_tokens=40))
    for _ in range(12):
        engine.step()
    return engine


def launches_of_mlx_lm(config: dict[str, Any], streams: int = 8) -> Counter[str]:
    """Return the same of mlx-lm's model of a configuration, with its caches for batches."""
    step = _MLXLM(config, streams)
    with one_primitive_each():
        return primitives(step.built())


def build_seconds_of_mlx_lm(config: dict[str, Any], streams: int = 8) -> float:
    """Return the processor time in which mlx-lm builds a step; see `build_seconds`."""
    step, found = _MLXLM(config, streams), list[float]()
    with one_primitive_each():
        for _ in range(_TIMED):
            started = time.thread_time()
            arrays = step.built()
            found.append(time.thread_time() - started)
            mx.eval(arrays)
    return min(found)


class _MLXLM:
    """mlx-lm's model of a configuration, and sequences that generate in a batch."""

    def __init__(self, config: dict[str, Any], streams: int) -> None:
        from mlx_lm.models import cache
        from mlx_lm.utils import _get_classes

        model_class, arguments = _get_classes(config)
        self._model = model_class(arguments.from_dict(config))
        mx.eval(self._model.parameters())

        def for_batches(one: Any) -> Any:
            if isinstance(one, cache.RotatingKVCache):
                return cache.BatchRotatingKVCache(one.max_size, [0] * streams)
            return cache.BatchKVCache([0] * streams)

        self._caches = [for_batches(each) for each in cache.make_prompt_cache(self._model)]
        prompt = mx.array([[5 + n] * 9 for n in range(streams)])
        self._tokens = mx.argmax(self._model(prompt, cache=self._caches)[:, -1], axis=-1)
        mx.eval(self._tokens)

    def built(self) -> list[mx.array]:
        """Return the arrays of the next step, as `generate_step` of mlx-lm, which always makes
        log-probabilities."""
        logits = self._model(self._tokens[:, None], cache=self._caches)[:, -1]
        logprobs = logits - mx.logsumexp(logits, axis=-1, keepdims=True)
        self._tokens = mx.argmax(logprobs, axis=-1)
        return [self._tokens, *(array for c in self._caches for array in (c.keys, c.values))]
