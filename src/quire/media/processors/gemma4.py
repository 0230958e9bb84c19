"""Gemma 4: pictures of any shape, as many patches as a budget of soft tokens allows.

A picture keeps its aspect ratio, but for the rounding of each side down to whole cells of
`pooling * pooling` patches; a cell becomes one soft token. The pixels equal those of transformers'
`Gemma4ImageProcessorPil`, but stay uint8: the model scales them.
"""

from __future__ import annotations

import math

import numpy as np
import PIL.Image

from quire.core.media import RAW_COLOURS, MediaItem
from quire.media.processors.base import (
    CACHE_BYTES,
    ImageProcessor,
    Placeholders,
    Settings,
    check_pixels,
)
from quire.media.source import Detail, refusal

BUDGETS = (70, 140, 280, 560, 1120)
"""Soft tokens that a picture may be given: those that the model was trained with."""


def fitted(
    height: int, width: int, patch: int, pooling: int, tokens: int
) -> tuple[int, int] | None:
    """The height and width in pixels that a picture is resized to.

    Both are multiples of `patch * pooling`, and there are at most `tokens` such cells. None where
    that leaves nothing of the picture, which no budget of Gemma 4's does.
    """
    cell = patch * pooling
    room = tokens * pooling**2 * patch**2
    factor = math.sqrt(room / (height * width))
    rows = math.floor(factor * height / cell)
    columns = math.floor(factor * width / cell)
    # A strip so thin that its short side would vanish gets one cell there.
    if rows == 0 and columns > 0:
        rows, columns = 1, min(width // height, tokens)
    elif columns == 0 and rows > 0:
        rows, columns = min(height // width, tokens), 1
    if not 0 < rows * columns <= tokens:
        return None
    return rows * cell, columns * cell


class Gemma4ImageProcessor(ImageProcessor):
    """Gemma 4's image processor.

    Args:
        patch: pixels on a patch's side.
        pooling: patches on the side of what becomes one soft token.
        max_soft_tokens: a picture's most; one of `BUDGETS`.
    """

    def __init__(
        self,
        placeholders: Placeholders,
        *,
        patch: int,
        pooling: int,
        max_soft_tokens: int,
        cache_bytes: int = CACHE_BYTES,
    ) -> None:
        super().__init__(placeholders, cache_bytes=cache_bytes)
        self._patch = patch
        self._pooling = pooling
        self._max_soft_tokens = max_soft_tokens

    @classmethod
    def open(cls, settings: Settings, config: Settings) -> Gemma4ImageProcessor:
        """As `processor_config.json` and `config.json` say.

        Raises:
            ModelError: a value is missing, or asks for pixels other than this computes.
        """
        check_pixels(settings, RAW_COLOURS)
        tokens = settings.integer("max_soft_tokens", 280)
        if tokens not in BUDGETS:
            raise settings.error("max_soft_tokens", f"not one of {', '.join(map(str, BUDGETS))}")
        return cls(
            Placeholders(
                token=config.integer("image_token_id", least=0),
                before=(config.integer("boi_token_id", least=0),),
                after=(config.integer("eoi_token_id", least=0),),
            ),
            patch=settings.integer("patch_size", 16),
            pooling=settings.integer("pooling_kernel_size", 3),
            max_soft_tokens=tokens,
        )

    def cut(self, picture: PIL.Image.Image, param: str, detail: Detail) -> MediaItem:
        tokens = BUDGETS[0] if detail == "low" else self._max_soft_tokens
        size = fitted(picture.height, picture.width, self._patch, self._pooling, tokens)
        if size is None:
            shape = f"{picture.width} x {picture.height} pixels"
            raise refusal(param, f"its {shape} cannot be brought to {tokens} soft tokens")
        height, width = size
        if size != (picture.height, picture.width):
            picture = picture.resize((width, height), PIL.Image.Resampling.BICUBIC)
        rows, columns = height // self._patch, width // self._patch
        grid = np.asarray(picture).reshape(rows, self._patch, columns, self._patch, 3)
        pixels = grid.transpose(0, 2, 1, 3, 4).tobytes()  # [rows, columns, patch, patch, 3]
        return MediaItem.of("image", pixels, (rows, columns), rows * columns // self._pooling**2)
