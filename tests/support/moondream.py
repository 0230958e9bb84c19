"""A small Moondream 3, its weights as others name them, and pictures for it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from quire.core.media import MediaItem, PlacedMedia
from tests.support.photographs import random_patches
from tests.support.seeing import PATCH, Prompt
from tests.support.tiny_models import random_weights

CROP, MARGIN = 20, 1
SIDE = CROP // PATCH
ROWS = 1 + SIDE**2
FIRST = 0

TEXT = {
    "dim": 64,
    "ff_dim": 96,
    "n_layers": 3,
    "n_heads": 2,
    "n_kv_heads": 2,
    "vocab_size": 256,
    "max_context": 1024,
    "prefix_attn": ROWS,
    "moe": {"num_experts": 4, "start_layer": 1, "experts_per_token": 2, "expert_inner_dim": 32},
}
VISION = {
    "enc_dim": 48,
    "enc_patch_size": PATCH,
    "enc_n_layers": 2,
    "enc_ff_dim": 64,
    "enc_n_heads": 3,
    "proj_inner_dim": 64,
    "proj_out_dim": 64,
    "crop_size": CROP,
    "overlap_margin": MARGIN,
}
CONFIG: dict[str, Any] = {"model_type": "moondream3", "config": {"text": TEXT, "vision": VISION}}

CONVERTED: dict[str, Any] = {
    "model_type": "moondream3",
    "text_config": {
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "rope_dim": 16,
        "vocab_size": 256,
        "max_position_embeddings": 1024,
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "moe_start_layer": 1,
        "prefix_attn": ROWS,
    },
    "vision_config": {
        "hidden_size": 48,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "patch_size": PATCH,
        "crop_size": CROP,
        "overlap_margin": MARGIN,
        "proj_inner_dim": 64,
        "proj_out_dim": 64,
        "layer_norm_eps": 1e-5,
    },
}
"""The configuration as mlx-vlm writes it."""


def shown(seed: int, down: int, across: int) -> MediaItem:
    """Return a picture of so many squares that overlap, of random colours around one of each
    patch.
    """
    features = random_patches(seed, (1 + down * across) * SIDE**2, PATCH)
    return MediaItem.of("image", features, (down, across), ROWS)


def prompt(*parts: int | MediaItem) -> Prompt:
    """Return tokens and media of so many tokens of text, a picture, and so on."""
    tokens: list[int] = []
    media: list[PlacedMedia] = []
    for part in parts:
        at = len(tokens)
        if isinstance(part, int):
            tokens += [(7 * i * i + 3 * i) % 229 + 1 for i in range(at, at + part)]
        else:
            media.append(PlacedMedia(at, part))
            tokens += [FIRST] * part.tokens
    return tokens, media


PROMPTS: dict[str, Prompt] = {
    "a picture of two rows": prompt(shown(2, 2, 3), 8),
    "text alone": prompt(40),
    "a small picture": prompt(shown(1, 1, 1), 5),
    "a wide picture": prompt(shown(3, 1, 5), 20),
    "before long text": prompt(shown(4, 4, 3), 150),
    "behind a text": prompt(50, shown(5, 2, 2), 40),
    "before another turn": prompt(shown(6, 2, 1), 90),
}


def weights() -> dict[str, mx.array]:
    """Return random weights by this package's names, with the tensors of a mixture of experts."""
    found = random_weights(CONFIG)
    for name, array in found.items():
        if ".experts." in name and name.endswith(".bias"):
            found[name] = mx.full(array.shape, float(".up_proj." in name))
        elif name.endswith(".bias"):
            found[name] = array - 1.0
    return found


_TEXT_NAMES = (
    ("model.embed_tokens.weight", "wte"),
    ("model.norm.", "post_ln."),
    ("model.layers.", "blocks."),
    ("input_layernorm", "ln"),
    ("self_attn.o_proj", "attn.proj"),
    ("self_attn.q_proj", "attn.qkv"),
    ("self_attn", "attn"),
    ("mlp.gate.", "mlp.router."),
    ("mlp.experts.gate_proj", "mlp.fc1"),
    ("mlp.experts.down_proj", "mlp.fc2"),
    ("mlp.up_proj", "mlp.fc1"),
    ("mlp.down_proj", "mlp.fc2"),
)
_VISION_NAMES = (
    ("visual.vision_tower.embeddings.patch_embedding", "patch_emb"),
    ("visual.vision_tower.embeddings.position_embedding.weight", "pos_emb"),
    ("visual.vision_tower.last_norm", "post_ln"),
    ("visual.vision_tower.layers", "blocks"),
    ("visual.multi_modal_projector.linear_", "proj_mlp.fc"),
    ("layer_norm", "ln"),
    ("self_attn.out_proj", "attn.proj"),
    ("self_attn.q_proj", "attn.qkv"),
    ("mlp.up_proj", "mlp.fc1"),
    ("mlp.down_proj", "mlp.fc2"),
)


def published(ours: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return the tensors as their publisher names and lays them out."""
    ready = {}
    for key, array in ours.items():
        if ".k_proj." in key or ".v_proj." in key or ".experts.up_proj." in key:
            continue
        if ".experts." in key and key.endswith(".bias"):
            continue
        if ".q_proj." in key:
            parts = [ours[key.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            array = mx.concatenate(parts)
        elif ".experts.gate_proj." in key:
            array = mx.concatenate([array, ours[key.replace("gate_proj", "up_proj")]], axis=1)
        elif key.endswith("patch_embedding.weight"):
            array = array.reshape(-1, PATCH, PATCH, 3).moveaxis(-1, 1).flatten(1)
        elif key.endswith("position_embedding.weight"):
            array = array[None]
        seeing = key.startswith("visual.")
        for here, there in _VISION_NAMES if seeing else _TEXT_NAMES:
            key = key.replace(here, there)
        ready[f"model.{'vision' if seeing else 'text'}.{key}"] = array
    ready["model.region.coord_encoder.weight"] = mx.zeros((4, 4))
    return ready


def converted(theirs: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return what a publisher's tensors are in a conversion by mlx-vlm."""
    ready = {}
    for key, array in theirs.items():
        part, _, rest = key.removeprefix("model.").partition(".")
        if part == "vision" and not rest.startswith("proj_mlp"):
            rest = f"encoder.{rest}"
        elif part == "text" and not rest.startswith("lm_head"):
            rest = f"model.{rest}" + ".weight" * (rest == "wte")
        if part != "region":
            ready[f"{part}.{rest}"] = array
    return ready
