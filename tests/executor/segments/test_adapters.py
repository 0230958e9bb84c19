"""Steps with LoRA adapters by segments: the bits of the model's own code."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import mlx.core as mx

from quire.core.config import EngineConfig
from quire.executor.executor import Executor
from quire.executor.factory import open_executor
from quire.executor.segments.executor import SegmentExecutor
from quire.executor.segments.runner import Attends, StepSegments, open_segments
from quire.models.base import named_parameters
from quire.models.weights.loader import LoadedModel
from quire.models.weights.low_rank import LowRank
from quire.program.trace import multiplied
from tests.executor.segments.test_segments import assert_equal, packed
from tests.program.programs import opened
from tests.support.parity import Company, Generated, prompts


def drawn(loaded: LoadedModel, rank: int, seed: int) -> LowRank:
    """Return factors of every matrix of a layer that is no stack of experts."""
    mx.random.seed(seed)
    parameters, made = named_parameters(loaded.model), {}
    for path in sorted(multiplied(loaded.model)):
        module, weight = path.removesuffix(".weight"), parameters[path]
        if ".layers." not in path or weight.ndim != 2:
            continue
        scales = parameters.get(f"{module}.scales")
        inputs = weight.shape[1] if scales is None else scales.shape[1] * 32
        inner = mx.random.normal((inputs, rank)) / inputs**0.5
        made[module] = inner, 0.1 * mx.random.normal((rank, weight.shape[0]))
    return LowRank(made, f"{seed}")


def served(
    loaded: LoadedModel, segments: StepSegments | None, ranks: tuple[int, ...] = (4, 8, 3)
) -> tuple[Mapping[str, Generated], Any]:
    """Serve rows of three adapters, whose ranks differ, and of none; the answers, the executor."""
    opened: list[Any] = []

    def adapted(*given: Any, **more: Any) -> Executor:
        executor = open_executor(*given, segments=segments, **more)
        for seed, rank in enumerate(ranks):
            executor.adapters.add(f"{seed}", drawn(loaded, rank, seed))
        opened.append(executor)
        return executor

    config = EngineConfig("", kv_memory=16 << 20, prefix_cache=False, max_step_tokens=24)
    company = Company(loaded, config, open_executor=partial(adapted))
    wanted = [
        replace(each, adapter=name)
        for each, name in zip(prompts((1, 40, 9, 5), 6), ("0", "1", "2", ""), strict=True)
    ]
    return company.run(wanted, every=2), opened[0]


def test_rows_with_adapters_have_the_models_bits(tmp_path: Path) -> None:
    loaded = packed("llama", tmp_path)
    segments = open_segments(loaded.model)
    expected, _ = served(loaded, None)
    found, executor = served(loaded, segments)
    assert_equal(expected, found)
    (adapted,) = executor._adapted.values()
    assert adapted.steps >= 10
    assert set(adapted.agrees.values()) == {True}
    stages = adapted.stages(Attends.INSIDE)
    assert len(stages.order) == 1, "a step is one segment with adapters, too"


def test_segments_hold_no_factors_that_are_out_of_memory(tmp_path: Path) -> None:
    loaded = opened("llama", tmp_path)
    _, executor = served(loaded, open_segments(loaded.model))
    assert isinstance(executor, SegmentExecutor)
    (adapted,) = (weakref.ref(each) for each in executor._adapted.values() if each is not None)
    executor.adapters.remove("1")
    gc.collect()
    assert adapted() is None
    assert not executor._adapted


def test_adapters_of_experts_are_left_to_the_model(tmp_path: Path) -> None:
    loaded = opened("gemma4_moe", tmp_path)
    segments = open_segments(loaded.model)
    assert segments is not None
    stack = next(name for name, each in named_parameters(loaded.model).items() if each.ndim == 3)
    zeros = mx.zeros((1, 1, 1))
    assert segments.with_low_rank({stack: (zeros, zeros)}) is None
