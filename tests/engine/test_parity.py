"""Promise 1 of docs/design.md: each request as if it were alone, whatever its company.

On a CPU with the compiled kernels, with OpenBLAS, and with MLX's own products.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cache
from itertools import product
from pathlib import Path

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.core.request import Request
from quire.device.device import current_device
from quire.models.weights.loader import LoadedModel, open_model
from tests.support.parity import SCENARIOS, Generated, alone, assert_same, prompts
from tests.support.tiny_models import CONFIGS, tiny_model

Opened = tuple[LoadedModel, EngineConfig, dict[str, Generated]]


PRODUCTS = ("auto", "openblas", "mlx")
if sys.platform != "linux" or mx.default_device() != mx.cpu:
    PRODUCTS = ("mlx",)
WHOLE = "gemma4_ple"
"""The family with all scenarios every day; a few others have one."""


def daily(products: str, family: str, scenario: str) -> bool:
    pre_empted = scenario.startswith("pre-empted")
    if products == PRODUCTS[0]:
        several = family == "qwen3_5" and scenario in ("batch of unequal lengths", "in chunks of 9")
        return family == WHOLE or several or (pre_empted and family in ("llama", "qwen3_5_moe"))
    return products == PRODUCTS[1] and family == "llama" and pre_empted


CASES = [
    pytest.param(*case, marks=() if daily(*case) else pytest.mark.slow)
    for case in product(PRODUCTS, CONFIGS, SCENARIOS)
]


def wanted_of(family: str) -> list[Request]:
    """Return all lengths where every scenario runs, and where a few have room beside their
    states.
    """
    many = family == WHOLE or family.startswith("qwen3_5")
    return prompts() if many else prompts((5, 40, 65, 130))


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Opened]:
    """Return a family's tiny model and what each prompt gets alone, computed once for each
    `--blas`.
    """

    @cache
    def find(products: str, name: str) -> Opened:
        folder = tiny_model(Path(tmp_path_factory.mktemp(name)), name)
        loaded = open_model(str(folder), dtype="float32")
        config = EngineConfig(str(folder), kv_memory=64 << 20, prefix_cache=False)
        return loaded, config, alone(loaded, config, wanted_of(name))

    return find


@pytest.mark.parametrize(("products", "family", "scenario"), CASES)
def test_as_if_alone(
    opened: Callable[[str, str], Opened], products: str, family: str, scenario: str
) -> None:
    current_device().choose_products(products)
    loaded, config, expected = opened(products, family)
    wanted = wanted_of(family)
    got = SCENARIOS[scenario](loaded, config, wanted)
    assert_same(got, expected, [request.id for request in wanted])
