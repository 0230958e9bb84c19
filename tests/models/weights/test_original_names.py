"""InternVL, DeepSeek-VL and Kimi as their authors publish them: the same as their conversions.

Those are held against transformers by `test_tiled_oracle` and `test_hybrid_vision`.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.core.errors import ModelError
from quire.core.original_configs import by_usual_keys
from quire.models.registry import build
from quire.models.vision.vision_language import VisionLanguageModel
from quire.models.weights.loader import LoadedModel, open_model
from tests.models.solo import solo_logits
from tests.models.test_vision_language import assert_near, packed
from tests.support.families import HELD_AGAINST_MLX_LM
from tests.support.hybrid import PROMPTS as HYBRID_PROMPTS
from tests.support.original import CONFIGS, CONVERTED
from tests.support.seeing import CONFIGS as SEEING
from tests.support.seeing import PROMPTS, Prompt
from tests.support.siglip import CONFIGS as SIGLIP
from tests.support.tiled import cases
from tests.support.tiny_models import random_weights

Weights = dict[str, mx.array]


def opened(folder: Path, config: dict[str, Any], weights: Weights) -> LoadedModel:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return open_model(str(folder), dtype="float32")


def asked(name: str) -> Prompt:
    if name.endswith("hybrid"):
        return HYBRID_PROMPTS["two"]
    return cases(CONVERTED[name]["model_type"])["two of different sizes"]


_LAYER = ((".out_proj.", ".proj."), (".self_attn.", ".attn."), (".layer_norm", ".norm"))
_LAYER += ((".mlp.up_proj.", ".mlp.fc1."), (".mlp.down_proj.", ".mlp.fc2."))
_OUTSIDE = {
    "internvl_chat": (
        ("vision_tower.layers.", "vision_model.encoder.layers."),
        ("vision_tower.", "vision_model."),
        ("position_embedding.weight", "position_embedding"),
        (".scale", ".ls"),
        ("multi_modal_projector.norm.", "mlp1.0."),
        ("multi_modal_projector.linear_1.", "mlp1.1."),
        ("multi_modal_projector.linear_2.", "mlp1.3."),
    ),
    "multi_modality": (
        ("vision_tower.", "vision_model.vision_tower."),
        ("multi_modal_projector.linear_1.", "aligner.layers.0."),
        ("multi_modal_projector.linear_2.", "aligner.layers.2."),
    ),
    "multi_modality-hybrid": (
        ("high_res_vision_model.neck.", "vision_model.vision_tower_high.vision_tower.neck."),
        ("high_res_vision_neck.", "vision_model.vision_tower_high.vision_tower.neck_hd."),
        (
            "high_res_vision_proj.conv1.",
            "vision_model.vision_tower_high.vision_tower.downsamples.0.",
        ),
        (
            "high_res_vision_proj.conv2.",
            "vision_model.vision_tower_high.vision_tower.downsamples.1.",
        ),
        (
            "high_res_vision_alpha",
            "vision_model.vision_tower_high.vision_tower.hd_alpha_downsamples",
        ),
        ("high_res_vision_model.", "vision_model.vision_tower_high.vision_tower."),
        ("aligner.high_res_vision_proj.", "aligner.high_up_proj."),
        ("aligner.vision_proj.", "aligner.low_up_proj."),
        ("aligner.proj.", "aligner.layers.1."),
    ),
}
_TIMM = (
    ("embeddings.patch_embedding.", "patch_embed.proj."),
    ("embeddings.position_embedding.weight", "pos_embed"),
    ("last_norm.", "norm."),
    ("vision_tower.layers.", "vision_tower.blocks."),
    ("vision_tower_low.layers.", "vision_tower_low.vision_tower.blocks."),
)
_NECK = (("conv1", "0"), ("norm1", "1"), ("conv2", "2"), ("norm2", "3"))


def published(name: str, weights: Weights) -> Weights:
    """Return this package's tensors by their authors' names and layouts."""
    ready: Weights = {}
    for key, array in weights.items():
        if not key.startswith("visual."):
            ready[f"language_model.{key}"] = array
            continue
        key = key.removeprefix("visual.")
        if key.startswith("vision_model."):  # the hybrid's small encoder
            key = key.replace("vision_model.", "vision_model.vision_tower_low.")
        else:
            for ours, other in _OUTSIDE.get(name, _OUTSIDE["internvl_chat"]):
                key = key.replace(ours, other) if ours in key else key
        for ours, other in _LAYER:
            key = key.replace(ours, other)
        if name.startswith("multi_modality"):
            key = timm(key)
        ready[key] = laid_out(key, array)
    return joined(ready)


def timm(key: str) -> str:
    for ours, other in _TIMM:
        key = key.replace(ours, other)
    key = re.sub(r"tower_low\.(?=pos_embed|patch_embed|norm)", "tower_low.vision_tower.", key)
    if ".vision_tower_high." in key:
        key = key.replace(".layers.", ".blocks.").replace("fc1", "lin1").replace("fc2", "lin2")
        key = key.replace("patch_embed.weight", "patch_embed.proj.weight")
        key = key.replace("patch_embed.bias", "patch_embed.proj.bias")
        for ours, other in _NECK if ".neck" in key else ():
            key = key.replace(ours, other)
    return key


def laid_out(key: str, array: mx.array) -> mx.array:
    """Return a kernel with its colours second; places and tokens with an axis in front."""
    if "patch_embed" in key and key.endswith("weight"):
        side = round((array.shape[1] // 3) ** 0.5)
        return array.reshape(-1, side, side, 3).moveaxis(-1, 1)
    if array.ndim == 4 and not key.endswith("pos_embed"):
        return array.moveaxis(-1, 1)
    if key.endswith(("position_embedding", "pos_embed")) and array.ndim == 2:
        return array[None]
    return array[None, None] if key.endswith("class_embedding") else array


def joined(weights: Weights) -> Weights:
    """Return queries, keys and values in one."""
    ready = {key: a for key, a in weights.items() if ".attn." not in key or "_proj." not in key}
    for key in weights:
        if ".attn.q_proj." in key:
            parts = [
                weights[key.replace("q_proj", part)] for part in ("q_proj", "k_proj", "v_proj")
            ]
            ready[key.replace("q_proj", "qkv")] = mx.concatenate(parts)
    return ready


@pytest.mark.parametrize("name", CONFIGS)
def test_originals_are_as_their_conversions(name: str, tmp_path: Path) -> None:
    weights = random_weights(CONVERTED[name])
    tokens, media = asked(name)
    theirs = opened(tmp_path / "converted", CONVERTED[name], weights)
    extra = {"gen_head.weight": mx.zeros((1,))} if name == "multi_modality" else {}
    original = published(name, weights) | extra
    assert any("qkv" in key for key in original)
    ours = opened(tmp_path / "original", CONFIGS[name], original)
    found, wanted = (solo_logits(each.model, tokens, media) for each in (ours, theirs))
    assert mx.abs(found - wanted).max().item() < 1e-5 * mx.abs(wanted).max().item()
    assert ours.context_length == theirs.context_length


@pytest.mark.slow
@pytest.mark.parametrize("name", CONFIGS)
def test_conversions_of_originals_are_read_packed_too(name: str, tmp_path: Path) -> None:
    """mlx-vlm's conversions keep the names, and have kernels with their channels last."""
    original = published(name, random_weights(CONVERTED[name]))
    converted = {
        key: array.moveaxis(1, -1) if array.ndim == 4 and "pos_embed" not in key else array
        for key, array in original.items()
    }
    kinds = [original, converted, *packed(converted, "language_model.")]
    tokens, media = asked(name)
    logits = [
        solo_logits(opened(tmp_path / str(number), CONFIGS[name], kind).model, tokens, media)
        for number, kind in enumerate(kinds)
    ]
    assert mx.array_equal(logits[0], logits[1])
    assert_near(logits[2], logits[3])


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("internvl_chat", {"ps_version": "v1"}, "ps_version = 'v1'"),
        ("internvl_chat", {"llm_config": {"model_type": "phi"}}, "model_type = 'phi'"),
        ("internvl_chat", {"vision_config": None}, "vision_config|NoneType"),
        ("multi_modality", {"aligner_config": {"params": {"projector_type": "linear"}}}, "linear"),
        ("multi_modality", {"vision_config": {"params": {"model_name": "eva"}}}, "eva"),
    ],
)
def test_settings_that_are_not_known_are_named(
    name: str, changes: dict[str, Any], word: str
) -> None:
    with pytest.raises(ModelError, match=word):
        build(CONFIGS[name] | changes)


