"""Opening families that see tiles: names of all kinds of checkpoint, parts, shapes, settings."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.core.errors import ModelError, RequestError
from quire.models.base import LanguageModel
from quire.models.registry import build
from quire.models.weights.loader import open_model
from tests.models.solo import solo_logits
from tests.support.tiled import CONFIGS, TILE_BYTES, cases
from tests.support.tiny_models import random_weights

Weights = dict[str, mx.array]


def opened(folder: Path, config: dict[str, Any], weights: Weights) -> LanguageModel:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return open_model(str(folder)).model


_TOWER = (
    ("layers.", "encoder.layers."),
    ("first_norm.", "pre_layrnorm."),
    ("last_norm.", "post_layernorm."),
    ("mlp.up_proj", "mlp.fc1"),
    ("mlp.down_proj", "mlp.fc2"),
)


def theirs(name: str, weights: Weights, *, conversion: bool) -> Weights:
    """Return the tensors as they are published, or as mlx-vlm converts them."""
    if name == "got_ocr2":
        return dict(_got(*each, conversion) for each in weights.items())
    if name == "llama4":
        return dict(_llama4(*each) for each in weights.items())
    ready: Weights = {}
    for key, array in weights.items():
        if not key.startswith("visual."):
            ready |= _text(name, key, array, conversion)
            continue
        key = key.removeprefix("visual.")
        if key.startswith("vision_tower."):
            for ours, other in _TOWER:
                key = key.replace(ours, other)
            if key.endswith("patch_embedding.weight"):
                patch = math.isqrt(array.shape[1] // 3)
                kernel = array.reshape(-1, patch, patch, 3)
                array = kernel if conversion else kernel.moveaxis(-1, 1)
            if name.startswith("internvl"):
                key, array = _internvit(key, array)
            else:
                key = key.replace("vision_tower.", "vision_tower.vision_model.")
        elif name == "gemma3":
            key = key.replace("linear.weight", "mm_input_projection_weight")
            key = key.replace("projector.norm", "projector.mm_soft_emb_norm")
            array = array.T if array.ndim == 2 else array - 1.0
        else:
            norm = "layernorm" if name == "aya_vision" else "layer_norm"
            key = key.replace("projector.norm", f"projector.{norm}")
        if name in _IDEFICS:
            key = key.replace("vision_tower.vision_model.", "vision_model.")
            key = key.replace("multi_modal_projector.linear", "connector.modality_projection.proj")
            key = key if conversion else f"model.{key}"
        if name == "deepseek_vl" and not conversion:
            key = key.replace("vision_tower.vision_model.", "vision_model.")
            key = key.replace("multi_modal_projector.linear_", "aligner.linear")
        ready[key] = array
    if name == "llava":  # published LLaVA 1.5 has layers that nothing reads
        deeper = {k.replace("layers.1.", "layers.2."): a for k, a in ready.items() if "tower" in k}
        ready = deeper | ready
    if not name.startswith("internvl"):
        ready["vision_tower.vision_model.embeddings.position_ids"] = mx.arange(4)
        ready["vision_tower.vision_model.head.probe"] = mx.zeros((1, 1, 48))
    return ready


def _internvit(key: str, array: mx.array) -> tuple[str, mx.array]:
    """Return InternViT's tensor as it is published."""
    for other, ours in _INTERNVIT:
        if ours in key:
            key = key.replace(ours, other)
    lead = {"cls_token": 2, "position_embeddings": 1}.get(key.rpartition(".")[2], 0)
    return key, array.reshape(*(1,) * lead, *array.shape)


_INTERNVIT = (
    ("embeddings.cls_token", "embeddings.class_embedding"),
    ("embeddings.position_embeddings", "embeddings.position_embedding.weight"),
    ("patch_embeddings.projection", "patch_embedding"),
    ("encoder.layer.", "encoder.layers."),
    ("attention.projection_layer", "self_attn.out_proj"),
    (".attention.", ".self_attn."),
    ("layernorm_before", "layer_norm1"),
    ("layernorm_after", "layer_norm2"),
    ("lambda_1", "scale1"),
    ("lambda_2", "scale2"),
    ("layernorm.", "post_layernorm."),
)


