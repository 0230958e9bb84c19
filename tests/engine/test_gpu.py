"""The parity matrix on a GPU: `MLX_ENABLE_TF32=0 pytest -m gpu`."""

from __future__ import annotations

import os
from pathlib import Path

import mlx.core as mx
import pytest

from quire.config import EngineConfig
from quire.models.loader import open_model
from tests.support.parity import SCENARIOS, alone, assert_same, prompts
from tests.support.tiny_models import CONFIGS, tiny_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(mx.default_device() == mx.cpu, reason="needs a GPU"),
]


@pytest.mark.parametrize("family", CONFIGS)
def test_as_if_alone_on_this_gpu(tmp_path: Path, family: str) -> None:
    assert mx.metal.is_available() or os.environ.get("MLX_ENABLE_TF32") == "0"
    folder = tiny_model(tmp_path, family)
    loaded = open_model(str(folder), dtype="float32")
    config = EngineConfig(str(folder), kv_memory=64 << 20, prefix_cache=False)
    wanted = prompts()
    expected = alone(loaded, config, wanted)
    for scenario in SCENARIOS.values():
        got = scenario(loaded, config, wanted)
        assert_same(got, expected, [request.id for request in wanted])
