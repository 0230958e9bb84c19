"""Prints the kernels that a mixed load needs and the warm-up of an engine does not run.

    python -m tests.support.warmed FAMILY FORMAT [SEQUENCES [again]]

Also prints the kernels of MLX that a first start compiles one by one, and those of any start that
take long: products by codes, and what `mx.compile` joins. With `again`, the kernels
that a burst needs after a start that finds all of them compiled. Runs on a blank card, and in a
process of its own, see `blank_card`.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.core.request import Request, SamplingParams, Score, Task, ThinkingBudget
from quire.device.cuda.modules import OPERATIONS
from quire.engine import warm_up as warming
from quire.engine.assembly import assemble
from quire.engine.engine import Engine
from quire.executor.factory import open_executor
from quire.executor.graphs.compiling import Compiling
from quire.models.registry import build
from quire.models.weights.loader import LoadedModel
from quire.models.weights.low_rank import LowRank
from tests.executor.graphs.recorded import opened
from tests.executor.graphs.test_recording import FAMILIES, SIZES
from tests.support.blank_card import open_blank_card
from tests.support.compiled_kernels import needed_kernels
from tests.support.families import CONFIGS
from tests.support.tiny_models import gemma4_ple_config, qwen3_5_moe_config, random_weights

CONFIG = EngineConfig("", kv_memory=64 << 20, max_sequences=8, max_step_tokens=128)
GREEDY = SamplingParams(temperature=0.0)
SAMPLINGS = [
    SamplingParams(temperature=1.0, seed=1),
    SamplingParams(temperature=1.0, top_p=0.9, min_p=0.1, seed=1),
    SamplingParams(temperature=1.0, top_k=100, seed=1),
    SamplingParams(temperature=0.0, repetition_penalty=1.2, presence_penalty=0.1),
    SamplingParams(temperature=0.0, logit_bias=((3, 1.0),)),
    SamplingParams(temperature=0.0, logprobs=0),
    SamplingParams(temperature=0.0, logprobs=3),
]
_BURST = "a burst of all sequences"
_OF_MLX = ("gather", "scatter", "take_along_axis", "put_along_axis")
"""Operations whose kernels MLX compiles, by the names in `compiled_kernels`."""
_SLOW = ("packed product", "fused")
"""Those that take 5 s and more each."""
_SMALL = 1 << 20
"""Bytes of blocks, of which requests run out."""


def load(
    config: EngineConfig, vocabulary: int
) -> Iterator[tuple[str, EngineConfig, list[Request]]]:
    """Yield what each part is called, whose engine serves it, and its requests; the last comes
    later.
    """
    numbers, drawn = count(), random.Random(0)

    def tokens(length: int) -> tuple[int, ...]:
        return tuple(drawn.randrange(vocabulary) for _ in range(length))

    def ask(
        prompt: tuple[int, ...],
        sampling: SamplingParams = GREEDY,
        budget: ThinkingBudget | None = None,
        task: Task | None = None,
        longest: int = 5,
    ) -> Request:
        own = Request(f"r{next(numbers)}", prompt, sampling=sampling, max_tokens=longest)
        return replace(own, thinking=budget, task=task or own.task, snapshots=(len(prompt) - 5,))

    for length in (2, 7, 12, 20, 40):
        yield f"{length} tokens alone", config, [ask(tokens(length)), ask(tokens(length))]
    for name in ("a burst", "another burst"):
        yield name, config, [ask(tokens(64)) for _ in range(8)]
    answer = 5 + config.max_sequences // 8  # of the first, which generates beside the last
    burst = [ask(tokens(40 + 5 * (n % 32)), longest=answer) for n in range(config.max_sequences)]
    yield _BURST, config, burst
    yield "prompts beside streams", config, [*(ask(tokens(9)) for _ in range(4)), ask(tokens(90))]
    common = tokens(100)
    for name in ("neighbours with a prefix", "kept prefixes"):
        yield name, config, [ask(common + tokens(28)) for _ in range(3)]
    yield "whole prompts again", config, [ask(common), ask(common[:64]), ask(common)]
    for sampling in SAMPLINGS:
        yield repr(sampling), config, [ask(tokens(9), sampling), ask(tokens(9)), ask(tokens(70))]
    budget = ThinkingBudget(2, (), (7,))
    yield "a mask", config, [ask(tokens(9), budget=budget), ask(tokens(9)), ask(tokens(9))]
    yield "scores", config, [ask(tokens(9), task=Score((1, 2))), ask(tokens(9))]
    small = replace(config, kv_memory=_SMALL)
    yield "little memory", small, [ask(tokens(60 + n), longest=70) for n in range(8)]


def serve(engine: Engine, requests: Sequence[Request]) -> None:
    *first, late = requests
    for request in first:
        engine.add(request)
    for step in count():
        if step == 3:
            engine.add(late)
        elif not engine.has_work and step > 3:
            return
        for output in engine.step():
            assert output.error is None, output.error


PACKED = FAMILIES | {
    # 128 and 256 rows are multiplied by different kernels.
    "llama_of_many_tokens": FAMILIES["llama"] | {"vocab_size": 32_768},
    "gpt_oss_packed": CONFIGS["gpt_oss"]
    | SIZES
    | {"intermediate_size": 192, "layer_types": ["sliding_attention", "full_attention"]},
    "qwen3_5_moe_packed": qwen3_5_moe_config(
        hidden_size=128,
        num_hidden_layers=2,
        layer_types=["linear_attention", "full_attention"],
        linear_num_key_heads=8,
        linear_num_value_heads=16,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
    ),
    "gemma4_ple_packed": gemma4_ple_config(
        **SIZES | {"num_hidden_layers": 6}, hidden_size_per_layer_input=64
    ),
}
"""Models whose weights are packed."""


def model_of(family: str) -> LoadedModel:
    """Return a tiny model, packed where its steps run as graphs."""
    if family in PACKED:
        return opened(PACKED[family])
    model = build(CONFIGS[family])
    weights = [
        (name, each.astype(mx.bfloat16)) for name, each in random_weights(CONFIGS[family]).items()
    ]
    model.load_weights(weights)
    own = CONFIGS[family], Path(), frozenset[int](), "random", 0, 1024, 1024, "bfloat16"
    return LoadedModel(model, *own, read_adapter=lambda place: LowRank({}, place))


def main(family: str, format: str, sequences: str = "8", start: str = "first") -> None:
    own = KVFormat() if format == "plain" else KVFormat(format, 4, 4)
    with pytest.MonkeyPatch.context() as patch, needed_kernels() as needed:
        open_blank_card(patch, needed)
        loaded, usual = model_of(family), CONFIG
        usual = replace(usual, kv_format=own, max_sequences=int(sequences))
        usual = replace(usual, max_step_tokens=max(usual.max_step_tokens, 8 * int(sequences)))
        parts = list(load(usual, loaded.model.vocab_size))
        if start == "again":
            patch.setattr(warming, "_rounds", warming._few_rounds)
            parts = [part for part in parts if part[0] == _BURST]
        for run, dtype in OPERATIONS.values():
            run(mx.zeros((2, 2), dtype or mx.bfloat16))
        ahead = set(needed)
        ahead_of_use = partial(open_executor, compiling=Compiling.AHEAD)
        warming.warm_up(loaded, usual, open_executor=ahead_of_use)
        warm = set(needed)
        if family in FAMILIES and format == "plain":
            for kernel in warm - ahead:
                if kernel[0] in _OF_MLX:
                    print(f"not compiled while the model is read: {kernel}")
        for kernel in warm:
            if kernel[0] in _SLOW:
                print(f"compiled for long: {kernel}")
        assert len(warm) > 5, "nothing was noted"
        engines: dict[EngineConfig, Engine] = {}
        for name, config, requests in parts:
            if config not in engines:
                engines[config] = assemble(loaded, config)
            serve(engines[config], requests)
            for kernel in needed - warm:
                print(f"{name}: {kernel}")
            warm |= needed


if __name__ == "__main__":
    main(*sys.argv[1:])