def _got(key: str, array: mx.array, conversion: bool) -> tuple[str, mx.array]:
    """Return GOT-OCR's tensor as it is published, or with channels last."""
    if not key.startswith("visual."):
        return f"language_model.{key}", array
    for ours, other in _GOT:
        key = key.replace(ours, other)
    if "patch_embed" in key and array.ndim == 2:
        patch = math.isqrt(array.shape[1] // 3)
        array = array.reshape(-1, patch, patch, 3)
    is_kernel = array.ndim == 4 and not key.endswith("pos_embed")
    return key, array.moveaxis(-1, 1) if is_kernel and not conversion else array


_GOT = (
    ("visual.", ""),
    ("patch_embed.", "patch_embed.projection."),
    ("mlp.up_proj", "mlp.lin1"),
    ("mlp.down_proj", "mlp.lin2"),
    ("projector.conv", "projector.conv_upsampler"),
    ("projector.linear", "projector.multimodal_projector"),
)


def _llama4(key: str, array: mx.array) -> tuple[str, mx.array]:
    """Return Llama 4's tensor as it is published, which is how it is converted, too."""
    if not key.startswith("visual."):
        return f"language_model.{key}", array
    for ours, other in _LLAMA4:
        key = key.replace(ours, other)
    if key.endswith("positional_embedding_vlm"):
        return key, mx.concatenate([array[1:], array[:1]])
    if "patch_embedding" in key:
        patch = math.isqrt(array.shape[1] // 3)
        array = array.reshape(-1, patch, patch, 3).moveaxis(-1, 1).flatten(1)
    return key, array


_LLAMA4 = (
    ("visual.", ""),
    ("multi_modal_projector.linear_1", "vision_model.vision_adapter.mlp.fc1"),
    ("multi_modal_projector.linear_2", "vision_model.vision_adapter.mlp.fc2"),
    ("multi_modal_projector.linear_3", "multi_modal_projector.linear_1"),
    ("vision_tower.", "vision_model."),
    ("embeddings.position_embedding.weight", "positional_embedding_vlm"),
    ("embeddings.patch_embedding", "patch_embedding.linear"),
    ("embeddings.class", "class"),
    ("model.layers.", "model.model.layers."),
    ("layer_norm1", "input_layernorm"),
    ("layer_norm2", "post_attention_layernorm"),
    ("out_proj", "o_proj"),
    ("up_proj", "fc1"),
    ("down_proj", "fc2"),
    ("first_norm", "layernorm_pre"),
    ("last_norm", "layernorm_post"),
)


_IDEFICS = ("idefics3", "smolvlm")


def _text(name: str, key: str, array: mx.array, conversion: bool) -> Weights:
    if name in _IDEFICS and not key.startswith("lm_head."):
        inner = key.removeprefix("model.")
        return {f"language_model.{inner}" if conversion else f"model.text_model.{inner}": array}
    less_one = name == "gemma3" and key.endswith("norm.weight")
    return {f"language_model.{key}": array - 1.0 if less_one else array}


@pytest.mark.parametrize("name", CONFIGS)
def test_names_of_all_kinds_of_checkpoint_are_read(name: str, tmp_path: Path) -> None:
    weights = random_weights(CONFIGS[name])
    tokens, media = cases(name)["two of different sizes"]
    found = []
    for conversion in (False, True):
        published = theirs(name, weights, conversion=conversion)
        model = opened(tmp_path / str(conversion), CONFIGS[name], published)
        found.append(solo_logits(model, tokens, media))
    assert mx.array_equal(found[0], found[1])


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_decoders_beside_plain_encoders(name: str, tmp_path: Path) -> None:
    tokens, media = cases(name)["two of different sizes"]
    packed, plain = {}, {}
    for key, array in theirs(name, random_weights(CONFIGS[name]), conversion=True).items():
        base = key.removesuffix(".weight")
        if key.startswith("language_model.") and array.ndim == 2:
            parts = mx.quantize(array, group_size=32, bits=4)
            packed |= dict(zip((key, f"{base}.scales", f"{base}.biases"), parts, strict=True))
            plain[key] = mx.dequantize(*parts, group_size=32, bits=4)
        else:
            packed[key] = plain[key] = array

    ours = solo_logits(opened(tmp_path / "packed", CONFIGS[name], packed), tokens, media)
    wanted = solo_logits(opened(tmp_path / "plain", CONFIGS[name], plain), tokens, media)

    assert mx.max(mx.abs(ours - wanted)).item() < 1e-3 * mx.max(mx.abs(wanted)).item()


@pytest.mark.parametrize("name", CONFIGS)
def test_without_its_tensors_a_model_takes_text_only(name: str, tmp_path: Path) -> None:
    weights = theirs(name, random_weights(CONFIGS[name]), conversion=True)
    text = {key: array for key, array in weights.items() if key.startswith("language_model.")}
    model = opened(tmp_path / "part", CONFIGS[name], text)
    whole = opened(tmp_path / "whole", CONFIGS[name], weights)
    assert not model.encoders
    assert "image" in whole.encoders
    assert mx.array_equal(solo_logits(model, [3, 1, 4]), solo_logits(whole, [3, 1, 4]))


def test_a_tower_that_lacks_a_tensor_is_refused_by_its_name(tmp_path: Path) -> None:
    weights = theirs("gemma3", random_weights(CONFIGS["gemma3"]), conversion=False)
    del weights["vision_tower.vision_model.encoder.layers.1.mlp.fc2.bias"]
    with pytest.raises(ModelError, match=r"layers\.1\.mlp\.down_proj\.bias"):
        opened(tmp_path / "model", CONFIGS["gemma3"], weights)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_act": "relu6"}, "relu6"),
        ({"num_attention_heads": 5}, "5 heads"),
        ({"patch_size": 9}, "patch of 9"),
        ({"patch_size": 3, "image_size": 15, "mm_tokens_per_image": 4}, "squares of 2"),
        ({"model_type": "pixtral"}, "pixtral"),
    ],
)
def test_settings_that_are_not_known_are_named(changes: dict[str, Any], word: str) -> None:
    config = CONFIGS["gemma3"]
    vision = config["vision_config"] | changes
    rows = changes.get("mm_tokens_per_image", 1)
    with pytest.raises(ModelError, match=word):
        build(config | {"vision_config": vision, "mm_tokens_per_image": rows})


