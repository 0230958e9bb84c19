"""Recorded steps of more families, from requests to tokens, on an emulated card."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import mlx.nn as nn
import pytest

from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.device.weights import Packing
from tests.executor.graphs.recorded import (
    CODED,
    GROWN_FAMILIES,
    Compared,
    assert_the_same_bits_in_any_batch,
    opened,
    streams_of,
)
from tests.executor.graphs.test_between import six_bits_down
from tests.support import emulated_card
from tests.support.emulated_card import emulate_card
from tests.support.emulated_metal import why_not
from tests.support.grown import grown
from tests.support.packed_models import experts_in_mxfp4, in_codes
from tests.support.packings import BYTES_OF_32, FLOATS, OF_32
from tests.support.parity import prompts

pytestmark = [pytest.mark.slow, pytest.mark.skipif(bool(why_not()), reason=why_not())]

PLAIN = EngineConfig("", kv_memory=64 << 20, prefix_cache=False)
FAMILIES = [
    "gpt_oss",
    "glm4_moe-groups",
    "phimoe",
    "mixtral",
    "falcon_h1",
    "mamba",
    "lfm2",
    "qwen3_5",
    "nemotron_h-experts",
    "glm4_moe_lite",
    "kimi_linear",
    "mamba2",
    "llama4_text-several",
    "deepseek_v32",
    "glm_moe_dsa",
    "gpt2",
    "dbrx",
    "longcat_flash",
    "hy_v4",
    "bailing_moe_linear",
    "kimi_k3",
    "muse_glimmer",
    "bitnet",
]
PAGE, TURBO = KVFormat("page", 4, 4), KVFormat("turbo", 3.5, 3.5)


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> None:
    emulate_card(monkeypatch)


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_steps_compute_what_the_model_does(family: str, compared: Compared) -> None:
    rounds = streams_of([2]) + streams_of([2], "again ")
    compared.assert_agree(opened(grown(family)), PLAIN, rounds, ["2-r1", "again 2-r0"])


@pytest.mark.parametrize(("family", "turned"), [("qwen2", 3), ("granite", 3), ("smollm3", 2)])
def test_products_of_one_row_begin_the_norms_behind_them(
    family: str, turned: int, compared: Compared
) -> None:
    """With biases, multiplied sums, and a layer without rotation."""
    rounds = streams_of([1]) + streams_of([1], "again ")
    compared.assert_agree(opened(grown(family)), PLAIN, rounds, ["again 1-r0"], counts=[1])
    (whole,) = compared.wholes
    sources = list(map(str, whole._cache.recorded(1, KVFormat()).sources))
    assert sum("store_squares(squares_to," in text for text in sources) == 5, "all but two norms"
    assert sum("#define HEAD_ROWS 64" in text for text in sources) == turned


def test_a_row_of_several_experts_with_weighted_inputs_is_recorded(compared: Compared) -> None:
    rounds = streams_of([1]) + streams_of([1], "again ")
    loaded = opened(grown("llama4_text-several"))
    compared.assert_agree(loaded, PLAIN, rounds, ["1-r0", "again 1-r0"])


@pytest.mark.parametrize("format", [PAGE, KVFormat("uniform", 4, 4), TURBO], ids=str)
@pytest.mark.parametrize("family", GROWN_FAMILIES)
def test_recorded_steps_read_and_write_codes(
    family: str, format: KVFormat, compared: Compared
) -> None:
    rounds = streams_of([2]) + streams_of([2], "again ")
    config = replace(PLAIN, kv_format=format, kv_skip_layers=())
    compared.assert_agree(opened(grown(family)), config, rounds, ["2-r1", "again 2-r0"], CODED)


def test_hidden_states_that_predict_each_other_are_recorded(
    compared: Compared,
) -> None:
    """Gemma 3n corrects predicted states by differences, in which roundings to bfloat16 show: the
    model itself is 0.014 to 0.025 off float32."""
    rounds = [
        [replace(each, max_tokens=4) for each in requests]
        for requests in streams_of([2]) + streams_of([2], "again ")
    ]
    compared.assert_agree(opened(grown("gemma3n_text")), PLAIN, rounds, ["2-r1"])


def test_gpt_oss_is_recorded_as_published(compared: Compared) -> None:
    """The checkpoint has experts in MXFP4, attention and head in bfloat16."""
    rounds = streams_of([2]) + streams_of([2], "again ")
    loaded = opened(grown("gpt_oss"), experts_in_mxfp4)
    compared.assert_agree(loaded, PLAIN, rounds, ["2-r1", "again 2-r0"])


def test_experts_in_mxfp4_read_interleaved_rows(
    compared: Compared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A prompt's 40 rows have so many pairs that experts have tiles of 64. Routers read the same
    rows as they are."""
    monkeypatch.setattr(emulated_card, "SMALL", replace(emulated_card.SMALL, warpgroups=True))
    rounds = [
        [replace(each, id=name, max_tokens=2) for each in prompts([40], seed=seed)]
        for seed, name in enumerate(("one", "two", "three"))
    ]
    loaded = opened(grown("gpt_oss"), experts_in_mxfp4)
    compared.assert_agree(loaded, PLAIN, rounds, ["two", "three"], counts=[64, 1])
    (whole,) = compared.wholes
    sources = whole._cache.recorded(64, KVFormat()).sources
    marks = "#define INTERLEAVED 1", "#define Y_INTERLEAVED 1", "store_interleaved(laid_out"
    found = [sum(mark in str(text) for text in sources) for mark in marks]
    layers = grown("gpt_oss")["num_hidden_layers"]
    assert found == [2 * layers, layers, layers]


