"""Small multimodal models in whole folders: weights, tokenizer, template, processors' settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.support.crossing import CONFIG as CROSSING
from tests.support.crossing import PATCH as CROSSED_PATCH
from tests.support.crossing import SIDE
from tests.support.gemma3n import gemma3n_seeing_config
from tests.support.hunyuan import CONFIG as HUNYUAN
from tests.support.ocr import CONFIGS as OCR
from tests.support.seeing import BEGIN, BEGIN_AUDIO, BINS, CONFIGS, END, PATCH
from tests.support.siglip import CONFIGS as SIGLIP
from tests.support.tiled import CONFIGS as TILED
from tests.support.tiled import TILE
from tests.support.tiny_models import AUDIO, END_AUDIO, IMAGE, VIDEO, write_model
from tests.support.tiny_models import VOCABULARY as OWN_VOCABULARY
from tests.support.unified import SAMPLES, unified_config
from tests.text.made import byte_level

VOCABULARY = 512
_MARKS = {
    IMAGE: "<|image_pad|>",
    BEGIN: "<|vision_start|>",
    END: "<|vision_end|>",
    VIDEO: "<|video_pad|>",
    AUDIO: "<|audio_pad|>",
    BEGIN_AUDIO: "<|audio_start|>",
    END_AUDIO: "<|audio_end|>",
}
"""Marks of media by their ids in the small configurations; a whole folder has other ids."""
MEDIA_TOKENS = tuple(_MARKS[each] for each in (IMAGE, VIDEO, AUDIO))
"""Tokens that stand for a file's rows, one for each row."""
_ENDS = {0: "<|pad|>", 1: "<|im_end|>", 2: "<|im_start|>"}
_PLACES = {
    "image": "<|vision_start|><|image_pad|><|vision_end|>",
    "video": "<|vision_start|><|video_pad|><|vision_end|>",
    "audio": "<|audio_start|><|audio_pad|><|audio_end|>",
}
_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string -%}{{ message.content }}{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}{{ part.text }}
{%- elif part.type == 'image' -%}{{ 'IMAGE' }}
{%- elif part.type == 'video' -%}{{ 'VIDEO' }}
{%- elif part.type == 'audio' -%}{{ 'AUDIO' }}
{%- endif -%}{%- endfor -%}{%- endif -%}{{ '<|im_end|>\\n' }}
{%- endfor -%}
{%- if add_generation_prompt -%}{{ '<|im_start|>assistant\\n' }}{%- endif -%}
"""


@dataclass(frozen=True)
class Served:
    """A family's folder.

    Attributes:
        config: a small one, with the ids of `tiny_models`.
        files: beside it, by name.
        rows: of a prompt that each kind's file of the tests takes.
        marks: what the template writes for a kind, where it is not as Qwen's.
    """

    config: dict[str, Any]
    files: Mapping[str, Any]
    rows: Mapping[str, int]
    marks: Mapping[str, str] = field(default_factory=dict)

    def write(self, folder: Path) -> Path:
        """Write the folder, and return it."""
        backend = byte_level()
        texts = [*_MARKS.values(), *_ENDS.values()]
        backend.add_special_tokens(texts)
        ids = {number: backend.token_to_id(text) for number, text in (_MARKS | _ENDS).items()}
        config: dict[str, Any] = _with_ids(deepcopy(self.config), ids)
        write_model(folder, config)
        backend.save(str(folder / "tokenizer.json"))
        template = _TEMPLATE
        for kind, mark in (_PLACES | dict(self.marks)).items():
            template = template.replace(kind.upper(), mark)
        settings = {"eos_token": _ENDS[1], "chat_template": template}
        for name, value in ({"tokenizer_config.json": settings} | dict(self.files)).items():
            (folder / name).write_text(json.dumps(value))
        return folder


def _with_ids(value: Any, ids: Mapping[int, int]) -> Any:
    """Return a configuration with the tokenizer's ids."""
    if not isinstance(value, dict):
        return value
    found = {}
    for key, each in value.items():
        named = key.endswith(("token_id", "token_index")) and each in ids
        found[key] = ids[each] if named else _with_ids(each, ids)
    whole = found.get("vocab_size") == OWN_VOCABULARY
    return found | ({"vocab_size": VOCABULARY} if whole else {})


