"""Small multimodal models in whole folders: weights, tokenizer, template, processors' settings."""

from __future__ import annotations

import json
from collections.abc import Mapping
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.support.crossing import CONFIG as CROSSING
from tests.support.crossing import PATCH as CROSSED_PATCH
from tests.support.crossing import SIDE
from tests.support.families import gemma3n_seeing_config
from tests.support.seeing import BEGIN, BEGIN_AUDIO, BINS, CONFIGS, END, PATCH
from tests.support.siglip import CONFIGS as SIGLIP
from tests.support.tiny_models import AUDIO, END_AUDIO, IMAGE, VIDEO, write_model
from tests.support.tiny_models import VOCABULARY as OWN_VOCABULARY
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
"""Of the small configurations' ids, the tokens that have other ids in a whole folder."""
MEDIA_TOKENS = tuple(_MARKS[each] for each in (IMAGE, VIDEO, AUDIO))
"""Of which a file's rows have one each."""
_ENDS = {0: "<|pad|>", 1: "<|im_end|>", 2: "<|im_start|>"}
_TEMPLATE = """\
{%- for message in messages -%}
{{ '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string -%}{{ message.content }}{%- else -%}
{%- for part in message.content -%}
{%- if part.type == 'text' -%}{{ part.text }}
{%- elif part.type == 'image' -%}{{ 'PICTURE' }}
{%- elif part.type == 'video' -%}{{ '<|vision_start|><|video_pad|><|vision_end|>' }}
{%- elif part.type == 'audio' -%}{{ '<|audio_start|><|audio_pad|><|audio_end|>' }}
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
        picture: what the template writes for one.
    """

    config: dict[str, Any]
    files: Mapping[str, Any]
    rows: Mapping[str, int]
    picture: str = "<|vision_start|><|image_pad|><|vision_end|>"

    def write(self, folder: Path) -> Path:
        """The folder, which is made."""
        backend = byte_level()
        texts = [*_MARKS.values(), *_ENDS.values()]
        backend.add_special_tokens(texts)
        ids = {number: backend.token_to_id(text) for number, text in (_MARKS | _ENDS).items()}
        config: dict[str, Any] = _with_ids(deepcopy(self.config), ids)
        write_model(folder, config)
        backend.save(str(folder / "tokenizer.json"))
        template = _TEMPLATE.replace("PICTURE", self.picture)
        settings = {"eos_token": _ENDS[1], "chat_template": template}
        for name, value in ({"tokenizer_config.json": settings} | dict(self.files)).items():
            (folder / name).write_text(json.dumps(value))
        return folder


def _with_ids(value: Any, ids: Mapping[int, int]) -> Any:
    """A configuration with the tokenizer's ids."""
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
_CLIP_COLOURS = {
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
}
_GLM = _PATCHES | _CLIP_COLOURS


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
        "<|image_pad|>",
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
        "<|image_pad|>",
    ),
    "paddleocr_vl": Served(
        CONFIGS["paddleocr_vl"], _pictures("PaddleOCRVLImageProcessor", **_PATCHES), {"image": 15}
    ),
    "phi4-siglip": Served(
        SIGLIP["phi4-siglip"] | {"min_num_patches": 4, "max_num_patches": 64},
        _pictures("Siglip2ImageProcessor", image_mean=[0.5] * 3, image_std=[0.5] * 3),
        {"image": 15},
        "<image>",
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
}
