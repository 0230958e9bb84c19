"""While pools grow, shrink and are copied, MLX's memory stays near weights and budget."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.core.request import Request
from quire.device.device import current_device
from quire.engine.assembly import assemble
from quire.models.weights.loader import LoadedModel, open_model
from tests.support.tiny_models import llama_config, write_model

PLAIN, PACKED = KVFormat(), KVFormat("page", 8, 8)
KV_HEADS, HEAD_DIM = 16, 32
TOKEN_BYTES = 2 * KV_HEADS * HEAD_DIM * 4
"""KV bytes of a token in one layer, plain."""


def opened(folder: Path, layers: int) -> LoadedModel:
    """Return a model whose keys and values are far larger than anything else in a step."""
    config = llama_config(
        num_hidden_layers=layers,
        num_attention_heads=KV_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_DIM,
    )
    return open_model(str(write_model(folder, config)))


def peak(loaded: LoadedModel, layers: int, formats: tuple[KVFormat, ...], tokens: int) -> float:
    """Fill the budget of plain blocks for `tokens` in each format by turns.

    Returns:
        The peak of memory beyond the weights, as a share of the budget.
    """
    budget = tokens * layers * TOKEN_BYTES
    config = EngineConfig(
        str(loaded.path), kv_memory=budget, block_size=32, max_step_tokens=64, prefix_cache=False
    )
    engine = assemble(loaded, config)
    numbers = count()
    gc.collect()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    claimed = 0
    for format in formats:
        for _ in range(tokens // 900 * (1 if format == PLAIN else 4) + 2):
            number = next(numbers)
            prompt = tuple(3 + (number + token) % 50 for token in range(900))
            engine.add(Request(str(number), prompt, max_tokens=4, kv_format=format))
        while engine.has_work:
            engine.step()
            claimed = max(claimed, engine._scheduler.manager.capacity.claimed)
    assert claimed > 0.9 * budget, "the budget was not needed"
    return float(mx.get_peak_memory() - before) / budget


@pytest.fixture
def _kernels() -> Iterator[None]:
    """The compiled kernels. MLX's operations queue results of up to 64 MiB, more than a tenth
    here.
    """
    current_device().choose_products("auto")
    yield
    current_device().choose_products("mlx")


@pytest.mark.slow
@pytest.mark.usefixtures("_kernels")
@pytest.mark.parametrize(("layers", "tokens"), [(1, 8_000), (2, 4_000), (4, 4_000), (8, 2_000)])
def test_the_peak_is_weights_and_budget_and_a_tenth(
    layers: int, tokens: int, tmp_path: Path
) -> None:
    assert peak(opened(tmp_path, layers), layers, (PLAIN, PACKED, PLAIN), tokens) < 1.1
