"""Random schedules under each KV format: every request gets what it gets alone.

With MLX's own products, and with OpenBLAS's where its kernels are those for AVX-512. Its kernels
for AVX2 and NEON round a row by the number of rows beside it, so codes turn now and then there.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import partial
from itertools import product
from pathlib import Path

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.core.kv_choice import parse_format
from quire.device.device import current_device
from quire.executor.factory import open_executor
from quire.executor.segments.runner import open_segments
from quire.models.weights.loader import LoadedModel, open_model
from tests.support.everyday import everyday
from tests.support.families import CONFIGS
from tests.support.schedules import Deviation, Schedule, deviation
from tests.support.tiny_models import tiny_model, write_model

FORMATS = ("page-8", "turbo-4", "page-4/3", "uniform-8", "page-4", "turbo-3", "uniform-4", "plain")
FAMILIES = ("llama", "gemma4_ple", "qwen3_5")
RECURRENT = {
    "granitemoehybrid": CONFIGS["granitemoehybrid"] | {"mamba_d_state": 32},
    "jamba": CONFIGS["jamba"] | {"mamba_d_state": 16},
    "olmo_hybrid": CONFIGS["olmo_hybrid"],
    # Without attention to latents, which rounds a row by its company.
    "kimi_linear": CONFIGS["kimi_linear"]
    | {
        "linear_attn_config": CONFIGS["kimi_linear"]["linear_attn_config"]
        | {"full_attn_layers": [], "kda_layers": [1, 2, 3, 4]}
    },
}
"""Whose bits are their own by the compiled kernels alone."""
EVERY_DAY = 4
SHARED_KEYS = 15
"""A seed of `gemma4_ple` with plain blocks, where there are kernels: segments compute the last
layers for wanted rows only.
"""
SLOW = 60


def exact_products() -> list[str]:
    """Return the values of `--blas` with which a row's bits do not depend on its company here."""
    if sys.platform != "linux" or mx.default_device() != mx.cpu:
        return ["mlx"]
    wide = "avx512f" in Path("/proc/cpuinfo").read_text()
    return ["auto", "openblas", "mlx"] if wide else ["auto", "mlx"]


PRODUCTS = exact_products()


@pytest.fixture(scope="module", params=PRODUCTS)
def products(request: pytest.FixtureRequest) -> Iterator[str]:
    current_device().choose_products(request.param)
    yield request.param
    current_device().choose_products("mlx")


@pytest.fixture(scope="module")
def opened(products: str, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], LoadedModel]:
    known: dict[str, LoadedModel] = {}

    def find(family: str) -> LoadedModel:
        if family not in known:
            folder = Path(tmp_path_factory.mktemp(family))
            if family in RECURRENT:
                write_model(folder, RECURRENT[family])
            else:
                tiny_model(folder, family)
            known[family] = open_model(str(folder), dtype="float32")
        return known[family]

    return find


def drawn(seed: int, opened: Callable[[str], LoadedModel]) -> tuple[str, Deviation]:
    """Run the schedule of a seed, with the family and format of its turn. Return its deviation from
    requests that the model's own code computes alone. With the kernels, segments compute the
    schedule.
    """
    kernels = current_device().kernels
    families = FAMILIES if kernels is None else (*FAMILIES, *RECURRENT)
    family, name = families[seed % len(families)], FORMATS[seed % len(FORMATS)]
    loaded = opened(family)
    config = EngineConfig(str(loaded.path), kv_memory=64 << 20, kv_format=parse_format(name))
    case, segments = f"{seed} {family} {name}", open_segments(loaded.model)
    by_segments = partial(open_executor, segments=segments)
    found = deviation(Schedule.draw(seed), loaded, config, by_segments)
    if segments is not None:
        assert segments.steps, case
        assert all(segments.agrees.values()), f"{case}: {segments.agrees}"
    return case, found


def daily(products: str, seed: int) -> bool:
    """Return whether a schedule runs every day: all with the default products, and each with one of
    the others.
    """
    return products == PRODUCTS[0] or PRODUCTS[1:].index(products) == seed % len(PRODUCTS[1:])


@pytest.mark.parametrize(
    ("products", "seed"),
    everyday(product(PRODUCTS, [*range(EVERY_DAY), SHARED_KEYS]), daily),
    indirect=["products"],
)
def test_as_if_alone(opened: Callable[[str], LoadedModel], seed: int) -> None:
    case, got = drawn(seed, opened)
    assert got.within, f"{case}: {got}"
    if current_device().kernels is not None:
        assert got.logits == 0, f"{case}: the kernels give a row the same bits in any company"


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_of_many_none_deviates(opened: Callable[[str], LoadedModel], products: str) -> None:
    seeds = range(EVERY_DAY, EVERY_DAY + SLOW)
    deviating = {
        case: got for case, got in (drawn(seed, opened) for seed in seeds) if not got.within
    }
    assert not deviating, f"{len(deviating)} of {SLOW} schedules with {products}: {deviating}"
