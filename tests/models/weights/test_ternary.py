"""BitNet's matrices of -1, 0 and 1: packed in bytes, and rounded where they are used."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.core.errors import ModelError
from quire.models.base import named_parameters
from quire.models.weights.loader import open_model
from tests.models.solo import solo_logits
from tests.support.families import CONFIGS
from tests.support.tiny_models import random_weights, write_model

CONFIG = CONFIGS["bitnet"]
PROMPT = [5, 9, 40, 7] * 9


def saying(**said: Any) -> dict[str, Any]:
    return CONFIG | {"quantization_config": {"quant_method": "bitnet", **said}}


def matrices(weights: dict[str, mx.array]) -> list[str]:
    return [name for name in weights if name.endswith("_proj.weight")]


def packed(ternary: mx.array) -> mx.array:
    """Return bytes of four rows each, a quarter of the rows apart, as the publisher packs them."""
    quarters = mx.split((ternary + 1).astype(mx.uint8), 4)
    return quarters[0] | quarters[1] << 2 | quarters[2] << 4 | quarters[3] << 6


@pytest.mark.parametrize("linear", ["autobitlinear", "bitlinear"])
def test_packed_matrices_keep_their_codes(linear: str, tmp_path: Path) -> None:
    """The first kind's scale is a factor, the other's a divisor."""
    plain = random_weights(CONFIG)
    stored = dict(plain)
    for number, name in enumerate(matrices(plain)):
        ternary = mx.random.randint(-1, 2, plain[name].shape, key=mx.random.key(number))
        scale = 0.25 + 0.125 * (number % 3)
        plain[name] = ternary * (scale if linear == "autobitlinear" else 1 / scale)
        stored[name] = packed(ternary)
        stored[f"{name}_scale"] = mx.array([scale])
    ours = open_model(str(write_model(tmp_path / "plain", CONFIG, weights=plain))).model
    config = saying(linear_class=linear, quantization_mode="offline")
    theirs = open_model(str(write_model(tmp_path / "packed", config, weights=stored))).model

    assert mx.allclose(solo_logits(theirs, PROMPT), solo_logits(ours, PROMPT), atol=1e-4).item()
    words = named_parameters(theirs)["model.layers.0.self_attn.q_proj.weight"]
    assert (words.dtype, words.shape) == (mx.uint32, (64, 64 * 2 // 32))


def test_matrices_that_are_rounded_in_use_are_rounded_at_load(tmp_path: Path) -> None:
    stored = random_weights(CONFIG)
    plain = dict(stored)
    for name in matrices(stored):
        mean = mx.abs(stored[name]).mean()
        plain[name] = mx.clip(mx.round(stored[name] / mean), -1, 1) * mean
    ours = open_model(str(write_model(tmp_path / "plain", CONFIG, weights=plain))).model
    config = saying(linear_class="autobitlinear", quantization_mode="online")
    theirs = open_model(str(write_model(tmp_path / "rounded", config, weights=stored))).model

    assert mx.allclose(solo_logits(theirs, PROMPT), solo_logits(ours, PROMPT), atol=1e-4).item()


def test_a_packed_matrix_without_scale_is_refused(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    name = "model.layers.1.mlp.up_proj.weight"
    weights[name] = packed(mx.zeros(weights[name].shape))
    config = saying(linear_class="autobitlinear", quantization_mode="offline")
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.up_proj\.weight' is packed and has no"):
        open_model(str(write_model(tmp_path, config, weights=weights)))
