"""DeepSeek-VL: a picture keeps its shape within one square tile, on grey.

The pixels equal those of transformers' `DeepseekVLImageProcessorPil`, but stay uint8.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Self

import PIL.Image

from quire.core.media import CLIP_COLOURS, Colours, MediaItem
from quire.media.processors.base import Placeholders, WholeImageProcessor, check_pixels
from quire.media.processors.tiles import Tiles, check_room, part, side_of
from quire.media.settings import Settings
from quire.media.source import Detail


def on_square(
    picture: PIL.Image.Image, size: int, least: int, colours: Colours, filter: PIL.Image.Resampling
) -> PIL.Image.Image:
    """A picture whose longer side becomes `size`, in the middle of a square of the mean colour.

    Args:
        least: what neither side falls below.
    """
    scale = size / max(picture.size)
    width, height = (max(round(side * scale), least) for side in picture.size)
    if (width, height) != picture.size:
        picture = picture.resize((width, height), filter)
    longer = max(width, height)
    if width == height:
        return picture
    background = tuple(int(part * 255) for part in colours.mean)
    square = PIL.Image.new("RGB", (longer, longer), background)
    square.paste(picture, ((longer - width) // 2, (longer - height) // 2))
    return square


class DeepseekImageProcessor(WholeImageProcessor):
    """The image processor of DeepSeek-VL.

    Args:
        least: pixels that neither side of a picture falls below.
    """

    def __init__(self, placeholders: Placeholders, tiles: Tiles, least: int) -> None:
        super().__init__(placeholders)
        self._tiles = tiles
        self._least = least

    @classmethod
    def open(cls, settings: Settings, config: Settings) -> Self:
        """As `preprocessor_config.json` and `config.json` say.

        Raises:
            ModelError: a value asks for pixels other than this computes.
        """
        token = config.integer("image_token_id", 100_015, least=0)
        least = settings.integer("min_size", 14)
        return cls(Placeholders(token), Tiles.open(settings, config, 224, 16), least)

    def cut(self, picture: PIL.Image.Image, param: str, detail: Detail) -> MediaItem:
        tiles = self._tiles
        rows = tiles.patches**2
        check_room(param, detail, rows)
        tile = on_square(picture, tiles.size, self._least, tiles.colours, tiles.filter)
        return tiles.item("image", [tile], rows)


class HybridImageProcessor(WholeImageProcessor):
    """The image processor of DeepSeek-VL 7B: a picture large, and that one made small.

    Args:
        large, small: tiles of the two encoders.
        least: pixels that neither side of a picture falls below.
    """

    def __init__(self, placeholders: Placeholders, large: Tiles, small: Tiles, least: int) -> None:
        super().__init__(placeholders)
        self._large, self._small = large, small
        self._least = least

    @classmethod
    def open(cls, settings: Settings, config: Settings) -> Self:
        """As `preprocessor_config.json` and `config.json` say.

        Raises:
            ModelError: a value asks for pixels other than this computes.
        """
        small = Tiles.open(settings, config, 224, 16)
        vision = part(config, "high_res_vision_config")
        large = replace(
            small,
            size=side_of(vision, "image_size", 1024),
            patch=side_of(vision, "patch_size", 16),
            colours=CLIP_COLOURS,
        )
        named = ("resample", "image_mean", "image_std")
        own = {key: settings.values.get(f"high_res_{key}") for key in named}
        given = {key: value for key, value in own.items() if value is not None}
        high = Settings(settings.path, f"{settings.prefix}high_res_", given)
        check_pixels(high, CLIP_COLOURS, settings.integer("resample", 3))
        large.check(settings, "high_res_size")
        token = config.integer("image_token_id", 100_015, least=0)
        return cls(Placeholders(token), large, small, settings.integer("min_size", 14))

    def cut(self, picture: PIL.Image.Image, param: str, detail: Detail) -> MediaItem:
        rows = self._small.patches**2
        check_room(param, detail, rows)
        tiles = self._large
        square = on_square(picture, tiles.size, self._least, tiles.colours, tiles.filter)
        features = tiles.features([square]) + self._small.features([self._small.squeezed(square)])
        return MediaItem.of("image", features, (1,), rows, bidirectional=False)
