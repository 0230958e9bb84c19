"""Opening checkpoints of Gemma 4 with its encoders: names, layouts, packed and half weights."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from quire.core.errors import ModelError
from quire.core.media import MediaItem
from quire.models.base import MediaEncoder
from quire.models.weights.loader import open_model
from tests.models.solo import encoded, picture
from tests.support.tiny_models import (
    gemma4_audio_config,
    gemma4_vision_config,
    random_weights,
    sound,
)


@dataclass(frozen=True)
class Tower:
    """An encoder, and something for it.

    Attributes:
        rows: of `item`.
        layers: starts the names of tensors that converters pack.
        packable: a configuration's sizes in which those divide into groups.
        large: tensors that float16 holds only when they are normalised.
        strange: starts the names of tensors in checkpoints of larger siblings.
        needed: one tensor of each part.
    """

    kind: str
    config: Callable[..., dict[str, Any]]
    item: MediaItem
    rows: int
    layers: str
    packable: dict[str, int]
    needed: tuple[str, ...]
    large: tuple[str, ...] = ()
    strange: tuple[str, ...] = ()

    def opened(
        self, folder: Path, config: dict[str, Any], weights: dict[str, mx.array], dtype: str = ""
    ) -> MediaEncoder:
        """Return the encoder of a checkpoint that is written to the folder."""
        folder.mkdir()
        (folder / "config.json").write_text(json.dumps(config))
        mx.save_safetensors(str(folder / "model.safetensors"), weights)
        return open_model(str(folder), dtype=dtype).model.encoders[self.kind]

    def encoded(self, encoder: MediaEncoder) -> mx.array:
        """Return the rows of `item`."""
        (rows,) = encoded(encoder, self.item)
        return rows


VISION = Tower(
    kind="image",
    config=gemma4_vision_config,
    item=picture(6, 4, values=48, tokens=6),
    rows=6,
    layers="vision_tower.encoder.layers",
    packable={"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4},
    needed=(
        "embed_vision.embedding_projection.weight",
        "vision_tower.std_scale",
        "vision_tower.encoder.layers.1.self_attn.q_norm.weight",
        "vision_tower.encoder.layers.0.mlp.up_proj.output_max",
    ),
    large=("vision_tower.std_scale",),
    strange=("audio_tower.", "model.embed_audio."),
)
AUDIO = Tower(
    kind="audio",
    config=gemma4_audio_config,
    item=sound(30),
    rows=8,
    layers="audio_tower.layers",
    packable={"hidden_size": 64, "num_attention_heads": 4, "output_proj_dims": 64},
    needed=(
        "embed_audio.embedding_projection.weight",
        "audio_tower.subsample_conv_projection.layer1.conv.weight",
        "audio_tower.layers.1.self_attn.per_dim_scale",
        "audio_tower.layers.0.lconv1d.linear_end.output_max",
    ),
)
TOWERS = (VISION, AUDIO)
both = pytest.mark.parametrize("tower", TOWERS, ids=lambda tower: tower.kind)


def _differ(ours: mx.array, theirs: mx.array) -> float:
    return float(mx.max(mx.abs(ours - theirs)).item())


def _channels_first(name: str, array: mx.array) -> mx.array:
    """Return a weight as transformers has it."""
    if name.endswith("depthwise_conv1d.weight"):
        return array.swapaxes(1, 2)
    return array.transpose(0, 3, 1, 2) if name.endswith(".conv.weight") else array


@both
def test_names_and_layouts_of_both_kinds_of_checkpoint_are_read(
    tower: Tower, tmp_path: Path
) -> None:
    config = tower.config()
    weights = random_weights(config)
    google = {
        name.replace("model.", "model.language_model.", 1)
        if name.startswith("model.")
        else "model." + name: _channels_first(name, array)
        for name, array in weights.items()
    }
    google |= {f"{name}layers.0.weight": mx.ones(2) for name in tower.strange}
    community = {
        "language_model." + name if name.startswith("model.") else name: array
        for name, array in weights.items()
    }
    rows = [
        tower.encoded(tower.opened(tmp_path / name, config, tensors))
        for name, tensors in (("plain", weights), ("google", google), ("mlx", community))
    ]
    assert rows[0].shape == (tower.rows, 64)
    assert mx.array_equal(rows[0], rows[1])
    assert mx.array_equal(rows[0], rows[2])


@both
def test_a_packed_tower_computes_what_it_stands_for(tower: Tower, tmp_path: Path) -> None:
    config = tower.config(**tower.packable)
    packed, plain = {}, {}
    for name, array in random_weights(config).items():
        base = name.removesuffix(".weight")
        linear = array.ndim == 2 and array.shape[-1] % 32 == 0 and name.startswith(tower.layers)
        # Converters keep some layers as they are.
        if linear and "o_proj" not in name:
            parts = mx.quantize(array, group_size=32, bits=4)
            packed |= dict(zip((name, f"{base}.scales", f"{base}.biases"), parts, strict=True))
            plain[name] = mx.dequantize(*parts, group_size=32, bits=4)
        else:
            packed[name] = plain[name] = array
    ours = tower.opened(tmp_path / "packed", config, packed)
    theirs = tower.opened(tmp_path / "plain", config, plain)
    kinds = {type(module) for module in ours.modules()}
    assert any(issubclass(kind, nn.QuantizedLinear) for kind in kinds)
    assert any(issubclass(kind, nn.Linear) for kind in kinds)
    assert _differ(tower.encoded(ours), tower.encoded(theirs)) < 1e-4


@pytest.mark.parametrize(
    ("tower", "name"), [(tower, name) for tower in TOWERS for name in tower.needed]
)
def test_a_tower_that_lacks_a_tensor_is_refused_by_its_name(
    tower: Tower, name: str, tmp_path: Path
) -> None:
    weights = random_weights(tower.config())
    del weights[name]
    with pytest.raises(ModelError, match=f"no tensor '{name}'"):
        tower.opened(tmp_path / "part", tower.config(), weights)


@both
@pytest.mark.parametrize(("dtype", "error"), [("bfloat16", 0.25), ("float16", 0.05)])
def test_half_precision_is_near(tower: Tower, dtype: str, error: float, tmp_path: Path) -> None:
    config = tower.config()
    weights = random_weights(config)
    for name in tower.large:
        weights[name] *= 40_000.0
    half = tower.encoded(tower.opened(tmp_path / "half", config, weights, dtype))
    full = tower.encoded(tower.opened(tmp_path / "full", config, weights))
    assert str(half.dtype) == f"mlx.core.{dtype}"
    assert 0 < _differ(half, full) < error
