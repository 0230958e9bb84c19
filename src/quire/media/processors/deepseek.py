"""DeepSeek-VL: a picture keeps its shape within one square tile, on a grey ground.

The pixels equal those of transformers' `DeepseekVLImageProcessorPil`, but stay uint8.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

import PIL.Image

from quire.core.media import CLIP_COLOURS, MediaItem
from quire.core.values import Values
from quire.media.parts import MediaPart, Parts
from quire.media.processors.base import (
    ImageProcessor,
    Placeholders,
    WholeImageProcessor,
    check_pixels,
)
from quire.media.processors.tiles import Tiles, check_room, side_of
from quire.media.source import Detail


@dataclass(frozen=True, slots=True)
class Sides:
    """How the sides of a resized picture are computed.

    Attributes:
        minimum: the least pixels of either side.
        cut: whether fractions of a pixel are truncated, as in DeepSeek's own code, instead of
            rounded.
    """

    minimum: int
    cut: bool = False

    @classmethod
    def open(cls, settings: Values, *, cut: bool = False) -> Self:
        """Read the processor's settings."""
        return cls(settings.integer("min_size", default=14), cut)

    def of(self, picture: PIL.Image.Image, size: int) -> tuple[int, int]:
        """Return the resized width and height, of which the longer is `size`."""
        longer = max(picture.size)
        if self.cut:
            found = [int(side / longer * size) for side in picture.size]
        else:
            found = [round(side * (size / longer)) for side in picture.size]
        return max(found[0], self.minimum), max(found[1], self.minimum)


def on_square(picture: PIL.Image.Image, tiles: Tiles, sides: Sides) -> PIL.Image.Image:
    """Place a picture in the middle of a square of the mean colour, of a tile's size."""
    width, height = sides.of(picture, tiles.size)
    if (width, height) != picture.size:
        picture = picture.resize((width, height), tiles.filter)
    longer = max(width, height)
    if width == height:
        return picture
    background = tuple(int(part * 255) for part in tiles.colours.mean)
    square = PIL.Image.new("RGB", (longer, longer), background)
    square.paste(picture, ((longer - width) // 2, (longer - height) // 2))
    return square


class DeepseekImageProcessor(ImageProcessor):
    """The image processor of DeepSeek-VL.

    Args:
        words: texts before and after a picture.
    """

    def __init__(
        self,
        placeholders: Placeholders,
        tiles: Tiles,
        sides: Sides,
        words: tuple[str, str] = ("", ""),
    ) -> None:
        super().__init__(placeholders)
        self._tiles = tiles
        self._sides = sides
        self._words = words

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `preprocessor_config.json` and `config.json`.

        Raises:
            ModelError: a value asks for different pixels than this class computes.
        """
        token = config.integer("image_token_id", default=100_015, minimum=0)
        return cls(
            Placeholders(token), Tiles.open(settings, config, 224, patch=16), Sides.open(settings)
        )

    def preprocess(self, picture: PIL.Image.Image, param: str, detail: Detail) -> Parts:
        rows = self._tiles.patches**2
        check_room(param, detail, rows)
        tile = on_square(picture, self._tiles, self._sides)
        return (MediaPart(self._tiles.item("image", [tile], rows), *self._words),)


def large_like(small: Tiles, config: Values) -> Tiles:
    """Derive the tiles of the larger encoder from the smaller encoder's and `config.json`."""
    vision = config.nested("high_res_vision_config", needed=False)
    return replace(
        small,
        size=side_of(vision, "image_size", 1024),
        patch=side_of(vision, "patch_size", 16),
        colours=CLIP_COLOURS,
    )


class HybridImageProcessor(WholeImageProcessor):
    """The image processor of DeepSeek-VL 7B: each picture goes to a large and to a small encoder.

    Args:
        large, small: tiles of the two encoders.
    """

    def __init__(
        self, placeholders: Placeholders, large: Tiles, small: Tiles, sides: Sides
    ) -> None:
        super().__init__(placeholders)
        self._large, self._small = large, small
        self._sides = sides

    @classmethod
    def open(cls, settings: Values, config: Values) -> Self:
        """Open the processor described by `preprocessor_config.json` and `config.json`.

        Raises:
            ModelError: a value asks for different pixels than this class computes.
        """
        small = Tiles.open(settings, config, 224, patch=16)
        large = large_like(small, config)
        named = ("resample", "image_mean", "image_std")
        own = {key: settings.values.get(f"high_res_{key}") for key in named}
        given = {key: value for key, value in own.items() if value is not None}
        high = settings.like(given, "high_res_")
        check_pixels(high, CLIP_COLOURS, settings.integer("resample", default=3))
        large.check(settings, "high_res_size")
        token = config.integer("image_token_id", default=100_015, minimum=0)
        return cls(Placeholders(token), large, small, sides=Sides.open(settings))

    def item(self, picture: PIL.Image.Image, param: str, detail: Detail) -> MediaItem:
        rows = self._small.patches**2
        check_room(param, detail, rows)
        square = on_square(picture, self._large, self._sides)
        features = self._large.features([square]) + self._small.features(
            [self._small.squeezed(square)]
        )
        return MediaItem.of("image", features, (1,), tokens=rows, bidirectional=False)
