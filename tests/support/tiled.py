"""A small configuration or more of each family that sees tiles, and pictures for it."""

from __future__ import annotations

from typing import Any

from quire.core.media import MediaItem
from quire.media.processors.llava import Grids
from tests.support.families import CONFIGS as DESCRIBED
from tests.support.photographs import random_patches
from tests.support.seeing import Prompt, prompt
from tests.support.tiny_models import FULL, IMAGE, SLIDING, VIDEO, VOCABULARY

TILE, PATCH = 8, 4
"""Pixels on the side of a tile and of a patch; four patches become a row."""
TILE_BYTES = 3 * TILE**2

_TEXT: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": True,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_TOWER: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "image_size": TILE,
    "patch_size": PATCH,
}
_CLIP = _TOWER | {"model_type": "clip_vision_model", "hidden_act": "quick_gelu"}
_SIGLIP = _TOWER | {"model_type": "siglip_vision_model", "vision_use_head": False}
_INTERNVIT = _TOWER | {
    "model_type": "internvl_vision",
    "image_size": [TILE, TILE],
    "patch_size": [PATCH, PATCH],
}
_LLAMA = _TEXT | {"model_type": "llama", "hidden_act": "silu", "tie_word_embeddings": False}
_QWEN2 = _LLAMA | {"model_type": "qwen2", "use_sliding_window": False}
_SMALL_TILE = {"image_size": TILE, "patch_size": TILE}
_GRIDS = [[8 * down, 8 * across] for down in range(1, 5) for across in range(1, 5)]


