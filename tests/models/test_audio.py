"""Gemma 4 with an audio encoder: packed beside it, in part, and what it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import pytest

from quire.core.errors import ModelError, RequestError
from quire.models.audio.gemma4 import Gemma4AudioArguments
from quire.models.base import MediaEncoder
from quire.models.weights.loader import open_model
from tests.models.solo import encoded, solo_logits
from tests.support.tiny_models import MEL_BINS, gemma4_audio_config, random_weights, sound

SOUND = sound(30)


def _write(folder: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return str(folder)


def _audio(folder: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> MediaEncoder:
    return open_model(_write(folder, config, weights)).model.encoders["audio"]


def _heard(encoder: MediaEncoder) -> mx.array:
    (rows,) = encoded(encoder, SOUND)
    return rows


def test_the_language_part_may_be_packed_beside_a_tower_of_floats(tmp_path: Path) -> None:
    config = gemma4_audio_config()
    packed: dict[str, mx.array] = {}
    for name, array in random_weights(config).items():
        base = name.removesuffix(".weight")
        if name.startswith("model.layers.") and name.endswith("_proj.weight"):
            parts = mx.quantize(array, group_size=32, bits=4)
            packed |= dict(zip((name, f"{base}.scales", f"{base}.biases"), parts, strict=True))
        else:
            packed[name] = array
    config |= {"quantization": {"group_size": 32, "bits": 4}}
    model = open_model(_write(tmp_path / "packed", config, packed)).model
    audio = model.encoders["audio"]
    assert not any(isinstance(module, nn.QuantizedLinear) for module in audio.modules())
    assert any(isinstance(module, nn.QuantizedLinear) for module in model.modules())
    plain = _audio(tmp_path / "plain", gemma4_audio_config(), random_weights(config))
    assert mx.array_equal(_heard(audio), _heard(plain))


def test_without_its_tensors_a_model_hears_nothing(tmp_path: Path) -> None:
    config = gemma4_audio_config()
    weights = random_weights(config)
    seeing = {name: each for name, each in weights.items() if "audio" not in name}
    whole = open_model(_write(tmp_path / "whole", config, weights)).model
    part = open_model(_write(tmp_path / "part", config, seeing)).model
    without = open_model(_write(tmp_path / "old", config | {"audio_config": None}, weights)).model
    assert set(whole.encoders) == {"image", "video", "audio"}
    assert set(part.encoders) == set(without.encoders) == {"image", "video"}
    prompt = [3, 1, 4, 1, 5]
    assert mx.array_equal(solo_logits(whole, prompt), solo_logits(part, prompt))


@pytest.mark.parametrize(
    "changes",
    [
        {"hidden_act": "swoosh"},
        {"attention_context_right": 2},
        {"attention_context_left": 9},
        {"subsampling_conv_channels": [16]},
    ],
    ids=str,
)
def test_what_is_not_supported_is_named(changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError, match=next(iter(changes))):
        Gemma4AudioArguments.from_config(gemma4_audio_config(**changes))


def test_shapes(tmp_path: Path) -> None:
    config = gemma4_audio_config()
    audio = _audio(tmp_path / "model", config, random_weights(config))
    assert audio.feature_bytes((30, MEL_BINS)) == len(SOUND.features)
    assert [audio.rows((frames, MEL_BINS)) for frames in (1, 4, 5, 2998)] == [1, 1, 2, 750]
    for shape in ((0, MEL_BINS), (30, MEL_BINS + 1)):
        with pytest.raises(RequestError, match=f"takes {MEL_BINS} bins"):
            audio.rows(shape)
