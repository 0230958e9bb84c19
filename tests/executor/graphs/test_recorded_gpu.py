"""Recorded decode steps on a GPU: `pytest -m gpu`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.executor.graphs.graph_cache import MAX_ROWS, WIDE_ROWS
from quire.executor.graphs.runner import CUDAGraphs
from quire.models.base import LanguageModel
from tests.executor.graphs.recorded import (
    CODED,
    CODED_FAMILIES,
    CODED_FORMATS,
    GROWN_FAMILIES,
    Compared,
    assert_the_same_bits_in_any_batch,
    opened,
    streams_of,
)
from tests.executor.graphs.test_recording import FAMILIES
from tests.support.grown import grown
from tests.support.parity import SCENARIOS, Company, prompts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not mx.cuda.is_available(), reason="needs CUDA"),
]

PLAIN = EngineConfig("", kv_memory=256 << 20, prefix_cache=False)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_have_the_same_bits_in_any_batch(family: str) -> None:
    # Long enough to be pre-empted: at most 64 rows start in a step.
    assert_the_same_bits_in_any_batch(opened(FAMILIES[family]), prompts(tokens=40))


@pytest.mark.parametrize("family", ["llama", "gemma4_moe"])
@pytest.mark.parametrize(("format", "skipped"), CODED_FORMATS, ids=str)
def test_logits_over_codes_have_the_same_bits_in_any_batch(
    family: str, format: KVFormat, skipped: tuple[int, ...]
) -> None:
    loaded = opened(FAMILIES[family])
    assert_the_same_bits_in_any_batch(loaded, prompts(tokens=40), format, skipped)


@pytest.mark.parametrize(
    "format",
    [KVFormat("page", 4, 4), KVFormat("uniform", 8, 4), KVFormat("turbo", 3.5, 3.5)],
    ids=str,
)
@pytest.mark.parametrize("family", GROWN_FAMILIES)
def test_latents_and_short_values_are_coded(
    family: str, format: KVFormat, compared: Compared
) -> None:
    rounds = streams_of([2, 8]) + streams_of([2, 8], "again ")
    config = replace(PLAIN, kv_format=format, kv_skip_layers=())
    compared.assert_agree(opened(grown(family)), config, rounds, ["2-r1", "again 8-r5"], CODED)


@pytest.mark.parametrize(
    "format",
    [KVFormat("page", 4, 4), KVFormat("uniform", 8, 4), KVFormat("turbo", 3.5, 3.5)],
    ids=str,
)
@pytest.mark.parametrize(
    "family", ["llama, heads of 128", "gemma4_moe, heads of 256 and 512", *GROWN_FAMILIES[:2]]
)
def test_prompts_over_codes_are_read_in_steps_of_many_rows(
    family: str, format: KVFormat, compared: Compared
) -> None:
    """Beside sequences of few rows, which the same steps read from codes."""
    rounds = [
        [
            replace(each, id=f"{seed}-{each.id}", max_tokens=4)
            for each in prompts([300, 70, 12, 3], seed=seed)
        ]
        for seed in range(4)
    ]
    config = replace(PLAIN, kv_format=format, kv_skip_layers=())
    loaded = opened(CODED_FAMILIES[family] if family in CODED_FAMILIES else grown(family))
    compared.assert_agree(loaded, config, rounds, ["3-r0", "3-r1"], CODED, counts=[4])
    (whole,) = compared.wholes
    most = max(rows for _, rows in whole.verified)
    latents = family == "glm4_moe_lite" and format.scheme == "turbo"
    assert most <= MAX_ROWS if latents else most > MAX_ROWS


@pytest.mark.parametrize(
    "format", dict.fromkeys([KVFormat(), *(each for each, _ in CODED_FORMATS)]), ids=str
)
def test_keys_that_thread_blocks_share_give_the_same_bits_in_any_batch(format: KVFormat) -> None:
    """Steps of 1 and of 64 rows would split so many keys differently without `batch_invariant`."""
    scenarios = [name for name in SCENARIOS if name != "pre-empted and resumed"]
    wanted = prompts((3, 700, 650), tokens=40)
    assert_the_same_bits_in_any_batch(
        opened(FAMILIES["llama"]), wanted, format, scenarios=scenarios
    )


def test_rows_turn_by_their_positions(
    wholes: list[CUDAGraphs], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Positions behind a picture are not the tokens' numbers."""
    loaded = replace(opened(FAMILIES["qwen3_moe"]), fingerprint="twice as far")

    def doubled(model: LanguageModel, tokens: tuple[int, ...], media: object) -> Any:
        return np.tile(np.arange(len(tokens), dtype=np.float32) * 2, (3, 1))

    monkeypatch.setattr(type(loaded.model), "positions", doubled)
    Company(loaded, PLAIN).run(prompts([90, 91], tokens=4))
    (whole,) = wholes
    assert whole.verified
    assert all(whole.verified.values())


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_steps_compute_what_the_model_does(family: str, compared: Compared) -> None:
    counts = [1 << n for n in range(WIDE_ROWS.bit_length())]
    names = ["1-r0", "2-r1", "8-r5", "32-r20", "64-r63", "256-r255"]
    compared.assert_agree(opened(FAMILIES[family]), PLAIN, streams_of(counts), names)


@pytest.mark.parametrize("family", CODED_FAMILIES)
@pytest.mark.parametrize(("format", "skipped"), CODED_FORMATS, ids=str)
def test_recorded_steps_read_and_write_codes(
    family: str, format: KVFormat, skipped: tuple[int, ...], compared: Compared
) -> None:
    config = replace(PLAIN, kv_format=format, kv_skip_layers=skipped)
    loaded = opened(CODED_FAMILIES[family])
    names = ["1-r0", "8-r5", "16-r14"]
    compared.assert_agree(loaded, config, streams_of([1, 2, 8, 16]), names, CODED)
