"""Moondream 2 and 3: a picture is read as one square, and again as overlapping squares.

The pixels equal those of the publisher's code (github.com/vikhyat/moondream) where that resizes
with Pillow, but stay uint8.
"""

from __future__ import annotations

import math
from typing import Self

import PIL.Image

from quire.core.errors import ModelError
from quire.core.media import EVEN_COLOURS, MediaItem
from quire.core.token_ids import TokenFiles
from quire.core.values import Values
from quire.media.processors.base import Placeholders, WholeImageProcessor
from quire.media.processors.tiles import Tiles, check_room
from quire.media.source import Detail


class MoondreamImageProcessor(WholeImageProcessor):
    """The image processor of Moondream 2 and 3, which only `config.json` describes.

    Args:
        margin: patches on each side of a square that its neighbour shares.
        maximum: the most overlapping squares.
    """

    def __init__(self, placeholders: Placeholders, tiles: Tiles, margin: int, maximum: int) -> None:
        super().__init__(placeholders)
        self._tiles = tiles
        self._margin = margin
        self._maximum = maximum

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `config.json`.

        Raises:
            ModelError: a value is of another type.
        """
        vision = _vision(config)
        size, patch = (
            vision.integer("crop_size", default=378),
            vision.integer("patch_size", default=14),
        )
        lanczos = PIL.Image.Resampling.LANCZOS
        return cls(
            Placeholders(config.integer("bos_token_id", default=0, minimum=0)),
            Tiles(size, patch, lanczos, colours=EVEN_COLOURS),
            vision.integer("overlap_margin", default=4, minimum=0),
            maximum=vision.integer("max_crops", default=12),
        )

    def item(self, picture: PIL.Image.Image, param: str, detail: Detail) -> MediaItem:
        tiles = self._tiles
        rows = 1 + tiles.patches**2
        check_room(param, detail, rows)
        margins = 2 * self._margin * tiles.patch
        step = tiles.size - margins
        height, width = picture.height - margins, picture.width - margins
        down, across = (
            (1, 1) if detail == "low" else grid(height, width, step, maximum=self._maximum)
        )
        whole = tiles.resized(picture, across * step + margins, down * step + margins)
        parts = [
            whole.crop((left, top, left + tiles.size, top + tiles.size))
            for top in range(0, down * step, step)
            for left in range(0, across * step, step)
        ]
        features = tiles.features([tiles.squeezed(picture), *parts])
        return MediaItem.of("image", features, (down, across), tokens=rows)


def grid(height: int, width: int, step: int, maximum: int) -> tuple[int, int]:
    """Return the rows and columns of overlapping squares for a picture of this size in pixels.

    Args:
        step: pixels from one square to the next.
        maximum: the most squares.
    """
    if height <= step or width <= step:
        return 1, 1
    down, across = math.ceil(height / step), math.ceil(width / step)
    if down * across > maximum:
        share = math.sqrt(maximum / (down * across))
        return max(1, math.floor(down * share)), max(1, math.floor(across * share))
    down = max(down, math.floor(math.sqrt(maximum * height / width)))
    across = max(across, math.floor(math.sqrt(maximum * width / height)))
    if down * across > maximum:
        if across > down:
            across = maximum // down
        else:
            down = maximum // across
    return max(1, down), max(1, across)


def _vision(config: Values) -> Values:
    """Return the encoder's part of the configuration, under any of its published names; empty if
    there is none.
    """
    found = config.within("config").nested("vision_config", "vision", needed=False)
    size = found.value("enc_patch_size")
    return found if size is None else found.like(found.values | {"patch_size": size})


def open_moondream2(settings: Values, config: Values) -> MoondreamImageProcessor:
    """Open the processor of Moondream 2, which was published beside a tokenizer that is not its
    own.

    Raises:
        ModelError: the folder has that tokenizer; or see `MoondreamImageProcessor.open`.
    """
    folder = config.file.parent
    if TokenFiles(folder).id_of("<|md_reserved_0|>", ordinary=True) is None:
        raise ModelError(
            f"{folder}: the tokenizer lacks '<|md_reserved_0|>': replace tokenizer.json by that of "
            "moondream/starmie-v1, which the model was trained with"
        )
    return MoondreamImageProcessor.open(settings, config)
