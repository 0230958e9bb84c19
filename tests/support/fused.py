"""A small Falcon-OCR, its weights as others name them, and pictures for it."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from quire.core.media import MediaItem, PlacedMedia
from tests.support.photographs import random_patches
from tests.support.seeing import PATCH, Prompt
from tests.support.tiny_models import IMAGE, random_weights

END, FIRST = 230, 244
AROUND = 5

CONFIG: dict[str, Any] = {
    "model_type": "falcon_ocr",
    "dim": 64,
    "n_layers": 2,
    "n_heads": 4,
    "head_dim": 32,
    "n_kv_heads": 2,
    "vocab_size": 256,
    "ffn_dim": 96,
    "norm_eps": 1e-5,
    "max_seq_len": 1024,
    "rope_theta": 10000,
    "channel_size": 3,
    "spatial_patch_size": PATCH,
    "temporal_patch_size": 1,
    "eos_id": 11,
    "img_id": IMAGE,
    "image_cls_token_id": FIRST,
    "image_reg_1_token_id": 245,
    "image_reg_2_token_id": 246,
    "image_reg_3_token_id": 247,
    "image_reg_4_token_id": 248,
    "img_end_id": END,
}
CONVERTED = CONFIG


def shown(seed: int, lines: int, columns: int) -> MediaItem:
    """Return a picture of so many patches, of random colours around one of each."""
    features = random_patches(seed, lines * columns, PATCH)
    return MediaItem.of("image", features, (lines, columns), AROUND + lines * columns)


def prompt(*parts: int | MediaItem) -> Prompt:
    """Return tokens and media of so many tokens of text, a picture, and so on."""
    tokens: list[int] = []
    media: list[PlacedMedia] = []
    for part in parts:
        at = len(tokens)
        if isinstance(part, int):
            tokens += [(7 * i * i + 3 * i) % 229 for i in range(at, at + part)]
        else:
            media.append(PlacedMedia(at, part))
            tokens += [*[IMAGE] * part.tokens, END]
    return tokens, media


PROMPTS: dict[str, Prompt] = {
    "two of different sizes": prompt(3, shown(2, 4, 4), shown(3, 3, 6), 8),
    "text alone": prompt(40),
    "a picture": prompt(shown(1, 6, 3), 5),
    "between texts": prompt(20, shown(4, 1, 7), 20),
    "after long text": prompt(150, shown(5, 5, 5), 4),
    "in a second turn": prompt(9, shown(6, 4, 2), 30, shown(7, 7, 4), 7),
}


def weights(config: dict[str, Any] = CONFIG) -> dict[str, mx.array]:
    """Return random weights, by this package's names."""
    found = random_weights(config)
    first = found["model.layers.0.self_attn.places"]
    return {key: first if key.endswith("places") else array for key, array in found.items()}


_MODULES = {"self_attn": "attention", "mlp": "feed_forward", "o_proj": "wo", "down_proj": "w2"}


def published(ours: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return the tensors as their publisher names and lays them out."""
    ready = {
        "tok_embeddings.weight": ours["model.embed_tokens.weight"],
        "output.weight": ours["lm_head.weight"],
        "norm.weight": ours["model.norm.weight"],
        "img_projector.weight": ours["img_projector.weight"],
        "freqs_cis_golden": ours["model.layers.0.self_attn.places"],
    }
    for key, array in ours.items():
        if not key.startswith("model.layers.") or key.endswith("places"):
            continue
        *path, module, kind = key.split(".")
        base = ".".join(_MODULES.get(each, each) for each in path[1:])
        if module == "q_proj":
            parts = [ours[key.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            ready[f"{base}.wqkv.{kind}"] = mx.concatenate(parts)
        elif module == "gate_proj":
            pair = mx.stack([array, ours[key.replace("gate_proj", "up_proj")]], axis=1)
            ready[f"{base}.w13.{kind}"] = pair.flatten(0, 1)
        elif module not in ("k_proj", "v_proj", "up_proj"):
            end = f"{_MODULES.get(module, module)}.{kind}"
            ready[f"{base}.{end}"] = array
    return ready


def converted(theirs: dict[str, mx.array]) -> dict[str, mx.array]:
    """Return what a publisher's tensors are in a conversion by mlx-vlm."""
    ready = {}
    for key, array in theirs.items():
        key = key.replace("tok_embeddings", "embed_tokens").replace("feed_forward", "mlp")
        key = key.replace(".attention.", ".self_attn.")
        if ".w13." in key:
            array = mx.concatenate([array[0::2], array[1::2]])
        head = key.replace("output.", "lm_head.")
        ready["language_model." + (head if head != key else f"model.{key}")] = array
    ready["language_model.model.cos_1d"] = ready["language_model.model.sin_1d"] = mx.zeros((4, 4))
    return ready
