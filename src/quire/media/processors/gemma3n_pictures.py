"""Gemma 3n: each picture is resized to one square.

The pixels equal those of transformers' `SiglipImageProcessorPil`, but stay uint8.
"""

from __future__ import annotations

from typing import Self

import numpy as np
import PIL.Image

from quire.core.media import RAW_COLOURS, MediaItem
from quire.core.values import Values
from quire.media.parts import MediaPart, Parts
from quire.media.processors.base import BILINEAR, ImageProcessor, Placeholders, check_pixels
from quire.media.processors.llava import LlavaImageProcessor
from quire.media.processors.tiles import check_room
from quire.media.source import Detail


class Gemma3nImageProcessor(ImageProcessor):
    """The image processor of Gemma 3n, a form of SigLIP's.

    Args:
        height, width: size in pixels to which all pictures are resized.
        rows: rows of a picture.
    """

    def __init__(self, placeholders: Placeholders, height: int, width: int, rows: int) -> None:
        super().__init__(placeholders)
        self._height, self._width = height, width
        self._rows = rows

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `preprocessor_config.json` and `config.json`.

        Raises:
            ModelError: a value asks for different pixels than this class computes.
        """
        check_pixels(settings, RAW_COLOURS, BILINEAR)
        size = settings.within("size")
        return cls(
            Placeholders(config.integer("image_token_id", default=262_145, minimum=0)),
            size.integer("height", default=768),
            size.integer("width", default=768),
            rows=config.integer("vision_soft_tokens_per_image", default=256),
        )

    def preprocess(self, picture: PIL.Image.Image, param: str, detail: Detail) -> Parts:
        check_room(param, detail, self._rows)
        if picture.size != (self._width, self._height):
            picture = picture.resize((self._width, self._height), PIL.Image.Resampling.BILINEAR)
        pixels, shape = np.asarray(picture).tobytes(), (self._height, self._width)
        item = MediaItem.of("image", pixels, shape, tokens=self._rows, bidirectional=False)
        return (MediaPart(item, "\n\n<start_of_image>", "<end_of_image>\n\n"),)


def open_siglip(settings: Values, config: Values) -> ImageProcessor:
    """Open the processor of a model whose settings name SigLIP's: Gemma 3n or LLaVA 1.5.

    Raises:
        ModelError: see `Gemma3nImageProcessor.open`.
    """
    known = config.value("model_type") == "gemma3n"
    kind = Gemma3nImageProcessor if known else LlavaImageProcessor
    return kind.open(settings, config)
