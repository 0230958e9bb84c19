"""With the compiled CPU kernels a request's logits are the same bits in any company.

Alone, in a batch, with prompts cut into chunks, pre-empted and resumed; packed KV included.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.core.kv_choice import parse_format
from quire.device.device import current_device
from quire.models.loader import LoadedModel, open_model
from tests.support.parity import SCENARIOS, alone, prompts
from tests.support.tiny_models import tiny_model

TOKENS = 70
"""More than a block, so that answers fill blocks too."""


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


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[[str], LoadedModel]]:
    """Tiny models by family, multiplied as on the default set-up."""
    device = current_device()
    device.choose_products("auto")
    if device.kernels is None:
        device.choose_products("mlx")
        pytest.skip("without the compiled CPU kernels logits are equal within a tolerance")
    known: dict[str, LoadedModel] = {}

    def find(family: str) -> LoadedModel:
        if family not in known:
            folder = tiny_model(Path(tmp_path_factory.mktemp(family)), family)
            known[family] = open_model(str(folder))
        return known[family]

    yield find
    device.choose_products("mlx")


@pytest.mark.parametrize(
    ("family", "format"),
    [
        pytest.param("llama", "plain", marks=pytest.mark.slow),
        ("llama", "page-4"),
        ("gemma4_ple", "turbo-4"),
        ("qwen3_moe", "plain"),
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
        got = run(loaded, config, wanted)
        for request in wanted:
            name = f"{request.id} {scenario}"
            ours, theirs = got[request.id], expected[request.id]
            assert ours.tokens == theirs.tokens, name
            assert ours.logits.keys() == theirs.logits.keys(), name
            for position, logits in theirs.logits.items():
                assert mx.array_equal(ours.logits[position], logits), f"{name} at {position}"
