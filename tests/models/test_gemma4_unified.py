"""Opening Gemma 4 12B: names of checkpoints, parts that are left out, settings, shapes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.cache.specs import FullKV, WindowKV
from quire.core.errors import ModelError, RequestError
from quire.models.base import LanguageModel
from quire.models.registry import build
from quire.models.weights.loader import open_model
from tests.models.solo import picture, solo_logits
from tests.support.tiny_models import prompt_with, random_weights
from tests.support.unified import unified_config, wave

CONFIG = unified_config()
PICTURE = picture(6, 4, 48, 6)
Weights = dict[str, mx.array]


def opened(folder: Path, weights: Weights, config: dict[str, Any] = CONFIG) -> LanguageModel:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return open_model(str(folder)).model


def published(name: str) -> str:
    """Return Google's name of a tensor."""
    if name.startswith("model."):
        return name.replace("model.", "model.language_model.", 1)
    if "multimodal_embedder" in name:
        return "model." + name.replace("multimodal_embedder.", "")
    return "model." + name.replace("embed_vision.", "vision_embedder.")


def test_names_of_all_kinds_of_checkpoint_are_read(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    google = {published(name): array for name, array in weights.items()}
    community = {
        "language_model." + name if name.startswith("model.") else name: array
        for name, array in weights.items()
    }
    assert "model.embed_vision.embedding_projection.weight" in google
    kinds = (weights, google, community)
    models = [opened(tmp_path / str(number), kind) for number, kind in enumerate(kinds)]
    first, *others = [solo_logits(model, *prompt_with(PICTURE, 2)) for model in models]
    for each in others:
        assert mx.array_equal(first, each)


def test_without_its_tensors_a_part_is_left_out(tmp_path: Path) -> None:
    weights = random_weights(CONFIG)
    for part, left in (("embed_vision.", {"audio"}), ("embed_audio.", {"image", "video"})):
        kept = {name: array for name, array in weights.items() if not name.startswith(part)}
        assert {*opened(tmp_path / part, kept).encoders} == left
    del weights["embed_vision.pos_norm.bias"]
    with pytest.raises(ModelError, match=r"no tensor .embed_vision\.pos_norm\.bias."):
        opened(tmp_path / "damaged", weights)


def test_pictures_are_seen_whole_by_sliding_layers_where_nothing_else_is_said() -> None:
    seen = unified_config()
    del seen["text_config"]["use_bidirectional_attention"]
    for config, whole in ((seen, True), (unified_config(use_bidirectional_attention=None), False)):
        for spec in build(config).layout:
            assert isinstance(spec, WindowKV | FullKV)
            assert spec.bidirectional_media == (whole and isinstance(spec, WindowKV))


@pytest.mark.parametrize(
    ("part", "changes", "word"),
    [
        ("text_config", {"enable_moe_block": True}, "enable_moe_block = True"),
        ("text_config", {"hidden_size_per_layer_input": 8}, "hidden_size_per_layer_input = 8"),
        ("text_config", {"use_bidirectional_attention": "all"}, "bidirectional_attention = 'all'"),
        ("vision_config", {"output_proj_dims": 40}, "vision_config.output_proj_dims = 40"),
        ("vision_config", {"model_patch_size": 12}, "vision_config.model_patch_size = 12"),
        ("vision_config", {"mm_embed_dim": "x"}, "mm_embed_dim = 'x'"),
        ("audio_config", {"hidden_size": 30}, "audio_config.hidden_size = 30"),
        ("audio_config", {"audio_embed_dim": 0}, "audio_embed_dim = 0"),
    ],
)
def test_settings_that_are_not_computed_are_named(
    part: str, changes: dict[str, Any], word: str
) -> None:
    with pytest.raises(ModelError, match=word):
        build(CONFIG | {part: CONFIG[part] | changes})


@pytest.mark.parametrize(
    ("kind", "shape", "word"),
    [
        ("image", (5, 4), "squares of 2 by 2"),
        ("image", (4, 26), "at most 24"),
        ("audio", (0, 20), "0 frames of 20 samples"),
        ("audio", (3, 640), "takes 20 samples"),
    ],
)
def test_shapes_that_are_not_taken_are_named(kind: str, shape: tuple[int, int], word: str) -> None:
    encoder = build(CONFIG).encoders[kind]
    with pytest.raises(RequestError, match=word):
        encoder.rows(shape)


def test_bytes_and_rows() -> None:
    encoders = build(CONFIG).encoders
    assert encoders["image"] is not None
    assert encoders["image"].feature_bytes((24, 2)) == 48 * 48
    assert encoders["image"].rows((24, 2)) == 12
    assert encoders["audio"].feature_bytes((3, 20)) == len(wave(3).features)
    assert encoders["audio"].rows((3, 20)) == 3
