"""InternVL, DeepSeek-VL and ERNIE 4.5 VL as their authors publish them, with their own keys.

The configurations of InternVL and DeepSeek-VL do not name the image token; it is read from the
tokenizer's files.
"""

from __future__ import annotations

from dataclasses import replace

import PIL.Image

from quire.core.errors import ModelError
from quire.core.media import CLIP_COLOURS
from quire.core.token_ids import TokenFiles
from quire.core.values import Values
from quire.media.processors.base import ImageProcessor, Placeholders
from quire.media.processors.deepseek import (
    DeepseekImageProcessor,
    HybridImageProcessor,
    Sides,
    large_like,
)
from quire.media.processors.dynamic import Cutting, InternVLImageProcessor, internvl_square
from quire.media.processors.qwen import ErnieImageProcessor
from quire.media.processors.tiles import Tiles


def open_internvl_chat(settings: Values, config: Values) -> ImageProcessor:
    """Open InternVL's processor, which cuts pictures as OpenGVLab's model card does.

    Raises:
        ModelError: a value asks for different pixels than this computes, or the image token is
            missing.
    """
    minimum, maximum = (
        config.integer("min_dynamic_patch", default=1),
        config.integer("max_dynamic_patch", default=12),
    )
    if not config.values.get("dynamic_image_size", True):
        minimum = maximum = 1
    if maximum > 1:
        config.only("use_thumbnail", True)
    values = settings.values | {"min_patches": minimum, "max_patches": maximum}
    cutting = Cutting.open(settings.like(values), config, internvl_square(config))
    return InternVLImageProcessor(Placeholders(_token(config, "<IMG_CONTEXT>")), cutting)


def open_multi_modality(settings: Values, config: Values) -> ImageProcessor:
    """Open the processor of DeepSeek-VL or Janus.

    Raises:
        ModelError: a value asks for different pixels than this computes, or the image token is
            missing.
    """
    placeholders = Placeholders(_token(config, "<image_placeholder>"))
    sides = Sides.open(settings, cut=True)
    if not config.has("high_res_vision_config"):
        tiles = Tiles.open(settings, config, 384, patch=16)
        janus = config.has("gen_vision_config")
        words = ("<begin_of_image>", "<end_of_image>") if janus else ("", "")
        return DeepseekImageProcessor(placeholders, tiles, sides, words=words)
    # The encoders scale pixels themselves, and the small picture is made of the large one's.
    settings.neutral({"do_normalize": False, "image_mean": list(CLIP_COLOURS.mean)})
    plain = settings.like({})
    small = replace(Tiles.open(plain, config, 384, patch=16), filter=PIL.Image.Resampling.BILINEAR)
    large = replace(large_like(small, config), filter=PIL.Image.Resampling.BICUBIC)
    large.check(settings, "image_size")
    return HybridImageProcessor(placeholders, large, small, sides=sides)


def open_ernie(settings: Values, config: Values) -> ImageProcessor:
    """Open ERNIE 4.5 VL's processor. Its chat template marks pictures by a text that is not a
    token.

    Raises:
        ModelError: a value asks for different pixels than this class computes.
    """
    processor = ErnieImageProcessor.open(settings, config)
    processor.placeholders = replace(processor.placeholders, mark="<|image@placeholder|>")
    return processor


def _token(config: Values, text: str) -> int:
    """Return the id of an added token, from the tokenizer's files beside `config.json`.

    Raises:
        ModelError: no file has the token.
    """
    folder = config.file.parent
    found = TokenFiles(folder).id_of(text)
    if found is None:
        raise ModelError(f"{folder}: the tokenizer has no token {text!r}, which marks pictures")
    return found