def test_published_encoders_are_known_by_their_names() -> None:
    config = CONFIGS["multi_modality"]
    params = {"model_name": "siglip_large_patch16_384", "image_size": 384}
    model: Any = build(config | {"vision_config": {"model_type": "vision", "params": params}})
    kind = model.visual.kind
    assert (kind.depth, kind.hidden_size, kind.heads, kind.patches) == (24, 1024, 16, 576)
    assert kind.mlp.width == 4096


_INTERNLM = (
    ("embed_tokens", "tok_embeddings"),
    ("input_layernorm", "attention_norm"),
    ("post_attention_layernorm", "ffn_norm"),
    ("self_attn.o_proj", "attention.wo"),
    ("mlp.gate_proj", "feed_forward.w1"),
    ("mlp.down_proj", "feed_forward.w2"),
    ("mlp.up_proj", "feed_forward.w3"),
    ("lm_head", "output"),
)


def test_internlm_within_internvl(tmp_path: Path) -> None:
    """Queries of two heads for each of two keys, then the key and the value."""
    config = CONFIGS["internvl_chat"] | {"llm_config": HELD_AGAINST_MLX_LM["internlm2"]}
    weights = random_weights(config)
    original = published("internvl_chat", weights)
    named: Weights = {}
    for key, array in original.items():
        for ours, other in _INTERNLM if key.startswith("language_model.") else ():
            key = key.replace(ours, other)
        if ".self_attn.q_proj." in key:
            source = key.replace("language_model.", "")
            split = [
                weights[source.replace("q_proj", part)].reshape(2, -1, 16, *array.shape[1:])
                for part in ("q_proj", "k_proj", "v_proj")
            ]
            joined_rows = mx.concatenate(split, axis=1).reshape(-1, *array.shape[1:])
            named[key.replace("self_attn.q_proj", "attention.wqkv")] = joined_rows
        elif ".self_attn." not in key:
            named[key] = array
    tokens, media = asked("internvl_chat")
    ours, theirs = (
        solo_logits(opened(tmp_path / str(n), config, each).model, tokens, media)
        for n, each in enumerate((named, weights))
    )
    assert any("wqkv" in key for key in named)
    assert mx.array_equal(ours, theirs)


