"""The parity matrix of the described families; a few, of many traits, stand for all every day."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.core.request import Request
from quire.models.registry import FAMILIES
from quire.models.weights.loader import LoadedModel, open_model
from tests.engine.test_parity import Opened
from tests.support.encoders import ENCODERS
from tests.support.everyday import everyday
from tests.support.new_memory import new_memory as new_memory
from tests.support.parity import (
    SCENARIOS,
    Company,
    Generated,
    alone,
    assert_same,
    beside_cancelled,
    chunked,
    preempted,
    prompts,
)
from tests.support.registered import CONFIGS
from tests.support.tiny_models import write_model

DAILY = {
    "falcon_h1",  # two mixers in a layer, one of them with a state
    "gemma3_text",  # norms around blocks, windows, two rotations
    "cohere2",  # blocks in parallel, neighbouring pairs, layers without rotation
}
WHOLE = "falcon_h1"
"""The family with most scenarios every day."""
HARDEST = ("beside a cancelled neighbour", "resumed from a prefix")
"""The scenarios of every day of the other families."""
LIKE_OTHERS = ("staggered arrivals", "in chunks of 33", "in chunks of 64")
"""The scenarios that are slow of all families."""
IN_COMPANY = {
    "glm4_moe",  # experts after a dense layer, a shared one, part of a head rotated
    "glm_moe_dsa-shared",  # an indexer chooses keys, also for the layer behind it
}
"""Families of which one scenario runs every day."""
PACKED = (KVFormat("page", 4, 4), KVFormat("uniform", 8, 8), KVFormat("turbo", 3.5, 3.5))
LENGTHS, TOKENS = (1, 50, 65), 16
"""Sequences that end in a block, in the next one, and past the tiny models' window."""


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Opened]:
    """Return a family's model and what each prompt gets alone, computed once."""
    known: dict[str, Opened] = {}

    def find(name: str) -> Opened:
        if name not in known:
            folder = write_model(Path(tmp_path_factory.mktemp(name)), CONFIGS[name])
            if name == "glm4":
                with_published_names(folder / "model.safetensors")
            loaded = open_model(str(folder), dtype="float32")
            config = EngineConfig(str(folder), kv_memory=64 << 20, prefix_cache=False)
            known[name] = loaded, config, alone(loaded, config, prompts(LENGTHS, TOKENS))
        return known[name]

    return find


def with_published_names(path: Path) -> None:
    """GLM-4 calls norms by names that have another meaning here, which the loader translates."""
    published = {
        "post_attention_layernorm": "post_self_attn_layernorm",
        "pre_feedforward_layernorm": "post_attention_layernorm",
        "post_feedforward_layernorm": "post_mlp_layernorm",
    }
    weights = mx.load(str(path))
    assert isinstance(weights, dict)
    mx.eval(weights)
    named = {
        ".".join(published.get(part, part) for part in name.split(".")): array
        for name, array in weights.items()
    }
    mx.save_safetensors(str(path), named)


def _cases() -> list[Any]:
    daily = {(name, scenario) for name in DAILY for scenario in HARDEST}
    daily |= {(WHOLE, scenario) for scenario in FAMILY_SCENARIOS.keys() - set(LIKE_OTHERS)}
    daily |= {(name, "beside a cancelled neighbour") for name in IN_COMPANY}
    return [
        pytest.param(*case, marks=() if case in daily else pytest.mark.slow)
        for case in product(CONFIGS, FAMILY_SCENARIOS)
    ]


def resumed_from_a_prefix(
    loaded: LoadedModel, config: EngineConfig, wanted: list[Request]
) -> dict[str, Generated]:
    """Read each prompt twice, after a request that parts from it in its middle."""
    company = Company(loaded, replace(config, prefix_cache=True))
    for request in wanted:
        half = request.prompt[: len(request.prompt) // 2]
        others = [replace(request, id="other", prompt=(*half, 7, 7, 7)), request]
        for other in others:
            company.run([replace(other, id=f"{other.id} before", max_tokens=5)])
        company.run([request])
        reused = company.answers[request.id].ends[0].cached_tokens
        before = len(request.prompt) - 1
        # A tail is no prefix of another sequence.
        assert reused == before - (before % config.block_size if config.kv_format.has_tail else 0)
    return company.answers


FAMILY_SCENARIOS = {name: each for name, each in SCENARIOS.items() if "pre-empted" not in name}
FAMILY_SCENARIOS["resumed from a prefix"] = resumed_from_a_prefix


@pytest.mark.parametrize(("family", "scenario"), _cases())
def test_as_if_alone(opened: Callable[[str], Opened], family: str, scenario: str) -> None:
    loaded, config, expected = opened(family)
    wanted = prompts(LENGTHS, TOKENS)
    got = FAMILY_SCENARIOS[scenario](loaded, config, wanted)
    assert_same(got, expected, [request.id for request in wanted])


def test_every_model_type_is_in_the_matrix() -> None:
    assert {config["model_type"] for config in CONFIGS.values()} == set(FAMILIES) - ENCODERS


@pytest.mark.parametrize("family", everyday(CONFIGS, WHOLE.__eq__))
def test_who_gave_way_goes_on_as_if_alone(opened: Callable[[str], Opened], family: str) -> None:
    """Five prompts of a block each, in room for four, which all grow into a second one."""
    loaded, config, _ = opened(family)
    if all(spec.lacks_kv for spec in loaded.model.layout):
        pytest.skip("a state never grows, so that nobody gives way")
    wanted = prompts((50,) * 5, 16)
    expected = alone(loaded, config, wanted)
    got = preempted(loaded, config, wanted)
    assert_same(got, expected, [request.id for request in wanted])


@pytest.mark.slow
@pytest.mark.parametrize("format", PACKED, ids=lambda format: format.name)
@pytest.mark.parametrize(
    "family",
    [
        *("deepseek_v3", "mistral4", "kimi_linear", "glm_moe_dsa-shared", "mimo_v2_flash"),
        *("longcat_flash", "hy_v4"),
    ],
)
def test_packed_values_of_another_size_are_as_if_alone(
    opened: Callable[[str], Opened], family: str, format: KVFormat
) -> None:
    loaded, config, _ = opened(family)
    config = replace(config, kv_format=format)
    wanted = prompts(LENGTHS, TOKENS)
    expected = alone(loaded, config, wanted)
    for scenario in (beside_cancelled, chunked(33), resumed_from_a_prefix):
        got = scenario(loaded, config, wanted)
        assert_same(got, expected, [request.id for request in wanted])