_PATCHES = {
    "patch_size": PATCH,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "min_pixels": 8 * 8,
    "max_pixels": 64 * 64,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
_OMNI = {
    "image_processor_type": "Qwen2VLImageProcessor",
    **_PATCHES,
    "feature_extractor_type": "WhisperFeatureExtractor",
    "feature_size": BINS,
    "sampling_rate": 16_000,
    "n_fft": 400,
    "hop_length": 160,
    "dither": 0.0,
}

_GEMMA3N = gemma3n_seeing_config()
_GEMMA3N |= {"image_token_id": IMAGE, "audio_token_id": AUDIO}
_GEMMA3N["vision_config"] |= {"vocab_offset": VOCABULARY - 16}
_GEMMA3N["audio_config"] |= {"vocab_offset": VOCABULARY - 8}
_EARS = {"feature_extractor_type": "Gemma3nAudioFeatureExtractor", "feature_size": 16}
_EYES = {"image_processor_type": "SiglipImageProcessorFast", "size": {"height": 128, "width": 128}}
_SQUARES = {"patch_size": PATCH, "pooling_kernel_size": 2, "max_soft_tokens": 70}
_CLIP_COLOURS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_SLICES = {
    "patch_size": PATCH // 2,
    "scale_resolution": 16,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
_GLM = _PATCHES | _CLIP_COLOURS
_TILES = {"size": {"height": TILE, "width": TILE}, "image_mean": [0.5] * 3, "image_std": [0.5] * 3}
_INTERNVL = {
    "size": {"height": TILE, "width": TILE},
    "image_mean": [0.485, 0.456, 0.406],
    "image_std": [0.229, 0.224, 0.225],
    "min_patches": 1,
    "max_patches": 12,
}


def _pictures(processor: str, **settings: Any) -> dict[str, Any]:
    return {"preprocessor_config.json": {"image_processor_type": processor} | settings}


FAMILIES: dict[str, Served] = {
    "qwen3_omni_moe": Served(
        {"model_type": "qwen3_omni_moe", "thinker_config": CONFIGS["qwen3_omni_moe_thinker"]},
        {"preprocessor_config.json": _OMNI},
        {"image": 15, "audio": 17, "video": 280, "heard video": 280 + 14},
    ),
    "gemma3n": Served(
        _GEMMA3N,
        {"preprocessor_config.json": _EYES | _EARS},
        {"image": 16, "audio": 20},
        {"image": "<|image_pad|>", "audio": "<|audio_pad|>"},
    ),
    "lfm2_vl": Served(
        SIGLIP["lfm2_vl"],
        _pictures(
            "Lfm2VlImageProcessorFast",
            min_image_tokens=4,
            max_image_tokens=8,
            max_pixels_tolerance=1.5,
            tile_size=16,
        ),
        {"image": 6 * 4 + 6},
        {"image": "<|image_pad|>"},
    ),
    "minicpmv4_6": Served(
        SIGLIP["minicpmv4_6"],
        {
            **_pictures("MiniCPMV4_6ImageProcessor", **_SLICES),
            "video_preprocessor_config.json": {
                "video_processor_type": "MiniCPMV4_6VideoProcessor",
                "max_slice_nums": 1,
                **_SLICES,
            },
        },
        {"image": 5 * 4, "video": 4},
        {"image": "<|image_pad|>", "video": "<|video_pad|>"},
    ),
    "deepseek_vl_v2": Served(
        OCR["deepseek_vl_v2"],
        {},
        {"image": 2 * 3 * (3 * 3 + 1) + 4 * (4 + 1) + 1},
        {"image": "<|image_pad|>"},
    ),
    "gemma4_unified": Served(
        unified_config(max_position_embeddings=1024),
        {
            "processor_config.json": {
                "image_processor": {
                    "image_processor_type": "Gemma4UnifiedImageProcessor",
                    **_SQUARES,
                },
                "video_processor": {
                    "video_processor_type": "Gemma4UnifiedVideoProcessor",
                    "num_frames": 2,
                    **_SQUARES,
                },
                "feature_extractor": {
                    "feature_extractor_type": "Gemma4UnifiedAudioFeatureExtractor",
                    "feature_size": SAMPLES,
                    "audio_samples_per_token": SAMPLES,
                    "sampling_rate": 400,
                },
            }
        },
        {"image": 60, "video": 2 * 63, "audio": 26},
        {"image": "<|image_pad|>", "video": "<|video_pad|>", "audio": "<|audio_pad|>"},
    ),
    "lfm3_vl": Served(
        SIGLIP["lfm3_vl"],
        {
            **_pictures("Qwen2VLImageProcessorFast", **_PATCHES),
            "video_preprocessor_config.json": {
                "video_processor_type": "Qwen3VLVideoProcessor",
                **_PATCHES,
            },
        },
        {"image": 15, "video": 24},
    ),
    "mistral3": Served(
        SIGLIP["mistral3"],
        _pictures("PixtralImageProcessorFast", **_CLIP_COLOURS, size={"longest_edge": 40}),
        {"image": 3 * 6},
        {"image": "<|image_pad|>"},
    ),
    "lighton_ocr": Served(
        SIGLIP["lighton_ocr"],
        _pictures(
            "PixtralImageProcessor", **_CLIP_COLOURS, size={"longest_edge": 40}, patch_size=8
        ),
        {"image": 3 * 5},
        {"image": "<|image_pad|>"},
    ),
    "glm4v": Served(
        CONFIGS["glm4v"],
        {
            **_pictures("Glm4vImageProcessor", **_GLM),
            "video_preprocessor_config.json": {
                "video_processor_type": "Glm4vVideoProcessor",
                **_GLM,
            },
        },
        {"image": 15, "video": 24},
    ),
    "mllama": Served(
        CROSSING | {"image_token_index": IMAGE},
        _pictures(
            "MllamaImageProcessor",
            **_CLIP_COLOURS,
            size={"height": CROSSED_PATCH * SIDE, "width": CROSSED_PATCH * SIDE},
            max_image_tiles=4,
            resample=2,
        ),
        {"image": 1},
        {"image": "<|image_pad|>"},
    ),
    "paddleocr_vl": Served(
        CONFIGS["paddleocr_vl"], _pictures("PaddleOCRVLImageProcessor", **_PATCHES), {"image": 15}
    ),
    "phi4-siglip": Served(
        SIGLIP["phi4-siglip"] | {"min_num_patches": 4, "max_num_patches": 64},
        _pictures("Siglip2ImageProcessor", image_mean=[0.5] * 3, image_std=[0.5] * 3),
        {"image": 15},
        {"image": "<image>"},
    ),
    "qwen3_5": Served(
        CONFIGS["qwen3_5"],
        {
            **_pictures("Qwen2VLImageProcessorFast", **_PATCHES),
            "video_preprocessor_config.json": {
                "video_processor_type": "Qwen3VLVideoProcessor",
                **_PATCHES,
            },
        },
        {"image": 15, "video": 24},
    ),
    "qwen2_5_vl": Served(
        CONFIGS["qwen2_5_vl"],
        _pictures("Qwen2_5_VLImageProcessor", **_GLM),
        {"image": 15, "video": 280},
    ),
    "cohere2_vision": Served(
        TILED["cohere2_vision"],
        _pictures("Cohere2VisionImageProcessorFast", **_TILES, patch_size=1),
        {"image": 12 + 1},
        {"image": "<|image_pad|>"},
    ),
    "got_ocr2": Served(
        TILED["got_ocr2"],
        _pictures("GotOcr2ImageProcessor", **_CLIP_COLOURS, size=_TILES["size"]),
        {"image": 1},
        {"image": "<|image_pad|>"},
    ),
    "llama4": Served(
        TILED["llama4"],
        _pictures("Llama4ImageProcessorFast", **_TILES, resample=2, max_patches=4),
        {"image": 4 + 1},
        {"image": "<|image|>"},
    ),
    "exaone4_5": Served(
        CONFIGS["exaone4_5"],
        _pictures("Qwen2VLImageProcessor", **_GLM)
        | {
            "video_preprocessor_config.json": {
                "video_processor_type": "Qwen2VLVideoProcessor",
                **_GLM,
            },
        },
        {"image": 15, "video": 96},
    ),
    "ernie4_5_vl_moe": Served(
        CONFIGS["ernie4_5_vl_moe"],
        {
            **_pictures("Ernie4_5_VL_MoeImageProcessor", **_GLM),
            "video_preprocessor_config.json": {
                "video_processor_type": "Ernie4_5_VL_MoeVideoProcessor",
                "draw_on_frames": False,
                **_GLM,
            },
        },
        {"image": 15, "video": 192},
    ),
    "hunyuan_vl": Served(
        HUNYUAN, _pictures("HunYuanVLImageProcessor", **_GLM), {"image": 15 + 3 + 2}
    ),
    "gemma3": Served(
        TILED["gemma3"],
        _pictures("Gemma3ImageProcessor", **_TILES),
        {"image": 1},
        {"image": "<start_of_image>"},
    ),
    "smolvlm": Served(
        TILED["smolvlm"],
        _pictures(
            "SmolVLMImageProcessor",
            image_mean=[0.5] * 3,
            image_std=[0.5] * 3,
            max_image_size={"longest_edge": TILE},
            resample=1,
            size={"longest_edge": 4 * TILE},
        ),
        {"image": 4 * 3 + 1},
        {"image": "<|image_pad|>"},
    ),
    "internvl": Served(
        TILED["internvl"],
        {
            **_pictures("GotOcr2ImageProcessor", **_INTERNVL),
            "video_preprocessor_config.json": {
                "video_processor_type": "InternVLVideoProcessor",
                **_INTERNVL,
            },
        },
        {"image": 7, "video": 8},
        {"image": "<|image_pad|>", "video": "<video>"},
    ),
    "llava_onevision": Served(
        TILED["llava_onevision"],
        _pictures("LlavaOnevisionImageProcessor", **_TILES),
        {"image": 16, "video": 9},
        {"image": "<|image_pad|>", "video": "<|video_pad|>"},
    ),
    "llava_next": Served(
        TILED["llava_next"],
        _pictures(
            "LlavaNextImageProcessor",
            **_CLIP_COLOURS,
            size={"shortest_edge": TILE},
            crop_size={"height": TILE, "width": TILE},
            image_grid_pinpoints=TILED["llava_next"]["image_grid_pinpoints"],
        ),
        {"image": 14},
        {"image": "<|image_pad|>"},
    ),
    "deepseek_vl": Served(
        TILED["deepseek_vl"],
        _pictures("DeepseekVLImageProcessor", **_TILES),
        {"image": 1},
        {"image": "<|image_pad|>"},
    ),
    "youtu_vl": Served(
        SIGLIP["youtu_vl"],
        _pictures("Siglip2ImageProcessor", image_mean=[0.5] * 3, image_std=[0.5] * 3),
        {"image": 15},
    ),
}