def test_internlm3_within_internvl(tmp_path: Path) -> None:
    config = CONFIGS["internvl_chat"] | {"llm_config": HELD_AGAINST_MLX_LM["internlm3"]}
    weights = random_weights(config)
    tokens, media = asked("internvl_chat")
    ours, theirs = (
        solo_logits(opened(tmp_path / str(n), config, each).model, tokens, media)
        for n, each in enumerate((published("internvl_chat", weights), weights))
    )
    assert mx.array_equal(ours, theirs)


def test_ernie_with_its_authors_flat_keys(tmp_path: Path) -> None:
    nested = SEEING["ernie4_5_vl_moe"]
    text = dict(nested["text_config"])
    rope = text.pop("rope_parameters")
    layers, tower = text["num_hidden_layers"], nested["vision_config"]
    kept = ("depth", "hidden_size", "num_heads", "patch_size", "spatial_merge_size", "in_channels")
    flat = {
        **text,
        **{key: nested[key] for key in nested if key.endswith(("start_token_id", "end_token_id"))},
        "model_type": "ernie4_5_moe_vl",
        "moe_num_experts": [text["moe_num_experts"]] * 2,
        "moe_layer_start_index": [1, 1],
        "moe_layer_end_index": [layers + 1, layers],
        "moe_layer_interval": 1,
        "moe_use_aux_free": True,
        "rope_theta": rope["rope_theta"],
        "rope_scaling": {"type": "default", "mrope_section": rope["mrope_section"]},
        "rope_3d": True,
        "im_patch_id": nested["image_token_id"],
        "video_token_id": nested["video_token_id"],
        "vision_config": {
            **{key: tower[key] for key in kept},
            "model_type": "DFNRope_vision_transformer",
            "embed_dim": tower["hidden_size"],
            "hidden_act": "quick_gelu",
            "mlp_ratio": tower["intermediate_size"] / tower["hidden_size"],
        },
    }
    weights = random_weights(nested)
    tokens, media = PROMPTS["two of different sizes"]
    found, wanted = (
        opened(tmp_path / config["model_type"], config, weights) for config in (flat, nested)
    )
    ours, theirs = (solo_logits(each.model, tokens, media) for each in (found, wanted))
    assert mx.array_equal(ours, theirs)
    assert found.context_length == wanted.context_length
    assert found.config["image_token_id"] == nested["image_token_id"]


