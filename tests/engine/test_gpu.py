"""The parity matrix on a GPU: `MLX_ENABLE_TF32=0 pytest -m gpu`."""

from __future__ import annotations

import os
from pathlib import Path

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.core.request import Request
from quire.models.gemma4_vision import (
    Gemma4VisionArguments,
    Gemma4VisionEncoder,
    Projector,
    VisionTower,
)
from quire.models.loader import open_model
from tests.engine.test_image_parity import FAMILIES, requests
from tests.support.parity import SCENARIOS, alone, assert_same, prompts
from tests.support.tiny_models import CONFIGS, tiny_model, write_model

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(mx.default_device() == mx.cpu, reason="needs a GPU"),
]


def check_matrix(folder: Path, wanted: list[Request]) -> None:
    """Every scenario gives each request what it gets alone."""
    assert mx.metal.is_available() or os.environ.get("MLX_ENABLE_TF32") == "0"
    loaded = open_model(str(folder), dtype="float32")
    config = EngineConfig(str(folder), kv_memory=64 << 20, prefix_cache=False)
    expected = alone(loaded, config, wanted)
    for scenario in SCENARIOS.values():
        got = scenario(loaded, config, wanted)
        assert_same(got, expected, [request.id for request in wanted])


@pytest.mark.parametrize("family", CONFIGS)
def test_as_if_alone_on_this_gpu(tmp_path: Path, family: str) -> None:
    check_matrix(tiny_model(tmp_path, family), prompts())


@pytest.mark.parametrize("family", FAMILIES)
def test_images_as_if_alone_on_this_gpu(tmp_path: Path, family: str) -> None:
    check_matrix(write_model(tmp_path, FAMILIES[family]), requests(family))


@pytest.mark.parametrize("head_dim", [64, 72])
def test_a_large_image_is_encoded_as_on_a_cpu(head_dim: int) -> None:
    """2,520 patches, as many as an image has by default, with the heads of E2B and of 26B-A4B."""
    args = Gemma4VisionArguments(
        text_hidden_size=64,
        hidden_size=4 * head_dim,
        intermediate_size=512,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=4,
        head_dim=head_dim,
    )
    mx.random.seed(0)
    projector = Projector(args.hidden_size, args.text_hidden_size, args.rms_norm_eps)
    encoder = Gemma4VisionEncoder(VisionTower(args), projector)
    patches = mx.random.randint(0, 256, (42 * 60, args.patch_values)).astype(mx.uint8)
    (on_gpu,) = encoder(patches, (42, 60))
    mx.eval(on_gpu)
    with mx.stream(mx.cpu):
        (on_cpu,) = encoder(patches, (42, 60))
        mx.eval(on_cpu)
    assert on_gpu.shape == (280, 64)
    assert mx.abs(on_gpu - on_cpu).max().item() < 1e-3 * mx.abs(on_cpu).max().item()
