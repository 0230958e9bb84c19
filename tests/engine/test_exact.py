"""A request's logits are the same bits in any batch, if the CPU kernels are compiled.

Alone, in a batch, with prompts cut into chunks, pre-empted and resumed; packed KV included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.core.kv_choice import parse_format
from quire.core.request import Embed, Request
from quire.device.device import current_device
from quire.models.weights.loader import LoadedModel, open_model
from tests.support.everyday import everyday
from tests.support.families import CONFIGS
from tests.support.parity import SCENARIOS, Company, Generated, alone, prompts
from tests.support.tiny_models import tiny_model, write_model

TOKENS = 28
"""Answers fill blocks, too: those of prompts of 40 and 64 tokens."""


COMPANY = {
    name: SCENARIOS[name]
    for name in (
        "batch of unequal lengths",
        "beside a cancelled neighbour",
        "in chunks of 9",
        "in chunks of 33",
        "pre-empted and resumed",
    )
}

SIZES: dict[str, tuple[str, dict[str, int]]] = {
    "head size 24": ("llama", {"head_dim": 24}),
    "sinks, head size 24": ("gpt_oss", {"head_dim": 24}),
    "latents of 40": ("deepseek_v3", {}),
    "state of 24": ("granitemoehybrid", {}),
    "channels with a state of 8": ("jamba", {"mamba_d_state": 8}),
    "chosen keys of 40": ("deepseek_v32", {}),
    "chosen keys of 128": (
        "deepseek_v32",
        {"kv_lora_rank": 64, "qk_rope_head_dim": 64, "index_head_dim": 64, "index_topk": 20},
    ),
}
"""Families with sizes that the kernels serve in part, or not at all."""


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], LoadedModel]]:
    """Yield tiny models by family, multiplied as on the default set-up."""
    device = current_device()
    device.choose_products("auto")
    if device.kernels is None:
        device.choose_products("mlx")
        pytest.skip("without the compiled CPU kernels logits are equal within a tolerance")
    known: dict[str, LoadedModel] = {}

    def find(name: str) -> LoadedModel:
        if name not in known:
            folder = Path(tmp_path_factory.mktemp("model"))
            if name in SIZES:
                family, changes = SIZES[name]
                write_model(folder, CONFIGS[family] | changes)
            else:
                folder = tiny_model(folder, name)
            known[name] = open_model(str(folder))
        return known[name]

    yield find
    device.choose_products("mlx")


@pytest.mark.parametrize(
    ("family", "format"),
    [
        pytest.param("llama", "plain", marks=pytest.mark.slow),
        ("llama", "page-4"),
        ("gemma4_ple", "turbo-4"),
        pytest.param("qwen3_moe", "plain", marks=pytest.mark.slow),
        pytest.param("llama", "turbo-4", marks=pytest.mark.slow),
        pytest.param("gemma4_ple", "plain", marks=pytest.mark.slow),
        pytest.param("gemma4_ple", "page-4", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "page-4", marks=pytest.mark.slow),
        pytest.param("qwen3_moe", "turbo-4", marks=pytest.mark.slow),
    ],
)
def test_logits_are_bit_equal_in_any_company(
    opened: Callable[[str], LoadedModel], family: str, format: str
) -> None:
    loaded = opened(family)
    config = EngineConfig(
        str(loaded.path),
        kv_memory=64 << 20,
        kv_format=parse_format(format),
        kv_skip_layers=(),
        prefix_cache=False,
    )
    wanted = prompts(tokens=TOKENS)
    expected = alone(loaded, config, wanted)
    for scenario, run in COMPANY.items():
        assert_same_bits(run(loaded, config, wanted), expected, scenario)


CODED = (
    ("chosen keys of 128", "uniform-3", 64),
    ("state of 24", "page-4", 64),
    ("head size 24", "turbo-3", 24),
)
"""Whose plain blocks are of the slow run: codes are stricter."""


@pytest.mark.parametrize(
    ("name", "format", "block_size"),
    everyday(
        [*((name, "plain", 64) for name in SIZES), *CODED, ("head size 24", "plain", 24)],
        lambda *case: case in CODED or case[0] not in {name for name, *_ in CODED},
    ),
)
def test_sizes_that_kernels_do_not_serve_move_no_bit(
    opened: Callable[[str], LoadedModel], name: str, format: str, block_size: int
) -> None:
    loaded = opened(name)
    config = EngineConfig(
        str(loaded.path),
        kv_memory=64 << 20,
        block_size=block_size,
        kv_format=parse_format(format),
        kv_skip_layers=(),
        prefix_cache=False,
    )
    wanted = prompts((5, 40, 130), tokens=8)
    expected = alone(loaded, config, wanted)
    for scenario in ("batch of unequal lengths", "in chunks of 9"):
        assert_same_bits(SCENARIOS[scenario](loaded, config, wanted), expected, scenario)


def test_mean_pooled_vectors_are_bit_equal_however_prompts_are_cut(
    opened: Callable[[str], LoadedModel],
) -> None:
    loaded = opened("gemma4_ple")
    config = EngineConfig(str(loaded.path), kv_memory=64 << 20)
    wanted = [replace(each, task=Embed("mean")) for each in prompts((5, 40, 130))]

    def vectors(requests: list[Request], step: int) -> list[tuple[float, ...] | None]:
        company = Company(loaded, replace(config, max_step_tokens=step))
        company.run(requests)
        return [company.answers[each.id].ends[0].vector for each in requests]

    whole = [vectors([each], 2048)[0] for each in wanted]
    assert None not in whole
    assert vectors(wanted, 2048) == whole
    assert vectors(wanted, 9) == whole


def assert_same_bits(
    got: Mapping[str, Generated], expected: Mapping[str, Generated], scenario: str
) -> None:
    for request, theirs in expected.items():
        name, ours = f"{request} {scenario}", got[request]
        assert ours.tokens == theirs.tokens, name
        assert ours.logits.keys() == theirs.logits.keys(), name
        for position, logits in theirs.logits.items():
            assert mx.array_equal(ours.logits[position], logits), f"{name} at {position}"
