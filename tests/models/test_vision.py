"""Gemma 4 with a vision encoder: in part, its bounds, places, tiles, and what it takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.core.errors import ModelError, RequestError
from quire.device.operations import UnfusedOperations
from quire.models.base import MediaEncoder
from quire.models.registry import build
from quire.models.vision.gemma4 import Gemma4VisionArguments
from quire.models.weights.loader import open_model
from tests.models.solo import image_features, picture, solo_logits
from tests.support.seeing import CONFIGS as SEEING
from tests.support.tiny_models import gemma4_vision_config, random_weights

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
IMAGE = picture(6, 4, values=48, tokens=6)


def _write(folder: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> str:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return str(folder)


def _vision(folder: Path, config: dict[str, Any], weights: dict[str, mx.array]) -> MediaEncoder:
    return open_model(_write(folder, config, weights)).model.encoders["image"]


def _differ(ours: mx.array, theirs: mx.array) -> float:
    return float(mx.max(mx.abs(ours - theirs)).item())


def test_bounds_that_the_configuration_does_not_use_are_left_out(tmp_path: Path) -> None:
    weights = random_weights(gemma4_vision_config())
    vision = _vision(tmp_path / "a", gemma4_vision_config(use_clipped_linears=False), weights)
    plain = {name: array for name, array in weights.items() if not name.endswith(("_min", "_max"))}
    other = _vision(tmp_path / "b", gemma4_vision_config(use_clipped_linears=False), plain)
    clipped = _vision(tmp_path / "c", gemma4_vision_config(), weights)

    assert mx.array_equal(image_features(vision, IMAGE), image_features(other, IMAGE))
    assert _differ(image_features(vision, IMAGE), image_features(clipped, IMAGE)) > 0.01


def test_without_its_tensors_a_model_takes_text_only(tmp_path: Path) -> None:
    config = gemma4_vision_config()
    weights = random_weights(config)
    text = {name: array for name, array in weights.items() if name.startswith("model.")}

    whole = open_model(_write(tmp_path / "whole", config, weights))
    part = open_model(_write(tmp_path / "part", config, text))

    assert whole.model.encoders
    assert not part.model.encoders
    assert part.parameter_bytes == sum(array.nbytes for array in text.values())
    assert mx.array_equal(solo_logits(whole.model, PROMPT), solo_logits(part.model, PROMPT))
    without = open_model(_write(tmp_path / "old", config | {"vision_config": None}, weights))
    assert not without.model.encoders


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_activation": "relu6"}, "relu6"),
        ({"rope_parameters": {"rope_type": "yarn", "factor": 2.0}}, "yarn"),
        ({"head_dim": 18}, "head_dim = 18"),
    ],
)
def test_settings_that_are_not_known_are_named(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError, match=word):
        Gemma4VisionArguments.from_config(gemma4_vision_config(**changes))


def test_rope_is_axial_under_its_old_name_too() -> None:
    # As in the checkpoints that Google first released.
    old = {"rope_parameters": {"rope_type": "default", "rope_theta": 100.0}}
    new = Gemma4VisionArguments.from_config(gemma4_vision_config())
    assert new == Gemma4VisionArguments.from_config(gemma4_vision_config(**old))
    assert new == Gemma4VisionArguments.from_config(gemma4_vision_config(rope_parameters=None))


@pytest.mark.parametrize(
    ("rows", "columns", "word"),
    [
        (5, 4, "squares of 2 by 2"),
        (4, 5, "squares of 2 by 2"),
        (0, 4, "squares of 2 by 2"),
        (26, 4, "at most 24"),
        (4, 26, "at most 24"),
    ],
)
def test_shapes_that_the_encoder_does_not_take_are_named(
    rows: int, columns: int, word: str, tmp_path: Path
) -> None:
    config = gemma4_vision_config()
    vision = _vision(tmp_path / "model", config, random_weights(config))
    assert vision.feature_bytes((2, 3)) == 6 * 3 * 4 * 4
    assert vision.rows((24, 24)) == 144
    with pytest.raises(RequestError, match=f"{rows} rows and {columns} columns.*{word}"):
        vision.rows((rows, columns))


def test_attention_in_tiles_is_attention_at_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = gemma4_vision_config()
    vision = _vision(tmp_path / "model", config, random_weights(config))
    image = picture(10, 12, values=48, tokens=30)
    at_once = image_features(vision, image)
    seven_rows = 7 * 3 * 120 * 4
    monkeypatch.setattr(UnfusedOperations, "score_bytes", seven_rows)
    assert _differ(image_features(vision, image), at_once) < 1e-5


def test_places_of_patches_matter(tmp_path: Path) -> None:
    config = gemma4_vision_config()
    vision = _vision(tmp_path / "model", config, random_weights(config))
    patches = mx.full((24, 48), 99, dtype=mx.uint8)  # all the same
    (wide,), (tall,) = vision(patches, (4, 6)), vision(patches, (6, 4))
    assert _differ(wide[:1], wide[1:2]) > 0.01
    assert _differ(wide, tall) > 0.01


def test_pictures_of_one_shape_are_encoded_together(tmp_path: Path) -> None:
    config = gemma4_vision_config()
    vision = _vision(tmp_path / "a", config, random_weights(config))
    one, other = IMAGE.features, IMAGE.features[::-1]
    alone = [vision(mx.array(list(each), dtype=mx.uint8), IMAGE.shape)[0] for each in (one, other)]
    both = mx.array(list(one + other), dtype=mx.uint8)
    (together,) = vision(both, IMAGE.shape)
    assert vision.takes_several
    assert _differ(alone[0], alone[1]) > 0.01
    assert _differ(together, mx.concatenate(alone)) < 1e-5


@pytest.mark.parametrize("family", ["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "paddleocr_vl"])
def test_families_that_take_several_pictures_encode_each_by_itself(family: str) -> None:
    mx.random.seed(0)
    config = SEEING[family]
    model = build(config)
    model.load_weights(list(random_weights(config).items()), strict=False)
    vision, shape = model.encoders["image"], (8, 12)
    size = vision.feature_bytes(shape)
    one, other = (mx.random.randint(0, 256, (size,)).astype(mx.uint8) for _ in range(2))
    assert vision.takes_several
    alone = zip(vision(one, shape), vision(other, shape), strict=True)
    together = vision(mx.concatenate([one, other]), shape)
    for level, parts in zip(together, alone, strict=True):
        assert _differ(parts[0], parts[1]) > 0.01
        assert _differ(level, mx.concatenate(parts)) < 1e-4