_KIMI = {
    "hidden_size": "vt_hidden_size",
    "intermediate_size": "vt_intermediate_size",
    "num_attention_heads": "vt_num_attention_heads",
    "num_hidden_layers": "vt_num_hidden_layers",
    "pos_emb_height": "init_pos_emb_height",
    "pos_emb_width": "init_pos_emb_width",
}


def _moonshots(**changes: Any) -> dict[str, Any]:
    """Return Kimi K2.5 by its publisher's keys."""
    converted = SIGLIP["kimi_k25"]
    vision = {_KIMI.get(key, key): value for key, value in converted["vision_config"].items()}
    more = {"pos_emb_type": "divided_fixed", "merge_type": "sd2_tpool", "projector_ln_eps": 1e-5}
    return {
        "model_type": "kimi_k25",
        "media_placeholder_token_id": converted["image_token_id"],
        "text_config": converted["text_config"] | {"model_type": "kimi_k2"},
        "vision_config": vision | more | changes,
    }


def test_kimi_with_its_publishers_keys() -> None:
    ours, theirs = build(_moonshots()), build(SIGLIP["kimi_k25"])
    assert isinstance(ours, VisionLanguageModel)
    assert isinstance(theirs, VisionLanguageModel)
    assert ours.visual is not None
    assert theirs.visual is not None
    assert ours.description == theirs.description
    assert ours.visual.kind == theirs.visual.kind
    assert by_usual_keys(_moonshots())["image_token_id"] == SIGLIP["kimi_k25"]["image_token_id"]


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"merge_type": "sd2"}, "vision_config.merge_type = 'sd2'"),
        ({"init_pos_emb_width": 5}, "vision_config.pos_emb_width = 5"),
        ({"merge_kernel_size": [3, 3]}, r"vision_config.merge_kernel_size = \[3, 3\]"),
        ({"mm_projector_type": "mlp"}, "vision_config.mm_projector_type = 'mlp'"),
    ],
)
def test_what_kimis_encoder_does_not_compute_is_refused(
    changes: dict[str, Any], named: str
) -> None:
    with pytest.raises(ModelError, match=named):
        build(_moonshots(**changes))


def test_weights_may_be_packed_as_the_text_says(tmp_path: Path) -> None:
    """Kimi K2.5 says it there alone: its experts are integers of compressed-tensors."""
    config = SIGLIP["kimi_k25"]
    weights = random_weights(config)
    plain, stored = dict(weights), {}
    for key, array in weights.items():
        if ".experts." not in key:
            stored[key] = array
            continue
        path, _, part = key.partition(".experts.")
        scale = mx.max(mx.abs(array.reshape(*array.shape[:2], -1, 32)), axis=-1) / 7
        wide = mx.repeat(scale, 32, axis=-1)
        codes = mx.clip(mx.round(array / wide), -8, 7)
        plain[key] = codes * wide
        shifted = (codes + 8).astype(mx.uint32).reshape(*array.shape[:2], -1, 8)
        words = (shifted << (4 * mx.arange(8, dtype=mx.uint32))).sum(axis=-1).view(mx.int32)
        for expert in range(len(array)):
            name = f"{path}.experts.{expert}.{part}"
            stored[f"{name}_packed"] = words[expert]
            stored[f"{name}_scale"] = scale[expert]
            stored[f"{name}_shape"] = mx.array(array.shape[1:])
    method = {"quant_method": "compressed-tensors", "format": "pack-quantized"}
    said = config | {"text_config": config["text_config"] | {"quantization_config": method}}
    ours, theirs = (
        solo_logits(opened(tmp_path / str(number), each, tensors).model, [3, 4, 5, 6])
        for number, (each, tensors) in enumerate(((said, stored), (config, plain)))
    )
    assert any(name.endswith("_packed") for name in stored)
    assert mx.max(mx.abs(ours - theirs)).item() < 1e-4