def test_layers_that_nothing_reads_are_left_out() -> None:
    model = build(CONFIGS["llava"])
    assert model.encoders["image"].visual.kind.taken == (2, 1)
    assert len(model.encoders["image"].visual.vision_tower.layers) == 2


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"vision_feature_layer": -5}, "vision_feature_layer = -5"),
        ({"vision_feature_select_strategy": "full"}, "'full'"),
        ({"projector_hidden_act": "tanh"}, "projector_hidden_act"),
        ({"text_config": {"model_type": "phi"}}, "text_config.model_type"),
    ],
)
def test_settings_of_llava_are_named(changes: dict[str, Any], word: str) -> None:
    with pytest.raises(ModelError, match=word):
        build(CONFIGS["llava"] | changes)


@pytest.mark.parametrize(
    ("changes", "word"),
    [
        ({"hidden_act": "quick_gelu"}, "hidden_act"),
        ({"norm_eps": 1e-6}, "norm_eps"),
        ({"pixel_shuffle_ratio": 0.4}, "pixel_shuffle_ratio"),
        ({"image_size": 12}, "squares of 2"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type"),
    ],
)
def test_settings_of_llama_4_are_named(changes: dict[str, Any], word: str) -> None:
    vision = CONFIGS["llama4"]["vision_config"] | changes
    with pytest.raises(ModelError, match=word):
        build(CONFIGS["llama4"] | {"vision_config": vision})


def test_grids_that_cannot_be_are_named() -> None:
    encoder = build(CONFIGS["llava_next"]).encoders["image"]
    assert encoder.rows((2, 2, 2, 4, 2, 4)) == 4 + 2 * 5
    assert encoder.feature_bytes((2, 2, 2, 4, 2, 4)) == 5 * TILE_BYTES
    assert encoder.rows((0,) * 6) == 5
    for shape in ((2, 2, 3, 4, 3, 4), (2, 2, 6, 4, 6, 4), (2, 2, 4, 4, 4, 5)):
        with pytest.raises(RequestError, match="patches"):
            encoder.rows(shape)


def test_shapes_that_the_encoders_do_not_take_are_named() -> None:
    encoder = build(CONFIGS["gemma3"]).encoders["image"]
    assert (encoder.rows((3,)), encoder.feature_bytes((3,))) == (3, 3 * TILE_BYTES)
    with pytest.raises(RequestError, match="no tiles"):
        encoder.rows((0,))
