"""Recorded steps on a GPU: `pytest -m gpu`.

Cases come in order of what they find, since a card may not be there for all of them. Each is
printed with its time, most of which compiles kernels; further cases of a family share them.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.device.cuda.modules import ModuleProcesses
from quire.device.device import current_device
from quire.executor.graphs.attention import coded_pools, prompt_rows
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
PAGE, UNIFORM, TURBO = (
    KVFormat("page", 4, 4),
    KVFormat("uniform", 8, 4),
    KVFormat("turbo", 3.5, 3.5),
)
LLAMA, GEMMA = "llama, heads of 128", "gemma4_moe, heads of 256 and 512"
ROW_COUNTS = [1 << n for n in range(WIDE_ROWS.bit_length())]
FEW_COUNTS = [1, 8, 64]


def named(value: object) -> str:
    """Return how a case's parameter is called in its name."""
    return value.name if isinstance(value, KVFormat) else str(value)


@pytest.fixture(autouse=True, scope="module")
def modules() -> None:
    """Compile kernels of MLX that all cases need, side by side."""
    with ModuleProcesses() as processes:
        processes.start(mx.bfloat16, current_device().free_memory())


@pytest.fixture(autouse=True)
def progress(request: pytest.FixtureRequest, capsys: pytest.CaptureFixture[str]) -> Iterator[None]:
    started = time.perf_counter()
    yield
    with capsys.disabled():
        print(f" {request.node.name}: {time.perf_counter() - started:.1f} s", flush=True)


@pytest.mark.parametrize("family", FAMILIES)
def test_recorded_steps_compute_what_the_model_does(family: str, compared: Compared) -> None:
    counts = ROW_COUNTS if family == "llama" else FEW_COUNTS
    names = ["1-r0", "8-r5", "64-r63"]
    compared.assert_agree(opened(FAMILIES[family]), PLAIN, streams_of(counts), names)


@pytest.mark.parametrize(
    ("family", "format"),
    [
        (LLAMA, PAGE),
        ("glm4_moe_lite", PAGE),
        (LLAMA, UNIFORM),
        (LLAMA, TURBO),
        (GEMMA, PAGE),
        ("mimo_v2_flash", PAGE),
        ("glm4_moe_lite", UNIFORM),
        ("glm4_moe_lite", TURBO),
    ],
    ids=named,
)
def test_prompts_over_codes_are_read_in_steps_of_many_rows(
    family: str, format: KVFormat, compared: Compared, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Beside sequences of few rows, which the same steps read from codes; and more of these than
    may read codes.
    """
    for module in (prompt_rows, coded_pools):
        monkeypatch.setattr(module, "STREAMS", 64)
    lengths = [[300, 70, 12, 3], [300, 70, 12, 3], [4] * 32]
    rounds = [
        [replace(each, id=f"{seed}-{each.id}", max_tokens=4) for each in prompts(own, seed=seed)]
        for seed, own in enumerate(lengths)
    ]
    config = replace(PLAIN, kv_format=format, kv_skip_layers=())
    loaded = opened(CODED_FAMILIES[family] if family in CODED_FAMILIES else grown(family))
    names = ["1-r0", "1-r1", "2-r31"]
    compared.assert_agree(loaded, config, rounds, names, CODED, counts=[4])
    (whole,) = compared.wholes
    most = max(rows for _, rows in whole.verified)
    latents = family == "glm4_moe_lite" and format.scheme == "turbo"
    assert most <= MAX_ROWS if latents else most > MAX_ROWS


@pytest.mark.parametrize(
    ("family", "format"),
    [
        *((family, PAGE) for family in GROWN_FAMILIES),
        ("kimi_linear", UNIFORM),
        ("mimo_v2_flash", TURBO),
    ],
    ids=named,
)
def test_latents_and_short_values_are_coded(
    family: str, format: KVFormat, compared: Compared
) -> None:
    rounds = streams_of([2, 8]) + streams_of([2, 8], "again ")
    config = replace(PLAIN, kv_format=format, kv_skip_layers=())
    compared.assert_agree(opened(grown(family)), config, rounds, ["2-r1", "again 8-r5"], CODED)


@pytest.mark.parametrize(
    ("family", "format", "skipped"),
    [
        *((LLAMA, *each) for each in CODED_FORMATS),
        *((GEMMA, *each) for each in CODED_FORMATS if each[1]),
        (GEMMA, PAGE, ()),
    ],
    ids=named,
)
def test_recorded_steps_read_and_write_codes(
    family: str, format: KVFormat, skipped: tuple[int, ...], compared: Compared
) -> None:
    config = replace(PLAIN, kv_format=format, kv_skip_layers=skipped)
    loaded = opened(CODED_FAMILIES[family])
    names = ["1-r0", "8-r5", "16-r14"]
    compared.assert_agree(loaded, config, streams_of([1, 2, 8, 16]), names, CODED)


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


@pytest.mark.parametrize("format", [KVFormat(), PAGE, UNIFORM, TURBO], ids=named)
def test_keys_that_thread_blocks_share_give_the_same_bits_in_any_batch(format: KVFormat) -> None:
    """Steps of 1 and of 64 rows would split so many keys differently without `batch_invariant`."""
    scenarios = [name for name in SCENARIOS if name != "pre-empted and resumed"]
    wanted = prompts((3, 700, 650), tokens=40)
    assert_the_same_bits_in_any_batch(
        opened(FAMILIES["llama"]), wanted, format, scenarios=scenarios
    )


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_have_the_same_bits_in_any_batch(family: str) -> None:
    # Long enough to be pre-empted: at most 64 rows start in a step.
    assert_the_same_bits_in_any_batch(opened(FAMILIES[family]), prompts(tokens=40))


@pytest.mark.parametrize(
    ("family", "format", "skipped"),
    [
        *(("llama", *each) for each in CODED_FORMATS),
        *(("gemma4_moe", *each) for each in CODED_FORMATS if each[1]),
    ],
    ids=named,
)
def test_logits_over_codes_have_the_same_bits_in_any_batch(
    family: str, format: KVFormat, skipped: tuple[int, ...]
) -> None:
    loaded = opened(FAMILIES[family])
    assert_the_same_bits_in_any_batch(loaded, prompts(tokens=40), format, skipped)