CONFIGS: dict[str, dict[str, Any]] = {
    "gemma3": {
        "model_type": "gemma3",
        "text_config": _TEXT
        | {
            "model_type": "gemma3_text",
            "layer_types": [SLIDING, FULL],
            "sliding_window": 32,
            "query_pre_attn_scalar": 16,
            "hidden_activation": "gelu_pytorch_tanh",
        },
        "vision_config": _SIGLIP,
        "mm_tokens_per_image": 1,
        "image_token_index": IMAGE,
        "boi_token_index": 254,
        "eoi_token_index": 253,
        "eos_token_id": 1,
    },
    "llava": {
        "model_type": "llava",
        "text_config": _LLAMA,
        "vision_config": _CLIP | _SMALL_TILE | {"num_hidden_layers": 3},
        "image_token_index": IMAGE,
        "vision_feature_layer": [-2, 1],
        "tie_word_embeddings": False,
    },
    "llava_next": {
        "model_type": "llava_next",
        "text_config": _LLAMA | {"model_type": "mistral", "sliding_window": None},
        "vision_config": _CLIP,
        "image_token_index": IMAGE,
        "image_grid_pinpoints": [[8, 16], [16, 8], [16, 16], [24, 8], [8, 24]],
        "tie_word_embeddings": False,
    },
    "llava_onevision": {
        "model_type": "llava_onevision",
        "text_config": _QWEN2,
        "vision_config": _SIGLIP,
        "image_token_index": IMAGE,
        "video_token_index": VIDEO,
        "image_grid_pinpoints": _GRIDS,
        "vision_aspect_ratio": "anyres_max_4",
        "vision_feature_select_strategy": "full",
        "vision_feature_layer": -1,
        "tie_word_embeddings": False,
    },
    "deepseek_vl": {
        "model_type": "deepseek_vl",
        "text_config": _LLAMA,
        "vision_config": _SIGLIP | _SMALL_TILE,
        "image_token_id": IMAGE,
        "tie_word_embeddings": False,
    },
    "internvl": {
        "model_type": "internvl",
        "text_config": _QWEN2,
        "vision_config": _INTERNVIT,
        "image_token_id": IMAGE,
        "image_seq_length": 1,
        "tie_word_embeddings": False,
    },
    "internvl-norms": {
        "model_type": "internvl",
        "text_config": _QWEN2 | {"model_type": "qwen3"},
        "vision_config": _INTERNVIT
        | {
            "use_qk_norm": True,
            "attention_bias": True,
            "norm_type": "rms_norm",
            "use_mean_pooling": False,
        },
        "vision_feature_layer": -2,
        "image_token_id": IMAGE,
        "tie_word_embeddings": False,
    },
    "idefics3": {
        "model_type": "idefics3",
        "text_config": _LLAMA,
        "vision_config": _TOWER | {"hidden_act": "gelu_pytorch_tanh"},
        "image_token_id": IMAGE,
        "scale_factor": 2,
        "tie_word_embeddings": False,
    },
    "smolvlm": {
        "model_type": "smolvlm",
        "text_config": _LLAMA,
        "vision_config": _TOWER | {"model_type": "smolvlm_vision"},
        "image_token_id": IMAGE,
        "scale_factor": 2,
        "tie_word_embeddings": True,
    },
    "aya_vision": {
        "model_type": "aya_vision",
        "text_config": _TEXT
        | {
            "model_type": "cohere2",
            "layer_types": [SLIDING, FULL],
            "sliding_window": 32,
            "hidden_act": "silu",
            "logit_scale": 1.0,  # of another, transformers' Aya takes no notice; Cohere's do
        },
        "vision_config": _SIGLIP,
        "image_token_index": IMAGE,
        "alignment_intermediate_size": 96,
    },
}
CONFIGS["got_ocr2"] = {
    "model_type": "got_ocr2",
    "text_config": _QWEN2 | {"tie_word_embeddings": True},
    "vision_config": {
        "model_type": "got_ocr2_vision",
        "hidden_size": 48,
        "mlp_dim": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 3,
        "image_size": TILE,
        "patch_size": TILE // 4,
        "window_size": 3,
        "global_attn_indexes": [1],
        "output_channels": 16,
    },
    "image_token_index": IMAGE,
    "tie_word_embeddings": True,
}
CONFIGS["llama4"] = {
    "model_type": "llama4",
    "text_config": DESCRIBED["llama4_text"],
    "vision_config": _TOWER
    | {
        "model_type": "llama4_vision_model",
        "intermediate_size": 4 * 48,
        "projector_input_dim": 56,
        "projector_output_dim": 56,
        "vision_output_dim": 56,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    "image_token_index": IMAGE,
}
CONFIGS["cohere2_vision"] = CONFIGS["aya_vision"] | {
    "model_type": "cohere2_vision",
    "image_token_id": IMAGE,
}
del CONFIGS["cohere2_vision"]["image_token_index"]

CONFIGS["llava_next-granite"] = CONFIGS["llava_next"] | {
    # Of another scale of logits, transformers' LLaVA takes no notice; mlx-vlm does.
    "text_config": DESCRIBED["granite"] | {"logits_scaling": 1.0},
    "vision_config": _SIGLIP | {"num_hidden_layers": 3},
    "vision_feature_layer": [-3, -1],
    "vision_feature_select_strategy": "full",
}

WHOLE = ("gemma3",)
"""Families in which rows of a picture see each other."""


OTHER_DECODERS: dict[str, dict[str, Any]] = {
    f"internvl-{name}": CONFIGS["internvl"] | {"text_config": DESCRIBED[name]}
    for name in ("phi3", "gpt_oss")
}
"""InternVL's configurations with decoders other than those of `CONFIGS`."""


def tiles(seed: int, count: int, *, whole: bool) -> MediaItem:
    """Return a picture of so many tiles, each of random colours around one of its own."""
    features = random_patches(seed, count, TILE)
    return MediaItem.of("image", features, (count,), count, bidirectional=whole)


IN_GRIDS = ("llava_next", "llava_next-granite", "llava_onevision")
"""Families in which a picture's tiles are in a grid."""

SIZES = ((9, 30), (20, 7), (40, 40), (16, 16), (31, 33), (90, 11), (5, 5))
"""Height and width of pictures in pixels, one for each seed."""


def in_grid(name: str, seed: int) -> MediaItem:
    """Return a picture of random colours for a model with grids."""
    config = CONFIGS[name]
    most = 4 if name == "llava_onevision" else None
    sizes = tuple((down, across) for down, across in config["image_grid_pinpoints"])
    grids = Grids(sizes, TILE, TILE // PATCH, most)
    height, width = SIZES[seed - 1]
    shape = grids.shape(height, width)
    features = tiles(seed, 1 + shape[0] * shape[1], whole=False).features
    rows = grids.rows(height, width)
    return MediaItem.of("image", features, shape, rows, bidirectional=False)


def film(seed: int, frames: int) -> MediaItem:
    """Return a video of so many frames for LLaVA-OneVision, each of which becomes one row."""
    features = tiles(seed, frames, whole=False).features
    return MediaItem.of("video", features, (frames,), frames + 1, bidirectional=False)


def cases(name: str) -> dict[str, Prompt]:
    """Return prompts for a family, each with pictures of several tiles."""
    whole = name in WHOLE

    def shown(seed: int, count: int) -> MediaItem:
        return in_grid(name, seed) if name in IN_GRIDS else tiles(seed, count, whole=whole)

    return {
        "text alone": prompt(40),
        "a picture": prompt(shown(1, 9), 5),
        "two of different sizes": prompt(3, shown(2, 4), shown(3, 15), 8),
        "between texts": prompt(20, shown(4, 6), 20),
        "after long text": prompt(150, shown(5, 16), 4),
        "in a second turn": prompt(9, shown(6, 9), 30, shown(7, 12), 7),
    }
