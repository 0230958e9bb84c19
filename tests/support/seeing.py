"""A small configuration or more of each described family that sees, and pictures for it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from quire.core.media import MediaItem, PlacedMedia, sound_rows
from tests.support.photographs import random_patches
from tests.support.tiny_models import AUDIO, IMAGE, VIDEO, qwen3_5_config, qwen3_5_moe_config

BEGIN, END, BEGIN_AUDIO = 254, 253, 250
BINS = 16
PATCH, MERGE = 4, 2

_TEXT: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_TOWER = {
    "depth": 3,
    "num_heads": 4,
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "spatial_merge_size": MERGE,
    "in_channels": 3,
}
_WIDE = {"hidden_size": 48, "intermediate_size": 80, "out_hidden_size": 64}
_ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "first_k_dense_replace": 1,
}
_GLM = {"image_size": 24, "hidden_act": "silu", "attention_bias": False}
_TABLE = {"num_position_embeddings": 36, "hidden_act": "gelu_pytorch_tanh"}


def _rope(section: list[int], **more: Any) -> dict[str, Any]:
    return {
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": 10000.0,
            "mrope_section": section,
            **more,
        }
    }


def _config(model_type: str, text: dict[str, Any], vision: dict[str, Any]) -> dict[str, Any]:
    return {
        "model_type": model_type,
        "text_config": text,
        "vision_config": _TOWER | vision,
        "image_token_id": IMAGE,
        "video_token_id": VIDEO,
        "vision_start_token_id": BEGIN,
        "vision_end_token_id": END,
        "tie_word_embeddings": text["tie_word_embeddings"],
    }


CONFIGS: dict[str, dict[str, Any]] = {
    "qwen2_vl": _config(
        "qwen2_vl",
        _TEXT | _rope([2, 3, 3]) | {"model_type": "qwen2_vl_text"},
        {"embed_dim": 48, "hidden_size": 64, "mlp_ratio": 2},
    ),
    "qwen2_5_vl": _config(
        "qwen2_5_vl",
        _TEXT | _rope([2, 3, 3]) | {"model_type": "qwen2_5_vl_text"},
        # Windows of 2 by 2 squares.
        _WIDE
        | {"window_size": 16, "fullatt_block_indexes": [1], "tokens_per_second": 2}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}},
    ),
    "qwen3_vl": _config(
        "qwen3_vl",
        _TEXT
        | _rope([3, 3, 2], mrope_interleaved=True)
        | {"model_type": "qwen3_vl_text", "head_dim": 16, "tie_word_embeddings": True},
        _WIDE | _TABLE | {"deepstack_visual_indexes": [0, 2]},
    ),
    "qwen3_vl_moe": _config(
        "qwen3_vl_moe",
        _TEXT
        | _EXPERTS
        | _rope([3, 3, 2], mrope_interleaved=True)
        | {"model_type": "qwen3_vl_moe_text", "head_dim": 16, "mlp_only_layers": [1]},
        _WIDE | _TABLE | {"deepstack_visual_indexes": [0, 1]},
    ),
    "glm4v": _config(
        "glm4v",
        _TEXT | _rope([1, 1, 2], partial_rotary_factor=0.5) | {"model_type": "glm4v_text"},
        _WIDE | _GLM,
    ),
    "glm4v_moe": _config(
        "glm4v_moe",
        _TEXT
        | _ROUTED
        | _rope([1, 1, 2], partial_rotary_factor=0.5)
        | {"model_type": "glm4v_moe_text"},
        _WIDE | _GLM,
    ),
    "glm_ocr": _config(
        "glm_ocr",
        _TEXT | _rope([2, 3, 3]) | {"model_type": "glm_ocr_text"},
        _WIDE | _GLM | {"attention_bias": True},
    ),
    "qwen3_5": _config("qwen3_5", qwen3_5_config(), _WIDE | _TABLE),
    "qwen3_5_moe": _config("qwen3_5_moe", qwen3_5_moe_config(), _WIDE | _TABLE),
}


_AUDIO = {
    "num_mel_bins": BINS,
    "encoder_layers": 2,
    "encoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "d_model": 32,
    "output_dim": 64,
    "downsample_hidden_size": 8,
    "n_window_infer": 200,  # two chunks of 100 frames
}
CONFIGS["paddleocr_vl"] = _config(
    "paddleocr_vl",
    _TEXT
    | _rope([2, 3, 3])
    | {"model_type": "paddleocr_vl_text", "head_dim": 16, "rms_norm_eps": 1e-5},
    {
        "hidden_size": 48,
        "intermediate_size": 80,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "image_size": 24,
        "layer_norm_eps": 1e-6,
        "hidden_act": "gelu_pytorch_tanh",
    },
)
CONFIGS["ernie4_5_vl_moe"] = _config(
    "ernie4_5_vl_moe",
    _TEXT
    | _rope([3, 3, 2])
    | {
        "model_type": "ernie4_5_vl_moe_text",
        "rms_norm_eps": 1e-5,
        "moe_num_experts": 8,
        "moe_k": 3,
        "moe_intermediate_size": [64, 32],
        "moe_num_shared_experts": 1,
    },
    {"hidden_size": 48, "intermediate_size": 80, "temporal_merge_size": 2},
) | {
    "image_start_token_id": BEGIN,
    "image_end_token_id": END,
    "video_start_token_id": BEGIN,
    "video_end_token_id": END,
}
CONFIGS["qwen3_omni_moe_thinker"] = _config(
    "qwen3_omni_moe_thinker",
    _TEXT
    | _EXPERTS
    | _rope([3, 3, 2], mrope_interleaved=True)
    | {"model_type": "qwen3_omni_moe_text", "head_dim": 16, "mlp_only_layers": [1]},
    _WIDE | _TABLE | {"deepstack_visual_indexes": [0, 2]},
) | {
    "audio_config": _AUDIO,
    "audio_token_id": AUDIO,
    "audio_start_token_id": BEGIN_AUDIO,
    "position_id_per_seconds": 13,
}


CONFIGS["exaone4_5"] = _config(
    "exaone4_5",
    _TEXT
    | {
        "model_type": "exaone4",
        "rms_norm_eps": 1e-5,
        "sliding_window": 24,
        "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    },
    _WIDE
    | {"window_size": 16, "fullatt_block_indexes": [1], "num_key_value_heads": 2}
    | {"rope_parameters": {"rope_type": "axial", "rope_theta": 5000.0}},
)
CONFIGS["glm46v"] = CONFIGS["glm4v"] | {"model_type": "glm46v"}
CONFIGS["glm46v, experts"] = CONFIGS["glm4v_moe"] | {"model_type": "glm46v"}


def picture(seed: int, rows: int, columns: int) -> MediaItem:
    """Return a picture of so many patches: random colours, in squares that differ from each
    other.
    """
    features = random_patches(seed, rows * columns, PATCH)
    tokens = rows * columns // MERGE**2
    return MediaItem.of("image", features, (rows, columns), tokens, bidirectional=False)


def film(seed: int, moments: int, rows: int, columns: int, step: int = 500_000) -> MediaItem:
    """Return a video of so many moments of two frames each, `step` microseconds apart."""
    rng = np.random.default_rng(seed)
    shape = (moments, rows, columns, step)
    pixels = rng.integers(0, 256, (moments * rows * columns, 2 * PATCH * PATCH * 3), dtype=np.uint8)
    tokens = moments * rows * columns // MERGE**2
    return MediaItem.of("video", pixels.tobytes(), shape, tokens, bidirectional=False)


def speech(seed: int, frames: int) -> MediaItem:
    """Return a random spectrogram: 13 rows for each whole 100 frames."""
    rng = np.random.default_rng(seed)
    features = rng.normal(0.0, 0.6, (frames, BINS)).astype(np.float32)
    tokens = frames // 100 * 13 + -(-(frames % 100) // 8)
    return MediaItem.of("audio", features.tobytes(), features.shape, tokens, bidirectional=False)


def heard_film(seen: MediaItem, heard: MediaItem) -> MediaItem:
    """Return a video with its sound, of which 13 rows make a second."""
    features, shape = seen.features + heard.features, (*seen.shape, *heard.shape)
    tokens = seen.tokens + heard.tokens
    return MediaItem.of("video", features, shape, tokens, bidirectional=False)


def parts_of(item: MediaItem) -> tuple[MediaItem, ...]:
    """Return a video and its sound; of other items the item."""
    if item.kind != "video" or len(item.shape) < 6:
        return (item,)
    (moments, rows, columns, _), (frames, bins) = item.shape[:4], item.shape[4:]
    sounds = frames * bins * 4
    tokens = moments * rows * columns // MERGE**2
    return (
        MediaItem.of("video", item.features[:-sounds], item.shape[:4], tokens),
        MediaItem.of("audio", item.features[-sounds:], item.shape[4:], item.tokens - tokens),
    )


_MARKS = {
    "image": (BEGIN, IMAGE, END),
    "video": (BEGIN, VIDEO, END),
    "audio": (BEGIN_AUDIO, AUDIO, END),
}
Prompt = tuple[list[int], list[PlacedMedia]]
Spelled = tuple[list[int], list[int], list[int]]


def _between_marks(item: MediaItem) -> Spelled:
    start, token, end = _MARKS[item.kind]
    if len(parts := parts_of(item)) == 1:
        return [start], [token] * item.tokens, [end]
    seen, heard = parts
    moments, _, _, step = seen.shape
    rows = sound_rows(moments, seen.tokens // moments, step, 13, heard.tokens)
    return [start, BEGIN_AUDIO], [AUDIO if each else token for each in rows], [END, end]


def prompt(
    *parts: int | MediaItem, spell: Callable[[MediaItem], Spelled] = _between_marks
) -> Prompt:
    """Return tokens and media of so many tokens of text, an item, and so on.

    Args:
        spell: what stands before an item, for it, and behind it.
    """
    tokens: list[int] = []
    media: list[PlacedMedia] = []
    for part in parts:
        at = len(tokens)
        if isinstance(part, int):
            tokens += [(7 * i * i + 3 * i) % 250 for i in range(at, at + part)]
        else:
            before, rows, behind = spell(part)
            media.append(PlacedMedia(at + len(before), part))
            tokens += [*before, *rows, *behind]
    return tokens, media


PROMPTS: dict[str, Prompt] = {
    "text alone": prompt(40),
    "a picture": prompt(picture(1, 6, 10), 5),
    "two of different sizes": prompt(3, picture(2, 4, 4), picture(3, 10, 6), 8),
    "between texts": prompt(20, picture(4, 2, 12), 20),
    "after long text": prompt(150, picture(5, 8, 8), 4),
    "in a second turn": prompt(9, picture(6, 6, 6), 30, picture(7, 14, 4), 7),
}
