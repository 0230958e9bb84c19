"""While pools grow, shrink and are copied, MLX's memory stays near weights and budget."""

from __future__ import annotations

import gc
from itertools import count

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.core.kv_format import KVFormat
from quire.core.request import Request
from quire.engine.assembly import assemble
from quire.models.weights.loader import LoadedModel, open_model
from tests.support.tiny_models import llama_config, write_model

PLAIN, PACKED = KVFormat(), KVFormat("page", 4, 4)
BUDGET = 160 << 20


@pytest.fixture(scope="module")
def loaded(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    """A model of 16 layers whose keys and values are far larger than anything else in a step."""
    config = llama_config(
        num_hidden_layers=16, num_attention_heads=8, num_key_value_heads=8, head_dim=64
    )
    return open_model(str(write_model(tmp_path_factory.mktemp("model"), config)))


@pytest.mark.slow
@pytest.mark.parametrize("formats", [(PLAIN,), (PACKED, PLAIN), (PLAIN, PACKED, PLAIN)])
def test_the_peak_is_weights_and_budget_and_a_tenth(
    formats: tuple[KVFormat, ...], loaded: LoadedModel
) -> None:
    engine = assemble(
        loaded,
        EngineConfig(
            str(loaded.path),
            kv_memory=BUDGET,
            block_size=32,
            max_step_tokens=64,
            prefix_cache=False,
        ),
    )
    numbers = count()
    gc.collect()  # engines of other tests
    mx.clear_cache()
    mx.reset_peak_memory()
    before = mx.get_active_memory()
    claimed = 0
    for format in formats:
        for _ in range(8):
            number = next(numbers)
            prompt = tuple(3 + (number + token) % 50 for token in range(500))
            engine.add(Request(str(number), prompt, max_tokens=8, kv_format=format))
        while engine.has_work:
            engine.step()
            claimed = max(claimed, engine._scheduler.manager.capacity.claimed)
    assert claimed > 0.9 * BUDGET, "the budget was not needed"
    assert mx.get_peak_memory() - before < 1.1 * BUDGET
