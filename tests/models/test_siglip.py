"""Families of `support.siglip` with pictures: against transformers, in company, by other names."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from quire.core.config import EngineConfig
from quire.core.errors import ModelError
from quire.models.registry import build
from quire.models.weights.loader import LoadedModel, open_model
from tests.models.solo import encoded, solo_logits
from tests.models.test_vision_language import assert_near, packed
from tests.support.agreement import differ
from tests.support.everyday import everyday
from tests.support.parity import TOLERANCE, alone, answered, assert_same, in_batch, prompts
from tests.support.seeing import film
from tests.support.siglip import CONFIGS, cases, shown
from tests.support.tiny_models import random_weights

ANSWER = 12
DAILY = "two of different sizes"
Weights = dict[str, mx.array]
Both = tuple[Any, LoadedModel]


@pytest.fixture(scope="module")
def both(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Both]:
    pytest.importorskip("torch", reason="the oracle needs torch")
    pytest.importorskip("transformers", reason="the oracle is transformers")
    from tests.models import siglip_oracle

    known: dict[str, Both] = {}

    def find(name: str) -> Both:
        if name not in known:
            folder = Path(tmp_path_factory.mktemp(name))
            build = getattr(siglip_oracle, CONFIGS[name]["model_type"].replace("-", "_"))
            known[name] = build(CONFIGS[name], folder), open_model(str(folder))
        return known[name]

    return find


@pytest.mark.oracle
@pytest.mark.parametrize("name", CONFIGS)
def test_rows_of_pictures_match(both: Callable[[str], Both], name: str) -> None:
    reference, loaded = both(name)
    encoder = loaded.model.encoders["image"]
    for number, grid in enumerate(((2, 4), (6, 10), (14, 4), (8, 8), (2, 18))):
        item = shown(name, number, *grid)
        (ours,) = encoded(encoder, item)
        assert len(ours) == encoder.rows(item.shape) == item.tokens
        assert differ(ours, reference.rows(item)) < 2e-4


@pytest.mark.oracle
def test_rows_of_videos_match(both: Callable[[str], Both]) -> None:
    reference, loaded = both("lfm3_vl")
    for number, grid in enumerate(((1, 2, 2), (3, 6, 10))):
        item = film(number, *grid)
        (ours,) = encoded(loaded.model.encoders["video"], item)
        assert differ(ours, reference.rows(item)) < 2e-4


CASES = everyday(
    ((name, case) for name in CONFIGS for case in cases(name)), lambda name, case: case == DAILY
)


@pytest.mark.oracle
@pytest.mark.parametrize(("name", "case"), CASES)
def test_logits_and_tokens_match(both: Callable[[str], Both], name: str, case: str) -> None:
    import torch

    from tests.models import oracle

    reference, loaded = both(name)
    tokens, media = cases(name)[case]
    embedded = reference.embeddings(tokens, media)
    assert loaded.model.positions(tokens, media) is None
    with torch.no_grad():
        logits = reference.text(inputs_embeds=embedded).logits[0]
    greedy = oracle.reference_greedy(reference.text, tokens, ANSWER, inputs_embeds=embedded)
    assert differ(solo_logits(loaded.model, tokens, media), logits) < TOLERANCE
    # Seven tokens a step: pictures are cut.
    assert answered(loaded, tokens, media, ANSWER).tokens == greedy
    assert len(set(greedy)) > 1, "a degenerate continuation proves nothing"


@pytest.mark.parametrize("name", everyday(CONFIGS, ("lfm2_vl", "mistral3").__contains__))
def test_two_in_a_batch_are_as_if_alone(tmp_path: Path, name: str) -> None:
    loaded = opened(tmp_path / "model", CONFIGS[name], random_weights(CONFIGS[name]))
    config = EngineConfig("", kv_memory=16 << 20, kv_skip_layers=(), prefix_cache=False)
    wanted = [
        replace(request, prompt=tuple(tokens), media=tuple(media))
        for request, (tokens, media) in zip(
            prompts([1, 1], tokens=8), list(cases(name).values())[::2], strict=False
        )
    ]
    got = in_batch(loaded, config, wanted)
    assert_same(got, alone(loaded, config, wanted), [request.id for request in wanted])


def opened(folder: Path, config: dict[str, Any], weights: Weights) -> LoadedModel:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    mx.save_safetensors(str(folder / "model.safetensors"), weights)
    return open_model(str(folder))


_LFM2_VL = (
    ("visual.merger.post_layernorm.", "vision_tower.vision_model.post_layernorm."),
    ("visual.merger.norm.", "multi_modal_projector.layer_norm."),
    ("visual.merger.", "multi_modal_projector."),
    ("visual.", "vision_tower.vision_model."),
    (".pos_embed.", ".embeddings.position_embedding."),
)
_LFM3_VL = (
    ("visual.merger.post_layernorm.", "multi_modal_projector.layer_norm."),
    ("visual.merger.", "multi_modal_projector."),
    ("visual.patch_embed.norm.", "vision_tower.embedding_norm."),
    ("visual.patch_embed.proj.", "vision_tower.patchifier."),
    ("visual.blocks.", "vision_tower.layers."),
    (".attn.kernel", ".conv.spatial_conv.weight"),
    (".attn.in_proj.", ".conv.in_proj."),
    (".attn.out_proj.", ".conv.out_proj."),
    (".attn.q_norm.", ".self_attn.q_layernorm."),
    (".attn.k_norm.", ".self_attn.k_layernorm."),
    (".norm1.", ".operator_norm."),
    (".norm2.", ".ffn_norm."),
    (".mlp.gate_proj.", ".feed_forward.w1."),
    (".mlp.down_proj.", ".feed_forward.w2."),
    (".mlp.up_proj.", ".feed_forward.w3."),
)
_MISTRAL = (
    ("visual.merger.merging_layer.", "multi_modal_projector.patch_merger.merging_layer."),
    ("visual.merger.", "multi_modal_projector."),
    ("visual.patch_embed.proj.", "vision_tower.vision_model.patch_conv."),
    ("visual.patch_embed.norm.", "vision_tower.vision_model.ln_pre."),
    ("visual.blocks.", "vision_tower.vision_model.transformer.layers."),
    (".attn.proj.", ".attention.o_proj."),
    (".attn.qkv.", ".attention.qkv."),
    (".norm1.", ".attention_norm."),
    (".norm2.", ".ffn_norm."),
    (".mlp.", ".feed_forward."),
)
_LIGHTON = tuple(
    (
        ours,
        other.replace("vision_tower.vision_model.", "vision_encoder.").replace(
            "multi_modal_projector.", "vision_projection."
        ),
    )
    for ours, other in _MISTRAL
)
_MINICPM = (
    ("visual.blocks.1.merger.mlp.norm.", "vit_merger.pre_norm."),
    ("visual.blocks.1.merger.mlp.", "vit_merger."),
    ("visual.blocks.1.merger.norm1.", "vit_merger.layer_norm1."),
    ("visual.blocks.1.merger.", "vit_merger."),
    ("visual.merger.post_layernorm.", "vision_tower.post_layernorm."),
    ("visual.merger.norm.", "merger.mlp.0.pre_norm."),
    ("visual.merger.", "merger.mlp.0."),
    ("visual.", "vision_tower."),
    (".pos_embed.", ".embeddings.position_embedding."),
)
_CONVERTED = {
    "minicpmv4_6": _MINICPM,
    "minicpmv4_6-4x": _MINICPM,
    "lighton_ocr": _LIGHTON,
    "llava-pixtral": (("visual.merger.linear_fc", "multi_modal_projector.linear_"), *_MISTRAL),
    "mistral3": _MISTRAL,
    "lfm3_vl": _LFM3_VL,
    "lfm2_vl": _LFM2_VL,
    "lfm2_vl-experts": _LFM2_VL,
    "youtu_vl": (
        ("visual.", "vision_tower."),
        ("merger.norm.", "merger.ln_q."),
        ("merger.linear_fc1.", "merger.mlp.0."),
        ("merger.linear_fc2.", "merger.mlp.2."),
        ("merger.post_layernorm.", "post_layernorm."),
    ),
    "phi4-siglip": (
        ("visual.merger.linear_fc", "mm_projector.linear_"),
        ("visual.", "vision_tower.vision_tower.vision_model."),
        (".pos_embed.", ".embeddings.position_embedding."),
    ),
}
_DOTS = (
    ("visual.merger.post_layernorm.", "vision_tower.post_trunk_norm."),
    ("visual.merger.norm.", "vision_tower.merger.ln_q."),
    ("visual.merger.linear_fc1.", "vision_tower.merger.mlp.0."),
    ("visual.merger.linear_fc2.", "vision_tower.merger.mlp.2."),
    ("visual.patch_embed.", "vision_tower.patch_embed.patchifier."),
    ("visual.", "vision_tower."),
    (".mlp.gate_proj.", ".mlp.fc1."),
    (".mlp.down_proj.", ".mlp.fc2."),
    (".mlp.up_proj.", ".mlp.fc3."),
)
_SIGLIP = (
    (".attn.proj.", ".self_attn.out_proj."),
    (".blocks.", ".encoder.layers."),
    (".norm1.", ".layer_norm1."),
    (".norm2.", ".layer_norm2."),
    (".mlp.up_proj.", ".mlp.fc1."),
    (".mlp.down_proj.", ".mlp.fc2."),
    (".patch_embed.proj.", ".embeddings.patch_embedding."),
)


_KIMI_VL = (
    ("visual.merger.post_layernorm.", "vision_tower.final_layernorm."),
    ("visual.merger.norm.", "multi_modal_projector.pre_norm."),
    ("visual.merger.linear_fc", "multi_modal_projector.linear_"),
    ("visual.pos_embed.", "vision_tower.patch_embed.pos_emb."),
    ("visual.", "vision_tower."),
    (".norm1.", ".norm0."),
    (".norm2.", ".norm1."),
    (".attn.qkv.", ".attn.wqkv."),
    (".attn.proj.", ".attn.wo."),
    (".mlp.up_proj.", ".mlp.fc0."),
    (".mlp.down_proj.", ".mlp.fc1."),
)
_KIMI = (
    ("visual.merger.post_layernorm.", "vision_tower.encoder.final_layernorm."),
    ("visual.merger.norm.", "mm_projector.pre_norm."),
    ("visual.merger.linear_fc1.", "mm_projector.proj.0."),
    ("visual.merger.linear_fc2.", "mm_projector.proj.2."),
    ("visual.pos_embed.", "vision_tower.patch_embed.pos_emb."),
    ("visual.patch_embed.", "vision_tower.patch_embed."),
    ("visual.", "vision_tower.encoder."),
    (".norm1.", ".norm0."),
    (".norm2.", ".norm1."),
    (".attn.qkv.", ".wqkv."),
    (".attn.proj.", ".wo."),
    (".mlp.up_proj.", ".mlp.fc0."),
    (".mlp.down_proj.", ".mlp.fc1."),
)


def moonshots(weights: Weights, names: tuple[tuple[str, str], ...] = _KIMI) -> Weights:
    """Return the tensors as Moonshot publishes them, whose decoder is named as in conversions."""
    heads, head_dim = 4, 16
    half, quarter = head_dim // 2, head_dim // 4
    # A pair's columns come first, then its rows, and its elements stand together.
    places = [
        pair + element * half
        for frequency in range(quarter)
        for pair in (quarter + frequency, frequency)
        for element in (0, 1)
    ]
    ready: Weights = {}
    for key, array in weights.items():
        if not key.startswith("visual."):
            ready[f"language_model.{key}"] = array
            continue
        for ours, theirs in names:
            key = key.replace(ours, theirs)
        if ".wqkv." in key:
            q, k, v = mx.split(array, 3)
            q, k = (
                mx.unflatten(part, 0, (heads, -1))[:, mx.array(places)].flatten(0, 1)
                for part in (q, k)
            )
            array = mx.concatenate([q, k, v])
        ready[key] = array
    return ready


def conversions_of_dots(weights: Weights) -> Weights:
    """Return the tensors as mlx-vlm names them; its decoder has the head within."""
    ready: Weights = {}
    for key, array in weights.items():
        if not key.startswith("visual."):
            inner = "model." if key.startswith("lm_head.") else ""
            ready[f"language_model.{inner}{key}"] = array
            continue
        for ours, theirs in _DOTS:
            key = key.replace(ours, theirs)
        ready[key] = array
    return ready


def converted(name: str, weights: Weights) -> Weights:
    """Return the tensors as mlx-vlm names them; those that it publishes are what the oracle
    saves.
    """
    if name == "kimi_k25":
        return moonshots(weights)
    if name == "kimi_vl":
        return moonshots(weights, _KIMI_VL)
    ready: Weights = {}
    if name == "dots_ocr":
        return conversions_of_dots(weights)
    for key, array in weights.items():
        if not key.startswith("visual."):
            ready[f"language_model.{key}"] = array
            continue
        for ours, theirs in (*_CONVERTED[name], *_SIGLIP):
            key = key.replace(ours, theirs)
        if ".qkv." not in key:
            ready[key] = array
            continue
        keys = (len(array) + 64) // 2  # all encoders' queries are as wide
        for part, rows in zip("qkv", mx.split(array, [64, keys]), strict=True):
            key_of = key.replace("attn.qkv", "self_attn.qkv").replace("qkv", f"{part}_proj")
            ready[key_of] = rows
    return ready


@pytest.mark.parametrize(
    "prefix", ["", pytest.param("model.", marks=pytest.mark.slow)], ids=["all", "decoder"]
)
@pytest.mark.parametrize("name", CONFIGS)
def test_conversions_are_read(name: str, prefix: str, tmp_path: Path) -> None:
    """Conversions are plain or packed, and a packed one may have a plain encoder."""
    tokens, media = cases(name)[DAILY]
    codes, plain = packed(random_weights(CONFIGS[name]), prefix)
    models = [
        opened(tmp_path / str(number), CONFIGS[name], weights).model
        for number, weights in enumerate((plain, converted(name, plain), converted(name, codes)))
    ]
    ours, other, narrow = (solo_logits(model, tokens, media) for model in models)
    assert mx.array_equal(ours, other)
    assert_near(narrow, ours)


def test_a_file_without_the_encoder_is_served_as_text(tmp_path: Path) -> None:
    config = CONFIGS["youtu_vl"]
    weights = random_weights(config)
    text = {key: array for key, array in weights.items() if not key.startswith("visual.")}
    whole = opened(tmp_path / "whole", config, weights).model
    part = opened(tmp_path / "part", config, text).model
    assert not part.encoders
    assert mx.array_equal(solo_logits(part, [3, 4]), solo_logits(whole, [3, 4]))


@pytest.mark.parametrize(
    ("name", "changes", "word"),
    [
        ("lfm2_vl", {"text_config": {"model_type": "llama"}}, "text_config.model_type = 'llama'"),
        ("lfm2_vl", {"vision_feature_layer": -2}, "vision_feature_layer = -2"),
        ("lfm2_vl", {"vision_config": {"model_type": "pixtral"}}, "vision_config.model_type"),
        ("lfm2_vl", {"projector_hidden_act": "mish"}, "projector_hidden_act"),
        ("lfm3_vl", {"vision_config": {"conv_kernel_size": 4}}, "conv_kernel_size % 2 = 0"),
        ("mistral3", {"vision_feature_layer": -2}, "vision_feature_layer = -2"),
        ("mistral3", {"vision_config": {"model_type": "clip"}}, "vision_config.model_type"),
        ("mistral3", {"vision_config": {"head_dim": 8}}, "vision_config.head_dim = 8"),
        ("lfm3_vl", {"vision_config": {"num_key_value_heads": 3}}, "cannot share 3"),
        ("lfm3_vl", {"vision_config": {"layer_types": ["conv"]}}, "1 layer_types for 5 layers"),
        ("minicpmv4_6", {"downsample_mode": "8x"}, "downsample_mode = '8x'"),
        ("minicpmv4_6", {"merger_times": 2}, "merger_times = 2"),
        ("minicpmv4_6", {"merge_kernel_size": [3, 3]}, "merge_kernel_size"),
        ("minicpmv4_6", {"insert_layer_id": 3}, "insert_layer_id = 3 .* of 3 layers"),
        ("minicpmv4_6", {"vision_config": {"window_kernel_size": [1, 2]}}, "window_kernel_size"),
        ("minicpmv4_6", {"text_config": {"model_type": "llama"}}, "text_config.model_type"),
    ],
)
def test_what_is_not_computed_is_refused(name: str, changes: dict[str, Any], word: str) -> None:
    parts = {
        key: CONFIGS[name][key] | each if isinstance(each, dict) else each
        for key, each in changes.items()
    }
    with pytest.raises(ModelError, match=word):
        build(CONFIGS[name] | parts)


def test_text_of_lfm3_vl_alone_is_served(tmp_path: Path) -> None:
    config = {key: each for key, each in CONFIGS["lfm3_vl"].items() if key != "vision_config"}
    assert not opened(tmp_path / "model", config, random_weights(config)).model.encoders