@pytest.mark.parametrize("packing", FLOATS, ids=lambda packing: packing.mode)
def test_models_in_float_codes_are_recorded(packing: Packing, compared: Compared) -> None:
    """All their matrices: tables, routers and heads, too."""
    loaded = opened(grown("gpt_oss"), partial(in_codes, packing=packing))
    rounds = streams_of([2]) + streams_of([2], "again ")
    compared.assert_agree(loaded, PLAIN, rounds, ["again 2-r0"])


@pytest.mark.parametrize("packing", [OF_32, BYTES_OF_32], ids=lambda packing: str(packing.bits))
@pytest.mark.parametrize("family", ["llama", "mixtral"])
def test_models_in_groups_of_32_are_recorded(
    family: str, packing: Packing, compared: Compared
) -> None:
    """Their tables, heads and experts, too."""
    loaded = opened(grown(family), partial(in_codes, packing=packing))
    rounds = streams_of([2]) + streams_of([2], "again ")
    compared.assert_agree(loaded, PLAIN, rounds, ["again 2-r0"])


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_have_the_same_bits_in_any_batch(family: str) -> None:
    scenarios = ["batch of unequal lengths", "in chunks of 9"]
    wanted = prompts((3, 20), tokens=4)
    assert_the_same_bits_in_any_batch(opened(grown(family)), wanted, scenarios=scenarios)


@pytest.mark.parametrize("family", ["gpt_oss", "longcat_flash"])
def test_logits_of_mxfp4_have_the_same_bits_in_any_batch(family: str) -> None:
    """In LongCat Flash, a row may have several pairs with one expert."""
    loaded = opened(grown(family), experts_in_mxfp4)
    scenarios = ["batch of unequal lengths", "in chunks of 9"]
    assert_the_same_bits_in_any_batch(loaded, prompts((3, 20), tokens=4), scenarios=scenarios)


def six_bit_experts(model: nn.Module) -> None:
    """Mutates: pack experts in codes that no kernel reads."""
    in_codes(model, Packing(64, 6, "affine"), "experts")
    in_codes(model)


@pytest.mark.parametrize(
    ("family", "pack"), [("gpt_oss", six_bit_experts), ("llama", six_bits_down)]
)
def test_mlx_computes_nodes_without_kernels_between_graphs(
    family: str, pack: Callable[[nn.Module], None], compared: Compared
) -> None:
    wide = {"hidden_size": 576, "intermediate_size": 128, "head_dim": 64}
    config = grown(family) | (wide if family == "llama" else {})
    rounds = streams_of([2]) + streams_of([2], "again ")
    compared.assert_agree(opened(config, pack), PLAIN, rounds, ["2-r1", "again 2-r0"])
    (whole,) = compared.wholes
    recorded = next(iter(whole._cache._recorded.values()))
    assert recorded.segments
    assert all(segment.nodes and segment.reads for segment in recorded.segments)
