"""Counts what a step of the eager model launches on a Mac, without one.

A step's graph is built with the flags of the Metal device, on a CPU; no number in it is right.
Functions of `mx.fast` and the portable attention kernels count as one primitive each, as Metal has
them; a CPU spells the former out and has none of the latter.
"""

from __future__ import annotations

import re
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import mlx.core as mx
import pytest

from quire.attention.paged import PortableBackend, portable
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
    "bailing_moe-2.0",
    "mimo",
)
"""Configurations whose steps launch no more than mlx-lm's."""
_TURNS, _TURN = 30, 6
"""Turns in which steps are timed, and steps of each side in a turn."""
_LARGE = 1 << 13
"""Bytes of an allocation before which glibc merges all small ones that were freed."""
VIEWS = frozenset(
    {"Reshape", "Transpose", "Broadcast", "ExpandDims", "Squeeze", "Unflatten", "Flatten"}
    | {"AsStrided", "StopGradient", "Slice", "Split"}
)
"""Primitives that launch nothing."""


class CountedMetal(device.Metal):
    """The Metal device, without memory of its own, and but for `one_primitive_each` without
    kernels.
    """

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
    """Make each function of `mx.fast`, and each kernel of attention, one primitive."""

    def same(x: mx.array, *_: Any, **__: Any) -> mx.array:
        return mx.softmax(x, axis=-1)  # unlike element-wise ones `mx.compile` joins it to nothing

    def attend(q: mx.array, k: mx.array, v: mx.array, **_: Any) -> mx.array:
        return same(q)[..., : v.shape[-1]]

    def merge(_target: Any, found: list[mx.array], tail: list[mx.array], **own: Any) -> Any:
        return [same(each)[..., : own["shape"].value_dim] for each in (*found, *tail)]

    with pytest.MonkeyPatch.context() as patch:
        for name in ("rms_norm", "layer_norm", "rope"):
            patch.setattr(mx.fast, name, same)
        patch.setattr(mx.fast, "scaled_dot_product_attention", attend)
        patch.setattr(CountedMetal, "kernel_language", "metal")
        patch.setattr(PortableBackend, "serves", PortableBackend.made_for)
        patch.setattr(portable, "attend", lambda _target, q, _blocks, **_: [same(q)])
        patch.setattr(portable, "merge", merge)
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
    for key in ("layer_types", "no_rope_layers"):
        if kinds := config.get(key):
            config[key] = [kinds[n % len(kinds)] for n in range(layers)]
    return config


def launches(config: dict[str, Any], streams: int = 8) -> Counter[str]:
    """Return the primitives of a step in which `streams` sequences generate, by name.

    Attention over keys is two: of parts of the keys, and their sum.
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


def build_seconds(config: dict[str, Any], streams: int = 8) -> tuple[float, float]:
    """Return the processor time in which Quire, and mlx-lm, build the arrays of such a step.

    Sampling's arrays are included, planning is not. Both build their steps in turns; medians.
    What glibc puts off when a step's arrays are freed is done before the next step is timed.
    """
    own: list[float] = []
    theirs: list[float] = []

    def timed(self: EagerExecutor, plan: StepPlan, before: LaunchedStep | None) -> LaunchedStep:
        bytes(_LARGE)
        started = time.thread_time()
        step = build_step(self, plan, before)
        own.append(time.thread_time() - started)
        return step

    build_step = EagerExecutor._build
    with as_metal(), one_primitive_each(), pytest.MonkeyPatch.context() as patch:
        engine, other = generating(config, streams), _MLXLM(config, streams)
        patch.setattr(EagerExecutor, "_build", timed)
        for _ in range(_TURNS):
            for _ in range(_TURN):
                engine.step()
            for _ in range(_TURN):
                bytes(_LARGE)
                started = time.thread_time()
                arrays = other.built()
                theirs.append(time.thread_time() - started)
                mx.eval(arrays)
    return median(own), median(theirs)


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
        engine.add(Request(f"r{number}", prompt, sampling, max_tokens=300))
    for _ in range(12):
        engine.step()
    return engine


def launches_of_mlx_lm(config: dict[str, Any], streams: int = 8) -> Counter[str]:
    """Return the same of mlx-lm's model of a configuration."""
    step = _MLXLM(config, streams)
    with one_primitive_each():
        return primitives(step.built())


class _MLXLM:
    """mlx-lm's model of a configuration, and sequences that generate: one as in its
    `generate_step`, several with its caches for batches.
    """

    def __init__(self, config: dict[str, Any], streams: int) -> None:
        from mlx_lm.models import cache
        from mlx_lm.utils import _get_classes

        model_class, arguments = _get_classes(config)
        self._model = model_class(arguments.from_dict(config))
        mx.eval(self._model.parameters())

        def cache_of(one: Any) -> Any:
            if streams == 1:
                return one
            if isinstance(one, cache.RotatingKVCache):
                return cache.BatchRotatingKVCache(one.max_size, [0] * streams)
            return cache.BatchKVCache([0] * streams)

        self._caches = [cache_of(each) for each in cache.make_prompt_cache(self._model)]
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
